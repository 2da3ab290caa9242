"""What the checks share: statements and whether they hold, options from the command line, files of a result."""

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor

from ..errors import RunError
from ..files import explain_full_disk, write_atomic, write_json
from ..seeding import generator

# Okabe and Ito's colours, which stay apart for the common kinds of colour blindness; one for each normalisation.
COLOURS = {"none": "#009E73", "softmax": "#0072B2", "sinkhorn": "#D55E00", "l2": "#CC79A7", "sigmoid": "#56B4E9"}
INK = "#1b1e23"
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "sinkformer-suite",
}
RESULTS = "results.json"

Cell = float | int | str
Row = dict[str, Cell]


@dataclass(frozen=True)
class Statement:
    """A statement of the theory and what was measured.

    Attributes:
        sentence: the statement, in one sentence.
        expected: what the theory expects of the number, in words.
        measured: the number.
        tolerance: how far from the expected value the number may be, or None where it is compared with a bound.
        holds: whether it does; None for a question that theory leaves open, of which the number is only reported.
    """

    sentence: str
    expected: str
    measured: float
    tolerance: float | None
    holds: bool | None


def equals(sentence: str, measured: float | Tensor, expected: float, tolerance: float) -> Statement:
    """The number is `expected`, up to `tolerance`."""
    number = float(measured)
    return Statement(
        sentence, f"{expected:.6g} ± {tolerance:.2g}", number, tolerance, abs(number - expected) <= tolerance
    )


def vanishes(sentence: str, measured: float | Tensor, tolerance: float) -> Statement:
    """The number, a distance, is 0 up to `tolerance`."""
    number = float(measured)
    return Statement(sentence, f"0 ± {tolerance:.2g}", number, tolerance, abs(number) <= tolerance)


def at_most(sentence: str, measured: float | Tensor, bound: float) -> Statement:
    """The number does not exceed `bound`."""
    number = float(measured)
    return Statement(sentence, f"≤ {bound:.6g}", number, None, number <= bound)


def at_least(sentence: str, measured: float | Tensor, bound: float) -> Statement:
    """The number does not fall below `bound`."""
    number = float(measured)
    return Statement(sentence, f"≥ {bound:.6g}", number, None, number >= bound)


def observed(sentence: str, measured: float | Tensor) -> Statement:
    """The number of a question that theory leaves open."""
    return Statement(sentence, "open", float(measured), None, None)


@dataclass
class Options:
    """What every check can be told; each adds its own sizes.

    Attributes:
        seed: of all random numbers.
        out: folder of the results; each check has a folder of its own in it.
    """

    seed: int = 0
    out: str = "runs/theory"

    def check(self) -> None:
        """Raises RunError for a value out of range."""


@dataclass
class Result:
    """What a check found.

    Attributes:
        statements: in the order of reading.
        table: the numbers behind them, one mapping of column names a row.
        figure: the picture.
    """

    statements: list[Statement]
    table: list[Row]
    figure: Figure = field(repr=False)

    @property
    def holds(self) -> bool:
        """Whether no statement fails."""
        return all(statement.holds is not False for statement in self.statements)


OptionsClass = TypeVar("OptionsClass", bound=Options)


def parse(cls: type[OptionsClass], overrides: Sequence[str], name: str) -> OptionsClass:
    """Options from overrides `key=value`, in the manner of Hydra.

    Raises:
        RunError: for a word that is no override, an unknown key, or a value of the wrong type or out of range.
    """
    known = [entry.name for entry in fields(cls)]
    for word in overrides:
        key, equal, _ = word.partition("=")
        if not equal or key not in known:
            raise RunError(f"{name} does not know {word!r}; its options are given as key=value: {', '.join(known)}")
    try:
        merged = OmegaConf.merge(OmegaConf.structured(cls), OmegaConf.from_dotlist(list(overrides)))
        options = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise RunError(f"{name}: {error.full_key}: {str(error).splitlines()[0]}") from None
    except ValueError as error:
        raise RunError(f"{name}: {error}") from None
    assert isinstance(options, cls)
    if options.seed < 0:
        raise RunError(f"{name}: seed must be at least 0; got {options.seed}")
    try:
        options.check()
    except RunError as error:
        raise RunError(f"{name}: {error}") from None
    return options


def require(condition: bool, words: str) -> None:
    """Raises RunError with these words unless the condition holds."""
    if not condition:
        raise RunError(words)


def normal(purpose: str, seed: int, *shape: int) -> Tensor:
    """Standard normal float64 numbers that depend on the purpose and the seed alone."""
    return torch.randn(*shape, generator=generator(f"theory-{purpose}", seed), dtype=torch.float64)


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent of y ~ x^slope by least squares in logarithms."""
    u, v = (torch.tensor(numbers, dtype=torch.float64).log() for numbers in (x, y))
    u = u - u.mean()
    return float((u * (v - v.mean())).sum() / u.square().sum())


@contextmanager
def picture(columns: int = 1, rows: int = 1, **subplots: Any) -> Iterator[tuple[Figure, Any]]:
    """A figure of `rows` times `columns` panels in the house's style, and the grid of its axes (rows, columns)."""
    with rc_context(STYLE):
        figure = Figure(figsize=(4.6 * columns, 3.6 * rows), dpi=140, layout="constrained")
        yield figure, figure.subplots(rows, columns, squeeze=False, **subplots)


def as_numbers(statement: Statement) -> dict[str, Any]:
    """A statement for JSON, which has no infinities and no NaN: those become words."""
    content = asdict(statement)
    if not math.isfinite(statement.measured):
        content["measured"] = str(statement.measured)
    return content


def write(result: Result, name: str, title: str, options: Options, seconds: float) -> Path:
    """Writes figure.png, figure.svg, table.csv, table.json and, last, results.json into a folder of the check's own.

    Returns:
        The folder.

    Raises:
        RunError: where it cannot be written.
    """
    folder = Path(options.out) / name
    settings = {key: value for key, value in asdict(options).items() if key != "out"}
    content = {
        "name": name,
        "title": title,
        "holds": result.holds,
        "statements": [as_numbers(statement) for statement in result.statements],
        "options": settings,
        "seconds": round(seconds, 1),
        "figure": "figure.svg",
        "table": "table.csv",
    }
    with explain_full_disk(f"the results of {name} were not written"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / RESULTS).unlink(missing_ok=True)  # while the files do not belong together there is no result
            for kind in ("png", "svg"):
                write_atomic(folder / f"figure.{kind}", _image(result.figure, kind))
            write_atomic(folder / "table.csv", _csv(result.table))
            write_json(folder / "table.json", result.table)
            write_json(folder / RESULTS, content)
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise RunError(f"out={options.out} cannot be written to: {error.strerror} ({error.filename})") from error
    return folder


def _image(figure: Figure, kind: str) -> bytes:
    metadata = {"Date": None} if kind == "svg" else {"Software": None}
    with rc_context(STYLE):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, facecolor="white", metadata=metadata)
    return buffer.getvalue()


def _csv(table: Sequence[Mapping[str, Cell]]) -> str:
    buffer = io.StringIO()
    columns = list(dict.fromkeys(key for row in table for key in row))
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    return buffer.getvalue()
