"""Figure 2: what it trains, draws and says."""

import csv

import numpy as np
import pytest
from scipy import stats

from experiments.config import compose, resolve
from experiments.figures import column_sums
from experiments.figures.__main__ import main
from experiments.runners.columns import read_rows

SMALL = (
    *("model.patch_size=14", "data.val_size=200", "data.test_size=4400", "trainer.max_epochs=2", "logger=none"),
    "trainer.accelerator=cpu",
)


def recorded(deviations):
    """Lines of two layers whose mean deviations by epoch are given, for each seed."""
    return {
        seed: [
            {"epoch": epoch, "layer": layer, "deviation": value + shift, "column_sums": [0.5, 1.5]}
            for epoch, value in enumerate(values)
            for layer, shift in (("a", -0.1), ("b", 0.1))
        ]
        for seed, values in enumerate(deviations)
    }


FALLING = [[0.2, 0.9 + 0.01 * seed, 0.5 - 0.01 * seed] for seed in range(5)]


def test_the_claim_is_stated_with_its_numbers():
    words = column_sums.in_words("a task", recorded(FALLING)).splitlines()
    assert words[0] == "a task: mean |column sum - 1| over layers, keys and samples, 5 seeds."
    assert words[1].startswith("before training 0.2000, at the end (epoch 2) 0.4800: change +0.2800")
    assert words[1].endswith("the claim that column sums approach 1 with training does not hold here.")
    assert words[2].startswith("after epoch 1 0.9200, at the end (epoch 2) 0.4800: change -0.4400, 95% t interval")
    assert words[2].endswith("the claim that column sums approach 1 with training holds here.")
    assert "; it fell in 0 of 5 seeds: " in words[1]
    assert "; it fell in 5 of 5 seeds: " in words[2]
    change = np.array([values[2] - values[1] for values in FALLING])
    low, high = stats.t.interval(0.95, 4, change.mean(), stats.sem(change))
    assert f"t interval {low:+.4f} to {high:+.4f}" in words[2]
    assert "percentile bootstrap over seeds -0.4" in words[2]


def test_what_cannot_be_told_is_said():
    unclear = column_sums.in_words("a task", recorded([[0.5, 0.5, 0.5 + 0.1 * (-1) ** seed] for seed in range(6)]))
    assert unclear.count("cannot be told, the interval includes zero") == 2
    few = column_sums.in_words("a task", recorded(FALLING[:3]))
    assert "fewer seeds than 5, too few to tell; the mean went down" in few
    alone = column_sums.in_words("a task", recorded(FALLING[:1]))
    assert alone.count("fewer seeds than 5") == 2
    assert "interval" not in alone


def test_the_curves_are_the_recorded_ones():
    figure = column_sums.picture("a task", recorded(FALLING))
    first, second, right = figure.axes
    assert [axes.get_title() for axes in figure.axes] == ["a", "b", "all layers, each seed"]
    labels = [line.get_label() for line in first.lines]
    assert labels[:3] == ["epoch 0", "epoch 1", "epoch 2"]
    np.testing.assert_allclose(first.lines[0].get_ydata(), np.linspace(0.5, 1.5, 65))
    assert len(right.lines) == 5
    np.testing.assert_allclose(right.lines[1].get_ydata(), FALLING[1])
    assert second.get_yscale() == "log"


def test_the_command_trains_what_is_missing_and_draws(tmp_path, data_folder, capsys):
    words = ["column_sums", "--task", "image", "--seeds", "2", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    words += ["--data", str(data_folder), "--set", *SMALL]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert printed.err.count("finished: ") == 2
    assert "digits, one-layer vision transformer: mean |column sum - 1|" in printed.out
    with open(tmp_path / "column_sums_image.csv") as file:
        rows = list(csv.DictReader(file))
    folders = sorted((tmp_path / "runs" / "mnist_patches").iterdir())
    assert [(row["seed"], row["epoch"]) for row in rows] == [(seed, epoch) for seed in "01" for epoch in "012"]
    expected = [row["deviation"] for path in folders for row in read_rows(path)]
    assert [float(row["deviation"]) for row in rows] == expected
    assert len(rows[0]["column_sums"].split()) == int(rows[0]["n_tokens"]) == 5
    before = (tmp_path / "column_sums_image.svg").read_bytes()
    assert main(words) == 0
    assert "finished: " not in capsys.readouterr().err
    assert (tmp_path / "column_sums_image.svg").read_bytes() == before
    (folders[0] / "column_sums.jsonl").unlink()
    assert main(words) == 1
    assert "was trained without recording, it has no column_sums.jsonl: move it away" in capsys.readouterr().err


@pytest.mark.parametrize("task", column_sums.TASKS)
def test_every_task_is_of_softmax(task):
    words = column_sums.TASKS[task].overrides
    config = resolve(compose([*words, "columns.every=1"]))
    assert config["attention"]["name"] == "softmax"
    assert config["columns"]["every"] == 1


def test_bad_options(capsys):
    assert main(["column_sums", "--seeds", "0"]) == 1
    assert "--seeds must be at least 1; got 0" in capsys.readouterr().err
