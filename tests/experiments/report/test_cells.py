"""Cells, swept axes, baselines and duplicates."""

import math

import pytest

from experiments.report.cells import Attention, Measure, analyse
from experiments.report.collect import collect
from experiments.report.statistics import Outcome


@pytest.fixture
def results(tmp_path):
    def make(experiment="mnist_patches"):
        runs, problems = collect([tmp_path / "runs" / experiment])
        return analyse(experiment, runs, problems)

    return make


def test_cells_go_by_patch_size_and_attention(make_runs, results):
    for patch_size in (14, 7, 28):
        make_runs({"softmax": [0.5, 0.6], 5: [0.7, 0.8], 3: [0.6, 0.7]}, patch_size=patch_size)
    found = results()
    assert found.axes == ("model.patch_size",)
    assert [(cell.place, cell.attention.label) for cell in found.cells[:4]] == [
        ((7,), "softmax"),
        ((7,), "Sinkhorn, 3 half-steps"),
        ((7,), "Sinkhorn, 5 half-steps"),
        ((14,), "softmax"),
    ]
    assert [cell.place for cell in found.cells[::3]] == [(7,), (14,), (28,)]  # as numbers, not as words
    assert [run.seed for run in found.cells[0].runs] == [0, 1]
    chosen = [contest for contest in found.contests if contest.measure is Measure.CHOSEN]
    assert len(chosen) == 6
    assert [contest.comparison.mean for contest in chosen] == pytest.approx([0.1, 0.2] * 3)


def test_the_two_measures_are_kept_apart(make_run, results):
    for seed in range(2):
        make_run("softmax", seed, 0.8, 0.7)
        make_run("sinkhorn", seed, 0.9, 0.5)
    found = results()
    means = {contest.measure: contest.comparison.mean for contest in found.contests}
    assert means == {Measure.CHOSEN: pytest.approx(0.1), Measure.LAST: pytest.approx(-0.2)}
    assert found.cells[0].summary(Measure.LAST).mean == pytest.approx(0.7)


def test_a_learning_rate_chosen_for_each_attention_is_no_axis(make_runs, results):
    make_runs({"softmax": [0.5]}, patch_size=7, lr=0.001)
    make_runs({5: [0.5]}, patch_size=7, lr=0.002)
    make_runs({"softmax": [0.5]}, patch_size=14, lr=0.004)
    make_runs({5: [0.5]}, patch_size=14, lr=0.001)
    found = results()
    assert found.axes == ("model.patch_size",)
    assert [cell.setting("optimizer.lr") for cell in found.cells] == ["0.001", "0.002", "0.004", "0.001"]
    assert len(found.contests) == 4


def test_the_run_that_a_run_began_with_is_an_axis_only_where_a_seed_has_several(make_run, results):
    for seed in range(3):
        for attention, value in (("softmax", 0.5), ("sinkhorn", 0.6)):
            make_run(attention, seed, value, config={"init_from.run": f"origin{seed}", "init_from.seed": seed})
    assert results().axes == ()
    assert [len(cell.runs) for cell in results().cells] == [3, 3]
    make_run("softmax", 0, 0.7, config={"init_from.run": "another", "init_from.seed": 0})
    assert results().axes == ("init_from.run",)


def test_a_swept_learning_rate_is_an_axis(make_runs, results):
    for lr in (0.001, 0.002):
        make_runs({"softmax": [0.5], 5: [0.6]}, lr=lr)
    found = results()
    assert found.axes == ("optimizer.lr",)
    assert [cell.place for cell in found.cells] == [(0.001,), (0.001,), (0.002,), (0.002,)]


def test_another_number_of_epochs_is_another_cell(make_runs, results):
    make_runs({"softmax": [0.8]})
    make_runs({5: [0.2]}, config={"trainer.max_epochs": 2})
    found = results()
    assert found.axes == ("trainer.max_epochs",)
    assert found.contests == ()  # 2 epochs of one are never held against 45 of the other
    assert [cell.attention.n_iters for cell in found.alone] == [5]


def test_what_follows_from_an_axis_or_from_the_seed_is_no_axis(make_run, results):
    for seed in range(2):
        for patch_size in (7, 14):
            derived = {"model.num_patches": (28 // patch_size) ** 2, "data.order_seed": seed}
            make_run(seed=seed, patch_size=patch_size, config=derived)
    assert results().axes == ("model.num_patches",)


def test_where_the_work_was_done_is_no_axis(make_run, results):
    make_run(seed=0, config={"trainer.devices": 1, "data.num_workers": 0})
    make_run(seed=1, config={"trainer.devices": 4, "data.num_workers": 8})
    found = results()
    assert found.axes == ()
    assert len(found.cells) == 1


def test_one_half_step_is_the_baseline_where_softmax_was_not_run(make_runs, results):
    make_runs({1: [0.5, 0.6], 3: [0.7, 0.7], 5: [0.8, 0.8]})
    found = results()
    assert {contest.baseline.attention for contest in found.contests} == {Attention("sinkhorn", 1)}
    assert found.attentions[0].label == "Sinkhorn, 1 half-step"
    make_runs({"softmax": [0.5, 0.6]})
    found = results()
    assert {contest.baseline.attention.name for contest in found.contests} == {"softmax"}
    assert [contest.cell.attention.n_iters for contest in found.contests[:3]] == [1, 3, 5]


def test_options_that_differ_make_cells_of_their_own(make_run, results):
    make_run("sinkhorn", 0, config={"attention.gradient": "unrolled", "attention.backend": "auto"})
    make_run("sinkhorn", 0, config={"attention.gradient": "detached", "attention.backend": "auto"})
    labels = [cell.attention.label for cell in results().cells]
    assert labels == ["Sinkhorn, 5 half-steps, gradient=detached", "Sinkhorn, 5 half-steps, gradient=unrolled"]


def test_the_same_run_twice_counts_once_and_is_listed(make_run, results):
    make_run("softmax", 0, 0.5, day=2)
    copy = make_run("softmax", 0, 0.9, day=3, suffix="-copy")
    found = results()
    assert [run.chosen for run in found.runs] == [0.5]  # the one that finished first, not the better one
    assert [(problem.folder, problem.state) for problem in found.problems] == [(copy, "duplicate")]
    assert "the results are different" in found.problems[0].reason


def test_stuck_runs_are_named_and_stay_in_every_number(make_runs, results):
    make_runs({"softmax": [0.9, 0.88, 0.11, 0.91, 0.9]})
    cell = results().cells[0]
    assert [run.seed for run in cell.stuck(Measure.CHOSEN)] == [2]
    summary = cell.summary(Measure.CHOSEN)
    assert (summary.n, summary.worst, summary.mean) == (5, 0.11, pytest.approx(0.74))


def test_a_diverged_run_counts(make_runs, results):
    make_runs({"softmax": [0.9] * 5, 5: [0.95, 0.94, None, 0.93, 0.96]})
    found = results()
    summary = found.cells[1].summary(Measure.CHOSEN)
    assert (summary.n, summary.diverged) == (5, 1)
    assert math.isnan(summary.mean)
    assert found.contests[0].verdict.outcome is Outcome.DIVERGED


OFFICIAL = {"report.leave_out_below": 0.8, "report.overwrite_last_point": True}


def test_only_softmax_is_overwritten_and_only_at_the_last_point(make_runs, results):
    for patch_size in (7, 28):
        values = {"softmax": [0.9], 3: [0.91], 5: [0.92]}
        make_runs(values, patch_size=patch_size, experiment="mnist_patches_official", config=OFFICIAL)
    found = results("mnist_patches_official")
    sources = [found.shown(cell, Measure.CHOSEN).taken_from for cell in found.cells]
    assert sources == [None, None, None, Attention("sinkhorn", 3), None, None]


def official(make_runs, experiment):
    options = {"experiment": experiment, "config": OFFICIAL, "selected_on": "test"}
    make_runs({"softmax": [0.9, 0.8, 0.92, 0.2, 0.91], 5: [0.93] * 5}, patch_size=7, **options)
    make_runs({"softmax": [0.9] * 5, 5: [0.94, 0.95, 0.7, 0.96, 0.95]}, patch_size=28, **options)


def test_the_official_treatment_leaves_out_and_overwrites_what_is_shown(make_runs, results):
    official(make_runs, "mnist_patches_official")
    found = results("mnist_patches_official")
    softmax_7, sinkhorn_7, softmax_28, sinkhorn_28 = (found.shown(cell, Measure.CHOSEN) for cell in found.cells)
    assert (softmax_7.values, softmax_7.left_out, softmax_7.taken_from) == ((0.9, 0.92, 0.91), 2, None)
    assert sinkhorn_7.values == (0.93,) * 5
    assert softmax_28.taken_from == Attention("sinkhorn", 5)
    assert softmax_28.values == sinkhorn_28.values == (0.94, 0.95, 0.96, 0.95)
    assert sinkhorn_28.taken_from is None
    assert found.words(Measure.CHOSEN) == "at the epoch chosen on the test set"
    # comparisons and the low runs keep the runs' own numbers
    assert found.cells[0].summary(Measure.CHOSEN).worst == 0.2
    assert found.contests[1].comparison.mean == pytest.approx(0.0, abs=1e-12)


def test_elsewhere_the_same_keys_do_nothing(make_runs, results):
    official(make_runs, "mnist_patches")
    found = results()
    for cell in found.cells:
        shown = found.shown(cell, Measure.CHOSEN)
        assert shown.values == tuple(run.chosen for run in cell.runs)
        assert (shown.left_out, shown.taken_from) == (0, None)


def test_an_official_cell_may_lose_all_its_runs(make_runs, results):
    make_runs({"softmax": [0.3, 0.4]}, experiment="mnist_patches_official", config=OFFICIAL)
    found = results("mnist_patches_official")
    assert found.shown(found.cells[0], Measure.CHOSEN).summary is None
