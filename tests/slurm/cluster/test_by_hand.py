"""On a real cluster: Hydra's launcher, sbatch files, the agents' file, and cancelling."""

import json
import subprocess
from pathlib import Path

from tests.slurm.cluster.sweeps import ROOT, SLOW, epochs, queue, until

SMALL_JOB = ("--partition=main", "--mem=1500M", "--cpus-per-task=1", "--time=5")


def sbatch(*words: str, folder: Path = ROOT) -> str:
    done = subprocess.run(["sbatch", "--parsable", *words], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().partition(";")[0]


def test_hydra_launcher_waits_for_its_array(sweep):
    words = sweep.words("seed=0,1", "trainer.max_epochs=1", "label='a, b $HOME'")
    job = ("hydra/launcher=slurm", "hydra.launcher.partition=main", "hydra.launcher.mem_gb=2")
    folder = f"hydra.sweep.dir={sweep.folder / 'hydra'}"
    done = sweep.command("experiments.train", "-m", *words, *job, folder)
    assert done.returncode == 0, done.stderr
    results = sorted((sweep.folder / "runs" / "mnist_patches").glob("*/result.json"))
    assert [json.loads(file.read_text())["label"] for file in results] == ["a, b $HOME"] * 2
    cards = [json.loads(file.with_name("run.json").read_text()) for file in results]
    assert len({card["attempts"][0]["slurm"]["job"].partition("_")[0] for card in cards}) == 1
    assert {card["attempts"][0]["slurm"]["job"].partition("_")[2] for card in cards} == {"0", "1"}
    assert list((sweep.folder / "runs" / ".hydra_launcher").glob("*/*log.err"))


def test_train_sbatch_as_an_array_of_two_nodes_each(sweep):
    words = sweep.words("trainer.max_epochs=1", "label='a, b $HOME \"é\"'")
    options = ("--array=0-1", "--nodes=2", f"--output={sweep.folder}/log-%A_%a")
    job = sbatch(*SMALL_JOB, *options, "slurm/train.sbatch", *words)
    until(lambda: not queue(job), 240)
    logs = "\n".join(file.read_text() for file in sweep.folder.glob("log-*"))
    results = sorted((sweep.folder / "runs" / "mnist_patches").glob("*/result.json"))
    assert len(results) == 2, logs
    assert {json.loads(file.read_text())["seed"] for file in results} == {0, 1}
    cards = [json.loads(file.with_name("run.json").read_text()) for file in results]
    assert {card["label"] for card in cards} == {'a, b $HOME "é"'}
    assert {card["attempts"][0]["slurm"]["nodes"] for card in cards} == {"node[1-2]"}
    assert {card["attempts"][0]["slurm"]["job"] for card in cards} == {f"{job}_0", f"{job}_1"}


def test_train_sbatch_requeues_its_own_task(sweep):
    """On the signal that SLURM sends before the time limit: the other task of the array goes on."""
    words = sweep.words(*SLOW, "trainer.max_epochs=3")
    options = ("--array=0-1", f"--output={sweep.folder}/log-%A_%a", "--export=ALL,SLOW_STEP=1")
    job = sbatch(*SMALL_JOB, *options, "slurm/train.sbatch", *words)
    until(lambda: len(runs(sweep, 1)) == 2, 120, lambda: str(queue(job)))
    subprocess.run(["scancel", "--signal=USR2", f"{job}_0"], check=True)
    until(lambda: not queue(job), 240, lambda: str(queue(job)))
    attempts = {
        card["attempts"][0]["slurm"]["job"]: card["attempts"]
        for card in (json.loads((run / "run.json").read_text()) for run in runs(sweep))
    }
    assert [attempt["state"] for attempt in attempts[f"{job}_0"]] == ["interrupted", "finished"]
    assert attempts[f"{job}_0"][1]["from_step"] > 0
    assert [attempt["state"] for attempt in attempts[f"{job}_1"]] == ["finished"]


def test_agents_are_started_once_for_each_task(sweep):
    tool = sweep.folder / ".venv" / "bin"
    tool.mkdir(parents=True)
    script = '#!/bin/sh\necho "$@" > "$SLURM_SUBMIT_DIR/called-$SLURM_ARRAY_TASK_ID"\n'
    (tool / "wandb").write_text(script)
    (tool / "wandb").chmod(0o755)
    file = str(ROOT / "slurm" / "wandb_agent.sbatch")
    job = sbatch(*SMALL_JOB, "--array=0-1", file, "me/project/abc", folder=sweep.folder)
    until(lambda: not queue(job), 120, lambda: str(queue(job)))
    called = {name.name: name.read_text() for name in sweep.folder.glob("called-*")}
    assert called == dict.fromkeys(
        ("called-0", "called-1"), "agent --forward-signals --term-timeout 100 me/project/abc\n"
    )


def test_one_of_a_sweep_is_cancelled(sweep):
    words = (*SLOW, "seed=0,1", "trainer.max_epochs=20")
    jobs = sweep.submit(*words, cluster=(sweep.pace(1), "cluster.partition=main"))
    until(lambda: all(epochs(run) for run in jobs.runs), 120, jobs.logs)
    one = sweep.words(*SLOW, "seed=1", "trainer.max_epochs=20")
    not_told = sweep.command("slurm.cancel", *one, stdin=subprocess.DEVNULL)
    assert not_told.returncode == 2
    assert len(queue(jobs.id)) == 2
    told = sweep.command("slurm.cancel", *one, "--yes")
    assert told.returncode == 0, told.stderr
    sweep.pace(0)
    jobs.wait()
    by_seed = {json.loads((run / "run.json").read_text())["seed"]: run for run in jobs.runs}
    states = sweep.status(jobs.id)
    assert states[by_seed[0].name]["state"] == "finished"
    assert states[by_seed[1].name]["state"] == "cancelled"
    again = sweep.submit(*words, cluster=("cluster.partition=main",))
    assert again.runs == [by_seed[1]]
    again.wait()
    assert sweep.status(jobs.id)[by_seed[1].name]["state"] == "finished"


def runs(sweep, at_least: int = 0) -> list[Path]:
    folders = (sweep.folder / "runs" / "mnist_patches").glob("*")
    return [run for run in folders if epochs(run) >= at_least]
