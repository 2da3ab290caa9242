"""What the picture shows: means, the band from the worst to the best run, every run, and runs that diverged."""

import re

import numpy as np
import pytest
from matplotlib.collections import FillBetweenPolyCollection, PathCollection

from experiments.report.cells import Measure, analyse
from experiments.report.collect import collect
from experiments.report.figures import draw, png, svg, svg_file


@pytest.fixture
def figure(tmp_path):
    def make(experiment="mnist_patches", measure=Measure.CHOSEN):
        runs, problems = collect([tmp_path / "runs" / experiment])
        return draw(analyse(experiment, runs, problems), measure)

    return make


def lines(axes):
    return {line.get_label(): line.get_ydata() for line in axes.get_lines() if not line.get_label().startswith("_")}


def bands(axes):
    found = [item for item in axes.collections if isinstance(item, FillBetweenPolyCollection)]
    return [(path.vertices[:, 1].min(), path.vertices[:, 1].max()) for band in found for path in band.get_paths()]


def dots(axes):
    found = [item for item in axes.collections if isinstance(item, PathCollection)]
    return sorted(float(y) for item in found for y in np.asarray(item.get_offsets())[:, 1])


def test_lines_bands_and_dots_are_the_runs(make_runs, figure):
    make_runs({"softmax": [0.5, 0.7], 5: [0.6, 0.9, 0.9]}, patch_size=7)
    make_runs({"softmax": [0.8, 0.9], 5: [0.7, 0.8, 0.6]}, patch_size=14)
    axes = figure().axes[0]
    drawn = lines(axes)
    assert list(drawn) == ["softmax", "Sinkhorn, 5 half-steps"]
    assert drawn["softmax"] == pytest.approx([0.6, 0.85])
    assert drawn["Sinkhorn, 5 half-steps"] == pytest.approx([0.8, 0.7])
    assert bands(axes) == [pytest.approx((0.5, 0.9)), pytest.approx((0.6, 0.9))]
    assert dots(axes) == [0.5, 0.6, 0.6, 0.7, 0.7, 0.8, 0.8, 0.9, 0.9, 0.9]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["7", "14"]
    assert axes.figure.get_suptitle() == "at the epoch chosen on validation"


def test_a_diverged_run_is_a_cross_and_no_zero(make_runs, figure):
    make_runs({"softmax": [0.5, None, 0.7]}, patch_size=7)
    make_runs({"softmax": [None, None]}, patch_size=14)
    axes = figure().axes[0]
    assert lines(axes)["softmax"] == pytest.approx([0.6])
    assert dots(axes) == [0.5, 0.7]
    crosses = [line for line in axes.get_lines() if line.get_marker() == "x"]
    assert [len(line.get_xdata()) for line in crosses] == [2]


def test_the_official_picture_leaves_out_and_overwrites(make_runs, figure):
    asked = {"report.leave_out_below": 0.8, "report.overwrite_last_point": True}
    options = {"experiment": "mnist_patches_official", "config": asked}
    make_runs({"softmax": [0.9, 0.2], 5: [0.95, 0.93]}, patch_size=7, **options)
    make_runs({"softmax": [0.9, 0.9], 5: [0.97, 0.99]}, patch_size=28, **options)
    axes = figure("mnist_patches_official").axes[0]
    assert lines(axes)["softmax"] == pytest.approx([0.9, 0.98])


def test_attentions_stand_side_by_side_where_nothing_was_swept(make_runs, figure):
    make_runs({"softmax": [0.5, 0.7], 3: [0.6, 0.9], 5: [0.6, 0.9]})
    axes = figure().axes[0]
    places = ["softmax", "Sinkhorn, 3 half-steps", "Sinkhorn, 5 half-steps"]
    assert [label.get_text() for label in axes.get_xticklabels()] == places


def test_a_second_axis_gives_panels(make_runs, figure):
    for patch_size in (7, 14):
        for epochs in (2, 45):
            values = {"softmax": [epochs / 100 + patch_size / 1000]}
            make_runs(values, patch_size=patch_size, config={"trainer.max_epochs": epochs})
    panels = figure().axes
    titles = {axes.get_title(): lines(axes)["softmax"] for axes in panels}
    assert titles == {
        "max epochs 2": pytest.approx([0.027, 0.034]),
        "max epochs 45": pytest.approx([0.457, 0.464]),
    }


def test_data_sets_are_not_joined_by_a_line(make_runs, figure):
    """There is nothing between them; their names have no order."""
    for name, value in (("mnist", 0.9), ("mnist5k", 0.8)):
        config = {"data._target_": f"experiments.data.{name}.{name.upper()}", "data.name": name}
        make_runs({"softmax": [value, value + 0.05], 5: [value + 0.01]}, config=config)
    axes = figure().axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["MNIST", "MNIST5K"]
    assert lines(axes)["softmax"] == pytest.approx([0.925, 0.825])
    drawn = [line for line in axes.get_lines() if not line.get_label().startswith("_")]
    assert {line.get_linestyle() for line in drawn} == {"None"}
    assert bands(axes) == []
    make_runs({"softmax": [0.5, 0.7]}, patch_size=7, experiment="other")
    make_runs({"softmax": [0.6, 0.8]}, patch_size=14, experiment="other")
    (line,) = figure("other").axes[0].get_lines()
    assert line.get_linestyle() == "-"


def test_saving_in_one_form_does_not_change_the_next(make_runs, figure):
    make_runs({"softmax": [0.5, 0.7], 5: [0.6, 0.9]}, patch_size=7)
    first = png(figure())
    drawn = figure()
    svg(drawn, "title", "words")
    svg_file(drawn)
    assert png(drawn) == first


def test_the_picture_on_the_page_takes_its_ink(make_runs, figure):
    make_runs({"softmax": [0.5, 0.7]})
    text = svg(figure(), "a < b", "words")
    assert text.startswith("<svg")
    assert "currentColor" in text
    assert "#ffffff" not in text
    assert "a &lt; b" in text


def test_parts_of_a_picture_tell_what_they_belong_to(make_runs, figure):
    make_runs({"softmax": [0.5, 0.75], 5: [0.625, None]}, config={"attention.k": "<i>\"x\" & 'y'"})
    drawn = figure()
    for text in (svg(drawn, "title", "words"), svg_file(drawn)):
        marks = re.findall(r'<g data-n-iters="([^"]*)" data-seed="([^"]*)"><title>([^<]*)</title>', text)
        assert [mark[:2] for mark in marks] == [("softmax", "0"), ("softmax", "1"), ("5", "0")]
        assert [mark[2].rsplit(" ", 1)[1] for mark in marks] == ["50.00", "75.00", "62.50"]
        assert text.count('<g data-n-iters="5">') == 4  # band, range, line, cross
        assert "mark" not in re.sub(r"marker", "", text)
        assert not re.search(r'id="[a-z]+_\d', text)
