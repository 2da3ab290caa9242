"""Column sums of the attention maps over training (figure 2 of the paper), from column_sums.jsonl.

Softmax lets a key receive any total weight; a doubly stochastic map gives each the same. Sums are over what such a map
would have, so that 1 is the mark. How uneven they are is the mean distance of a sum from 1, over keys, heads, samples.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure

from .cells import Cell, Results, axis_label, filter_of, place_label
from .collect import NOTHING
from .figures import STYLE, mark, plain
from .statistics import Comparison, Observation, compare
from .tables import Table, as_csv, attention_columns, digits

COLUMN_SUMS = "column_sums.jsonl"
GRID = np.linspace(0.0, 1.0, 65)
MOST_EPOCHS, MOST_LAYERS = 6, 4
Item = TypeVar("Item")


@dataclass(frozen=True)
class Sums:
    """The column sums of one layer at one epoch of one run.

    Attributes:
        epoch: finished epochs, 0 before the first.
        layer: its name.
        values: sorted.
        unevenness: mean distance of a sum from 1, as recorded; where it was not, that of the values.
        column_error: largest deviation of a column's sum from its target, as recorded; NaN where it was not.
    """

    epoch: int
    layer: str
    values: np.ndarray
    unevenness: float
    column_error: float


@dataclass(frozen=True)
class CellSums:
    """All that was recorded of a cell's runs: by seed, each with the last record of every layer and epoch."""

    cell: Cell
    runs: dict[int, dict[tuple[str, int], Sums]]

    def layers(self) -> list[str]:
        """The layers' names, in the order of recording."""
        return list(dict.fromkeys(layer for found in self.runs.values() for layer, _ in found))

    def epochs(self, layer: str) -> list[int]:
        """The epochs at which every run was recorded."""
        each = [{epoch for name, epoch in found if name == layer} for found in self.runs.values()]
        return sorted(set.intersection(*each)) if each else []

    def mean(self, layer: str, epoch: int) -> float:
        """Unevenness, mean over the runs."""
        return float(np.mean([found[layer, epoch].unevenness for found in self.runs.values()]))

    def change(self, layer: str) -> Comparison:
        """Unevenness at the last epoch minus that at the first after training began, paired by seed.

        The published figure begins there too. Maps of random weights, epoch 0, are nearly uniform and so nearly even.
        """
        epochs = [epoch for epoch in self.epochs(layer) if epoch > 0]
        ends = (epochs[-1], epochs[0]) if len(epochs) > 1 else ()
        sides = [
            [Observation(seed, "", found[layer, epoch].unevenness) for seed, found in self.runs.items()]
            for epoch in ends
        ]
        return compare(*sides) if sides else compare([], [])


def read_sums(folder: Path) -> dict[tuple[str, int], Sums]:
    """A run's records by layer and epoch; of a damaged file what comes before the damage."""
    found: dict[tuple[str, int], Sums] = {}
    try:
        for line in (folder / COLUMN_SUMS).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            values = np.sort(np.asarray(row["column_sums"], dtype=np.float64).ravel())
            if values.size and np.isfinite(values).all():
                uneven = float(row.get("deviation", np.abs(values - 1.0).mean()))
                error = float(row.get("column_error", np.nan))
                record = Sums(int(row["epoch"]), str(row["layer"]), values, uneven, error)
                found[record.layer, record.epoch] = record
    except (OSError, UnicodeDecodeError, ValueError, LookupError, TypeError, AttributeError):
        return found
    return found


def cell_sums(results: Results) -> list[CellSums]:
    """The cells of which something was recorded; of a run that was made again, in any of its folders."""
    found = []
    for cell in results.cells:
        runs: dict[int, dict[tuple[str, int], Sums]] = {}
        for run in cell.runs:
            for folder in (run.folder, *results.copies.get(run.folder, ())):
                if run.seed not in runs and (sums := read_sums(folder)):
                    runs[run.seed] = sums
        if runs:
            found.append(CellSums(cell, runs))
    return found


def draw(recorded: Sequence[CellSums], results: Results) -> Figure:
    """Sorted column sums by epoch, mean over runs: a row of panels for each cell, a column for each layer.

    Of many layers and epochs some are drawn, at even distances, the first and the last among them.
    """
    layers = [_spaced(each.layers(), MOST_LAYERS) for each in recorded]
    columns = max(map(len, layers))
    with rc_context(STYLE):
        size = (max(3.4 * columns, 6.4), 3.0 * len(recorded) + 0.6)
        figure = Figure(figsize=size, dpi=160, layout="constrained")
        grid = figure.subplots(len(recorded), columns, squeeze=False, sharex=True, sharey=True)
        for each, names, row in zip(recorded, layers, grid, strict=True):
            for axes in row[len(names) :]:
                axes.set_visible(False)
            for layer, axes in zip(names, row, strict=False):
                epochs = _spaced(each.epochs(layer), MOST_EPOCHS)
                for index, epoch in enumerate(epochs):
                    curves = [_on_grid(found[layer, epoch].values) for found in each.runs.values()]
                    colour = colormaps["viridis"](0.85 * index / max(len(epochs) - 1, 1))
                    (line,) = axes.plot(GRID, np.mean(curves, axis=0), color=colour, label=f"epoch {epoch}")
                    mark(line, filter_of(each.cell.attention), f"{each.cell.attention.label}, {layer}, epoch {epoch}")
                axes.axhline(1.0, color="#8a8f98", linewidth=0.8, linestyle=":")
                axes.set(yscale="log", ylim=(0.05, 20.0))
                axes.set_title(plain(f"{_title(each.cell, results)}\n{layer}"), fontsize=9)
                axes.legend(fontsize=7, frameon=False, loc="upper left")
        for axes in grid[:, 0]:
            axes.set_ylabel("column sum")
        for axes in grid[-1]:
            axes.set_xlabel("keys, sorted")
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        return figure


def sums_table(recorded: Sequence[CellSums], results: Results) -> Table:
    """How uneven the column sums of each layer are at the first and at the last recorded epoch."""
    rows, filters = [], []
    for each in recorded:
        for layer in each.layers():
            epochs = [epoch for epoch in each.epochs(layer) if epoch > 0]
            if not epochs:
                continue
            first, last = (each.mean(layer, at) for at in (epochs[0], epochs[-1]))
            before = f"{each.mean(layer, 0):.3f}" if 0 in each.epochs(layer) else NOTHING
            error = np.mean([found[layer, epochs[-1]].column_error for found in each.runs.values()])
            change = each.change(layer)
            bounds = change.interval
            place = [place_label(axis, value) for axis, value in zip(results.axes, each.cell.place, strict=True)]
            words = f"[{bounds.low:+.3f}, {bounds.high:+.3f}]" if bounds else NOTHING
            mean = f"{change.mean:+.3f}" if np.isfinite(change.mean) else NOTHING
            numbers = [
                before,
                f"{first:.3f}",
                f"{last:.3f}",
                mean,
                words,
                f"{error:.3g}" if np.isfinite(error) else NOTHING,
            ]
            names = [each.cell.attention.label, layer, str(len(each.runs)), f"{epochs[0]}–{epochs[-1]}"]
            rows.append((*place, *names, *numbers))
            filters.append(filter_of(each.cell.attention))
    header = (*map(axis_label, results.axes), "attention", "layer", "runs", "epochs", "before training")
    header = (*header, "first", "last", "change", "95 % t interval", "column error at the last")
    note = "Mean distance of a column's sum from what a doubly stochastic map would have, over that: 0 for such a map."
    return Table("How uneven the column sums are", header, tuple(rows), note, filters=tuple(filters))


def sums_csv(recorded: Sequence[CellSums], results: Results) -> str:
    """One line per run, layer and recorded epoch."""
    header = [*results.axes, "attention", "n_iters", "options", "seed", "layer", "epoch", "unevenness", "column_error"]
    rows = []
    for each in recorded:
        for seed, found in each.runs.items():
            for (layer, epoch), sums in found.items():
                numbers = [digits(sums.unevenness), digits(sums.column_error)]
                rows.append([*each.cell.place, *attention_columns(each.cell), seed, layer, epoch, *numbers])
    return as_csv(header, rows)


def _on_grid(values: np.ndarray) -> np.ndarray:
    return (
        np.interp(GRID, np.linspace(0.0, 1.0, len(values)), values) if len(values) > 1 else np.full(GRID.shape, values)
    )


def _spaced(items: Sequence[Item], most: int) -> list[Item]:
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def _title(cell: Cell, results: Results) -> str:
    places = zip(results.axes, cell.place, strict=True)
    return ", ".join([cell.attention.label, *(f"{axis_label(axis)} {place_label(axis, at)}" for axis, at in places)])
