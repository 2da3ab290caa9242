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
UNITS = ("percent", "BLEU", "seconds")


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


@dataclass
class _File:
    sources: dict[str, str] = MISSING
    results: list[PublishedResult] = field(default_factory=list)


def load_published(path: Path = PAPER_RESULTS) -> list[PublishedResult]:
    """Reads and checks a file of published numbers.

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
    return content.results


def published_for(experiment: str, results: list[PublishedResult]) -> list[PublishedResult]:
    """The results that are counterparts of an experiment, of its `_paper` and its `_official` form."""
    base = experiment.removesuffix("_official").removesuffix("_paper")
    return [result for result in results if base in result.experiments]


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
