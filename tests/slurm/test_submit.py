"""Submitting, with a SLURM of shell scripts: what is asked of it, in which environment, and what is written down."""

import dataclasses
import errno
import json
import os
import pwd
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments import search_path
from experiments.errors import RunError
from experiments.runners.run_dir import override
from slurm import cancel, cluster, queue, status, submission, submit
from slurm.job import TrainingJob

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
    script = (done.folder / "submission.sh").read_text()
    assert "#SBATCH --array=0-1%2" in script
    assert "#SBATCH --signal=USR2@120" in script
    assert "#SBATCH --requeue" in script
    assert f"-u -m slurm.job --submission {done.folder}" in script
    for index, task in enumerate(content["tasks"]):
        job = TrainingJob.of(done.folder, index)
        assert list(job.overrides) == task["overrides"]
        assert (job.index, job.folder, job.submission) == (index, task["folder"], str(done.folder))
        assert (job.requeue, job.max_restarts, job.max_timeouts, job.signal_before_end_s) == (True, 50, 20, 120)
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
    script = (done.folder / "submission.sh").read_text()
    for line in ("--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4"):
        assert f"#SBATCH {line}" in script
    assert "-m slurm.port" in script


def test_a_port_that_is_set_stays(login_node, sweep):
    done = submit.submit([*sweep.overrides, "cluster.nodes=2", "cluster.environment.MASTER_PORT='29500'"])
    script = (done.folder / "submission.sh").read_text()
    assert "export MASTER_PORT=29500" in script
    assert "slurm.port" not in script


def test_values_reach_the_shell_as_they_are(login_node, sweep):
    value = "a b'c\"d $HOME `id` \\ é"
    words = [f"cluster.environment.NOTE={override('', value)[1:]}", 'cluster.modules=["cuda/12;id"]']
    script = (submit.submit([*sweep.overrides, *words]).folder / "submission.sh").read_text()
    (module,) = [line for line in script.splitlines() if line.startswith("module")]
    assert module == "module load 'cuda/12;id'"
    (export,) = [line for line in script.splitlines() if line.startswith("export NOTE")]
    shown = subprocess.run(["bash", "-c", f'{export}; printf %s "$NOTE"'], capture_output=True, text=True, check=True)
    assert shown.stdout == value


def test_one_s_own_cluster(tmp_path, monkeypatch):
    (tmp_path / "local" / "cluster").mkdir(parents=True)
    mine = "defaults:\n  - default\npartition: night\nenvironment:\n  A: b\n"
    (tmp_path / "local" / "cluster" / "mine.yaml").write_text(mine)
    monkeypatch.setattr(search_path, "LOCAL", tmp_path / "local")
    found = cluster.cluster_config(["cluster=mine", "cluster.environment.C=d", "cluster.time='2:00:00'"])
    assert (found.partition, found.environment, found.minutes, found.nodes) == ("night", {"A": "b", "C": "d"}, 120, 1)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """Writes a line into a cluster's file that begins as the default one; the words that name it."""
    monkeypatch.setattr(search_path, "LOCAL", tmp_path / "local")
    (tmp_path / "local" / "cluster").mkdir(parents=True)

    def write(line: str) -> list[str]:
        (tmp_path / "local" / "cluster" / "mine.yaml").write_text(f"defaults:\n  - default\n{line}\n")
        return ["cluster=mine"]

    return write


@pytest.mark.parametrize(
    ("line", "as_read", "to_write"),
    [
        ("time: 12:00:00", "43200", 'time: "12:00:00"'),
        ("time: 1:30", "90", 'time: "1:30"'),
        ("account: 0123", "83", 'account: "0123"'),
        ("account: 1_000", "1000", 'account: "1_000"'),
        ("qos: yes", "True", 'qos: "yes"'),
        ("constraint: 1e5", "100000.0", 'constraint: "1e5"'),
        ("mem: 4.0", None, None),
        ("environment: {A: 1.10}", "1.1", 'A: "1.10"'),
        ("environment: {A: off}", "False", 'A: "off"'),
        ("environment: {A: true}", "True", 'A: "true"'),
        ("sbatch: {begin: 16:00}", "960", 'begin: "16:00"'),
        ("modules: [3.10]", "3.1", 'modules: "3.10"'),
        ("modules: [cuda/12.8]", None, None),
        ("environment: {A: 7, B: text, C: '007'}", None, None),
        ("sbatch: {exclusive: true, nice: 100}", None, None),
        ("qos: null", None, None),
        ('time: "12:00:00"', None, None),
    ],
)
def test_what_yaml_reads_as_something_else_is_refused_with_the_line_to_write(mine, line, as_read, to_write):
    if to_write is None:
        cluster.cluster_config(mine(line))
        return
    with pytest.raises(RunError) as refused:
        cluster.cluster_config(mine(line))
    assert f"mine.yaml: YAML reads cluster.{line.partition(':')[0]}" in str(refused.value)
    assert f" as {as_read}; write {to_write}, in quotes" in str(refused.value)


def test_a_file_that_is_begun_with_is_read_as_closely(mine, tmp_path):
    mine("environment: {A: 010}")
    (tmp_path / "local" / "cluster" / "own.yaml").write_text("defaults:\n  - mine\npartition: night\n")
    with pytest.raises(RunError, match=r'mine\.yaml: YAML reads cluster\.environment\.A: 010 as 8; write A: "010"'):
        cluster.cluster_config(["cluster=own"])


@pytest.mark.parametrize("text", ["1_000", "1e3", "1.10", "true", "007", "12:00:00", "-5", "0x1F"])
def test_the_command_line_is_read_as_it_is_written(text):
    found = cluster.cluster_config([f"cluster.account={text}", f"cluster.environment.A={text}"])
    assert (found.account, found.environment) == (text, {"A": text})


def test_options_that_are_false_are_left_out(login_node, sweep):
    words = ["cluster.sbatch={exclusive: true, hold: false}"]
    text = (submit.submit([*sweep.overrides, *words]).folder / "submission.sh").read_text()
    assert "#SBATCH --exclusive\n" in text
    assert "hold" not in text


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("nodes=3", "cluster.nodes"),
        ("N=3", "cluster.nodes"),
        ("ntasks_per_node=3", "cluster.tasks_per_node"),
        ("ntasks-per-node=3", "cluster.tasks_per_node"),
        ("n=3", "cluster.nodes and cluster.tasks_per_node"),
        ("t=5", "cluster.time"),
        ("tim=5", "cluster.time"),
        ("mem=1G", "cluster.mem"),
        ("signal=USR2@60", "cluster.signal_before_end_s"),
        ("requeue=false", "cluster.requeue"),
        ("no_requeue=true", "cluster.requeue"),
        ("array=0-7", "cluster.array_parallelism"),
        ("a=0-7", "cluster.array_parallelism"),
        ("open_mode=truncate", "jobs write into the submission's folder"),
        ("o=log", "jobs write into the submission's folder"),
        ("job-name=mine", "jobs are found by the name"),
        ("export=NONE", "cluster.environment"),
        ("chdir=/tmp", "the repository's folder"),
        ("test-only=true", "--dry-run"),
        ("clusters=big", "set SLURM_CLUSTERS"),
        ("M=big", "set SLURM_CLUSTERS"),
    ],
)
def test_options_that_the_suite_gives_itself_are_refused(word, instead):
    """Sbatch would take them, and the run's processes, logs and signals would be others than the suite's."""
    with pytest.raises(RunError) as refused:
        cluster.cluster_config([f"cluster.sbatch.{word}"])
    assert str(refused.value).startswith(f"cluster.sbatch.{word.partition('=')[0]} cannot be given: ")
    assert instead in str(refused.value)


@pytest.mark.parametrize(
    ("option", "key", "unset"),
    [
        ("mem_per_cpu=2G", "mem=8G", "mem=null"),
        ("gpus=2", "gpus_per_node=1", "gpus_per_node=0"),
        ("gpus-per-task=1", "gpus_per_node=1", "gpus_per_node=0"),
        ("gres='gpu:h100:4'", "gpus_per_node=4", "gpus_per_node=0"),
    ],
)
def test_one_thing_is_not_asked_for_in_two_ways(option, key, unset):
    with pytest.raises(RunError, match=f"and cluster.{key} ask for the same in two ways: give cluster.{unset} with it"):
        cluster.cluster_config([f"cluster.sbatch.{option}", f"cluster.{key}"])
    found = cluster.cluster_config([f"cluster.sbatch.{option}", f"cluster.{unset}"])
    name, _, value = option.partition("=")
    assert found.sbatch == {name: value.strip("'")}


@pytest.mark.parametrize(
    ("word", "section", "expected"),
    [
        ("modules=[cuda/12.10,1.10,1e2,'007']", "modules", ["cuda/12.10", "1.10", "1e2", "007"]),
        (
            "environment={BB:010,CC:true,DD:1_000,EE: a 1.10 ,FF:'it\\'s'}",
            "environment",
            {"BB": "010", "CC": "true", "DD": "1_000", "EE": "a 1.10", "FF": "it's"},
        ),
        ("sbatch={nice:1e3,exclusive:true,hold:false}", "sbatch", {"nice": "1e3", "exclusive": True, "hold": False}),
        ("sbatch.nice=1_0", "sbatch", {"nice": "1_0"}),
    ],
)
def test_lists_and_maps_are_read_as_they_are_written(word, section, expected):
    assert getattr(cluster.cluster_config([f"cluster.{word}"]), section) == expected


def test_a_file_with_anchors_is_read_as_closely(mine):
    with pytest.raises(RunError, match=r'YAML reads cluster\.environment\.A: 1\.10 as 1\.1; write A: "1\.10"'):
        cluster.cluster_config(mine("environment: {<<: {B: text}, A: 1.10}"))
    with pytest.raises(RunError, match=r'YAML reads cluster\.environment\.B: 010 as 8; write B: "010"'):
        cluster.cluster_config(mine("environment: {<<: {B: 010}, A: text}"))


def test_a_variable_has_a_name():
    with pytest.raises(RunError, match=r"cluster\.environment\.A-B: 'A-B' is no name of a variable"):
        cluster.cluster_config(["cluster.environment.A-B=1"])


def test_another_cluster_is_named_to_all_commands_of_slurm(login_node, sweep):
    with pytest.raises(RunError, match=r"cluster\.sbatch\.clusters cannot be given: .* set SLURM_CLUSTERS"):
        submit.submit([*sweep.overrides, "cluster.sbatch.clusters=big"])


def test_sentences_between_the_names_are_no_names(login_node, sweep):
    login_node.answers("sinfo", "Maintenance on Monday*\ngpu*\nlong\n")
    login_node.answers("sacctmgr", "Welcome to the accounts\n")
    assert submit.submit([*sweep.overrides, "cluster.account=maths"]) is not None
    with pytest.raises(RunError, match="there is no partition Monday on this cluster: there are gpu, long"):
        submit.submit([*sweep.overrides, "cluster.partition=Monday"])


def nobody(*_):
    raise KeyError("getpwuid(): uid not found")


def test_a_user_without_a_name_and_a_login_node_without_srun(login_node, sweep, monkeypatch, capsys):
    for name in ("USER", "LOGNAME", "LNAME", "USERNAME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    (login_node.folder / "srun").unlink()
    done = submit.submit([*sweep.overrides, "cluster.account=maths"])
    assert done.array_job_id == "77"
    assert login_node.asked("sacctmgr") == []
    login_node.queue(("77_0", "RUNNING", 0, ""))
    assert status.main(sweep.overrides) == 0
    assert "1 starting" in capsys.readouterr().out
    assert f"--user={os.getuid()}" in login_node.asked("squeue")


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


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("77\n", "77"),
        ("15786755;cluster\n", "15786755"),
        ("Submitted batch job 77 on cluster big\n", "77"),
        ("Welcome! 3 of 128 nodes are down, job limit 500\n77\n", "77"),
        ("Your account has 2026 hours left.\nSubmitted batch job 77\n", "77"),
        ("Thank you: request 12 is with us", None),
        ("2026\n77\n", None),
        ("", None),
    ],
)
def test_the_id_in_what_sbatch_prints(answer, expected):
    assert submit.array_id(answer) == expected


def sbatch_takes(login_node, out: str = "", err: str = "", code: int = 0, named: str | None = "77") -> None:
    """An sbatch that answers so, after which the queue knows the jobs by their name; its tests succeed."""
    template = (login_node.folder / "sbatch").read_text()
    squeue = (login_node.folder / "squeue").read_text()
    test = '#!/bin/sh\ncase "$*" in *--test-only*) exit 0;; esac\n'
    (login_node.folder / "sbatch").write_text(template.replace("#!/bin/sh\n", test))
    if named is not None:
        known = f'#!/bin/sh\ncase "$*" in *--name=sinkformer-*) echo {named}; exit;; esac\n'
        (login_node.folder / "squeue").write_text(squeue.replace("#!/bin/sh\n", known))
    login_node.answers("sbatch", out, err, code)


def calls(login_node) -> int:
    return sum(word.endswith("submission.sh") for word in login_node.asked("sbatch"))


TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n"


@pytest.mark.parametrize(
    "answer",
    [
        {"out": "15786755;cluster\n", "named": None},
        {"out": "*** 1,024 users, 3 maintenance days ***\n15786755\n", "named": None},
        {"out": "our wrapper has queued it, see ticket 4 and 5\n", "named": "15786755"},
        {"out": "", "named": "15786755"},
        {"err": TIMED_OUT, "code": 1, "named": "15786755"},
        {"err": "sbatch: error: Batch job submission failed: Unspecified error\n", "code": 1, "named": "15786755"},
    ],
)
def test_an_sbatch_that_answers_in_other_words(login_node, sweep, answer):
    """The jobs are there: nothing is taken away, and the same line submits none of them twice."""
    sbatch_takes(login_node, **answer)
    done = submit.submit(sweep.overrides)
    ids = [f"15786755_{index}" for index in range(3)]
    assert [task["job_id"] for task in read(done.folder)["tasks"]] == ids
    login_node.queue(*((one, "PENDING", 0, "Priority") for one in ids))
    assert submit.submit(sweep.overrides) is None
    assert calls(login_node) == 1


def test_jobs_that_sbatch_took_and_nobody_can_name(login_node, sweep, capsys):
    """They count as queued for as long as their folder is there, or until one of them tells its id."""
    sbatch_takes(login_node, out="it is done\n", named=None)
    submit.main(sweep.overrides)
    (file,) = (sweep.runs / ".submissions").glob("*/submission.json")
    shown = capsys.readouterr()
    assert f"submitted 3 runs as job of the name sinkformer-{file.parent.name[-8:]}" in shown.out
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"created": "2026-01-01T00:00:00+00:00"}))
    assert submit.submit(sweep.overrides) is None
    assert "answered 'it is done', which names no job" in capsys.readouterr().err
    submission.record_event(file.parent, 1, "started", job_id="99_1")
    login_node.queue(("99_0", "RUNNING", 0, ""), ("99_1", "FAILED", 0, ""), ("99_2", "RUNNING", 0, ""))
    sbatch_takes(login_node, out="100\n", named=None)
    again = submit.submit(sweep.overrides)
    assert [task["job_id"] for task in read(file.parent)["tasks"]] == ["99_0", "99_1", "99_2"]
    assert [task["hash"] for task in read(again.folder)["tasks"]] == [sweep.planned[1].run.hash]


def test_an_sbatch_that_times_out_on_its_socket(login_node, sweep, capsys):
    """Whether the jobs were taken shows later: until then nothing is deleted or submitted again."""
    sbatch_takes(login_node, err=TIMED_OUT, code=1, named=None)
    with pytest.raises(RunError, match=r"not clear whether SLURM has taken these jobs .*timed out.*in some minutes"):
        submit.submit(sweep.overrides)
    (file,) = (sweep.runs / ".submissions").glob("*/submission.json")
    assert submit.submit(sweep.overrides) is None
    assert "they are not in the queue yet, and count as queued for 10 more minutes" in capsys.readouterr().err
    # They were: the queue has them later on.
    sbatch_takes(login_node, named="81")
    login_node.queue(("81_0", "RUNNING", 0, ""), ("81_1", "RUNNING", 0, ""), ("81_2", "PENDING", 0, ""))
    assert submit.submit(sweep.overrides) is None
    assert json.loads(file.read_text())["array_job_id"] == "81"
    assert calls(login_node) == 1


def test_an_sbatch_that_timed_out_and_took_nothing(login_node, sweep):
    sbatch_takes(login_node, err=TIMED_OUT, code=1, named=None)
    with pytest.raises(RunError, match="not clear"):
        submit.submit(sweep.overrides)
    (file,) = (sweep.runs / ".submissions").glob("*/submission.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"created": "2026-01-01T00:00:00+00:00"}))
    login_node.answers("squeue", err="squeue: error: Socket timed out\n", code=1)
    with pytest.raises(RunError, match="squeue refuses"):  # a queue that cannot be read is not an empty one
        submit.submit(sweep.overrides)
    login_node.answers("squeue")
    login_node.answers("sbatch", "82\n")
    assert submit.submit(sweep.overrides).array_job_id == "82"
    assert calls(login_node) == 2


def test_an_sbatch_that_never_answers(login_node, sweep, monkeypatch):
    sbatch_takes(login_node, named=None)
    login_node.never_answers("sbatch")
    monkeypatch.setattr(submit, "SBATCH_TIMEOUT_S", 0.5)
    with pytest.raises(RunError, match=r"not clear .*has not answered sbatch within 0\.5 s"):
        submit.submit(sweep.overrides)
    assert len(list((sweep.runs / ".submissions").glob("2*"))) == 1


def test_what_slurm_refuses_leaves_nothing_behind(login_node, sweep):
    sbatch_takes(login_node, err="sbatch: error: Batch job submission failed: Job violates QOS\n", code=1, named=None)
    with pytest.raises(RunError, match=r"SLURM has refused: .*Job violates QOS"):
        submit.submit(sweep.overrides)
    assert list((sweep.runs / ".submissions").glob("2*")) == []


def test_a_submission_is_found_by_its_name_in_the_accounts_too(login_node):
    login_node.answers("sacct", "a banner\n91_0|COMPLETED|node1|0:0\n91_[1-2]|PENDING|node1|0:0\n")
    assert queue.find_by_name("sinkformer-12345678", "2026-11-29") == "91"
    assert "--name=sinkformer-12345678" in login_node.asked("sacct")
    assert "--starttime=2026-11-29" in login_node.asked("sacct")


def submitted_long_ago(folder: Path) -> None:
    file = folder / "submission.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"created": "2026-01-01T00:00:00+00:00"}))


def test_a_job_that_the_queue_does_not_list_is_not_submitted_again(login_node, sweep, capsys):
    """Squeue forgets, and a controller that has just been started knows nothing yet: the accounts are asked, too."""
    done = submit.submit(sweep.overrides)
    login_node.queue()
    assert submit.submit(sweep.overrides) is None
    assert "squeue does not list 3 jobs" in (said := capsys.readouterr().err)
    assert "(77_0, 77_1, 77_2), and they may appear in 10 more minutes" in said
    submitted_long_ago(done.folder)
    login_node.accounts(("77_0", "RUNNING"), ("77_1", "COMPLETED"), ("77_2", "RV"))
    again = submit.submit(sweep.overrides)
    assert [task["hash"] for task in read(again.folder)["tasks"]] == [sweep.planned[1].run.hash]
    assert "(77_0), and sacct says RUNNING" in capsys.readouterr().err
    assert "--jobs=77" in login_node.asked("sacct")


def test_a_job_that_has_said_how_it_ended_is_over_at_once(login_node, sweep):
    done = submit.submit(sweep.overrides)
    login_node.queue()
    for index, event in enumerate(("ended", "cancelled", "started")):
        submission.record_event(done.folder, index, event, reason="an error, see the log")
    again = submit.submit(sweep.overrides)
    assert [task["hash"] for task in read(again.folder)["tasks"]] == [run.run.hash for run in sweep.planned[:2]]


def test_jobs_on_another_cluster_of_the_site(login_node, sweep, capsys):
    """Sbatch names the cluster beside the id; here squeue of this cluster lists none of them."""
    login_node.answers("sbatch", "77;big\n")
    done = submit.submit(sweep.overrides)
    submitted_long_ago(done.folder)
    login_node.queue(*((f"77_{index}", "PENDING", 0, "Priority") for index in range(3)))
    here = (login_node.folder / "squeue").read_text()
    only_there = '#!/bin/sh\ncase "$*" in *--clusters=big*) ;; *) exit 0;; esac\n'
    (login_node.folder / "squeue").write_text(here.replace("#!/bin/sh\n", only_there))
    assert submit.submit(sweep.overrides) is None
    assert status.main(sweep.overrides) == 0
    assert "3 pending" in capsys.readouterr().out
    assert cancel.main([*sweep.overrides, "--yes"]) == 0
    assert login_node.asked("scancel")[:2] == ["--clusters=big", "77_0"]


def test_a_cluster_of_a_site_that_cannot_be_asked(login_node, sweep, capsys):
    login_node.answers("sbatch", "77;big\n")
    submitted_long_ago(submit.submit(sweep.overrides).folder)
    login_node.queue(("77_0", "FAILED", 0, ""))
    here = (login_node.folder / "squeue").read_text()
    gone = '#!/bin/sh\ncase "$*" in *--clusters=*) echo "squeue: error: big is not reached" >&2; exit 1;; esac\n'
    (login_node.folder / "squeue").write_text(here.replace("#!/bin/sh\n", gone))
    again = submit.submit(sweep.overrides)
    assert [task["hash"] for task in read(again.folder)["tasks"]] == [sweep.planned[0].run.hash]
    assert "its cluster big cannot be asked" in capsys.readouterr().err


def test_a_run_that_has_diverged_is_not_submitted_again(login_node, sweep, capsys):
    """It would diverge again, at the same step."""
    folder = sweep.write(0, sweep.attempt("diverged"))
    done = submit.submit(sweep.overrides)
    assert [task["hash"] for task in read(done.folder)["tasks"]] == [run.run.hash for run in sweep.planned[1:]]
    said = capsys.readouterr().err
    assert f"1 runs have diverged, and would again: {folder.name}. They are left out" in said
    assert "3 runs: 1 diverged, 2 to be submitted" in said


#: Another value for every key of a cluster.
CHANGED = {
    "partition": "long",
    "account": "maths",
    "qos": "night",
    "constraint": "a100",
    "nodes": 2,
    "tasks_per_node": 2,
    "gpus_per_node": 1,
    "cpus_per_task": 2,
    "mem": "8G",
    "time": "90",
    "signal_before_end_s": 60,
    "requeue": False,
    "max_restarts": 1,
    "max_timeouts": 1,
    "array_parallelism": 2,
    "modules": ["cuda/12.10"],
    "container": "apptainer exec image.sif",
    "environment": {"A": "b"},
    "sbatch": {"nice": "100"},
}


def asked(found: cluster.ClusterConfig, folder: Path) -> tuple[str, TrainingJob]:
    """What SLURM is asked for three runs, and what a run's job does."""
    task = submission.Task(0, "77", "", "", [])
    folder.mkdir(exist_ok=True)
    submission.Submission(folder, "2026-01-01T00:00:00+00:00", "", dataclasses.asdict(found), "77", [task]).write()
    return submit.script(found, 3, None, folder), TrainingJob.of(folder, 0)


@pytest.mark.parametrize("key", CHANGED)
def test_every_key_of_a_cluster_does_something(tmp_path, key):
    usual = cluster.cluster_config([])
    assert {entry.name for entry in dataclasses.fields(usual)} == CHANGED.keys()
    other = dataclasses.replace(usual, **{key: CHANGED[key]})
    assert asked(other, tmp_path / "jobs") != asked(usual, tmp_path / "jobs")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("tasks_per_node=0", "cluster.tasks_per_node must be at least 1; got 0"),
        ("array_parallelism=0", "cluster.array_parallelism must be at least 1; got 0"),
        ("max_timeouts=-1", "cluster.max_timeouts must be at least 0; got -1"),
        ("signal_before_end_s=0", "cluster.signal_before_end_s must be at least 1; got 0"),
        (
            "time=2",
            "cluster.signal_before_end_s=120 is no less than cluster.time=2, of 120 s: the run would be stopped",
        ),
    ],
)
def test_numbers_that_would_be_taken_for_none_are_refused(word, message):
    with pytest.raises(RunError) as refused:
        cluster.cluster_config([f"cluster.{word}"])
    assert str(refused.value).startswith(message)
