"""What has become of a run, told from its folder and from SLURM together.

Neither is enough. SLURM does not know what a run has reached, and what a killed run wrote last is that it is running.
"""

import json
import os
import re
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .queue import NOT_ASKED, Job
from .selection import SelectedRun, SubmittedRun
from .submission import UNCLEAR_S

# In the order of the summary. "lost" ended without a word: killed, or its node failed.
STATES = (
    "finished",
    "running",
    "starting",
    "suspended",
    "pending",
    "preempted",
    "requeued",
    "interrupted",
    "cancelled",
    "failed",
    "diverged",
    "lost",
    "unknown",
    "not submitted",
)
FAILED = frozenset({"failed", "diverged", "lost"})
OVER = frozenset({"finished", "interrupted", "cancelled", *FAILED, "not submitted"})
_RAISED = ("failed", "diverged")  # the states in which a run's own process says why it ended
_ENDS = {
    "NODE_FAIL": "its node failed",
    "OUT_OF_MEMORY": "out of memory: ask for more (cluster.mem) or take a smaller batch",
    "TIMEOUT": "killed at the time limit: ask for more (cluster.time)",
    "BOOT_FAIL": "its node did not start",
    "DEADLINE": "killed at its deadline",
}
_TAIL = 8192
# What another machine has written is seen here only after so long, as network file systems go: the name or the size of
# a file comes first, its content later.
VISIBLE_S = 120.0


@dataclass(frozen=True)
class RunStatus:
    """A line of the table.

    Attributes:
        folder: of the run.
        state: one of `STATES`.
        detail: the metric, the last line of the error, or why it waits.
        epoch: epochs that are recorded.
        epochs: epochs that it trains for, None where nobody knows yet.
        restarts: starts after the first.
        seconds: that it has run, in all attempts.
        job: the newest job submitted for it.
        log: what that job wrote on its error stream.
        metric: name of the metric that chose the epoch, and its value on the test split, or else on the one that chose.
    """

    folder: str
    state: str
    detail: str
    epoch: int
    epochs: int | None
    restarts: int
    seconds: float
    job: str | None
    log: str | None
    metric: tuple[str, float] | None = None


def status_of(run: SelectedRun, jobs: Mapping[str, Job] | None, now: datetime | None = None) -> RunStatus:
    """The state of one run.

    Args:
        run: with its submitted jobs.
        jobs: what SLURM knows, or None where it could not be asked.
        now: for the time that a run has been going.
    """
    try:
        card, result = _read_card(run.folder) or {}, _read_result(run.folder)
    except _DamagedError as error:
        task, job = _newest(run.tasks, jobs)
        restarts, name = job.restarts if job is not None else 0, task.job_id if task is not None else None
        return RunStatus(str(run.folder), "failed", str(error), 0, run.epochs, restarts, 0.0, name, None)
    attempts = card.get("attempts", [])
    task, job = _newest(run.tasks, jobs)
    by_hand = _job_by_hand(attempts, run.tasks)
    if by_hand is not None:
        task, job = None, None if jobs is None else jobs.get(by_hand)
    epochs = card.get("identity", {}).get("trainer", {}).get("max_epochs", run.epochs)
    epoch = _epoch(run.folder)
    metric = None
    if result is not None:
        metric = _metric(result)
        state, detail = "finished", f"{metric[0]} {metric[1]:.4f}" if metric else ""
    else:
        state, detail = _judge(attempts, task, job, by_hand is not None, jobs is not None)
        if state in ("pending", "preempted", "requeued", "starting") and epoch:
            detail = f"goes on from epoch {epoch}" + (f"; {detail}" if detail else "")
    restarts = max(len(attempts) - 1, job.restarts if job is not None else 0, 0)
    seconds = sum(_seconds(run.folder, attempt, state, now or datetime.now(UTC)) for attempt in attempts)
    log = task.log if task is not None and state in FAILED else None
    return RunStatus(
        folder=str(run.folder),
        state=state,
        detail=detail,
        epoch=epoch,
        epochs=epochs,
        restarts=restarts,
        seconds=seconds,
        job=task.job_id if task is not None else by_hand,
        log=str(log) if log is not None else None,
        metric=metric,
    )


def job_by_hand(run: SelectedRun) -> str | None:
    """The job of a run's last attempt where that is of no submission: of an sbatch file, or of Hydra's launcher."""
    try:
        card = _read_card(run.folder)
    except _DamagedError:  # which `status_of` tells
        return None
    return None if card is None else _job_by_hand(card["attempts"], run.tasks)


def _job_by_hand(attempts: list[dict[str, Any]], tasks: tuple[SubmittedRun, ...]) -> str | None:
    if not attempts or not attempts[-1].get("slurm"):
        return None
    job = str(attempts[-1]["slurm"]["job"])
    newer = all(_time(attempts[-1]["started"]) >= _time(task.submission.created) for task in tasks)
    return job if newer and job not in [task.job_id for task in tasks] else None


def _newest(tasks: tuple[SubmittedRun, ...], jobs: Mapping[str, Job] | None) -> tuple[SubmittedRun | None, Job | None]:
    """The task that speaks for a run: the newest that is alive, or else the newest."""
    if not tasks:
        return None, None
    if jobs is not None:
        for task in reversed(tasks):
            job = jobs.get(task.job_id)
            if job is not None and job.alive:
                return task, job
    return tasks[-1], None if jobs is None else jobs.get(tasks[-1].job_id)


def _judge(
    attempts: list[dict[str, Any]], task: SubmittedRun | None, job: Job | None, by_hand: bool, asked: bool
) -> tuple[str, str]:
    last = attempts[-1] if attempts else None
    if last is not None and task is not None and not _is_of(last, task):
        last = None
    wrote = last["state"] if last is not None else None
    message = (last or {}).get("message") or ""
    event = (task.events() or [{}])[-1] if task is not None else {}
    if job is not None and job.alive:
        return _judge_alive(job, wrote, message, event)
    if (task is not None or by_hand) and not asked and wrote not in _RAISED:
        return (wrote or "unknown"), "SLURM could not be asked"
    if wrote in _RAISED:
        return str(wrote), message
    if task is None and not by_hand:
        return _judge_without_job(wrote, last)
    if task is not None and job is None and wrote is None and not event and task.submission.age_s < UNCLEAR_S:
        return "pending", "not to be seen in the queue yet"
    end = job.state if job is not None else None
    if event.get("event") == "cancelled" or (end or "").startswith("CANCELLED"):
        return "cancelled", ""
    why = event.get("reason", "") if event.get("event") == "ended" else ""
    if why == "finished":
        if (datetime.now(UTC) - _time(event["time"])).total_seconds() < VISIBLE_S:
            return "running", "has ended; its result is not to be seen from here yet"
        return "lost", "its job says that it has finished, and there is no result.json: submit it again"
    if wrote == "interrupted":
        stopped = why or ("stopped at the time limit" if end == "TIMEOUT" else "stopped with a checkpoint")
        return "interrupted", f"{stopped}; submit again to go on"
    if task is not None and wrote is None and end not in _ENDS:
        line, is_error = last_error(task.log)
        if is_error or end in ("COMPLETED", "FAILED"):
            return "failed", line or why or f"SLURM says {end}, and the job's log nothing"
    killed = why or "ended without a word: killed, perhaps for memory"
    return "lost", _ENDS.get(end or "", f"{killed} (SLURM says {end}, {job.reason})" if job and job.reason else killed)


def _is_of(attempt: dict[str, Any], task: SubmittedRun) -> bool:
    """Whether an attempt is one of this job; another one's says nothing of it."""
    if attempt.get("slurm"):
        return attempt["slurm"]["job"] == task.job_id
    return _time(attempt["started"]) >= _time(task.submission.created)


def _judge_alive(job: Job, wrote: str | None, message: str, event: dict[str, Any]) -> tuple[str, str]:
    if job.waiting:
        if wrote is None and not job.restarts:
            return "pending", job.reason
        why = event.get("reason", "") if event.get("event") == "requeued" else ""
        # SLURM requeues a preempted job itself where the job does not: then there is only the card.
        if why == "preempted" or (not why and wrote == "interrupted"):
            return "preempted", job.reason
        return "requeued", "; ".join(word for word in (why, job.reason) if word)
    if job.state == NOT_ASKED:
        return wrote or "unknown", f"its cluster could not be asked ({job.reason})"
    if job.state in ("SUSPENDED", "STOPPED"):
        return "suspended", ""
    if wrote in _RAISED:
        return str(wrote), message
    if wrote == "interrupted":
        return "preempted", "saved; waits to be requeued"
    # What runs has few names; of another one SLURM's word says more than ours.
    detail = "" if job.state in ("RUNNING", "COMPLETING") else f"SLURM says {job.state}"
    return ("running" if wrote == "running" else "starting"), detail


def _judge_without_job(wrote: str | None, last: dict[str, Any] | None) -> tuple[str, str]:
    """A run that was started by hand, if at all."""
    if last is None:
        return "not submitted", ""
    if wrote != "running":
        return str(wrote), last.get("message") or ""
    if last["host"] != socket.gethostname():
        return "unknown", f"started by hand on {last['host']}"
    with suppress(ProcessLookupError, PermissionError):
        os.kill(last["pid"], 0)
        return "running", "started by hand"
    return "lost", "ended without a word: killed, perhaps for memory"


def last_error(log: Path | None) -> tuple[str, bool]:
    """The line of a job's log that says why it ended, and whether it is that of an error.

    It is the last that names an exception, or else the last that is not SLURM's.
    """
    lines = [line.strip() for line in _tail(log).splitlines() if line.strip()] if log is not None else []
    ours = [line for line in lines if not re.match(r"(srun|slurmstepd|submitit)\b", line)]
    for line in reversed(ours):
        if re.match(r"(error\b.*:|[\w.]*(Error|Exception)\b)", line):
            return line, True
    return (ours or lines or [""])[-1], False


def _epoch(folder: Path) -> int:
    lines = _tail(folder / "metrics.jsonl").splitlines()
    for line in reversed(lines):
        with suppress(ValueError, KeyError, TypeError):  # of a line that is just being written
            return max(int(json.loads(line)["epoch"]), 0)
    return 0


def _metric(result: dict[str, Any]) -> tuple[str, float] | None:
    best, name = result.get("best", {}), result.get("metric")
    values = best.get("test") or best.get(result.get("selected_on")) or {}
    return (f"{name}", float(values[name])) if name in values else None


def _seconds(folder: Path, attempt: dict[str, Any], state: str, now: datetime) -> float:
    start = _time(attempt["started"])
    if attempt["ended"] is not None:
        end = _time(attempt["ended"])
    elif state == "running":
        end = now
    else:  # nobody wrote down when it was killed; the last epoch was written before
        files = [folder / name for name in ("run.json", "metrics.jsonl")]
        end = datetime.fromtimestamp(max(file.stat().st_mtime for file in files if file.exists()), UTC)
    return max((end - start).total_seconds(), 0.0)


def _time(text: str) -> datetime:
    time = datetime.fromisoformat(text)
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


class _DamagedError(Exception):
    """A record of a run that cannot be read, in one sentence; training refuses it likewise."""


def _read_card(folder: Path) -> dict[str, Any] | None:
    """The run card, whose attempts and identity are there; None where there is no card."""
    card = _read_json(folder / "run.json")
    if card is not None:
        attempts = card.get("attempts")
        if (
            not isinstance(card.get("identity"), dict)
            or not isinstance(attempts, list)
            or not all(map(_whole, attempts))
        ):
            raise _damaged(folder / "run.json", "it is no run card")
    return card


def _whole(attempt: Any) -> bool:
    return isinstance(attempt, dict) and {"started", "ended", "state", "host", "pid"} <= attempt.keys()


def _read_result(folder: Path) -> dict[str, Any] | None:
    """What the run ended with; None where it has not ended."""
    result = _read_json(folder / "result.json")
    if result is not None and not isinstance(result.get("best"), dict):
        raise _damaged(folder / "result.json", "it is no result")
    return result


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        with suppress(OSError):
            status = path.stat()
            if status.st_size == 0 and time.time() - status.st_mtime < VISIBLE_S:
                return None  # another machine is writing it
        raise _damaged(path, " ".join(str(error).split())) from error
    if not isinstance(content, dict):
        raise _damaged(path, f"it holds a {type(content).__name__}")
    return content


def _damaged(path: Path, reason: str) -> _DamagedError:
    return _DamagedError(f"{path.name} cannot be read ({reason}): remove it and submit the run again")


def _tail(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - _TAIL, 0))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
