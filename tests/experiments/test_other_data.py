"""Weights mean nothing on data with other classes or splits: compared at every load."""

import json

import pytest
import torch

from experiments import evaluate
from experiments.config import compose
from experiments.errors import RunError
from experiments.runners import recorder
from experiments.train import execute

CHANGES = {
    "swapped": ("dog cat", 0, "class 0 is 'dog', not 'cat'"),
    "fewer": ("cat", 0, "1 classes, not 2"),
    "more": ("cat dog eel", 0, "3 classes, not 2"),
    "split": ("cat dog", 1, "their splits have the hash"),
}


def prepare(folder, classes, seed=0):
    folder.mkdir(exist_ok=True)
    (folder / "classes.txt").write_text(classes)
    (folder / "seed.txt").write_text(str(seed))


@pytest.fixture
def words(tmp_path):
    prepare(tmp_path / "animals", "cat dog")
    return [
        *("experiment=mnist_patches", "~data", f"+data._target_={'tests.experiments.animals.Animals'}"),
        *(f"+data.folder={tmp_path / 'animals'}", "model.patch_size=14", "trainer.max_epochs=2", "logger=none"),
        *("trainer.accelerator=cpu", f"paths.runs={tmp_path / 'runs'}"),
    ]


def start(words, *more):
    return execute(compose([*words, *more]), [*words, *more])


@pytest.fixture
def begun(words, monkeypatch):
    """The folder of a run that was stopped after its first epoch."""
    add = recorder.RunLog.add_timing

    def stop(self, epoch, *more):
        if epoch == 2:
            raise KeyboardInterrupt
        add(self, epoch, *more)

    monkeypatch.setattr(recorder.RunLog, "add_timing", stop)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        start(words)
    monkeypatch.undo()


@pytest.mark.parametrize(("classes", "seed", "difference"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("known_by", ["checkpoint", "card"])
def test_a_run_does_not_go_on_with_other_data(words, begun, tmp_path, classes, seed, difference, known_by):
    (folder,) = (tmp_path / "runs").glob("*/*")
    before = {path.name for path in (folder / "checkpoints").iterdir()}
    prepare(tmp_path / "animals", classes, seed)
    if known_by == "checkpoint":
        content = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps({**content, "data": None}))
    else:  # a run of before checkpoints held it
        (path,) = (folder / "checkpoints").iterdir()
        state = torch.load(path, weights_only=True)
        for callback in state["callbacks"].values():
            callback.pop("data", None)
        torch.save(state, path)
    with pytest.raises(RunError, match=rf"^the data are not those that .* was begun with: {difference}"):
        start(words)
    assert {path.name for path in (folder / "checkpoints").iterdir()} == before
    prepare(tmp_path / "animals", "cat dog")
    assert start(words).result["data"]["classes"] == ["cat", "dog"]


@pytest.mark.parametrize(("classes", "seed", "difference"), CHANGES.values(), ids=CHANGES)
def test_a_finished_run_is_not_loaded_with_other_data(words, tmp_path, capsys, classes, seed, difference):
    folder = start(words).folder
    prepare(tmp_path / "animals", classes, seed)
    with pytest.raises(RunError, match=rf"^the data are not those that .* was trained with: {difference}"):
        evaluate.load_run(folder)
    assert evaluate.main([str(folder)]) == 1
    assert difference in capsys.readouterr().err


@pytest.mark.parametrize(("classes", "seed", "difference"), CHANGES.values(), ids=CHANGES)
def test_another_run_does_not_begin_with_other_data(words, tmp_path, classes, seed, difference):
    start(words, "optimizer.lr=1e-4")
    prepare(tmp_path / "animals", classes, seed)
    config = compose(words)
    before = [*(word for word in words if not word.startswith("paths.")), "optimizer.lr=1e-4"]
    config.init_from = {"overrides": before, "seed": 0, "rate": 1.0}
    with pytest.raises(RunError, match=rf"^init_from: that run was trained with .*, or other classes \({difference}"):
        execute(config, words)


def test_what_older_runs_do_not_tell_is_not_compared():
    from experiments.data.base import other_data

    now = {"name": "animals", "split_hash": "a" * 64, "classes": ["cat", "dog"]}
    assert other_data({"name": "animals", "split_hash": "a" * 64}, now) is None
    assert other_data({"split_hash": "b" * 64}, now) == "their splits have the hash aaaaaaaaaaaa, not bbbbbbbbbbbb"
