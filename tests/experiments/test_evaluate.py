import json
import shutil

import pytest
import torch

from experiments import evaluate
from experiments.errors import RunError
from experiments.evaluate import load_run


@pytest.mark.parametrize("at", ["best", "last"])
@pytest.mark.parametrize("split", ["val", "test"])
def test_the_numbers_of_result_json(finished, at, split):
    run = load_run(finished(), at)
    result = json.loads((finished() / "result.json").read_text())
    assert run.metrics(split) == run.recorded(split) == result[at][split]


def test_predictions_give_the_accuracy(finished):
    run = load_run(finished(), "last")
    logits, predicted, labels = run.predictions("test")
    assert logits.shape == (4400, 10)
    assert torch.equal(logits.argmax(-1), predicted)
    accuracy = (predicted == labels).double().mean().item()
    assert accuracy == pytest.approx(run.result["last"]["test"]["accuracy"], abs=1e-6)
    loss = torch.nn.functional.cross_entropy(logits, labels).item()
    assert loss == pytest.approx(run.result["last"]["test"]["loss"], rel=1e-5)


def test_the_model_alone(finished):
    run = load_run(finished())
    images, labels = next(iter(run.data.eval_loader("test")))
    with torch.no_grad():
        logits = run.model(images)
    assert logits.shape == (len(labels), 10)
    assert torch.equal(logits, run.predictions("test").logits[: len(labels)])


def test_a_moved_run_and_moved_data(finished, tmp_path, data_folder):
    shutil.copytree(finished(), tmp_path / "moved")
    shutil.copytree(data_folder, tmp_path / "data")
    run = load_run(tmp_path / "moved", data=tmp_path / "data")
    assert run.metrics("test") == run.recorded("test")


def test_the_command(finished, tmp_path, capsys):
    nowhere = tmp_path / "nowhere" / "predictions.pt"
    assert evaluate.main([str(finished()), "--predictions", str(nowhere)]) == 1
    assert "error: [Errno 2] No such file or directory" in capsys.readouterr().err
    file = tmp_path / "predictions.pt"
    assert evaluate.main([str(finished()), "--predictions", str(file)]) == 0
    words = capsys.readouterr().out
    result = json.loads((finished() / "result.json").read_text())
    assert f"accuracy {result['best']['test']['accuracy']:.6g}" in words
    assert "equal to result.json" in words
    assert torch.load(file, weights_only=True)["labels"].shape == (4400,)
    assert evaluate.main([str(finished()), "--split", "train"]) == 0
    assert "no numbers of that split" in capsys.readouterr().out


def test_other_weights_are_noticed(finished, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(finished(), folder)
    result = json.loads((folder / "result.json").read_text())
    result["best"]["test"]["accuracy"] += 0.01
    (folder / "result.json").write_text(json.dumps(result))
    assert evaluate.main([str(folder)]) == 1
    assert "result.json differs: accuracy" in capsys.readouterr().out


def cut_out(folder, *keys):
    content = json.loads((folder / "result.json").read_text())
    place = content
    for key in keys[:-1]:
        place = place[key]
    del place[keys[-1]]
    (folder / "result.json").write_text(json.dumps(content))


def cut(checkpoints):
    for path in checkpoints.iterdir():
        path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: shutil.rmtree(folder), "is not a run's folder"),
        (lambda folder: (folder / "result.json").unlink(), "is not finished: give its training command again"),
        (lambda folder: (folder / "result.json").write_text("{"), r"result\.json cannot be read \(.*: remove it"),
        (lambda folder: (folder / "result.json").write_text("[]"), r"result\.json cannot be read \(it holds a list\)"),
        (lambda folder: (folder / "result.json").write_text("{}"), r"result\.json is no result of a run: remove it"),
        (lambda folder: cut_out(folder, "best", "checkpoint"), r"result\.json is no result of a run: remove it"),
        (lambda folder: cut_out(folder, "data"), r"result\.json is no result of a run: remove it"),
        (
            lambda folder: ((folder / "result.json").unlink(), (folder / "run.json").write_text("{")),
            r"is not finished: give its training command again \(unknown\)",
        ),
        (lambda folder: (folder / "config.yaml").write_text("seed: 0"), r"config\.yaml has no experiment: remove it"),
        (lambda folder: (folder / "config.yaml").write_text("a: ["), r"config\.yaml cannot be read"),
        (
            lambda folder: (folder / "config.yaml").write_text(""),
            r"config\.yaml cannot be read \(it holds a NoneType\)",
        ),
        (lambda folder: cut(folder / "checkpoints"), r"checkpoint .*\.ckpt cannot be read: .*Remove that run's"),
        (lambda folder: shutil.rmtree(folder / "checkpoints"), r"checkpoint .*\.ckpt cannot be read: .*No such file"),
    ],
)
def test_no_finished_run(finished, tmp_path, capsys, change, words):
    folder = tmp_path / "run"
    shutil.copytree(finished(), folder)
    change(folder)
    with pytest.raises(RunError, match=words):
        load_run(folder)
    capsys.readouterr()  # of the training, where this is the first test that needs it
    assert evaluate.main([str(folder)]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_other_data_are_noticed(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished(), folder)
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("split_seed: 0", "split_seed: 1"))
    with pytest.raises(RunError, match="the data are not those"):
        load_run(folder)


def test_wrong_words(finished):
    with pytest.raises(RunError, match="at must be best or last; got first"):
        load_run(finished(), "first")


def test_variables_that_lightning_takes_are_refused(runs, finished, monkeypatch, capsys):
    """They would change a run, or an evaluation, whose identity does not know of them."""
    run = load_run(finished())
    capsys.readouterr()
    monkeypatch.setenv("PL_TRAINER_LIMIT_TEST_BATCHES", "1")
    monkeypatch.setenv("PL_TRAINER_GRADIENT_CLIP_VAL", "1e-3")
    words = "the environment sets PL_TRAINER_GRADIENT_CLIP_VAL, PL_TRAINER_LIMIT_TEST_BATCHES, which would change"
    for act in (run.metrics, run.predictions, lambda: runs.start("attention=softmax")):
        with pytest.raises(RunError, match=words):
            act()
    assert runs.folders() == []
    assert evaluate.main([str(finished())]) == 1
    assert words in capsys.readouterr().err
