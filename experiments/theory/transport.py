r"""How well attention solves entropic optimal transport and sorting: one Sinkhorn layer, and stacks of softmax layers.

The coupling of -cost / eps is n times the plan of entropic transport between uniform clouds (POT is the judge), and the
layer's output is the plan's barycentric map. Softmax layers get there by depth: let keys carry a potential h_j in their
scores, and add one null key of score 0. Attention's weight on it is w_i = 1 / (1 + sum_j exp(C_ij + h_j)), so that a
token-wise map of the output gives the new potential of the queries,

    log w_i - log(1 - w_i) = -logsumexp_j(C_ij + h_j),

one half-step. With the clouds' roles exchanged from layer to layer, L layers are exactly L half-steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import ot
import torch
from torch import Tensor

from . import operator
from .base import COLOURS, INK, Options, Result, Row, at_most, equals, normal, picture, require, vanishes
from .invariance import contraction, minus_half_squared_distances, rate_of_decay

TITLE = "Entropic transport and sorting by attention layers"


@dataclass
class TransportOptions(Options):
    """Sizes.

    Attributes:
        n: points of each cloud.
        d: their dimension.
        eps: temperature.
        counts: half-steps, and depths, at which the plan is compared.
        sorted: numbers that are sorted.
        sort_eps: temperatures of sorting, falling.
    """

    n: int = 24
    d: int = 2
    eps: float = 0.5
    counts: list[int] = field(default_factory=lambda: [1, 3, 5, 9, 15, 21, 31, 51])
    sorted: int = 12
    sort_eps: list[float] = field(default_factory=lambda: [0.1, 0.03, 0.01, 0.003, 0.001])

    def check(self) -> None:
        require(self.n >= 2 and self.d >= 1 and self.sorted >= 2, "n and sorted must be at least 2, d at least 1")
        require(self.eps > 0 and min(self.sort_eps, default=0) > 0, "eps and sort_eps must be positive")
        require(self.sort_eps == sorted(self.sort_eps, reverse=True), f"sort_eps must fall; got {self.sort_eps}")
        require(min(self.counts, default=0) >= 1, f"counts must be at least 1; got {self.counts}")


def plan_of_pot(cost: Tensor, eps: float) -> Tensor:
    """The entropic plan between uniform clouds, by POT in the log domain."""
    n, m = cost.shape
    weights = np.full(n, 1 / n), np.full(m, 1 / m)
    plan = ot.sinkhorn(
        *weights, cost.numpy(), eps, method="sinkhorn_log", numItermax=100_000, stopThr=1e-14, warn=False
    )
    return torch.from_numpy(plan)


def null_key_attention(query: Tensor, key: Tensor, potential: Tensor) -> Tensor:
    """One softmax attention layer: potentials of the queries (n,) from those of the keys (m,).

    Queries (n, d) and keys (m, d) whose dot products are the scores; the key's potential is one more column.
    """
    ones, null = torch.ones_like(query[:, :1]), torch.zeros_like(key[:1])
    queries = torch.cat([query, ones], 1)
    keys = torch.cat([torch.cat([key, potential.unsqueeze(1)], 1), torch.cat([null, null[:, :1]], 1)])
    values = torch.zeros(len(keys), 2, dtype=key.dtype)
    values[-1, 0], values[:-1, 1] = 1.0, 1.0
    weights = operator.normalizer("softmax").attend(queries, keys, values, scale=1.0)
    return weights[:, 0].log() - weights[:, 1].log()


def stacked_map(x: Tensor, y: Tensor, eps: float, depth: int) -> Tensor:
    """The map (n, m) that `depth` softmax layers arrive at, for two clouds of as many points."""
    query, key = x / eps**0.5, y / eps**0.5
    of_keys, of_queries = -0.5 * key.square().sum(1), query.new_zeros(len(query))
    for layer in range(depth):
        if layer % 2 == 0:
            of_queries = null_key_attention(query, key, of_keys)
        else:
            of_keys = null_key_attention(key, query, of_queries)
    return (query @ key.T + of_queries.unsqueeze(1) + of_keys).exp()


def soft_sort(numbers: Tensor, eps: float) -> Tensor:
    """P^T x, (n,): attention of the places 1/n .. 1 to the numbers x, from squared distances (Cuturi et al. 2019)."""
    places = torch.linspace(0, 1, len(numbers), dtype=numbers.dtype)
    scores = minus_half_squared_distances(numbers.unsqueeze(1), places.unsqueeze(1)) / eps
    return operator.converged(scores, 1e-10).T @ numbers


def sort_errors(numbers: Tensor, temperatures: Sequence[float]) -> tuple[list[float], list[float]]:
    """Mean distance of the soft sort to the sorted numbers, and what the sum has changed by, at each temperature."""
    found = [soft_sort(numbers, eps) for eps in temperatures]
    truth = numbers.sort().values
    return [float((s - truth).abs().mean()) for s in found], [float((s.sum() - truth.sum()).abs()) for s in found]


def run(options: TransportOptions) -> Result:
    """Compares couplings, outputs and stacks with POT's plan, and the soft sort with the sorted numbers."""
    n, eps = options.n, options.eps
    x = normal("transport-source", options.seed, n, options.d)
    y = 0.7 * normal("transport-target", options.seed, n, options.d) + 1.0
    scores = minus_half_squared_distances(x, y) / eps
    cost = -eps * scores
    plan = plan_of_pot(cost, eps)
    limit = operator.converged(scores)
    layer = operator.normalizer("sinkhorn_l2", n_iters=operator.converged_iters(scores))
    output = layer.attend(x, y, y, scale=1 / eps)
    distance = {count: float((operator.coupling(scores, count) - n * plan).abs().sum() / n) for count in options.counts}
    stacks = {depth: stacked_map(x, y, eps, depth) for depth in options.counts}
    by_depth = {depth: float((stack - n * plan).abs().sum() / n) for depth, stack in stacks.items()}
    apart = max(float((stacks[count] - operator.coupling(scores, count)).abs().max()) for count in options.counts)

    numbers = normal("transport-numbers", options.seed, options.sorted).sigmoid()
    errors, sums = sort_errors(numbers, options.sort_eps)
    value = float((limit / n * cost).sum())
    statements = [
        vanishes(
            "One Sinkhorn layer's map is n times POT's entropic plan: max |K - n P|",
            (limit - n * plan).abs().max(),
            1e-9,
        ),
        vanishes(
            "Its output is the plan's barycentric map: max |layer(x) - n P y|",
            (output - n * plan @ y).abs().max(),
            1e-8,
        ),
        vanishes(
            "It finds POT's transport cost: |<K/n, cost> - <P, cost>|", abs(value - float((plan * cost).sum())), 1e-9
        ),
        vanishes("L softmax layers with a null key are L half-steps: max |stack - K^L| over L", apart, 1e-9),
        equals(
            "Near the limit two half-steps, or two softmax layers, multiply the error by sigma_2(K)^2: ratio",
            rate_of_decay(scores, limit) / contraction(limit),
            1.0,
            0.05,
        ),
        vanishes("The soft sort keeps the sum of the numbers at every temperature: largest change", max(sums), 1e-8),
        at_most(
            f"The soft sort tends to the sorted numbers: mean distance at eps = {options.sort_eps[-1]:g}",
            errors[-1],
            0.02,
        ),
        at_most(
            "Its distance falls with the temperature: largest rise from one eps to the next",
            max(later - earlier for earlier, later in pairwise(errors)) if len(errors) > 1 else 0.0,
            0.0,
        ),
    ]
    table: list[Row] = [
        {"half-steps or layers": count, "L1 of half-steps": distance[count], "L1 of stacked layers": by_depth[count]}
        for count in options.counts
    ]
    table += [
        {"sort eps": temperature, "distance to sorted": error, "change of the sum": change}
        for temperature, error, change in zip(options.sort_eps, errors, sums, strict=True)
    ]
    with picture(3) as (figure, grid):
        convergence, image, sorting = grid[0]
        counts = options.counts
        convergence.semilogy(
            counts, [distance[c] for c in counts], "o-", color=COLOURS["sinkhorn"], label="half-steps of one layer"
        )
        convergence.semilogy(counts, [by_depth[c] for c in counts], "x:", color=INK, label="softmax layers stacked")
        convergence.set(xlabel="half-steps, or depth", ylabel="|K/n - P|, l1")
        convergence.legend(fontsize=8)
        image.imshow(limit.detach(), cmap="Oranges")
        image.set_title("coupling")
        sorting.loglog(options.sort_eps, errors, "o-", color=COLOURS["sinkhorn"])
        sorting.set(xlabel="eps", ylabel="mean |soft sort - sorted|")
    return Result(statements, table, figure)
