import json

import numpy as np
import pytest

from experiments.report.__main__ import main
from experiments.report.cells import analyse
from experiments.report.collect import collect
from experiments.report.curves import as_rows, draw, read_curves
from experiments.report.page import verdict_lines


@pytest.fixture
def make_curve(make_run):
    """A run with this accuracy on its selection split after each epoch."""

    def make(attention, seed, accuracies, *, n_iters=5, selected_on="test", **options):
        folder = make_run(attention, seed, max(accuracies), n_iters=n_iters, selected_on=selected_on, **options)
        rows = [
            {"epoch": epoch, "step": 10 * epoch, "split": split, "loss": 1.0, "accuracy": value}
            for epoch, accuracy in enumerate(accuracies, 1)
            for split, value in (("train", 0.123), (selected_on, accuracy))
        ]
        rows.append({"epoch": 1, "step": 10, "split": "val" if selected_on == "test" else "test", "accuracy": 0.321})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder

    return make


def results(tmp_path):
    runs, problems = collect([tmp_path / "runs"])
    return analyse("mnist_patches", runs, problems)


def test_median_and_quartiles_of_the_error_per_attention(make_curve, tmp_path):
    for seed, last in enumerate((0.6, 0.7, 0.9)):
        make_curve("softmax", seed, [0.5, last])
        make_curve("sinkhorn", seed, [0.25, last + 0.05])
    (found,) = read_curves(results(tmp_path))
    assert (found.split, found.quantity) == ("test", "test error")
    softmax, sinkhorn = found.curves
    assert (softmax.cell.attention.name, sinkhorn.cell.attention.n_iters) == ("softmax", 5)
    np.testing.assert_array_equal(softmax.epochs, [1, 2])
    np.testing.assert_allclose(softmax.quartiles(), [[0.5, 0.2], [0.5, 0.3], [0.5, 0.35]])
    np.testing.assert_allclose(sinkhorn.quartiles()[1], [0.75, 0.25])


def test_the_picture_has_these_curves_on_logarithmic_axes(make_curve, tmp_path):
    for n_iters in (1, 3, 21):
        for seed in (0, 1, 2):
            make_curve("sinkhorn", seed, [0.5, 0.6, 0.7 + 0.1 * seed], n_iters=n_iters)
    of = results(tmp_path)
    (found,) = read_curves(of)
    figure = draw(found, of)
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale(), axes.get_ylabel()) == ("log", "log", "test error")
    medians = [line for line in axes.lines if not line.get_label().startswith("_")]
    labels = [line.get_label() for line in medians]
    assert labels == ["Sinkhorn, 1 half-step", "Sinkhorn, 3 half-steps", "Sinkhorn, 21 half-steps"]
    ends = sorted(round(line.get_ydata()[-1], 9) for line in axes.lines if line not in medians)
    assert ends == [0.1] * 3 + [0.2] * 3 + [0.3] * 3  # each run, thin
    for line, band in zip(medians, axes.collections, strict=True):
        np.testing.assert_allclose(line.get_ydata(), [0.5, 0.4, 0.2])
        edges = band.get_paths()[0].vertices
        np.testing.assert_allclose(sorted(set(edges[edges[:, 0] == 3, 1].round(9))), [0.15, 0.25])


def test_validation_error_is_called_so_where_the_test_split_is_not_evaluated_each_epoch(make_curve, tmp_path):
    make_curve("softmax", 0, [0.5, 0.8], selected_on="val")
    of = results(tmp_path)
    (found,) = read_curves(of)
    assert found.split == "val"
    np.testing.assert_allclose(found.curves[0].errors, [[0.5, 0.2]])
    assert draw(found, of).axes[0].get_ylabel() == "validation error"
    assert found.caption().startswith("Validation error by epoch")
    assert "test split is not evaluated during training" in found.caption()


def test_no_error_is_drawn_at_half_a_sample_and_a_diverged_epoch_is_an_error_of_one(make_curve, tmp_path):
    folder = make_curve("softmax", 0, [0.5, 1.0])
    card = json.loads((folder / "run.json").read_text())
    card["data"]["sizes"] = {"test": 200}
    (folder / "run.json").write_text(json.dumps(card))
    of = results(tmp_path)
    (found,) = read_curves(of)
    assert found.floor == 0.0025
    assert "half the error of a single sample" in found.caption()
    np.testing.assert_allclose(draw(found, of).axes[0].lines[0].get_ydata(), [0.5, 0.0025])
    (folder / "metrics.jsonl").write_text('{"epoch": 1, "split": "test", "accuracy": NaN}\n')
    np.testing.assert_array_equal(read_curves(of)[0].curves[0].errors, [[1.0]])


@pytest.mark.parametrize("content", [None, "", '{"epoch": 1, "split": "te', "[1]\n", '{"split": "test"}\n'])
def test_a_run_without_a_curve_is_named(make_curve, tmp_path, content):
    make_curve("softmax", 0, [0.5, 0.8])
    folder = make_curve("softmax", 1, [0.1, 0.2])
    if content is None:
        (folder / "metrics.jsonl").unlink()
    else:
        (folder / "metrics.jsonl").write_text(content)
    (found,) = read_curves(results(tmp_path))
    np.testing.assert_allclose(found.curves[0].errors, [[0.5, 0.2]])
    assert found.missing == (str(folder),)
    assert str(folder) in found.caption()
    # Its numbers are in the tables: that the file is damaged is said there, too.
    said = [line for line in verdict_lines(results(tmp_path)) if "metrics.jsonl" in line]
    damaged = f"Of 1 runs metrics.jsonl is empty or damaged ({folder.name}): their numbers are those of result.json."
    assert said == ([] if content is None else [damaged])


def test_without_any_curve_there_is_none(make_run, tmp_path):
    make_run("softmax", 0)
    assert read_curves(results(tmp_path)) == []


def test_panels_by_place(make_curve, tmp_path):
    for patch_size in (7, 14, 28):
        make_curve("softmax", 0, [0.5, 0.6], patch_size=patch_size)
    of = results(tmp_path)
    figure = draw(read_curves(of)[0], of)
    assert [axes.get_title() for axes in figure.axes if axes.get_visible()] == [
        "patch size 7",
        "patch size 14",
        "patch size 28",
    ]


def test_the_report_has_picture_and_numbers(make_curve, tmp_path, capsys):
    for seed in (0, 1):
        make_curve("softmax", seed, [0.5, 0.75 + 0.125 * seed], selected_on="val")
    assert main([str(tmp_path / "runs")]) == 0
    folder = tmp_path / "runs" / "mnist_patches" / "report"
    page = (folder / "index.html").read_text()
    assert "Validation error by epoch, both axes logarithmic" in page
    assert "curves_val.svg" in page
    assert (folder / "curves_val.png").stat().st_size > 1000
    lines = (folder / "curves.csv").read_text().splitlines()
    assert lines[0] == "attention,n_iters,options,split,epoch,n,first_quartile,median,third_quartile"
    assert lines[1:] == ["softmax,,,val,1,2,0.5,0.5,0.5", "softmax,,,val,2,2,0.15625,0.1875,0.21875"]
    assert len(as_rows(read_curves(results(tmp_path)))) == 2
    assert "Only softmax was run" in capsys.readouterr().out


def test_pct_is_held_against_its_own_normalisation(make_run, tmp_path):
    for name in ("pct", "softmax", "sinkhorn"):
        for seed in range(2):
            make_run(name, seed, 0.8)
    found = results(tmp_path)
    assert [attention.name for attention in found.attentions] == ["pct", "softmax", "sinkhorn"]
    assert {(contest.cell.attention.name, contest.baseline.attention.name) for contest in found.contests} == {
        ("softmax", "pct"),
        ("sinkhorn", "pct"),
    }
