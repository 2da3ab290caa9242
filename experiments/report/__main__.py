"""`python -m experiments.report PATH...`: tables, pictures and a page of the finished runs at or below some paths.

Results of `python -m experiments.theory` among them get a page of their own.
"""

import argparse
import io
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from .cells import Results, analyse
from .collect import Problem, collect, path_words
from .page import result_tables, verdict_lines, write_report
from .published import load_published, published_for
from .tables import as_rich, problem_table
from .theory import NAME, Check, check_table, collect_checks, summary_line, write_theory

FILE_WIDTH = 160  # of tables that go to a file or a pipe, which has no width of its own


def main(arguments: Sequence[str] | None = None) -> int:
    """Reports every experiment among the runs, and the theory, each into a folder of its own.

    Returns:
        0, or 1 where there was neither a finished run nor a check of the theory, or the report could not be
        written; the reason goes to standard error.
    """
    parser = argparse.ArgumentParser(
        prog="python -m experiments.report",
        description="Tables (Markdown, CSV), pictures and one page (index.html) of finished runs.",
    )
    parser.add_argument(
        "paths", nargs="*", type=Path, default=[Path("runs")], metavar="PATH", help="runs, or folders of runs (runs)"
    )
    parser.add_argument("--out", type=Path, help="folder of the report (report/ beside the experiment's runs)")
    options = parser.parse_args(arguments)
    runs, problems = collect(options.paths)
    checks, unread = collect_checks(options.paths)
    if not runs and not checks:
        print(_nothing(options.paths, [*problems, *unread]), file=sys.stderr)
        return 1
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, width=FILE_WIDTH)
    published = load_published()
    experiments = sorted({run.experiment for run in runs})
    pages = len(experiments) + bool(checks)
    try:
        if checks:
            _show_theory(console, checks, write_theory(checks, unread, _theory_folder(checks, options.out, pages)))
        for experiment in experiments:
            ours = [run for run in runs if run.experiment == experiment]
            theirs = [problem for problem in problems if _belongs(problem, experiment, experiments)]
            results = analyse(experiment, ours, theirs)
            folder = _folder(results, options.out, pages)
            page = write_report(results, published_for(experiment, published), folder)
            _show(console, results, page)
        for line in _not_reported(problems, experiments):
            console.print(Text(line))
    except (OSError, ValueError) as error:
        print(f"no report: {error}", file=sys.stderr)
        return 1
    return 0


def _belongs(problem: Problem, experiment: str, experiments: Sequence[str]) -> bool:
    """Whether a problem is listed with an experiment: its own, or, where nothing tells which, with each."""
    name = problem.experiment or problem.folder.parent.name
    return name == experiment or (not problem.experiment and name not in experiments)


def _not_reported(problems: Sequence[Problem], experiments: Sequence[str]) -> list[str]:
    """A line for each experiment that has runs, but none that counts."""
    states: dict[str, Counter[str]] = {}
    for problem in problems:
        if problem.experiment and problem.experiment not in experiments:
            states.setdefault(problem.experiment, Counter())[problem.state] += 1
    counts = {name: ", ".join(f"{n} {state}" for state, n in sorted(found.items())) for name, found in states.items()}
    return [f"{name}: no run to report ({count})" for name, count in sorted(counts.items())]


def _folder(results: Results, out: Path | None, pages: int) -> Path:
    if out is not None:
        return out if pages == 1 else out / results.experiment
    parents = sorted({run.folder.absolute().parent for run in results.runs})
    if len(parents) > 1:
        raise ValueError(f"the runs of {results.experiment} lie in {len(parents)} folders: say where with --out FOLDER")
    return parents[0] / "report"


def _theory_folder(checks: Sequence[Check], out: Path | None, pages: int) -> Path:
    if out is not None:
        return out if pages == 1 else out / NAME
    parents = sorted({check.folder.absolute().parent for check in checks})
    if len(parents) > 1:
        raise ValueError(f"the checks of the theory lie in {len(parents)} folders: say where with --out FOLDER")
    return parents[0] / "report"


def _show_theory(console: Console, checks: Sequence[Check], page: Path) -> None:
    console.rule(Text("Theory"))
    for check in checks:
        console.print(as_rich(check_table(check)))
    console.print(Text(f"- {summary_line(checks)}"))
    console.print(Text(f"report: {path_words(page)}"), soft_wrap=True)


def _show(console: Console, results: Results, page: Path) -> None:
    console.rule(Text(results.experiment))
    for table in result_tables(results):
        console.print(as_rich(table))
    for line in verdict_lines(results):
        console.print(Text(f"- {line}"))
    if results.problems:
        console.print(as_rich(problem_table(results)))
    # On a line of its own and never folded, so that it can be copied.
    console.print(Text(f"report: {path_words(page)}"), soft_wrap=True)


def _nothing(paths: Sequence[Path], problems: Sequence[Problem]) -> str:
    where = ", ".join(map(path_words, paths))
    if not problems:
        return f"no run under {where}: train one with python -m experiments.train experiment=mnist_patches"
    first = problems[0]
    count = f"{len(problems)} do not count, the first" if len(problems) > 1 else "the only one"
    return f"no finished run under {where}: {count} is {path_words(first.folder)} ({first.state}: {first.reason})"


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without Unicode still gets its table
    sys.exit(main())
