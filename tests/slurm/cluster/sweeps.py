"""Sweeps of the small experiment that go through the commands, as a user gives them."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from slurm.queue import SlurmError, read_accounts, run

ROOT = Path(__file__).parents[3]
# Runs of seconds: 400 digits, four steps to the epoch.
SMALL = (
    "experiment=mnist_patches",
    "model.patch_size=14",
    "data.val_size=200",
    "data.test_size=4400",
    "data.eval_batch_size=1000",
    "trainer.max_epochs=3",
    "trainer.accelerator=cpu",
    "logger=none",
)
SLOW = ("model._target_=tests.slurm.cluster.training.slow_model",)


class Sweep:
    """Runs in a folder of their own, on the cluster and without it."""

    def __init__(self, folder: Path, data: Path, base: Sequence[str] = SMALL) -> None:
        self.folder, self.data, self.base = folder, data, base

    def words(self, *more: str, runs: str = "runs") -> list[str]:
        return [*self.base, f"paths.runs={self.folder / runs}", f"paths.data={self.data}", *more]

    def pace(self, seconds: float) -> str:
        """The seconds that a step of `SLOW` takes from now on; the option of the cluster that lets jobs read them."""
        file = self.folder / "seconds"
        whole = file.with_suffix(".new")
        whole.write_text(str(seconds))
        whole.replace(file)
        return f"cluster.environment={{SLOW_STEP:'{file}'}}"

    def command(self, module: str, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
        arguments = [sys.executable, "-m", module, *words]
        return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False, **options)

    def submit(self, *more: str, cluster: tuple[str, ...] = ()) -> "Jobs":
        """Submits, and says what the command said."""
        done = self.command("slurm.submit", *self.words(*more), "cluster=dev", *cluster)
        assert done.returncode == 0, done.stderr
        folders = sorted((self.folder / "runs" / ".submissions").glob("*/submission.json"))
        return Jobs(done.stdout + done.stderr, json.loads(folders[-1].read_text()), folders[-1].parent)

    def alone(self, *more: str) -> Path:
        """The folder of the same run, trained here without a stop."""
        done = self.command("experiments.train", *self.words(*more, runs="alone"))
        assert done.returncode == 0, done.stderr
        (line,) = [line for line in done.stderr.splitlines() if line.startswith(("run: ", "finished already"))]
        return Path(line.rpartition(": ")[2])

    def status(self, *names: str) -> dict[str, dict[str, Any]]:
        """What slurm.status says of each run, by the run's folder."""
        done = self.command("slurm.status", "--json", *names, f"paths.runs={self.folder / 'runs'}")
        found = json.loads(done.stdout)
        return {Path(run["folder"]).name: run for run in (found["runs"] if isinstance(found, dict) else found)}


class Jobs:
    """What a submission wrote down."""

    def __init__(self, said: str, content: dict[str, Any], folder: Path) -> None:
        self.said, self.content, self.folder = said, content, folder
        self.id: str = content["array_job_id"]
        self.runs = [Path(task["folder"]) for task in content["tasks"]]

    def events(self, index: int = 0) -> list[dict[str, Any]]:
        file = self.folder / f"events-{index}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait(self, timeout: float = 240) -> None:
        """Until none of the jobs is in the queue."""
        until(lambda: not queue(self.id), timeout, lambda: f"still queued: {queue(self.id)}; {self.logs()}")

    def logs(self) -> str:
        return "\n".join(file.read_text()[-3000:] for file in sorted(self.folder.glob("*log.err")))

    def accounts(self) -> dict[str, str]:
        """Final states by sacct, which learns of an end some time after the queue has let go of the job."""
        ids = {task["job_id"] for task in self.content["tasks"]}

        def ended() -> dict[str, str] | None:
            jobs = read_accounts({self.id})
            whole = ids <= jobs.keys() and not any(jobs[one].alive for one in ids)
            return {one: jobs[one].state for one in ids} if whole else None

        return until(ended, 60, lambda: f"by the accounts: {read_accounts({self.id})}")


def queue(job: str) -> list[str]:
    """The jobs of an array that are in the queue, one line each; none where SLURM has forgotten the array."""
    try:
        return run(["squeue", "--noheader", "--array", f"--jobs={job}", "--format=%i %T %r"]).splitlines()
    except SlurmError as error:
        if "Invalid job id" not in str(error):
            raise
        return []


def until(condition: Callable[[], Any], timeout: float, words: Callable[[], str] = lambda: "") -> Any:
    """Waits for a condition; its value."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {timeout} s: {words()}"
        time.sleep(0.5)
    return value


def epochs(run: Path) -> int:
    """The epochs that a run has evaluated."""
    file = run / "metrics.jsonl"
    return file.read_text().count('"split": "val"') if file.exists() else 0
