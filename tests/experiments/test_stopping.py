"""Signals and srun: what stops a run and what does not, and who starts its processes."""

import json
import multiprocessing
import os
import signal

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment

from experiments.config import compose, resolve
from experiments.errors import RunError
from experiments.runners import classifier, lightning
from experiments.runners.run_dir import RunDir, process_rank
from experiments.runners.stopping import processes

SINKHORN = ("attention=sinkhorn", "attention.n_iters=3")


def at_step(step, action):
    """Acts in the middle of the training step after `step` optimizer steps."""

    def patch():
        original = classifier.Classifier.training_step

        def training_step(self, batch, batch_idx):
            if self.global_step == step:
                action()
            return original(self, batch, batch_idx)

        classifier.Classifier.training_step = training_step

    return patch


def test_usr2_saves_and_exits(runs, finished):
    assert runs.in_child(at_step(2, lambda: os.kill(os.getpid(), signal.SIGUSR2)), *SINKHORN) == 143
    (folder,) = runs.folders()
    assert (folder / "checkpoints" / "step00000003.ckpt").exists()
    runs.start(*SINKHORN)
    assert (folder / "metrics.jsonl").read_bytes() == (finished(*SINKHORN) / "metrics.jsonl").read_bytes()


def test_usr2_is_left_to_a_watcher_that_had_it_ignored(runs, finished):
    def patch():
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        at_step(2, lambda: os.kill(os.getpid(), signal.SIGUSR2))()

    assert runs.in_child(patch, *SINKHORN) == 0
    (folder,) = runs.folders()
    assert (folder / "metrics.jsonl").read_bytes() == (finished(*SINKHORN) / "metrics.jsonl").read_bytes()


def test_data_loaders_leave_signals_to_the_run(runs, finished):
    """SLURM signals every process of a job: the run is stopped by its own signal, and no loader dies of its."""

    def signal_loaders():
        loaders = multiprocessing.active_children()
        assert len(loaders) == 2  # of training and of validation
        for loader in loaders:
            for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                os.kill(loader.pid, signum)

    assert runs.in_child(at_step(5, signal_loaders), *SINKHORN, "data.num_workers=1") == 0
    (folder,) = runs.folders()
    assert (folder / "metrics.jsonl").read_bytes() == (finished(*SINKHORN) / "metrics.jsonl").read_bytes()
    card = json.loads((folder / "run.json").read_text())
    assert [attempt["state"] for attempt in card["attempts"]] == ["finished"]


@pytest.fixture
def environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("RANK", "LOCAL_RANK", "NODE_RANK"):
            monkeypatch.delenv(name)

    def put(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put


BATCH = {"SLURM_JOB_ID": "5", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "SLURM_JOB_NAME": "train"}
STEP = {**BATCH, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_NTASKS_PER_NODE": "2"}
ALONE = {**STEP, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}


@pytest.mark.parametrize(
    ("variables", "devices", "num_nodes", "expected"),
    [
        ({}, 1, 1, LightningEnvironment),
        ({}, 2, 1, LightningEnvironment),
        (BATCH, 1, 1, LightningEnvironment),  # in a batch script, or a shell inside an allocation
        (BATCH, 2, 1, LightningEnvironment),
        (ALONE, 1, 1, LightningEnvironment),
        ({**ALONE, "SLURM_PTY_PORT": "4"}, 2, 1, LightningEnvironment),  # srun --pty bash
        (STEP, 2, 1, SLURMEnvironment),
        ({**STEP, "SLURM_STEP_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "1"}, 1, 2, SLURMEnvironment),
        ({"TORCHELASTIC_RUN_ID": "1"}, 2, 2, TorchElasticEnvironment),
    ],
)
def test_who_starts_the_processes(environment, variables, devices, num_nodes, expected):
    environment(**variables)
    found = processes(devices, num_nodes)
    assert type(found) is expected
    if expected is SLURMEnvironment:
        assert not found.auto_requeue


@pytest.mark.parametrize(
    ("variables", "devices", "num_nodes", "message"),
    [
        (STEP, 1, 1, r"srun has started 2 processes on 1 nodes.*--nodes=1 --ntasks-per-node=1"),
        (ALONE, 2, 1, r"srun has started 1 processes.*--nodes=1 --ntasks-per-node=2"),
        (STEP, 1, 2, r"srun has started 2 processes on 1 nodes.*--nodes=2 --ntasks-per-node=1"),
        ({}, 4, 2, r"trainer\.num_nodes=2 needs srun.*sbatch --nodes=2 --ntasks-per-node=4"),
        (BATCH, 1, 2, "needs srun"),
    ],
)
def test_counts_that_disagree(environment, variables, devices, num_nodes, message):
    environment(**variables)
    with pytest.raises(RunError, match=message):
        processes(devices, num_nodes)


def test_counts_are_compared_before_anything_is_built(environment, runs, monkeypatch):
    environment(**ALONE)
    monkeypatch.setattr(lightning, "build", lambda *_: pytest.fail("the model has been built"))
    config = resolve(compose(runs.overrides("trainer.devices=2")))
    with pytest.raises(RunError, match="srun has started 1 processes"):
        lightning.prepare(config, RunDir.of(config))
    assert runs.folders() == []


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({}, 0),
        ({"SLURM_PROCID": "3"}, 3),
        ({"SLURM_PROCID": "0", "LOCAL_RANK": "1"}, 1),
        ({"RANK": "2", "LOCAL_RANK": "0"}, 2),
        ({"NODE_RANK": "1"}, 1),  # the first process of a second machine, started by hand
    ],
)
def test_process_rank(environment, variables, rank):
    environment(**variables)
    assert process_rank() == rank


@pytest.mark.parametrize(
    "variables", [{"RANK": "1", "WORLD_SIZE": "2"}, {"LOCAL_RANK": "3"}, {"SLURM_PROCID": "1"}, {"NODE_RANK": "2"}]
)
def test_a_rank_that_is_left_over_in_a_shell_is_refused(environment, runs, variables):
    """The process would take itself for a further one, which leaves the run's files to the first."""
    environment(**variables)
    name, value = next(iter(variables.items()))
    with pytest.raises(RunError, match=rf"^the environment says {name}={value}, as for a further process .* has 1 "):
        runs.start()
    assert runs.folders() == []


def test_a_rank_that_is_no_number(environment, runs):
    environment(RANK="senior")
    with pytest.raises(RunError, match="the environment sets RANK=senior, which is no number of a process"):
        runs.start()


def test_batch_normalisation_needs_gpus_to_be_shared(runs):
    model = ["model._target_=tests.experiments.normalised.model", "trainer.devices=2", "trainer.strategy=ddp"]
    config = resolve(compose(runs.overrides(*model)))
    with pytest.raises(RunError, match=r"trainer: the model has batch normalisation.*trainer\.devices=1"):
        lightning.prepare(config, RunDir.of(config))
