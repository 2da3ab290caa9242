"""One matrix of scores under several normalisations, with the sums of rows and columns (figure 1 of the paper)."""

import argparse

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sinkhorn_attention import sinkhorn
from sinkhorn_attention.reference import sinkhorn_reference
from torch import Tensor

from ..errors import RunError
from ..seeding import generator
from .base import COLOURS, Drawn, styled

TITLE = "Comparison of normalisations on one matrix of scores (figure 1)"
CONVERGED = 2001


def add_options(parser: argparse.ArgumentParser) -> None:
    """The figure's options."""
    parser.add_argument("--tokens", type=int, default=10, help="number of queries, and of keys (default: 10)")
    parser.add_argument("--spread", type=float, default=1.5, help="standard deviation of the points (default: 1.5)")
    parser.add_argument("--n-iters", type=int, default=3, help="half-steps of the middle Sinkhorn panel (default: 3)")
    parser.add_argument("--seed", type=int, default=4)


def maps(scores: Tensor, n_iters: int) -> dict[str, Tensor]:
    """The normalisations of a square matrix of scores (n, n), float64, each with total mass n.

    Returns:
        In words: exp(scores) as it is, divided by its mean row sum; softmax; Sinkhorn after `n_iters` half-steps; and
        Sinkhorn at convergence.
    """
    kernel = (scores - scores.max()).exp()
    return {
        "no normalisation": kernel * len(scores) / kernel.sum(),
        "softmax (1 half-step)": sinkhorn_reference(scores, 1),
        f"Sinkhorn, {n_iters} half-steps": sinkhorn(scores, n_iters),
        "Sinkhorn at convergence": sinkhorn_reference(scores, CONVERGED),
    }


def draw(options: argparse.Namespace) -> Drawn:
    """Draws the maps side by side, the sums of their rows at the right and those of their columns below.

    Raises:
        RunError: for an option out of range.
    """
    if options.tokens < 2 or options.n_iters < 1 or not options.spread > 0:
        raise RunError("--tokens must be at least 2, --n-iters at least 1, --spread positive")
    random = generator("figure-normalizations", options.seed)
    query, key = (
        options.spread * torch.randn(options.tokens, 2, generator=random, dtype=torch.float64) for _ in range(2)
    )
    drawn = maps(query @ key.T, options.n_iters)
    with styled():
        figure = Figure(figsize=(3.1 * len(drawn), 3.5), layout="constrained")
        panels = figure.subplots(1, len(drawn))
        for axes, (name, coupling) in zip(panels, drawn.items(), strict=True):
            _panel(axes, name, coupling.numpy())
        panels[0].set_ylabel("query")
    rows = [
        (name, i, j, repr(float(coupling[i, j])))
        for name, coupling in drawn.items()
        for i in range(options.tokens)
        for j in range(options.tokens)
    ]
    words = "; ".join(
        f"{name}: row sums {_range(coupling.sum(1))}, column sums {_range(coupling.sum(0))}"
        for name, coupling in drawn.items()
    )
    return Drawn(figure, ("normalisation", "query", "key", "value"), rows, f"{words}.")


def _panel(axes: Axes, name: str, coupling: np.ndarray) -> None:
    n = len(coupling)
    axes.imshow(coupling, cmap="Blues", vmin=0, vmax=1)
    axes.set_title(name, fontsize=10)
    axes.set(xlabel="key", xticks=[], yticks=[])
    below, right = axes.inset_axes((0, -0.42, 1, 0.26)), axes.inset_axes((1.05, 0, 0.26, 1))
    below.bar(range(n), coupling.sum(0), color=COLOURS[1])
    below.axhline(1, color="0.3", linewidth=0.8)
    below.set(xlim=(-0.5, n - 0.5), xticks=[], ylim=(0, max(2.0, float(coupling.sum(0).max()))))
    below.set_xlabel("column sums", fontsize=8)
    right.barh(range(n), coupling.sum(1), color=COLOURS[0])
    right.axvline(1, color="0.3", linewidth=0.8)
    right.set(ylim=(n - 0.5, -0.5), yticks=[], xlim=(0, max(2.0, float(coupling.sum(1).max()))))
    right.set_xlabel("row sums", fontsize=8)


def _range(sums: Tensor) -> str:
    return f"{float(sums.min()):.3g} to {float(sums.max()):.3g}"
