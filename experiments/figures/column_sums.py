"""Column sums of softmax attention over training (Sander et al. 2022, figure 2), on three small tasks."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from ..config import compose, resolve
from ..errors import RunError
from ..report.statistics import CONFIDENCE, PAIRS_FOR_A_WINNER, Comparison, Observation, compare
from ..runners.column_rows import Row
from ..runners.columns import FILE, read_rows
from ..runners.run_dir import RunDir, override, train_command
from ..train import execute
from .base import COLOURS, Drawn, styled

TITLE = "Column sums of the attention over training, on images, points or text (figure 2)"
HEADER = ("task", "seed", "epoch", "layer", "n_tokens", "deviation", "row_error", "column_error", "column_sums")
GRID = np.linspace(0.0, 1.0, 65)
MOST_EPOCHS, MOST_LAYERS = 6, 3
Item = TypeVar("Item")


@dataclass(frozen=True)
class Task:
    """A small experiment whose attention is recorded."""

    title: str
    overrides: tuple[str, ...]


TASKS = {
    "image": Task("digits, one-layer vision transformer", ("experiment=mnist_patches", "attention=softmax")),
    "points": Task("shapes, Set Transformer", ("experiment=shapes_set", "attention=softmax")),
    "text": Task("movie sentences, text encoder", ("experiment=movie_sentences_sentiment", "attention=softmax")),
}

#: Of each seed, the lines of its run.
Recorded = dict[int, list[Row]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The figure's options."""
    parser.add_argument("--task", choices=TASKS, default="image", help="what is trained (default: image)")
    parser.add_argument("--seeds", type=int, default=5, help="runs, of seeds 0, 1, ... (default: 5)")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/column_sums"), help="folder of the runs (default: runs/column_sums)"
    )
    parser.add_argument("--data", default="data", help="folder of all data (default: data)")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further settings of the runs")


def draw(options: argparse.Namespace) -> Drawn:
    """Trains what is missing, and draws sorted column sums by epoch and their mean distance from 1 over training.

    Raises:
        RunError: for runs that cannot be trained, or were trained without recording.
    """
    if options.seeds < 1:
        raise RunError(f"--seeds must be at least 1; got {options.seeds}")
    task = TASKS[options.task]
    runs = {seed: _run(task, seed, options) for seed in range(options.seeds)}
    rows = [
        (options.task, seed, *(row[name] for name in HEADER[2:-1]), " ".join(map(str, row["column_sums"])))
        for seed, lines in runs.items()
        for row in lines
    ]
    return Drawn(picture(task.title, runs), HEADER, rows, in_words(task.title, runs), f"column_sums_{options.task}")


def _run(task: Task, seed: int, options: argparse.Namespace) -> list[Row]:
    """The lines of one run, which is trained where it is not finished."""
    # A bar of its own would be in the way of the figure's.
    words = [*task.overrides, f"seed={seed}", *options.set, "columns.every=1", "trainer.progress_bar=false"]
    words += [override("paths.runs", str(options.runs)), override("paths.data", options.data)]
    config = compose(words)
    run = RunDir.of(resolve(config))
    if not run.finished:
        execute(config, words)
    rows = read_rows(run.path)
    if not rows:
        raise RunError(
            f"{run.path} was trained without recording, it has no {FILE}: move it away, or give another folder as "
            f"--runs ({train_command(words)})"
        )
    return rows


def deviations(lines: list[Row]) -> dict[int, float]:
    """By epoch, the mean of |column sum - 1| over the layers of a run."""
    epochs = dict.fromkeys(row["epoch"] for row in lines)
    return {epoch: float(np.mean([row["deviation"] for row in lines if row["epoch"] == epoch])) for epoch in epochs}


def in_words(title: str, runs: Recorded) -> str:
    """What the runs say of the claim that column sums approach 1 with training."""
    found = {seed: deviations(lines) for seed, lines in runs.items()}
    shared = sorted(set.intersection(*(set(each) for each in found.values())))
    last = shared[-1]
    sentences = [f"{title}: mean |column sum - 1| over layers, keys and samples, {len(runs)} seeds."]
    starts = [epoch for epoch in (0, next((epoch for epoch in shared if epoch > 0), 0)) if epoch in shared]
    for start in dict.fromkeys(starts):
        if start == last:
            continue
        ends = [[Observation(seed, "", each[epoch]) for seed, each in found.items()] for epoch in (last, start)]
        change = compare(*ends)
        first, final = (float(np.mean([each[epoch] for each in found.values()])) for epoch in (start, last))
        since = "before training" if start == 0 else f"after epoch {start}"
        fell = sum(each[last] < each[start] for each in found.values())
        sentences.append(
            f"{since} {first:.4f}, at the end (epoch {last}) {final:.4f}: change {change.mean:+.4f}"
            f"{_intervals(change, [each[last] - each[start] for each in found.values()])}; it fell in {fell} of "
            f"{len(found)} seeds: {_verdict(change)}."
        )
    return "\n".join(sentences)


def _intervals(change: Comparison, differences: list[float]) -> str:
    if change.interval is None:
        return ""
    words = f", {CONFIDENCE:.0%} t interval {change.interval.low:+.4f} to {change.interval.high:+.4f}"
    drawn = stats.bootstrap(
        (differences,), np.mean, confidence_level=CONFIDENCE, method="percentile", rng=np.random.default_rng(0)
    ).confidence_interval
    return f"{words}, percentile bootstrap over seeds {drawn.low:+.4f} to {drawn.high:+.4f}"


def _verdict(change: Comparison) -> str:
    if change.n < PAIRS_FOR_A_WINNER or change.interval is None:
        way = "down" if change.mean < 0 else "up"
        return f"fewer seeds than {PAIRS_FOR_A_WINNER}, too few to tell; the mean went {way}"
    if change.interval.includes_zero():
        return "whether column sums approach 1 with training cannot be told, the interval includes zero"
    return f"the claim that column sums approach 1 with training {'holds' if change.mean < 0 else 'does not hold'} here"


def picture(title: str, runs: Recorded) -> Figure:
    """A panel for each of some layers, curves for some epochs, medians over seeds; and the distance from 1 by epoch."""
    some = next(iter(runs.values()))
    layers = _spaced(list(dict.fromkeys(row["layer"] for row in some)), MOST_LAYERS)
    with styled():
        figure = Figure(figsize=(3.2 * (len(layers) + 1), 3.4), layout="constrained")
        figure.suptitle(f"{title}, median of {len(runs)} seeds", fontsize=11)
        *panels, right = figure.subplots(1, len(layers) + 1, squeeze=False)[0]
        for layer, axes in zip(layers, panels, strict=True):
            _draw_layer(axes, layer, runs)
        panels[0].set_ylabel("column sum")
        for seed, lines in runs.items():
            by_epoch = deviations(lines)
            right.plot(list(by_epoch), list(by_epoch.values()), color=COLOURS[0], alpha=0.6, label=f"seed {seed}")
        right.set(xlabel="epoch", ylabel="mean |column sum − 1|", ylim=(0, None), title="all layers, each seed")
    return figure


def _draw_layer(axes: Axes, layer: str, runs: Recorded) -> None:
    by_epoch: dict[int, list[np.ndarray]] = {}
    for lines in runs.values():
        for row in lines:
            if row["layer"] == layer and row["column_sums"]:
                values = row["column_sums"]
                curve = np.interp(GRID, np.linspace(0.0, 1.0, len(values)), values)
                by_epoch.setdefault(row["epoch"], []).append(curve)
    # The first epoch changes most, so it is always among them.
    epochs = [0] * (0 in by_epoch) + _spaced(sorted(set(by_epoch) - {0}), MOST_EPOCHS - 1)
    for index, epoch in enumerate(epochs):
        colour = colormaps["viridis"](0.9 * index / max(len(epochs) - 1, 1))
        axes.plot(GRID, np.median(by_epoch[epoch], axis=0), color=colour, label=f"epoch {epoch}")
    axes.axhline(1.0, color="#8a8f98", linewidth=0.8, linestyle=":")
    axes.set(yscale="log", ylim=(0.05, 20.0), xlabel="keys, sorted (share)", title=layer)
    axes.legend(fontsize=7, loc="upper left")


def _spaced(items: list[Item], most: int) -> list[Item]:
    """At most so many items at even distances, the first and the last among them."""
    if len(items) <= most:
        return items
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]
