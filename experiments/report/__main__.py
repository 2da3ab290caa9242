"""`python -m experiments.report PATH...`: a page, tables and pictures of the finished runs at or below some paths.

The page, index.html, is whole in itself: an overview, a view for each experiment, and one for the results of
`python -m experiments.theory`. Pictures (SVG, PDF, PNG), numbers (CSV, LaTeX) and Markdown lie beside it, those of each
experiment in a folder of its own where there are several. `--watch` writes all of it anew while runs go on.
"""

import argparse
import io
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..command import finish
from ..errors import RunError
from ..files import explain_full_disk
from .cells import Results, analyse, analyse_all
from .claims import Finding, findings
from .collect import NOT_SEARCHED, RUN_FILES, Problem, Run, collect, path_words
from .cost import TIMING
from .document import write
from .exported import export
from .page import View, result_tables, verdict_lines, write_files
from .published import load_paper, published_for
from .readme import results_table
from .site import write_site
from .sums import COLUMN_SUMS
from .tables import as_markdown, as_rich, problem_table
from .theory import NAME, RESULTS, Check, check_table, collect_checks, summary_line, write_theory

FILE_WIDTH = 160  # of tables that go to a file or a pipe, which has no width of its own
WATCHED = {*RUN_FILES, TIMING, COLUMN_SUMS, RESULTS}


def main(arguments: Sequence[str] | None = None) -> int:
    """Reports every experiment among the runs, and the theory, on one page.

    Returns:
        0, or 1 where there was neither a finished run nor a check of the theory, or the report could not be
        written; the reason goes to standard error.
    """
    parser = argparse.ArgumentParser(
        prog="python -m experiments.report",
        description="One page (index.html), pictures and tables of finished runs.",
    )
    parser.add_argument(
        "paths", nargs="*", type=Path, default=[Path("runs")], metavar="PATH", help="runs, or folders of runs (runs)"
    )
    parser.add_argument("--out", type=Path, help="folder of the report (report/ beside the runs)")
    parser.add_argument(
        "--export", type=Path, metavar="FOLDER", help="only add the runs to a CSV file for each experiment in there"
    )
    parser.add_argument("--docs", type=Path, metavar="FILE", help="only write the tables in a Markdown document anew")
    parser.add_argument("--readme", action="store_true", help="only print a table of results in Markdown")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=int,
        const=10,
        metavar="SECONDS",
        help="go on until Ctrl-C: look every so many seconds (10), write what has changed; the page reloads itself",
    )
    options = parser.parse_args(arguments)
    if options.watch is not None and options.watch < 1:
        parser.error(f"--watch needs at least 1 second; got {options.watch}")
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, width=FILE_WIDTH)
    try:
        if options.readme:
            return _readme(options.paths)
        if options.docs is not None:
            return _document(options.paths, options.docs)
        if options.export is not None:
            return _export(options.paths, options.export)
        with explain_full_disk("the page and its files are each the new one or the one before"):
            if options.watch is not None:
                return _watch(options.paths, options.out, options.watch, console)
            return _report(options.paths, options.out, console)
    except (OSError, ValueError, RunError) as error:
        print(f"no report: {error}", file=sys.stderr)
        return 1


def _document(paths: Sequence[Path], document: Path) -> int:
    runs, problems = _read(paths)
    if not runs:
        print(_nothing(paths, problems), file=sys.stderr)
        return 1
    print(f"{path_words(document)}: tables of {write(document, analyse_all(runs))} experiments")
    return 0


def _export(paths: Sequence[Path], folder: Path) -> int:
    runs, problems = _read(paths)
    if not runs:
        print(_nothing(paths, problems), file=sys.stderr)
        return 1
    for path, count in export(runs, folder).items():
        print(f"{path_words(path)}: {count} runs")
    return 0


def _report(paths: Sequence[Path], out: Path | None, console: Console, refresh: int | None = None) -> int:
    runs, problems = collect(paths)
    checks, unread = collect_checks(paths)
    if not runs and not checks and refresh is None:
        print(_nothing(paths, [*problems, *unread]), file=sys.stderr)
        return 1
    paper = load_paper()
    experiments = sorted({run.experiment for run in runs})
    single = len(experiments) + bool(checks) == 1
    parents = [run.folder.absolute().parent for run in runs] + [check.folder.absolute().parent for check in checks]
    parents = parents or [problem.folder.absolute().parent for problem in problems] or list(paths)
    folder = out or _place(parents, paths)
    views: list[tuple[View, str]] = []
    reported: list[Results] = []
    with _progress(len(experiments) + bool(checks)) as progress:
        task = progress.add_task("report", total=len(experiments) + bool(checks))
        for experiment in experiments:
            progress.update(task, description=experiment)
            ours = [run for run in runs if run.experiment == experiment]
            theirs = [problem for problem in problems if _belongs(problem, experiment, experiments)]
            results = analyse(experiment, ours, theirs)
            address = "" if single else experiment
            views.append((write_files(results, published_for(experiment, paper.results), folder / address), address))
            reported.append(results)
            progress.advance(task)
        theory = write_theory(checks, unread, folder / ("" if single else NAME)) if checks else None
    found = findings(paper.claims, reported)
    elsewhere = [
        problem for problem in problems if not any(_belongs(problem, name, experiments) for name in experiments)
    ]
    page = write_site(views, theory, found, elsewhere, folder, refresh)
    for results in reported:
        _show(console, results)
    if checks:
        _show_theory(console, checks)
    _show_claims(console, found)
    for line in _not_reported(problems, experiments):
        console.print(Text(line))
    # On a line of its own and never folded, so that it can be copied.
    console.print(Text(f"report: {path_words(page)}"), soft_wrap=True)
    return 0


def _watch(paths: Sequence[Path], out: Path | None, seconds: int, console: Console) -> int:
    """Reports whenever a file of a run has changed; ends at Ctrl-C, with a page that does not load itself again."""
    quiet = Console(file=io.StringIO())
    before: object = None
    try:
        while True:
            state = _state(paths)
            if state != before:
                before = state
                _report(paths, out, quiet, seconds)
                console.print(Text(f"{time.strftime('%H:%M:%S')}  written, {len(state)} files of runs"))
            time.sleep(seconds)
    except KeyboardInterrupt:
        return _report(paths, out, console)


def _state(paths: Sequence[Path]) -> dict[str, tuple[int, int]]:
    """Time and size of every file that the report reads."""
    found = {}
    for path in paths:
        for place, below, files in os.walk(path):
            below[:] = [name for name in below if name not in NOT_SEARCHED]
            for name in WATCHED & set(files):
                file = os.path.join(place, name)
                try:
                    status = os.stat(file)
                except OSError:
                    continue  # gone since it was listed
                found[file] = status.st_mtime_ns, status.st_size
    return found


def _read(paths: Sequence[Path]) -> tuple[list[Run], list[Problem]]:
    """What `collect` finds, with a warning for each thing that does not count.

    Raises:
        RunError: for a path at which there is nothing.
    """
    runs, problems = collect(paths)
    if missing := [problem for problem in problems if problem.state == "missing"]:
        raise RunError(f"{path_words(missing[0].folder)}: {missing[0].reason}")
    for problem in problems:
        words = f"{problem.state}: {problem.reason}"
        print(f"warning: {path_words(problem.folder)} is not in this table ({words})", file=sys.stderr)
    return runs, problems


def _readme(paths: Sequence[Path]) -> int:
    print(as_markdown(results_table(analyse_all(*_read(paths)))), end="")
    return 0


def _progress(steps: int) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal or steps == 0)


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


def _place(parents: Iterable[Path], paths: Sequence[Path]) -> Path:
    """The folder report/ beside the runs, or beside the experiments where there are several.

    Where these lie at several depths, it is in the folder that has them all, if that is among or below the given paths.

    Raises:
        ValueError: where they lie too far apart for that.
    """
    places = sorted(set(parents))
    if len(places) > 1:
        above = {place.parent for place in places}
        common = Path(os.path.commonpath(places))
        if len(above) > 1 and any(common.is_relative_to(path.absolute()) for path in paths):
            above = {common}
        if len(above) > 1:
            raise ValueError(f"what is to be reported lies in {len(places)} folders: say where with --out FOLDER")
        places = sorted(above)
    return places[0] / "report"


def _show_theory(console: Console, checks: Sequence[Check]) -> None:
    console.rule(Text("Theory"))
    for check in checks:
        console.print(as_rich(check_table(check)))
    console.print(Text(f"- {summary_line(checks)}"))


def _show_claims(console: Console, found: Sequence[Finding]) -> None:
    """The claims of which the runs say something."""
    for finding in found:
        if finding.experiment:
            console.print(Text(f"- {finding.words()}"))


def _show(console: Console, results: Results) -> None:
    console.rule(Text(results.experiment))
    for table in result_tables(results):
        console.print(as_rich(table))
    for line in verdict_lines(results):
        console.print(Text(f"- {line}"))
    if results.problems:
        console.print(as_rich(problem_table(results.problems)))


def _nothing(paths: Sequence[Path], problems: Sequence[Problem]) -> str:
    where = ", ".join(map(path_words, paths))
    if not problems:
        return f"no run under {where}: train one with python -m experiments.train experiment=mnist_patches"
    first = problems[0]
    if len(problems) == 1 and [path.absolute() for path in paths] == [first.folder.absolute()]:
        return f"{where} is no finished run ({first.state}: {first.reason})"
    count = f"{len(problems)} do not count, the first" if len(problems) > 1 else "the only one"
    return f"no finished run under {where}: {count} is {path_words(first.folder)} ({first.state}: {first.reason})"


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal without Unicode still gets its table
    finish(main)
