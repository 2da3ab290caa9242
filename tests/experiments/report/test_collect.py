"""Run folders of every kind among the inputs: finished ones are read, all others listed with a reason."""

import json
import math
import os

import pytest

from experiments.report.collect import Problem, Protocol, Run, collect, read_run


def edit(folder, name, change):
    path = folder / name
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def problem(folder):
    found = read_run(folder)
    assert isinstance(found, Problem)
    assert found.folder == folder
    return found


def test_a_finished_run_is_read_with_its_numbers(make_run):
    folder = make_run("sinkhorn", 3, 0.8125, 0.79, n_iters=5, patch_size=14, split="abc", best_epoch=17, day=7)
    run = read_run(folder)
    assert isinstance(run, Run)
    assert (run.chosen, run.last, run.best_epoch, run.last_epoch) == (0.8125, 0.79, 17, 45)
    assert (run.experiment, run.attention, run.seed, run.split) == ("mnist_patches", "sinkhorn", 3, "abc")
    assert (run.selected_on, run.selected_by) == ("val", "accuracy")
    assert run.finished == "2026-11-07T10:05:00+00:00"
    assert run.settings["model.patch_size"] == 14
    assert run.settings["attention.n_iters"] == 5
    assert "paths.runs" not in run.settings
    assert run.protocol is None


def test_runs_are_found_at_every_depth_and_counted_once(make_run, tmp_path):
    one, two = make_run(seed=0), make_run(seed=1)
    (one / "checkpoints").mkdir()
    (one / "checkpoints" / "run.json").write_text("{}", encoding="utf-8")
    paths = [tmp_path, tmp_path / "runs" / ".." / "runs", one, one / "result.json", two / "metrics.jsonl"]
    (two / "metrics.jsonl").touch()
    (tmp_path / "runs" / "again").symlink_to(tmp_path / "runs")
    runs, problems = collect(paths)
    assert sorted(run.seed for run in runs) == [0, 1]
    assert problems == []


def test_a_linked_folder_is_followed(make_run, tmp_path):
    make_run(root=tmp_path / "elsewhere")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mnist_patches").symlink_to(tmp_path / "elsewhere")
    assert len(collect([tmp_path / "runs"])[0]) == 1


@pytest.mark.parametrize("name", ["a b (1)", "x=1,y#2", "[draft]*", "ümläut é", "-leading", "it's $HOME", "a\nb"])
def test_odd_characters_in_a_path(make_run, tmp_path, name):
    folder = make_run(root=tmp_path / name / "mnist_patches", chosen=0.5)
    runs, problems = collect([tmp_path / name])
    assert [(run.folder, run.chosen) for run in runs] == [(folder, 0.5)]
    assert problems == []


def test_unfinished_runs_are_listed_with_their_state(make_run):
    make_run(seed=0, state="failed", message="CUDA out of memory")
    found = problem(make_run(seed=1, state="failed", message="CUDA out of memory"))
    assert (found.state, found.experiment) == ("failed", "mnist_patches")
    assert "CUDA out of memory" in found.reason
    assert "python -m experiments.train experiment=mnist_patches" in found.reason
    assert problem(make_run(seed=2, state="interrupted", message="SIGTERM")).state == "interrupted"
    alive = problem(make_run(seed=3, state="running", pid=os.getpid()))
    assert (alive.state, str(os.getpid()) in alive.reason) == ("running", True)
    gone = problem(make_run(seed=4, state="running", pid=2**22 + 1))  # above any process number of Linux
    assert gone.state == "interrupted"
    assert "is gone" in gone.reason


def test_a_result_counts_whatever_the_card_says_of_the_state(make_run):
    folder = make_run()
    edit(folder, "run.json", lambda card: card.update(state="running"))  # killed between result.json and the last card
    assert isinstance(read_run(folder), Run)


def test_a_card_that_says_finished_without_a_result(make_run):
    folder = make_run()
    (folder / "result.json").unlink()
    assert "result.json is not there" in problem(folder).reason


@pytest.mark.parametrize("name", ["result.json", "run.json"])
@pytest.mark.parametrize("content", [b"", b'{"hash": "ab', b"[1, 2]", b"null", b"\xff\xfe\x00", b"[" * 100_000])
def test_half_written_and_corrupt_files(make_run, name, content):
    folder, whole = make_run(), make_run(seed=1)
    (folder / name).write_bytes(content)
    found = problem(folder)
    assert found.state == "unreadable"
    assert name in found.reason
    runs, problems = collect([folder.parent])
    assert [run.folder for run in runs] == [whole]
    assert problems == [found]


def test_a_folder_that_was_only_begun(make_run):
    folder = make_run()
    (folder / "run.json").unlink()
    (folder / "result.json").unlink()
    runs, problems = collect([folder.parent])
    assert runs == []
    assert [(found.folder, found.experiment) for found in problems] == [(folder, "")]
    assert "run.json" in problems[0].reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda result: result.pop("best"), "no 'best'"),
        (lambda result: result.update(last=3), "int where an object belongs"),
        (lambda result: result["best"].pop("test"), "no 'test'"),
        (lambda result: result["best"]["test"].pop("accuracy"), "no 'accuracy'"),
        (lambda result: result["best"]["test"].update(accuracy="0.9"), "'0.9', not a number"),
        (lambda result: result["best"]["test"].update(accuracy=True), "True, not a number"),
        (lambda result: result["last"]["test"].update(accuracy=93.5), "93.5, not a fraction of 1"),
        (lambda result: result["last"]["test"].update(accuracy=-0.1), "-0.1, not a fraction of 1"),
        (lambda result: result["best"].update(epoch="4"), "'4', not a whole number"),
        (lambda result: result.update(seed=None), "None, not a whole number"),
        (lambda result: result.update(hash="other"), "different runs"),
    ],
)
def test_results_that_make_no_sense(make_run, change, reason):
    folder = make_run()
    edit(folder, "result.json", change)
    assert reason in problem(folder).reason


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_diverged_run_is_a_run(make_run, value):
    folder = make_run()
    edit(folder, "result.json", lambda result: result["last"]["test"].update(accuracy=value))
    run = read_run(folder)
    assert isinstance(run, Run)
    assert math.isnan(run.last)
    assert run.chosen == 0.9


def test_a_run_without_test_metrics_by_its_protocol(make_run):
    folder = make_run(config={"protocol.test": False})
    edit(folder, "result.json", lambda result: (result["best"].pop("test"), result["last"].pop("test")))
    assert problem(folder).state == "untested"


def test_a_card_with_little_in_it_still_gives_a_run(make_run):
    folder = make_run()
    edit(folder, "run.json", lambda card: [card.pop(key) for key in ("attempts", "data", "git", "versions", "command")])
    run = read_run(folder)
    assert isinstance(run, Run)
    assert (run.split, run.finished) == (None, "")


def test_paths_that_lead_nowhere(tmp_path):
    (tmp_path / "notes.txt").write_text("x", encoding="utf-8")
    runs, problems = collect([tmp_path / "missing", tmp_path / "notes.txt", tmp_path])
    assert runs == []
    assert [found.state for found in problems] == ["missing", "unreadable"]


def test_the_published_treatment_is_read_of_official_experiments_alone(make_run):
    asked = {"report.leave_out_below": 0.8, "report.overwrite_last_point": True}
    official = read_run(make_run(experiment="mnist_patches_official", config=asked))
    assert isinstance(official, Run)
    assert official.protocol == Protocol(0.8, True)
    plain = read_run(make_run(config=asked))
    assert isinstance(plain, Run)
    assert plain.protocol is None
    wrong = make_run(experiment="mnist_patches_official", seed=1, config={"report.leave_out_below": "much"})
    assert "report.leave_out_below is 'much'" in problem(wrong).reason
    (wrong / "config.yaml").write_text("report: [", encoding="utf-8")
    assert "config.yaml is no valid YAML" in problem(wrong).reason
