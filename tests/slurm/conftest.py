"""A SLURM of shell scripts, and sweeps whose run folders are written by hand."""

import functools
import json
import os
import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from experiments.runners.run_dir import RunDir
from slurm.sweep import PlannedRun, plan

SCRIPT = """#!/bin/sh
printf '%s\\n' "$@" >> '{folder}/{name}.arguments'
env > '{folder}/{name}.environment'
[ -e '{folder}/{name}.sleep' ] && exec sleep 60
cat '{folder}/{name}.err' >&2
cat '{folder}/{name}.out'
exit "$(cat '{folder}/{name}.code')"
"""


class FakeSlurm:
    """squeue, sacct and scancel that print what a test says and write down what they are asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("squeue", "sacct", "scancel"):
            (folder / name).write_text(SCRIPT.format(folder=folder, name=name))
            (folder / name).chmod(0o755)
            self.answers(name)
        self.answers("sacct", err="Slurm accounting storage is disabled", code=1)

    def answers(self, name: str, out: str = "", err: str = "", code: int = 0) -> None:
        (self.folder / f"{name}.out").write_text(out)
        (self.folder / f"{name}.err").write_text(err)
        (self.folder / f"{name}.code").write_text(str(code))

    def queue(self, *jobs: tuple[str, str, int, str]) -> None:
        """Jobs as (id, state, restarts, reason)."""
        lines = []
        for identifier, state, restarts, reason in jobs:
            base, _, task = identifier.partition("_")
            lines.append(f"{base:24}|{task or 'N/A':200}|{state:24}|{restarts:<12}|{'node1':100}|{reason:200}|")
        self.answers("squeue", "\n".join(lines) + "\n")

    def accounts(self, *jobs: tuple[str, str]) -> None:
        self.answers("sacct", "".join(f"{identifier}|{state}|node1|0:0\n" for identifier, state in jobs))

    def never_answers(self, name: str) -> None:
        (self.folder / f"{name}.sleep").touch()

    def asked(self, name: str) -> list[str]:
        file = self.folder / f"{name}.arguments"
        return file.read_text().splitlines() if file.exists() else []

    def environment(self, name: str) -> str:
        return (self.folder / f"{name}.environment").read_text()


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{fake.folder}{os.pathsep}{os.environ['PATH']}")
    return fake


@functools.cache
def _planned(words: tuple[str, ...]) -> list[PlannedRun]:
    return plan([*words, "paths.runs=runs"])


class Sweep:
    """Three runs of one experiment, of five epochs each."""

    words = ("experiment=mnist_patches", "seed=range(3)", "trainer.max_epochs=5")

    def __init__(self, runs: Path, words: tuple[str, ...] = words) -> None:
        self.runs = runs
        self.overrides = [*words, f"paths.runs={runs}"]
        self.planned = []
        for one in _planned(words):
            run = RunDir(runs / one.run.path.relative_to("runs"), one.config, one.run.hash)
            self.planned.append(PlannedRun(one.overrides, run, one.config))
        self.start = datetime.now(UTC) - timedelta(hours=1)

    def submit(self, array: str, name: str = "20261129-190644-1f2e3d4c", runs: list[PlannedRun] | None = None) -> Path:
        folder = self.runs / ".submissions" / name
        folder.mkdir(parents=True)
        tasks = [
            {
                "index": index,
                "job_id": f"{array}_{index}",
                "folder": str(run.run.path),
                "hash": run.run.hash,
                "overrides": run.overrides,
            }
            for index, run in enumerate(runs or self.planned)
        ]
        content = {"created": self.time(0), "command": "", "cluster": {}, "array_job_id": array, "tasks": tasks}
        (folder / "submission.json").write_text(json.dumps(content))
        return folder

    def time(self, minutes: float) -> str:
        return (self.start + timedelta(minutes=minutes)).isoformat(timespec="seconds")

    def attempt(self, state: str, start: float = 1, end: float | None = 11, **more: Any) -> dict[str, Any]:
        ended = None if state == "running" or end is None else self.time(end)
        host = {"host": socket.gethostname(), "pid": 2**22 + 1}
        return {"started": self.time(start), "ended": ended, "state": state, "message": None, **host, **more}

    def write(self, index: int, *attempts: dict[str, Any], epoch: int = 0, accuracy: float | None = None) -> Path:
        """The folder of a run as its attempts left it; finished where there is an accuracy."""
        run = self.planned[index].run
        run.path.mkdir(parents=True, exist_ok=True)
        card = {"identity": {"trainer": {"max_epochs": 5}}, "attempts": list(attempts), "state": attempts[-1]["state"]}
        (run.path / "run.json").write_text(json.dumps(card))
        rows = "".join(json.dumps({"epoch": n, "step": n, "split": "val"}) + "\n" for n in range(1, epoch + 1))
        (run.path / "metrics.jsonl").write_text(rows)
        if accuracy is not None:
            best = {"epoch": 4, "val": {"accuracy": 0.5}, "test": {"accuracy": accuracy}}
            result = {"best": best, "last": best, "selected_on": "val", "metric": "accuracy"}
            (run.path / "result.json").write_text(json.dumps(result))
        return run.path


@pytest.fixture
def sweep(tmp_path) -> Sweep:
    return Sweep(tmp_path / "runs")
