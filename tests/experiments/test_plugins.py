"""A normalizer of one's own: its module is named once, and everything else knows it."""

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from sinkhorn_attention import get_normalizer, list_normalizers
from sinkhorn_attention.normalizers import base

from experiments.config import compose, resolve
from experiments.errors import RunError
from experiments.evaluate import load_run
from experiments.runners.run_dir import run_hash

ROOT = Path(__file__).parents[2]
SMALL = (
    *("experiment=mnist_patches", "model.patch_size=14", "data.val_size=200", "data.test_size=4400"),
    *("trainer.max_epochs=1", "trainer.accelerator=cpu", "logger=none", "attention=custom"),
)
MODULE = '''
"""Attention with squares in place of exponentials."""
from sinkhorn_attention import Normalizer, register_normalizer

@register_normalizer("{name}")
class Squares(Normalizer):
    def __init__(self, offset=1.0):
        super().__init__()
        self.offset = offset

    def from_scores(self, scores, query_mask=None, key_mask=None):
        weights = (scores.masked_fill(scores.isinf(), -self.offset) + self.offset).square()
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-6)
'''


@pytest.fixture
def module(tmp_path, monkeypatch) -> str:
    """A module that registers a normalizer, whose name is the module's."""
    name = f"own_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE.format(name=name))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(base.MODULES, "")
    yield name
    base._REGISTRY.pop(name, None)
    sys.modules.pop(name, None)


def config(*words: str) -> dict:
    return resolve(compose([*SMALL, *words]))


def test_trained_swept_and_read_again_by_the_command(module, tmp_path) -> None:
    words = [f"plugins=[{module}]", f"attention.name={module}", f"paths.runs={tmp_path / 'runs'}", "seed=0,1"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'plugins'}", base.MODULES: ""}
    done = subprocess.run(
        [sys.executable, "-m", "experiments.train", "-m", *SMALL, f"paths.data={tmp_path}", *words],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    run, other = sorted((tmp_path / "runs" / "mnist_patches").iterdir())
    assert json.loads((run / "run.json").read_text())["identity"]["plugins"] == [module]
    assert other.name != run.name
    model = load_run(run).model
    assert [type(part).__name__ for part in model.modules()].count("Squares") == 1
    assert torch.isfinite(model(torch.randn(2, 1, 28, 28))).all()


def test_what_is_not_named_changes_no_identity(module) -> None:
    words = ("attention.name=sigmoid",)
    plain = config(*words)
    assert plain["plugins"] == []
    older = {key: value for key, value in plain.items() if key != "plugins"}
    assert run_hash(plain) == run_hash(older)
    assert run_hash(config(*words, f"plugins=[{module}]")) != run_hash(plain)


def test_processes_that_are_started_know_it_too(module, monkeypatch) -> None:
    config(f"plugins=[{module}]", f"attention.name={module}")
    assert os.environ[base.MODULES] == module
    base._REGISTRY.pop(module)
    sys.modules.pop(module)
    base.load_further_normalizers.cache_clear()
    assert get_normalizer(module, offset=2.0).offset == 2.0
    assert module in list_normalizers()


def test_an_installed_packages_entry_point(module, monkeypatch) -> None:
    points = [EntryPoint("own", module, base.ENTRY_POINTS)]
    monkeypatch.setattr(base.importlib.metadata, "entry_points", lambda group: points if "normalizers" in group else [])
    base.load_further_normalizers.cache_clear()
    assert module in list_normalizers()
    base.load_further_normalizers.cache_clear()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, r"plugins: own_\w+ cannot be imported \(ModuleNotFoundError: .*\): it has to be installed"),
        ("1 / 0", r"plugins: own_\w+ cannot be imported \(ZeroDivisionError: division by zero\)"),
        (
            MODULE.format(name="sinkhorn"),
            r"imported \(ValueError: normalizer 'sinkhorn' is registered already",
        ),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(module, tmp_path, content: str | None, says: str) -> None:
    file = tmp_path / f"{module}.py"
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(RunError, match=says) as caught:
        config(f"plugins=[{module}]", f"attention.name={module}")
    assert "\n" not in str(caught.value)


def test_a_variable_that_names_nothing_is_told(monkeypatch) -> None:
    monkeypatch.setenv(base.MODULES, "no_such_module")
    base.load_further_normalizers.cache_clear()
    with pytest.raises(ValueError, match=f"{base.MODULES}: no_such_module cannot be imported"):
        get_normalizer("mine")
    monkeypatch.undo()
    base.load_further_normalizers.cache_clear()
