r"""How far a softmax and a Sinkhorn model drift apart while they learn: GULP and linear CKA between their layers.

GULP (Boix-Adsera et al. 2022) compares representations a, b by what ridge regression makes of them. With covariances
S_a, S_b, S_ab of the centred representations and M_a = (S_a + lambda I)^-1 the ridge predictor of a target eta is
x -> a(x)^T M_a E[a eta], and

    d^2 = E_x sup_{|eta| <= 1} (prediction from a - prediction from b)^2
        = tr(M_a S_a M_a S_a) + tr(M_b S_b M_b S_b) - 2 tr(M_a S_ab M_b S_ab^T),

the mean over inputs of the predictors' worst disagreement, over targets eta with E[eta^2] <= 1. It is a distance, and
blind to orthogonal maps. Linear CKA is |S_ab|_F^2 / (|S_a|_F |S_b|_F) (Kornblith et al. 2019).
"""

from dataclasses import dataclass, field
from itertools import permutations

import torch
from torch import Tensor

from . import trained
from .base import COLOURS, Options, Result, Row, at_most, equals, normal, observed, picture, require, vanishes

TITLE = "Layers of a softmax and a Sinkhorn model over training: GULP and CKA"


@dataclass
class RepresentationsOptions(Options):
    """Sizes.

    Attributes:
        ridge: GULP's lambda, relative to a representation's mean variance.
        depth: blocks.
        width: of the tokens.
        n_train: digits to train on.
        n_look: digits on which representations are compared.
        looks: training steps at which they are.
        data: folder of the data sets.
    """

    ridge: float = 0.1
    depth: int = 3
    width: int = 32
    n_train: int = 1000
    n_look: int = 300
    looks: list[int] = field(default_factory=lambda: [0, 10, 40, 100])
    data: str = "data"

    def check(self) -> None:
        require(self.ridge > 0, f"ridge must be positive; got {self.ridge}")
        require(self.depth >= 1 and self.width >= 2, "depth must be at least 1 and width at least 2")
        require(self.n_train >= 50 and self.n_look > self.width, "n_train must be at least 50, n_look more than width")
        require(self.n_train + self.n_look <= 5000, "there are 5000 digits; n_train + n_look is more")
        require(len(self.looks) >= 2 and self.looks == sorted(set(self.looks)), f"looks must rise; got {self.looks}")
        require(self.looks[0] == 0, f"the first of looks must be 0, the same weights; got {self.looks}")


def centred(representation: Tensor) -> Tensor:
    """Representations (samples, width) less their mean, in units in which their mean variance is 1."""
    x = representation - representation.mean(0)
    return x / x.square().mean().sqrt()


def gulp(a: Tensor, b: Tensor, ridge: float) -> float:
    """GULP distance of centred representations (samples, width) of the same inputs, by the closed form."""
    return float(_gulp_square(a, b, ridge).clamp(min=0).sqrt())


def _gulp_square(a: Tensor, b: Tensor, ridge: float) -> Tensor:
    n = len(a)
    s_a, s_b, s_ab = a.T @ a / n, b.T @ b / n, a.T @ b / n
    whiten_a = torch.linalg.inv(s_a + ridge * torch.eye(a.shape[1], dtype=a.dtype))
    whiten_b = torch.linalg.inv(s_b + ridge * torch.eye(b.shape[1], dtype=b.dtype))
    own = torch.trace(whiten_a @ s_a @ whiten_a @ s_a) + torch.trace(whiten_b @ s_b @ whiten_b @ s_b)
    return own - 2 * torch.trace(whiten_a @ s_ab @ whiten_b @ s_ab.T)


def gulp_by_predictors(a: Tensor, b: Tensor, ridge: float) -> float:
    """The same from its definition: at each input the worst target for the two ridge predictors there.

    A target is a vector eta (samples,) with mean square at most 1; predictions at input x are linear in it, with
    weights p_a(x) - p_b(x), and the worst of them is sqrt(samples) times their norm.
    """
    n = len(a)

    def predictors(x: Tensor) -> Tensor:
        return x @ torch.linalg.solve(x.T @ x / n + ridge * torch.eye(x.shape[1], dtype=x.dtype), x.T / n)

    difference = predictors(a) - predictors(b)
    worst = n * difference.square().sum(1)
    return float(worst.mean().sqrt())


def linear_cka(a: Tensor, b: Tensor) -> float:
    """Linear centred kernel alignment of centred representations (samples, width): 1 for equal ones."""
    return float((a.T @ b).square().sum() / ((a.T @ a).norm() * (b.T @ b).norm()))


def run(options: RepresentationsOptions) -> Result:
    """Trains both models from the same seed, a second softmax model from another, and compares their layers."""
    data = trained.digits(options.data, options.n_train, options.n_look)
    plan = {"softmax": ("softmax", 0), "sinkhorn": ("sinkhorn", 0), "softmax, other seed": ("softmax", 1)}
    runs = {}
    for name, (normalizer, shift) in plan.items():
        model = trained.build(normalizer, options.seed + shift, options.depth, options.width)
        runs[name] = trained.train(model, data, options.looks, options.seed + shift)
    layers = {
        name: [[centred(layer.mean(1)) for layer in snapshot.layers] for snapshot in snapshots]
        for name, snapshots in runs.items()
    }
    ridge = options.ridge
    table: list[Row] = []
    for look, step in enumerate(options.looks):
        for layer in range(options.depth + 1):
            softmax = layers["softmax"][look][layer]
            row: Row = {"step": step, "layer": layer}
            for other in ("sinkhorn", "softmax, other seed"):
                row[f"GULP to {other}"] = gulp(softmax, layers[other][look][layer], ridge)
                row[f"CKA to {other}"] = linear_cka(softmax, layers[other][look][layer])
            row["accuracy softmax"] = runs["softmax"][look].accuracy
            row["accuracy sinkhorn"] = runs["sinkhorn"][look].accuracy
            table.append(row)

    a, b, c = (layers[name][-1][-1] for name in plan)
    rotation = torch.linalg.qr(normal("representations-rotation", options.seed, options.width, options.width))[0]
    distance = {(i, j): gulp(x, y, ridge) for (i, x), (j, y) in permutations(enumerate((a, b, c)), 2)}
    excess = max(distance[i, k] - distance[i, j] - distance[j, k] for i, j, k in permutations(range(3)))
    top = options.depth
    by_place = {(row["step"], row["layer"]): row for row in table}
    start, end = by_place[0, top], by_place[options.looks[-1], top]
    statements = [
        vanishes(
            "GULP's closed form is the mean over inputs of ridge predictors' worst disagreement: relative difference",
            gulp(a, b, ridge) / gulp_by_predictors(a, b, ridge) - 1,
            1e-8,
        ),
        vanishes("GULP of a layer to itself is 0: its square", _gulp_square(a, a, ridge), 1e-10),
        vanishes(
            "GULP does not see orthogonal maps: difference", gulp(a @ rotation, b, ridge) - gulp(a, b, ridge), 1e-8
        ),
        vanishes("CKA does not see orthogonal maps: difference", linear_cka(a @ rotation, b) - linear_cka(a, b), 1e-10),
        vanishes("GULP is symmetric: |d(a, b) - d(b, a)|", distance[0, 1] - distance[1, 0], 1e-10),
        at_most("GULP satisfies the triangle inequality: largest d(a, c) - d(a, b) - d(b, c)", excess, 1e-10),
        equals(
            "From the same seed both models begin with the same embedding: CKA",
            float(by_place[0, 0]["CKA to sinkhorn"]),
            1.0,
            1e-10,
        ),
        observed("CKA of the last layers at the start, softmax and Sinkhorn", float(start["CKA to sinkhorn"])),
        observed("CKA of the last layers at the end, softmax and Sinkhorn", float(end["CKA to sinkhorn"])),
        observed("CKA of the last layers at the end, softmax from two seeds", float(end["CKA to softmax, other seed"])),
        observed("GULP of the last layers at the end, softmax and Sinkhorn", float(end["GULP to sinkhorn"])),
        observed(
            "GULP of the last layers at the end, softmax from two seeds", float(end["GULP to softmax, other seed"])
        ),
    ]
    with picture(2) as (figure, grid):
        for axes, what in zip(grid[0], ("GULP", "CKA"), strict=True):
            for layer in range(options.depth + 1):
                for other, colour in (("sinkhorn", COLOURS["sinkhorn"]), ("softmax, other seed", COLOURS["softmax"])):
                    values = [float(by_place[step, layer][f"{what} to {other}"]) for step in options.looks]
                    label = f"to {other}" if layer == options.depth else None
                    shade = 0.3 + 0.7 * layer / options.depth
                    axes.plot(options.looks, values, "o-", color=colour, alpha=shade, label=label)
            axes.set(xlabel="training steps", ylabel=f"{what}, softmax model's layer")
            axes.legend(
                fontsize=8,
                title="darker: later layers",
                title_fontsize=8,
                loc="upper left",
                bbox_to_anchor=(0, 1.2),
                ncols=2,
            )
    return Result(statements, table, figure)
