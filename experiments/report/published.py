"""Reads `paper_results.yaml`: the published numbers, where each stands, and how far it is known."""

import math
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

PAPER_RESULTS = Path(__file__).with_name("paper_results.yaml")
STATISTICS = ("best", "median", "mean", "worst", "value", "axis_low", "axis_high")
UNITS = ("percent", "points", "BLEU", "seconds", "times")


class Status(Enum):
    """How far a published number is known; the value is what readers are told."""

    checked = "published value, checked against the PDF"
    code = "read in the published code, not yet checked against the PDF"
    recalled = "published value, not yet checked against the PDF"
    web = "published value from an excerpt on the web, not yet checked against the PDF"


@dataclass
class PublishedRow:
    """The numbers of one model.

    Attributes:
        model: the name it has in the paper.
        attention: a normalizer of the registry, or "both" where the paper gives one range for both.
        n_iters: number of half-steps, where it is known.
        values: statistic (one of `STATISTICS`) to number, in the result's unit.
    """

    model: str = MISSING
    attention: str = MISSING
    n_iters: int | None = None
    values: dict[str, float] = MISSING


@dataclass
class PublishedResult:
    """One table or figure's numbers of one experiment.

    Attributes:
        id: a name for it.
        source: key in the file's `sources`; after loading, the source's text.
        place: where in the source it stands.
        experiments: the experiments of this suite that it is a counterpart of (`_paper` and `_official` forms too).
        metric: what was measured.
        unit: one of `UNITS`.
        runs: number of runs, where known.
        protocol: how it was measured.
        status: how far it is known.
        rows: one per model.
    """

    id: str = MISSING
    source: str = MISSING
    place: str = MISSING
    experiments: list[str] = MISSING
    metric: str = MISSING
    unit: str = MISSING
    runs: int | None = None
    protocol: str = MISSING
    status: Status = MISSING
    rows: list[PublishedRow] = MISSING


class Kind(Enum):
    """What a claim says, and so what decides it.

    higher: Sinkhorn's metric is higher than the baseline's.
    equal: the two differ by no more than `bound`, in points.
    gap_grows: Sinkhorn's lead is larger at the smallest value of the swept axis than at the largest.
    flatter: the column sums of softmax attention are less uneven at the end of training than at the beginning.
    cheap: an epoch takes no more than `bound` times the baseline's.
    """

    higher = "higher"
    equal = "equal"
    gap_grows = "gap_grows"
    flatter = "flatter"
    cheap = "cheap"


@dataclass
class Claim:
    """A sentence of the paper that runs can decide.

    Attributes:
        id: a name for it.
        source: key in the file's `sources`; after loading, the source's text.
        place: where in the source it stands.
        sentence: the claim.
        kind: what decides it.
        bound: for the kinds that have one.
        published: ids of the results that it rests on.
        experiments: the experiments of this suite that are its counterpart.
        stand_ins: small experiments that ask the same of other data.
        data: names of the paper's data; runs on others are stand-ins too. Empty where the experiment says it all.
        at: settings that a cell must have for the claim to be about it.
        status: how far it is known that the source says so.
    """

    id: str = MISSING
    source: str = MISSING
    place: str = MISSING
    sentence: str = MISSING
    kind: Kind = MISSING
    bound: float | None = None
    published: list[str] = field(default_factory=list)
    experiments: list[str] = MISSING
    stand_ins: list[str] = field(default_factory=list)
    data: list[str] = field(default_factory=list)
    at: dict[str, float] = field(default_factory=dict)
    status: Status = MISSING


@dataclass(frozen=True)
class Paper:
    """What is published: numbers, and claims."""

    results: list[PublishedResult]
    claims: list[Claim]


@dataclass
class _File:
    sources: dict[str, str] = MISSING
    results: list[PublishedResult] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)


def load_published(path: Path = PAPER_RESULTS) -> list[PublishedResult]:
    """The published numbers of a file; see `load_paper`."""
    return load_paper(path).results


def load_paper(path: Path = PAPER_RESULTS) -> Paper:
    """Reads and checks a file of published numbers and claims.

    Raises:
        ValueError: for what is missing, unknown, twice there or of the wrong type, with the entry that it is in.
    """
    try:
        merged = OmegaConf.merge(OmegaConf.structured(_File), OmegaConf.load(path))
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise ValueError(f"{path}: {missing[0]} is missing")
        content = OmegaConf.to_object(merged)
    except (OmegaConfBaseException, YAMLError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    assert isinstance(content, _File)
    seen: set[str] = set()
    for result in content.results:
        where = f"{path}: result {result.id!r}"
        if result.id in seen:
            raise ValueError(f"{where} is there twice")
        seen.add(result.id)
        if result.source not in content.sources:
            raise ValueError(f"{where}: source {result.source!r} is not one of {', '.join(content.sources)}")
        if result.unit not in UNITS:
            raise ValueError(f"{where}: unit {result.unit!r} is not one of {', '.join(UNITS)}")
        if not result.rows:
            raise ValueError(f"{where} has no rows")
        for row in result.rows:
            _check_row(row, result.unit, f"{where}, row {row.model!r}")
        result.source = content.sources[result.source]
    results = {result.id for result in content.results}
    for claim in content.claims:
        where = f"{path}: claim {claim.id!r}"
        if claim.id in seen:
            raise ValueError(f"{where} is there twice, or a result has its name")
        seen.add(claim.id)
        if claim.source not in content.sources:
            raise ValueError(f"{where}: source {claim.source!r} is not one of {', '.join(content.sources)}")
        unknown = [name for name in claim.published if name not in results]
        if unknown:
            raise ValueError(f"{where}: there is no result {unknown[0]!r}")
        if (claim.bound is not None) != (claim.kind in (Kind.equal, Kind.cheap)):
            raise ValueError(
                f"{where}: a claim of the kind {claim.kind.value} has {'no' if claim.bound else 'a'} bound"
            )
        claim.source = content.sources[claim.source]
    return Paper(content.results, content.claims)


def base_name(experiment: str) -> str:
    """An experiment's name without `_paper` or `_official`."""
    return experiment.removesuffix("_official").removesuffix("_paper")


def published_for(experiment: str, results: list[PublishedResult]) -> list[PublishedResult]:
    """The results that are counterparts of an experiment, of its `_paper` and its `_official` form."""
    return [result for result in results if base_name(experiment) in result.experiments]


def _check_row(row: PublishedRow, unit: str, where: str) -> None:
    if not row.values:
        raise ValueError(f"{where} has no values")
    for name, value in row.values.items():
        if name not in STATISTICS:
            raise ValueError(f"{where}: {name!r} is not one of {', '.join(STATISTICS)}")
        if not math.isfinite(value) or value < 0 or (unit == "percent" and value > 100):
            raise ValueError(f"{where}: {name} is {value}, which is no number in {unit}")
    for low, high in (("worst", "best"), ("axis_low", "axis_high")):
        if low in row.values and high in row.values and row.values[low] > row.values[high]:
            raise ValueError(f"{where}: {low} is above {high}")
