"""The files of one experiment (Markdown, CSV, LaTeX, pictures), and what the page shows of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from markupsafe import Markup
from matplotlib.figure import Figure

from ..files import write_atomic
from . import cost, curves, figures, sums, tables
from .cells import FAR_BELOW, Cell, Measure, Results, axis_label, filter_of, place_label
from .collect import CONFIG, Run, path_words
from .counterpart import published_table
from .curves import read_curves
from .published import PublishedResult
from .statistics import PAIRS_FOR_A_BOOTSTRAP, PAIRS_FOR_A_WINNER, Outcome

IMAGES: dict[str, Callable[[Figure], str | bytes]] = {
    "svg": figures.svg_file,
    "pdf": figures.pdf,
    "png": figures.png,
}


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
    config: str
    filters: tables.Filter


@dataclass(frozen=True)
class View:
    """What the page shows of an experiment.

    Attributes:
        results: its cells and comparisons.
        published: the published counterparts.
        machines: where and when the runs were made, in words.
        protocol_words: the published treatment of the numbers, or "".
        verdicts: what the runs show, in sentences.
        pictures: captions and inline SVG.
        numbers: tables, in the order of reading.
        protocol: how to read them.
        published_table: the published numbers.
        runs: every run that counts.
        problems: those that do not.
        files: names of the files beside the page.
        steps: the values of the filter by half-steps, in the attentions' order, each with its words.
        seeds: the values of the filter by seed.
    """

    results: Results
    published: tuple[PublishedResult, ...]
    machines: str
    protocol_words: str
    verdicts: list[str]
    pictures: list[tuple[str, Markup]]
    numbers: list[tables.Table]
    protocol: list[str]
    published_table: tables.Table
    runs: list[RunWords]
    problems: tables.Table
    files: list[str]
    steps: dict[str, str]
    seeds: list[str]


def write_files(results: Results, published: Sequence[PublishedResult], folder: Path) -> View:
    """Writes all files of an experiment's report but the page.

    Args:
        results: the experiment's cells and comparisons, at least one cell.
        published: the published counterparts.
        folder: made where it is not there; files of an older report are replaced.

    Raises:
        OSError: where the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, str | bytes] = {}
    pictures = []

    def add(figure: Figure, stem: str, what: str, caption: str) -> None:
        pictures.append((caption, Markup(figures.svg(figure, f"{results.experiment}, {what}", caption))))
        files.update({f"{stem}.{ending}": save(figure) for ending, save in IMAGES.items()})

    for measure in results.measures:
        stem = f"{results.quantity.name}_{measure.name.lower()}"
        add(figures.draw(results, measure), stem, results.words(measure), _caption(results, measure))
    drawn = read_curves(results)
    for group in drawn:
        add(curves.draw(group, results), f"curves_{group.split}", group.quantity, group.caption())
    recorded = sums.cell_sums(results)
    if recorded:
        caption = (
            "Column sums of the attention maps over what a doubly stochastic map would have, sorted, by epoch: mean of "
            "the runs."
        )
        add(sums.draw(recorded, results), "column_sums", "column sums", caption)
        files["column_sums.csv"] = sums.sums_csv(recorded, results)
    if drawn:
        files["curves.csv"] = tables.curves_csv(results, drawn)
    costs = cost.cost_table(results)
    if costs.rows:
        files["cost.csv"] = cost.cost_csv(results)
    files["cells.csv"] = tables.cells_csv(results)
    files["differences.csv"] = tables.contests_csv(results)
    files["runs.csv"] = tables.runs_csv(results)
    shown = result_tables(results)
    shown += [sums.sums_table(recorded, results)] if recorded else []
    shown += [costs] if costs.rows else []
    files["tables.tex"] = "\n".join(map(tables.as_latex, shown))
    files["report.md"] = _markdown(results, published, shown)
    for name, content in files.items():
        # A lone surrogate from a damaged file is no character; it is spelt out rather than refused.
        write_atomic(
            folder / name, content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
        )
    return View(
        results=results,
        published=tuple(published),
        machines=_machines(results.runs),
        protocol_words=results.protocol.words() if results.protocol else "",
        verdicts=verdict_lines(results),
        pictures=pictures,
        numbers=[*shown, tables.run_table(results)],
        protocol=protocol_lines(results),
        published_table=published_table(published, results),
        runs=[_run_words(results, cell, run) for cell in results.cells for run in cell.runs],
        problems=tables.problem_table(results.problems),
        files=sorted(files),
        steps={filter_of(attention)["n-iters"]: attention.steps for attention in results.attentions},
        seeds=[str(seed) for seed in sorted({run.seed for run in results.runs})],
    )


def result_tables(results: Results) -> list[tables.Table]:
    """The tables of numbers, in the order in which they are read."""
    drawn = []
    for measure in results.measures:
        drawn.append(tables.cell_table(results, measure))
        if any(contest.measure is measure for contest in results.contests):
            drawn.append(tables.contest_table(results, measure))
    return [*drawn, tables.budget_table(results)]


def verdict_lines(results: Results) -> list[str]:
    """What is shown at the chosen epoch: one sentence for each attention, its places grouped by outcome."""
    contests = [contest for contest in results.contests if contest.measure is Measure.CHOSEN]
    quantity = results.quantity
    points = "points" if quantity.scale != 1 else quantity.points
    lines = []
    for attention in results.attentions:
        ours = [contest for contest in contests if contest.cell.attention == attention]
        grouped: dict[str, list[str]] = {}
        for contest in ours:
            comparison = contest.comparison
            words = tables.verdict_words(contest)
            place = ", ".join(_places(results, contest.cell))
            if contest.verdict.outcome in (Outcome.HIGHER, Outcome.LOWER):
                interval = tables.interval(comparison.interval, quantity)
                place += f" ({quantity.difference(comparison.mean)} {points}, {interval})"
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
    if damaged := curves.without_rows(run for cell in results.cells for run in cell.runs):
        names = ", ".join(folder.name for folder in damaged[:3]) + ", …" * (len(damaged) > 3)
        lines.append(
            f"Of {len(damaged)} runs metrics.jsonl is empty or damaged ({names}): their numbers are those of "
            "result.json."
        )
    return lines


def protocol_lines(results: Results) -> list[str]:
    """How the numbers came about, and by which rule a winner is named."""
    family = max((contest.verdict.family for contest in results.contests), default=0)
    left_out = "what the published protocol leaves of them" if results.protocol else "all of them: none is left out"
    rules = {(run.selected_on, run.selected_by) for run in results.runs}
    selection = ", ".join(sorted(f"by the {metric} of {split}" for split, metric in rules))
    quantity = results.quantity
    far = f"{quantity.scale * FAR_BELOW * quantity.top:.0f} {'points' if quantity.scale != 1 else quantity.points}"
    return [
        f"Numbers are {quantity.words} on the test set, {results.words(Measure.CHOSEN)} ({selection}), "
        "and, apart from it, at the last epoch.",
        "A cell's runs differ in their seed alone. Best, median, mean, worst and standard deviation (n − 1) are over "
        f"{left_out}. A run that diverged counts in n and ranks below every other.",
        f"Low runs diverged or ended more than {far} under the median of their cell's runs.",
        "Differences are paired by seed, on equal data splits only, with a 95 % t interval of the mean difference; a "
        f"BCa bootstrap interval stands beside it from {PAIRS_FOR_A_BOOTSTRAP} pairs on.",
        f"A winner is named only with {PAIRS_FOR_A_WINNER} pairs or more, a t interval without zero, and a p value "
        f"below 0.05 after Holm's correction over the comparisons of a table that could name one ({family} "
        "here). No difference shown does not mean that there is none.",
    ]


def _markdown(results: Results, published: Sequence[PublishedResult], shown: Sequence[tables.Table]) -> str:
    parts = [f"# {results.experiment}", _machines(results.runs)]
    if results.protocol:
        parts.append(f"**Protocol of the published code.** {results.protocol.words()}")
    parts.append("\n".join(f"- {line}" for line in verdict_lines(results)))
    parts += [tables.as_markdown(table) for table in shown]
    parts.append("### How to read this\n\n" + "\n".join(f"- {line}" for line in protocol_lines(results)))
    if published:
        parts.append(tables.as_markdown(published_table(published, results)))
    if results.problems:
        parts.append(tables.as_markdown(tables.problem_table(results.problems)))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _caption(results: Results, measure: Measure) -> str:
    by = f" by {axis_label(results.axes[0])}" if results.axes else ""
    caption = f"Test {results.quantity.words}{by}, {results.words(measure)}: "
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
    number, percent = results.quantity.number, " %" if results.quantity.scale == 100 else ""
    facts = [
        ("folder", path_words(run.folder)),
        (
            f"test {results.quantity.words}",
            f"{run.chosen!r} at epoch {run.best_epoch}, {run.last!r} at epoch {run.last_epoch} (the last)",
        ),
        ("data split", run.split or "not recorded"),
        ("finished", run.finished or "not recorded"),
        ("machine", "; ".join(sorted({_machine(attempt) for attempt in attempts})) or "not recorded"),
        ("attempts", str(len(attempts))),
        ("commit", f"{git.get('commit')}{' with changes' if git.get('dirty') else ''}" if git else "not recorded"),
        ("versions", _pairs(card.get("versions"))),
    ]
    title = f"{cell.attention.label} {_where(results, cell)}".strip() + f", seed {run.seed}: "
    title += f"{number(run.chosen)}{percent}, last epoch {number(run.last)}{percent}"
    return RunWords(
        folder=path_words(run.folder),
        seed=run.seed,
        chosen=repr(run.chosen),
        last=repr(run.last),
        title=title,
        command=str(card.get("command", "not recorded")),
        facts=tuple(facts),
        config=_config(run),
        filters=filter_of(cell.attention, run.seed),
    )


def _config(run: Run) -> str:
    """The resolved configuration as its file has it; where that cannot be read, the part that the run card holds."""
    try:
        return (run.folder / CONFIG).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return yaml.safe_dump(run.card.get("identity"), sort_keys=False, allow_unicode=True)


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
