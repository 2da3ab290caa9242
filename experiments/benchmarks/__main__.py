"""`python -m experiments.benchmarks`, which `make bench` runs: every table, as CSV and a figure too."""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from ..command import finish
from ..errors import RunError
from . import attention, counts, estimate, loading
from .cases import CASES, QUICK_CASES, Case
from .results import Row, draw, exponents, plain_table, rows_of, write_csv
from .steps import MODELS, VARIANTS
from .worker import in_new_process

TABLES = ("attention", "growth", "libraries", "comparators", "steps", "oversubscribed", "counts", "estimate", "loading")
#: Those that time no attention, and print and write their own table.
APART = {"counts": counts.run, "estimate": estimate.run, "loading": loading.run}
COMPARATORS = ("softmax", "sinkhorn", "unbalanced_sinkhorn", "l2", "sinkhorn_l2", "sigmoid", "esp", "lot")


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables that were named, all of them by default, and writes CSV files and a figure.

    Returns:
        0, or 1 where a measurement failed.
    """
    parser = argparse.ArgumentParser(prog="python -m experiments.benchmarks", description=__doc__)
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}; all by default")
    attention.add_options(parser)
    options = parser.parse_args(arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else attention.WIDTH)
    names = options.tables or list(TABLES)
    try:
        for name in names:
            if name not in TABLES:
                raise RunError(f"there is no table {name!r}; there are {', '.join(TABLES)}")
        if options.device == "cuda" and set(names) - {"attention", "growth", "comparators", *APART}:
            raise RunError("on CUDA there are attention, growth, comparators, counts, estimate and loading; name them")
        for name in names:
            if name in APART:
                APART[name](options, console)
        timed_names = [name for name in names if name not in APART]
        rows = [row for name in timed_names for row in RUNS[name](options, console)]
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    folder = options.output / options.device
    for name in timed_names:
        write_csv([row for row in rows if row.table.startswith(name)], folder / f"{name}.csv")
    if {"attention", "growth"} & set(names):
        draw(rows, folder / "benchmarks.png", attention.machine(options.device))
    console.print(f"CSV files and the figure are in {folder}")
    return 0


def timed(
    options: argparse.Namespace, console: Console, comparisons: list[tuple[str, str, dict[str, Any]]], baseline: str
) -> list[Row]:
    """Rows of comparisons (table, case, task), each in a process of its own."""
    rows: list[Row] = []
    with attention.progress(console) as bar:
        job = bar.add_task("", total=len(comparisons))
        for table, case, task in comparisons:
            bar.update(job, description=f"{table}: {case}")
            found = in_new_process({"kind": "time", "device": options.device, **task})
            rows += [row for which in found for row in rows_of(table, case, which, found[which], baseline)]
            bar.advance(job)
    return rows


def growth(options: argparse.Namespace, console: Console) -> list[Row]:
    """Seconds of forward and backward against n at T = 5, and against T at n = 512, with fitted exponents."""
    repeats = 2 if options.quick else options.repeats
    sizes = (32, 64) if options.quick else (128, 256, 512, 1024, 2048)
    counts = (3, 5) if options.quick else (3, 5, 9, 21, 41)
    tokens = 64 if options.quick else 512
    rows: list[Row] = []
    for names in (["sdpa", "auto", "streaming"], ["published"]):
        comparisons = []
        for size in sizes if names != ["published"] else [size for size in sizes if size <= 1024]:
            variants = [name if name == "sdpa" else f"{name} T=5" for name in names]
            task = {"case": asdict(Case(1, 4, size, size, 64)), "variants": variants, "passes": ["both"]}
            comparisons.append(("growth in n", str(size), {**task, "repeats": repeats}))
        for count in counts if names != ["published"] else [count for count in counts if count <= 21]:
            variants = [f"{name} T={count}" for name in names if name != "sdpa"]
            task = {"case": asdict(Case(1, 4, tokens, tokens, 64)), "variants": variants, "passes": ["both"]}
            comparisons.append(("growth in T", str(count), {**task, "repeats": repeats}))
        rows += timed(options, console, comparisons, "sdpa")
    # In the table of T a variant is an engine: its count is the case.
    rows = [row if row.table == "growth in n" else _named_by_engine(row) for row in rows]
    for table in ("growth in n", "growth in T"):
        chosen = [row for row in rows if row.table == table]
        console.print(plain_table(chosen, f"{table}, 1 x 4 heads of width 64, forward and backward", "SDPA"))
        fits = ", ".join(f"{variant} {exponent:.2f}" for variant, exponent in exponents(chosen).items())
        console.print(f"fitted exponents, {table}: {fits}")
    return rows


def _named_by_engine(row: Row) -> Row:
    return Row(**{**asdict(row), "variant": row.variant.partition(" ")[0]})


def libraries(options: argparse.Namespace, console: Console) -> list[Row]:
    """One coupling by the optimal transport libraries."""
    size, counts = (64, [5]) if options.quick else (1024, [5, 21, 101])
    repeats = 2 if options.quick else options.repeats
    found = in_new_process({"kind": "libraries", "size": size, "counts": counts, "repeats": repeats})
    rows = [row for count in found for row in rows_of("libraries", f"T={count}", "coupling", found[count], "ours")]
    console.print(plain_table(rows, f"one coupling of {size} x {size}, forward", "ours"))
    return rows


def comparators(options: argparse.Namespace, console: Console) -> list[Row]:
    """Every normalizer with its defaults on the tokens of a small vision transformer."""
    case = Case(2, 2, 24, 24, 8) if options.quick else Case(4, 8, 197, 197, 16)
    repeats = 2 if options.quick else options.repeats
    variants = [f"normalizer {name}" for name in COMPARATORS]
    task = {"case": asdict(case), "variants": variants, "repeats": repeats}
    rows = timed(options, console, [("comparators", str(case), task)], variants[0])
    console.print(plain_table(rows, "normalizers with their defaults (batch, heads, tokens, width)", "softmax"))
    return rows


def steps(options: argparse.Namespace, console: Console) -> list[Row]:
    """Training steps of the models, and the share of attention in them."""
    rows: list[Row] = []
    repeats = 2 if options.quick else options.repeats
    with attention.progress(console) as bar:
        job = bar.add_task("", total=len(MODELS))
        for model in MODELS:
            bar.update(job, description=f"steps: {model}")
            task = {"kind": "steps", "model": model, "variants": list(VARIANTS), "repeats": repeats}
            try:
                found = in_new_process({**task, "quick": options.quick})
            except RunError as error:
                if "No module named 'fairseq'" not in str(error):
                    raise
                found = {"step": dict.fromkeys(VARIANTS, "fairseq is not installed (Linux x86-64 alone)")}
            for which, samples in found.items():
                rows += rows_of("steps", model, which, samples, "softmax")
            bar.advance(job)
    console.print(plain_table(rows, "a training step, and its attention alone, forward and backward", "softmax"))
    by_key = {(row.case, row.variant, row.which): row.seconds for row in rows}
    for model in MODELS:
        shares = []
        for variant in VARIANTS:
            step, part = (by_key.get((model, variant, which)) for which in ("step", "attention"))
            if step and part:
                shares.append(f"{variant} {part / step:.0%}")
        if shares:
            console.print(f"share of attention in a step of {model}: {', '.join(shares)}")
    return rows


def oversubscribed(options: argparse.Namespace, console: Console) -> list[Row]:
    """More threads than cores, as where neighbours share a node: engines that meet often would wait for one another."""
    repeats = 2 if options.quick else options.repeats
    comparisons = []
    for case in QUICK_CASES if options.quick else CASES[:2]:
        for times in (1, 2, 4):
            threads = times * (os.cpu_count() or 1)
            variants = ["sdpa", "auto T=5", "auto T=21", "portable T=5"]
            task = {"case": asdict(case), "variants": variants, "passes": ["both"], "threads": threads}
            comparisons.append(("oversubscribed", f"{case}, {threads} threads", {**task, "repeats": repeats}))
    rows = timed(options, console, comparisons, "sdpa")
    title = f"threads on {os.cpu_count()} cores (batch, heads, tokens, width), forward and backward"
    console.print(plain_table(rows, title, "SDPA"))
    return rows


RUNS = {
    "attention": attention.run,
    "growth": growth,
    "libraries": libraries,
    "comparators": comparators,
    "steps": steps,
    "oversubscribed": oversubscribed,
}

if __name__ == "__main__":
    finish(main)
