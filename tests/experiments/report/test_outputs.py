"""LaTeX, published beside ours, the README's table, BLEU, and the watch."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.report.__main__ import main
from experiments.report.catalogue import catalogue
from experiments.report.cells import Measure, analyse
from experiments.report.collect import BLEU, collect
from experiments.report.counterpart import published_table
from experiments.report.published import PublishedResult, PublishedRow, Status
from experiments.report.readme import results_table
from experiments.report.tables import Table, as_latex

ROOT = Path(__file__).parents[3]


def results(tmp_path, experiment="mnist_patches"):
    runs, problems = collect([tmp_path / "runs" / experiment])
    return analyse(experiment, runs, problems)


def test_latex_writes_out_every_command_sign():
    text = as_latex(Table("50 % of\nit", ("a_b", "c"), (("1 & 2 % $x$ {y} #1 ^ ~", r"\input{x}"), ("−1–2", "a < b"))))
    lines = text.splitlines()
    assert lines[:3] == ["% 50 % of it", r"\begin{tabular}{ll}", r"\toprule"]
    assert lines[3] == r"a\_b & c \\"
    assert lines[5] == r"1 \& 2 \% \$x\$ \{y\} \#1 \textasciicircum{} \textasciitilde{} & \textbackslash{}input\{x\} \\"
    assert lines[6] == r"$-$1--2 & a $<$ b \\"
    assert lines[7:] == [r"\bottomrule", r"\end{tabular}"]


def published(attention, n_iters=None, metric="accuracy", unit="percent", **values):
    row = PublishedRow("Theirs", attention, n_iters, values)
    more = {"id": "i", "source": "s", "place": "Table 1", "experiments": ["mnist_patches"], "protocol": "p", "runs": 4}
    return PublishedResult(**more, metric=metric, unit=unit, status=Status.recalled, rows=[row])


def test_published_and_ours_stand_side_by_side(make_runs, tmp_path):
    folders = make_runs({"softmax": [0.5, 0.625], 3: [0.75, 0.875], 5: [0.25, 0.5]})
    (folders[0] / "timing.jsonl").write_text('{"epoch": 1, "seconds": 12.5}\n')
    entries = [
        published("softmax", median=86.3, worst=84.7),
        published("sinkhorn", 5, best=89.1),
        published("sinkhorn", value=89.0),
        published("softmax", metric="time per epoch", unit="seconds", value=242.0),
        published("esp", value=1.0),
        published("softmax", metric="BLEU", unit="BLEU", value=34.0),
    ]
    rows = published_table(entries, results(tmp_path)).rows
    assert [row[3] for row in rows] == [
        "softmax: median 56.25, worst 50.00 (2 runs)",
        "Sinkhorn, 5 half-steps: best 50.00 (2 runs)",
        "Sinkhorn, 3 half-steps: median 81.25 (2 runs); Sinkhorn, 5 half-steps: median 37.50 (2 runs)",
        "softmax: median 12.5 (2 runs)",
        "–",
        "–",
    ]
    assert rows[0][2] == "median 86.3, worst 84.7 (4 runs)"
    assert "not yet checked against the PDF" in rows[0][5]


def test_the_readme_table_has_command_early_metric_time_and_what_was_not_run(make_run, tmp_path, capsys):
    for seed, chosen in enumerate((0.5, 0.75, 0.625)):
        folder = make_run("softmax", seed, chosen)
        rows = [{"epoch": epoch, "split": "val", "accuracy": chosen / 2 if epoch == 9 else 0.1} for epoch in (1, 9, 45)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "timing.jsonl").write_text('{"epoch": 1, "seconds": 1.5}\n')
    table = results_table([results(tmp_path)])
    name, command, final, early, seconds, device = table.rows[0]
    assert name == "mnist_patches, softmax"
    assert shlex.split(command)[3:] == ["-m", "experiment=mnist_patches", "attention=softmax", "seed=range(3)"]
    assert final == "62.50 % [50.00, 75.00], n = 3"
    assert early == "validation 31.25 % at epoch 9"
    assert (seconds, device) == ("1.5 s", "cpu")
    waiting = [row[0] for row in table.rows[1:]]
    assert waiting == [
        entry.name for entry in catalogue() if entry.name != "mnist_patches" and not entry.name.endswith("_lr")
    ]
    assert {row[2] for row in table.rows[1:]} == {"not yet run here"}
    assert main([str(tmp_path / "runs"), "--readme"]) == 0
    assert f"| mnist\\_patches, softmax | `{command}` | 62.50 % [50.00, 75.00], n = 3 |" in capsys.readouterr().out
    assert not (tmp_path / "runs" / "mnist_patches" / "report").exists()


def test_the_catalogue_tells_what_each_experiment_is_and_how_it_is_run():
    entries = {entry.name: entry for entry in catalogue()}
    assert entries["mnist_patches"].words.endswith("(Sander et al. 2022, section 5.4)")
    assert set(entries) == {path.stem for path in (ROOT / "configs" / "experiment").glob("*.yaml")}
    assert entries["mnist_patches"].words.startswith("Accuracy on digits by patch size")
    for entry in entries.values():
        assert entry.words, entry.name
        for command in entry.commands:
            module = shlex.split(command)[2]
            assert module.startswith("experiments.")
            assert module != "experiments.train" or f"experiment={entry.name}" in command


def test_bleu_is_reported_as_it_is(make_run, tmp_path):
    for name, values in (("softmax", (30.0, 31.5)), ("sinkhorn", (33.0, 34.25))):
        for seed, bleu in enumerate(values):
            folder = make_run(name, seed)
            result = json.loads((folder / "result.json").read_text())
            for place, shift in (("best", 0.0), ("last", -0.5), ("initial", -10.0)):
                result[place] = {"epoch": 3, "test": {"bleu": bleu + shift, "loss": 1.0}}
            (folder / "result.json").write_text(json.dumps(result))
            rows = [{"epoch": epoch, "split": "val", "bleu": bleu - 3 + epoch} for epoch in (0, 1, 2, 3)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = results(tmp_path)
    assert found.quantity == BLEU
    assert found.measures == [Measure.CHOSEN, Measure.LAST, Measure.INITIAL]
    assert main([str(tmp_path / "runs")]) == 0
    report = tmp_path / "runs" / "mnist_patches" / "report"
    text = (report / "report.md").read_text()
    assert "### Test BLEU, at the epoch chosen on validation" in text
    assert "| softmax | 2 | 31.50 | 30.75 | 30.75 | 30.00 | 1.06 | 0 |" in text
    assert "### Test BLEU, with the weights that training began with" in text
    assert "| softmax | 2 | 21.50 | 20.75 | 20.75 | 20.00 | 1.06 | 0 |" in text
    assert "Difference from softmax in BLEU" in text
    assert "| Sinkhorn, 5 half-steps | 2 | +2.88 |" in text
    assert "Validation BLEU by epoch:" in (report / "index.html").read_text()
    assert "bleu_chosen" in (report / "runs.csv").read_text().splitlines()[0]
    lines = (report / "curves.csv").read_text().splitlines()
    assert lines[1].split(",")[3:] == ["val", "0", "2", "27.375", "27.75", "28.125"]
    folder = make_run("softmax", 2, 0.5)
    assert [(problem.folder, problem.state) for problem in results(tmp_path).problems] == [(folder, "other metric")]


def test_a_running_run_tells_its_epoch(make_run):
    folder = make_run(state="running", pid=os.getpid())
    (folder / "timing.jsonl").write_text('{"epoch": 12, "seconds": 1.0}\n')
    _, (problem,) = collect([folder])
    assert problem.reason.startswith("epoch 12 of 45, since ")


def wait_for(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_the_watch_writes_anew_and_ends_with_a_page_that_stays(make_run, tmp_path):
    make_run("softmax", 0, 0.5)
    running = make_run("softmax", 1, 0.75)
    result = running / "result.json"
    shutil.move(result, tmp_path / "kept.json")
    page = tmp_path / "runs" / "mnist_patches" / "report" / "index.html"
    command = [sys.executable, "-m", "experiments.report", str(tmp_path / "runs"), "--watch", "1"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(page.exists)
        text = page.read_text(encoding="utf-8")
        assert '<meta http-equiv="refresh" content="1">' in text
        assert len(re.findall(r'class="run"', text)) == 1
        shutil.move(tmp_path / "kept.json", result)
        wait_for(lambda: len(re.findall(r'class="run"', page.read_text(encoding="utf-8"))) == 2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert out.rstrip().endswith(str(page))
    text = page.read_text(encoding="utf-8")
    assert 'http-equiv="refresh"' not in text
    assert text.count('class="run"') == 2


def test_the_watch_before_any_run_is_finished(make_run, tmp_path, monkeypatch):
    make_run(state="running", pid=os.getpid())
    shown = []

    def sleep(seconds):
        shown.append((tmp_path / "runs" / "mnist_patches" / "report" / "index.html").read_text(encoding="utf-8"))
        make_run("softmax", 1)
        if len(shown) == 2:
            raise KeyboardInterrupt

    def make_once(*arguments, make=make_run, **more):
        return make(*arguments, **more) if not shown[1:] else None

    make_run = make_once
    monkeypatch.setattr(time, "sleep", sleep)
    assert main([str(tmp_path / "runs"), "--watch", "7"]) == 0
    assert "No run is finished yet." in shown[0]
    assert 'content="7"' in shown[0]
    assert 'class="run"' in shown[1]


@pytest.mark.parametrize("seconds", ["0", "-3", "soon"])
def test_a_watch_that_cannot_be(tmp_path, capsys, seconds):
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--watch", seconds])
    assert "--watch" in capsys.readouterr().err


def test_a_run_that_is_not_finished_is_not_its_own_only_one(make_run, capsys):
    folder = make_run("softmax", 0, state="failed", message="out of memory")
    assert main([str(folder)]) == 1
    err = capsys.readouterr().err
    assert f"no report: {folder} is no finished run (" in err or f"{folder} is no finished run (" in err
    assert "the only one" not in err
    assert "out of memory" in err
    assert main([str(folder.parent)]) == 1
    err = capsys.readouterr().err
    assert f"no finished run under {folder.parent}: the only one is {folder}" in err


def test_the_readme_table_says_what_is_not_in_it(make_run, tmp_path, capsys):
    make_run("softmax", 0, 0.5)
    damaged = make_run("softmax", 1, 0.5)
    (damaged / "result.json").write_text("{")
    assert main([str(tmp_path / "runs"), "--readme"]) == 0
    shown = capsys.readouterr()
    assert "n = 1" in shown.out
    assert f"warning: {damaged} is not in this table (unreadable: result.json is no valid JSON" in shown.err
    assert main([str(tmp_path / "nowhere"), "--readme"]) == 1
    shown = capsys.readouterr()
    assert (shown.out, "nowhere: there is nothing at this path" in shown.err) == ("", True)
