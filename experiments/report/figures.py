"""The picture of an experiment: its metric by the swept axis, a line with its band per attention, runs as dots."""

import html
import io
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from .cells import Attention, Cell, Filter, Measure, Results, Shown, axis_label, filter_of, place_label
from .collect import Quantity, Setting

# Okabe and Ito's colours, which stay apart for the common kinds of colour blindness, without the yellow that vanishes
# on white; markers differ too, so that lines are told apart without colour. The baseline takes the ink's own colour.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
INK = "#1b1e23"
STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 11.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "sinkformer-suite",
    "pdf.fonttype": 42,  # letters stay letters: journals refuse outlines of Type 3
}
MARK = "mark"
LONGEST = 60


def draw(results: Results, measure: Measure) -> Figure:
    """Draws a measure of all cells.

    One panel per combination of the axes after the first; in each, the first axis from left to right at even distances
    (or the attentions side by side where nothing was swept). Lines join the means over seeds, bands reach from the
    worst to the best run, and each run is a dot: runs that got stuck are seen. A cross at the lower edge stands for a
    run that diverged.
    """
    with rc_context(STYLE):
        panels = sorted({cell.place[1:] for cell in results.cells}, key=str)
        columns = min(len(panels), 2)
        rows = -(-len(panels) // columns)
        figure = Figure(figsize=(6.4 * columns, 4.3 * rows), dpi=160, layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for index, axes in enumerate(grid.flat):
            if index >= len(panels):
                axes.set_visible(False)
                continue
            cells = [cell for cell in results.cells if cell.place[1:] == panels[index]]
            _panel(axes, cells, results, measure)
            rest = zip(results.axes[1:], panels[index], strict=True)
            axes.set_title(
                plain(", ".join(f"{axis_label(axis)} {place_label(axis, value)}" for axis, value in rest)), fontsize=11
            )
        for axes in grid[:, 0]:
            axes.set_ylabel(f"test {results.quantity.words}")
        figure.suptitle(results.words(measure), fontsize=11)
        handles, labels = grid[0, 0].get_legend_handles_labels()
        for axes in grid.flat:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                if label not in labels:
                    handles.append(handle)
                    labels.append(label)
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, borderaxespad=0.0)
        # Laid out once: saving at another resolution would lay it out again and push legend and panels apart.
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        return figure


def svg(figure: Figure, title: str, description: str) -> str:
    """The figure as an SVG element whose ink follows the page's text colour; the words are for screen readers."""
    with rc_context(STYLE):
        buffer = io.StringIO()
        metadata = {"Date": None, "Title": title, "Description": description}
        figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    text = _with_marks(buffer.getvalue())
    return text[text.index("<svg") :].replace(INK, "currentColor")


def svg_file(figure: Figure) -> str:
    """The figure as an SVG file of its own."""
    with rc_context(STYLE):
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None}, facecolor="white")
    return _with_marks(buffer.getvalue())


def pdf(figure: Figure) -> bytes:
    """The figure as a PDF file, for a paper; the same figure always gives the same bytes."""
    with rc_context(STYLE):
        buffer = io.BytesIO()
        metadata = {"CreationDate": None, "Producer": None, "Creator": None}
        figure.savefig(buffer, format="pdf", facecolor="white", metadata=metadata)
    return buffer.getvalue()


def png(figure: Figure) -> bytes:
    """The figure as a PNG file with a white ground."""
    with rc_context(STYLE):
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def _panel(axes: Axes, cells: Sequence[Cell], results: Results, measure: Measure) -> None:
    attentions = results.attentions
    swept = bool(results.axes)
    places: list[Setting] = []
    for cell in results.cells:
        if swept and cell.place[0] not in places:
            places.append(cell.place[0])
    width = 0.5 if len(places) > 1 else 0.7
    for index, attention in enumerate(attentions):
        ours = [cell for cell in cells if cell.attention == attention]
        if not ours:
            continue
        colour = INK if index == 0 else COLOURS[(index - 1) % len(COLOURS)]
        shift = (index - (len(attentions) - 1) / 2) * width / max(len(attentions), 2) if swept else float(index)
        x = [(places.index(cell.place[0]) if swept else 0) + shift for cell in ours]
        shown = [results.shown(cell, measure) for cell in ours]
        marker = MARKERS[index % len(MARKERS)]
        _line(axes, x, [numbers.values for numbers in shown], colour, marker, attention, _ordered(places))
        _dots(axes, x, shown, colour, marker, attention, results.quantity)
    if swept:
        axes.set_xticks(range(len(places)), [plain(place_label(results.axes[0], place)) for place in places])
        axes.set_xlabel(plain(axis_label(results.axes[0])))
        axes.set_xlim(-0.6, len(places) - 0.4)
    else:
        axes.set_xticks(range(len(attentions)), [plain(attention.label) for attention in attentions])
        axes.set_xlim(-0.6, len(attentions) - 0.4)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    if results.quantity.top == 1:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    axes.grid(axis="y", color="#8a8f98", alpha=0.3, linewidth=0.6)


def _ordered(places: Sequence[Setting]) -> bool:
    """Whether there is something between one place and the next, as between numbers; data sets have no such order."""
    return all(isinstance(place, int | float) and not isinstance(place, bool) for place in places)


def _line(
    axes: Axes,
    x: list[float],
    values: Sequence[Sequence[float]],
    colour: str,
    marker: str,
    attention: Attention,
    joined: bool,
) -> None:
    finite = [[value for value in numbers if math.isfinite(value)] for numbers in values]
    filled = [(place, numbers) for place, numbers in zip(x, finite, strict=True) if numbers]
    at = [place for place, _ in filled]
    low, high = [min(numbers) for _, numbers in filled], [max(numbers) for _, numbers in filled]
    means = [sum(numbers) / len(numbers) for _, numbers in filled]
    belongs = filter_of(attention)
    if joined:
        mark(axes.fill_between(at, low, high, color=colour, alpha=0.14, linewidth=0), belongs)
    mark(axes.vlines(at, low, high, color=colour, alpha=0.45, linewidth=1.2), belongs)
    style: dict[str, Any] = {"color": colour, "linestyle": "-" if joined else "none"}
    (line,) = axes.plot(at, means, marker=marker, markersize=7, linewidth=1.8, **style)
    line.set_label(plain(attention.label))
    mark(line, belongs)
    lost = [place for place, numbers, kept in zip(x, values, finite, strict=True) if len(kept) < len(numbers)]
    if lost:  # a line without points would still be given room by the layout
        style = {"color": colour, "transform": axes.get_xaxis_transform(), "clip_on": False}
        mark(axes.plot(lost, [0.02] * len(lost), "x", **style)[0], belongs)


def _dots(
    axes: Axes,
    x: list[float],
    shown: Sequence[Shown],
    colour: str,
    marker: str,
    attention: Attention,
    quantity: Quantity,
) -> None:
    """Each run as a dot of its own, which can be hidden and tells its number."""
    for place, numbers in zip(x, shown, strict=True):
        for value, seed in zip(numbers.values, numbers.seeds, strict=True):
            if math.isfinite(value):
                dot = axes.scatter([place], [value], s=14, marker=marker, color=colour, alpha=0.55, linewidth=0)
                words = f"{attention.label}, seed {seed}: {quantity.number(value)}"
                mark(dot, filter_of(attention, seed), words)


def mark(artist: Artist, belongs: Filter, words: str = "") -> None:
    """Says what a part of a picture belongs to, by which the page hides it, and what it tells under the pointer."""
    # In hexadecimal digits, which no way of quoting can change.
    artist.set_gid(MARK + json.dumps([dict(belongs), words]).encode().hex())


def _with_marks(text: str) -> str:
    """An SVG in which marks have become data attributes and titles, escaped."""

    def write(match: re.Match[str]) -> str:
        belongs, words = json.loads(bytes.fromhex(match[1]))
        attributes = "".join(f' data-{key}="{html.escape(value)}"' for key, value in belongs.items())
        return f"<g{attributes}>" + (f"<title>{html.escape(words)}</title>" if words else "")

    # Several pictures on a page: names that only matplotlib knows would be there several times.
    return re.sub(r'<g id="[A-Za-z0-9]+_\d+">', "<g>", re.sub(rf'<g id="{MARK}([0-9a-f]+)">', write, text))


def plain(text: str) -> str:
    """A name as it can stand in a picture: a dollar sign in it is no mathematics, and it leaves room for the axes."""
    return (text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…").replace("$", r"\$")
