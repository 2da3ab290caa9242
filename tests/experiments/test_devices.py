"""Several processes train one run: one folder, and the numbers of one process up to rounding."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from experiments.runners import recorder

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def test_two_devices_in_a_sweep(runs, finished, rows):
    sweep = runs.overrides("trainer.devices=2", "trainer.strategy=ddp", "data.batch_size=101", "seed=0,1")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-m", "experiments.train", "-m", *sweep]
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(runs.folders()) == 2
    for seed, folder in enumerate(sorted(runs.folders(), key=lambda path: path.name.split("-")[2])):
        alone = finished("data.batch_size=101", f"seed={seed}")
        assert folder.name == alone.name
        card = json.loads((folder / "run.json").read_text())
        assert [attempt["devices"] for attempt in card["attempts"]] == [["cpu", "cpu"]]
        shared, single = rows(folder), rows(alone)
        assert [(row["epoch"], row["step"], row["split"]) for row in shared] == [
            (row["epoch"], row["step"], row["split"]) for row in single
        ]
        for ours, theirs in zip(shared, single, strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=2e-5)
            assert ours["accuracy"] == pytest.approx(theirs["accuracy"], abs=0.006)


#: Steps of 57 samples, two batches each, of which the epoch's last has one: a process of two or three has none of it.
ACCUMULATED = ("data.batch_size=57", "trainer.accumulate_grad_batches=2")
#: The same steps in one batch.
WHOLE = ("data.batch_size=114",)


def started(runs, *more):
    words = runs.overrides(*more)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "experiments.train", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def weights_of(folder):
    (last,) = sorted((folder / "checkpoints").glob("*.ckpt"))[-1:]
    state = torch.load(last, weights_only=True)["state_dict"]
    return torch.cat([state[name].double().flatten() for name in sorted(state) if name.startswith("model.")])


@pytest.mark.parametrize(("precision", "devices", "weight", "loss"), [("64", 3, 1e-12, 1e-6), ("32", 2, 2e-5, 2e-6)])
def test_the_numbers_of_one_device(runs, finished, rows, precision, devices, weight, loss, record_property):
    """One epoch without dropout; Adam's first steps have the sign of a gradient, and so magnify its rounding."""
    words = ("attention=sinkhorn", f"trainer.precision={precision}", "trainer.max_epochs=1")
    started(runs, *words, *ACCUMULATED, f"trainer.devices={devices}", "trainer.strategy=ddp")
    (folder,) = runs.folders()
    for alone in (finished(*words, *ACCUMULATED), finished(*words, *WHOLE)):
        shared, single = rows(folder), rows(alone)
        far = float((weights_of(folder) - weights_of(alone)).abs().max())
        apart = max(abs(ours["loss"] - theirs["loss"]) for ours, theirs in zip(shared, single, strict=True))
        record_property("weights, loss", f"{far:.1e}, {apart:.1e}")
        print(f"{devices} processes, {precision} bits: weights {far:.1e}, losses {apart:.1e}")
        assert far <= weight
        assert apart <= loss
        assert [row["step"] for row in shared] == [row["step"] for row in single]
        for ours, theirs in zip(shared, single, strict=True):
            assert ours["accuracy"] == pytest.approx(theirs["accuracy"], abs=1e-7 if precision == "64" else 3e-3)


def test_another_number_of_processes_goes_on(runs, finished, rows, monkeypatch):
    add_timing = recorder.RunLog.add_timing

    def stop(self, epoch, *more):
        add_timing(self, epoch, *more)
        if epoch == 2:
            raise KeyboardInterrupt

    words = ("attention=softmax", "trainer.precision=64")
    monkeypatch.setattr(recorder.RunLog, "add_timing", stop)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        runs.start(*words)
    monkeypatch.undo()
    said = started(runs, *words, "trainer.devices=2", "trainer.strategy=ddp")
    assert "warning: 2 processes go on with what 1 began: batches, their order and the weight of each sample" in said
    (folder,) = runs.folders()
    alone = finished(*words)
    assert float((weights_of(folder) - weights_of(alone)).abs().max()) < 1e-12
    for ours, theirs in zip(rows(folder), rows(alone), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
