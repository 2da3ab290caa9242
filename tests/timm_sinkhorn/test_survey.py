import csv
import subprocess
import sys
from pathlib import Path

import pytest

from tests.timm_sinkhorn.survey import COLUMNS, FAMILIES, TABLE, survey

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def table():
    with TABLE.open(newline="") as file:
        return {row["family"]: row for row in csv.DictReader(file)}


def test_the_table_has_every_family(table):
    assert list(table) == list(FAMILIES)
    assert all(tuple(row) == COLUMNS for row in table.values())
    assert all(float(row["difference"]) < 1e-5 and int(row["converted"]) > 0 for row in table.values())
    assert not [(name, row) for name, row in table.items() if "no" in row.values()]


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_what_the_survey_finds(family, table):
    row = survey(FAMILIES[family], ("checkpointing",))
    assert float(row.pop("difference")) < 1e-5
    assert row == {column: table[family][column] for column in row}


def test_the_command_writes_rows(tmp_path, table):
    output = tmp_path / "families.csv"
    command = [sys.executable, "-m", "tests.timm_sinkhorn.survey", "nest", "--output", str(output)]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    with output.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert {**row, "difference": ""} == {**table["nest"], "difference": ""}


def test_unknown_families_are_refused():
    command = [sys.executable, "-m", "tests.timm_sinkhorn.survey", "lenet"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "unknown lenet; there are vit, " in done.stderr
