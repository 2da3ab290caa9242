"""`python -m experiments.benchmarks.attention --device cpu|cuda`: checks and times every way to compute attention.

One table: each engine at 1, 3, 5 and 21 half-steps, torch's fused attention (SDPA), softmax attention as its formula,
and the published arithmetic, forward and backward, with the error of each engine against the float64 reference and the
peak memory. On CUDA it takes less than four minutes. An engine that does not take a problem says why.
"""

import argparse
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from sinkhorn_attention.reference import sinkhorn_attention_reference

from ..command import finish
from ..errors import RunError
from .cases import CASES, COUNTS, QUICK_CASES, Case, attention
from .results import Row, attention_table, rows_of, write_csv
from .worker import in_new_process

REPEATS = 11
#: Engines in the table, by device. "auto" is what a model gets that names none.
TABLE_ENGINES = {"cpu": ("native", "portable", "streaming"), "cuda": ("portable", "streaming", "triton")}
#: The published arithmetic keeps (T + 1) maps for backward; above this it is left out.
PUBLISHED_BYTES = 3 << 30
PUBLISHED_REPEATS = 5
WIDTH = 170


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table and writes it as CSV. Returns 1 where something failed or an engine is wrong."""
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks.attention", description=__doc__)
    add_options(parser)
    options = parser.parse_args(arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    try:
        rows = run(options, console)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    console.print(f"{options.output / options.device / 'attention.csv'}")
    wrong = [row for row in rows if row.which == "error" and "WRONG" in row.note]
    return 1 if wrong else 0


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that every benchmark has."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default=None, help="default: by device")
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"samples of each variant ({REPEATS})")
    parser.add_argument("--quick", action="store_true", help="one small shape and two samples: shows that it runs")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmarks"), help="folder of the CSV files")


def run(options: argparse.Namespace, console: Console) -> list[Row]:
    """Measures and prints the table; see `main`.

    Raises:
        RunError: for CUDA without a GPU, or a measurement that failed.
    """
    if options.device == "cuda" and not torch.cuda.is_available():
        raise RunError("--device cuda: torch sees no CUDA device here; --device cpu measures this machine's processor")
    console.print(machine(options.device))
    rows: list[Row] = []
    for dtype in dtypes(options):
        tasks = list(plan(options, dtype))
        title = f"attention, {options.device}, {dtype}"
        found = []
        with progress(console) as bar:
            job = bar.add_task(title, total=sum(weight for weight, _, _ in tasks))
            for weight, label, task in tasks:
                bar.update(job, description=f"{title}: {label}")
                found += carry_out(task)
                bar.advance(job, weight)
        rows += found
        console.print(attention_table(found, f"{title} (batch, heads, tokens, width); median and quartiles", "SDPA"))
    write_csv(rows, options.output / options.device / "attention.csv")
    return rows


def dtypes(options: argparse.Namespace) -> list[str]:
    """What is measured: float32 on a CPU, bfloat16 and float32 on a GPU, or the one that was named."""
    if options.dtype is not None:
        return [options.dtype]
    return ["float32"] if options.device == "cpu" else ["bfloat16", "float32"]


def progress(console: Console) -> Progress:
    """A bar with the time that remains, on the error stream of a terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    bar_console = Console(stderr=True) if console.is_terminal else Console(stderr=True, quiet=True)
    return Progress(*columns, TextColumn("left"), TimeRemainingColumn(), console=bar_console)


def machine(device: str) -> str:
    """One line on what measures: processor or GPU, threads, load, versions."""
    if device == "cuda":
        where = torch.cuda.get_device_name()
    else:
        where = f"{processor()}, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}"
    return f"{where}; torch {torch.__version__}, Python {platform.python_version()}"


def processor() -> str:
    """The processor's name, from /proc where there is one."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def plan(options: argparse.Namespace, dtype: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """The measurements in order: how long each takes (in units of its own), what it is, and the task."""
    engines = TABLE_ENGINES[options.device]
    counts = (3,) if options.quick else COUNTS
    common = {"device": options.device, "dtype": dtype}
    for case in QUICK_CASES if options.quick else CASES:
        ours = [f"{engine} T={count}" for engine in engines for count in counts]
        variants = ["sdpa", *ours]
        repeats = 2 if options.quick else options.repeats
        task = {"case": asdict(case), **common}
        yield case.entries * len(variants) * 4, f"{case} time", {**task, "variants": variants, "repeats": repeats}
        published = [f"published T={count}" for count in (counts if options.quick else (5, 21)) if keeps(case, count)]
        # Beside SDPA, each in a process of its own: maps that they allocate disturb the others, and so their ratios.
        yield case.entries * 8, f"{case} softmax", {**task, "variants": ["sdpa", "softmax"], "repeats": repeats}
        for variant in published:
            work = {**task, "variants": ["sdpa", variant], "repeats": min(repeats, PUBLISHED_REPEATS)}
            yield case.entries * 60, f"{case} {variant}", work
        yield case.entries, f"{case} errors", {**task, "errors": ours}
        if options.device == "cuda" or sys.platform == "linux":
            for variant in [*variants, "softmax", *published]:
                yield case.entries, f"{case} memory of {variant}", {**task, "memory": variant}


def keeps(case: Case, count: int) -> bool:
    """Whether the maps that the published arithmetic keeps for backward are few enough to be run."""
    return case.entries * 4 * 2 * (count + 1) <= PUBLISHED_BYTES


def carry_out(task: dict[str, Any]) -> list[Row]:
    """Rows of one measurement."""
    case = Case(**task["case"])
    if "errors" in task:
        return [error_row(case, variant, task["device"], task["dtype"]) for variant in task["errors"]]
    if "memory" in task:
        variant = task["memory"]
        found = in_new_process({"kind": "memory", **task, "variants": [variant]})[variant]
        return [] if isinstance(found, str) else [Row("attention", str(case), variant, "memory", megabytes=found)]
    times = in_new_process({"kind": "time", **task})
    rows = [row for which in times for row in rows_of("attention", str(case), which, times[which], "sdpa")]
    return rows if len(task["variants"]) > 2 else [row for row in rows if row.variant != "sdpa"]


#: Largest error of values and gradients, relative in norm, that an engine is called right with.
RIGHT = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def error_row(case: Case, variant: str, device: str, dtype: str) -> Row:
    """Error of one head's output and gradients against the float64 reference, relative in norm."""
    n_iters = int(variant.rpartition("T=")[2])
    small = Case(1, 1, min(case.n, 512), min(case.m, 512), case.width)
    tokens = small.tokens(device, getattr(torch, dtype))
    query, key, value = exact = [token.detach().double().requires_grad_() for token in tokens]
    try:
        out = attention(variant)(*tokens)
    except NotImplementedError as error:
        return Row("attention", str(case), variant, "error", note=str(error)[:60])
    want = sinkhorn_attention_reference(query, key, value, n_iters, small.width**-0.5)
    gradient = torch.randn(want.shape, generator=torch.Generator().manual_seed(1)).to(want)
    got = [out, *torch.autograd.grad(out, tokens, gradient.to(out.dtype))]
    expected = [want, *torch.autograd.grad(want, exact, gradient)]
    worst = max(float(((one - two).norm() / two.norm()).detach()) for one, two in zip(got, expected, strict=True))
    return Row(
        "attention", str(case), variant, "error", note=f"{worst:.1e}" + ("" if worst <= RIGHT[dtype] else " WRONG")
    )


if __name__ == "__main__":
    finish(main)
