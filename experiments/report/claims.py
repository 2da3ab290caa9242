"""The paper's claims against our runs: holds, does not hold, or cannot be told, with effect, interval and pairs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from . import cost, sums
from .cells import Cell, Contest, Measure, Results, axis_label, place_label
from .collect import NOTHING, Setting
from .published import Claim, Kind, base_name
from .statistics import PAIRS_FOR_A_WINNER, Comparison, Observation, Outcome, compare
from .tables import Table, interval


class Says(Enum):
    """What the runs say of a claim."""

    HOLDS = "holds"
    FAILS = "does not hold"
    OPEN = "cannot be told"
    NOT_RUN = "not run here"


@dataclass(frozen=True)
class Finding:
    """What the runs of one experiment say of a claim.

    Attributes:
        claim: the claim.
        experiment: the experiment, "" where none of the claim's was run.
        where: the cell, in words.
        effect: the effect, in words.
        interval: its 95 % t interval, in words.
        pairs: number of pairs.
        says: the verdict.
        reason: why it cannot be told, or "".
        stand_in: whether the experiment has other data than the paper's.
    """

    claim: Claim
    experiment: str
    where: str
    effect: str
    interval: str
    pairs: int
    says: Says
    reason: str = ""
    stand_in: bool = False

    def words(self) -> str:
        """All of it in a line."""
        place = f"{self.experiment}{' (a stand-in)' if self.stand_in else ''}, {self.where}"
        numbers = f"{self.effect}, 95 % t interval {self.interval}, {self.pairs} pairs"
        return f"{self.claim.sentence} {place}: {self.says.value}{self.reason and f': {self.reason}'} ({numbers})"


def findings(claims: Sequence[Claim], reported: Sequence[Results]) -> list[Finding]:
    """What the runs say, at least one entry for each claim: of its own experiments first, then of the stand-ins."""
    found = []
    for claim in claims:
        ours = []
        for names, stand_in in ((claim.experiments, False), (claim.stand_ins, True)):
            for results in reported:
                if base_name(results.experiment) in names:
                    ours += JUDGES[claim.kind](claim, results, stand_in or _other_data(claim, results))
        found += ours or [Finding(claim, "", NOTHING, NOTHING, NOTHING, 0, Says.NOT_RUN)]
    return found


def claim_table(found: Sequence[Finding]) -> Table:
    """The claims, their verdicts, and what these rest on."""
    rows = tuple(
        (
            finding.claim.sentence,
            finding.says.value + (f": {finding.reason}" if finding.reason else ""),
            f"{finding.experiment}{' (a stand-in)' if finding.stand_in else ''}" or NOTHING,
            finding.where,
            finding.effect,
            finding.interval,
            str(finding.pairs) if finding.experiment else NOTHING,
            f"{finding.claim.place}; {finding.claim.status.value}",
        )
        for finding in found
    )
    strong = frozenset(index for index, each in enumerate(found) if each.says in (Says.HOLDS, Says.FAILS))
    header = ("claim", "verdict", "experiment", "where", "effect here", "95 % t interval", "pairs", "source")
    note = (
        f"Effects are paired by seed. A verdict needs {PAIRS_FOR_A_WINNER} pairs and an interval on one side of what "
        "decides; for differences from a baseline also Holm's correction within their table. A stand-in asks the same "
        "of other, smaller data: what it shows is no statement about the paper's."
    )
    return Table("The paper's claims", header, rows, note, strong)


def _higher(claim: Claim, results: Results, stand_in: bool) -> list[Finding]:
    says = {Outcome.HIGHER: Says.HOLDS, Outcome.LOWER: Says.FAILS}
    found = []
    for contest in _contests(results, claim):
        comparison, outcome = contest.comparison, contest.verdict.outcome
        reason = "" if outcome in says else contest.verdict.sentence.removeprefix("no winner named: ")
        effect = f"{results.quantity.difference(comparison.mean)} {results.quantity.points}"
        words = effect, interval(comparison.interval, results.quantity)
        where = _where(results, contest.cell)
        verdict = says.get(outcome, Says.OPEN)
        found.append(Finding(claim, results.experiment, where, *words, comparison.n, verdict, reason, stand_in))
    return found


def _equal(claim: Claim, results: Results, stand_in: bool) -> list[Finding]:
    assert claim.bound is not None
    bound, found = claim.bound / results.quantity.scale, []
    for contest in _contests(results, claim):
        comparison = contest.comparison
        bounds = comparison.interval
        inside = bounds is not None and -bound <= bounds.low and bounds.high <= bound
        outside = bounds is not None and (bounds.low > bound or bounds.high < -bound)
        says, reason = _decide(comparison, inside, outside)
        effect = f"{results.quantity.difference(comparison.mean)} {results.quantity.points}"
        words = effect, interval(bounds, results.quantity)
        where = _where(results, contest.cell)
        found.append(Finding(claim, results.experiment, where, *words, comparison.n, says, reason, stand_in))
    return found


def _gap_grows(claim: Claim, results: Results, stand_in: bool) -> list[Finding]:
    if not results.axes:
        return []
    small, large = _ends(results)
    if small == large:
        return []
    found = []
    contests = {(contest.cell.attention, contest.cell.place): contest for contest in _contests(results, claim)}
    for attention, place in contests:
        others = attention, (large, *place[1:])
        if place[0] != small or others not in contests:
            continue
        comparison = compare(_leads(contests[attention, place]), _leads(contests[others]))
        bounds = comparison.interval
        says, reason = _decide(
            comparison, bounds is not None and bounds.low > 0, bounds is not None and bounds.high < 0
        )
        effect = f"lead {results.quantity.difference(comparison.mean)} {results.quantity.points}"
        words = effect, interval(bounds, results.quantity)
        where = f"{_where(results, contests[attention, place].cell)} against {large}"
        found.append(Finding(claim, results.experiment, where, *words, comparison.n, says, reason, stand_in))
    return found


def _flatter(claim: Claim, results: Results, stand_in: bool) -> list[Finding]:
    found = []
    for recorded in sums.cell_sums(results):
        if not recorded.cell.attention.is_softmax():
            continue
        for layer in recorded.layers():
            epochs = [epoch for epoch in recorded.epochs(layer) if epoch > 0]
            if len(epochs) < 2:
                continue
            change = recorded.change(layer)
            bounds = change.interval
            says, reason = _decide(
                change, bounds is not None and bounds.high < 0, bounds is not None and bounds.low > 0
            )
            first, last = recorded.mean(layer, epochs[0]), recorded.mean(layer, epochs[-1])
            effect = f"unevenness {first:.3f} at epoch {epochs[0]}, {last:.3f} at {epochs[-1]}"
            if 0 in recorded.epochs(layer):
                effect += f" ({recorded.mean(layer, 0):.3f} before training)"
            words = f"[{bounds.low:+.3f}, {bounds.high:+.3f}]" if bounds is not None else NOTHING
            where = f"{_where(results, recorded.cell)}, {layer}"
            found.append(Finding(claim, results.experiment, where, effect, words, change.n, says, reason, stand_in))
    return found


def _cheap(claim: Claim, results: Results, stand_in: bool) -> list[Finding]:
    assert claim.bound is not None
    limit, found = math.log(claim.bound), []
    for contest in _contests(results, claim):
        comparison = cost.ratio(contest.cell, contest.baseline)
        bounds = comparison.interval
        if not comparison.n:
            continue
        says, reason = _decide(
            comparison, bounds is not None and bounds.high <= limit, bounds is not None and bounds.low > limit
        )
        mean, words = cost.ratio_words(comparison)
        effect = f"{mean} times ({cost.devices(contest.cell.runs)})"
        where = _where(results, contest.cell)
        found.append(Finding(claim, results.experiment, where, effect, words, comparison.n, says, reason, stand_in))
    return found


JUDGES: dict[Kind, Callable[[Claim, Results, bool], list[Finding]]] = {
    Kind.higher: _higher,
    Kind.equal: _equal,
    Kind.gap_grows: _gap_grows,
    Kind.flatter: _flatter,
    Kind.cheap: _cheap,
}


def _decide(comparison: Comparison, holds: bool, fails: bool) -> tuple[Says, str]:
    if comparison.diverged:
        return Says.OPEN, f"seed {', '.join(map(str, comparison.diverged))} diverged"
    if comparison.n < PAIRS_FOR_A_WINNER:
        return Says.OPEN, f"too few seeds ({comparison.n} paired, {PAIRS_FOR_A_WINNER} needed)"
    if holds or fails:
        return (Says.HOLDS if holds else Says.FAILS), ""
    return Says.OPEN, f"not with {comparison.n} pairs"


def _contests(results: Results, claim: Claim) -> list[Contest]:
    """Sinkhorn against its baseline at the chosen epoch, in the cells that the claim is about."""
    return [
        contest
        for contest in results.contests
        if contest.measure is Measure.CHOSEN and contest.cell.attention.name == "sinkhorn"
        if not contest.cell.attention.is_softmax()
        if all(contest.cell.runs[0].settings.get(key) == value for key, value in claim.at.items())
    ]


def _other_data(claim: Claim, results: Results) -> bool:
    """Whether the runs have other data than the claim's."""
    facts = [run.card.get("data") for run in results.runs]
    names = {fact.get("name") if isinstance(fact, dict) else None for fact in facts}
    return bool(claim.data) and not names <= set(claim.data)


def _leads(contest: Contest) -> list[Observation]:
    """By seed, Sinkhorn's number minus the baseline's on the same split."""
    theirs = {entry.seed: entry for entry in contest.baseline.observations(contest.measure)}
    return [
        Observation(entry.seed, entry.split, entry.value - theirs[entry.seed].value)
        for entry in contest.cell.observations(contest.measure)
        if entry.seed in theirs and entry.split is not None and entry.split == theirs[entry.seed].split
    ]


def _ends(results: Results) -> tuple[Setting, Setting]:
    """The first and the last value of the first axis, in the order of the cells."""
    places = [cell.place[0] for cell in results.cells]
    return places[0], places[-1]


def _where(results: Results, cell: Cell) -> str:
    places = zip(results.axes, cell.place, strict=True)
    return ", ".join([cell.attention.label, *(f"{axis_label(axis)} {place_label(axis, at)}" for axis, at in places)])
