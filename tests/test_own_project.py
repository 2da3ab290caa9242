"""The example of a project of one's own, in a folder of its own, installed as pip does it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_it_trains_when_it_is_installed(tmp_path) -> None:
    copy, site = tmp_path / "mine", tmp_path / "site"
    shutil.copytree(ROOT / "examples/own_project", copy)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(copy)], check=True, capture_output=True)
    shutil.rmtree(copy)
    words = ["experiment=own_stripes", "attention=custom", "attention.name=own_squares", "trainer.accelerator=cpu"]
    paths = [f"paths.runs={tmp_path / 'runs'}", f"paths.data={tmp_path}", "logger=none"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT / "plugins")])}
    done = subprocess.run(
        [sys.executable, "-m", "experiments.train", *words, *paths],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (result,) = (tmp_path / "runs" / "own_stripes").glob("*/result.json")
    assert json.loads(result.read_text())["best"]["test"]["accuracy"] > 0.8
