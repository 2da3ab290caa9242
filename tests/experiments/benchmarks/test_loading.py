"""Photographs a second of the loaders: the same samples in every row, and numbers that are above zero."""

from experiments.benchmarks import loading


def test_every_way_of_loading_is_measured() -> None:
    rows = loading.table(quick=True)
    assert {row[0] for row in rows} == {"each time", "once"}
    assert all(row[2] > 0 for row in rows)
    assert len(rows) == 2 * len({row[1] for row in rows})
