"""Submissions: one folder for each, `<paths.runs>/.submissions/<UTC yyyymmdd-hhmmss>-<8 hex>/`.

In the folder: `submission.sh`, the script; the jobs' logs; `submission.json` (`Submission`), whole at any time; and
`events-<index>.jsonl`, what happened to each run's job: one object a line with `time`, `event` ("started", "stopped",
"requeued", "ended"), `reason`, `exit_code`, `restart` (how often SLURM has started the job again), `node`.
"""

import json
import os
import re
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from experiments.errors import RunError
from experiments.files import append_line, write_json

FOLDER = ".submissions"
LOCK_TIMEOUT_S = 120.0
# So long after sbatch was asked, jobs may still appear in the queue: it may not have said whether it took them, and a
# controller that has just been started lists them later.
UNCLEAR_S = 600.0


@dataclass(frozen=True)
class Task:
    """One run of a submission.

    Attributes:
        index: its number in the array.
        job_id: SLURM's name of its job, `123_0`, or `123` where the submission is of one run; None before it has one.
        folder: the run's folder.
        hash: the run's hash, whole.
        overrides: the words after `python -m experiments.train`.
    """

    index: int
    job_id: str | None
    folder: str
    hash: str
    overrides: list[str]


@dataclass(frozen=True)
class Submission:
    """One array of jobs.

    Attributes:
        folder: of the submission.
        created: when, before SLURM was asked (ISO 8601, UTC).
        command: the shell command that made it.
        cluster: the cluster's configuration.
        array_job_id: None until it is known.
        tasks: the runs.
        answer: what sbatch printed when it took the jobs; None where it has not said that it did.
    """

    folder: Path
    created: str
    command: str
    cluster: dict[str, Any]
    array_job_id: str | None
    tasks: list[Task]
    answer: str | None = None

    @property
    def job_name(self) -> str:
        """By which its jobs are found where the submitter died before it could write their ids."""
        return f"sinkformer-{self.folder.name[-8:]}"

    def write(self) -> None:
        """Writes submission.json."""
        content = asdict(self)
        del content["folder"]
        write_json(self.folder / "submission.json", content)

    def with_id(self, array_job_id: str) -> "Submission":
        """The same with the id that SLURM has given the array, or the one job."""
        ids = [f"{array_job_id}_{task.index}" for task in self.tasks] if len(self.tasks) > 1 else [array_job_id]
        tasks = [replace(task, job_id=one) for task, one in zip(self.tasks, ids, strict=True)]
        return replace(self, array_job_id=array_job_id, tasks=tasks)

    def id_of_events(self) -> str | None:
        """The id by what the jobs that have started wrote down."""
        for task in self.tasks:
            for event in read_events(self.folder, task.index):
                if event.get("job_id"):
                    return str(event["job_id"]).partition("_")[0]
        return None

    @property
    def cluster_name(self) -> str | None:
        """The cluster that sbatch has named beside the id, where a site has several: squeue is asked for its jobs."""
        named = re.search(
            r"^\s*\d+;(\S+)\s*$|\bSubmitted batch job \d+ on cluster (\S+)", self.answer or "", re.MULTILINE
        )
        return (named[1] or named[2]) if named else None

    @property
    def age_s(self) -> float:
        """Seconds since SLURM was asked."""
        return (datetime.now(UTC) - datetime.fromisoformat(self.created)).total_seconds()

    @classmethod
    def read(cls, folder: Path) -> "Submission":
        """What submission.json holds.

        Raises:
            RunError: where it is damaged: jobs that it names may be queued, so it cannot be passed over.
        """
        file = folder / "submission.json"
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            content["tasks"] = [Task(**task) for task in content["tasks"]]
            return cls(folder, **content)
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise RunError(
                f"{file} cannot be read ({' '.join(str(error).split())}): see by `squeue --me "
                f"--name=sinkformer-{folder.name[-8:]}` that no job of it is left, then move {folder} away"
            ) from error


def submissions(runs: Path) -> list[Submission]:
    """All submissions of a folder of runs, the oldest first."""
    return [Submission.read(file.parent) for file in sorted((runs / FOLDER).glob("*/submission.json"))]


def new_folder(runs: Path) -> Path:
    """Makes the folder of a new submission."""
    name = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"
    folder = runs.absolute() / FOLDER / name
    folder.mkdir(parents=True)
    return folder


@contextmanager
def one_at_a_time(runs: Path) -> Iterator[None]:
    """Holds the folder of runs against other submitters. The lock is the kernel's: it falls with its holder.

    Raises:
        RunError: where another submitter holds it for minutes, or it cannot be written.
    """
    parent = runs / FOLDER
    holder = parent / "submitter"
    lock = FileLock(parent / ".lock")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        who = holder.read_text(encoding="utf-8").strip() if holder.is_file() else "unknown"
        print(f"another submitter is at work ({who}); waiting for it", file=sys.stderr)
        try:
            lock.acquire(timeout=LOCK_TIMEOUT_S)
        except Timeout:
            raise RunError(f"another submitter ({who}) has held {runs} for {LOCK_TIMEOUT_S:g} s: see to it") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"the folder of runs {runs} cannot be written ({reason}): give another, paths.runs=…") from error
    try:
        holder.write_text(f"process {os.getpid()} on {socket.gethostname()}\n", encoding="utf-8")
        yield
    finally:
        lock.release()


def record_event(folder: Path, index: int, event: str, **facts: Any) -> None:
    """Appends an event of one run's job."""
    time = datetime.now(UTC).isoformat(timespec="seconds")
    append_line(folder / f"events-{index}.jsonl", {"time": time, "event": event, **facts})


def read_events(folder: Path, index: int) -> list[dict[str, Any]]:
    """The events of one run's job, the oldest first; none where it has never started."""
    file = folder / f"events-{index}.jsonl"
    if not file.is_file():
        return []
    return list(_whole_lines(file.read_text(encoding="utf-8", errors="replace")))


def _whole_lines(text: str) -> Iterator[dict[str, Any]]:
    """The objects of lines of JSON. A line is broken where the machine died while it was written."""
    for line in text.split("\n"):
        with suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict):
                yield event
