"""Runs in git: what is exported is reported as the folders are, merges, and is not changed by hand in silence."""

import json
import math

import pytest

from experiments.errors import RunError
from experiments.report import __main__ as report
from experiments.report.collect import Run, collect
from experiments.report.document import rewritten
from experiments.report.exported import COLUMNS, export, read_export


def said(capsys, *words) -> str:
    assert report.main([str(word) for word in words]) == 0
    return capsys.readouterr().out


def test_tables_are_those_of_the_folders(all_kinds_of_runs, tmp_path, capsys):
    runs, _ = all_kinds_of_runs
    told = said(capsys, runs, "--export", tmp_path / "results")
    assert told.splitlines() == [
        f"{tmp_path}/results/mnist_patches.csv: 30 runs",
        f"{tmp_path}/results/shapes_set.csv: 2 runs",
    ]
    assert said(capsys, tmp_path / "results", "--readme") == said(capsys, runs, "--readme")
    of_folders, of_files = tmp_path / "one", tmp_path / "other"
    said(capsys, runs / "mnist_patches", "--out", of_folders)
    said(capsys, tmp_path / "results" / "mnist_patches.csv", "--out", of_files)
    tables = sorted(path.name for path in of_folders.glob("*.csv"))
    assert {"cells.csv", "cost.csv", "curves.csv", "differences.csv"} <= set(tables)
    for name in tables:
        if name in ("runs.csv", "column_sums.csv"):  # paths of folders; sums are not exported
            continue
        assert (of_files / name).read_text() == (of_folders / name).read_text()


def test_every_fact_of_a_run_comes_back(make_run, tmp_path):
    make_run("sinkhorn", 3, 0.8765, 0.8123, n_iters=5)
    make_run("softmax", 1, state="diverged")
    make_run("softmax", 2, 0.5, experiment="mnist_patches_official", config={"report.leave_out_below": 0.6})
    before, _ = collect([tmp_path / "runs"])
    export(before, tmp_path / "results")
    after, problems = collect([tmp_path / "results"])
    assert problems == []
    assert len(before) == len(after) == 3
    by_hash = {run.card["hash"]: run for run in after}
    for run in before:
        other = by_hash[run.card["hash"]]
        for name in Run.__dataclass_fields__:
            if name in ("folder", "card", "rows", "best_epoch" if run.diverged else ""):
                continue
            one, two = getattr(run, name), getattr(other, name)
            assert one == two or (math.isnan(one) and math.isnan(two)), name


def test_results_of_several_people_merge(make_run, tmp_path):
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for root, seeds in ((mine, (0, 1)), (theirs, (1, 2))):
        for seed in seeds:
            make_run("softmax", seed, 0.9, root=root)
    first, _ = collect([mine])
    export(first, tmp_path / "results")
    text = (tmp_path / "results" / "mnist_patches.csv").read_text()
    export(first, tmp_path / "results")
    assert (tmp_path / "results" / "mnist_patches.csv").read_text() == text
    assert list(export(collect([theirs])[0], tmp_path / "results").values()) == [3]
    runs, problems = collect([mine, tmp_path / "results"])
    assert sorted(run.seed for run in runs) == [0, 0, 1, 1, 2]  # copies, of which the report takes one
    assert problems == []


@pytest.mark.parametrize(
    ("old", "new"), [("0.8765", "0.9765"), ('""n_iters"":5', '""n_iters"":3'), (",3,finished", ",4,finished")]
)
def test_a_digit_that_was_changed_by_hand_is_found(make_run, tmp_path, capsys, old, new):
    make_run("sinkhorn", 3, 0.8765, 0.8123)
    export(collect([tmp_path / "runs"])[0], tmp_path / "results")
    path = tmp_path / "results" / "mnist_patches.csv"
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))
    runs, (problem,) = read_export(path)
    assert runs == []
    assert problem.reason == "line 2 is not as it was written: its checksum does not fit"
    assert report.main([str(path)]) == 1
    with pytest.raises(RunError, match="its checksum does not fit; mend or remove it"):
        export(collect([tmp_path / "runs"])[0], tmp_path / "results")


def test_other_tables_are_passed_over(tmp_path, make_run):
    folder = make_run("softmax", 0, 0.9)
    (folder.parent / "metrics.csv").write_text("epoch,loss\n1,0.5\n")
    runs, problems = collect([tmp_path])
    assert len(runs) == 1
    assert problems == []
    (tmp_path / "cut.csv").write_text(",".join(COLUMNS) + "\n1,2\n")
    assert [problem.state for problem in collect([tmp_path])[1]] == ["unreadable"]


def test_a_document_keeps_what_is_not_a_table(some_runs, tmp_path, capsys):
    runs, *_ = some_runs
    document = tmp_path / "page.md"
    document.write_text("before\n\n<!-- begin mnist_patches -->\nold\n<!-- end mnist_patches -->\n\nafter\n")
    assert said(capsys, runs, "--docs", document) == f"{document}: tables of 1 experiments\n"
    text = document.read_text()
    assert text.startswith("before\n\n<!-- begin mnist_patches -->\n\n")
    assert text.endswith("<!-- end mnist_patches -->\n\nafter\n")
    assert "old" not in text
    assert "Sinkhorn, 5 half-steps" in text
    said(capsys, runs, "--docs", document)
    assert document.read_text() == text


def test_a_document_without_a_place_or_without_runs_for_it_is_left_alone(some_runs, tmp_path, capsys):
    runs, *_ = some_runs
    document = tmp_path / "page.md"
    for text, reason in (
        ("nothing\n", "has no place for tables"),
        ("<!-- begin shapes_set -->\n<!-- end shapes_set -->\n", "a place for tables of shapes_set, and no run"),
    ):
        document.write_text(text)
        assert report.main([str(runs), "--docs", str(document)]) == 1
        assert reason in capsys.readouterr().err
        assert document.read_text() == text
    assert report.main([str(runs), "--docs", str(tmp_path / "missing.md")]) == 1
    assert "cannot be read" in capsys.readouterr().err
    assert rewritten("nothing", []) == "nothing"


def test_numbers_are_written_in_full(make_run, tmp_path):
    make_run("softmax", 0, 0.1 + 0.2)
    (path,) = export(collect([tmp_path / "runs"])[0], tmp_path / "results")
    ((run,), _) = read_export(path)
    assert run.chosen == 0.1 + 0.2
    assert json.dumps(run.chosen) in path.read_text()
