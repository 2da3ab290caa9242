"""Tables of results in a document: `python -m experiments.report results --docs docs/results.md` writes them anew.

They stand between two comments that name an experiment, and everything else of the document stays as it is:

    <!-- begin mnist_patches -->
    <!-- end mnist_patches -->
"""

import re
from collections.abc import Sequence
from pathlib import Path

from ..errors import RunError
from ..files import write_atomic
from .cells import Measure, Results
from .page import verdict_lines
from .tables import as_markdown, cell_table, contest_table

BLOCK = re.compile(r"<!-- begin (\w+) -->\n(.*?)<!-- end \1 -->", re.DOTALL)


def rewritten(text: str, reported: Sequence[Results]) -> str:
    """A document with the tables of these results.

    Args:
        text: of the document.
        reported: at most one for each experiment.

    Raises:
        RunError: for a place for an experiment of which there are no results.
    """
    known = {results.experiment: results for results in reported}

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        if name not in known:
            raise RunError(f"there is a place for tables of {name}, and no run of it among those given")
        return f"<!-- begin {name} -->\n\n{block(known[name])}\n<!-- end {name} -->"

    return BLOCK.sub(fill, text)


def block(results: Results) -> str:
    """An experiment's tables at the chosen epoch, and what they show."""
    shown = [cell_table(results, Measure.CHOSEN)]
    if any(contest.measure is Measure.CHOSEN for contest in results.contests):
        shown.append(contest_table(results, Measure.CHOSEN))
    parts = [as_markdown(table).strip() for table in shown]
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in verdict_lines(results))]) + "\n"


def write(path: Path, reported: Sequence[Results]) -> int:
    """Rewrites a document; returns how many experiments it has tables of.

    Raises:
        RunError: for a document that is not there or has no place for tables.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read: {error}") from None
    count = len(BLOCK.findall(text))
    if not count:
        raise RunError(f"{path} has no place for tables: <!-- begin EXPERIMENT --> and <!-- end EXPERIMENT -->")
    write_atomic(path, rewritten(text, reported))
    return count
