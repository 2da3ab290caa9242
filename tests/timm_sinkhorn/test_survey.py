import csv

import pytest

from tests.timm_sinkhorn.survey import COLUMNS, FAMILIES, TABLE, main, survey


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


def test_the_command_writes_rows(tmp_path, table, monkeypatch):
    output = tmp_path / "families.csv"
    monkeypatch.setattr("sys.argv", ["survey", "nest", "--output", str(output)])
    main()
    with output.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert {**row, "difference": ""} == {**table["nest"], "difference": ""}


def test_unknown_families_are_refused(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["survey", "lenet"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "unknown lenet; there are vit, " in capsys.readouterr().err
