"""Runs of seconds by fairseq, which is never imported here: it changes logging and Hydra for the whole process."""

import argparse
import hashlib
import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy._core import multiarray

from experiments.config import compose, resolve
from experiments.runners import fairseq_process
from experiments.runners.run_dir import RunDir
from experiments.train import Outcome, execute
from tests.experiments.fairseq_runs.forked import FORKING, start_server

PREPROCESS = """
import sys
from fairseq import options
from fairseq_cli import preprocess
folder = sys.argv[1]
for name, more in (("sentiment/data-bin/input0", ["--only-source"]), ("sentiment/data-bin/label", ["--only-source"]),
                   ("translation/data-bin", ["--source-lang=de", "--target-lang=en"])):
    text = f"{folder}/text/{name.replace('/data-bin', '')}"
    words = [f"--{split}pref={text}/{split}" for split in ("train", "valid", "test")]
    preprocess.main(options.get_preprocessing_parser().parse_args(
        [*more, *words, f"--destdir={folder}/{name}", "--workers=1"]))
"""
SIZES = {"train": 60, "valid": 21, "test": 19}  # no multiples of 8, and of no batch here
SENTIMENT = (
    "experiment=movie_sentences_sentiment",
    "data.name=sentiment",
    "data.batch_size=8",
    "data.eval_batch_size=16",
    "data.max_positions=32",
    "+model.encoder_embed_dim=16",
    "+model.encoder_ffn_embed_dim=16",
    "+model.encoder_attention_heads=2",
    "optimizer.lr=0.01",
    "trainer.max_epochs=3",
    "logger=none",
)
NARROW = tuple(
    f"model.{side}_{name}={size}"
    for side in ("encoder", "decoder")
    for name, size in (("embed_dim", 16), ("ffn_embed_dim", 16), ("layers", 1), ("attention_heads", 2))
)


def _sentences(seed: int, count: int) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices("abcdefgh", k=rng.randint(1, 9))) for _ in range(count)]


def _write(folder: Path, split: str, lines: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / split).write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture(scope="session")
def text_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of data: sentences with one word that tells the label, and a language in which all begins alike."""
    if importlib.util.find_spec("fairseq") is None:
        pytest.skip("fairseq is not installed: pip install --require-hashes --no-deps -r requirements-fairseq.txt")
    start_server()
    folder = tmp_path_factory.mktemp("text")
    for seed, (split, count) in enumerate(SIZES.items()):
        labels = random.Random(seed).choices(["neg", "pos"], k=count)
        lines = _sentences(seed, count)
        told = [f"{line} {'good' if label == 'pos' else 'bad'}" for line, label in zip(lines, labels, strict=True)]
        _write(folder / "text" / "sentiment" / "input0", split, told)
        _write(folder / "text" / "sentiment" / "label", split, labels)
        for language, side in (("de", lines), ("en", [f"A B C D E {line[0].upper()}" for line in lines])):
            _write(folder / "text" / "translation", f"{split}.{language}", side)
    for name in ("sentiment", "translation"):
        manifest = {"name": name, "split_hash": hashlib.sha256(name.encode()).hexdigest(), "sizes": SIZES}
        (folder / name).mkdir()
        (folder / name / "manifest.json").write_text(json.dumps(manifest))
    done = subprocess.run([sys.executable, "-c", PREPROCESS, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


class TextRuns:
    """Runs below a folder of their own."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder, self.data = folder, data

    def overrides(self, *more: str) -> list[str]:
        return [f"paths.runs={self.folder}", f"paths.data={self.data}", *more]

    def start(self, *more: str) -> Outcome:
        """In this process; fairseq's are forks."""
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(fairseq_process, "subprocess", FORKING)
            return execute(compose(self.overrides(*more)), self.overrides(*more))

    def run_dir(self, *more: str) -> RunDir:
        return RunDir.of(resolve(compose(self.overrides(*more))))

    def process(self, *more: str) -> "subprocess.Popen[str]":
        """The command itself, in a process group of its own."""
        command = [sys.executable, "-m", "experiments.train", *self.overrides(*more)]
        root = Path(__file__).parents[3]
        environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
        return subprocess.Popen(
            command, cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )


@pytest.fixture
def text_runs(tmp_path: Path, text_data: Path) -> TextRuns:
    return TextRuns(tmp_path / "runs", text_data)


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, text_data: Path) -> Path:
    """The folder of an unbroken sentiment run."""
    runs = TextRuns(tmp_path_factory.mktemp("whole"), text_data)
    return runs.start(*SENTIMENT, "attention=sinkhorn", "attention.n_iters=3").folder


@pytest.fixture
def sentiment() -> tuple[str, ...]:
    return SENTIMENT


@pytest.fixture
def narrow() -> tuple[str, ...]:
    return NARROW


@pytest.fixture(scope="session")
def rows() -> Callable[[Path], list[dict]]:
    return lambda folder: [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def checkpoint() -> Callable[[Path], dict[str, Any]]:
    """Reads one of fairseq's checkpoints."""
    dtypes = [type(np.dtype(name)) for name in ("bool", "int32", "int64", "float32", "float64")]
    types = [argparse.Namespace, np.ndarray, np.dtype, multiarray._reconstruct, multiarray.scalar, *dtypes]

    def read(path: Path) -> dict[str, Any]:
        with torch.serialization.safe_globals(types):
            return torch.load(path, weights_only=True)

    return read


@pytest.fixture(autouse=True)
def _quiet_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
