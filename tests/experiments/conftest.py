"""Runs of seconds: 400 digits, patches of 14 pixels, three epochs of four steps."""

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from experiments.config import compose
from experiments.runners.run_dir import RunDir
from experiments.train import Outcome, execute

SMALL = (
    "experiment=mnist_patches",
    "model.patch_size=14",
    "data.val_size=200",
    "data.test_size=4400",
    "data.eval_batch_size=1000",
    "trainer.max_epochs=3",
    "trainer.accelerator=cpu",
    "logger=none",
)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("data")


class Runs:
    """Runs below a folder of their own."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder, self.data = folder, data

    def overrides(self, *more: str) -> list[str]:
        return [*SMALL, f"paths.runs={self.folder}", f"paths.data={self.data}", *more]

    def start(self, *more: str) -> Outcome:
        return execute(compose(self.overrides(*more)), self.overrides(*more))

    def folders(self) -> list[Path]:
        return sorted(self.folder.glob("*/*"))

    def in_child(self, patch: Callable[[], None], *more: str) -> int:
        """Starts a run in a forked process that first calls `patch`; its exit code, negative for a signal."""
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_child, args=(self, patch, more))
        process.start()
        process.join(120)
        assert process.exitcode is not None
        return process.exitcode


def _child(runs: Runs, patch: Callable[[], None], more: tuple[str, ...]) -> None:
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    patch()
    runs.start(*more)


@pytest.fixture
def runs(tmp_path, data_folder) -> Runs:
    return Runs(tmp_path / "runs", data_folder)


@pytest.fixture
def other_runs(tmp_path, data_folder) -> Runs:
    return Runs(tmp_path / "other", data_folder)


@pytest.fixture(scope="session")
def finished(tmp_path_factory, data_folder) -> Callable[..., Path]:
    """The folder of an uninterrupted run with these overrides, trained once per session."""
    known: dict[tuple[str, ...], Path] = {}
    base = Runs(tmp_path_factory.mktemp("finished"), data_folder)

    def folder(*more: str) -> Path:
        if more not in known:
            known[more] = base.start(*more).folder
        return known[more]

    return folder


@pytest.fixture(scope="session")
def rows() -> Callable[[Path], list[dict]]:
    return lambda folder: [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def run_dir(runs) -> Callable[..., RunDir]:
    def make(*more: str) -> RunDir:
        from experiments.config import resolve

        return RunDir.of(resolve(compose(runs.overrides(*more))))

    return make
