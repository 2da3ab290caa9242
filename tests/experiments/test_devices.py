"""Two processes train one run: one folder, and the numbers of one process up to rounding."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
