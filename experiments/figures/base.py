"""What the figures share: what is drawn, with its numbers; the files; the style."""

import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from ..errors import RunError
from ..files import explain_full_disk, write_atomic

# Okabe and Ito's colours, which stay apart for the common kinds of colour blindness.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "sinkformer-suite",
    "pdf.fonttype": 42,  # letters stay letters: journals refuse outlines of Type 3
}
#: The pictures of a figure, and what must not stand in them, so that equal figures are equal bytes.
KINDS: dict[str, dict[str, Any]] = {
    "svg": {"Date": None},
    "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
    "png": {"Software": None},
}


@dataclass(frozen=True)
class Drawn:
    """A figure and the numbers in it.

    Attributes:
        figure: the picture.
        header: names of the columns of its numbers.
        rows: the numbers, as many entries in each row as there are columns.
        words: what it shows, measured, in a sentence or a few.
        name: of its files, where it is not the figure's.
    """

    figure: Figure
    header: tuple[str, ...]
    rows: Sequence[Sequence[object]]
    words: str
    name: str | None = None


@contextmanager
def styled() -> Iterator[None]:
    """The figures' style, for the block that draws."""
    with rc_context(STYLE):
        yield


def image(figure: Figure, kind: str) -> bytes:
    """A figure as svg, pdf or png, with a white ground; the same figure always gives the same bytes."""
    with styled():
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, facecolor="white", dpi=200, metadata=KINDS[kind])
    return buffer.getvalue()


def write(drawn: Drawn, name: str, folder: Path) -> list[Path]:
    """Writes NAME.csv, NAME.svg, NAME.pdf and NAME.png into a folder, each whole or not at all.

    Returns:
        The four paths.

    Raises:
        RunError: where the folder cannot be written to.
    """
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(drawn.header)
    writer.writerows(drawn.rows)
    files: dict[str, bytes] = {"csv": table.getvalue().encode()}
    files |= {kind: image(drawn.figure, kind) for kind in KINDS}
    with explain_full_disk(f"the figure {name} was not written"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for ending, content in files.items():
                write_atomic(folder / f"{name}.{ending}", content)
        except (FileExistsError, NotADirectoryError, PermissionError) as error:
            raise RunError(f"--out {folder} cannot be written to: {error.strerror} ({error.filename})") from error
    return [folder / f"{name}.{ending}" for ending in files]
