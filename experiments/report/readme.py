"""A table of results for a README: command, final metric, an early metric, time per epoch, device; by experiment."""

import math
import shlex
import statistics
from collections.abc import Sequence

from .catalogue import catalogue
from .cells import Cell, Measure, Results, axis_label, place_label
from .collect import NOTHING
from .cost import devices, read_pace
from .curves import SPLITS, read_errors
from .tables import Table

EARLY = 0.2  # of the epochs


def results_table(reported: Sequence[Results]) -> Table:
    """A row for each cell that was run, and one for each experiment that was not."""
    rows = [_row(results, cell) for results in reported for cell in results.cells]
    ran = {results.experiment for results in reported}
    for entry in catalogue():
        if entry.name not in ran and not entry.name.endswith("_lr"):  # which choose learning rates: no results
            training = [line for line in entry.commands if "experiments.train " in line]
            command = training[-1] if training else NOTHING
            rows.append((entry.name, command, "not yet run here", NOTHING, NOTHING, NOTHING))
    header = ("experiment", "command", "test, final", "validation, early", "time per epoch", "device")
    note = (
        "Final: median over seeds at the chosen epoch, worst to best in brackets. Early: median on the split that "
        f"chooses the epoch, after {100 * EARLY:.0f} % of the training: tells whether a run is on its way."
    )
    return Table("Results", header, tuple(rows), note, code=frozenset({1}))


def _row(results: Results, cell: Cell) -> tuple[str, ...]:
    summary, quantity = cell.summary(Measure.CHOSEN), results.quantity
    worst = quantity.number(summary.worst) if math.isfinite(summary.worst) else "diverged"
    unit = " %" if quantity.scale == 100 else f" {quantity.words}"
    final = f"{quantity.number(summary.median)}{unit} [{worst}, {quantity.number(summary.best)}], n = {summary.n}"
    paces = [pace.seconds for run in cell.runs if (pace := read_pace(run)) is not None]
    time = f"{statistics.median(paces):.3g} s" if paces else NOTHING
    places = zip(results.axes, cell.place, strict=True)
    name = ", ".join([results.experiment, *(f"{axis_label(axis)} {place_label(axis, at)}" for axis, at in places)])
    return f"{name}, {cell.attention.label}", _command(cell), final, _early(results, cell), time, devices(cell.runs)


def _early(results: Results, cell: Cell) -> str:
    quantity = results.quantity
    epoch = max(1, round(EARLY * cell.runs[0].last_epoch))
    values = []
    for run in cell.runs:
        errors = read_errors(run, run.selected_on)
        if run.diverged:
            values.append(-math.inf)
        elif epoch in errors:
            values.append(1.0 - errors[epoch] if quantity.scale == 100 else errors[epoch])
    if not values:
        return NOTHING
    unit = " %" if quantity.scale == 100 else f" {quantity.words}"
    return f"{SPLITS[cell.runs[0].selected_on]} {quantity.number(statistics.median(values))}{unit} at epoch {epoch}"


def _command(cell: Cell) -> str:
    """The sweep over the cell's seeds, from the command of its first run."""
    words = shlex.split(str(cell.runs[0].card.get("command", "")))
    rest = [word for word in words[3:] if not word.startswith("seed=")]
    seeds = [run.seed for run in cell.runs]
    whole = f"range({len(seeds)})" if seeds == list(range(len(seeds))) else ",".join(map(str, seeds))
    return shlex.join([*words[:3], "-m", *rest, f"seed={whole}"]) if rest else NOTHING
