"""Every group of configs/local is searched, and names that are not there have near ones in the message."""

import pytest

from experiments import search_path
from experiments.config import CONFIGS, compose, groups
from experiments.errors import RunError
from experiments.report.catalogue import catalogue

GROUPS = ["attention", "data", "logger", "model", "optimizer", "paths", "trainer", "wandb"]


@pytest.fixture
def local(tmp_path, monkeypatch):
    folder = tmp_path / "local"
    monkeypatch.setattr(search_path, "LOCAL", folder)

    def write(path, text):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)

    return write


@pytest.mark.parametrize("group", GROUPS)
def test_a_file_of_ones_own_in_any_group(local, group):
    source = sorted((CONFIGS / group).glob("*.yaml"))[0]
    local(f"{group}/mine.yaml", source.read_text())
    words = ["experiment=mnist_patches", *(["attention=softmax"] if group != "attention" else [])]
    found = compose([*words, f"{group}=mine"])
    assert found[group] == compose([*words, f"{group}={source.stem}"])[group]


def test_an_experiment_of_ones_own(local):
    local("experiment/mine.yaml", "# @package _global_\n# Mine.\ndefaults:\n  - mnist_patches\nexperiment: mine\n")
    local("own_group/first.yaml", "a: 1\n")
    assert compose(["experiment=mine"]).experiment == "mine"
    assert "mine" in [entry.name for entry in catalogue()]
    assert "own_group" in groups()
    with pytest.raises(RunError, match=r"experiment/minee', did you mean mine\?"):
        compose(["experiment=minee"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["experiment=mnist_patche"], r"did you mean mnist_patches\?"),
        (["experiment=shapes"], r"did you mean shapes_set\?"),
        (["experiment=mnist_patches", "data=mnist5"], r"did you mean mnist5k\?"),
        (["experiment=mnist_patches", "model=timmm"], r"did you mean timm\?"),
        (["experiment=mnist_patches", "modle=timm"], r"did you mean model\?"),
    ],
)
def test_near_names(words, says):
    with pytest.raises(RunError, match=says):
        compose(words)
