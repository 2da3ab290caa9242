"""Shows what has become of a sweep: `python -m slurm.status experiment=mnist_patches attention.n_iters=1,3 seed=0,1`.

In place of the sweep's words, a submission (`20261129-190644-1f2e3d4c`, or the id of its job array), or nothing for the
newest. Without SLURM the table is made from the run folders alone, and says so.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from experiments.command import finish
from experiments.errors import RunError
from experiments.train import say

from .queue import SlurmError, owner, read_jobs
from .selection import SelectedRun, read_jobs_of, select
from .state import FAILED, OVER, STATES, RunStatus, job_by_hand, status_of

COLOURS = {
    "finished": "green",
    "running": "cyan",
    "failed": "bold red",
    "diverged": "bold red",
    "lost": "bold red",
    "cancelled": "yellow",
    "interrupted": "yellow",
    "unknown": "yellow",
}
PIPE_WIDTH = 240


def statuses(runs: Sequence[SelectedRun]) -> tuple[list[RunStatus], str | None]:
    """The states of runs, and one sentence where SLURM could not be asked for them."""
    warning, jobs = None, None
    by_hand = {job: run for run in runs if (job := job_by_hand(run)) is not None}
    users = {owner(run.folder) for run in by_hand.values()}
    try:
        submitted = read_jobs_of(task for run in runs for task in run.tasks)
        jobs = submitted | (read_jobs(list(by_hand), users) if by_hand else {})
    except SlurmError as error:
        warning = str(error)
    return [status_of(run, jobs) for run in runs], warning


def summary(rows: Sequence[RunStatus]) -> str:
    """How many are in which state."""
    counts = Counter(row.state for row in rows)
    return f"{len(rows)} runs: " + ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])


def table(rows: Sequence[RunStatus]) -> Table:
    """The runs as a table."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "state", "epoch", "restarts", "time", "job", "detail"):
        right, fold = name in ("epoch", "restarts", "time"), name in ("run", "detail")
        shown.add_column(name, justify="right" if right else "left", overflow="fold", no_wrap=not fold)
    for row in rows:
        of = "" if row.epochs is None else f"/{row.epochs}"
        cells = [Path(row.folder).name, row.state, f"{row.epoch}{of}", str(row.restarts), in_hours(row.seconds)]
        # Text, since a message may hold what rich would take for markup.
        texts = [Text(cell) for cell in (*cells, row.job or "", row.detail)]
        texts[1].stylize(COLOURS.get(row.state, ""))
        shown.add_row(*texts)
    return shown


def in_hours(seconds: float) -> str:
    """`1:02:03`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 unless the words name nothing."""
    parser = argparse.ArgumentParser(prog="python -m slurm.status", description=__doc__, allow_abbrev=False)
    parser.add_argument("words", nargs="*", help="overrides of a sweep, or submissions; nothing for the newest one")
    parser.add_argument("--failed", action="store_true", help="only what failed or was lost, and where their logs are")
    parser.add_argument("--json", action="store_true", help="one object: runs, counts, warning")
    parser.add_argument("--watch", action="store_true", help="again and again until all are over")
    parser.add_argument("--every", type=float, default=15.0, metavar="SECONDS", help="between two looks of --watch")
    options = parser.parse_intermixed_args(arguments)
    try:
        if options.watch and not options.json:
            _watch(options)
        else:
            _once(options)
    except RunError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _once(options: argparse.Namespace) -> None:
    rows, warning = statuses(select(options.words))
    shown = [row for row in rows if row.state in FAILED] if options.failed else rows
    if options.json:
        content = {
            "runs": [dataclasses.asdict(row) for row in shown],
            "counts": Counter(row.state for row in rows),
            "warning": warning,
        }
        print(json.dumps(content, indent=2, ensure_ascii=False))
        return
    # A pipe has no width: nothing is to be cut off for the next program.
    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, soft_wrap=False, highlight=False)
    console.print(table(shown))
    for row in shown if options.failed else []:
        if row.log is not None:
            print(f"log of job {row.job}: {row.log}")
    console.print(summary(rows))
    if warning is not None:
        say(f"warning: {warning}; the states are those of the run folders")


def _watch(options: argparse.Namespace) -> None:
    with Live(console=Console(highlight=False), auto_refresh=False, vertical_overflow="visible") as live:
        while True:
            rows, warning = statuses(select(options.words))
            shown = [row for row in rows if row.state in FAILED] if options.failed else rows
            parts: list[RenderableType] = [table(shown), Text(summary(rows))]
            if warning is not None:
                parts.append(Text(f"warning: {warning}", "yellow"))
            live.update(Group(*parts), refresh=True)
            if all(row.state in OVER for row in rows):
                return
            time.sleep(options.every)


if __name__ == "__main__":
    finish(main)
