"""Cancels the jobs of a sweep: `python -m slurm.cancel experiment=mnist_patches attention.n_iters=1,3`, `… 123`.

The selection is that of `slurm.status`. Only the tasks of these runs are cancelled, whatever else is in their arrays;
what has been trained stays, and submitting again goes on from it.
"""

import argparse
import sys
from collections.abc import Sequence

from experiments.command import finish
from experiments.errors import RunError
from experiments.train import say

from .queue import cancel
from .selection import SubmittedRun, read_jobs_of, select


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 where the jobs are cancelled or there were none, 2 where it was not told to."""
    parser = argparse.ArgumentParser(prog="python -m slurm.cancel", description=__doc__, allow_abbrev=False)
    parser.add_argument("words", nargs="*", help="overrides of a sweep, or submissions; nothing for the newest one")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    options = parser.parse_intermixed_args(arguments)
    try:
        return _cancel(alive_tasks(options.words), options.yes)
    except RunError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        return 130


def alive_tasks(words: Sequence[str]) -> list[SubmittedRun]:
    """The tasks of the selected runs that are queued or run."""
    tasks = [task for run in select(words) for task in run.tasks]
    jobs = read_jobs_of(tasks)
    return [task for task in tasks if task.job_id in jobs and jobs[task.job_id].alive]


def _cancel(tasks: Sequence[SubmittedRun], yes: bool) -> int:
    if not tasks:
        say("none of these runs is queued or running")
        return 0
    for task in tasks:
        print(f"{task.job_id}\t{task.task.folder}")
    if not yes:
        if not sys.stdin.isatty():
            say(f"nothing is cancelled: add --yes to cancel these {len(tasks)} jobs")
            return 2
        if input(f"cancel these {len(tasks)} jobs? [y/N] ").strip().lower() not in ("y", "yes"):
            say("nothing is cancelled")
            return 2
    for cluster in {task.submission.cluster_name for task in tasks}:
        cancel([task.job_id for task in tasks if task.submission.cluster_name == cluster], cluster)
    for task in tasks:
        task.note_cancelled()
    say(f"cancelled: {len(tasks)} jobs")
    return 0


if __name__ == "__main__":
    finish(main)
