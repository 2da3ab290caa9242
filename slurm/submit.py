"""Submits a sweep as one array of jobs: `python -m slurm.submit experiment=mnist_patches seed=0,1 cluster=dev`.

The words are those of `python -m experiments.train -m`, and `cluster=NAME cluster.key=value`. Runs that are finished or
queued are left out, so the same line again submits what is missing. It does not wait for the jobs.
"""

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from submitit.slurm.slurm import _make_sbatch_string

from experiments.command import finish
from experiments.errors import RunError
from experiments.files import explain_full_disk
from experiments.runners.run_dir import read_record
from experiments.train import say

from . import cluster as clusters
from .cluster import ClusterConfig
from .queue import NOT_ASKED, Job, SlurmError, SlurmTimeoutError, call, find_by_name, last_lines, read_queue
from .selection import SubmittedRun, read_jobs_of
from .submission import UNCLEAR_S, Submission, Task, new_folder, one_at_a_time, submissions
from .sweep import PlannedRun, plan

ROOT = Path(__file__).resolve().parent.parent
# Of a job that this command may be called in. SLURM_CONF and the like say where SLURM is, and stay.
_OF_A_JOB = re.compile(
    r"(SBATCH|SRUN|SALLOC|PMIX?|PMI2|OMPI)_|SLURM_(?!CONF$|CLUSTERS$|TIME_FORMAT$)"
    r"|(MASTER_ADDR|MASTER_PORT|RANK|LOCAL_RANK|GROUP_RANK|NODE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|SUBMITIT_EXECUTOR)$"
    r"|SINKFORMER_RUN_FOLDER$"
)
# sbatch waits for a busy controller in its own time; after so long it is not waited for.
SBATCH_TIMEOUT_S = 180.0
# Of what sbatch prints where it did not get an answer, and the controller may have taken the jobs all the same.
_NO_ANSWER = re.compile(r"time[d-]? ?out|connect|contact|communicat|transmit|transport|socket|0 bytes", re.IGNORECASE)
Parameters = dict[str, Any]


def submit(words: Sequence[str], parallelism: int | None = None) -> Submission | None:
    """Submits the runs of a sweep that are neither finished nor queued.

    Args:
        words: overrides of the sweep and of the cluster.
        parallelism: runs at the same time, or None for what the cluster's configuration says.

    Returns:
        The submission, or None where nothing is missing.

    Raises:
        RunError: for what the user can put right; nothing has been submitted then.
    """
    cluster, runs = prepare(words)
    with scrubbed_environment():
        clusters.check(cluster)
        folder_of_runs = runs_folder(runs)
        with one_at_a_time(folder_of_runs):
            states = states_of(runs, folder_of_runs)
            missing = [run for run, state in zip(runs, states, strict=True) if state == "missing"]
            say(f"{len(runs)} runs: {_count(states)}")
            if not missing:
                return None
            _test(parameters(cluster, len(missing), parallelism), len(missing), folder_of_runs)
            return _submit(missing, cluster, parallelism, words, folder_of_runs)


def prepare(words: Sequence[str]) -> tuple[ClusterConfig, list[PlannedRun]]:
    """The cluster and the runs that a command line names, which fit each other.

    Raises:
        RunError: for what is wrong in the words.
    """
    of_cluster, of_runs = clusters.split(words)
    cluster = clusters.cluster_config(of_cluster)
    named = {word.lstrip("+").partition("=")[0] for word in of_runs}
    for key, number in (("trainer.num_nodes", cluster.nodes), ("trainer.devices", cluster.processes_per_node)):
        if number > 1 and key not in named:
            of_runs.append(f"{key}={number}")
    runs = plan(of_runs)
    for run in runs:
        trainer = run.config["trainer"]
        asked = trainer["num_nodes"], trainer["devices"]
        if asked != (cluster.nodes, cluster.processes_per_node):
            raise RunError(
                f"the runs ask for trainer.num_nodes={asked[0]} and trainer.devices={asked[1]}, the job for "
                f"cluster.nodes={cluster.nodes} with {cluster.processes_per_node} processes each: "
                f"give cluster.nodes={asked[0]} cluster.tasks_per_node={asked[1]}, or leave the trainer's out"
            )
    return cluster, runs


def runs_folder(runs: Sequence[PlannedRun]) -> Path:
    """The folder that all runs of a sweep lie in.

    Raises:
        RunError: where there is more than one.
    """
    folders = {run.config["paths"]["runs"] for run in runs}
    if len(folders) > 1:
        raise RunError(f"the runs of one submission lie in one folder; paths.runs names {', '.join(sorted(folders))}")
    return Path(folders.pop())


def states_of(runs: Sequence[PlannedRun], folder: Path) -> list[str]:
    """ "finished", "queued" (or running), "diverged" or "missing", for each run."""
    read_queue()  # one that does not answer is not an empty one
    finished = {run.run.hash for run in runs if run.run.finished}
    unfinished = {run.run.hash for run in runs} - finished
    queued: set[str] = set()
    tasks: list[SubmittedRun] = []
    for submission in submissions(folder):
        if not unfinished & {task.hash for task in submission.tasks}:
            continue
        if submission.array_job_id is None:
            submission = _found_again(submission)
        if submission.array_job_id is not None:
            tasks += [SubmittedRun(submission, task) for task in submission.tasks if task.hash in unfinished]
        elif _may_be_queued(submission):
            queued |= {task.hash for task in submission.tasks}
    queued |= _alive(tasks)
    diverged = {run.run.hash for run in runs if run.run.hash in unfinished - queued and _has_diverged(run.run.path)}
    if diverged:
        names = [run.run.path.name for run in runs if run.run.hash in diverged]
        say(
            f"{len(diverged)} runs have diverged, and would again: {', '.join(names[:3])}{', …' * (len(names) > 3)}. "
            "They are left out: change what slurm.status tells of them, or move their folders away to train them anew"
        )
    words = ((finished, "finished"), (queued, "queued"), (diverged, "diverged"))
    return [next((word for those, word in words if run.run.hash in those), "missing") for run in runs]


def _alive(tasks: Sequence[SubmittedRun]) -> set[str]:
    """The hashes of the runs whose jobs are queued or run, or may be though squeue does not list them; says so."""
    jobs = read_jobs_of(tasks)
    alive: set[str] = set()
    unlisted: dict[tuple[Path, str], list[str]] = {}
    for task in tasks:
        job = jobs.get(task.job_id)
        if job is None or not job.listed:
            reason = _why_alive(task, job)
            if reason is None:
                continue
            unlisted.setdefault((task.submission.folder, reason), []).append(task.job_id)
        elif not job.alive:
            continue
        alive.add(task.task.hash)
    for (folder, reason), ids in unlisted.items():
        say(
            f"warning: squeue does not list {len(ids)} jobs of {folder} ({', '.join(ids[:3])}"
            f"{', …' * (len(ids) > 3)}), and {reason}. Their runs count as queued"
        )
    return alive


def _why_alive(task: SubmittedRun, job: Job | None) -> str | None:
    """Why a job that squeue does not list may be there all the same; None where it has ended."""
    if (task.events() or [{}])[-1].get("event") in ("ended", "cancelled"):
        return None
    if job is None:
        left = UNCLEAR_S - task.submission.age_s
        return f"they may appear in {left / 60:.0f} more minutes" if left > 0 else None
    if not job.alive:
        return None
    if job.state == NOT_ASKED:
        return f"its cluster {task.submission.cluster_name} cannot be asked ({job.reason})"
    return f"sacct says {job.state}: if `sacctmgr show runawayjobs` has them, move that folder away"


def _has_diverged(folder: Path) -> bool:
    with suppress(RunError):  # no card, or a damaged one, which the training refuses
        return read_record(folder / "run.json").get("state") == "diverged"
    return False


def _found_again(submission: Submission) -> Submission:
    """A submission of which nobody knows the id, with the id where its jobs tell it by their name or their events."""
    array = submission.id_of_events() or find_by_name(submission.job_name, submission.created[:10])
    if array is None:
        return submission
    submission = submission.with_id(array)
    submission.write()
    return submission


def _may_be_queued(submission: Submission) -> bool:
    """Whether jobs that nobody has seen may be there all the same; says so."""
    if submission.answer is not None:
        say(
            f"warning: sbatch took the jobs of {submission.folder} and answered {submission.answer!r}, which names no "
            f"job; nor is there one of the name {submission.job_name}. Its runs count as queued: where they are not, "
            "move that folder away"
        )
        return True
    if (left := UNCLEAR_S - submission.age_s) > 0:
        say(
            f"warning: sbatch did not say whether it took the jobs of {submission.folder}; they are not in the queue "
            f"yet, and count as queued for {left / 60:.0f} more minutes. The same line again after that submits them"
        )
    return left > 0


def parameters(cluster: ClusterConfig, number: int, parallelism: int | None) -> Parameters:
    """What submitit is told of a job, for an array of so many."""
    options = {"requeue": True} if cluster.requeue else {"no-requeue": True}
    setup = [shlex.join(["module", "load", module]) for module in cluster.modules]
    setup += [f"export {name}={shlex.quote(value)}" for name, value in sorted(cluster.environment.items())]
    setup += [f"export PYTHONPATH={shlex.quote(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}"]
    if cluster.nodes * cluster.processes_per_node > 1 and "MASTER_PORT" not in cluster.environment:
        # This script runs on the node of the first process; srun hands what it exports to all of them.
        setup += [f"MASTER_PORT=$({python(cluster)} -m slurm.port) || exit", "export MASTER_PORT"]
    wanted: Parameters = {
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "nodes": cluster.nodes,
        "ntasks_per_node": cluster.processes_per_node,
        "gpus_per_node": cluster.gpus_per_node or None,
        "cpus_per_task": cluster.cpus_per_task,
        "mem": cluster.mem,
        "time": cluster.minutes,
        "signal_delay_s": cluster.signal_before_end_s,
        "array_parallelism": parallelism or cluster.array_parallelism or number,
        "setup": setup,
        # Since 22.05 srun does not take the number of cores over from the job.
        "srun_args": ["--kill-on-bad-exit=1", f"--cpus-per-task={cluster.cpus_per_task}"],
        # An option that is false is left out: sbatch has none with that value.
        "additional_parameters": {
            key: value for key, value in {**options, **cluster.sbatch}.items() if value not in (False, None)
        },
    }
    given = {key: value for key, value in wanted.items() if value is not None}
    return given | {"wckey": None}  # submitit's own is refused where a cluster keeps a list of them


def python(cluster: ClusterConfig) -> str:
    """The command that starts Python in a job."""
    command = shlex.quote(sys.executable)
    return f"{cluster.container} {command}" if cluster.container else command


def script(cluster: ClusterConfig, number: int, parallelism: int | None, folder: Path) -> str:
    """What sbatch would be given, for a submission in this folder."""
    command = f"{python(cluster)} -u -m slurm.job --submission {shlex.quote(str(folder))}"
    return _make_sbatch_string(
        command=command,
        folder=folder,
        job_name=f"sinkformer-{folder.name[-8:]}",
        **parameters(cluster, number, parallelism),
        map_count=number if number > 1 else None,
    )


def _test(wanted: Parameters, number: int, runs: Path) -> None:
    """Has SLURM check a job of this kind without submitting it."""
    text = _make_sbatch_string(command="true", folder=runs, **wanted)
    words = ["sbatch", "--test-only", "--output=/dev/null", "--error=/dev/null"]
    if number > 1:
        words.append(f"--array=0-{number - 1}")
    done = call(words, SBATCH_TIMEOUT_S, text)
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise RunError(f"SLURM would not take these jobs: {'; '.join(lines) or done.returncode}")


def _submit(
    runs: Sequence[PlannedRun], cluster: ClusterConfig, parallelism: int | None, words: Sequence[str], folder: Path
) -> Submission:
    place = new_folder(folder)
    tasks = [
        Task(index, None, str(run.run.path.absolute()), run.run.hash, run.overrides) for index, run in enumerate(runs)
    ]
    created = datetime.now(UTC).isoformat(timespec="seconds")
    command = shlex.join(["python", "-m", "slurm.submit", *words])
    submission = Submission(place, created, command, asdict(cluster), None, tasks)
    file = place / "submission.sh"
    file.write_text(script(cluster, len(runs), parallelism, place), encoding="utf-8")
    submission.write()  # before there are jobs: one that nobody has written down could be submitted twice
    try:
        done = call(["sbatch", "--parsable", str(file)], SBATCH_TIMEOUT_S)
        if done.returncode != 0:
            reason = last_lines(done.stderr) or f"exit code {done.returncode}"
            return _unless_refused(submission, reason, _NO_ANSWER.search(reason) is None)
    except SlurmTimeoutError as error:
        return _unless_refused(submission, str(error), False)
    # The jobs are there: from here on, nothing takes the folder away.
    submission = replace(submission, answer=done.stdout.strip())
    submission.write()
    array = array_id(done.stdout)
    if array is not None:
        submission = submission.with_id(array)
        submission.write()
        return submission
    try:
        return _found_again(submission)
    except SlurmError as error:
        say(f"warning: {error}")
        return submission


def _unless_refused(submission: Submission, reason: str, answered: bool) -> Submission:
    """A submission whose sbatch has failed, where its jobs are there all the same.

    Args:
        submission: as it was written.
        reason: what sbatch said.
        answered: whether that was SLURM's answer, and not that there was none.

    Raises:
        RunError: where they are not: SLURM has refused them, or it is not clear.
    """
    found = submission
    try:
        found = _found_again(submission)
    except SlurmError as error:
        reason, answered = f"{reason}; {error}", False
    if found.array_job_id is not None:
        say(f"warning: sbatch said {reason!r}, and SLURM has taken the jobs all the same")
        return found
    if answered:
        shutil.rmtree(submission.folder)
        raise RunError(f"SLURM has refused: {reason}")
    raise RunError(
        f"it is not clear whether SLURM has taken these jobs ({reason}): give the same line again in some minutes. It "
        f"looks for them by their name, {submission.job_name}, and submits none twice"
    )


def array_id(answer: str) -> str | None:
    """The id in what sbatch prints, `77`, `77;cluster` or `Submitted batch job 77` on a line; None where unclear.

    A site's wrapper may print more, numbers among it.
    """
    plain = re.findall(r"^\s*(\d+)(?:;\S*)?\s*$", answer, re.MULTILINE)
    found = set(plain or re.findall(r"\bSubmitted batch job (\d+)", answer))
    return found.pop() if len(found) == 1 else None


@contextmanager
def scrubbed_environment() -> Iterator[None]:
    """The environment without what it has of a job: sbatch would take it for the new job's own."""
    before = dict(os.environ)
    for name in before:
        if _OF_A_JOB.match(name):
            del os.environ[name]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def dry_run(words: Sequence[str], parallelism: int | None = None) -> None:
    """Prints the table of runs and what sbatch would be given.

    It works without SLURM too, where nothing is queued, and with one that does not answer.

    Raises:
        RunError: for what the user can put right.
    """
    cluster, runs = prepare(words)
    folder = runs_folder(runs)
    states = ["finished" if run.run.finished else "missing" for run in runs]
    with scrubbed_environment():
        if shutil.which("sbatch") is None:
            say("there is no SLURM here: the cluster's names are not checked, and no run is queued")
        else:
            try:
                clusters.check(cluster)
                states = states_of(runs, folder)
            except SlurmError as error:
                say(
                    f"warning: {error}. So the cluster's names are not checked, and runs that are queued by now are "
                    "shown as to be submitted"
                )
    table = Table("", "state", "run", "overrides", box=None, pad_edge=False)
    for number, (run, state) in enumerate(zip(runs, states, strict=True)):
        table.add_row(str(number), state, run.run.path.name, shlex.join(run.overrides))
    wide = Console(width=None if sys.stdout.isatty() else 10_000)
    wide.print(table)
    missing = states.count("missing")
    print(f"\n{len(runs)} runs: {_count(states)}\n")
    if missing:
        print(script(cluster, missing, parallelism, folder.absolute() / ".submissions" / "DATE-TIME-00000000"))


def _count(states: Sequence[str]) -> str:
    words = {
        "finished": "finished",
        "queued": "queued or running",
        "diverged": "diverged",
        "missing": "to be submitted",
    }
    return ", ".join(f"{states.count(state)} {word}" for state, word in words.items() if state in states)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m slurm.submit", description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="+", help="as for python -m experiments.train -m, and cluster=NAME")
    parser.add_argument("--dry-run", action="store_true", help="print the runs and the script, and submit nothing")
    parser.add_argument("--array-parallelism", type=int, metavar="N", help="runs at the same time")
    options = parser.parse_intermixed_args(arguments)
    if options.array_parallelism is not None and options.array_parallelism < 1:
        parser.error(f"--array-parallelism must be at least 1, got {options.array_parallelism}")
    try:
        if options.dry_run:
            dry_run(options.overrides, options.array_parallelism)
            return
        with explain_full_disk("what has been submitted by now stays"):
            submission = submit(options.overrides, options.array_parallelism)
    except RunError as error:
        say(f"error: {error}")
        raise SystemExit(1) from None
    if submission is None:
        print("nothing to submit")
        return
    array = submission.array_job_id
    print(
        f"submitted {len(submission.tasks)} runs as job {array or f'of the name {submission.job_name}'}\n"
        f"folder: {submission.folder}\n"
        f"watch:  python -m slurm.status {submission.folder.name}\n"
        f"        squeue {f'--job {array}' if array else f'--me --name={submission.job_name}'}"
    )


if __name__ == "__main__":
    finish(main)
