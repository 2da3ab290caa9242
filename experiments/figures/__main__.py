"""`python -m experiments.figures NAME [options]`: draws one figure; `--list` names them."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from ..command import finish
from ..errors import RunError
from . import NAMES
from .base import write

FOLDER = Path("runs/figures")


def load(name: str) -> ModuleType:
    """The module of a figure, imported only when it is asked for."""
    return importlib.import_module(f"{__package__}.{name}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code is 1 where the figure could not be drawn, for a reason that is printed."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m experiments.figures", description="Draws a figure of the paper.")
    parser.add_argument("--list", action="store_true", help="name the figures and end")
    figures = parser.add_subparsers(dest="name", metavar="NAME")
    # Only the figure that is named is imported: some of them import torch.
    asked = next((word for word in words if not word.startswith("-")), None)
    for name in NAMES:
        figure = figures.add_parser(name)
        if name == asked:
            module = load(name)
            figure.description = module.TITLE
            figure.add_argument(
                "--out", type=Path, default=FOLDER, help=f"folder of the SVG, PDF, PNG and CSV (default: {FOLDER})"
            )
            module.add_options(figure)
    options = parser.parse_args(words)
    if options.list:
        for name in NAMES:
            print(f"{name:16} {load(name).TITLE}")
        return 0
    if options.name is None:
        parser.error(f"name a figure: {', '.join(NAMES)}; --list says what each shows")
    console = Console(stderr=True, highlight=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            progress.add_task(f"drawing {options.name}", total=None)
            drawn = load(options.name).draw(options)
            paths = write(drawn, drawn.name or options.name, options.out)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(drawn.words)
    for path in paths:
        print(path)
    return 0


if __name__ == "__main__":
    finish(main)
