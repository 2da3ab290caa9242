"""Writes the report of one experiment: index.html, Markdown, CSV and pictures, each file at once or not at all."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ..files import write_atomic
from . import curves, figures, tables
from .cells import FAR_BELOW, Cell, Measure, Results, axis_label, place_label
from .collect import Run, path_words
from .curves import read_curves
from .published import PublishedResult
from .statistics import PAIRS_FOR_A_BOOTSTRAP, PAIRS_FOR_A_WINNER, Outcome

PAGE = "index.html"


@dataclass(frozen=True)
class RunWords:
    """A run as the page lists it; `chosen` and `last` with all digits of its result.json."""

    folder: str
    seed: int
    chosen: str
    last: str
    title: str
    command: str
    facts: tuple[tuple[str, str], ...]


def write_report(results: Results, published: Sequence[PublishedResult], folder: Path) -> Path:
    """Writes all files of an experiment's report.

    Args:
        results: the experiment's cells and comparisons, at least one cell.
        published: the published counterparts.
        folder: made where it is not there; files of an older report are replaced.

    Returns:
        The path of `index.html`, which is written last.

    Raises:
        OSError: where the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str | bytes] = {}
    pictures = []
    for measure in Measure:
        figure = figures.draw(results, measure)
        stem = f"accuracy_{measure.name.lower()}"
        caption = _caption(results, measure)
        pictures.append(
            (caption, Markup(figures.svg(figure, f"{results.experiment}, {results.words(measure)}", caption)))
        )
        files[f"{stem}.svg"] = figures.svg_file(figure)
        files[f"{stem}.png"] = figures.png(figure)
    drawn = read_curves(results)
    for group in drawn:
        figure, stem = curves.draw(group, results), f"curves_{group.split}"
        pictures.append(
            (group.caption(), Markup(figures.svg(figure, f"{results.experiment}, {group.quantity}", group.caption())))
        )
        files[f"{stem}.svg"] = figures.svg_file(figure)
        files[f"{stem}.png"] = figures.png(figure)
    if drawn:
        files["curves.csv"] = tables.curves_csv(results, drawn)
    files["cells.csv"] = tables.cells_csv(results)
    files["differences.csv"] = tables.contests_csv(results)
    files["runs.csv"] = tables.runs_csv(results)
    files["report.md"] = _markdown(results, published)
    files[PAGE] = _page(results, published, pictures, sorted(files))
    for name, content in files.items():
        # A lone surrogate from a damaged file is no character; it is spelt out rather than refused.
        write_atomic(
            folder / name, content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
        )
    return folder / PAGE


def result_tables(results: Results) -> list[tables.Table]:
    """The tables of numbers, in the order in which they are read."""
    drawn = []
    for measure in Measure:
        drawn.append(tables.cell_table(results, measure))
        if any(contest.measure is measure for contest in results.contests):
            drawn.append(tables.contest_table(results, measure))
    return [*drawn, tables.budget_table(results)]


def verdict_lines(results: Results) -> list[str]:
    """What is shown at the chosen epoch: one sentence for each attention, its places grouped by outcome."""
    contests = [contest for contest in results.contests if contest.measure is Measure.CHOSEN]
    lines = []
    for attention in results.attentions:
        ours = [contest for contest in contests if contest.cell.attention == attention]
        grouped: dict[str, list[str]] = {}
        for contest in ours:
            comparison = contest.comparison
            words = tables.verdict_words(contest)
            place = ", ".join(_places(results, contest.cell))
            if contest.verdict.outcome in (Outcome.HIGHER, Outcome.LOWER):
                place += f" ({tables.points(comparison.mean)} points, {tables.interval(comparison.interval)})"
            grouped.setdefault(words, []).append(place)
        if ours:
            baselines = " and ".join(sorted({contest.baseline.attention.label for contest in ours}))
            at = f" at {axis_label(results.axes[0])} " if results.axes else ""
            said = "; ".join(f"{words}{at}{', '.join(places)}" for words, places in grouped.items())
            lines.append(f"{attention.label} against {baselines}: {said}.")
    if results.alone:
        cells = "; ".join(f"{cell.attention.label} {_where(results, cell)}".strip() for cell in results.alone)
        lines.append(f"No softmax runs to compare with: {cells}.")
    if len({cell.attention for cell in results.cells}) == 1 and not results.alone:
        lines.append(f"Only {results.attentions[0].label} was run: there is nothing to compare.")
    return lines


def protocol_lines(results: Results) -> list[str]:
    """How the numbers came about, and by which rule a winner is named."""
    family = max((contest.verdict.family for contest in results.contests), default=0)
    left_out = "what the published protocol leaves of them" if results.protocol else "all of them: none is left out"
    rules = {(run.selected_on, run.selected_by) for run in results.runs}
    selection = ", ".join(sorted(f"by the {metric} of {split}" for split, metric in rules))
    return [
        f"Accuracies are on the test set, {results.words(Measure.CHOSEN)} ({selection}), "
        "and, apart from it, at the last epoch.",
        "A cell's runs differ in their seed alone. Best, median, mean, worst and standard deviation (n − 1) are over "
        f"{left_out}. A run that diverged counts in n and ranks below every other.",
        f"Low runs diverged or ended more than {100 * FAR_BELOW:.0f} points under the median of their cell's runs.",
        "Differences are paired by seed, on equal data splits only, with a 95 % t interval of the mean difference; a "
        f"BCa bootstrap interval stands beside it from {PAIRS_FOR_A_BOOTSTRAP} pairs on.",
        f"A winner is named only with {PAIRS_FOR_A_WINNER} pairs or more, a t interval without zero, and a p value "
        f"below 0.05 after Holm's correction over the comparisons of a table that could name one ({family} "
        "here). No difference shown does not mean that there is none.",
    ]


def _page(
    results: Results, published: Sequence[PublishedResult], pictures: Sequence[tuple[str, Markup]], files: list[str]
) -> str:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja").render(
        results=results,
        machines=_machines(results.runs),
        protocol_words=results.protocol.words() if results.protocol else "",
        verdicts=verdict_lines(results),
        pictures=pictures,
        tables=result_tables(results),
        protocol=protocol_lines(results),
        published=tables.published_table(published),
        runs=[_run_words(results, cell, run) for cell in results.cells for run in cell.runs],
        problems=tables.problem_table(results),
        files=files,
    )


def _markdown(results: Results, published: Sequence[PublishedResult]) -> str:
    parts = [f"# {results.experiment}", _machines(results.runs)]
    if results.protocol:
        parts.append(f"**Protocol of the published code.** {results.protocol.words()}")
    parts.append("\n".join(f"- {line}" for line in verdict_lines(results)))
    parts += [tables.as_markdown(table) for table in result_tables(results)]
    parts.append("### How to read this\n\n" + "\n".join(f"- {line}" for line in protocol_lines(results)))
    if published:
        parts.append(tables.as_markdown(tables.published_table(published)))
    if results.problems:
        parts.append(tables.as_markdown(tables.problem_table(results)))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _caption(results: Results, measure: Measure) -> str:
    by = f" by {axis_label(results.axes[0])}" if results.axes else ""
    caption = f"Test accuracy{by}, {results.words(measure)}: "
    caption += "mean of the seeds (line), worst to best run (band), each run (dot)."
    if any(cell.summary(measure).diverged for cell in results.cells):
        caption += " A cross at the lower edge: a run diverged; the mean is then that of the others."
    if results.protocol:
        caption += f" {results.protocol.words()}"
    return caption


def _places(results: Results, cell: Cell) -> list[str]:
    """A cell's place in words: the first axis by its value alone, the others by name and value."""
    words = [place_label(axis, value) for axis, value in zip(results.axes, cell.place, strict=True)]
    names = ["", *(f"{axis_label(axis)} " for axis in results.axes[1:])]
    return [name + word for name, word in zip(names, words, strict=False)]


def _where(results: Results, cell: Cell) -> str:
    return f"at {axis_label(results.axes[0])} {', '.join(_places(results, cell))}" if results.axes else ""


def _run_words(results: Results, cell: Cell, run: Run) -> RunWords:
    card = run.card
    attempts = [attempt for attempt in card.get("attempts") or [] if isinstance(attempt, Mapping)]
    git = card.get("git") if isinstance(card.get("git"), Mapping) else None
    facts = [
        ("folder", path_words(run.folder)),
        (
            "test accuracy",
            f"{run.chosen!r} at epoch {run.best_epoch}, {run.last!r} at epoch {run.last_epoch} (the last)",
        ),
        ("data split", run.split or "not recorded"),
        ("finished", run.finished or "not recorded"),
        ("machine", "; ".join(sorted({_machine(attempt) for attempt in attempts})) or "not recorded"),
        ("attempts", str(len(attempts))),
        ("commit", f"{git.get('commit')}{' with changes' if git.get('dirty') else ''}" if git else "not recorded"),
        ("versions", _pairs(card.get("versions"))),
        ("configuration", _pairs(run.settings)),
    ]
    title = f"{cell.attention.label} {_where(results, cell)}".strip() + f", seed {run.seed}: "
    title += f"{tables.percent(run.chosen)} %, last epoch {tables.percent(run.last)} %"
    chosen, last = repr(run.chosen), repr(run.last)
    command = str(card.get("command", "not recorded"))
    return RunWords(path_words(run.folder), run.seed, chosen, last, title, command, tuple(facts))


def _machines(runs: Sequence[Run]) -> str:
    """Where and when the runs were made."""
    attempts = [a for run in runs for a in run.card.get("attempts") or [] if isinstance(a, Mapping)]
    machines = "; ".join(sorted({_machine(attempt) for attempt in attempts}))
    days = sorted({run.finished[:10] for run in runs if run.finished})
    when = f"Finished {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else "") if days else "Dates not recorded"
    return f"{when}, on {machines or 'a machine that was not recorded'}."


def _machine(attempt: Mapping[str, object]) -> str:
    devices = attempt.get("devices")
    names = ", ".join(map(str, devices)) if isinstance(devices, list) else str(devices)
    threads = attempt.get("threads")
    return f"{attempt.get('host')} ({names}; {threads} thread{'' if threads == 1 else 's'}; {attempt.get('platform')})"


def _pairs(mapping: object) -> str:
    if not isinstance(mapping, Mapping):
        return "not recorded"
    return ", ".join(f"{key}={value}" for key, value in mapping.items())
