"""Gradients at convergence: implicit differentiation against the half-steps unrolled, and against finite differences.

At the limit both are the same derivative. Unrolled, it costs memory that grows with the half-steps; implicitly, one
linear system with the coupling as its matrix is solved (plugins/sinkhorn_attention/engines/implicit.py).
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from sinkhorn_attention.engines.implicit import NotConvergedError
from sinkhorn_attention.reference import sinkhorn_reference
from torch import Tensor

from . import operator
from .base import COLOURS, INK, Options, Result, Row, equals, normal, observed, picture, require, vanishes

TITLE = "Gradients at convergence by implicit differentiation"
Coupling = Callable[[Tensor, int], Tensor]


@dataclass
class ImplicitOptions(Options):
    """Sizes.

    Attributes:
        heads: couplings at once.
        n: rows of each.
        m: columns of each.
        std: standard deviation of the scores.
        counts: half-steps at which error, memory and time are measured; at the last all has converged.
    """

    heads: int = 2
    n: int = 32
    m: int = 24
    std: float = 1.0
    counts: list[int] = field(default_factory=lambda: [3, 5, 7, 11, 21, 41, 101])

    def check(self) -> None:
        require(min(self.heads, self.n, self.m) >= 1, "heads, n and m must be at least 1")
        require(self.std > 0, f"std must be positive; got {self.std}")
        require(len(self.counts) >= 2 and min(self.counts) >= 1, f"counts needs two numbers >= 1; got {self.counts}")


def unrolled_by_autograd(scores: Tensor, n_iters: int) -> Tensor:
    """The definition, every half-step of which autograd keeps."""
    return sinkhorn_reference(scores, n_iters)


def gradient(coupling: Coupling, scores: Tensor, weights: Tensor, n_iters: int) -> Tensor:
    """The derivative of <weights, coupling(scores)>."""
    scores = scores.detach().requires_grad_()
    return torch.autograd.grad(coupling(scores, n_iters), scores, weights)[0]


def by_finite_differences(scores: Tensor, weights: Tensor, direction: Tensor, n_iters: int, h: float = 1e-5) -> float:
    """The derivative of <weights, coupling(scores)> along a direction, by central differences."""
    higher, lower = (operator.coupling(scores + s * h * direction, n_iters) for s in (1, -1))
    return float((weights * (higher - lower)).sum() / (2 * h))


def saved_bytes(coupling: Coupling, scores: Tensor, n_iters: int) -> int:
    """What forward keeps for backward, each storage counted once."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = coupling(scores.detach().requires_grad_(), n_iters)
    total = sum(kept.values())
    del output  # kept alive so far, so that no storage was freed and its address used again
    return total


def seconds(coupling: Coupling, scores: Tensor, weights: Tensor, n_iters: int, repeats: int = 5) -> float:
    """Median time of forward and backward."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        gradient(coupling, scores, weights, n_iters)
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]


def refuses(scores: Tensor, weights: Tensor, n_iters: int) -> bool:
    """Whether the implicit gradient says that the half-steps have not converged."""
    try:
        gradient(operator.implicit_coupling, scores, weights, n_iters)
    except NotConvergedError:
        return True
    return False


def run(options: ImplicitOptions) -> Result:
    """Compares implicit and unrolled gradients in value, memory and time."""
    shape = options.heads, options.n, options.m
    scores = options.std * normal("implicit-scores", options.seed, *shape)
    weights, direction = (normal(f"implicit-{name}", options.seed, *shape) for name in ("weights", "direction"))
    rows, columns = options.n // 2 + 1, options.m // 2 + 1
    masked = torch.full_like(scores, -torch.inf)
    masked[:, :rows, :columns] = scores[:, :rows, :columns]

    enough = max(operator.converged_iters(scores), operator.converged_iters(scores[:, :rows, :columns]))
    limit = gradient(operator.coupling, scores, weights, enough)
    found = gradient(operator.implicit_coupling, scores, weights, enough)
    padded = gradient(operator.implicit_coupling, masked, weights, enough)
    padded_limit = gradient(operator.coupling, masked, weights, enough)
    along = float((found * direction).sum())
    kinds: dict[str, Coupling] = {
        "implicit": operator.implicit_coupling,
        "unrolled": operator.coupling,
        "unrolled by autograd": unrolled_by_autograd,
    }
    table: list[Row] = []
    for count in options.counts:
        refused = refuses(scores, weights, count)
        row: Row = {"half-steps": count, "says not converged": str(refused)}
        for name, kind in kinds.items():
            row[f"bytes kept, {name}"] = saved_bytes(kind, scores, count)
            if not (refused and name == "implicit"):
                row[f"seconds, {name}"] = seconds(kind, scores, weights, count)
                off = (gradient(kind, scores, weights, count) - limit).norm() / limit.norm()
                row[f"error of the gradient, {name}"] = float(off)
        table.append(row)
    first, last = table[0], table[-1]
    statements = [
        vanishes(
            "Implicit and unrolled gradients agree at convergence: max |difference|", (found - limit).abs().max(), 1e-10
        ),
        vanishes(
            "So they do where rows and columns are masked: max |difference|", (padded - padded_limit).abs().max(), 1e-10
        ),
        vanishes(
            "The implicit gradient agrees with finite differences: relative difference along a random direction",
            by_finite_differences(scores, weights, direction, enough) / along - 1,
            1e-6,
        ),
        equals(
            f"What the implicit gradient keeps does not grow with the half-steps: bytes at {last['half-steps']} over "
            f"bytes at {first['half-steps']}",
            float(last["bytes kept, implicit"]) / float(first["bytes kept, implicit"]),
            1.0,
            1e-12,
        ),
        equals(
            "After 1 half-step the implicit gradient says that the half-steps have not converged (1 = it does)",
            float(refuses(scores, weights, 1)),
            1.0,
            0.0,
        ),
        observed(
            f"Bytes that autograd keeps for {last['half-steps']} half-steps over what the implicit gradient keeps",
            float(last["bytes kept, unrolled by autograd"]) / float(last["bytes kept, implicit"]),
        ),
    ]
    if "seconds, implicit" in last:
        ratio = float(last["seconds, implicit"]) / float(last["seconds, unrolled"])
        sentence = (
            f"Time of forward and backward at {last['half-steps']} half-steps, implicit over the operator's unrolled"
        )
        statements.append(observed(sentence, ratio))
    colours = {"implicit": COLOURS["sinkhorn"], "unrolled": COLOURS["softmax"], "unrolled by autograd": INK}
    with picture(3) as (figure, grid):
        for axes, what in zip(grid[0], ("error of the gradient", "bytes kept", "seconds"), strict=True):
            for name in kinds:
                points = [(row["half-steps"], row[f"{what}, {name}"]) for row in table if f"{what}, {name}" in row]
                axes.loglog(*zip(*points, strict=True), "o-", color=colours[name], label=name)
            axes.set(xlabel="half-steps", ylabel=what)
            axes.legend(fontsize=8)
    return Result(statements, table, figure)
