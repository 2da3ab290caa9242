"""Rows of measurements as CSV, console tables and one figure."""

import argparse
import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

from ..files import write_atomic
from ..report.tables import as_csv
from .timing import fitted_exponent, quartiles


@dataclass(frozen=True)
class Row:
    """One variant of one comparison in one pass. Seconds, megabytes, and ratios to the comparison's first variant."""

    table: str
    case: str
    variant: str
    which: str
    seconds: float | None = None
    low: float | None = None
    high: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    megabytes: float | None = None
    repeats: int = 0
    note: str = ""


def show_table(
    options: argparse.Namespace,
    console: Console,
    name: str,
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[Any]],
    words: int = 1,
) -> None:
    """Prints a table that is no comparison of times, and writes NAME.csv.

    Args:
        options: of the command: where to, and the device.
        console: to print on.
        name: of the file.
        title: above the table.
        header: names of the columns.
        rows: their cells.
        words: columns at the left that hold words; numbers stand at the right.
    """
    shown = Table(title=title, box=None)
    for number, column in enumerate(header):
        shown.add_column(column, justify="left" if number < words else "right")
    for row in rows:
        shown.add_row(*map(str, row))
    console.print(shown)
    folder = options.output / options.device
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{name}.csv", as_csv(header, rows))


def rows_of(table: str, case: str, which: str, samples: dict[str, list[float] | str], baseline: str) -> list[Row]:
    """Rows of one comparison.

    Args:
        table: name of the table.
        case: what was measured.
        which: "forward", "both" or another name of the pass.
        samples: seconds by variant, taken in turn; a string, why not, for a variant that could not run.
        baseline: the variant that ratios refer to; without samples of it there are no ratios.
    """
    base = samples.get(baseline)
    rows = []
    for variant, found in samples.items():
        if isinstance(found, str):
            rows.append(Row(table, case, variant, which, note=found.splitlines()[0]))
            continue
        low, middle, high = quartiles(found)
        row = {"seconds": middle, "low": low, "high": high, "repeats": len(found)}
        if isinstance(base, list) and len(base) == len(found):
            ratios = quartiles([one / other for one, other in zip(found, base, strict=True)])
            row |= dict(zip(("ratio_low", "ratio", "ratio_high"), ratios, strict=True))
        rows.append(Row(table, case, variant, which, **row))  # type: ignore[arg-type]
    return rows


def write_csv(rows: Iterable[Row], path: Path) -> None:
    """One line per row, with every field."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def milliseconds(row: Row | None) -> str:
    """Median and quartiles, or why there are none."""
    if row is None or row.seconds is None or row.low is None or row.high is None:
        return "" if row is None else row.note[:40]
    return f"{1e3 * row.seconds:.3g} [{1e3 * row.low:.3g}, {1e3 * row.high:.3g}]"


def times(row: Row | None) -> str:
    """The ratio to the baseline with its quartiles."""
    if row is None or row.ratio is None or row.ratio_low is None or row.ratio_high is None:
        return ""
    return f"{row.ratio:.2f} [{row.ratio_low:.2f}, {row.ratio_high:.2f}]"


def attention_table(rows: Sequence[Row], title: str, baseline: str) -> Table:
    """One line per case and variant: milliseconds and ratio of both passes, and peak memory."""
    table = Table(title=title)
    for column in ("case", "variant", "forward ms", "/ SDPA", "forward+backward ms", "/ SDPA", "peak MB", "error"):
        table.add_column(column.replace("SDPA", baseline), justify="left" if column in ("case", "variant") else "right")
    by_key = {(row.case, row.variant, row.which): row for row in rows}
    for case, variant in dict.fromkeys((row.case, row.variant) for row in rows):
        forward, both = (by_key.get((case, variant, which)) for which in ("forward", "both"))
        memory, error = (by_key.get((case, variant, which)) for which in ("memory", "error"))
        megabytes = "" if memory is None or memory.megabytes is None else f"{memory.megabytes:.0f}"
        cells = [milliseconds(forward), times(forward), milliseconds(both), times(both), megabytes]
        table.add_row(case, variant, *cells, "" if error is None else error.note)
    return table


def plain_table(rows: Sequence[Row], title: str, baseline: str) -> Table:
    """One line per row: case, variant, pass, milliseconds, ratio."""
    table = Table(title=title)
    for column in ("case", "variant", "of", "ms", f"/ {baseline}"):
        table.add_column(column, justify="right" if column == "ms" or column.startswith("/") else "left")
    for row in rows:
        table.add_row(row.case, row.variant, row.which, milliseconds(row), times(row))
    return table


def exponents(rows: Sequence[Row]) -> dict[str, float]:
    """Fitted exponent of the seconds for every variant of rows whose case is a size; two sizes at least."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.seconds is not None:
            found.setdefault(row.variant, []).append((float(row.case), row.seconds))
    return {
        variant: fitted_exponent(*zip(*points, strict=True)) for variant, points in found.items() if len(points) > 1
    }


def draw(rows: Sequence[Row], path: Path, device: str) -> None:
    """The figure: ratios to SDPA of the table, and seconds against n and against the number of half-steps."""
    figure, axes = plt.subplots(1, 3, figsize=(16, 5), layout="constrained")
    both = [row for row in rows if row.table == "attention" and row.which == "both" and row.ratio is not None]
    labels = [f"{row.case}\n{row.variant}" for row in both]
    axes[0].barh(labels, [row.ratio or 0.0 for row in both])
    axes[0].axvline(1.0, color="black", linewidth=0.8)
    axes[0].set(xscale="log", xlabel="forward + backward, times SDPA")
    axes[0].tick_params(axis="y", labelsize=5)
    axes[0].invert_yaxis()
    for axis, table, label in ((axes[1], "growth in n", "tokens n"), (axes[2], "growth in T", "half-steps T")):
        chosen = [row for row in rows if row.table == table and row.seconds is not None]
        for variant in dict.fromkeys(row.variant for row in chosen):
            points = [(float(row.case), row.seconds) for row in chosen if row.variant == variant]
            axis.plot(*zip(*points, strict=True), marker="o", label=variant)
        axis.set(xscale="log", yscale="log", xlabel=label, ylabel="seconds, forward + backward")
        if chosen:
            axis.legend(fontsize=7)
    figure.suptitle(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
