"""Propositions 2 and 3 of Sander et al. 2022: which normalisations make attention a Wasserstein gradient flow.

Particles x_1..x_n in R^d are the measure mu = 1/n sum delta_{x_i}. Under Assumption 1, W_K^T W_Q = A symmetric and
W_V = -A, with c(x, x') = x^T A x' and k^0 = exp(c). The kernels integrate to 1 against mu, so the matrix that attention
uses is k / n. The Wasserstein gradient at particle i is n times the derivative with respect to x_i.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.integrate import solve_ivp
from torch import Tensor
from torch.autograd.functional import jacobian

from . import operator
from .base import COLOURS, Options, Result, Row, at_least, normal, picture, require, vanishes

TITLE = "Attention as a Wasserstein gradient flow (Propositions 2 and 3)"
ACCURACY = 1e-10  # of a step of the flows, relative to the positions
Drift = Callable[[Tensor, Tensor], Tensor]


@dataclass
class GradientFlowOptions(Options):
    """Sizes.

    Attributes:
        n: particles.
        d: dimension.
        spread: standard deviation of the particles.
        steps: times, apart from the start, at which the flows are looked at; the solver chooses its own steps.
        time: length of the flows.
    """

    n: int = 7
    d: int = 2
    spread: float = 1.0
    steps: int = 80
    time: float = 1.0

    def check(self) -> None:
        require(self.n >= 3, f"n must be at least 3; got {self.n}")
        require(self.d >= 2, f"d must be at least 2 (two axes are drawn); got {self.d}")
        require(self.spread > 0, f"spread must be positive; got {self.spread}")
        require(self.steps >= 1, f"steps must be positive; got {self.steps}")
        require(self.time > 0, f"time must be positive; got {self.time}")


def scores(x: Tensor, a: Tensor) -> Tensor:
    """c(x_i, x_j) = x_i^T A x_j, (..., n, n), of particles (..., n, d)."""
    return x @ a @ x.mT


def drift_none(x: Tensor, a: Tensor) -> Tensor:
    """T^0_i = 1/n sum_j exp(c_ij) W_V x_j, without normalisation."""
    return -scores(x, a).exp() @ x @ a / x.shape[-2]


def drift_softmax(x: Tensor, a: Tensor) -> Tensor:
    """T^1_i = sum_j softmax(c)_ij W_V x_j."""
    return -operator.coupling(scores(x, a), 1) @ x @ a


def drift_sinkhorn(x: Tensor, a: Tensor) -> Tensor:
    """T^inf_i = sum_j K^inf_ij W_V x_j."""
    return -operator.converged(scores(x, a)) @ x @ a


def energy_none(x: Tensor, a: Tensor) -> Tensor:
    """F^0 = 1/2 int k^0 d(mu x mu)."""
    return 0.5 * scores(x, a).exp().mean()


def energy_sinkhorn(x: Tensor, a: Tensor) -> Tensor:
    """F^inf = -1/2 int k^inf log(k^inf / k^0) d(mu x mu), with k^inf = n K^inf."""
    c = scores(x, a)
    kernel = len(x) * operator.converged(c)
    return -0.5 * (kernel * (kernel.log() - c)).mean()


def softmax_potential(points: Tensor, x: Tensor, a: Tensor) -> Tensor:
    """The potential log int k^0(y, x') dmu(x') at points y (m, d): T^1 = minus its gradient in y, mu held fixed."""
    return (points @ a @ x.T).exp().mean(1).log()


def minus_particle_gradient(energy: Callable[[Tensor, Tensor], Tensor], x: Tensor, a: Tensor) -> Tensor:
    """-n dF/dx_i, (n, d): minus the Wasserstein gradient at the particles."""
    x = x.detach().requires_grad_()
    return -len(x) * torch.autograd.grad(energy(x, a), x)[0]


def asymmetry(drift: Drift, x: Tensor, a: Tensor) -> Tensor:
    """J - J^T for the Jacobian J (n d, n d) of the stacked drift; zero if and only if, locally, it is a gradient."""
    j = jacobian(lambda points: drift(points, a), x).reshape(x.numel(), x.numel())
    return j - j.T


def work_around_a_loop(drift: Drift, x: Tensor, a: Tensor, sides: tuple[Tensor, Tensor], points: int = 128) -> float:
    """Closed integral of T . dx over that of |T . dx|, on the ellipse x + cos(t) s_1 + sin(t) s_2; 0 for a gradient.

    The trapezoidal rule is exact up to rounding with points enough: the integrand is analytic and periodic.
    """
    t = (torch.arange(points, dtype=x.dtype) * (2 * torch.pi / points)).reshape(-1, 1, 1)
    place, direction = x + t.cos() * sides[0] + t.sin() * sides[1], t.cos() * sides[1] - t.sin() * sides[0]
    work = (drift(place, a) * direction).sum((-2, -1))
    return float(work.sum() / work.abs().sum())


def flow(drift: Drift, x: Tensor, a: Tensor, time: float, steps: int) -> tuple[Tensor, float]:
    """Solves x' = T(x) for particles (n, d), by a Runge-Kutta rule of order 8 with steps of its own choice.

    Returns:
        The positions (steps + 1, n, d) at even distances in time, and the integral of 1/n sum_i |T_i|^2 over time,
        solved for beside them: what an energy must lose.

    Raises:
        RunError: where the solver gives up.
    """

    def speed(_: float, state: NDArray[np.float64]) -> NDArray[np.float64]:
        velocity = drift(torch.from_numpy(state[:-1].copy()).reshape(x.shape), a)
        return np.append(velocity.flatten().numpy(), float(velocity.square().sum(-1).mean()))

    start, times = np.append(x.flatten().numpy(), 0.0), np.linspace(0, time, steps + 1)
    solution = solve_ivp(speed, (0, time), start, "DOP853", times, rtol=ACCURACY, atol=ACCURACY)
    require(solution.success, f"the flow was not solved ({solution.message}): make time or spread smaller")
    path = torch.from_numpy(solution.y[:-1].T.copy()).reshape(steps + 1, *x.shape)
    return path, float(solution.y[-1, -1])


def run(options: GradientFlowOptions) -> Result:
    """Compares drifts with gradients of the energies, looks for an energy of softmax, and follows the three flows."""
    n, d, seed = options.n, options.d, options.seed
    x = options.spread * normal("gradient-flow-particles", seed, n, d)
    a = normal("gradient-flow-matrix", seed, d, d)
    a = 0.5 * (a + a.T)
    a = a / torch.linalg.matrix_norm(a, 2)
    drifts: dict[str, Drift] = {"none": drift_none, "softmax": drift_softmax, "sinkhorn": drift_sinkhorn}
    energies = {"none": energy_none, "sinkhorn": energy_sinkhorn}

    gradient_error = {
        name: float((drifts[name](x, a) - minus_particle_gradient(energies[name], x, a)).abs().max())
        for name in energies
    }
    points = x.clone().requires_grad_()
    frozen = -torch.autograd.grad(softmax_potential(points, x, a).sum(), points)[0]
    antisymmetric = {name: asymmetry(drift, x, a) for name, drift in drifts.items()}
    sides = normal("gradient-flow-side", seed, n, d), normal("gradient-flow-other-side", seed, n, d)
    work = {name: work_around_a_loop(drift, x, a, sides) for name, drift in drifts.items()}
    paths, dissipated = {}, {}
    for name, drift in drifts.items():
        paths[name], dissipated[name] = flow(drift, x, a, options.time, options.steps)
    levels = {name: torch.stack([energy(y, a) for y in paths[name]]) for name, energy in energies.items()}
    balance = {name: float(levels[name][-1] - levels[name][0]) + dissipated[name] for name in energies}

    statements = [
        vanishes("T^0 = -grad F^0: max |T^0_i + n dF^0/dx_i|", gradient_error["none"], 1e-9),
        vanishes("T^inf = -grad F^inf: max |T^inf_i + n dF^inf/dx_i|", gradient_error["sinkhorn"], 1e-9),
        vanishes(
            "T^1 is minus the gradient of log int k^0(., x') dmu(x') with mu held fixed: largest difference",
            (drift_softmax(x, a) - frozen).abs().max(),
            1e-9,
        ),
        vanishes("The Jacobian of T^0 is symmetric: max |J - J^T|", antisymmetric["none"].abs().max(), 1e-9),
        vanishes("The Jacobian of T^inf is symmetric: max |J - J^T|", antisymmetric["sinkhorn"].abs().max(), 1e-9),
        at_least(
            "T^1 is the gradient of no energy: its Jacobian is not symmetric, max |J - J^T|",
            antisymmetric["softmax"].abs().max(),
            1e-3,
        ),
        vanishes("T^0 does no work around a closed loop: share of int |T^0 . dx|", work["none"], 1e-10),
        vanishes("T^inf does no work around a closed loop: share of int |T^inf . dx|", work["sinkhorn"], 1e-10),
        at_least("T^1 does work around a closed loop: share of int |T^1 . dx|", abs(work["softmax"]), 1e-3),
        vanishes("F^0 never rises along its flow: largest rise", largest_rise(levels["none"]), 1e-12),
        vanishes("F^inf never rises along its flow: largest rise", largest_rise(levels["sinkhorn"]), 1e-12),
        vanishes("F^0 loses what its flow dissipates, int 1/n sum |T^0_i|^2 dt: difference", balance["none"], 1e-8),
        vanishes(
            "F^inf loses what its flow dissipates, int 1/n sum |T^inf_i|^2 dt: difference", balance["sinkhorn"], 1e-8
        ),
    ]
    table: list[Row] = [
        {
            "normalisation": name,
            "max |J - J^T|": float(antisymmetric[name].abs().max()),
            "share of work around the loop": work[name],
            "energy at the start": float(levels[name][0]) if name in levels else "",
            "energy at the end": float(levels[name][-1]) if name in levels else "",
        }
        for name in drifts
    ]
    with picture(4) as (figure, grid):
        for axes, (name, path) in zip(grid[0], paths.items(), strict=False):
            axes.plot(path[:, :, 0], path[:, :, 1], color=COLOURS[name], linewidth=1.2)
            axes.plot(path[0, :, 0], path[0, :, 1], "o", color=COLOURS[name], markersize=4, fillstyle="none")
            axes.plot(path[-1, :, 0], path[-1, :, 1], "o", color=COLOURS[name], markersize=5)
            axes.set_title({"none": "no normalisation"}.get(name, name))
            axes.set_aspect("equal", "datalim")
        largest = float(antisymmetric["softmax"].abs().max())
        image = grid[0, 3].imshow(antisymmetric["softmax"], cmap="RdBu", vmin=-largest, vmax=largest)
        grid[0, 3].set_title("J - J^T of softmax")
        figure.colorbar(image, ax=grid[0, 3])
    return Result(statements, table, figure)


def largest_rise(levels: Tensor) -> Tensor:
    """The largest increase from one step to the next, 0 where there is none."""
    return levels.diff().max().clamp(min=0.0)
