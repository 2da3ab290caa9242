r"""How much attention can move its output: Wasserstein bounds, norms of Jacobians, inverses, tokens that come or go.

With an interaction G = exp(a) and values y = l(x), attention takes a cloud mu to the cloud mu A_mu of its outputs. W1
has the l1 ground metric. Vuckovic, Baratin and Tachet des Combes ("On the Regularity of Attention", 2021):

- Theorem 14, on a compact convex E in R^d, G >= eps(G): the contraction coefficient of mu -> mu A_mu is at most
  d Lip(l) 2 (|G|_{Lip,inf} + |G|_{inf,Lip}) diam(E) / eps(G).
- Theorem 16, on R^d with G = exp(-|x - y|_2^2), clouds of N and M points: W1(mu A_mu, nu A_nu) is at most
  2 d tau(L) [|G|_inf + sqrt(d) + 2 + sqrt(d) sqrt(ln min(N, M) + 1/(2e)) |G|_Lip] W1(mu, nu); Corollary 17: N = M.

Kim, Papamakarios and Mnih (2021) bound the 2-norm of the Jacobian instead. For X -> softmax(-kappa |x_i - x_j|^2) X

    |J|_2 <= sqrt(N) (1 + 4 phi^{-1}(N - 1)),      phi(t) = t exp(t + 1),

because sum_j K_ij |x_i - x_j|^2 <= phi^{-1}(N - 1) / kappa whatever the points. Dot products have no such bound:
at a token 0 the Jacobian holds the covariance of all others. Where s |J| <= c < 1 for all X, X + s f(X) is inverted by
iterating X <- Y - s f(X), whose error falls by c each time.

These bounds are far above what happens. What would notice a wrong operator is the constant of small moves: for clouds
that differ by little, W1 is the l1 distance token by token, and the largest ratio is the largest column sum |J|_1 of
the Jacobian. It is taken from the formulas by finite differences, and met by pairs of clouds that the operator moves.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import ot
import torch
from scipy.special import lambertw
from sinkhorn_attention.reference import sinkhorn_reference
from torch import Tensor, nn

from ..evaluate import load_run
from . import operator, trained
from .base import (
    COLOURS,
    INK,
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

TITLE = "Lipschitz constants, inverses and moved tokens"
Map = Callable[[Tensor], Tensor]


@dataclass
class RegularityOptions(Options):
    """Sizes.

    Attributes:
        n: tokens of a cloud.
        d: dimension.
        pairs: pairs of clouds whose distances are compared.
        radii: radii of clouds at which the norms of Jacobians are measured, rising.
        n_iters: half-steps of Sinkhorn attention.
        contraction: s |J| of the residual layer that is inverted, below 1.
        model_depth: blocks of the trained models whose layers are measured; 0 for none.
        model_steps: their training steps.
        run: folder of a finished run of experiments.train whose layers are measured in their place; "" for none.
        data: folder of the data sets.
    """

    n: int = 12
    d: int = 2
    pairs: int = 40
    radii: list[float] = field(default_factory=lambda: [1.0, 2.0, 4.0, 8.0])
    n_iters: int = 21
    contraction: float = 0.5
    model_depth: int = 2
    model_steps: int = 60
    run: str = ""
    data: str = "data"

    def check(self) -> None:
        require(self.n >= 3 and self.d >= 1 and self.pairs >= 1, "n must be at least 3, d and pairs at least 1")
        require(len(self.radii) >= 2 and self.radii == sorted(self.radii), f"radii must rise; got {self.radii}")
        require(self.radii[0] > 0, f"radii must be positive; got {self.radii}")
        require(0 < self.contraction < 1, f"contraction must lie between 0 and 1; got {self.contraction}")
        require(self.n_iters >= 1, f"n_iters must be at least 1; got {self.n_iters}")
        finished = not self.run or (Path(self.run) / "result.json").is_file()
        require(finished, f"run={self.run} is no folder of a finished run: it has no result.json")
        require(self.model_depth >= 0 and self.model_steps >= 0, "model_depth and model_steps must be at least 0")


def theorem_14(d: int, lip_l: float, g_lip_inf: float, g_inf_lip: float, diameter: float, g_min: float) -> float:
    """Bound of the W1 contraction coefficient on a compact convex set."""
    return d * lip_l * 2 * (g_lip_inf + g_inf_lip) * diameter / g_min


def theorem_16(d: int, tau: float, g_inf: float, g_lip: float, n: int, m: int) -> float:
    """Bound of the W1 ratio on R^d for clouds of n and m points and a Gaussian interaction."""
    entropy = math.sqrt(math.log(min(n, m)) + 1 / (2 * math.e))
    return 2 * d * tau * (g_inf + math.sqrt(d) + 2 + math.sqrt(d) * entropy * g_lip)


def corollary_17(d: int, tau: float, g_inf: float, g_lip: float, n: int) -> float:
    """Theorem 16 for clouds of as many points."""
    return theorem_16(d, tau, g_inf, g_lip, n, n)


def inverse_phi(value: float) -> float:
    """The t with t exp(t + 1) = value, by Lambert's W function."""
    return float(lambertw(value / math.e).real)


def l2_bound(n: int) -> float:
    """Bound of |J|_2 for X -> softmax(-kappa |x_i - x_j|^2) X with n tokens, whatever kappa."""
    return math.sqrt(n) * (1 + 4 * inverse_phi(n - 1))


def wasserstein(x: Tensor, y: Tensor) -> float:
    """W1 with the l1 ground metric of clouds (n, d) and (m, d) with equal weights, by POT."""
    cost = ot.dist(x.numpy(), y.numpy(), metric="cityblock")
    return float(ot.emd2(np.full(len(x), 1 / len(x)), np.full(len(y), 1 / len(y)), cost))


def by_formula(kernel: Map, n_iters: int = 1) -> Map:
    """X -> K(X) X, with K the n_iters half-steps of exp(kernel(X)), by the definition alone."""
    return lambda x: sinkhorn_reference(kernel(x), n_iters) @ x


def minus_squared_distances(x: Tensor) -> Tensor:
    """-|x_i - x_j|^2, (n, n)."""
    return -(x.unsqueeze(-2) - x.unsqueeze(-3)).square().sum(-1)


def constant_of_small_moves(function: Map, x: Tensor, h: float = 1e-6) -> tuple[float, Tensor]:
    """|J|_1 at x by central differences, and the move of length h, of one coordinate, that attains it."""
    moves = h * torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape)
    sums = torch.stack([(function(x + move) - function(x - move)).abs().sum() / (2 * h) for move in moves])
    return float(sums.max()), moves[int(sums.argmax())]


def ratio_of_small_moves(function: Map, formula: Map, clouds: list[Tensor]) -> float:
    """The largest W1 ratio of a function over moves of the clouds, over the constant that the formula has there."""
    found = [(x, *constant_of_small_moves(formula, x)) for x in clouds]
    return largest_ratio(function, [(x - move, x + move) for x, _, move in found]) / max(c for _, c, _ in found)


def jacobian_norm(function: Map, x: Tensor, steps: int = 100, tolerance: float = 1e-9, seed: int = 0) -> float:
    """|J|_2 of a function at x by power iteration on J^T J: J v by central differences, J^T w by autograd."""
    v = normal("regularity-power", seed, *x.shape)
    v = v / v.norm()
    h = 1e-6 * max(1.0, float(x.norm()))
    estimate = 0.0
    for _ in range(steps):
        with torch.no_grad():
            w = (function(x + h * v) - function(x - h * v)) / (2 * h)
        point = x.detach().requires_grad_()
        image = torch.autograd.grad(function(point), point, w)[0]
        previous, estimate = estimate, float(image.norm().sqrt())  # v has norm 1: |J^T J v| tends to sigma^2
        if estimate == 0.0 or abs(estimate - previous) <= tolerance * estimate:
            break
        v = image / image.norm()
    return estimate


def jacobian_norm_by_svd(function: Map, x: Tensor) -> float:
    """|J|_2 from the whole Jacobian."""
    j = torch.autograd.functional.jacobian(function, x).reshape(x.numel(), x.numel())
    return float(torch.linalg.matrix_norm(j, 2))


def self_attention(name: str, scale: float, **options: object) -> Map:
    """X -> K(X) X for a registered normalizer; `scale` as in scaled_dot_product_attention."""
    normalizer = operator.normalizer(name, **options)
    return lambda x: normalizer.attend(x, x, x, scale=scale)


def invert(function: Map, y: Tensor, s: float, steps: int) -> list[Tensor]:
    """Iterates X <- Y - s f(X), from Y: (steps + 1) approximations of the X with X + s f(X) = Y."""
    found = [y]
    for _ in range(steps):
        found.append(y - s * function(found[-1]))
    return found


def pairs_of_clouds(options: RegularityOptions) -> list[tuple[Tensor, Tensor]]:
    """Clouds and neighbours of them, from near to far, of sizes from small to large."""
    found = []
    for i in range(options.pairs):
        x, step = (normal(f"regularity-{name}-{i}", options.seed, options.n, options.d) for name in ("cloud", "step"))
        size, length = 10 ** (i % 4 / 2 - 1), 10 ** (-(i // 4 % 4) / 1.5)
        found.append((size * x, size * (x + length * step)))
    return found


def largest_ratio(function: Map, clouds: list[tuple[Tensor, Tensor]]) -> float:
    """The largest W1(f(x), f(y)) / W1(x, y) over pairs of clouds."""
    return max(wasserstein(function(x), function(y)) / wasserstein(x, y) for x, y in clouds)


def run(options: RegularityOptions) -> Result:
    """Compares bounds with measured ratios and norms, inverts a residual layer, and takes tokens away."""
    n, d, seed = options.n, options.d, options.seed
    sinkhorn: dict[str, object] = {"n_iters": options.n_iters}
    # exp(-|x - y|^2) is softmax attention from distances at scale 2: the normalizer has a factor of 1/2.
    gaussian = {"l2": self_attention("l2", 2.0), "sinkhorn": self_attention("sinkhorn_l2", 2.0, **sinkhorn)}
    lipschitz_of_g = math.sqrt(2 / math.e)  # of exp(-|x|^2), in either norm: the largest |2 t exp(-t^2)|
    clouds = pairs_of_clouds(options)
    ratios = {name: largest_ratio(function, clouds) for name, function in gaussian.items()}
    fewer = [(x, x[:-1]) for x, _ in clouds]
    deleted = {name: largest_ratio(function, fewer) for name, function in gaussian.items()}
    bound_17 = corollary_17(d, 1.0, 1.0, lipschitz_of_g, n)
    bound_16 = theorem_16(d, 1.0, 1.0, lipschitz_of_g, n, n - 1)

    # The box [-1, 1]^d with G = exp(<x, y>): sup |grad G| <= exp(d) in the l1 metric, G >= exp(-d), diameter 2 d.
    box = [(x.tanh(), y.tanh()) for x, y in clouds]
    bound_14 = theorem_14(d, 1.0, math.exp(d), math.exp(d), 2.0 * d, math.exp(-d))
    in_box = largest_ratio(self_attention("softmax", 1.0), box)
    few, few_in_box = [x for x, _ in clouds[:8]], [x for x, _ in box[:8]]
    small_moves = {
        "softmax of distances": ratio_of_small_moves(gaussian["l2"], by_formula(minus_squared_distances), few),
        "Sinkhorn of distances": ratio_of_small_moves(
            gaussian["sinkhorn"], by_formula(minus_squared_distances, options.n_iters), few
        ),
        "softmax of dot products": ratio_of_small_moves(
            self_attention("softmax", 1.0), by_formula(lambda x: x @ x.mT), few_in_box
        ),
    }

    padded = torch.cat([clouds[0][0], torch.full((3, d), 7.0, dtype=torch.float64)])
    keep = torch.arange(n + 3) < n
    attention = operator.normalizer("sinkhorn_l2", **sinkhorn)
    with_padding = attention.attend(padded, padded, padded, scale=2.0, query_mask=keep, key_mask=keep)[:n]
    moved_by_padding = (with_padding - gaussian["sinkhorn"](clouds[0][0])).abs().max()

    kinds = {
        "softmax": self_attention("softmax", 1.0),
        "l2": self_attention("l2", 1.0),
        "sinkhorn": self_attention("sinkhorn", 1.0, **sinkhorn),
    }
    shape = normal("regularity-shape", seed, n, d)
    shape[0] = 0.0  # the token at which the Jacobian of dot-product attention is the covariance of all
    shape = shape / shape.norm(dim=1).max()
    table: list[Row] = []
    norms: dict[str, list[float]] = {name: [] for name in kinds}
    for radius in options.radii:
        for name, function in kinds.items():
            norms[name].append(jacobian_norm(function, radius * shape))
            table.append(
                {
                    "attention": name,
                    "radius": radius,
                    "|J|": norms[name][-1],
                    "bound": l2_bound(n) if name == "l2" else "",
                }
            )
    iteration_error = max(
        abs(jacobian_norm(function, shape) / jacobian_norm_by_svd(function, shape) - 1) for function in kinds.values()
    )

    s = options.contraction / l2_bound(n)
    x = 2 * shape
    y = x + s * kinds["l2"](x)
    errors = [float((z - x).norm()) for z in invert(kinds["l2"], y, s, 60)]
    rate = max(later / earlier for earlier, later in pairwise(errors[:9]) if earlier > 1e-12)
    s_sinkhorn = options.contraction / jacobian_norm(kinds["sinkhorn"], x)
    y = x + s_sinkhorn * kinds["sinkhorn"](x)
    sinkhorn_errors = [float((z - x).norm()) for z in invert(kinds["sinkhorn"], y, s_sinkhorn, 60)]

    sizes, covariance = options.radii, torch.cov(shape.T, correction=0).reshape(d, d)
    statements = [
        at_most(
            "Corollary 17: W1(mu A_mu, nu A_nu) / W1(mu, nu), largest measured, softmax of distances",
            ratios["l2"],
            bound_17,
        ),
        at_most("Theorem 16: the same where a token is deleted", deleted["l2"], bound_16),
        at_most("Theorem 14: the same for dot products on the box [-1, 1]^d", in_box, bound_14),
        *(
            equals(f"W1 ratio of the most sensitive small move over |J|_1 of the formula: {name}", ratio, 1.0, 1e-3)
            for name, ratio in small_moves.items()
        ),
        observed(
            "Largest W1 ratio measured for Sinkhorn on the clouds of Corollary 17, which it does not cover",
            ratios["sinkhorn"],
        ),
        observed("Largest W1 ratio measured for Sinkhorn where a token is deleted", deleted["sinkhorn"]),
        vanishes("Padding that is masked moves no output: max |difference|", moved_by_padding, 1e-12),
        vanishes(
            "Power iteration finds the norm of the Jacobian: largest relative difference to the SVD",
            iteration_error,
            1e-5,
        ),
        at_least(
            "Dot-product softmax attention is not Lipschitz: |J| over radius^2 |Cov|, what a token at 0 sees",
            norms["softmax"][-1] / (sizes[-1] ** 2 * float(torch.linalg.matrix_norm(covariance, 2))),
            1.0,
        ),
        observed("Dot-product softmax attention: exponent of |J| in the radius", slope(sizes, norms["softmax"])),
        at_most(
            "Attention from distances is: largest |J| over the radii, against sqrt(N)(1 + 4 phi^-1(N-1))",
            max(norms["l2"]),
            l2_bound(n),
        ),
        observed("Sinkhorn attention: exponent of |J| in the radius", slope(sizes, norms["sinkhorn"])),
        vanishes(
            "The residual layer from distances, scaled to a contraction, is inverted: error of the inverse",
            errors[-1],
            1e-10,
        ),
        at_most(
            "The error of the inverse falls at least by s |J| each time: largest factor", rate, options.contraction
        ),
        observed(
            "Sinkhorn attention, scaled by |J| measured at the solution: error of the inverse", sinkhorn_errors[-1]
        ),
    ]
    trained_norms = _trained_layers(options, table)
    for name, values in trained_norms.items():
        statements.append(
            observed(f"Largest |J| of an attention layer of the trained {name} model, at one sample", max(values))
        )
    with picture(3) as (figure, grid):
        growth, inverse, layers = grid[0]
        for name in kinds:
            growth.loglog(sizes, norms[name], "o-", color=COLOURS[name], label=name)
        growth.axhline(l2_bound(n), color=COLOURS["l2"], linestyle=":", label="bound for l2")
        growth.set(xlabel="radius of the cloud", ylabel="|J|")
        for name, numbers in (("l2", errors), ("sinkhorn", sinkhorn_errors)):
            inverse.semilogy([max(number, 1e-17) for number in numbers], color=COLOURS[name], label=name)
        inverse.set(xlabel="iterations", ylabel="error of the inverse")
        for name, values in trained_norms.items():
            layers.plot(range(1, len(values) + 1), values, "o-", color=COLOURS.get(name, INK), label=name)
        layers.set(xlabel="layer", ylabel="|J| at one sample", title="trained models")
        growth.legend(fontsize=8)
        inverse.legend(fontsize=8)
    return Result(statements, table, figure)


def norms_of_layers(model: nn.Module, sample: Tensor) -> list[float]:
    """|J| of each attention layer (projections included) of a vision transformer, at the tokens of one sample (1, ...).

    The model is changed to float64.
    """
    tokens, _ = trained.outputs_of_layers(model, sample)
    model.double()
    blocks = list(model.blocks)  # type: ignore[arg-type]
    inputs = [block.norm1(x).detach() for block, x in zip(blocks, tokens[:-1], strict=True)]
    return [jacobian_norm(block.attn, x, steps=30, tolerance=1e-5) for block, x in zip(blocks, inputs, strict=True)]


def _trained_layers(options: RegularityOptions, table: list[Row]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    if options.run:
        run = load_run(options.run, data=options.data)
        require(
            all(hasattr(block, "attn") and hasattr(block, "norm1") for block in getattr(run.model, "blocks", [None])),
            f"run={options.run}: its model, {run.config['model']['name']}, is no vision transformer",
        )
        sample = next(iter(run.data.eval_loader("train")))[0][:1]
        found[run.config["attention"]["name"]] = norms_of_layers(run.model, sample)
    elif options.model_depth:
        data = trained.digits(options.data, 500, 50)
        for name in ("softmax", "sinkhorn"):
            model = trained.build(name, options.seed, options.model_depth, 16)
            trained.train(model, data, [options.model_steps], options.seed)
            found[name] = norms_of_layers(model, data[2][:1])
    for name, values in found.items():
        table += [{"attention": f"trained {name}", "layer": i + 1, "|J|": value} for i, value in enumerate(values)]
    return found
