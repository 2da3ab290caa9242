"""Proposition 1 of Sander et al. 2022: Sinkhorn's limit does not see terms that belong to a row or to a column."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import operator
from .base import (
    COLOURS,
    INK,
    Options,
    Result,
    Row,
    Statement,
    at_least,
    equals,
    normal,
    picture,
    require,
    vanishes,
)

TITLE = "Invariance of the limit under row and column terms (Proposition 1)"


@dataclass
class InvarianceOptions(Options):
    """Sizes.

    Attributes:
        n: queries, and keys.
        d: width of queries and keys.
        std: standard deviation of the scores, and of the row and column terms.
        counts: odd half-steps at which the error is measured.
    """

    n: int = 64
    d: int = 16
    std: float = 1.0
    counts: list[int] = field(default_factory=lambda: [1, 3, 5, 7, 9, 15, 21, 31])

    def check(self) -> None:
        require(self.n >= 2 and self.d >= 1, f"n must be at least 2 and d at least 1; got {self.n} and {self.d}")
        require(self.std > 0, f"std must be positive; got {self.std}")
        odd = all(count >= 1 and count % 2 == 1 for count in self.counts)
        require(
            odd and 1 in self.counts and len(self.counts) > 1, f"counts must be odd, 1 among them; got {self.counts}"
        )


def with_terms(scores: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """C~_ij = C_ij + f_i + g_j for scores (n, m), rows f (n,) and columns g (m,)."""
    return scores + rows.unsqueeze(1) + columns.unsqueeze(0)


def minus_half_squared_distances(query: Tensor, key: Tensor) -> Tensor:
    """-1/2 |q_i - k_j|^2, (n, m), of queries (n, d) and keys (m, d), from the differences themselves."""
    return -0.5 * (query.unsqueeze(1) - key.unsqueeze(0)).square().sum(-1)


def contraction(limit: Tensor) -> float:
    """sigma_2(K)^2 of a doubly stochastic (n, n) matrix: what two half-steps multiply the error by, near the limit.

    Linearised, a row step takes column potentials dg to df = -K dg and a column step gives dg = -K^T df (Knight 2008).
    """
    return float(torch.linalg.svdvals(limit)[1].square())


def error_by_count(scores: Tensor, shifted: Tensor, counts: Sequence[int]) -> list[float]:
    """The error max |K~^l - K^l| at each number l of half-steps."""
    return [
        float((operator.coupling(shifted, count) - operator.coupling(scores, count)).abs().max()) for count in counts
    ]


def run(options: InvarianceOptions) -> Result:
    """Measures how much of a row term, a column term and the step from dot products to distances is left."""
    n, d = options.n, options.d
    query, key = (normal(f"invariance-{side}", options.seed, n, d) for side in ("query", "key"))
    query, key = query * options.std**0.5 * d**-0.25, key * options.std**0.5 * d**-0.25
    scores = query @ key.T
    rows, columns = (options.std * normal(f"invariance-{side}", options.seed, n) for side in ("rows", "columns"))
    nothing = torch.zeros_like(rows)
    distances = minus_half_squared_distances(query, key)

    limit = operator.converged(scores)
    both = (operator.converged(with_terms(scores, rows, columns)) - limit).abs().max()
    l2 = (operator.converged(distances) - limit).abs().max()
    counts = options.counts
    errors = {
        "row term": error_by_count(scores, with_terms(scores, rows, nothing), counts),
        "column term": error_by_count(scores, with_terms(scores, nothing, columns), counts),
        "distances": error_by_count(scores, distances, counts),
        "to the limit": [float((operator.coupling(scores, count) - limit).abs().max()) for count in counts],
    }
    first = (operator.coupling(scores, 1) - scores.softmax(-1)).abs().max()
    rate, measured_rate = contraction(limit), rate_of_decay(scores, limit)

    statements: list[Statement] = [
        vanishes("One half-step is softmax: max |K^1 - softmax(C)|", first, 1e-14),
        vanishes("Row and column terms do not change the limit: max |K~ - K|", both, 1e-10),
        vanishes("Dot products and -1/2 squared distances have the same limit: max |K~ - K|", l2, 1e-10),
        vanishes("A row term changes nothing at any odd number of half-steps", max(errors["row term"]), 1e-14),
        at_least("A column term does change the map at 1 half-step", errors["column term"][counts.index(1)], 1e-2),
        vanishes(
            "The row and column sums of the limit are 1",
            max((limit.sum(0) - 1).abs().max(), (limit.sum(1) - 1).abs().max()),
            1e-10,
        ),
        equals(
            "Near the limit, two half-steps multiply the error by sigma_2(K)^2: ratio", measured_rate / rate, 1.0, 0.05
        ),
    ]
    if 3 in counts:
        at_three = errors["column term"][counts.index(3)]
        statements.append(at_least("A column term still changes the map at 3 half-steps", at_three, 1e-6))
    table: list[Row] = [
        {"half-steps": count, **{name: errors[name][i] for name in errors}} for i, count in enumerate(counts)
    ]
    with picture() as (figure, grid):
        axes = grid[0, 0]
        colours = {"column term": COLOURS["softmax"], "distances": COLOURS["none"], "to the limit": INK}
        for name, values in errors.items():
            floor = [max(value, 1e-18) for value in values]
            axes.semilogy(counts, floor, "o-", label=name, color=colours.get(name, COLOURS["sinkhorn"]))
        axes.set_xlabel("half-steps")
        axes.set_ylabel("max |K~ - K|")
        axes.set_ylim(bottom=5e-19)
        axes.legend()
    return Result(statements, table, figure)


def rate_of_decay(scores: Tensor, limit: Tensor) -> float:
    """The factor of the error over two half-steps, measured over the last stretch above rounding."""
    previous, rate = float("nan"), float("nan")
    for count in range(1, 400, 2):
        error = float((operator.coupling(scores, count) - limit).norm())
        if error < 1e-9:
            break
        rate, previous = error / previous, error
    return rate
