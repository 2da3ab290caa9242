"""The command and what it writes: numbers equal to result.json, nothing from outside, names that are no markup."""

import csv
import html
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from experiments.report.__main__ import main

ROOT = Path(__file__).parents[3]
NAMES = {"index.html", "report.md", "cells.csv", "differences.csv", "runs.csv", "tables.tex"} | {
    f"accuracy_{measure}.{ending}" for measure in ("chosen", "last") for ending in ("svg", "pdf", "png")
}


def rows(path):
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


class Page(HTMLParser):
    """What a test asks of a page: runs, tables, tags, and every address in it."""

    def __init__(self, text):
        super().__init__()
        self.runs, self.tags, self.addresses, self.cells, self.open = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append(tag)
        if tag not in {"meta", "path", "use", "br", "link", "img", "input", "hr"}:
            self.open.append(tag)
        if "data-folder" in attributes:
            self.runs.append(attributes)
        for name in ("src", "href", "xlink:href", "action", "srcset"):
            if name in attributes:
                self.addresses.append(attributes[name])
        if tag == "td":
            self.cells.append("")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "td":
            self.cells[-1] += data


@pytest.fixture(scope="module")
def report(some_runs):
    assert main([str(some_runs[0])]) == 0
    return some_runs[0] / "mnist_patches" / "report"


def test_all_files_are_there_and_nothing_else(report):
    assert {path.name for path in report.iterdir()} == NAMES
    assert report.joinpath("accuracy_chosen.png").read_bytes().startswith(b"\x89PNG")
    assert report.joinpath("accuracy_chosen.pdf").read_bytes().startswith(b"%PDF")


def test_page_and_csv_hold_the_numbers_of_result_json(report):
    expected = {}
    for path in report.parent.glob("*/result.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        expected[str(path.parent)] = (result["best"]["test"]["accuracy"], result["last"]["test"]["accuracy"])
    assert len(expected) == 10
    page = Page(report.joinpath("index.html").read_text(encoding="utf-8"))
    assert {run["data-folder"]: (float(run["data-chosen"]), float(run["data-last"])) for run in page.runs} == expected
    table = rows(report / "runs.csv")
    assert {row["folder"]: (float(row["accuracy_chosen"]), float(row["accuracy_last"])) for row in table} == expected


def test_tables_hold_the_statistics(report, some_runs):
    _, softmax, sinkhorn = some_runs
    cells = {(row["attention"], row["measure"]): row for row in rows(report / "cells.csv")}
    cell = cells["sinkhorn", "chosen"]
    assert (cell["n"], cell["n_iters"]) == ("5", "5")
    assert float(cell["mean"]) == pytest.approx(sum(sinkhorn) / 5, rel=1e-15)
    assert (float(cell["best"]), float(cell["worst"]), float(cell["median"])) == (0.906, 0.864, 0.8755)
    difference = rows(report / "differences.csv")[0]
    assert float(difference["mean"]) == pytest.approx(sum(sinkhorn) / 5 - sum(softmax) / 5, rel=1e-12)
    assert (difference["pairs"], difference["outcome"], difference["seeds"]) == ("5", "higher", "0 1 2 3 4")
    assert difference["bootstrap_low"] == ""
    page = Page(report.joinpath("index.html").read_text(encoding="utf-8"))
    markdown = report.joinpath("report.md").read_text(encoding="utf-8")
    for words in ("90.60", "87.55", "88.19", "86.40", "+7.69", "Sinkhorn, 5 half-steps is higher"):
        assert words in page.cells
        assert words.replace("_", "\\_") in markdown


def test_the_page_asks_for_nothing_from_outside(report):
    text = report.joinpath("index.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.open == []
    assert page.tags.count("script") == 1
    assert page.tags.count("svg") == 2
    for address in page.addresses:
        assert address.startswith(("#", "data:,")) or address in NAMES
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert "prefers-color-scheme: dark" in text
    assert "width=device-width" in text


def test_page_has_commands_budget_protocol_and_published_values(report):
    text = html.unescape(report.joinpath("index.html").read_text(encoding="utf-8"))
    assert "python -m experiments.train experiment=mnist_patches attention=sinkhorn seed=4" in text
    assert "at the epoch chosen on validation (by the accuracy of val)" in text
    assert "Holm's correction" in text
    assert "axis low 91, axis high 97.5" in text
    assert "not yet checked against the PDF" in text
    assert {"max epochs", "batch size", "lr"} <= set(re.findall(r'<th scope="col">([^<]*)</th>', text))
    assert "Finished 2026-11-01, on " in text


def test_the_same_runs_give_the_same_bytes(report, some_runs):
    before = {path.name: path.read_bytes() for path in report.iterdir()}
    assert main([str(some_runs[0])]) == 0
    assert {path.name: path.read_bytes() for path in report.iterdir()} == before


def test_the_terminal_shows_the_table_and_the_page(make_runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    make_runs({"softmax": [0.8, 0.81, 0.79], 5: [0.87, 0.89, 0.86]})
    assert main([str(tmp_path / "runs")]) == 0
    out = capsys.readouterr().out
    assert "87.33" in out
    assert "no winner named: too few seeds (3 paired, 5 needed)" in out
    assert out.rstrip().endswith(str(tmp_path / "runs" / "mnist_patches" / "report" / "index.html"))


def test_bad_runs_are_listed_and_break_nothing(make_run, make_runs, tmp_path, capsys):
    make_runs({"softmax": [0.8, 0.9]})
    failed = make_run("sinkhorn", 7, state="failed", message="<script>alert(1)</script> [red]| $x$")
    cut = make_run("sinkhorn", 8)
    (cut / "result.json").write_text('{"hash"', encoding="utf-8")
    assert main([str(tmp_path / "runs"), str(tmp_path / "missing")]) == 0
    report = tmp_path / "runs" / "mnist_patches" / "report"
    page = Page(report.joinpath("index.html").read_text(encoding="utf-8"))
    assert {str(failed), str(cut), str(tmp_path / "missing")} <= set(page.cells)
    assert page.tags.count("script") == 1
    assert "<script>" not in report.joinpath("report.md").read_text(encoding="utf-8")
    assert len(page.runs) == 2
    assert "[red]" in capsys.readouterr().out


def test_names_from_a_configuration_are_no_markup(make_runs, tmp_path):
    name = "<b>$\\frac{x}$ &amp; |a|"
    make_runs({"softmax": [0.8], 5: [0.9]}, config={"model.<i>k$": name})
    make_runs({"softmax": [0.8], 5: [0.9]}, config={"model.<i>k$": "$plain"})
    out = tmp_path / "odd folder = (1)"
    assert main([str(tmp_path / "runs"), "--out", str(out)]) == 0
    text = out.joinpath("index.html").read_text(encoding="utf-8")
    page = Page(text)
    assert name in page.cells
    assert not {"b", "i"} & set(page.tags)
    assert html.escape(name, quote=False) in text[text.index("<svg") : text.index("</svg>")]


def test_no_winner_is_named_where_there_is_no_baseline(make_runs, tmp_path, capsys):
    make_runs({5: [0.8, 0.9]})
    assert main([str(tmp_path / "runs")]) == 0
    out = capsys.readouterr().out
    assert "No softmax runs to compare with: Sinkhorn, 5 half-steps." in out
    assert "is higher" not in out


def test_a_single_run(make_run, tmp_path, capsys):
    make_run("softmax", 0, 0.5)
    assert main([str(tmp_path / "runs")]) == 0
    assert "Only softmax was run" in capsys.readouterr().out
    row = rows(tmp_path / "runs" / "mnist_patches" / "report" / "cells.csv")[0]
    assert (row["n"], row["mean"], row["std"]) == ("1", "0.5", "")


def test_an_experiment_each_in_a_folder_of_its_own(make_run, tmp_path, capsys):
    for experiment in ("mnist_patches", "mnist_patches_official"):
        make_run(experiment=experiment)
    broken = make_run(experiment="mnist_patches_official", seed=1, state="failed")
    begun = make_run(experiment="mnist_patches_official", seed=2)
    (begun / "run.json").unlink()
    nameless = make_run(root=tmp_path / "runs" / "odd")
    (nameless / "run.json").write_text("{", encoding="utf-8")
    untested = [
        make_run(experiment="mnist_patches_lr", seed=seed, config={"protocol.test": False}) for seed in range(2)
    ]
    out = tmp_path / "out"
    assert main([str(tmp_path / "runs"), "--out", str(out)]) == 0
    names = ("mnist_patches", "mnist_patches_official")
    assert {path.name for path in out.iterdir()} == {"index.html", *names}
    for name in names:
        assert {path.name for path in (out / name).iterdir()} == NAMES - {"index.html"}
    views = dict(re.findall(r'<article id="([^"]*)"(.*?)</article>', (out / "index.html").read_text("utf-8"), re.S))
    assert list(views) == ["overview", *names]
    listed = {
        name: {folder for folder in (broken, begun, nameless, *untested) if str(folder) in Page(view).cells}
        for name, view in views.items()
    }
    assert listed == {
        "overview": set(untested),
        "mnist_patches": {nameless},
        "mnist_patches_official": {broken, begun, nameless},
    }
    assert [view.count('class="run"') for view in views.values()] == [0, 1, 1]
    assert 'href="mnist_patches_official/cells.csv"' in views["mnist_patches_official"]
    assert "mnist_patches_lr: no run to report (2 untested)" in capsys.readouterr().out


def test_official_numbers_are_labelled(make_runs, tmp_path):
    asked = {"report.leave_out_below": 0.8, "report.overwrite_last_point": True}
    options = {"experiment": "mnist_patches_official", "config": asked, "selected_on": "test"}
    make_runs({"softmax": [0.9, 0.3], 5: [0.93, 0.95]}, patch_size=14, **options)
    make_runs({"softmax": [0.9, 0.91], 5: [0.93, 0.95]}, patch_size=28, **options)
    assert main([str(tmp_path / "runs")]) == 0
    text = (tmp_path / "runs" / "mnist_patches_official" / "report" / "index.html").read_text(encoding="utf-8")
    assert "Protocol of the published code" in text
    assert "Runs at or below 80 % are left out" in text
    assert "none is left out" not in text
    page = Page(text)
    assert "1 (+1 left out)" in page.cells
    assert "softmax (overwritten by Sinkhorn, 5 half-steps)" in page.cells
    assert "seed 1: 30.00" in page.cells
    assert any("chosen on the test set" in words for words in re.findall(r"<h3>([^<]*)</h3>", text))


@pytest.mark.parametrize("content", ["nothing", "unfinished"])
def test_nothing_finished_is_one_sentence_and_an_error(make_run, tmp_path, capsys, content):
    (tmp_path / "runs").mkdir()
    if content == "unfinished":
        make_run(state="interrupted", message="SIGTERM")
    assert main([str(tmp_path / "runs")]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert str(tmp_path / "runs") in captured.err
    assert ("SIGTERM" in captured.err) == (content == "unfinished")


def test_a_folder_that_cannot_be_written(make_run, tmp_path, capsys):
    make_run()
    (tmp_path / "file").touch()
    assert main([str(tmp_path / "runs"), "--out", str(tmp_path / "file" / "report")]) == 1
    assert capsys.readouterr().err.startswith("no report: ")


def test_runs_of_one_experiment_in_several_folders_need_a_place(make_run, tmp_path, capsys):
    make_run(root=tmp_path / "a" / "mnist_patches", seed=0)
    make_run(root=tmp_path / "b" / "mnist_patches", seed=1)
    paths = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(paths) == 1
    assert "--out" in capsys.readouterr().err
    assert main([*paths, "--out", str(tmp_path / "out")]) == 0
    assert len(rows(tmp_path / "out" / "runs.csv")) == 2


def test_the_command(make_run, tmp_path):
    make_run(root=tmp_path / "-runs (ü)" / "mnist_patches", chosen=0.625)
    command = [sys.executable, "-m", "experiments.report", "--", "-runs (ü)"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert (tmp_path / "-runs (ü)" / "mnist_patches" / "report" / "index.html").is_file()
    assert b"62.50" in done.stdout
    text = (tmp_path / "-runs (ü)" / "mnist_patches" / "report" / "index.html").read_text(encoding="utf-8")
    assert Page(text).runs[0]["data-folder"].startswith("-runs (ü)/mnist_patches/")


def test_bytes_that_are_no_text(make_run, tmp_path):
    folder = make_run()
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.rename(tmp_path / "runs", odd)
    failed = make_run(seed=1, root=Path(odd) / "mnist_patches", state="failed", message="\ud800")
    assert main([odd]) == 0
    text = (failed.parent / "report" / "index.html").read_text(encoding="utf-8")
    assert Page(text).runs[0]["data-folder"].endswith(f"\\xff/mnist_patches/{folder.name}")
    assert "\\ud800" in text


def test_runs_at_several_depths_have_their_page_in_the_folder_that_was_given(make_run, tmp_path, capsys):
    one = make_run(seed=0)
    two = make_run(seed=1, root=tmp_path / "runs" / "column_sums" / "mnist_patches")
    assert main([str(one), str(two)]) == 1
    assert "--out" in capsys.readouterr().err
    assert main([str(tmp_path / "runs")]) == 0
    assert Page((tmp_path / "runs" / "report" / "index.html").read_text("utf-8")).tags.count("details") > 2
