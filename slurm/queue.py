"""What SLURM knows of jobs: its queue (`squeue`) and, where the cluster keeps accounts, its records (`sacct`).

Array tasks are jobs of their own here, named as SLURM names them: `123_4`. Nothing goes through a shell.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.errors import RunError

# States that are ends. Whatever else SLURM says of a job is something that it has still to do: each version has further
# words for that, and a job that is taken for ended is submitted a second time.
ENDS = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
    }
)
WAITING = frozenset(
    {
        "PENDING",
        "CONFIGURING",
        "EXPEDITING",
        "REQUEUED",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "SPECIAL_EXIT",
        "RESV_DEL_HOLD",
    }
)
# The state, in a word of ours, of a job that squeue does not list and whose cluster cannot be asked.
NOT_ASKED = "NOT_ASKED"
_CHANGES_THE_FORM = re.compile(r"(SQUEUE|SACCT|SCANCEL)_|SLURM_TIME_FORMAT")
TIMEOUT_S = 30.0
# Job ids in one command: a command line has a longest length.
AT_ONCE = 500
# Widths are generous, since squeue cuts off what is longer.
_SQUEUE_FIELDS = ("JobArrayID:24|", "ArrayTaskID:200|", "State:24|", "RestartCnt:12|", "NodeList:100|", "Reason:200|")
_SACCT_FIELDS = ("JobID", "State", "NodeList", "ExitCode")


class SlurmError(RunError):
    """SLURM is not there, or does not answer, or refuses."""


@dataclass(frozen=True)
class Job:
    """A job, or one task of an array.

    Attributes:
        id: `123`, or `123_4` for a task.
        state: SLURM's long name of it, such as PENDING.
        restarts: how often it has been requeued, as far as the queue still knows.
        nodes: where it runs or ran.
        reason: why it waits, in SLURM's word, or why it ended.
        listed: whether squeue lists it; else the accounts alone know it.
    """

    id: str
    state: str
    restarts: int = 0
    nodes: str = ""
    reason: str = ""
    listed: bool = True

    @property
    def alive(self) -> bool:
        """Whether it is queued or runs."""
        return self.state not in ENDS

    @property
    def waiting(self) -> bool:
        """Whether it is queued and does not run."""
        return self.state in WAITING


def read_queue(users: Collection[str] = (), cluster: str | None = None) -> dict[str, Job]:
    """The jobs of the queue by id, with those that ended in the last minutes, which `squeue` still lists.

    Args:
        users: whose jobs; one's own where none is given.
        cluster: whose queue, of a site with several; None for that which SLURM's commands ask by themselves.

    Raises:
        SlurmError: where there is no SLURM, or it does not answer.
    """
    whose = f"--user={','.join(sorted(users))}" if users else "--me"
    words = ["squeue", "--noheader", "--array", "--states=all", whose, f"--Format={','.join(_SQUEUE_FIELDS)}"]
    words += _of_cluster(cluster)
    jobs = {}
    for line in run(words).splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) < len(_SQUEUE_FIELDS) or not cells[0][:1].isdigit():
            continue
        base, tasks, state, restarts, nodes, reason = cells[: len(_SQUEUE_FIELDS)]
        # Versions differ in whether the first field is the array's id or the task's.
        for identifier in expand(base if "_" in base or tasks in ("", "N/A") else f"{base}_{tasks}"):
            count = int(restarts) if restarts.isdigit() else 0
            jobs[identifier] = Job(identifier, state, count, nodes, "" if reason == "None" else reason)
    return jobs


def _of_cluster(name: str | None) -> list[str]:
    return [] if name is None else [f"--clusters={name}"]


def owner(folder: Path) -> str:
    """The name of who owns a folder, or the number of one whom this machine has no name for; squeue takes either."""
    try:
        return folder.owner()
    except KeyError:
        return str(folder.stat().st_uid)


def read_accounts(job_ids: Collection[str], cluster: str | None = None) -> dict[str, Job]:
    """The last state of jobs, whosever, by the accounts of a cluster; nothing where it keeps none.

    Raises:
        SlurmError: where the accounts do not answer in time.
    """
    jobs: dict[str, Job] = {}
    ids = sorted(set(job_ids))
    for start in range(0, len(ids), AT_ONCE):
        for identifier, state, nodes, code in _read_sacct(
            "--allusers", f"--jobs={','.join(ids[start : start + AT_ONCE])}", *_of_cluster(cluster)
        ):
            state, _, by = state.partition(" ")  # "CANCELLED by 1000"
            for one in expand(identifier):
                jobs[one] = Job(one, state, nodes=nodes, reason=f"{by} exit code {code}".strip(), listed=False)
    return jobs


def _read_sacct(*which: str) -> Iterator[list[str]]:
    """The accounts' lines about some jobs, as cells; none where the cluster keeps no accounts."""
    if shutil.which("sacct") is None:
        return
    form = f"--format={','.join(_SACCT_FIELDS)}"
    try:
        text = run(["sacct", "--noheader", "--parsable2", "--allocations", *which, form])
    except SlurmTimeoutError:
        raise
    except SlurmError as error:
        # "Slurm accounting storage is disabled", or the database is down: the queue and the run cards remain.
        if re.search(r"accounting|slurmdbd|database", str(error), re.IGNORECASE):
            return
        raise
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        # Between them may stand what a site's wrapper prints.
        if len(cells) >= len(_SACCT_FIELDS) and cells[0][:1].isdigit():
            yield cells[: len(_SACCT_FIELDS)]


def find_by_name(name: str, since: str) -> str | None:
    """The id of the job or array of a name that no other has; None where neither the queue nor the accounts have it.

    Args:
        name: of the job.
        since: the day before which it has not been submitted, `2026-11-29`.

    Raises:
        SlurmError: where SLURM does not answer, so that nobody knows.
    """
    listed = run(["squeue", "--noheader", "--me", "--states=all", f"--name={name}", "--format=%F"])
    ids = re.findall(r"^\s*(\d+)\s*$", listed, re.MULTILINE)
    if not ids:
        ids = [cells[0].partition("_")[0] for cells in _read_sacct(f"--name={name}", f"--starttime={since}")]
    return min(ids, key=int) if ids else None


def read_jobs(job_ids: Collection[str], users: Collection[str] = (), cluster: str | None = None) -> dict[str, Job]:
    """What is known of these jobs: from the queue, and from the accounts for those that it no longer lists.

    Args:
        job_ids: of the jobs.
        users: whose jobs; one's own where none is given.
        cluster: that sbatch has named beside their ids. Some sites' wrappers print a name that squeue does not know:
            then it is asked without, and jobs that it does not list are `NOT_ASKED`.

    Raises:
        SlurmError: where there is no SLURM, or it does not answer.
    """
    try:
        queue, refusal = read_queue(users, cluster), ""
    except SlurmTimeoutError:
        raise
    except SlurmError as error:
        if cluster is None:
            raise
        queue, refusal, cluster = read_queue(users), str(error), None
    gone = [one for one in job_ids if one not in queue]
    known = queue | (read_accounts({one.partition("_")[0] for one in gone}, cluster) if gone else {})
    if refusal:
        known = {one: Job(one, NOT_ASKED, reason=refusal, listed=False) for one in job_ids} | known
    return {one: known[one] for one in job_ids if one in known}


def cancel(job_ids: Sequence[str], cluster: str | None = None) -> None:
    """Takes jobs and single tasks of arrays out of the queue, or ends them; those that are gone by now do no harm.

    Args:
        job_ids: of the jobs and tasks.
        cluster: that sbatch has named beside their ids.

    Raises:
        SlurmError: where SLURM refuses.
    """
    for start in range(0, len(job_ids), AT_ONCE):
        try:
            run(["scancel", *_of_cluster(cluster), *job_ids[start : start + AT_ONCE]])
        except SlurmError as error:
            if not re.search(r"already complet|Invalid job id|does not exist", str(error)):
                raise


class SlurmTimeoutError(SlurmError):
    """SLURM has not answered in time."""


def run(words: Sequence[str], timeout: float = TIMEOUT_S) -> str:
    """What one of SLURM's commands prints; settings of the caller's environment do not change its form.

    Args:
        words: the command and its arguments.
        timeout: seconds.

    Raises:
        SlurmError: where it is not there, does not answer (`SlurmTimeoutError`), or refuses.
    """
    done = call(words, timeout)
    if done.returncode != 0:
        raise SlurmError(f"{words[0]} refuses: {last_lines(done.stderr) or f'exit code {done.returncode}'}")
    return done.stdout


def call(words: Sequence[str], timeout: float, text: str | None = None) -> "subprocess.CompletedProcess[str]":
    """Runs one of SLURM's commands to its end, whatever its exit code.

    Args:
        words: the command and its arguments.
        timeout: seconds.
        text: its input.

    Raises:
        SlurmError: where it is not there, or does not answer (`SlurmTimeoutError`).
    """
    environment = {name: value for name, value in os.environ.items() if not _CHANGES_THE_FORM.match(name)}
    try:
        return subprocess.run(
            words,
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=timeout,
            env=environment | {"LC_ALL": "C.UTF-8"},
            check=False,
        )
    except FileNotFoundError:
        raise SlurmError(
            f"there is no SLURM on this machine ({words[0]} is not on the PATH): call this on a login node"
        ) from None
    except subprocess.TimeoutExpired:
        raise SlurmTimeoutError(
            f"SLURM has not answered {words[0]} within {timeout:g} s: its controller is busy or down "
            "(`scontrol ping`); try again later"
        ) from None


def last_lines(text: str) -> str:
    """What a command says in the end, on one line."""
    return "; ".join([line.strip() for line in text.splitlines() if line.strip()][-2:])


def expand(identifier: str) -> Iterator[str]:
    """The tasks of an id such as `123_[0-2,7%4]`, one by one; ids of single jobs and tasks are themselves.

    `0-8:4` counts by four, and what follows `%` is how many may run at once.
    """
    base, _, tasks = identifier.partition("_")
    if not tasks:
        yield identifier
        return
    for part in tasks.strip("[]").partition("%")[0].split(","):
        if match := re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?", part):
            for task in range(int(match[1]), int(match[2]) + 1, int(match[3] or 1)):
                yield f"{base}_{task}"
        else:
            yield f"{base}_{part}"
