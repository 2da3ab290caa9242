"""The page: one index.html, whole in itself, with an overview, a view for each experiment, and one for the theory."""

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from ..files import write_atomic
from .catalogue import Entry, catalogue
from .claims import Finding, claim_table
from .collect import Problem
from .page import View
from .tables import problem_table
from .theory import TheoryView

PAGE = "index.html"
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Summary:
    """A line of the overview.

    Attributes:
        view: the experiment's view.
        slug: its address in the page.
        files: addresses of its files, by name.
        medians: the median of every cell, in words, the cell's words first.
    """

    view: View
    slug: str
    files: dict[str, str]
    medians: list[tuple[str, str]]


def write_site(
    views: Sequence[tuple[View, str]],
    theory: TheoryView | None,
    found: Sequence[Finding],
    problems: Sequence[Problem],
    folder: Path,
    refresh: int | None = None,
) -> Path:
    """Writes index.html, at once or not at all.

    Args:
        views: the experiments, each with the folder of its files as an address relative to the page ("" for its own).
        theory: the checks of the theory.
        found: what the runs say of the paper's claims.
        problems: runs that do not count and that belong to no view.
        folder: of the page.
        refresh: seconds after which the page loads itself again, None for never.

    Raises:
        OSError: where the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    taken = {"overview", "theory", "main"}
    summaries = [_summary(view, place, taken) for view, place in views]
    ran = {view.results.experiment for view, _ in views}
    waiting: list[Entry] = [entry for entry in catalogue() if entry.name not in ran]
    script = (HERE / "script.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(f"\n{script}".encode()).digest()).decode()
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("site.html.jinja").render(
        summaries=summaries,
        theory=theory,
        claims=claim_table(found),
        problems=problem_table(problems),
        waiting=waiting,
        refresh=refresh,
        script=script,
        # Nothing but this script runs, and nothing is asked for: whatever stands in a run's files stays words.
        policy=(
            f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
            "base-uri 'none'; form-action 'none'"
        ),
    )
    write_atomic(folder / PAGE, page.encode("utf-8", "backslashreplace"))
    return folder / PAGE


def _summary(view: View, place: str, taken: set[str]) -> Summary:
    results = view.results
    slug = re.sub(r"[^A-Za-z0-9_-]+", "-", results.experiment).strip("-") or "experiment"
    while slug in taken:
        slug += "-"
    taken.add(slug)
    prefix = f"{place}/" if place else ""
    table = view.numbers[0]
    columns, median = len(results.axes), table.header.index("median")
    medians = [
        (
            ", ".join([cell.attention.label, *map(" ".join, zip(table.header[:columns], row, strict=False))]),
            row[median],
        )
        for cell, row in zip(results.cells, table.rows, strict=True)
    ]
    return Summary(view, slug, {name: f"{prefix}{name}" for name in view.files}, medians)
