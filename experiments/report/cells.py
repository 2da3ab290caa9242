"""Sorts an experiment's runs into cells, and holds each cell against its baseline."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from .collect import ACCURACY, Problem, Protocol, Quantity, Run, Setting, path_words
from .statistics import Comparison, Observation, Summary, Verdict, compare, judge, summarise

# What is tuned for each attention on its own (on validation, with the same budget) may differ between the two sides of
# a comparison without making them different questions.
TUNED = "optimizer."
# The hash of the run whose weights a run began with: another for each seed.
ORIGIN = "init_from.run"
FAR_BELOW = 0.10
# Spellings that capitalising does not give.
NAMES = {"softmax": "softmax", "pct": "PCT's own"}


#: What a row or a part of a picture belongs to: "n-iters" and "seed", each to the value it has.
Filter = Mapping[str, str]


class Measure(Enum):
    """Which of a run's test metrics."""

    CHOSEN = "chosen"
    LAST = "last"
    INITIAL = "initial"

    def of(self, run: Run) -> float:
        """This measure of a run, as recorded; NaN for the initial one of a run that began with random weights."""
        if self is Measure.INITIAL:
            return math.nan if run.initial is None else run.initial
        return run.chosen if self is Measure.CHOSEN else run.last


@dataclass(frozen=True)
class Attention:
    """A normalizer with its options, as far as they tell runs apart.

    Attributes:
        name: name in the registry.
        n_iters: number of half-steps, None for a normalizer without.
        options: other options that differ between runs of this normalizer.
    """

    name: str
    n_iters: int | None = None
    options: tuple[tuple[str, Setting], ...] = ()

    @property
    def label(self) -> str:
        """Words for tables and figures."""
        words = [NAMES.get(self.name, self.name.capitalize())]
        if self.n_iters is not None:
            words.append(f"{self.n_iters} half-step{'' if self.n_iters == 1 else 's'}")
        words += [f"{name}={value}" for name, value in self.options]
        return ", ".join(words)

    @property
    def steps(self) -> str:
        """What the filter by half-steps calls it."""
        return NAMES.get(self.name, self.name) if self.n_iters is None else str(self.n_iters)

    def is_softmax(self) -> bool:
        """Whether this is softmax, by name or as one half-step of Sinkhorn, which is the same map."""
        return self.name == "softmax" or (self.name == "sinkhorn" and self.n_iters == 1)

    def is_baseline(self) -> bool:
        """Whether others are held against this: softmax, or the Point Cloud Transformer's own normalisation."""
        return self.name == "pct" or self.is_softmax()


@dataclass(frozen=True)
class Cell:
    """Runs that differ in their seed alone (and in a seed's consequences).

    Attributes:
        place: one value per swept axis.
        attention: the normalizer.
        runs: sorted by seed, each seed once.
    """

    place: tuple[Setting, ...]
    attention: Attention
    runs: tuple[Run, ...]

    def summary(self, measure: Measure) -> Summary:
        """The spread of a measure over the runs."""
        return summarise([measure.of(run) for run in self.runs])

    def observations(self, measure: Measure) -> list[Observation]:
        """The runs' numbers with what they may be paired by."""
        return [Observation(run.seed, run.split, measure.of(run)) for run in self.runs]

    def setting(self, key: str) -> str:
        """A setting of the cell's runs in words, for example its learning rate."""
        return " / ".join(sorted({place_label(key, run.settings.get(key)) for run in self.runs}))

    def stuck(self, measure: Measure) -> list[Run]:
        """Runs that diverged, or ended more than `FAR_BELOW` of the scale under the cell's median."""
        median = self.summary(measure).median
        return [run for run in self.runs if not measure.of(run) >= median - FAR_BELOW * run.quantity.top]


@dataclass(frozen=True)
class Shown:
    """A cell's numbers as tables and figures show them.

    They are the cell's own, except under the published code's protocol, which leaves runs out and overwrites a point.

    Attributes:
        values: one per run that is shown.
        seeds: the seed of each of them.
        left_out: number of runs that the published protocol discards.
        taken_from: the attention whose numbers stand in for the cell's own, or None.
    """

    values: tuple[float, ...]
    seeds: tuple[int, ...]
    left_out: int = 0
    taken_from: Attention | None = None

    @property
    def summary(self) -> Summary | None:
        """The spread of the values, None where every run was left out."""
        return summarise(self.values) if self.values else None


@dataclass(frozen=True)
class Contest:
    """A cell held against its baseline."""

    cell: Cell
    baseline: Cell
    measure: Measure
    comparison: Comparison
    verdict: Verdict


@dataclass(frozen=True)
class Results:
    """All that is known of one experiment.

    Attributes:
        experiment: its name.
        axes: the configuration keys that were swept, besides attention and seed.
        cells: sorted by place, then attention.
        contests: every cell that has a baseline, for each measure.
        alone: cells without a baseline at their place.
        problems: runs that do not count, with the reason.
        protocol: the published treatment of the numbers, None for a sound one.
        quantity: what was measured.
        copies: by the folder of a run that counts, those of the same run made again with equal results.
    """

    experiment: str
    axes: tuple[str, ...]
    cells: tuple[Cell, ...]
    contests: tuple[Contest, ...]
    alone: tuple[Cell, ...]
    problems: tuple[Problem, ...] = ()
    protocol: Protocol | None = None
    quantity: Quantity = ACCURACY
    copies: Mapping[Path, Sequence[Path]] = field(default_factory=dict)

    @property
    def runs(self) -> list[Run]:
        """All runs that count."""
        return [run for cell in self.cells for run in cell.runs]

    @property
    def measures(self) -> list[Measure]:
        """Those that all runs have."""
        return measures(self.runs)

    def shown(self, cell: Cell, measure: Measure) -> Shown:
        """A cell's numbers as they are shown: its own, or what the published protocol makes of them."""
        if self.protocol is None:
            return Shown(tuple(measure.of(run) for run in cell.runs), tuple(run.seed for run in cell.runs))
        source = self._stand_in(cell) or cell
        bar = self.protocol.leave_out_below
        # The published script judges a run by its best epoch. Where that diverged, it is not above the bar either.
        kept = [run for run in source.runs if bar is None or run.chosen > bar]
        return Shown(
            tuple(measure.of(run) for run in kept),
            tuple(run.seed for run in kept),
            len(source.runs) - len(kept),
            source.attention if source is not cell else None,
        )

    def words(self, measure: Measure) -> str:
        """When in a run a measure was taken."""
        if measure is not Measure.CHOSEN:
            return "at the last epoch" if measure is Measure.LAST else "with the weights that training began with"
        names = {"val": "on validation", "test": "on the test set"}
        splits = sorted({run.selected_on for run in self.runs}, reverse=True)
        return f"at the epoch chosen {' or '.join(names.get(split, f'on {split}') for split in splits)}"

    def _stand_in(self, cell: Cell) -> Cell | None:
        """The cell whose numbers the published script puts in this one's place: for softmax at the last point."""
        if self.protocol is None or not self.protocol.overwrite_last_point or not self.axes:
            return None
        last = max((other.place[0] for other in self.cells), key=_value_order)
        if not cell.attention.is_softmax() or cell.place[0] != last:
            return None
        return next((o for o in self.cells if o.place == cell.place and not o.attention.is_softmax()), None)

    @property
    def attentions(self) -> list[Attention]:
        """All normalizers, the baseline first."""
        return sorted({cell.attention for cell in self.cells}, key=_attention_order)


def measures(runs: Sequence[Run]) -> list[Measure]:
    """The measures that all of some runs have."""
    whole = all(run.initial is not None for run in runs)
    return [measure for measure in Measure if whole or measure is not Measure.INITIAL]


def filter_of(attention: Attention, seed: int | None = None) -> Filter:
    """What hides a cell's entry, or a run's where it is one run's."""
    steps = attention.name if attention.n_iters is None else str(attention.n_iters)
    return {"n-iters": steps} | ({} if seed is None else {"seed": str(seed)})


def axis_label(axis: str) -> str:
    """Words for a configuration key: `model.patch_size` is "patch size", and `data._target_`, a class, is "data"."""
    return axis.removesuffix("._target_").rsplit(".", 1)[-1].replace("_", " ")


def place_label(axis: str, value: Setting) -> str:
    """A setting's value in words; of a class its own name without its module's."""
    if value is None:
        return "not set"
    return str(value).rsplit(".", 1)[-1] if axis.endswith("._target_") else str(value)


def analyse_all(runs: Sequence[Run], problems: Sequence[Problem] = ()) -> list[Results]:
    """`analyse` for each experiment among the runs, by name, with the problems that name it."""
    return [
        analyse(name, [run for run in runs if run.experiment == name], [p for p in problems if p.experiment == name])
        for name in sorted({run.experiment for run in runs})
    ]


def analyse(experiment: str, runs: Sequence[Run], problems: Iterable[Problem] = ()) -> Results:
    """Makes cells and comparisons of the finished runs of one experiment.

    Two runs of one cell with the same seed are one run twice: the one that finished first counts, whatever its result,
    and the other is listed as a problem. So are runs with another metric than the first: there is no comparing them.
    """
    quantity = runs[0].quantity
    listed = list(problems)
    listed += [
        Problem(run.folder, experiment, "other metric", f"it has {run.quantity.words}, the others {quantity.words}")
        for run in runs
        if run.quantity != quantity
    ]
    runs = [run for run in runs if run.quantity == quantity]
    axes = swept_axes(runs)
    grouped: dict[tuple[tuple[Setting, ...], Attention], dict[int, Run]] = {}
    copies: dict[Path, list[Path]] = {}
    varying = _varying_options(runs)
    for run in sorted(runs, key=lambda run: (run.finished, str(run.folder))):
        attention = _attention(run, varying)
        by_seed = grouped.setdefault((tuple(run.settings.get(axis) for axis in axes), attention), {})
        first = by_seed.setdefault(run.seed, run)
        if first is not run:
            equal = (run.chosen, run.last) == (first.chosen, first.last)
            if equal:
                copies.setdefault(first.folder, []).append(run.folder)
            listed.append(
                Problem(
                    run.folder,
                    experiment,
                    "duplicate",
                    f"same configuration and seed as {path_words(first.folder)}, which finished first and is the one "
                    f"that counts; the results are {'equal' if equal else 'different'}",
                )
            )
    cells = [
        Cell(place, attention, tuple(by_seed[seed] for seed in sorted(by_seed)))
        for (place, attention), by_seed in grouped.items()
    ]
    cells.sort(key=lambda cell: ([_value_order(value) for value in cell.place], _attention_order(cell.attention)))
    contests: list[Contest] = []
    alone: list[Cell] = []
    for measure in measures(runs):
        pairs = []
        for cell in cells:
            baseline = _baseline(cell, cells)
            if baseline is None and measure is Measure.CHOSEN:
                alone.append(cell)
            elif baseline is not None and baseline is not cell:
                pairs.append((cell, baseline))
        comparisons = [compare(cell.observations(measure), base.observations(measure)) for cell, base in pairs]
        contests += [
            Contest(cell, baseline, measure, comparison, verdict)
            for (cell, baseline), comparison, verdict in zip(pairs, comparisons, judge(comparisons), strict=True)
        ]
    protocols = {run.protocol for run in runs} - {None}
    if len(protocols) > 1:
        raise ValueError(
            f"{experiment}: the runs ask for different treatments of the numbers (report.* in config.yaml)"
        )
    protocol = protocols.pop() if protocols else None
    found = tuple(cells), tuple(contests), tuple(alone), tuple(listed)
    return Results(experiment, tuple(axes), *found, protocol, quantity, copies)


def swept_axes(runs: Sequence[Run]) -> list[str]:
    """The configuration keys by which an experiment's runs must be told apart, besides attention and seed.

    A key that follows from axes found before it (`num_patches` from `patch_size`) or repeats the seed is none, nor is
    the run whose weights a run began with, where each seed has one. Settings of the optimizer may depend on the
    attention too, and are an axis only where one attention was run with several.
    """
    keys = sorted({key for run in runs for key in run.settings}, key=_axis_order)
    seeds = {run.seed for run in runs}
    axes: list[str] = []
    for key in keys:
        if key.startswith("attention.") or all(run.settings.get(key) == run.seed for run in runs):
            continue
        if key == ORIGIN and len({(run.seed, run.settings.get(key)) for run in runs}) == len(seeds):
            continue
        seen: dict[tuple[object, ...], Setting] = {}
        for run in runs:
            known: list[object] = [run.settings.get(axis) for axis in axes]
            if key.startswith(TUNED):
                known += sorted(item for item in run.settings.items() if item[0].startswith("attention."))
            if seen.setdefault(tuple(known), run.settings.get(key)) != run.settings.get(key):
                axes.append(key)
                break
    return axes


def _axis_order(key: str) -> tuple[int, str]:
    groups = ["model.", "data.", "trainer.", TUNED]
    rank = next((index for index, group in enumerate(groups) if key.startswith(group)), 2)
    return rank, key


def _value_order(value: Setting) -> tuple[int, float, str]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return 0, float(value), ""
    return 1, 0.0, str(value)


def _attention_order(attention: Attention) -> tuple[int, str, int, str]:
    name = attention.name
    rank = ("pct", "softmax").index(name) if name in ("pct", "softmax") else 3 - attention.is_softmax()
    return rank, name, attention.n_iters or 0, str(attention.options)


def _varying_options(runs: Sequence[Run]) -> set[tuple[str, str]]:
    """(normalizer, option) for the options that differ between runs of one normalizer, besides n_iters."""
    seen: dict[tuple[str, str], set[Setting]] = {}
    names = {run.attention for run in runs}
    for name in names:
        ours = [run for run in runs if run.attention == name]
        for key in {key for run in ours for key in run.settings if key.startswith("attention.")}:
            seen[name, key] = {run.settings.get(key) for run in ours}
    named = ("attention.name", "attention.n_iters")
    return {place for place, values in seen.items() if len(values) > 1 and place[1] not in named}


def _attention(run: Run, varying: set[tuple[str, str]]) -> Attention:
    n_iters = run.settings.get("attention.n_iters")
    options = tuple(
        (key.removeprefix("attention."), run.settings.get(key))
        for name, key in sorted(varying)
        if name == run.attention
    )
    if not isinstance(n_iters, int) or run.attention == "softmax":
        n_iters = None
    return Attention(run.attention, n_iters, options)


def _baseline(cell: Cell, cells: Sequence[Cell]) -> Cell | None:
    """At the same place the cell of the model's own normalisation, or else of softmax, or else of one half-step."""
    candidates = [other for other in cells if other.place == cell.place and other.attention.is_baseline()]
    return min(candidates, key=lambda other: _attention_order(other.attention)) if candidates else None
