"""Precision of products on a GPU, and models that are compiled."""

import json

import pytest
import torch

from experiments.config import compose, resolve
from experiments.errors import RunError
from experiments.evaluate import load_run
from experiments.runners import lightning, products
from experiments.runners.fairseq_command import settings
from experiments.runners.run_dir import RunDir, identity, run_hash
from experiments.train import execute
from tests.experiments.test_every_key import BASES

SMALL = ("experiment=mnist_patches", *BASES["mnist_patches"], "trainer.max_epochs=1")


@pytest.fixture
def chosen():
    before = torch.get_float32_matmul_precision()
    yield torch.get_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("device", "precision", "want"),
    [("cuda", "high", "high"), ("cuda", "medium", "medium"), ("cpu", "high", "highest")],
)
def test_a_gpu_gets_what_is_configured_and_a_cpu_stays_exact(chosen, device, precision, want):
    products.set_matmul_precision(torch.device(device), precision)
    assert chosen() == want


def test_another_precision_is_named(tmp_path):
    config = resolve(compose([*SMALL, "trainer.matmul_precision=tf32", f"paths.runs={tmp_path}"]))
    said = "trainer: trainer.matmul_precision=tf32: it is one of highest, high, medium"
    with pytest.raises(RunError, match=said):
        lightning.prepare(config, RunDir.of(config))


@pytest.mark.parametrize("key", ["trainer.matmul_precision=highest", "trainer.compile=true"])
def test_only_what_is_unusual_is_part_of_a_runs_identity(key):
    usual, other = (resolve(compose([*SMALL, *more])) for more in ((), (key,)))
    assert run_hash(usual) != run_hash(other)
    assert not {"matmul_precision", "compile"} & set(identity(usual)["trainer"])


def test_fairseq_is_told_the_precision_and_compiles_nothing():
    words = ["experiment=movie_sentences_sentiment", "trainer.matmul_precision=medium"]
    assert settings(resolve(compose(words)))["matmul_precision"] == "medium"


def test_columns_are_not_recorded_in_a_compiled_model(tmp_path):
    config = resolve(compose([*SMALL, "trainer.compile=true", "columns.every=1", f"paths.runs={tmp_path}"]))
    with pytest.raises(RunError, match=r"compile=true: columns\.every records"):
        lightning.prepare(config, RunDir.of(config))


@pytest.mark.slow
def test_a_compiled_model_trains_and_is_read_again(tmp_path):
    """Near what it gives uncompiled, under the same names of weights."""
    losses = []
    for compiled in ("true", "false"):
        config = compose([*SMALL, f"trainer.compile={compiled}", f"paths.runs={tmp_path}"])
        run = execute(config, [])
        result = json.loads((run.folder / "result.json").read_text())
        losses.append(result["last"]["val"]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    module = load_run(run.folder).module
    assert all("_orig_mod" not in name for name in module.state_dict())
