import pytest
import yaml

from experiments import select_lr
from experiments.errors import RunError
from experiments.select_lr import Trial


def trial(rate, seed, loss, attention="softmax", patch=7):
    return Trial(patch, attention, rate, seed, loss, 0.5)


def test_the_lowest_mean_validation_loss_is_chosen():
    trials = [trial(1e-3, 0, 0.5), trial(1e-3, 1, 0.7), trial(2e-3, 0, 0.4), trial(2e-3, 1, 1.4)]
    trials += [trial(rate, seed, 1 / rate, "sinkhorn", 14) for rate in (1, 2, 4) for seed in (0, 1)]
    found = select_lr.candidates(trials)
    assert [candidate.rate for candidate in found[7, "softmax"]] == [1e-3, 2e-3]
    assert found[7, "softmax"][0].loss == pytest.approx(0.6)
    assert found[14, "sinkhorn"][0].rate == 4
    table = yaml.safe_load(select_lr.as_yaml(found))["learning_rates"]
    assert table == {"softmax": {"patch7": 1e-3}, "sinkhorn": {"patch14": 4}}
    assert "# patch 7, softmax, seeds 0 1: 0.001: 0.6000 (50.0 %); 0.002: 0.9000 (50.0 %)" in select_lr.as_yaml(found)


def test_models_without_patches():
    trials = [trial(rate, 0, rate, attention, None) for rate in (0.5, 0.25) for attention in ("softmax", "sinkhorn")]
    found = select_lr.candidates(trials)
    words = select_lr.as_yaml(found)
    assert yaml.safe_load(words)["learning_rates"] == {"sinkhorn": 0.25, "softmax": 0.25}
    assert "# softmax, seeds 0: 0.25: 0.2500 (50.0 %); 0.5: 0.5000 (50.0 %)" in words
    with pytest.raises(RunError, match=r"^softmax: its rates were tried on different seeds"):
        select_lr.candidates([trial(1e-3, 0, 0.5, patch=None), trial(2e-3, 1, 0.4, patch=None)])


def test_rates_on_different_seeds_are_not_compared():
    with pytest.raises(RunError, match="different seeds"):
        select_lr.candidates([trial(1e-3, 0, 0.5), trial(2e-3, 1, 0.4)])


def test_the_same_rate_twice():
    with pytest.raises(RunError, match="two configurations"):
        select_lr.candidates([trial(1e-3, 0, 0.5), trial(1e-3, 0, 0.4)])


def test_from_runs(runs, rows, capsys):
    """What is read is validation; the runs of the choice never saw the test split."""
    for rate in ("1e-3", "1e-5"):
        outcome = runs.start("experiment=mnist_patches_lr", f"optimizer.lr={rate}")
        assert {row["split"] for row in rows(outcome.folder)} == {"train", "val"}
        assert "test" not in outcome.result["best"]
    (trial, other) = select_lr.read_trials(runs.folder / "mnist_patches_lr")
    assert {trial.rate, other.rate} == {1e-3, 1e-5}
    lowest = min(row["loss"] for row in rows(outcome.folder) if row["split"] == "val")
    assert lowest in (trial.loss, other.loss)
    assert select_lr.main([str(runs.folder / "mnist_patches_lr")]) == 0
    table = yaml.safe_load(capsys.readouterr().out)["learning_rates"]
    assert table == {"softmax": {"patch14": 1e-3}}


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (None, "No such file"),
        ("{", "JSONDecodeError"),
        ("", "no validation rows"),
        ('{"split": "val", "loss": 1.0}\n', "KeyError: 'accuracy'"),
        ('{"split": "val", "loss": "x", "accuracy": 0.5}\n', "TypeError"),
    ],
)
def test_damaged_runs_are_named(metrics, words, tmp_path, capsys):
    run = tmp_path / "run-1"
    run.mkdir()
    (run / "result.json").write_text("{}")
    config = {"model": {}, "attention": {"name": "softmax"}, "optimizer": {"lr": 1e-3}, "seed": 0}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    if metrics is not None:
        (run / "metrics.jsonl").write_text(metrics)
    assert select_lr.main([str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {run} has no validation rows that can be read")
    assert words in error


def test_nothing_to_choose_from(tmp_path, capsys):
    assert select_lr.main([str(tmp_path)]) == 1
    assert "no finished run" in capsys.readouterr().err


def test_rates_of_runs_that_differ_in_more_are_not_compared(runs, capsys):
    runs.start("experiment=mnist_patches_lr", "optimizer.lr=1e-3", "trainer.max_epochs=1")
    runs.start("experiment=mnist_patches_lr", "optimizer.lr=1e-2", "trainer.max_epochs=2")
    assert select_lr.main([str(runs.folder / "mnist_patches_lr")]) == 1
    words = "patch 14, softmax: its rates were tried with trainer.max_epochs=1 and trainer.max_epochs=2"
    assert words in capsys.readouterr().err
