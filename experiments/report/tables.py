"""The report's tables: once as words (for Markdown, the page and the terminal), once as numbers (for CSV)."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table as RichTable
from rich.text import Text

from .cells import TUNED, Cell, Contest, Filter, Measure, Results, axis_label, filter_of, place_label
from .collect import NOTHING, Problem, Quantity, Setting, path_words
from .curves import Curves, as_rows
from .statistics import PAIRS_FOR_A_BOOTSTRAP, Interval, Outcome

BUDGET = ("trainer.max_epochs", "data.batch_size", "optimizer._target_", "optimizer.lr")


@dataclass(frozen=True)
class Table:
    """A table of words.

    Attributes:
        title: its heading.
        header: the columns' names.
        rows: as many words as there are columns, in each.
        note: what has to be known to read it.
        strong: indices of rows that name a winner.
        filters: of each row what it is filtered by, one entry a row, or () for a table that no filter concerns.
        code: indices of columns that are commands.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    strong: frozenset[int] = frozenset()
    filters: tuple[Filter, ...] = ()
    code: frozenset[int] = frozenset()


def interval(bounds: Interval | None, quantity: Quantity) -> str:
    """An interval of differences."""
    if bounds is None:
        return NOTHING
    return f"[{quantity.difference(bounds.low)}, {quantity.difference(bounds.high)}]"


def cell_table(results: Results, measure: Measure) -> Table:
    """Best, median, mean, worst, standard deviation and n of each cell."""
    rows = []
    number = results.quantity.number
    for cell in results.cells:
        shown = results.shown(cell, measure)
        summary = shown.summary
        if summary is None:
            numbers = [NOTHING] * 5
            count = f"0 (+{shown.left_out} left out)"
        else:
            worst = _ending(summary.worst, results.quantity)
            numbers = [number(summary.best), number(summary.median), number(summary.mean), worst, number(summary.std)]
            count = str(summary.n) + (f" (+{shown.left_out} left out)" if shown.left_out else "")
        name = cell.attention.label
        if shown.taken_from is not None:
            name += f" (overwritten by {shown.taken_from.label})"
        rows.append((*_place(results, cell), name, count, *numbers, _stuck(cell, measure)))
    header = (*map(axis_label, results.axes), "attention", "n", "best", "median", "mean", "worst", "std", "low runs")
    title = f"Test {results.quantity.words}{results.quantity.unit}, {results.words(measure)}"
    return Table(title, header, tuple(rows), filters=tuple(filter_of(cell.attention) for cell in results.cells))


def contest_table(results: Results, measure: Measure) -> Table:
    """Each cell's difference from its baseline, paired by seed."""
    quantity = results.quantity
    contests = [contest for contest in results.contests if contest.measure is measure]
    family = contests[0].verdict.family if contests else 0
    bootstrap = any(contest.comparison.n >= PAIRS_FOR_A_BOOTSTRAP for contest in contests)
    unpaired = any(_unpaired(contest) != NOTHING for contest in contests)
    rows = []
    for contest in contests:
        comparison, verdict = contest.comparison, contest.verdict
        row = [*_place(results, contest.cell), contest.cell.attention.label]
        row += [str(comparison.n), quantity.difference(comparison.mean), interval(comparison.interval, quantity)]
        row += [interval(comparison.bootstrap, quantity)] if bootstrap else []
        row += [_p_value(verdict.adjusted_p)] if family else []
        row += [verdict_words(contest)]
        rows.append((*row, _unpaired(contest)) if unpaired else tuple(row))
    header = [*map(axis_label, results.axes), "attention", "pairs", "mean", "95 % t interval"]
    header += ["95 % bootstrap interval"] if bootstrap else []
    header += [f"Holm's p over {family}"] if family else []
    header += ["what it shows"]
    header += ["not paired"] if unpaired else []
    strong = frozenset(
        index for index, contest in enumerate(contests) if contest.verdict.outcome in (Outcome.HIGHER, Outcome.LOWER)
    )
    baselines = sorted({contest.baseline.attention.label for contest in contests})
    title = f"Difference from {' or '.join(baselines)} in {quantity.points}, {results.words(measure)}, paired by seed"
    filters = tuple(filter_of(contest.cell.attention) for contest in contests)
    return Table(title, tuple(header), tuple(rows), "", strong, filters)


def budget_table(results: Results) -> Table:
    """What each cell was given: optimizer, epochs, batch size, seeds, so that both sides can be checked by eye."""
    keys = _budget_keys(results)
    rows = []
    for cell in results.cells:
        epochs = sorted({run.last_epoch for run in cell.runs})
        best = sorted(run.best_epoch for run in cell.runs)
        row = [*_place(results, cell), cell.attention.label, *(cell.setting(key) for key in keys)]
        row += [_range(epochs), _range(best), " ".join(str(run.seed) for run in cell.runs)]
        rows.append(tuple(row))
    header = (*map(axis_label, results.axes), "attention", *map(axis_label, keys))
    filters = tuple(filter_of(cell.attention) for cell in results.cells)
    header = (*header, "last epoch", "chosen epochs", "seeds")
    return Table("Budget of each cell", header, tuple(rows), filters=filters)


def run_table(results: Results) -> Table:
    """Every run that counts, with its own numbers."""
    listed = [(cell, run) for cell in results.cells for run in cell.runs]
    rows = tuple(
        (
            *_place(results, cell),
            cell.attention.label,
            str(run.seed),
            _ending(run.chosen, results.quantity),
            str(run.best_epoch),
            _ending(run.last, results.quantity),
            str(run.last_epoch),
            run.finished or NOTHING,
        )
        for cell, run in listed
    )
    header = (
        *map(axis_label, results.axes),
        "attention",
        "seed",
        "at the chosen epoch",
        "which",
        "at the last",
        "which",
    )
    filters = tuple(filter_of(cell.attention, run.seed) for cell, run in listed)
    title = f"Test {results.quantity.words}{results.quantity.unit} of every run"
    return Table(title, (*header, "finished"), rows, filters=filters)


def problem_table(problems: Sequence[Problem]) -> Table:
    """The runs that do not count, each with its reason."""
    rows = tuple((problem.state, path_words(problem.folder), problem.reason) for problem in problems)
    return Table("Runs that do not count", ("state", "folder", "reason"), rows)


def verdict_words(contest: Contest) -> str:
    """What a comparison shows, with the winner's name where there is one."""
    match contest.verdict.outcome:
        case Outcome.HIGHER:
            return f"{contest.cell.attention.label} is higher"
        case Outcome.LOWER:
            return f"{contest.baseline.attention.label} is higher"
        case _:
            return contest.verdict.sentence


def as_markdown(table: Table) -> str:
    """The table in Markdown; a bar in a word is escaped."""
    lines = [_markdown_row(table.header), "|" + " --- |" * len(table.header)]
    lines += [_markdown_row(row, table.code) for row in table.rows]
    return f"### {table.title}\n\n" + "\n".join(lines) + "\n" + (f"\n{table.note}\n" if table.note else "")


def as_latex(table: Table) -> str:
    """The table in LaTeX, for booktabs; every sign that LaTeX takes for a command is written out."""
    lines = [f"% {' '.join(table.title.split())}", f"\\begin{{tabular}}{{{'l' * len(table.header)}}}", "\\toprule"]
    lines += [_latex_row(table.header), "\\midrule", *map(_latex_row, table.rows), "\\bottomrule", "\\end{tabular}"]
    return "\n".join(lines) + "\n"


def as_rich(table: Table) -> RichTable:
    """The table for the terminal. Words are taken literally, brackets are no markup."""
    drawn = RichTable(title=Text(table.title), title_justify="left")
    for name in table.header:
        drawn.add_column(Text(name), overflow="fold")
    for index, row in enumerate(table.rows):
        drawn.add_row(*map(Text, row), style="bold" if index in table.strong else None)
    return drawn


def cells_csv(results: Results) -> str:
    """One line per cell and measure, numbers as recorded with all digits, empty where there is none."""
    header = [*results.axes, "attention", "n_iters", "options", "measure", "n", "diverged", "low_runs", "left_out"]
    header += ["taken_from", "best", "median", "mean", "worst", "std"]
    rows = []
    for measure in results.measures:
        for cell in results.cells:
            shown = results.shown(cell, measure)
            summary = shown.summary
            row = [*cell.place, *attention_columns(cell), measure.name.lower()]
            row += [summary.n, summary.diverged] if summary else [0, 0]
            row += [len(cell.stuck(measure)), shown.left_out, shown.taken_from.label if shown.taken_from else ""]
            numbers = [summary.best, summary.median, summary.mean, summary.worst, summary.std] if summary else []
            rows.append([*row, *(map(digits, numbers) if numbers else [""] * 5)])
    return as_csv(header, rows)


def contests_csv(results: Results) -> str:
    """One line per comparison and measure, differences of the numbers as recorded, with all digits."""
    header = [*results.axes, "attention", "n_iters", "options", "baseline", "measure", "pairs", "mean", "std"]
    header += ["t_low", "t_high", "bootstrap_low", "bootstrap_high", "p", "holm_p", "family", "outcome", "seeds"]
    header += ["only_attention", "only_baseline", "other_split", "diverged"]
    rows = []
    for contest in results.contests:
        comparison, verdict = contest.comparison, contest.verdict
        row: list[object] = [*contest.cell.place, *attention_columns(contest.cell), contest.baseline.attention.label]
        row += [contest.measure.name.lower(), comparison.n, digits(comparison.mean), digits(comparison.std)]
        for bounds in (comparison.interval, comparison.bootstrap):
            row += [digits(bounds.low), digits(bounds.high)] if bounds else ["", ""]
        row += [digits(comparison.p_value), digits(verdict.adjusted_p), verdict.family, verdict.outcome.name.lower()]
        lists = (comparison.seeds, comparison.only_candidate, comparison.only_baseline, comparison.other_split)
        rows.append([*row, *(" ".join(map(str, seeds)) for seeds in (*lists, comparison.diverged))])
    return as_csv(header, rows)


def curves_csv(results: Results, curves: Sequence[Curves]) -> str:
    """One line per cell and epoch: quartiles over the cell's runs of what is drawn, with all digits."""
    header = [*results.axes, "attention", "n_iters", "options", "split", "epoch", "n", "first_quartile", "median"]
    rows = [
        [*curve.cell.place, *attention_columns(curve.cell), group.split, epoch, n, *map(digits, quartiles)]
        for group, curve, epoch, n, quartiles in as_rows(curves)
    ]
    return as_csv([*header, "third_quartile"], rows)


def runs_csv(results: Results) -> str:
    """One line per run that counts, the numbers as in its result.json."""
    header = [*results.axes, "attention", "n_iters", "options", "seed", "split", "best_epoch", "last_epoch"]
    header += [f"{results.quantity.name}_chosen", f"{results.quantity.name}_last", "finished", "folder"]
    rows = []
    for cell in results.cells:
        for run in cell.runs:
            row: list[object] = [*cell.place, *attention_columns(cell), run.seed, run.split or "", run.best_epoch]
            rows.append([*row, run.last_epoch, repr(run.chosen), repr(run.last), run.finished, path_words(run.folder)])
    return as_csv(header, rows)


def _place(results: Results, cell: Cell) -> list[str]:
    return [place_label(axis, value) for axis, value in zip(results.axes, cell.place, strict=True)]


def attention_columns(cell: Cell) -> list[object]:
    """A cell's normalizer, number of half-steps and options, as files have them."""
    attention = cell.attention
    options = " ".join(f"{name}={value}" for name, value in attention.options)
    return [attention.name, "" if attention.n_iters is None else attention.n_iters, options]


def _stuck(cell: Cell, measure: Measure) -> str:
    stuck = cell.stuck(measure)
    return ", ".join(f"seed {run.seed}: {_ending(measure.of(run), run.quantity)}" for run in stuck) or "0"


def _ending(value: float, quantity: Quantity) -> str:
    return quantity.number(value) if math.isfinite(value) else "diverged"


def _unpaired(contest: Contest) -> str:
    comparison = contest.comparison
    parts = [
        (comparison.only_candidate, f"only {contest.cell.attention.label}"),
        (comparison.only_baseline, f"only {contest.baseline.attention.label}"),
        (comparison.other_split, "other or unknown split"),
    ]
    words = [f"seed {', '.join(map(str, seeds))}: {why}" for seeds, why in parts if seeds]
    return "; ".join(words) if words else NOTHING


def _p_value(value: float) -> str:
    if math.isnan(value):
        return NOTHING
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def _budget_keys(results: Results) -> list[str]:
    """What is always shown of a budget, and every other setting of the optimizer that is not the same throughout."""
    seen: dict[str, set[Setting]] = {}
    for run in results.runs:
        for key, value in run.settings.items():
            seen.setdefault(key, set()).add(value)
    varying = [key for key in sorted(seen) if key.startswith(TUNED) and len(seen[key]) > 1 and key not in BUDGET]
    return [key for key in (*BUDGET, *varying) if key in seen and key not in results.axes]


def _range(values: Sequence[int]) -> str:
    return str(values[0]) if values[0] == values[-1] else f"{values[0]}–{values[-1]}"


def digits(value: float) -> str:
    """A number with all its digits, empty where it is none."""
    return repr(value) if math.isfinite(value) else ""


def _markdown_row(words: Sequence[str], code: frozenset[int] = frozenset()) -> str:
    cells = []
    for column, word in enumerate(words):
        plain = " ".join(word.split())
        # In code only the bar of the table needs a backslash; a backquote would end it.
        as_code = column in code and plain != NOTHING and "`" not in plain
        cells.append("`" + plain.replace("|", "\\|") + "`" if as_code else _literal(plain))
    return "| " + " | ".join(cells) + " |"


LATEX = str.maketrans(
    {sign: f"\\{sign}" for sign in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--", "−": "$-$"}
    | {"<": "$<$", ">": "$>$", "±": r"$\pm$", "≤": r"$\leq$", "≥": r"$\geq$"}
)


def _latex_row(words: Sequence[str]) -> str:
    return " & ".join(" ".join(word.split()).translate(LATEX) for word in words) + r" \\"


def _literal(word: str) -> str:
    for sign, written in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;"), ("*", "\\*"), ("_", "\\_"), ("`", "\\`")):
        word = word.replace(sign, written)
    return word


def as_csv(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows of values as a CSV file."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return buffer.getvalue()
