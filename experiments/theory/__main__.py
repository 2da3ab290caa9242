"""`python -m experiments.theory NAME [key=value ...]`, or `all`: runs checks and says which statements hold."""

import importlib
import sys
import time
from collections.abc import Sequence
from types import ModuleType

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from ..command import finish
from ..errors import RunError
from .base import Options, Statement, parse, write

NAMES = (
    "invariance",
    "gradient_flow",
    "heat_limit",
    "clusters",
    "regularity",
    "rank_and_depth",
    "transport",
    "implicit",
    "representations",
)
FILE_WIDTH = 160  # of tables that go to a file or a pipe, which has no width of its own


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one check or all of them, and prints a table: statement, expected, measured, holds.

    Returns:
        0 where every statement holds, 1 where one does not or the command was wrong.
    """
    # Kernels at low temperature are full of numbers below 1e-308, with which processors calculate 50 times as slowly.
    torch.set_flush_denormal(True)
    words = list(sys.argv[1:] if arguments is None else arguments)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=FILE_WIDTH)
    if {"-h", "--help"} & set(words):
        print(_help())
        return 0
    try:
        return _main(words, console)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _main(words: list[str], console: Console) -> int:
    if not words or words[0] not in (*NAMES, "all"):
        got = f"got {words[0]!r}" if words else "got none"
        raise RunError(f"name one check: {', '.join(NAMES)}, or all ({got}); options follow as key=value")
    names = list(NAMES) if words[0] == "all" else [words[0]]
    # All options are read before anything runs: a mistake shows at once.
    if words[0] == "all":
        parse(Options, words[1:], "all")  # only what every check knows
    modules = [load(name) for name in names]
    prepared = [parse(options_of(module), words[1:], name) for name, module in zip(names, modules, strict=True)]
    rows: list[tuple[str, Statement]] = []
    bar_console = Console(stderr=True)
    with Progress(console=bar_console, transient=True, disable=not bar_console.is_terminal) as progress:
        bar = progress.add_task("", total=len(names))
        for name, module, options in zip(names, modules, prepared, strict=True):
            progress.update(bar, description=name)
            start = time.perf_counter()
            result = module.run(options)
            seconds = time.perf_counter() - start
            folder = write(result, name, module.TITLE, options, seconds)
            print(f"{name}: {seconds:.1f} s, {folder}", file=sys.stderr, flush=True)
            rows += [(name, statement) for statement in result.statements]
            progress.advance(bar)
    console.print(as_table(rows))
    failed = [statement for _, statement in rows if statement.holds is False]
    open_questions = sum(statement.holds is None for _, statement in rows)
    asked = len(rows) - open_questions
    console.print(f"{asked - len(failed)} of {asked} statements hold; {open_questions} numbers of open questions.")
    return 1 if failed else 0


def _help() -> str:
    """The checks and the options of each, with what they are where they are not given."""
    lines = ["usage: python -m experiments.theory NAME|all [key=value ...]", "", "checks and their options:"]
    for name in NAMES:
        module = load(name)
        lines += [f"  {name}: {module.TITLE}"]
        lines += [f"      {key}={value}" for key, value in vars(options_of(module)()).items()]
    return "\n".join(lines)


def load(name: str) -> ModuleType:
    """The module of a check. Imported by name: some load more than others need."""
    return importlib.import_module(f"{__package__}.{name}")


def options_of(module: ModuleType) -> type[Options]:
    """The class of a module's options."""
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Options) and value.__module__ == module.__name__
    ]
    assert len(found) == 1
    return found[0]


def as_table(rows: Sequence[tuple[str, Statement]]) -> Table:
    """The table of statements."""
    table = Table(title="The theory, measured", show_lines=False)
    table.add_column("check")
    table.add_column("statement", ratio=1)
    table.add_column("expected")
    table.add_column("measured", justify="right")
    table.add_column("holds")
    for name, statement in rows:
        verdict = {True: "yes", False: "NO", None: "-"}[statement.holds]
        cells = (name, statement.sentence, statement.expected, f"{statement.measured:.6g}", verdict)
        table.add_row(*(Text(cell) for cell in cells), style="bold red" if statement.holds is False else "")
    return table


if __name__ == "__main__":
    finish(main)
