"""Learning curves: error by epoch on logarithmic axes, median and quartiles of each cell's runs.

A metric that is no accuracy has no error: it is drawn as it is, on plain axes.
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from .cells import Cell, Results, axis_label, filter_of, place_label
from .collect import ACCURACY, Quantity, Run, path_words
from .figures import COLOURS, INK, STYLE, mark, plain

METRICS = "metrics.jsonl"
SPLITS = {"test": "test", "val": "validation"}


@dataclass(frozen=True)
class Curve:
    """The runs of one cell.

    Attributes:
        cell: the cell.
        epochs: (E,), increasing.
        errors: (runs, E), fractions of 1; of a metric that is no accuracy, its values.
        seeds: of the runs, in their order.
    """

    cell: Cell
    epochs: np.ndarray
    errors: np.ndarray
    seeds: tuple[int, ...]

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
        of: the metric.
    """

    split: str
    curves: tuple[Curve, ...]
    missing: tuple[str, ...]
    floor: float
    of: Quantity = ACCURACY

    @property
    def quantity(self) -> str:
        """What is drawn, in words."""
        return f"{SPLITS[self.split]} {'error' if self.is_error else self.of.words}"

    @property
    def is_error(self) -> bool:
        """Whether it is an error, on logarithmic axes."""
        return self.of == ACCURACY

    def caption(self) -> str:
        """What has to be known to read the picture."""
        what = f"{self.quantity[0].upper()}{self.quantity[1:]} by epoch{', both axes logarithmic' * self.is_error}: "
        what += "median of the runs (line), quartiles (band), each run (thin line)."
        if self.split == "val":
            what += " The test split is not evaluated during training."
        if self.is_error and any((curve.errors < self.floor).any() for curve in self.curves):
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
            seeds = []
            for run in cell.runs:
                if run.selected_on != split:
                    continue
                errors = read_errors(run, split)
                if errors:
                    rows.append(errors)
                    seeds.append(run.seed)
                    floors.append(_half_a_sample(run, split, errors))
                else:
                    missing.append(path_words(run.folder))
            # Equal configurations have equal epochs; of a file that was cut, what is left is compared.
            epochs = sorted(set.intersection(*map(set, rows))) if rows else []
            if epochs:
                errors_by_run = np.array([[row[epoch] for epoch in epochs] for row in rows])
                curves.append(Curve(cell, np.array(epochs), errors_by_run, tuple(seeds)))
        if curves:
            found.append(Curves(split, tuple(curves), tuple(missing), min(floors), results.quantity))
    return found


def read_errors(run: Run, split: str) -> dict[int, float]:
    """Error of each evaluated epoch, a fraction of 1; empty where the file is missing or damaged.

    An epoch at which the accuracy is no number counts as an error of 1, and so does each that a run did not reach: it
    had diverged. Of another metric its values, and 0 where it is no number.
    """
    name, is_error = run.quantity.name, run.quantity == ACCURACY
    errors: dict[int, float] = {}
    try:
        rows: Iterable[Any] = run.rows or ()
        if run.rows is None:
            rows = map(json.loads, (run.folder / METRICS).read_text(encoding="utf-8").splitlines())
        for row in rows:
            if row["split"] == split:
                value = row[name]
                value = value if value is not None and math.isfinite(value) else 0.0
                errors[int(row["epoch"])] = 1.0 - value if is_error else value
    except (OSError, UnicodeDecodeError, ValueError, LookupError, TypeError):
        return {}
    if run.diverged:
        errors = dict.fromkeys(range(1, run.last_epoch + 1), 1.0 if is_error else 0.0) | errors
    return errors


def without_rows(runs: Iterable[Run]) -> list[Path]:
    """Folders of finished runs whose `metrics.jsonl` is there and tells nothing: it is empty, cut or damaged."""
    finished = [run for run in runs if not run.diverged and run.rows is None and (run.folder / METRICS).is_file()]
    return [run.folder for run in finished if not read_errors(run, run.selected_on)]


def draw(curves: Curves, results: Results) -> Figure:
    """Draws the curves of a split, one panel per place of the swept axes, one line with its band per attention."""
    with rc_context(STYLE):
        places = list(dict.fromkeys(curve.cell.place for curve in curves.curves))
        columns = min(len(places), 2)
        figure = Figure(figsize=(6.4 * columns, 4.3 * -(-len(places) // columns)), dpi=160, layout="constrained")
        grid = figure.subplots(-(-len(places) // columns), columns, squeeze=False, sharex=True, sharey=True)
        for axes, place in zip(grid.flat, places, strict=False):
            _panel(axes, [curve for curve in curves.curves if curve.cell.place == place], curves, results)
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


def _panel(axes: Axes, curves: Sequence[Curve], group: Curves, results: Results) -> None:
    floor = group.floor if group.is_error else -math.inf
    for curve in curves:
        index = results.attentions.index(curve.cell.attention)
        colour = INK if index == 0 else COLOURS[(index - 1) % len(COLOURS)]
        attention = curve.cell.attention
        low, median, high = np.maximum(curve.quartiles(), floor)
        mark(axes.fill_between(curve.epochs, low, high, color=colour, alpha=0.16, linewidth=0), filter_of(attention))
        # With a single epoch a line has no length.
        marker = "o" if len(curve.epochs) == 1 else None
        (line,) = axes.plot(curve.epochs, median, color=colour, linewidth=1.8, marker=marker)
        line.set_label(plain(attention.label))
        mark(line, filter_of(attention))
        for seed, errors in zip(curve.seeds, np.maximum(curve.errors, floor), strict=True):
            (thin,) = axes.plot(curve.epochs, errors, color=colour, linewidth=0.7, alpha=0.45)
            mark(thin, filter_of(attention, seed), f"{attention.label}, seed {seed}")
    if group.is_error:
        _logarithmic(axes)
    axes.grid(axis="y", color="#8a8f98", alpha=0.3, linewidth=0.6)


def _logarithmic(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_formatter(NullFormatter())


def _half_a_sample(run: Run, split: str, errors: dict[int, float]) -> float:
    data = run.card.get("data")
    sizes = data.get("sizes") if isinstance(data, dict) else None
    size = sizes.get(split) if isinstance(sizes, dict) else None
    if isinstance(size, int) and size > 0:
        return 0.5 / size
    return min((error for error in errors.values() if error > 0), default=1.0) / 2
