"""Cost of an epoch and column sums: values, repeated epochs, damage."""

import csv
import io
import json
import math

import numpy as np
import pytest
from scipy import stats

from experiments.report import cost, sums
from experiments.report.cells import analyse
from experiments.report.collect import collect


@pytest.fixture
def results(tmp_path):
    def make():
        runs, problems = collect([tmp_path / "runs"])
        return analyse("mnist_patches", runs, problems)

    return make


def write(folder, name, rows):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_the_ratio_is_geometric_and_paired_by_seed(make_run, results):
    ours, theirs = [2.0, 3.0, 5.0], [1.0, 2.0, 4.0]
    for seed in range(3):
        for name, seconds in (("sinkhorn", ours), ("softmax", theirs)):
            rows = [{"epoch": epoch, "seconds": seconds[seed], "samples_per_second": 10.0} for epoch in (1, 2, 3)]
            write(make_run(name, seed), "timing.jsonl", rows)
    table = cost.cost_table(results())
    assert table.header[:3] == ("attention", "runs", "seconds")
    softmax, sinkhorn = table.rows
    assert (softmax[1], softmax[2], softmax[3], softmax[4], softmax[5]) == ("3", "2", "1–4", "10", "–")
    logs = np.log(ours) - np.log(theirs)
    low, high = stats.t.interval(0.95, 2, logs.mean(), stats.sem(logs))
    assert sinkhorn[5] == f"{math.exp(logs.mean()):.2f}"
    assert sinkhorn[6] == f"[{math.exp(low):.2f}, {math.exp(high):.2f}]"
    assert sinkhorn[7] == "cpu"
    rows = list(csv.DictReader(io.StringIO(cost.cost_csv(results()))))
    assert [float(row["seconds_per_epoch"]) for row in rows] == [*theirs, *ours]


def test_of_a_repeated_epoch_the_last_time_counts(make_run, results):
    folder = make_run()
    write(folder, "timing.jsonl", [{"epoch": 1, "seconds": 9.0}, {"epoch": 1, "seconds": 2.0}])
    pace = cost.read_pace(results().runs[0])
    assert pace.seconds == 2.0
    assert math.isnan(pace.samples_per_second)


@pytest.mark.parametrize("content", [None, "", "{", '{"epoch": 1}\n', '{"epoch": 1, "seconds": -1}\n', "[]\n", "\xff"])
def test_without_times_there_is_no_cost(make_run, results, content):
    folder = make_run()
    if content is not None:
        (folder / "timing.jsonl").write_text(content, encoding="latin-1")
    assert cost.cost_table(results()).rows == ()


def line(epoch, values, layer="blocks.0", **more):
    return {"epoch": epoch, "step": 1, "layer": layer, "n_tokens": len(values), "column_sums": values} | more


def test_unevenness_by_epoch_and_its_change(make_run, results):
    ends = [0.1, 0.2, 0.15]
    for seed, end in enumerate(ends):
        rows = [line(0, [1.25, 0.75]), line(1, [1.5, 0.5]), line(9, [1 + end, 1 - end], column_error=end)]
        write(make_run("softmax", seed), "column_sums.jsonl", rows)
    recorded = sums.cell_sums(results())
    (row,) = sums.sums_table(recorded, results()).rows
    differences = np.array(ends) - 0.5
    low, high = stats.t.interval(0.95, 2, differences.mean(), stats.sem(differences))
    assert row[:4] == ("softmax", "blocks.0", "3", "1–9")
    assert row[4:8] == ("0.250", "0.500", "0.150", "-0.350")
    assert row[8:] == (f"[{low:+.3f}, {high:+.3f}]", "0.15")
    table = list(csv.DictReader(io.StringIO(sums.sums_csv(recorded, results()))))
    assert [float(entry["unevenness"]) for entry in table] == pytest.approx(
        [0.25, 0.5, 0.1, 0.25, 0.5, 0.2, 0.25, 0.5, 0.15]
    )


def test_the_recorded_deviation_counts_before_that_of_the_quantiles(make_run, results):
    write(make_run(), "column_sums.jsonl", [line(1, [0.9, 1.1], deviation=0.3)])
    assert sums.read_sums(results().runs[0].folder)["blocks.0", 1].unevenness == 0.3


def test_the_picture_is_the_mean_of_the_sorted_sums(make_run, results):
    for seed, width in enumerate((0.2, 0.4)):
        write(make_run("softmax", seed), "column_sums.jsonl", [line(1, [1 + width, 1 - width]), line(2, [1.0, 1.0])])
    figure = sums.draw(sums.cell_sums(results()), results())
    first, second = [each for each in figure.axes[0].lines if each.get_label().startswith("epoch")]
    assert (first.get_label(), second.get_label()) == ("epoch 1", "epoch 2")
    np.testing.assert_allclose(first.get_ydata()[[0, 32, 64]], [0.7, 1.0, 1.3])
    np.testing.assert_allclose(second.get_ydata(), 1.0)
    assert figure.axes[0].get_yscale() == "log"


def test_of_many_layers_and_epochs_some_are_drawn_the_ends_among_them(make_run, results):
    rows = [line(epoch, [1.0, 1.0], f"layer{layer}") for epoch in range(30) for layer in range(9)]
    write(make_run(), "column_sums.jsonl", rows)
    figure = sums.draw(sums.cell_sums(results()), results())
    titles = [axes.get_title().splitlines()[1] for axes in figure.axes]
    assert (len(titles), titles[0], titles[-1]) == (4, "layer0", "layer8")
    labels = [each.get_label() for each in figure.axes[0].lines[:-1]]
    assert (len(labels), labels[0], labels[-1]) == (6, "epoch 0", "epoch 29")


def test_of_a_damaged_file_what_comes_before(make_run, results):
    folder = make_run()
    write(folder, "column_sums.jsonl", [line(1, [0.9, 1.1]), line(2, [])])
    with open(folder / "column_sums.jsonl", "a", encoding="utf-8") as file:
        file.write('{"epoch": 3, "layer": "blo')
    assert list(sums.read_sums(results().runs[0].folder)) == [("blocks.0", 1)]
    make_run("softmax", 1)
    (recorded,) = sums.cell_sums(results())
    assert recorded.epochs("blocks.0") == [1]
    assert sums.sums_table([recorded], results()).rows[0][7:9] == ("–", "–")


def test_column_sums_of_the_same_run_made_again_are_found(make_run, results, tmp_path):
    first = make_run("softmax", 0, day=1)
    again = make_run("softmax", 0, day=2, root=tmp_path / "runs" / "column_sums" / "mnist_patches")
    write(again, "column_sums.jsonl", [line(1, [0.5, 1.5])])
    found = results()
    assert [run.folder for run in found.runs] == [first]
    assert found.copies == {first: [again]}
    (recorded,) = sums.cell_sums(found)
    assert recorded.mean("blocks.0", 1) == 0.5
