r"""What depth does to the tokens: rank collapse with and without skip connections, for softmax and Sinkhorn.

Without skip connections attention X <- K(X) X W drives the residual R = X - 1 mean(X)^T to 0 doubly exponentially (Dong
et al. 2021), because one layer takes it to its third power: row terms and, for Sinkhorn, column terms of the scores do
nothing, and what is left of them, R A R^T, is of second order. To leading order, scores X A X^T, Sigma = R^T R / n,

    residual of K(X) X  =  R A Sigma + O(|R|^4).

By Proposition 1 Sinkhorn's map does not see where the cloud lies, and it keeps the cloud's mean. Softmax does neither.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import operator
from .base import (
    COLOURS,
    Options,
    Result,
    Row,
    at_least,
    at_most,
    equals,
    normal,
    observed,
    picture,
    require,
    slope,
    vanishes,
)

TITLE = "Rank collapse and double stochasticity by depth"
NORMALISATIONS = ("softmax", "sinkhorn")
Map = Callable[[Tensor], Tensor]


@dataclass
class RankAndDepthOptions(Options):
    """Sizes.

    Attributes:
        n: tokens.
        d: their width.
        depth: layers.
        n_iters: half-steps of a Sinkhorn layer in the stack.
        sizes: sizes of the residual at which its order is measured, falling.
    """

    n: int = 24
    d: int = 16
    depth: int = 12
    n_iters: int = 21
    sizes: list[float] = field(default_factory=lambda: [0.1, 0.05, 0.025])

    def check(self) -> None:
        require(self.n >= 3 and self.d >= 2 and self.depth >= 2, "n must be at least 3, d and depth at least 2")
        require(self.n_iters >= 1, f"n_iters must be at least 1; got {self.n_iters}")
        require(len(self.sizes) >= 2 and min(self.sizes) > 0, f"sizes needs two positive numbers; got {self.sizes}")


def residual(x: Tensor) -> Tensor:
    """X - 1 mean(X)^T: what of tokens (n, d) is not the same in all."""
    return x - x.mean(0)


def attention_map(x: Tensor, a: Tensor, normalisation: str, n_iters: int | None = None) -> Tensor:
    """K (n, n) of scores X A X^T; Sinkhorn at convergence where no number of half-steps is given."""
    scores = x @ a @ x.T
    if normalisation == "softmax":
        return operator.coupling(scores, 1)
    return operator.converged(scores) if n_iters is None else operator.coupling(scores, n_iters)


def leading_residual(x: Tensor, a: Tensor) -> Tensor:
    """R A Sigma, the residual after one layer to leading order in R, (n, d)."""
    r = residual(x)
    return r @ a @ (r.T @ r) / len(x)


def through_layers(
    x: Tensor, matrices: Tensor, values: Tensor, normalisation: str, skip: bool, n_iters: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Tokens after 0..L layers X <- K(X) X W, or X <- X + K(X) X W with skip connections, and the maps."""
    tokens, maps = [x], []
    for a, w in zip(matrices, values, strict=True):
        k = attention_map(tokens[-1], a, normalisation, n_iters)
        update = k @ tokens[-1] @ w
        tokens.append(tokens[-1] + update if skip else update)
        maps.append(k)
    return tokens, maps


def share_of_residual(x: Tensor) -> float:
    """|R| / |X| in the Frobenius norm: 0 for a matrix whose rows are equal."""
    return float(residual(x).norm() / x.norm())


def column_error(k: Tensor) -> float:
    """Largest deviation of a column sum from 1."""
    return float((k.sum(0) - 1).abs().max())


def run(options: RankAndDepthOptions) -> Result:
    """Measures the order of collapse, follows the residual by depth, and the distance to double stochasticity."""
    n, d, seed = options.n, options.d, options.seed
    x = normal("rank-tokens", seed, n, d)
    matrices = normal("rank-matrices", seed, options.depth, d, d) / d
    values = torch.linalg.qr(normal("rank-values", seed, options.depth, d, d))[0]
    mean, a = normal("rank-mean", seed, d), matrices[0] * d**0.5

    statements = []
    for name in NORMALISATIONS:
        left = []
        for size in options.sizes:
            tokens = mean + size * x
            left.append(float(residual(attention_map(tokens, a, name) @ tokens).norm()))
        sentence = f"One layer of {name} takes a small residual to its third power: exponent"
        statements.append(equals(sentence, slope(options.sizes, left), 3.0, 0.25))
    tokens = mean + min(options.sizes) * x
    predicted = leading_residual(tokens, a)
    got = residual(attention_map(tokens, a, "sinkhorn") @ tokens)
    sentence = "After one Sinkhorn layer the residual is R A Sigma to leading order: relative difference"
    statements.append(vanishes(sentence, (got - predicted).norm() / predicted.norm(), min(options.sizes)))

    moved = {
        name: (attention_map(x + mean, matrices[0], name) - attention_map(x, matrices[0], name)).abs().max()
        for name in NORMALISATIONS
    }
    statements += [
        vanishes(
            "Sinkhorn's map does not see a shift of the whole cloud: max |K(X + 1c^T) - K(X)|", moved["sinkhorn"], 1e-10
        ),
        at_least("Softmax's map does: max |K(X + 1c^T) - K(X)|", moved["softmax"], 1e-3),
        vanishes(
            "One Sinkhorn layer keeps the mean of the tokens: max |mean(KX) - mean(X)|",
            ((attention_map(x, matrices[0], "sinkhorn") @ x).mean(0) - x.mean(0)).abs().max(),
            1e-10,
        ),
    ]
    table: list[Row] = []
    shares: dict[tuple[str, bool], list[float]] = {}
    columns: dict[tuple[str, bool], list[float]] = {}
    for name in NORMALISATIONS:
        for skip in (False, True):
            stack, maps = through_layers(x, matrices, values, name, skip, options.n_iters)
            shares[name, skip] = [share_of_residual(tokens) for tokens in stack]
            columns[name, skip] = [column_error(k) for k in maps]
            table += [
                {
                    "normalisation": name,
                    "skip": str(skip),
                    "layer": layer + 1,
                    "share of residual": shares[name, skip][layer + 1],
                    "column error of the map": columns[name, skip][layer],
                }
                for layer in range(options.depth)
            ]
    last = options.depth
    for name in NORMALISATIONS:
        sentence = f"Without skip connections {last} layers of {name} collapse to equal tokens: |R| / |X|"
        statements.append(at_most(sentence, shares[name, False][-1], 1e-10))
        sentence = f"With skip connections {last} layers of {name} do not: |R| / |X|"
        statements.append(at_least(sentence, shares[name, True][-1], 1e-2))
    statements += [
        at_most(
            "Where tokens have collapsed softmax is doubly stochastic: column error",
            columns["softmax", False][-1],
            1e-8,
        ),
        at_most(
            "With skip connections Sinkhorn's columns are nearer 1 than softmax's in all layers: largest ratio",
            max(s / max(t, 1e-16) for s, t in zip(columns["sinkhorn", True], columns["softmax", True], strict=True)),
            1.0,
        ),
        observed(
            "|R| / |X| after 2 layers without skip connections, Sinkhorn over softmax",
            shares["sinkhorn", False][2] / shares["softmax", False][2],
        ),
        observed(
            f"|R| / |X| after {last} layers with skip connections, Sinkhorn over softmax",
            shares["sinkhorn", True][-1] / shares["softmax", True][-1],
        ),
    ]
    with picture(2) as (figure, grid):
        for (name, skip), numbers in shares.items():
            label, line = f"{name}, {'with' if skip else 'no'} skip", "-" if skip else ":"
            grid[0, 0].semilogy([max(value, 1e-18) for value in numbers], "o" + line, color=COLOURS[name], label=label)
            errors = [max(value, 1e-18) for value in columns[name, skip]]
            grid[0, 1].semilogy(range(1, last + 1), errors, "o" + line, color=COLOURS[name], label=label)
        grid[0, 0].set(xlabel="layers", ylabel="|R| / |X|")
        grid[0, 1].set(xlabel="layer", ylabel="max |column sum - 1|")
        for axes in grid[0]:
            axes.legend(fontsize=8)
    return Result(statements, table, figure)
