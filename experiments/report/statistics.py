"""What may be said about runs: the spread of one cell, and the paired difference of two.

A cell is a set of runs that differ in their seed alone. Two cells are compared by the differences of runs with the same
seed on the same data split, with a t interval. At five pairs a t interval names a false winner in 5 % of cases where a
bootstrap interval does so in 14 %, so the bootstrap only joins from ten pairs on.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from scipy import stats

CONFIDENCE = 0.95
PAIRS_FOR_A_WINNER = 5
PAIRS_FOR_A_BOOTSTRAP = 10


@dataclass(frozen=True)
class Observation:
    """One run's number.

    Attributes:
        seed: the run's seed.
        split: hash of the data split it was trained and tested on; None where the run card does not tell.
        value: the metric; not finite where the run diverged.
    """

    seed: int
    split: str | None
    value: float


@dataclass(frozen=True)
class Summary:
    """The spread of a cell. A run that diverged counts in `n` and ranks below every other.

    `worst`, `mean` and `std` (with n − 1) are NaN where a run diverged, for then there is no such number; `std` also
    for a single run.
    """

    n: int
    diverged: int
    best: float
    median: float
    mean: float
    worst: float
    std: float


@dataclass(frozen=True)
class Interval:
    """A confidence interval at level `CONFIDENCE`."""

    low: float
    high: float

    def includes_zero(self) -> bool:
        """Whether the interval leaves the sign of the difference open (a bound at zero does)."""
        return self.low <= 0.0 <= self.high


@dataclass(frozen=True)
class Comparison:
    """Candidate minus baseline over the seeds both have, on equal splits.

    Attributes:
        seeds: the paired seeds.
        mean: mean difference; NaN without a pair, or where a paired run diverged.
        std: standard deviation of the differences (n − 1); NaN below two pairs.
        interval: t interval of the mean difference; None below two pairs, where `mean` is NaN, and without spread:
            equal differences would give an interval of no width, a certainty that the pairs do not warrant.
        bootstrap: BCa bootstrap interval of the mean difference; None below ten pairs or without spread.
        p_value: two-sided p value of the paired t test; NaN where there is no interval.
        only_candidate: seeds that only the candidate has.
        only_baseline: seeds that only the baseline has.
        other_split: seeds that both have, but on different or unknown data splits: not paired.
        diverged: paired seeds of which a run diverged.
    """

    seeds: tuple[int, ...]
    mean: float
    std: float
    interval: Interval | None
    bootstrap: Interval | None
    p_value: float
    only_candidate: tuple[int, ...]
    only_baseline: tuple[int, ...]
    other_split: tuple[int, ...]
    diverged: tuple[int, ...]

    @property
    def n(self) -> int:
        """Number of pairs."""
        return len(self.seeds)


class Outcome(Enum):
    """What a comparison shows. Only HIGHER and LOWER name a winner."""

    HIGHER = "higher"
    LOWER = "lower"
    NOT_SHOWN = "no difference shown"
    NOT_AFTER_HOLM = "no difference shown after Holm's correction"
    TOO_FEW = "too few seeds"
    DIVERGED = "not defined, a run diverged"
    NO_SPREAD = "no spread between the seeds"


@dataclass(frozen=True)
class Verdict:
    """The outcome of a comparison within its family.

    Attributes:
        outcome: what is shown.
        sentence: the same in words.
        adjusted_p: Holm's adjusted p value; NaN where the comparison is not in the family.
        family: number of comparisons that could have named a winner, over which Holm's correction was made.
    """

    outcome: Outcome
    sentence: str
    adjusted_p: float
    family: int


def summarise(values: Sequence[float]) -> Summary:
    """Best, median, mean, worst and standard deviation of a cell, where higher is better.

    Args:
        values: one number per run, at least one.

    Raises:
        ValueError: without a value.
    """
    if not values:
        raise ValueError("there is nothing to summarise: the cell has no run")
    finite = np.array([value for value in values if math.isfinite(value)], dtype=np.float64)
    diverged = len(values) - finite.size
    ranked = np.sort(np.concatenate([np.full(diverged, -np.inf), finite]))
    middle = ranked[[(len(ranked) - 1) // 2, len(ranked) // 2]]
    return Summary(
        n=len(values),
        diverged=diverged,
        best=float(finite.max()) if finite.size else math.nan,
        median=float(middle.mean()) if np.isfinite(middle).all() else math.nan,
        mean=math.nan if diverged else float(finite.mean()),
        worst=math.nan if diverged else float(finite.min()),
        std=math.nan if diverged or finite.size < 2 else float(finite.std(ddof=1)),
    )


def compare(candidate: Sequence[Observation], baseline: Sequence[Observation]) -> Comparison:
    """Candidate minus baseline, paired by seed on equal splits.

    Args:
        candidate: the runs of one cell, each seed once.
        baseline: the runs of the cell that it is held against, each seed once.

    Raises:
        ValueError: where a seed occurs twice on one side: counting a run twice would narrow the interval.
    """
    ours, theirs = _by_seed(candidate, "candidate"), _by_seed(baseline, "baseline")
    common = sorted(ours.keys() & theirs.keys())
    paired = [seed for seed in common if ours[seed].split is not None and ours[seed].split == theirs[seed].split]
    differences = np.array([ours[seed].value - theirs[seed].value for seed in paired], dtype=np.float64)
    diverged = tuple(seed for seed, value in zip(paired, differences, strict=True) if not math.isfinite(value))
    mean = float(differences.mean()) if paired and not diverged else math.nan
    std = float(differences.std(ddof=1)) if len(paired) > 1 and not diverged else math.nan
    interval, p_value = None, math.nan
    if _has_spread(mean, std):
        test = stats.ttest_1samp(differences, 0.0)
        bounds = test.confidence_interval(CONFIDENCE)
        interval, p_value = Interval(float(bounds.low), float(bounds.high)), float(test.pvalue)
    return Comparison(
        seeds=tuple(paired),
        mean=mean,
        std=std,
        interval=interval,
        bootstrap=_bootstrap(differences) if len(paired) >= PAIRS_FOR_A_BOOTSTRAP and _has_spread(mean, std) else None,
        p_value=p_value,
        only_candidate=tuple(sorted(ours.keys() - theirs.keys())),
        only_baseline=tuple(sorted(theirs.keys() - ours.keys())),
        other_split=tuple(seed for seed in common if seed not in paired),
        diverged=diverged,
    )


def judge(comparisons: Sequence[Comparison]) -> list[Verdict]:
    """Says what each comparison of a family shows, and names a winner only where all of it allows.

    A winner needs five pairs, a t interval without zero, and a p value that Holm's correction (Holm 1979) over the
    family leaves below 1 − `CONFIDENCE`, so that a whole report names a false winner in at most 5 % of cases.

    Args:
        comparisons: the comparisons that are read together.
    """
    outcomes = [_outcome_alone(comparison) for comparison in comparisons]
    members = [
        index
        for index, (comparison, outcome) in enumerate(zip(comparisons, outcomes, strict=True))
        if outcome in (Outcome.HIGHER, Outcome.LOWER, Outcome.NOT_SHOWN) and math.isfinite(comparison.p_value)
    ]
    adjusted = dict(zip(members, holm([comparisons[index].p_value for index in members]), strict=True))
    verdicts = []
    for index, (comparison, outcome) in enumerate(zip(comparisons, outcomes, strict=True)):
        p_value = adjusted.get(index, math.nan)
        if outcome in (Outcome.HIGHER, Outcome.LOWER) and p_value > 1.0 - CONFIDENCE:
            outcome = Outcome.NOT_AFTER_HOLM
        sentence = _sentence(outcome, comparison, len(members))
        verdicts.append(Verdict(outcome, sentence, p_value, len(members)))
    return verdicts


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p values (Holm 1979), in the order given."""
    adjusted = [math.nan] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def _by_seed(observations: Sequence[Observation], side: str) -> Mapping[int, Observation]:
    found: dict[int, Observation] = {}
    for observation in observations:
        if observation.seed in found:
            raise ValueError(f"seed {observation.seed} occurs twice in the {side}: each run may count once")
        found[observation.seed] = observation
    return found


def _has_spread(mean: float, std: float) -> bool:
    """False where the differences are equal up to rounding, or where there are too few to tell."""
    return math.isfinite(std) and std > 1e-12 * max(1.0, abs(mean))


def _bootstrap(differences: np.ndarray) -> Interval | None:
    result = stats.bootstrap(
        (differences,), np.mean, confidence_level=CONFIDENCE, method="BCa", rng=np.random.default_rng(0)
    )
    low, high = float(result.confidence_interval.low), float(result.confidence_interval.high)
    return Interval(low, high) if math.isfinite(low) and math.isfinite(high) else None


def _outcome_alone(comparison: Comparison) -> Outcome:
    if comparison.diverged:
        return Outcome.DIVERGED
    if comparison.n < PAIRS_FOR_A_WINNER:
        return Outcome.TOO_FEW
    if comparison.interval is None:
        return Outcome.NO_SPREAD
    if comparison.interval.includes_zero():
        return Outcome.NOT_SHOWN
    return Outcome.HIGHER if comparison.mean > 0 else Outcome.LOWER


def _sentence(outcome: Outcome, comparison: Comparison, family: int) -> str:
    match outcome:
        case Outcome.DIVERGED:
            return f"no winner named: seed {', '.join(map(str, comparison.diverged))} diverged"
        case Outcome.TOO_FEW:
            return f"no winner named: too few seeds ({comparison.n} paired, {PAIRS_FOR_A_WINNER} needed)"
        case Outcome.NOT_SHOWN:
            return "no difference shown"
        case Outcome.NO_SPREAD:
            return f"no winner named: all {comparison.n} differences are equal, no spread to judge by"
        case Outcome.NOT_AFTER_HOLM:
            return f"no difference shown after Holm's correction over {family}"
        case Outcome.HIGHER | Outcome.LOWER:
            return outcome.value
