r"""Theorem 1 of Sander et al. 2022 and its softmax counterpart: attention whose temperature goes to 0 diffuses heat.

With W_Q = W_K = Id, W_V = -Id, c~ = -1/2 |x - x'|^2 and k^0_eps = exp(c~ / eps), the rescaled drift at x is

    T_eps(x) = (x - E_k[x' | x]) / eps,      E_k[x' | x] = int k_eps(x, x') x' dmu(x').

As eps -> 0, T_eps -> -grad log rho for softmax, so that d_t rho = Lap rho, and -1/2 grad log rho for Sinkhorn, so that
d_t rho = 1/2 Lap rho. For the standard Gaussian both conditional means are linear, E_k[x' | x] = kappa x:

    softmax:   kappa = 1 / (1 + eps),                           T_eps = x / (1 + eps)
    Sinkhorn:  kappa = 2 / (eps + sqrt(eps^2 + 4)) = exp(-asinh(eps / 2)),     T_eps = x (1/2 - eps/8 + O(eps^3))

(the coupling is the Gaussian of marginal variances 1 whose precision has -1/eps off its diagonal). The semigroup of the
limit would multiply x by exp(-eps) and exp(-eps/2): -log(kappa) / eps misses the rates 1 and 1/2 by eps/2 for softmax
but by eps^2/48 for Sinkhorn. This is the sense in which the doubly stochastic kernel converges faster (Marshall and
Coifman 2019; Wormell and Reich 2021).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor

from . import operator
from .base import (
    COLOURS,
    INK,
    Options,
    Result,
    Row,
    at_most,
    equals,
    normal,
    observed,
    picture,
    require,
    slope,
    vanishes,
)

TITLE = "Attention at low temperature and the heat equation (Theorem 1)"
NORMALISATIONS = ("softmax", "sinkhorn")
LIMIT_RATE = {"softmax": 1.0, "sinkhorn": 0.5}


@dataclass
class HeatLimitOptions(Options):
    """Sizes.

    Attributes:
        n: points that stand for the Gaussian, its quantiles.
        eps: temperatures at which the closed forms are checked, and from which the orders in eps are fitted. Far below
            them Sinkhorn's bias, eps^2/48, drowns in what n quantiles miss of the Gaussian; far above it is not small.
        sample_sizes: numbers of random points from which the order in n is fitted.
        sample_eps: their temperature.
        repeats: random samples of each size; 128 of four sizes know the exponent to 0.04 (one standard deviation).
        particles: particles whose density follows the heat equation.
        flow_eps: their temperature.
        time: the time they flow for.
        steps: steps of that.
    """

    n: int = 500
    eps: list[float] = field(default_factory=lambda: [0.05, 0.1, 0.2])
    sample_sizes: list[int] = field(default_factory=lambda: [50, 100, 200, 400])
    sample_eps: float = 0.5
    repeats: int = 128
    particles: int = 120
    flow_eps: float = 0.05
    time: float = 0.25
    steps: int = 25

    def check(self) -> None:
        require(self.n >= 10 and self.particles >= 10, "n and particles must be at least 10")
        temperatures = [*self.eps, self.sample_eps, self.flow_eps]
        require(all(eps > 0 for eps in temperatures), "temperatures (eps, sample_eps, flow_eps) must be positive")
        require(len(set(self.eps)) >= 2, f"eps needs two temperatures, to fit an order; got {self.eps}")
        require(len(set(self.sample_sizes)) >= 2 and min(self.sample_sizes) >= 10, "sample_sizes needs two sizes >= 10")
        require(self.repeats >= 2, f"repeats must be at least 2; got {self.repeats}")
        require(self.time > 0 and self.steps >= 1, "time and steps must be positive")


def scores(x: Tensor, eps: float) -> Tensor:
    """-1/2 |x_i - x_j|^2 / eps of points (..., n) on the line, (..., n, n)."""
    return -0.5 * (x.unsqueeze(-1) - x.unsqueeze(-2)).square() / eps


def drift(x: Tensor, eps: float, normalisation: str) -> Tensor:
    """T_eps at points (..., n) of the measure that has equal weight on each."""
    c = scores(x, eps)
    kernel = operator.coupling(c, 1) if normalisation == "softmax" else operator.converged(c, 1e-10)
    return (x - (kernel @ x.unsqueeze(-1)).squeeze(-1)) / eps


def gaussian_multiplier(eps: float, normalisation: str) -> float:
    """The kappa of E_k[x' | x] = kappa x for the standard Gaussian."""
    return 1 / (1 + eps) if normalisation == "softmax" else math.exp(-math.asinh(eps / 2))


def gaussian_slope(eps: float, normalisation: str) -> float:
    """T_eps(x) / x for the standard Gaussian."""
    return (1 - gaussian_multiplier(eps, normalisation)) / eps


def gaussian_quantiles(n: int) -> Tensor:
    """The n points of equal weight that stand for the standard Gaussian: its quantiles at (i - 1/2) / n."""
    return torch.from_numpy(norm.ppf((torch.arange(n).double() + 0.5).numpy() / n))


def slope_at_the_centre(x: Tensor, field_values: Tensor) -> Tensor:
    """T(x) / x by least squares over |x| <= 1, (...,)."""
    inside = (x.abs() <= 1).to(x.dtype)
    return (inside * x * field_values).sum(-1) / (inside * x.square()).sum(-1)


def mixture_quantiles(n: int, centre: float, std: float) -> Tensor:
    """Quantiles at (i - 1/2) / n of 0.7 N(-centre, std^2) + 0.3 N(centre, std^2).

    The heat equation d_t rho = D Lap rho takes this density to the one with std^2 + 2 D t: its exact solution.
    """

    def distribution(x: float, level: float) -> float:
        return float(0.7 * norm.cdf(x, -centre, std) + 0.3 * norm.cdf(x, centre, std)) - level

    reach = centre + 12 * std
    levels = [(i + 0.5) / n for i in range(n)]
    return torch.tensor([brentq(distribution, -reach, reach, args=(level,)) for level in levels], dtype=torch.float64)


def density_of_quantiles(x: Tensor) -> tuple[Tensor, Tensor]:
    """Midpoints between neighbours of n quantiles, and the density there: 1/n over the neighbours' distance."""
    x = x.sort().values
    return 0.5 * (x[1:] + x[:-1]), 1 / (len(x) * x.diff())


def wasserstein(x: Tensor, y: Tensor) -> float:
    """1-Wasserstein distance of two clouds of as many points on the line: sorted, point against point."""
    return float((x.sort().values - y.sort().values).abs().mean())


def flow(x: Tensor, eps: float, normalisation: str, time: float, steps: int) -> Tensor:
    """Solves x' = T_eps(x) by Heun's rule."""
    h = time / steps
    for _ in range(steps):
        first = drift(x, eps, normalisation)
        x = x + 0.5 * h * (first + drift(x + h * first, eps, normalisation))
    return x


def sampling_errors(sizes: Sequence[int], eps: float, repeats: int, normalisation: str, seed: int) -> list[float]:
    """Root mean square error of T_eps's slope, over random samples of each size, against the closed form."""
    errors = []
    for size in sizes:
        x = normal(f"heat-limit-{size}", seed, repeats, size)
        found = slope_at_the_centre(x, drift(x, eps, normalisation))
        errors.append(float((found - gaussian_slope(eps, normalisation)).square().mean().sqrt()))
    return errors


def run(options: HeatLimitOptions) -> Result:
    """Checks the closed forms of the Gaussian, the orders in eps and n, and the density against the heat equation."""
    x = gaussian_quantiles(options.n)
    statements, table = [], list[Row]()
    slopes: dict[str, dict[float, float]] = {name: {} for name in NORMALISATIONS}
    for eps in options.eps:
        for name in NORMALISATIONS:
            found = float(slope_at_the_centre(x, drift(x, eps, name)))
            slopes[name][eps] = found
            table.append(
                {
                    "normalisation": name,
                    "eps": eps,
                    "T(x)/x": found,
                    "closed form": gaussian_slope(eps, name),
                    "-log(kappa)/eps": -math.log(1 - eps * found) / eps,
                }
            )
    for eps in options.eps:
        for name, form in (("softmax", "1/(1+eps)"), ("sinkhorn", "1/2 - eps/8 + O(eps^3)")):
            sentence = f"Standard Gaussian, eps = {eps:g}: the drift of {name} is x times {form}"
            statements.append(equals(sentence, slopes[name][eps], gaussian_slope(eps, name), 1e-4))
    smallest = min(options.eps)
    ratio = slopes["softmax"][smallest] / slopes["sinkhorn"][smallest]
    sentence = f"Softmax diffuses twice as fast as Sinkhorn as eps -> 0: ratio of the drifts at eps = {smallest:g}"
    statements.append(equals(sentence, ratio, 2.0, 2 * smallest))

    orders = {}
    for name in NORMALISATIONS:
        rates = [-math.log(1 - eps * slopes[name][eps]) / eps for eps in options.eps]
        orders[name] = slope(options.eps, [abs(rate - LIMIT_RATE[name]) for rate in rates])
    sentence = "The {} kernel meets the heat semigroup to order {} in eps: exponent of |-log(kappa)/eps - rate|"
    statements.append(equals(sentence.format("softmax", 1), orders["softmax"], 1.0, 0.1))
    statements.append(equals(sentence.format("Sinkhorn", 2), orders["sinkhorn"], 2.0, 0.1))

    sampled = {
        name: sampling_errors(options.sample_sizes, options.sample_eps, options.repeats, name, options.seed)
        for name in NORMALISATIONS
    }
    for name in NORMALISATIONS:
        sentence = f"The drift of {name} from n random points errs like n^(-1/2): exponent"
        statements.append(equals(sentence, slope(options.sample_sizes, sampled[name]), -0.5, 0.15))
    relative = [
        (sinkhorn / LIMIT_RATE["sinkhorn"]) / (softmax / LIMIT_RATE["softmax"])
        for softmax, sinkhorn in zip(sampled["softmax"], sampled["sinkhorn"], strict=True)
    ]
    sentence = "Sampling error of the drift relative to its limit, Sinkhorn over softmax, mean over n"
    statements.append(observed(sentence, sum(relative) / len(relative)))

    start = mixture_quantiles(options.particles, 1.5, 0.6)
    shapes = {"start": start}
    for name in NORMALISATIONS:
        diffusivity = LIMIT_RATE[name]
        exact = mixture_quantiles(options.particles, 1.5, math.sqrt(0.36 + 2 * diffusivity * options.time))
        end = flow(start, options.flow_eps, name, options.time, options.steps)
        shapes[name], shapes[f"{name}, exact"] = end, exact
        missed, moved = wasserstein(end, exact), wasserstein(start, exact)
        table.append(
            {"normalisation": name, "eps": options.flow_eps, "W1 to exact": missed, "W1 start to exact": moved}
        )
        equation = "d_t rho = Lap rho" if name == "softmax" else "d_t rho = 1/2 Lap rho"
        sentence = f"The density of {name} follows {equation}: W1 to the exact solution over W1 travelled"
        statements.append(at_most(sentence, missed / moved, 0.1))
    sentence = "Particles of Sinkhorn keep their mean: |mean at the end - mean at the start|"
    statements.append(vanishes(sentence, (shapes["sinkhorn"].mean() - start.mean()).abs(), 1e-8))
    return Result(statements, table, _draw(options, slopes, sampled, shapes))


def _draw(options, slopes, sampled, shapes):  # type: ignore[no-untyped-def]
    with picture(4) as (figure, grid):
        closed, order, samples, density = grid[0]
        for name in NORMALISATIONS:
            temperatures = sorted(slopes[name])
            colour = COLOURS[name]
            closed.plot(temperatures, [slopes[name][eps] for eps in temperatures], "o", color=colour, label=name)
            closed.plot(temperatures, [gaussian_slope(eps, name) for eps in temperatures], color=colour)
            rates = [abs(-math.log(1 - eps * slopes[name][eps]) / eps - LIMIT_RATE[name]) for eps in options.eps]
            order.loglog(options.eps, rates, "o-", color=colour, label=name)
            samples.loglog(options.sample_sizes, sampled[name], "o-", color=colour, label=name)
            density.plot(*density_of_quantiles(shapes[name]), ".", color=colour, markersize=3, label=name)
            density.plot(*density_of_quantiles(shapes[f"{name}, exact"]), color=colour, label=f"{name}, exact")
        density.plot(*density_of_quantiles(shapes["start"]), color=INK, linestyle=":", label="start")
        closed.set(xlabel="eps", ylabel="T(x) / x", title="standard Gaussian (lines: closed forms)")
        order.set(xlabel="eps", ylabel="|-log(kappa)/eps - rate|", title="bias")
        samples.set(xlabel="n", ylabel="rms error of T(x) / x", title=f"random samples, eps = {options.sample_eps:g}")
        density.set(xlabel="x", title=f"density after t = {options.time:g}")
        for axes in grid[0]:
            axes.legend(fontsize=8)
    return figure
