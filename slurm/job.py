"""What a job runs: one training, watched; stopped with a checkpoint when SLURM asks for it, and queued again.

A submission's job calls `python -m slurm.job --submission FOLDER` on the node, one that was written by hand
`srun python -m slurm.job OVERRIDES`. Either way the training is a process of its own, `python -m experiments.train
OVERRIDES`: this one stays small, and is there to tell SLURM and the run card what became of it, even where it was
killed.

SLURM sends the signal of `--signal` (USR2 here: NCCL may use USR1) before the time limit and, where the cluster is set
up so, at preemption; else TERM. On any of them the training is asked to stop (TERM), which it does after the step it is
at, with a checkpoint. Then the job's own array task goes back into the queue, unless it was cancelled or has done so
too often. SLURM signals every process of a job, so the training ignores USR1 and USR2 from its start.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from filelock import FileLock

from experiments.errors import RunError
from experiments.files import write_json

from .submission import Submission, read_events, record_event

STOPPED = 128 + signal.SIGTERM
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# SLURM looks at time limits every 30 s, and sends the signal up to a minute early.
EARLY_S = 90
# A file that another machine has written may be seen here only after so long, as network file systems go.
VISIBLE_S = 60.0


@dataclass(frozen=True)
class TrainingJob:
    """One run of a submission, on its node.

    Attributes:
        overrides: the words after `python -m experiments.train`; they go to it as they are, past no shell.
        submission: the submission's folder.
        index: number of the run in it.
        folder: the run's folder.
        requeue: whether the job puts itself back into the queue.
        max_restarts: of the job within this submission, whatever the cause.
        max_timeouts: of these, how many may follow from the time limit.
        signal_before_end_s: seconds before the time limit at which SLURM sends the signal.
    """

    overrides: tuple[str, ...]
    submission: str
    index: int
    folder: str
    requeue: bool
    max_restarts: int
    max_timeouts: int
    signal_before_end_s: int

    @classmethod
    def of(cls, folder: Path, index: int) -> "TrainingJob":
        """The job of a submission's run by its number.

        Raises:
            RunError: where submission.json is damaged, or not there after a minute.
        """
        within(VISIBLE_S, (folder / "submission.json").is_file)
        submission = Submission.read(folder)
        task, cluster = submission.tasks[index], submission.cluster
        return cls(
            overrides=tuple(task.overrides),
            submission=str(folder),
            index=index,
            folder=task.folder,
            **{key: cluster[key] for key in ("requeue", "max_restarts", "max_timeouts", "signal_before_end_s")},
        )

    def __call__(self) -> None:
        """Trains; returns where the run is finished.

        Raises:
            SystemExit: where it is not, with an exit code that SLURM shows.
        """
        code = _Watch(self).run()
        if code != 0:
            raise SystemExit(code)


class _Watch:
    """One start of a job: its process, the signals that came, and what is done at its end."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        self.process: subprocess.Popen[bytes] | None = None
        self.signals: list[str] = []
        self.restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        self.first = int(os.environ.get("SLURM_PROCID", "0")) == 0

    def run(self) -> int:
        """Trains; the exit code of the job."""
        if self.restart > self.job.max_restarts:
            return self._give_up(f"restarted {self.restart} times, and {self.job.max_restarts} are allowed")
        # From here on, and after the requeue too, a signal must not end this process.
        for signum in STOP_SIGNALS:
            signal.signal(signum, self._on_signal)
        self._record("started", nodes=os.environ.get("SLURM_JOB_NODELIST"))
        words = [sys.executable, "-m", "experiments.train", *self.job.overrides]
        self.process = subprocess.Popen(words, env=_environment(), preexec_fn=_ignore_user_signals)
        if self.signals:  # one that came while it was being started
            self.process.terminate()
        code = self.process.wait()
        if code == 0:
            if not within(VISIBLE_S, self._has_result):
                return self._give_up("another run has been trained: the configuration changed since this submission")
            self._record("ended", reason="finished", exit_code=0)
            return 0
        # An error is an error even where a signal has come too, such as a full disk while the checkpoint was written.
        stopped = code == STOPPED or -code in STOP_SIGNALS
        return self._stopped() if stopped and self.signals else self._failed(code)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.signals.append(signal.Signals(signum).name)
        if self.process is not None:
            self.process.terminate()

    def _stopped(self) -> int:
        reason = stop_reason(job_id(), self.job.signal_before_end_s)
        self._record("stopped", reason=reason, signals=self.signals)
        if not self.first:
            return 0  # the first process decides; an exit code here would end it before it has
        if reason == "cancelled" or not self.job.requeue:
            return STOPPED
        if self.restart >= self.job.max_restarts:
            return self._give_up(f"{reason}, after {self.restart} restarts of {self.job.max_restarts}")
        if reason == "time limit":
            timeouts = 1 + sum(
                (event["event"], event.get("reason")) == ("requeued", "time limit") for event in self._events()
            )
            if timeouts > self.job.max_timeouts:
                return self._give_up(f"time limit met {timeouts} times, and {self.job.max_timeouts} are allowed")
        # The task by its array and number: the plain id of one task of an array is that of the whole array.
        self._record("requeued", reason=reason)
        done = _scontrol("requeue", job_id())
        if done.returncode != 0:
            return self._give_up(f"SLURM does not requeue: {done.stderr.strip()}")
        return STOPPED

    def _failed(self, code: int) -> int:
        reason = "an error, see the log"
        if code < 0:
            name = signal.Signals(-code).name
            reason = f"killed by {name}{' (out of memory?)' if -code == signal.SIGKILL else ''}"
            assert self.process is not None
            if self.first and self.job.folder:
                note_killed(Path(self.job.folder), self.process.pid, reason)
        elif code == STOPPED:
            reason = "stopped from outside of SLURM"
        self._record("ended", reason=reason, exit_code=code)
        print(f"job: {reason} (exit code {code})", file=sys.stderr)
        return code if code > 0 else 128 - code

    def _give_up(self, reason: str) -> int:
        self._record("ended", reason=reason, exit_code=1)
        print(f"job: not started again: {reason}. The same submission continues it", file=sys.stderr)
        return 1

    def _has_result(self) -> bool:
        # By the hash that its name ends in: the folder of a run that exists keeps its label.
        folder = Path(self.job.folder)
        results = folder.parent.glob(f"*{folder.name[-9:]}/result.json")
        return not (self.first and self.job.folder) or any(file.stat().st_size > 0 for file in results)

    def _record(self, event: str, **facts: Any) -> None:
        if self.first and self.job.submission:
            here = {"job_id": job_id(), "restart": self.restart, "node": _node()}
            try:
                record_event(Path(self.job.submission), self.job.index, event, **facts, **here)
            except OSError as error:  # a full disk must not keep a run from being requeued
                print(f"job: it is not written down that the run {event}: {error}", file=sys.stderr)

    def _events(self) -> list[dict[str, Any]]:
        return read_events(Path(self.job.submission), self.job.index) if self.job.submission else []


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether a condition is met, at once or within some seconds."""
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(min(1.0, seconds))
    return met


def job_id() -> str:
    """SLURM's name of this job: `123_4` for a task of an array."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    return f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}" if array else os.environ.get("SLURM_JOB_ID", "")


def stop_reason(job: str, signal_before_end_s: int) -> str:
    """Why SLURM has sent a signal: "cancelled", "preempted", "time limit", or "signal" where a person sent it.

    A job that is being ended by SLURM ("cancelled" here) would only be in its way with a requeue: it was cancelled, or
    SLURM requeues it itself.
    """
    shown = _scontrol("--oneliner", "show", "job", job)
    facts = dict(re.findall(r"(\w+)=(\S*)", shown.stdout))
    if facts.get("JobState", "RUNNING") != "RUNNING":
        return "time limit" if facts.get("Reason") == "TimeLimit" else "cancelled"
    if facts.get("PreemptTime", "None") != "None":
        return "preempted"
    with suppress(KeyError, ValueError):
        left = (datetime.fromisoformat(facts["EndTime"]) - datetime.now()).total_seconds()
        if left < signal_before_end_s + EARLY_S:
            return "time limit"
    return "signal"


def _scontrol(*words: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"SLURM_TIME_FORMAT": "standard"}
    try:
        return subprocess.run(["scontrol", *words], capture_output=True, text=True, check=False, env=environment)
    except FileNotFoundError:
        reason = "scontrol is not there; a container needs SLURM's programs, its configuration and munge's socket"
        return subprocess.CompletedProcess(["scontrol", *words], 127, "", reason)


def note_killed(folder: Path, process: int, message: str) -> None:
    """Says in a run card that the attempt of a process failed, which was killed before it could say so itself."""
    file = folder / "run.json"
    # Held by nobody, since the process is gone; a new attempt that began meanwhile has another number.
    with suppress(OSError, TimeoutError), FileLock(folder / ".lock", timeout=0):
        card = json.loads(file.read_text(encoding="utf-8"))
        attempt = card["attempts"][-1]
        if (attempt["pid"], attempt["host"], attempt["state"]) == (process, socket.gethostname(), "running"):
            now = datetime.now(UTC).isoformat(timespec="seconds")
            attempt |= {"ended": now, "state": "failed", "message": message}
            write_json(file, card | {"state": "failed"})


def _environment() -> dict[str, str]:
    environment = dict(os.environ)
    if cpus := environment.get("SLURM_CPUS_PER_TASK"):
        environment.setdefault("OMP_NUM_THREADS", cpus)
    return environment


def _ignore_user_signals() -> None:
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _node() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command: trains one run, of a submission or of a job that was written by hand."""
    overrides = tuple(sys.argv[1:] if arguments is None else arguments)
    if overrides[:1] == ("--submission",):
        try:
            job = TrainingJob.of(Path(overrides[1]), int(os.environ.get("SLURM_ARRAY_TASK_ID", "0")))
        except RunError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(1) from None
        job()
        return
    TrainingJob(overrides, "", 0, "", True, max_restarts=50, max_timeouts=50, signal_before_end_s=120)()


if __name__ == "__main__":
    main()
