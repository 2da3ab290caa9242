"""Long work tells where it is: in a log by a line a minute, without control characters."""

import io
import re
import sys
import time

import pytest
from rich.console import Console

from experiments import progress
from experiments.data import prepare
from experiments.runners import classifier


@pytest.fixture
def minutes(monkeypatch):
    """A minute of a tenth of a second."""
    monkeypatch.setattr(progress, "INTERVAL_S", 0.1)


def plain(text: str) -> bool:
    return re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text) is None


def test_a_line_a_minute(minutes, capsys):
    def slowly():
        for item in range(6):
            time.sleep(0.06)
            yield item

    console = Console(stderr=True)
    assert list(progress.tracked(slowly(), "decoding", 1006, 1000, console=console)) == list(range(6))
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 3
    assert all(re.fullmatch(r"decoding: 1,00\d of 1,006 \(0 min\)", line) for line in lines)


def test_quick_work_prints_nothing(capsys):
    console = Console(stderr=True)
    assert list(progress.tracked([1, 2], "decoding", console=console)) == [1, 2]
    quiet = Console(stderr=True, quiet=True)
    assert list(progress.tracked([1, 2], "decoding", 2, console=quiet)) == [1, 2]
    assert capsys.readouterr().err == ""


def test_work_that_does_not_come_back(minutes, capsys):
    with progress.at_work("learning pieces") as work, progress.for_terminals():
        print("\r 10 %", file=sys.stderr)
        time.sleep(0.35)
        work.now = "writing"
        time.sleep(0.35)
    time.sleep(0.25)
    lines = capsys.readouterr().err.splitlines()
    assert {line.partition(" (")[0] for line in lines} == {"learning pieces", "writing"}
    assert len(lines) <= 7
    with progress.at_work("nothing to say", quiet=True):
        time.sleep(0.25)
    assert capsys.readouterr().err == ""


def test_a_bar_in_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shown = Terminal()
    console = Console(file=shown, force_terminal=True)
    assert list(progress.tracked(range(3), "decoding", 3, console=console)) == [0, 1, 2]
    assert "decoding" in shown.getvalue()


def test_prepare(minutes, capsys, monkeypatch, tmp_path):
    def slow(folder, archive):
        time.sleep(0.35)
        return "done"

    monkeypatch.setitem(prepare.DATA_SETS, "mnist", slow)
    assert prepare.main(["mnist", f"--folder={tmp_path}"]) == 0
    err = capsys.readouterr().err
    assert err.startswith("preparing mnist (0 min)\n")
    assert plain(err)


def test_a_long_epoch(runs, minutes, capsys, monkeypatch):
    """While it is trained and while it is evaluated."""
    for name in ("training_step", "validation_step"):
        step = getattr(classifier.Classifier, name)

        def slow(self, *arguments, step=step):
            time.sleep(0.15)
            return step(self, *arguments)

        monkeypatch.setattr(classifier.Classifier, name, slow)
    runs.start("trainer.max_epochs=1")
    err = capsys.readouterr().err
    lines = err.splitlines()
    assert "epoch 1/1: batch 2 of 4 (0 min)" in lines
    assert "epoch 1/1: val batch 1 of 1 (0 min)" in lines
    assert plain(err)
