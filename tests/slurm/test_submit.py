"""Submitting, with a SLURM of shell scripts: what is asked of it, in which environment, and what is written down."""

import errno
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.errors import RunError
from slurm import cluster, submission, submit

ROOT = Path(__file__).parents[2]


@pytest.fixture
def login_node(slurm, monkeypatch):
    """Two partitions, two accounts, an empty queue; sbatch gives the id 77."""
    monkeypatch.delenv("SLURM_CONF", raising=False)
    template = (slurm.folder / "squeue").read_text()
    for name in ("sbatch", "sinfo", "sacctmgr", "srun"):
        (slurm.folder / name).write_text(template.replace("squeue", name))
        (slurm.folder / name).chmod(0o755)
    slurm.answers("sbatch", "Submitted batch job 77\n")
    slurm.answers("sinfo", "gpu*\nlong\n")
    slurm.answers("sacctmgr", "physics\nmaths\n")
    return slurm


def read(folder: Path) -> dict:
    return json.loads((folder / "submission.json").read_text())


def test_one_array_of_what_is_missing(login_node, sweep, monkeypatch):
    sweep.write(1, sweep.attempt("finished"), accuracy=0.5)
    done = submit.submit(sweep.overrides)
    assert done is not None
    content = read(done.folder)
    assert content["array_job_id"] == "77"
    assert [(task["index"], task["job_id"]) for task in content["tasks"]] == [(0, "77_0"), (1, "77_1")]
    wanted = [sweep.planned[index].run for index in (0, 2)]
    assert [task["hash"] for task in content["tasks"]] == [run.hash for run in wanted]
    assert [task["folder"] for task in content["tasks"]] == [str(run.path) for run in wanted]
    script = (done.folder / "77_submission.sh").read_text()
    assert "#SBATCH --array=0-1%2" in script
    assert "#SBATCH --signal=USR2@120" in script
    assert "#SBATCH --requeue" in script
    for index, task in enumerate(content["tasks"]):
        job = pickle.loads((done.folder / f"77_{index}_submitted.pkl").read_bytes()).function
        assert list(job.overrides) == task["overrides"]
        assert (job.index, job.folder, job.submission) == (index, task["folder"], str(done.folder))
    assert login_node.asked("sbatch").count("--test-only") == 1

    login_node.queue(("77_0", "RUNNING", 0, ""), ("77_1", "PENDING", 1, "BeginTime"))
    assert submit.submit(sweep.overrides) is None
    # The first has ended without a result: it is missing again, the second is not.
    login_node.queue(("77_0", "FAILED", 0, ""), ("77_1", "PENDING", 1, "BeginTime"))
    again = submit.submit(sweep.overrides)
    assert [task["hash"] for task in read(again.folder)["tasks"]] == [wanted[0].hash]
    assert read(again.folder)["tasks"][0]["job_id"] == "77"


def test_the_environment_of_a_job_stays_behind(login_node, sweep, monkeypatch):
    of_a_job = {
        "SLURM_CPUS_PER_TASK": "1",
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
        "SLURM_JOB_ID": "5",
        "SBATCH_PARTITION": "elsewhere",
        "SRUN_CPUS_PER_TASK": "1",
        "PMIX_RANK": "0",
        "PMI_RANK": "0",
        "MASTER_PORT": "1234",
        "RANK": "0",
        "SINKFORMER_RUN_FOLDER": "elsewhere",
    }
    kept = {"SLURM_CONF": "/etc/slurm/slurm.conf", "SLURM_CLUSTERS": "here", "WANDB_MODE": "offline"}
    for name, value in (of_a_job | kept).items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    submit.submit(sweep.overrides)
    names = {line.partition("=")[0]: line.partition("=")[2] for line in login_node.environment("sbatch").splitlines()}
    assert not set(of_a_job) & set(names)
    assert {name: names[name] for name in kept} == kept
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cluster.partition=wrong"], "there is no partition wrong on this cluster: there are gpu, long"),
        (["cluster.account=biology"], "you have no account biology on this cluster: there are maths, physics"),
        (
            ["cluster=example_large"],
            r"cluster\.account is not set: give .*=… \(there are maths, physics\)",
        ),
        (["cluster=example_large", "cluster.account=maths"], r"cluster\.partition is not set.*there are gpu, long"),
        (["cluster=nowhere"], "nowhere"),
        (["cluster.nodse=2"], "nodse"),
        (["cluster.time=long"], "cluster.time=long is no time limit"),
        (["cluster.nodes=1,2"], "sweep"),
        (["trainer.devices=2"], r"give cluster\.nodes=1 cluster\.tasks_per_node=2"),
        (["cluster.nodes=2", "trainer.num_nodes=1"], r"give cluster\.nodes=1"),
        (["cluster"], "missing EQUAL"),
    ],
)
def test_said_before_anything_is_submitted(login_node, sweep, words, message):
    with pytest.raises(RunError, match=message):
        submit.submit([*sweep.overrides, *words])
    assert login_node.asked("sbatch") == []
    assert not sweep.runs.exists()


def test_no_default_partition(login_node, sweep):
    login_node.answers("sinfo", "gpu\nlong\n")
    with pytest.raises(RunError, match=r"no default partition: give cluster\.partition=…, of gpu, long"):
        submit.submit(sweep.overrides)


def test_refused_by_slurm(login_node, sweep):
    login_node.answers("sbatch", err="allocation failure: Invalid qos specification", code=1)
    with pytest.raises(RunError, match="SLURM would not take these jobs: allocation failure: Invalid qos"):
        submit.submit(sweep.overrides)
    assert list((sweep.runs / ".submissions").glob("2*")) == []


def test_devices_follow_from_the_cluster(login_node, sweep):
    done = submit.submit([*sweep.overrides, "cluster.nodes=2", "cluster.gpus_per_node=4"])
    overrides = read(done.folder)["tasks"][0]["overrides"]
    assert overrides[-2:] == ["trainer.num_nodes=2", "trainer.devices=4"]
    assert read(done.folder)["tasks"][0]["hash"] == sweep.planned[0].run.hash
    script = (done.folder / "77_submission.sh").read_text()
    for line in ("--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4"):
        assert f"#SBATCH {line}" in script
    assert "-m slurm.port" in script


def test_a_port_that_is_set_stays(login_node, sweep):
    done = submit.submit([*sweep.overrides, "cluster.nodes=2", "cluster.environment.MASTER_PORT='29500'"])
    script = (done.folder / "77_submission.sh").read_text()
    assert "export MASTER_PORT=29500" in script
    assert "slurm.port" not in script


def test_values_reach_the_shell_as_they_are(login_node, sweep):
    value = "a b'c\"d $HOME `id` \\ é"
    words = [f"cluster.environment.NOTE={submit.clusters.override('', value)[1:]}", 'cluster.modules=["cuda/12;id"]']
    script = (submit.submit([*sweep.overrides, *words]).folder / "77_submission.sh").read_text()
    (module,) = [line for line in script.splitlines() if line.startswith("module")]
    assert module == "module load 'cuda/12;id'"
    (export,) = [line for line in script.splitlines() if line.startswith("export NOTE")]
    shown = subprocess.run(["bash", "-c", f'{export}; printf %s "$NOTE"'], capture_output=True, text=True, check=True)
    assert shown.stdout == value


def test_one_s_own_cluster(tmp_path, monkeypatch):
    (tmp_path / "local" / "cluster").mkdir(parents=True)
    mine = "defaults:\n  - default\npartition: night\nenvironment:\n  A: b\n"
    (tmp_path / "local" / "cluster" / "mine.yaml").write_text(mine)
    monkeypatch.setattr(cluster, "CONFIGS", tmp_path)
    found = cluster.cluster_config(["cluster=mine", "cluster.environment.C=d", "cluster.time='2:00:00'"])
    assert (found.partition, found.environment, found.minutes, found.nodes) == ("night", {"A": "b", "C": "d"}, 120, 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("90", 90), ("1:30", 2), ("2:00:00", 120), ("1-0", 1440), ("1-12:30", 2190), ("0-0:0:1", 1), ("12:00:00", 720)],
)
def test_times(text, expected):
    assert cluster.minutes(text) == expected


def test_a_submitter_that_died_before_it_wrote_the_ids(login_node, sweep):
    done = submit.submit(sweep.overrides)
    lost = read(done.folder) | {"array_job_id": None}
    for task in lost["tasks"]:
        task["job_id"] = None
    (done.folder / "submission.json").write_text(json.dumps(lost))
    script = (login_node.folder / "squeue").read_text()
    # By the name of its jobs they are found, with the array's id; the whole queue is asked for otherwise.
    (login_node.folder / "squeue").write_text(
        script.replace("#!/bin/sh", f'#!/bin/sh\ncase "$*" in *--name={done.job_name}*) echo 77; exit;; esac')
    )
    login_node.queue(("77_0", "RUNNING", 0, ""), ("77_1", "RUNNING", 0, ""), ("77_2", "PENDING", 0, ""))
    assert submit.submit(sweep.overrides) is None
    assert [task["job_id"] for task in read(done.folder)["tasks"]] == ["77_0", "77_1", "77_2"]


def test_a_submitter_that_was_killed_leaves_no_lock(tmp_path, monkeypatch):
    code = (
        "import sys, time; from pathlib import Path; from slurm.submission import one_at_a_time\n"
        "with one_at_a_time(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        monkeypatch.setattr(submission, "LOCK_TIMEOUT_S", 0.2)
        with (
            pytest.raises(RunError, match=f"another submitter .process {holder.pid} on "),
            submission.one_at_a_time(tmp_path),
        ):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        start = time.monotonic()
        with submission.one_at_a_time(tmp_path):
            assert time.monotonic() - start < 5


def test_dry_run(login_node, sweep, capsys):
    sweep.write(0, sweep.attempt("finished"), accuracy=0.5)
    submit.dry_run([*sweep.overrides, "cluster.partition=long"], 1)
    shown = capsys.readouterr().out
    assert [line.split()[1] for line in shown.splitlines()[1:4]] == ["finished", "missing", "missing"]
    assert sweep.planned[1].run.path.name in shown
    assert "#SBATCH --partition=long" in shown
    assert "#SBATCH --array=0-1%1" in shown
    assert login_node.asked("sbatch") == []
    assert not (sweep.runs / ".submissions").exists()


def test_dry_run_without_slurm(sweep, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    submit.dry_run(sweep.overrides)
    shown = capsys.readouterr()
    assert "there is no SLURM here" in shown.err
    assert "#SBATCH --array=0-2%3" in shown.out


@pytest.mark.parametrize("blocked", ["", ".submissions"])
def test_a_folder_of_runs_that_cannot_be_written(login_node, sweep, blocked):
    place = sweep.runs / blocked
    place.parent.mkdir(exist_ok=True)
    place.write_text("a file")
    with pytest.raises(RunError, match=r"the folder of runs .* cannot be written \(.*: give another, paths\.runs="):
        submit.submit(sweep.overrides)
    assert "--test-only" not in login_node.asked("sbatch")


def test_full_disk(login_node, sweep, monkeypatch, capsys):
    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(submission, "write_json", full)
    with pytest.raises(SystemExit):
        submit.main(sweep.overrides)
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: the disk is full")
    assert "Traceback" not in said


DOWN = "slurm_load_partitions: Unable to contact slurm controller (connect failure)"


@pytest.mark.parametrize("silent", ["sinfo", "squeue"])
def test_dry_run_while_the_controller_is_down(login_node, sweep, capsys, silent):
    sweep.write(0, sweep.attempt("finished"), accuracy=0.5)
    login_node.answers(silent, err=DOWN, code=1)
    submit.dry_run(sweep.overrides)
    shown = capsys.readouterr()
    assert shown.err.startswith("warning: ")
    assert DOWN in shown.err
    assert [line.split()[1] for line in shown.out.splitlines()[1:4]] == ["finished", "missing", "missing"]
    assert "#SBATCH --array=0-1%2" in shown.out
    with pytest.raises(RunError, match="Unable to contact slurm controller"):
        submit.submit(sweep.overrides)


def test_dry_run_refuses_names_that_the_cluster_lacks(login_node, sweep):
    with pytest.raises(RunError, match="there is no partition fast"):
        submit.dry_run([*sweep.overrides, "cluster.partition=fast"])


@pytest.mark.parametrize("number", ["0", "-2", "many"])
def test_runs_at_the_same_time_are_at_least_one(number, capsys):
    with pytest.raises(SystemExit) as stopped:
        submit.main(["experiment=mnist_patches", "--dry-run", f"--array-parallelism={number}"])
    assert stopped.value.code == 2
    assert "--array-parallelism" in capsys.readouterr().err
