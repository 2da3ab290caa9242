"""Which runs a command is about: the words of a sweep, or a submission, and the jobs that were submitted for them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.config import CONFIGS, compose
from experiments.errors import RunError

from .cluster import split
from .queue import Job, owner, read_jobs
from .submission import Submission, Task, read_events, record_event, submissions
from .sweep import plan


@dataclass(frozen=True)
class SubmittedRun:
    """A run as one submission has it; it has a job's id."""

    submission: Submission
    task: Task

    @property
    def job_id(self) -> str:
        """SLURM's name of the job."""
        return str(self.task.job_id)

    @property
    def log(self) -> Path | None:
        """The newest file that holds what the job wrote on its error stream."""
        logs = sorted(self.submission.folder.glob(f"{self.job_id}_*log.err"), key=lambda path: path.stat().st_mtime)
        return logs[-1] if logs else None

    @property
    def site(self) -> tuple[str | None, str]:
        """The cluster that its job is of, where sbatch named one, and its submitter: of these squeue is asked."""
        return self.submission.cluster_name, owner(self.submission.folder)

    def events(self) -> list[dict[str, Any]]:
        """What happened to the job, the oldest first."""
        return read_events(self.submission.folder, self.task.index)

    def note_cancelled(self) -> None:
        """Records a cancellation: a cluster without accounts forgets it within minutes."""
        record_event(self.submission.folder, self.task.index, "cancelled", job_id=self.job_id)


def read_jobs_of(tasks: Iterable[SubmittedRun]) -> dict[str, Job]:
    """What SLURM knows of the jobs of submitted runs, each asked of its own cluster.

    Raises:
        SlurmError: where there is no SLURM, or it does not answer.
    """
    ids: dict[str | None, list[str]] = {}
    users: dict[str | None, set[str]] = {}
    for task in tasks:
        cluster, user = task.site
        ids.setdefault(cluster, []).append(task.job_id)
        users.setdefault(cluster, set()).add(user)
    jobs: dict[str, Job] = {}
    for cluster in ids:
        jobs |= read_jobs(ids[cluster], users[cluster], cluster)
    return jobs


@dataclass(frozen=True)
class SelectedRun:
    """A run with the jobs that were submitted for it.

    Attributes:
        folder: of the run, whether it exists or not.
        tasks: the oldest first.
        epochs: how many it trains for, where its configuration was at hand.
    """

    folder: Path
    tasks: tuple[SubmittedRun, ...]
    epochs: int | None = None


def select(words: Sequence[str]) -> list[SelectedRun]:
    """The runs that the words of a command line name.

    Args:
        words: overrides of a sweep as for `slurm.submit`; or submissions, each by its name, the beginning of it, its
            folder, or the id of its job array; or nothing, for the newest submission. `paths.runs=…` goes with all.

    Raises:
        RunError: where they name nothing, or no valid runs.
    """
    overrides = [word for word in words if "=" in word or word.startswith("~")]
    names = [word for word in words if word not in overrides]
    paths = [word for word in overrides if word.startswith("paths.")]
    if names and len(overrides) > len(paths):
        raise RunError(f"{names[0]} names a submission and {overrides[0]} a sweep: give one or the other")
    if len(overrides) > len(paths):
        planned = plan(split(overrides)[1])
        tasks = _by_hash(submissions(Path(planned[0].config["paths"]["runs"])))
        return [
            SelectedRun(run.run.path, tuple(tasks.get(run.run.hash[:8], ())), run.config["trainer"]["max_epochs"])
            for run in planned
        ]
    runs = runs_folder(paths)
    known = submissions(runs)
    chosen = [submission for name in names for submission in _named(name, known, runs)]
    if not names:
        if not known:
            raise RunError(f"nothing has been submitted for runs in {runs}: name a sweep, as for slurm.submit")
        chosen = known[-1:]
    tasks = _by_hash(known)
    wanted = {task.hash[:8]: Path(task.folder) for submission in chosen for task in submission.tasks}
    return [SelectedRun(folder, tuple(tasks.get(digits, ()))) for digits, folder in wanted.items()]


def runs_folder(overrides: Sequence[str] = ()) -> Path:
    """The folder of all runs: `paths.runs` of the configuration, which is the same for every experiment."""
    experiment = min(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
    return Path(compose([f"experiment={experiment}", *overrides]).paths.runs)


def _by_hash(known: Sequence[Submission]) -> dict[str, list[SubmittedRun]]:
    """The submitted runs by the digits that their folders end in, the oldest submission first."""
    tasks: dict[str, list[SubmittedRun]] = {}
    for submission in known:
        if submission.array_job_id is None and (array := submission.id_of_events()) is not None:
            submission = submission.with_id(array)
        for task in submission.tasks:
            if task.job_id is not None:
                tasks.setdefault(task.hash[:8], []).append(SubmittedRun(submission, task))
    return tasks


def _named(name: str, known: Sequence[Submission], runs: Path) -> list[Submission]:
    short = Path(name).name
    found = [one for one in known if one.folder.name.startswith(short) or one.array_job_id == name]
    if not found:
        newest = ", ".join(f"{one.folder.name} (job {one.array_job_id})" for one in known[-3:]) or "none"
        raise RunError(f"there is no submission {name} for runs in {runs}; the newest are: {newest}")
    return found
