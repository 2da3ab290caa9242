"""What an epoch of training costs: seconds and samples per second, from timing.jsonl."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .cells import Cell, Results, axis_label, filter_of, place_label
from .collect import NOTHING, Run
from .statistics import Comparison, Interval, Observation, compare
from .tables import Table, as_csv, attention_columns, digits

TIMING = "timing.jsonl"


@dataclass(frozen=True)
class Pace:
    """A run's median over its epochs: seconds of an epoch, and samples per second (NaN where not recorded)."""

    seconds: float
    samples_per_second: float


def read_pace(run: Run) -> Pace | None:
    """A run's pace; None where its timing is missing or damaged. Of an epoch that was repeated the last time counts."""
    if "pace" in run.card:  # of an exported run
        pace: Pace | None = run.card["pace"]
        return pace
    epochs: dict[int, tuple[float, float]] = {}
    try:
        for line in (run.folder / TIMING).read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            seconds = float(row["seconds"])
            if math.isfinite(seconds) and seconds > 0:
                epochs[int(row["epoch"])] = seconds, float(row.get("samples_per_second", math.nan))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    if not epochs:
        return None
    return Pace(*(statistics.median(values) for values in zip(*epochs.values(), strict=True)))


def ratio(cell: Cell, baseline: Cell) -> Comparison:
    """Logarithm of the time of an epoch over the baseline's, paired by seed."""
    sides = []
    for side in (cell, baseline):
        paces = [(run, read_pace(run)) for run in side.runs]
        # The split has no part in the time.
        sides.append([Observation(run.seed, "", math.log(pace.seconds)) for run, pace in paces if pace is not None])
    return compare(*sides)


def ratio_words(comparison: Comparison) -> tuple[str, str]:
    """A ratio of times and its 95 % interval in words."""
    mean = f"{math.exp(comparison.mean):.2f}" if math.isfinite(comparison.mean) else NOTHING
    return mean, ratio_interval(comparison.interval)


def ratio_interval(bounds: Interval | None) -> str:
    """An interval of logarithms as one of ratios."""
    return f"[{math.exp(bounds.low):.2f}, {math.exp(bounds.high):.2f}]" if bounds is not None else NOTHING


def cost_table(results: Results) -> Table:
    """Median seconds of an epoch per cell, and the ratio to the baseline's; without rows where nothing was timed."""
    baselines = {(contest.cell.place, contest.cell.attention): contest.baseline for contest in results.contests}
    rows, filters = [], []
    for cell in results.cells:
        paces = [pace for run in cell.runs if (pace := read_pace(run)) is not None]
        if not paces:
            continue
        seconds = [pace.seconds for pace in paces]
        speed = statistics.median(pace.samples_per_second for pace in paces)
        baseline = baselines.get((cell.place, cell.attention))
        words = ratio_words(ratio(cell, baseline)) if baseline is not None else (NOTHING, NOTHING)
        place = [place_label(axis, value) for axis, value in zip(results.axes, cell.place, strict=True)]
        numbers = [f"{statistics.median(seconds):.3g}", f"{min(seconds):.3g}–{max(seconds):.3g}"]
        numbers += [f"{speed:.4g}" if math.isfinite(speed) else NOTHING, *words, devices(cell.runs)]
        rows.append((*place, cell.attention.label, str(len(paces)), *numbers))
        filters.append(filter_of(cell.attention))
    header = (*map(axis_label, results.axes), "attention", "runs", "seconds", "least–most", "samples per second")
    header = (*header, "ratio to the baseline", "95 % t interval", "device")
    note = (
        "Medians over the epochs of each run, then over runs. Ratios are geometric means, paired by seed; where runs "
        "shared a machine with others, the others are in them."
    )
    return Table("Cost of an epoch of training", header, tuple(rows), note, filters=tuple(filters))


def cost_csv(results: Results) -> str:
    """One line per run: its median seconds of an epoch and samples per second."""
    header = [*results.axes, "attention", "n_iters", "options", "seed", "seconds_per_epoch", "samples_per_second"]
    rows = []
    for cell in results.cells:
        for run in cell.runs:
            pace = read_pace(run)
            if pace is not None:
                numbers = [digits(pace.seconds), digits(pace.samples_per_second), devices([run])]
                rows.append([*cell.place, *attention_columns(cell), run.seed, *numbers])
    return as_csv([*header, "device"], rows)


def devices(runs: Sequence[Run]) -> str:
    """The devices that runs were trained on, as their cards name them."""
    found = set()
    for run in runs:
        attempts = run.card.get("attempts")
        for attempt in attempts if isinstance(attempts, list) else []:
            names = attempt.get("devices") if isinstance(attempt, dict) else None
            if isinstance(names, list):
                found.add(" + ".join(map(str, names)))
    return ", ".join(sorted(found)) or NOTHING
