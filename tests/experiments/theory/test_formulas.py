"""The closed forms, each against an independent calculation."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.integrate import quad

from experiments.theory import (
    base,
    clusters,
    gradient_flow,
    heat_limit,
    invariance,
    regularity,
    representations,
    trained,
)


@pytest.mark.parametrize("eps", [0.05, 0.5])
def test_softmax_on_the_gaussian_by_quadrature(eps: float) -> None:
    """E[x' | x] under the Gaussian kernel and the standard Gaussian, at x = 0.7, by numerical integration."""

    def weight(y: float) -> float:
        return math.exp(-0.5 * (0.7 - y) ** 2 / eps - 0.5 * y**2)

    mean = quad(lambda y: y * weight(y), -9, 9, points=[0.7])[0] / quad(weight, -9, 9, points=[0.7])[0]
    assert (0.7 - mean) / eps == pytest.approx(0.7 * heat_limit.gaussian_slope(eps, "softmax"), rel=1e-8)


@pytest.mark.parametrize("eps", [0.05, 0.5])
def test_sinkhorn_on_the_gaussian_solves_its_equations(eps: float) -> None:
    """The coupling with correlation kappa has unit marginals, and its density is exp(-|x - y|^2 / (2 eps) + f + g)."""
    kappa = heat_limit.gaussian_multiplier(eps, "sinkhorn")
    precision = np.linalg.inv(np.array([[1.0, kappa], [kappa, 1.0]]))
    assert precision[0, 1] == pytest.approx(-1 / eps, rel=1e-12)
    assert heat_limit.gaussian_slope(eps, "sinkhorn") == pytest.approx(0.5 - eps / 8, abs=eps**3)


def test_published_values_of_the_drift() -> None:
    assert heat_limit.gaussian_slope(0.05, "softmax") == pytest.approx(0.95238, abs=1e-5)
    assert heat_limit.gaussian_slope(0.05, "sinkhorn") == pytest.approx(0.49375, abs=1e-5)
    assert heat_limit.gaussian_slope(0.02, "softmax") == pytest.approx(0.98039, abs=1e-5)
    assert heat_limit.gaussian_slope(0.02, "sinkhorn") == pytest.approx(0.49750, abs=1e-5)


def test_inverse_phi_bounds_the_spread_of_softmax() -> None:
    """The largest sum_j s_j e^(-s_j) / (1 + sum_j e^(-s_j)) over N - 1 equal s, by search."""
    for n in (2, 5, 100):
        s = np.linspace(0, 30, 300_001)
        spread = ((n - 1) * s * np.exp(-s) / (1 + (n - 1) * np.exp(-s))).max()
        assert regularity.inverse_phi(n - 1) == pytest.approx(spread, rel=1e-6)
    t = regularity.inverse_phi(11.0)
    assert t * math.exp(t + 1) == pytest.approx(11.0)


def test_wasserstein_bounds() -> None:
    assert regularity.theorem_14(2, 1.0, 3.0, 4.0, 5.0, 0.5) == 2 * 2 * 7 * 5 / 0.5
    want = 4 * (1 + math.sqrt(2) + 2 + math.sqrt(2) * math.sqrt(math.log(5) + 1 / (2 * math.e)) * 0.5)
    assert regularity.theorem_16(2, 1.0, 1.0, 0.5, 5, 9) == pytest.approx(want)
    assert regularity.corollary_17(2, 1.0, 1.0, 0.5, 5) == pytest.approx(want)


def test_wasserstein_uses_the_l1_metric_and_clouds_of_different_sizes() -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    assert regularity.wasserstein(x, x + 1) == pytest.approx(2.0)
    assert regularity.wasserstein(x, x[:1]) == pytest.approx(1.0)


def test_power_iteration_on_a_linear_map() -> None:
    a = base.normal("test", 0, 5, 5)
    found = regularity.jacobian_norm(lambda x: a @ x, base.normal("test-point", 0, 5, 3), steps=2000, tolerance=1e-13)
    assert found == pytest.approx(float(torch.linalg.matrix_norm(a, 2)), rel=1e-5)


def test_norms_of_the_layers_of_a_finished_run(monkeypatch) -> None:
    """The norm of the whole Jacobian of each attention layer, at the tokens that reach it."""
    model = trained.build("sinkhorn", 0, 2, 8).eval()
    sample = base.normal("test-image", 0, 1, 1, 28, 28).float()
    data = SimpleNamespace(eval_loader=lambda split: [(sample.expand(3, -1, -1, -1), torch.zeros(3))])
    config = {"attention": {"name": "sinkhorn"}, "model": {"name": "sinkformer_vit_mnist"}}
    loaded = SimpleNamespace(model=model, data=data, config=config)
    monkeypatch.setattr(regularity, "load_run", lambda folder, data: loaded)
    options, table = regularity.RegularityOptions(run="folder"), list[base.Row]()
    found = regularity._trained_layers(options, table)["sinkhorn"]
    x = model.patch_embed(sample.double())
    x = model.norm_pre(model._pos_embed(x))
    for block, norm in zip(model.blocks, found, strict=True):
        assert norm == pytest.approx(regularity.jacobian_norm_by_svd(block.attn, block.norm1(x).detach()), rel=1e-3)
        x = block(x)
    assert [row["|J|"] for row in table] == found


def test_gap_of_two_tokens() -> None:
    """For a short time g grows by g tanh(g^2/4); for large g like exp(t)."""
    assert clusters.gap_of_two(1.5, 1e-4) == pytest.approx(1.5 * (1 + 1e-4 * math.tanh(0.5625)), rel=1e-8)
    assert clusters.gap_of_two(20.0, 1.0) == pytest.approx(20 * math.e, rel=1e-9)


def test_flow_of_one_linear_drift() -> None:
    """For x' = -x: positions exp(-t) x, and the integral of |x|^2 is (1 - exp(-2)) / 2 times the first mean square."""
    x = base.normal("test", 0, 3, 2)
    path, dissipated = gradient_flow.flow(lambda y, a: -y, x, torch.eye(2).double(), 1.0, 4)
    torch.testing.assert_close(path[-1], math.exp(-1) * x, rtol=1e-9, atol=1e-9)
    assert dissipated == pytest.approx(0.5 * (1 - math.exp(-2)) * float(x.square().sum(-1).mean()), rel=1e-8)


def test_fixed_point_inverse() -> None:
    y = base.normal("test", 0, 4, 2)
    found = regularity.invert(lambda x: x.sin(), y, 0.5, 80)[-1]
    torch.testing.assert_close(found + 0.5 * found.sin(), y)


def test_number_of_clusters() -> None:
    x = torch.tensor([[0.0], [0.1], [0.2], [5.0], [5.05], [9.0]], dtype=torch.float64)
    assert clusters.number_of_clusters(torch.cdist(x, x), 0.15) == 3
    assert clusters.number_of_clusters(torch.cdist(x, x), 0.01) == 6


def test_mixture_quantiles() -> None:
    x = heat_limit.mixture_quantiles(2001, 1.0, 0.5)
    assert float(x.mean()) == pytest.approx(0.7 * -1.0 + 0.3, abs=1e-3)
    assert float(x.var()) == pytest.approx(0.25 + 1 - 0.16, abs=5e-3)


def test_contraction_of_a_known_matrix() -> None:
    k = 0.3 * torch.eye(4, dtype=torch.float64) + 0.7 / 4
    assert invariance.contraction(k) == pytest.approx(0.09)


def test_gulp_and_cka() -> None:
    a, b = (representations.centred(base.normal(name, 0, 50, 4)) for name in "ab")
    assert representations.gulp(a, b, 0.2) == pytest.approx(representations.gulp_by_predictors(a, b, 0.2), rel=1e-10)
    assert representations.linear_cka(a, 3 * a) == pytest.approx(1.0)
    mixed = 0.5 * a + 0.5 * b
    assert representations.linear_cka(a, b) < representations.linear_cka(a, mixed) < 1
    assert representations.gulp(a, mixed, 0.2) < representations.gulp(a, b, 0.2)
