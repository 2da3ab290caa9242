r"""Attention as interacting particles (Geshkovski et al. 2023, 2025): when and into how many clusters they gather.

On the sphere, with W_Q = W_K = W_V = Id and inverse temperature beta, x_i' = P_{x_i} sum_j K_ij x_j with scores
beta <x_i, x_j> and P_x y = y - <x, y> x. From an orthonormal start all cosines stay equal, to gamma(t), with

    gamma' = 2 e^{beta gamma} (1 - gamma) (1 + (n - 1) gamma) / (e^beta + (n - 1) e^{beta gamma}),    gamma(0) = 0.

The map of that symmetric state is doubly stochastic already, so that softmax and Sinkhorn move alike. In R^d,
x_i' = V sum_j K_ij x_j. A doubly stochastic map keeps the mean's motion apart, m' = V m, and the variance along an
eigenvector of a symmetric V with eigenvalue v changes, under x_i' = V sum_j K_ij (x_j - x_i), by exactly

    -(v / n) sum_ij K_ij |<e, x_i - x_j>|^2:

aggregation where v > 0, diffusion where v < 0.

On the line with V = 1 the map of two tokens, a gap g apart, is [[p, 1 - p], [1 - p, p]] with p = 1 / (1 + exp(-g^2/2))
under Sinkhorn, wherever they lie, so that g' = g tanh(g^2/4): they part for ever and the map tends to the identity.
Whether it does for more tokens is left open here, and measured. Softmax lets tokens follow leaders.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from . import operator
from .base import COLOURS, Options, Result, Row, at_least, at_most, equals, normal, observed, picture, require, vanishes

TITLE = "Clusters of tokens: attention as interacting particles"
SPHERE = ("softmax", "sinkhorn", "sigmoid")
Field = Callable[[Tensor], Tensor]


@dataclass
class ClustersOptions(Options):
    """Sizes.

    Attributes:
        n: particles.
        betas: inverse temperatures on the sphere, rising.
        repeats: random starts at each.
        time: how long the particles on the sphere move.
        step: of time.
        n_iters: half-steps of Sinkhorn.
        seen_at: the time at which clusters are counted beside the end.
    """

    n: int = 24
    betas: list[float] = field(default_factory=lambda: [1.0, 4.0, 9.0, 25.0])
    repeats: int = 2
    time: float = 20.0
    step: float = 0.2
    n_iters: int = 101
    seen_at: float = 6.0

    def check(self) -> None:
        require(self.n >= 4, f"n must be at least 4; got {self.n}")
        require(
            len(self.betas) >= 2 and self.betas == sorted(self.betas),
            f"betas must be two or more, rising; got {self.betas}",
        )
        require(self.betas[0] > 0, f"betas must be positive; got {self.betas}")
        require(
            0 < self.step <= self.seen_at <= self.time, "step, seen_at and time must be positive and rise in this order"
        )
        require(self.n_iters >= 1 and self.repeats >= 1, "n_iters and repeats must be at least 1")


def attention_map(scores: Tensor, normalisation: str, n_iters: int) -> Tensor:
    """The map (..., n, n) of a registered normalizer of given scores."""
    options: dict[str, object] = {"n_iters": n_iters} if normalisation == "sinkhorn" else {}
    return operator.normalizer(normalisation, **options).from_scores(scores)


def runge_kutta(field_at: Field, x: Tensor, h: float) -> Tensor:
    """One classical Runge-Kutta step of x' = field(x)."""
    k1 = field_at(x)
    k2 = field_at(x + 0.5 * h * k1)
    k3 = field_at(x + 0.5 * h * k2)
    k4 = field_at(x + h * k3)
    return x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)


def sphere_field(x: Tensor, beta: Tensor, normalisation: str, n_iters: int) -> Tensor:
    """P_{x_i} sum_j K_ij x_j of unit vectors (..., n, d); beta (...,)."""
    y = attention_map(beta[..., None, None] * x @ x.mT, normalisation, n_iters) @ x
    return y - (x * y).sum(-1, keepdim=True) * x


def on_the_sphere(x: Tensor, beta: Tensor, normalisation: str, n_iters: int, time: float, step: float) -> Tensor:
    """Positions (steps + 1, ..., n, d) of particles that start at x; put back on the sphere after each step."""
    path = [x]
    for _ in range(round(time / step)):
        x = runge_kutta(lambda y: sphere_field(y, beta, normalisation, n_iters), path[-1], step)
        path.append(x / x.norm(dim=-1, keepdim=True))
    return torch.stack(path)


def equal_cosines(n: int, beta: float, time: float, step: float) -> float:
    """The cosine gamma(time) of the equation above, from gamma(0) = 0."""

    def speed(gamma: Tensor) -> Tensor:
        weight = (beta * gamma).exp()
        return 2 * weight * (1 - gamma) * (1 + (n - 1) * gamma) / (math.exp(beta) + (n - 1) * weight)

    gamma = torch.zeros((), dtype=torch.float64)
    for _ in range(round(time / step)):
        gamma = runge_kutta(speed, gamma, step)
    return float(gamma)


def gap_of_two(gap: float, time: float) -> float:
    """The gap g(time) of two tokens on the line under Sinkhorn, from g(0) = gap, by g' = g tanh(g^2/4)."""
    solution = solve_ivp(lambda _, g: g * np.tanh(g * g / 4), (0, time), [gap], rtol=1e-11, atol=1e-12)
    return float(solution.y[0, -1])


def number_of_clusters(distances: Tensor, reach: float) -> int:
    """Connected components of the points (n, n distances) that are nearer than `reach`."""
    near = (distances < reach).double()
    for _ in range(math.ceil(math.log2(len(near))) + 1):
        near = (near @ near > 0).double()
    return int(torch.unique(near, dim=0).shape[0])


def count_on_sphere(x: Tensor) -> int:
    """Clusters of unit vectors (n, d) closer than about 10 degrees."""
    return number_of_clusters(torch.cdist(x, x), 0.17)


def energy(x: Tensor, beta: float) -> Tensor:
    """F^inf of Sander et al. for c = beta <x, x'>: the flow of Sinkhorn on the sphere climbs it."""
    scores = beta * x @ x.T
    kernel = operator.converged(scores)
    return -0.5 * (kernel * (kernel.log() + math.log(len(x)) - scores)).sum() / len(x)


def field_in_space(x: Tensor, v: Tensor, normalisation: str, n_iters: int) -> Tensor:
    """V sum_j K_ij x_j of particles (n, d) with scores <x_i, x_j>."""
    return attention_map(x @ x.T, normalisation, n_iters) @ x @ v.T


def centred_field(x: Tensor, v: Tensor, normalisation: str, n_iters: int) -> Tensor:
    """V sum_j K_ij (x_j - x_i), with scores -1/2 |x_i - x_j|^2."""
    k = attention_map(-0.5 * torch.cdist(x, x).square(), normalisation, n_iters)
    return (k @ x - x) @ v.T


def change_of_variance(x: Tensor, velocity: Tensor) -> Tensor:
    """d/dt of the variances along the axes, (d,), of particles (n, d) with velocities (n, d)."""
    return 2 * ((x - x.mean(0)) * velocity).mean(0)


def predicted_change_of_variance(x: Tensor, v: Tensor, k: Tensor) -> Tensor:
    """-(v_k / n) sum_ij K_ij (x_ik - x_jk)^2 for V = diag(v)."""
    squares = (x.unsqueeze(1) - x.unsqueeze(0)).square()
    return -v.diagonal() * (k.unsqueeze(-1) * squares).sum((0, 1)) / len(x)


def run(options: ClustersOptions) -> Result:
    """Follows particles on the sphere, on the line and in the plane."""
    n, n_iters, seed = options.n, options.n_iters, options.seed
    statements, table = [], list[Row]()

    # Equal cosines.
    for name in ("softmax", "sinkhorn"):
        beta = torch.tensor([2.0], dtype=torch.float64)
        end = on_the_sphere(torch.eye(8, dtype=torch.float64).unsqueeze(0), beta, name, n_iters, 2.0, 0.05)[-1, 0]
        gamma = equal_cosines(8, 2.0, 2.0, 0.05)
        cosines = (end @ end.T)[~torch.eye(8, dtype=torch.bool)]
        sentence = f"From an orthonormal start the cosines under {name} follow the scalar equation: largest difference"
        statements.append(vanishes(sentence, (cosines - gamma).abs().max(), 1e-6))

    # Clusters on the sphere.
    start = normal("clusters-sphere", seed, 1, options.repeats, n, 3)
    start = (start / start.norm(dim=-1, keepdim=True)).expand(len(options.betas), -1, -1, -1)
    beta = torch.tensor(options.betas, dtype=torch.float64).unsqueeze(1).expand(-1, options.repeats)
    paths = {name: on_the_sphere(start, beta, name, n_iters, options.time, options.step) for name in SPHERE}
    seen = round(options.seen_at / options.step)
    counts: dict[str, list[tuple[float, float]]] = {}
    for name, path in paths.items():
        counts[name] = []
        for index, value in enumerate(options.betas):
            at_sight, at_end = (
                sum(count_on_sphere(path[when, index, r]) for r in range(options.repeats)) / options.repeats
                for when in (seen, -1)
            )
            counts[name].append((at_sight, at_end))
            gathered = [
                next((t for t, x in enumerate(path[:, index, r]) if count_on_sphere(x) == 1), None)
                for r in range(options.repeats)
            ]
            times = [options.step * t for t in gathered if t is not None]
            table.append(
                {
                    "normalisation": name,
                    "beta": value,
                    f"clusters at t = {options.seen_at:g}": at_sight,
                    f"clusters at t = {options.time:g}": at_end,
                    "starts in one cluster at the end": len(times),
                    "mean time to one cluster": sum(times) / len(times) if times else "",
                }
            )
    first, last = options.betas[0], options.betas[-1]
    statements += [
        equals(
            f"Softmax gathers all in one cluster at beta = {first:g}: clusters at the end",
            counts["softmax"][0][1],
            1.0,
            0.0,
        ),
        at_least(
            f"The colder, the more clusters at t = {options.seen_at:g} under softmax: those at beta = {last:g} less "
            f"those at {first:g}",
            counts["softmax"][-1][0] - counts["softmax"][0][0],
            1.0,
        ),
        observed(f"Sinkhorn at beta = {first:g}: clusters at the end", counts["sinkhorn"][0][1]),
        observed(f"Sinkhorn at beta = {last:g}: clusters at the end", counts["sinkhorn"][-1][1]),
        observed(f"Softmax at beta = {last:g}: clusters at the end", counts["softmax"][-1][1]),
    ]
    levels = torch.stack([energy(x, first) for x in paths["sinkhorn"][:: max(1, seen // 6), 0, 0]])
    sentence = "Under Sinkhorn the particles on the sphere climb the energy F^inf: largest fall"
    statements.append(vanishes(sentence, (-levels.diff()).max().clamp(min=0), 1e-9))

    # The mean in R^d.
    x = 0.6 * normal("clusters-space", seed, n, 2) + 0.5
    v = torch.tensor([[0.3, -0.8], [0.6, -0.2]], dtype=torch.float64)
    exact = torch.linalg.matrix_exp(v) @ x.mean(0)
    for name in ("sinkhorn", "softmax"):
        y = x
        for _ in range(40):
            y = runge_kutta(lambda z, kind=name: field_in_space(z, v, kind, n_iters), y, 1 / 40)  # type: ignore[misc]
        off = (y.mean(0) - exact).abs().max()
        if name == "sinkhorn":
            statements.append(
                vanishes("Under Sinkhorn the mean moves by itself, m(t) = exp(tV) m(0): difference at t = 1", off, 1e-6)
            )
        else:
            statements.append(at_least("Under softmax it does not: difference at t = 1", off, 1e-3))

    # Aggregation and diffusion.
    signs = torch.diag(torch.tensor([1.0, -1.0], dtype=torch.float64))
    kernel = attention_map(-0.5 * torch.cdist(x, x).square(), "sinkhorn", 2001)
    change = change_of_variance(x, centred_field(x, signs, "sinkhorn", 2001))
    predicted = predicted_change_of_variance(x, signs, kernel)
    plane = [x]
    for _ in range(20):
        plane.append(runge_kutta(lambda z: centred_field(z, signs, "sinkhorn", n_iters), plane[-1], 0.05))
    grown = (plane[-1].var(0) / x.var(0)).tolist()
    statements += [
        vanishes(
            "Under Sinkhorn the variance along an eigenvector changes by -(v/n) sum K_ij <e, x_i - x_j>^2: difference",
            (change - predicted).abs().max(),
            1e-10,
        ),
        at_most("Aggregation where the value matrix is positive: variance at t = 1 over that at 0", grown[0], 1.0),
        at_least("Diffusion where it is negative: variance at t = 1 over that at 0", grown[1], 1.0),
    ]

    # Leaders on the line.
    two = torch.tensor([[-0.1], [0.9]], dtype=torch.float64)
    for _ in range(80):
        two = runge_kutta(lambda z: field_in_space(z, torch.ones(1, 1).double(), "sinkhorn", 401), two, 0.025)
    sentence = "Two tokens on the line part under Sinkhorn by g' = g tanh(g^2/4): difference of the gap at t = 2"
    statements.append(vanishes(sentence, float((two[1] - two[0]).abs()) - gap_of_two(1.0, 2.0), 1e-6))
    line = torch.linspace(-1.5, 1.2, 8, dtype=torch.float64).unsqueeze(1)
    ends, kernels = {}, {}
    for name in ("softmax", "sinkhorn"):
        y = line
        for _ in range(60):
            y = runge_kutta(lambda z, kind=name: field_in_space(z, torch.ones(1, 1).double(), kind, 401), y, 0.05)  # type: ignore[misc]
        ends[name], kernels[name] = y, attention_map(y @ y.T, name, 401)
        table.append({"normalisation": name, "clusters on the line": _distinct_rows(kernels[name])})
    statements += [
        at_most(
            "On the line with V = 1 tokens under softmax follow at most 3 leaders: different rows of the map",
            _distinct_rows(kernels["softmax"]),
            3.0,
        ),
        observed(
            "Under Sinkhorn tokens on the line keep leaders of their own: different rows of the map, of 8",
            _distinct_rows(kernels["sinkhorn"]),
        ),
        observed("Under Sinkhorn, the same: least diagonal entry of the map", kernels["sinkhorn"].diagonal().min()),
    ]
    return Result(statements, table, _draw(options, counts, paths, plane))


def _distinct_rows(k: Tensor) -> int:
    return number_of_clusters(torch.cdist(k, k), 0.3)


def _draw(options, counts, paths, plane):  # type: ignore[no-untyped-def]
    with picture(4) as (figure, grid):
        number, hot, cold, sign = grid[0]
        for name in SPHERE:
            number.plot(options.betas, [pair[0] for pair in counts[name]], "o-", color=COLOURS[name], label=name)
            number.plot(options.betas, [pair[1] for pair in counts[name]], "x:", color=COLOURS[name])
        number.set(xlabel="beta", ylabel="clusters", title=f"t = {options.seen_at:g} (o) and {options.time:g} (x)")
        number.legend(fontsize=8)
        for axes, index in ((hot, 0), (cold, -1)):
            for name in ("softmax", "sinkhorn"):
                heights = paths[name][:, index, 0, :, 2]
                times = torch.arange(len(heights)) * options.step
                axes.plot(times, heights, color=COLOURS[name], linewidth=0.6)
            axes.set(xlabel="t", ylabel="third coordinate", title=f"sphere, beta = {options.betas[index]:g}")
        track = torch.stack(plane)
        sign.plot(track[:, :, 0], track[:, :, 1], color=COLOURS["sinkhorn"], linewidth=0.8)
        sign.plot(track[-1, :, 0], track[-1, :, 1], "o", color=COLOURS["sinkhorn"], markersize=3)
        sign.set(title="V = diag(1, -1), Sinkhorn", xlabel="v = 1", ylabel="v = -1")
    return figure
