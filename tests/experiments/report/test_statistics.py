"""The report's statistics against numbers worked out by hand, against scipy, and under a null hypothesis."""

import math

import numpy as np
import pytest
from scipy import stats

from experiments.report.statistics import (
    Comparison,
    Interval,
    Observation,
    Outcome,
    compare,
    holm,
    judge,
    summarise,
)

NAN = math.nan


def observations(values, seeds=None, split="split-a"):
    seeds = range(len(values)) if seeds is None else seeds
    return [Observation(seed, split, float(value)) for seed, value in zip(seeds, values, strict=True)]


def outcome(candidate, baseline):
    return judge([compare(candidate, baseline)])[0].outcome


def test_summary_by_hand():
    summary = summarise([0.9, 0.7, 0.8, 0.6])
    assert (summary.n, summary.diverged) == (4, 0)
    assert (summary.best, summary.worst) == (0.9, 0.6)
    assert summary.median == pytest.approx(0.75, abs=1e-15)
    assert summary.mean == pytest.approx(0.75, abs=1e-15)
    # squared deviations .0225 .0025 .0025 .0225, divided by n - 1 = 3
    assert summary.std == pytest.approx(math.sqrt(0.05 / 3), abs=1e-15)


def test_summary_of_one_run_has_no_standard_deviation():
    summary = summarise([0.5])
    assert (summary.n, summary.best, summary.median, summary.mean, summary.worst) == (1, 0.5, 0.5, 0.5, 0.5)
    assert math.isnan(summary.std)


def test_a_diverged_run_counts_and_ranks_last():
    summary = summarise([0.9, NAN, 0.8])
    assert (summary.n, summary.diverged) == (3, 1)
    assert (summary.best, summary.median) == (0.9, 0.8)  # nan, .8, .9 in order
    assert all(math.isnan(value) for value in (summary.mean, summary.worst, summary.std))
    assert math.isnan(summarise([0.9, NAN, NAN]).median)
    assert math.isnan(summarise([NAN]).best)
    assert summarise([0.9, math.inf]).diverged == 1


def test_an_empty_cell_is_refused():
    with pytest.raises(ValueError, match="no run"):
        summarise([])


def test_t_interval_by_hand():
    comparison = compare(observations([3, 5, 4, 6, 7]), observations([1, 2, 3, 4, 5]))
    # differences 2 3 1 2 2: mean 2, variance (1 + 1) / 4, standard error sqrt(.5 / 5), t(.975, 4) = 2.776445
    half = 2.7764451051977987 * math.sqrt(0.1)
    assert comparison.n == 5
    assert comparison.mean == pytest.approx(2.0, abs=1e-12)
    assert comparison.std == pytest.approx(math.sqrt(0.5), abs=1e-12)
    assert comparison.interval.low == pytest.approx(2.0 - half, abs=1e-10)
    assert comparison.interval.high == pytest.approx(2.0 + half, abs=1e-10)
    assert comparison.bootstrap is None


def test_interval_and_p_value_equal_scipys_paired_test():
    generator = np.random.default_rng(3)
    ours, theirs = generator.normal(0.4, 1, 12), generator.normal(0, 1, 12)
    comparison = compare(observations(ours), observations(theirs))
    expected = stats.ttest_rel(ours, theirs)
    bounds = expected.confidence_interval(0.95)
    assert comparison.p_value == pytest.approx(expected.pvalue, rel=1e-12)
    assert (comparison.interval.low, comparison.interval.high) == pytest.approx((bounds.low, bounds.high), rel=1e-12)


def test_pairs_go_by_seed_and_not_by_order():
    comparison = compare(observations([1, 2, 3], [7, 8, 9]), observations([3, 2, 1], [9, 8, 7]))
    assert comparison.mean == 0.0
    assert comparison.std == 0.0
    assert comparison.seeds == (7, 8, 9)


def test_the_bootstrap_joins_at_ten_pairs_and_is_scipys():
    generator = np.random.default_rng(0)
    differences = generator.normal(0.5, 1, 10)
    nothing = observations(np.zeros(10))
    assert compare(observations(differences[:9]), nothing[:9]).bootstrap is None
    comparison = compare(observations(differences), nothing)
    expected = stats.bootstrap((differences,), np.mean, method="BCa", rng=np.random.default_rng(0)).confidence_interval
    assert (comparison.bootstrap.low, comparison.bootstrap.high) == (expected.low, expected.high)
    assert comparison.bootstrap != comparison.interval
    assert compare(observations(differences), nothing) == comparison  # the same runs give the same interval


def test_only_common_seeds_are_paired_and_the_others_named():
    comparison = compare(observations([1, 2, 3], [0, 1, 2]), observations([1, 1, 9], [1, 2, 5]))
    assert comparison.seeds == (1, 2)
    assert comparison.mean == 1.5  # 2 - 1 and 3 - 1
    assert (comparison.only_candidate, comparison.only_baseline) == ((0,), (5,))


def test_different_or_unknown_splits_are_not_paired():
    ours = [Observation(0, "a", 1.0), Observation(1, "a", 1.0), Observation(2, None, 1.0)]
    theirs = [Observation(0, "a", 0.5), Observation(1, "b", 0.0), Observation(2, None, 0.0)]
    comparison = compare(ours, theirs)
    assert comparison.seeds == (0,)
    assert comparison.other_split == (1, 2)
    assert comparison.mean == 0.5
    assert comparison.interval is None
    assert math.isnan(comparison.p_value)


def test_nothing_in_common():
    comparison = compare(observations([1, 2]), observations([1, 2], [5, 6]))
    assert comparison.n == 0
    assert math.isnan(comparison.mean)
    assert judge([comparison])[0].outcome is Outcome.TOO_FEW


def test_a_seed_twice_on_one_side_is_refused():
    with pytest.raises(ValueError, match="seed 3 occurs twice in the baseline"):
        compare(observations([1.0], [3]), observations([1.0, 2.0], [3, 3]))


def test_a_winner_needs_five_pairs():
    steady = [1.0, 1.1, 0.9, 1.05, 0.95]
    zeros = [0.0] * 5
    assert outcome(observations(steady[:4]), observations(zeros[:4])) is Outcome.TOO_FEW
    assert outcome(observations(steady), observations(zeros)) is Outcome.HIGHER
    assert outcome(observations(zeros), observations(steady)) is Outcome.LOWER
    assert outcome(observations(steady[:1]), observations(zeros[:1])) is Outcome.TOO_FEW


def test_an_interval_with_zero_names_no_winner():
    assert outcome(observations([1.0, -1.0, 2.0, -0.5, 0.1]), observations([0.0] * 5)) is Outcome.NOT_SHOWN
    assert Interval(0.0, 1.0).includes_zero()
    assert not Interval(1e-9, 1.0).includes_zero()


def test_without_spread_no_winner_is_named():
    values = [0.3, 0.5, 0.2, 0.4, 0.1]
    shifted = compare(observations([value + 0.1 for value in values]), observations(values))
    assert (shifted.mean, shifted.interval) == (pytest.approx(0.1), None)
    assert judge([shifted])[0].outcome is Outcome.NO_SPREAD
    equal = compare(observations(values), observations(values))
    assert (equal.mean, equal.interval) == (0.0, None)
    assert judge([equal])[0].outcome is Outcome.NO_SPREAD
    assert judge([compare(observations(values[:2]), observations(values[:2]))])[0].outcome is Outcome.TOO_FEW
    many = observations([0.25] * 12)
    assert compare(many, observations([0.0] * 12)).bootstrap is None


def test_a_diverged_run_leaves_the_difference_undefined():
    comparison = compare(observations([1.0, NAN, 1.2, 1.1, 0.9, 1.3]), observations([0.0] * 6))
    assert comparison.diverged == (1,)
    assert comparison.n == 6
    assert math.isnan(comparison.mean)
    assert comparison.interval is None
    verdict = judge([comparison])[0]
    assert verdict.outcome is Outcome.DIVERGED
    assert "seed 1" in verdict.sentence


def test_holm_by_hand():
    # sorted .01 .02 .03 .04 times 4 3 2 1 = .04 .06 .06 .04, then made monotone
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_one_of_several_comparisons_is_corrected_for_their_number():
    zeros = observations([0.0] * 5)
    barely = compare(observations([1.0, 0.1, 0.6, 1.4, 0.3]), zeros)
    assert 0.02 < barely.p_value < 0.05
    open_questions: list[Comparison] = [compare(observations([1.0, -1.0, 2.0, -0.5, 0.1]), zeros)] * 3
    assert judge([barely])[0].outcome is Outcome.HIGHER
    verdict = judge([barely, *open_questions])[0]
    assert verdict.outcome is Outcome.NOT_AFTER_HOLM
    assert verdict.family == 4
    assert verdict.adjusted_p == pytest.approx(4 * barely.p_value)
    too_few = compare(observations([1.0, 2.0]), zeros[:2])
    assert judge([barely, too_few])[0].outcome is Outcome.HIGHER  # it could not have named a winner: not in the family


def test_false_winners_under_the_null_are_one_in_twenty():
    generator = np.random.default_rng(2022)
    trials = 2000
    ours, theirs = generator.normal(size=(trials, 5)), generator.normal(size=(trials, 5))
    named = [
        outcome(observations(a), observations(b)) in (Outcome.HIGHER, Outcome.LOWER)
        for a, b in zip(ours, theirs, strict=True)
    ]
    assert abs(np.mean(named) - 0.05) < 0.015  # three standard errors of a share of .05 in 2000
