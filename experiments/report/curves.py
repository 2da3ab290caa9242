"""Learning curves: error by epoch on logarithmic axes, median and quartiles of each cell's runs."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from .cells import Cell, Results, axis_label, place_label
from .collect import METRIC, Run, path_words
from .figures import COLOURS, INK, STYLE, plain

METRICS = "metrics.jsonl"
SPLITS = {"test": "test error", "val": "validation error"}


@dataclass(frozen=True)
class Curve:
    """The runs of one cell.

    Attributes:
        cell: the cell.
        epochs: (E,), increasing.
        errors: (runs, E), fractions of 1.
    """

    cell: Cell
    epochs: np.ndarray
    errors: np.ndarray

    def quartiles(self) -> np.ndarray:
        """First quartile, median and third quartile over the runs, (3, E)."""
        return np.quantile(self.errors, (0.25, 0.5, 0.75), axis=0)


@dataclass(frozen=True)
class Curves:
    """The curves of one split: what the protocol evaluates after every epoch.

    Attributes:
        split: "test" where the protocol chooses the epoch on the test split, as the published code does, else "val".
        curves: one per cell.
        missing: folders of runs whose `metrics.jsonl` has no such curve; they are in no curve.
        floor: half of the error that a single sample makes. An error of zero, which has no place on a logarithmic axis,
            is drawn there.
    """

    split: str
    curves: tuple[Curve, ...]
    missing: tuple[str, ...]
    floor: float

    @property
    def quantity(self) -> str:
        """What is drawn, in words."""
        return SPLITS[self.split]

    def caption(self) -> str:
        """What has to be known to read the picture."""
        what = f"{self.quantity.capitalize()} by epoch, both axes logarithmic: "
        what += "median of the runs (line), quartiles (band)."
        if self.split == "val":
            what += " The test split is not evaluated during training."
        if any((curve.errors < self.floor).any() for curve in self.curves):
            what += " No error at all is drawn at half the error of a single sample."
        if self.missing:
            what += f" Without a curve: {', '.join(self.missing)}."
        return what


def read_curves(results: Results) -> list[Curves]:
    """The curves of an experiment, by split; empty where no run has any."""
    found = []
    for split in SPLITS:
        curves, missing, floors = [], [], []
        for cell in results.cells:
            rows: list[dict[int, float]] = []
            for run in cell.runs:
                if run.selected_on != split:
                    continue
                errors = read_errors(run, split)
                if errors:
                    rows.append(errors)
                    floors.append(_half_a_sample(run, split, errors))
                else:
                    missing.append(path_words(run.folder))
            # Equal configurations have equal epochs; of a file that was cut, what is left is compared.
            epochs = sorted(set.intersection(*map(set, rows))) if rows else []
            if epochs:
                errors_by_run = np.array([[row[epoch] for epoch in epochs] for row in rows])
                curves.append(Curve(cell, np.array(epochs), errors_by_run))
        if curves:
            found.append(Curves(split, tuple(curves), tuple(missing), min(floors)))
    return found


def read_errors(run: Run, split: str) -> dict[int, float]:
    """Error of each evaluated epoch, a fraction of 1; empty where the file is missing or damaged.

    An epoch at which the accuracy is no number counts as an error of 1: the run had diverged.
    """
    errors: dict[int, float] = {}
    try:
        for line in (run.folder / METRICS).read_text(encoding="utf-8").splitlines():
            row: Any = json.loads(line)
            if row["split"] == split:
                accuracy = row[METRIC]
                errors[int(row["epoch"])] = 1.0 - accuracy if accuracy is not None and math.isfinite(accuracy) else 1.0
    except (OSError, UnicodeDecodeError, ValueError, LookupError, TypeError):
        return {}
    return errors


def draw(curves: Curves, results: Results) -> Figure:
    """Draws the curves of a split, one panel per place of the swept axes, one line with its band per attention."""
    with rc_context(STYLE):
        places = list(dict.fromkeys(curve.cell.place for curve in curves.curves))
        columns = min(len(places), 2)
        figure = Figure(figsize=(6.4 * columns, 4.3 * -(-len(places) // columns)), dpi=160, layout="constrained")
        grid = figure.subplots(-(-len(places) // columns), columns, squeeze=False, sharex=True, sharey=True)
        for axes, place in zip(grid.flat, places, strict=False):
            _panel(axes, [curve for curve in curves.curves if curve.cell.place == place], curves.floor, results)
            named = zip(results.axes, place, strict=True)
            words = ", ".join(f"{axis_label(axis)} {place_label(axis, value)}" for axis, value in named)
            axes.set_title(plain(words), fontsize=11)
        for axes in list(grid.flat)[len(places) :]:
            axes.set_visible(False)
        for axes in grid[:, 0]:
            axes.set_ylabel(curves.quantity)
        for axes in grid[-1]:
            axes.set_xlabel("epoch")
        entries = {
            label: line for axes in grid.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=2, frameon=False)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        return figure


def as_rows(curves: Sequence[Curves]) -> list[tuple[Curves, Curve, int, int, tuple[float, float, float]]]:
    """One entry per cell and epoch: curves, curve, epoch, number of runs, quartiles."""
    return [
        (group, curve, int(epoch), len(curve.errors), (float(low), float(median), float(high)))
        for group in curves
        for curve in group.curves
        for epoch, low, median, high in zip(curve.epochs, *curve.quartiles(), strict=True)
    ]


def _panel(axes: Axes, curves: Sequence[Curve], floor: float, results: Results) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    for curve in curves:
        index = results.attentions.index(curve.cell.attention)
        colour = INK if index == 0 else COLOURS[(index - 1) % len(COLOURS)]
        low, median, high = np.maximum(curve.quartiles(), floor)
        axes.fill_between(curve.epochs, low, high, color=colour, alpha=0.16, linewidth=0)
        # With a single epoch a line has no length.
        marker = "o" if len(curve.epochs) == 1 else None
        label = plain(curve.cell.attention.label)
        axes.plot(curve.epochs, median, color=colour, linewidth=1.8, marker=marker, label=label)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color="#8a8f98", alpha=0.3, linewidth=0.6)


def _half_a_sample(run: Run, split: str, errors: dict[int, float]) -> float:
    data = run.card.get("data")
    sizes = data.get("sizes") if isinstance(data, dict) else None
    size = sizes.get(split) if isinstance(sizes, dict) else None
    if isinstance(size, int) and size > 0:
        return 0.5 / size
    return min((error for error in errors.values() if error > 0), default=1.0) / 2
