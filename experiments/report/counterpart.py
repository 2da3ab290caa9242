"""Published numbers and those of our runs side by side."""

import statistics
from collections.abc import Sequence

from .cells import Cell, Measure, Results, axis_label, place_label
from .collect import NOTHING
from .cost import read_pace
from .published import PublishedResult, PublishedRow
from .tables import Table

STATISTICS = ("best", "median", "mean", "worst")


def published_table(published: Sequence[PublishedResult], results: Results) -> Table:
    """Each published number, with its protocol and how far it is known, and the same of our cells."""
    rows = []
    for result in published:
        for row in result.rows:
            model = row.model + (f", {row.n_iters} half-steps" if row.n_iters is not None else "")
            values = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in row.values.items())
            numbers = [f"{values}{f' ({result.runs} runs)' if result.runs else ''}", _here(result, row, results)]
            rows.append(
                (model, result.metric, *numbers, result.unit, result.status.value, result.place, result.protocol)
            )
    header = ("model", "metric", "published", "here", "unit", "status", "place", "protocol of the published number")
    note = (
        f"Here: {results.words(Measure.CHOSEN)}; times are medians over epochs, then runs, on the device of the runs."
    )
    return Table("Published numbers and ours", header, tuple(rows), note)


def _here(result: PublishedResult, row: PublishedRow, results: Results) -> str:
    """The cells that a published row is the counterpart of, with the same statistics."""
    parts = []
    for cell in results.cells:
        if _matches(row, cell) and (words := _numbers(result, row, cell, results)):
            places = zip(results.axes, cell.place, strict=True)
            name = [cell.attention.label, *(f"{axis_label(axis)} {place_label(axis, at)}" for axis, at in places)]
            parts.append(f"{', '.join(name)}: {words} ({len(cell.runs)} run{'s' * (len(cell.runs) != 1)})")
    return "; ".join(parts) or NOTHING


def _matches(row: PublishedRow, cell: Cell) -> bool:
    attention = cell.attention
    if row.attention == "both":
        return True
    if row.attention == "softmax":
        return attention.is_softmax()
    same = attention.name == row.attention and not attention.is_softmax()
    return same and (row.n_iters is None or row.n_iters == attention.n_iters)


def _numbers(result: PublishedResult, row: PublishedRow, cell: Cell, results: Results) -> str:
    if result.metric == results.quantity.words:
        summary = results.shown(cell, Measure.CHOSEN).summary
        if summary is None:
            return ""
        # An axis or a single number says nothing of the spread: the median stands beside it.
        names = [name for name in row.values if name in STATISTICS] or ["median"]
        return ", ".join(f"{name} {results.quantity.number(getattr(summary, name))}" for name in names)
    if result.unit == "seconds":
        seconds = [pace.seconds for run in cell.runs if (pace := read_pace(run)) is not None]
        return f"median {statistics.median(seconds):.3g}" if seconds else ""
    return ""
