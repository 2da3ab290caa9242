"""The command: files, exit codes, and one sentence for what is wrong."""

import csv
import json
from pathlib import Path

import pytest

from experiments.theory.__main__ import NAMES, main

SMALL = ["n=8", "counts=[1,3]"]


def test_writes_its_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["invariance", *SMALL, f"out={tmp_path}", "seed=3"]) == 0
    folder = tmp_path / "invariance"
    result = json.loads((folder / "results.json").read_text())
    assert result["holds"] is True
    assert result["options"]["seed"] == 3
    assert {"sentence", "expected", "measured", "tolerance", "holds"} <= set(result["statements"][0])
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "figure.svg").read_text()
    rows = list(csv.DictReader((folder / "table.csv").open()))
    assert [row["half-steps"] for row in rows] == ["1", "3"]
    assert json.loads((folder / "table.json").read_text())[0]["half-steps"] == 1
    assert "statements hold" in capsys.readouterr().out


def test_help_names_every_check_and_its_options(capsys) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in NAMES:
        assert f"  {name}: " in shown
    assert "      counts=" in shown
    assert main(["invariance", "-h"]) == 0


def test_exit_code_where_a_statement_does_not_hold(tmp_path: Path, without_column_steps, capsys) -> None:
    assert main(["invariance", *SMALL, f"out={tmp_path}"]) == 1
    assert "NO" in capsys.readouterr().out
    assert json.loads((tmp_path / "invariance" / "results.json").read_text())["holds"] is False


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "name one check"),
        (["nothing"], "name one check"),
        (["invariance", "n"], "does not know 'n'"),
        (["invariance", "m=3"], "does not know 'm=3'; its options are given as key=value: seed, out, n"),
        (["invariance", "n=many"], "n: Value 'many'"),
        (["invariance", "n=1"], "n must be at least 2"),
        (["invariance", "counts=[2]"], "counts must be odd"),
        (["heat_limit", "eps=[0.1,-1]"], "temperatures"),
        (["regularity", "contraction=2"], "contraction must lie between 0 and 1"),
        (["regularity", "run=nowhere"], "run=nowhere is no folder of a finished run"),
        (["all", "n=3"], "all does not know 'n=3'"),
        (["invariance", "seed=-1"], "seed must be at least 0"),
    ],
)
def test_mistakes_end_in_one_sentence(words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 1
    printed = capsys.readouterr().err.strip()
    assert sentence in printed
    assert "\n" not in printed
    assert "Traceback" not in printed


def test_a_place_that_cannot_be_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["invariance", *SMALL, f"out={tmp_path}/file"]) == 1
    assert "cannot be written to" in capsys.readouterr().err
