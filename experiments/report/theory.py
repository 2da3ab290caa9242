"""The results of `python -m experiments.theory`: a page of statements, expected and measured values, and figures."""

import base64
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..files import write_atomic
from .collect import NOT_SEARCHED, Problem, path_words
from .tables import Table, as_markdown

NAME = "theory"
RESULTS = "results.json"
VERDICTS = {True: "yes", False: "no", None: "open"}


@dataclass(frozen=True)
class Claim:
    """A statement of the theory: the sentence, the value expected, the value measured, and whether it holds.

    `holds` is None for a question that theory leaves open, of which the number is only reported.
    """

    sentence: str
    expected: str
    measured: float | str
    holds: bool | None


@dataclass(frozen=True)
class Check:
    """What one check of the theory left in its folder.

    Attributes:
        folder: where it lies.
        name: the check's name.
        title: what it is about.
        claims: its statements, in the order of reading.
        options: its sizes and seed.
        seconds: how long it took.
        figure: its picture, SVG.
    """

    folder: Path
    name: str
    title: str
    claims: tuple[Claim, ...]
    options: Mapping[str, Any]
    seconds: float
    figure: bytes = field(repr=False)

    @property
    def picture(self) -> str:
        """The figure as an address that asks for nothing from outside the page."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.figure).decode()

    @property
    def command(self) -> str:
        """What was typed, but for the folder of the results."""
        words = (f"{key}={_word(value)}" for key, value in self.options.items() if value != "")
        return f"python -m experiments.theory {self.name} {' '.join(words)}"


def collect_checks(paths: Sequence[Path]) -> tuple[list[Check], list[Problem]]:
    """Reads every check at or below some paths, sorted by name; one that is reached twice is read once.

    Returns:
        The checks, and the folders whose results cannot be read, each with its reason.
    """
    folders: dict[Path, Path] = {}
    for path in paths:
        for place, below, files in os.walk(path):
            below[:] = sorted(name for name in below if name not in NOT_SEARCHED)
            if RESULTS in files:
                folders.setdefault(Path(place).resolve(), Path(place))
    checks, problems = [], []
    for folder in folders.values():
        try:
            checks.append(read_check(folder))
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = f"its {RESULTS} or its figure cannot be read ({type(error).__name__}: {error})"
            problems.append(Problem(folder, NAME, "unreadable", reason))
    return sorted(checks, key=lambda check: (check.name, check.folder)), problems


def read_check(folder: Path) -> Check:
    """A check's results.

    Raises:
        OSError, ValueError, KeyError, TypeError: where they are not those of a check.
    """
    content = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    claims = tuple(
        Claim(str(entry["sentence"]), str(entry["expected"]), entry["measured"], entry["holds"])
        for entry in content["statements"]
    )
    if not all(claim.holds in (True, False, None) for claim in claims):
        raise ValueError("holds is neither true, false nor null")
    figure = (folder / Path(content["figure"]).name).read_bytes()
    name, title = str(content["name"]), str(content["title"])
    return Check(folder, name, title, claims, dict(content["options"]), float(content["seconds"]), figure)


def check_table(check: Check) -> Table:
    """The statements of a check; those that do not hold stand out."""
    rows = tuple(
        (claim.sentence, claim.expected, _number(claim.measured), VERDICTS[claim.holds]) for claim in check.claims
    )
    failed = frozenset(index for index, claim in enumerate(check.claims) if claim.holds is False)
    return Table(check.title, ("statement", "expected", "measured", "holds"), rows, strong=failed)


def summary_line(checks: Sequence[Check]) -> str:
    """How many statements hold, which do not, and how many questions are open."""
    asked = [(check, claim) for check in checks for claim in check.claims if claim.holds is not None]
    failed = [f"{claim.sentence} ({check.name})" for check, claim in asked if not claim.holds]
    still_open = sum(claim.holds is None for check in checks for claim in check.claims)
    line = f"{len(asked) - len(failed)} of {len(asked)} statements hold; {still_open} numbers of open questions."
    return line + (f" These do not: {'; '.join(failed)}." if failed else "")


@dataclass(frozen=True)
class TheoryView:
    """What the page shows of the theory.

    Attributes:
        summary: how many statements hold.
        checks: the checks with their tables.
        unread: folders whose results cannot be read.
    """

    summary: str
    checks: tuple[tuple[Check, Table], ...]
    unread: Table


def write_theory(checks: Sequence[Check], problems: Sequence[Problem], folder: Path) -> TheoryView:
    """Writes theory.md into a folder, which is made where it is not there; returns what the page shows.

    Raises:
        OSError: where the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    unread = Table(
        "Not read",
        ("state", "folder", "reason"),
        tuple((problem.state, path_words(problem.folder), problem.reason) for problem in problems),
    )
    parts = ["# Theory", summary_line(checks)]
    parts += [f"{as_markdown(check_table(check))}\n`{check.command}`" for check in checks]
    parts += [as_markdown(unread)] if problems else []
    text = "\n\n".join(part.strip() for part in parts) + "\n"
    write_atomic(folder / "theory.md", text.encode("utf-8", "backslashreplace"))
    return TheoryView(summary_line(checks), tuple((check, check_table(check)) for check in checks), unread)


def _number(value: float | str) -> str:
    """A measured number in six digits; infinities and NaN are words in the file already."""
    return f"{value:.6g}" if isinstance(value, int | float) and math.isfinite(value) else str(value)


def _word(value: object) -> str:
    return json.dumps(value).replace(" ", "") if isinstance(value, list) else str(value)
