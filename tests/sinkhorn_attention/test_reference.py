"""The definition itself, against the formulas of the paper and against other people's packages."""

import math

import numpy as np
import ot
import pytest
import torch
from sinkhorn_attention import marginal_error, sinkhorn, sinkhorn_attention
from sinkhorn_attention.reference import sinkhorn_attention_reference, sinkhorn_reference


def scores_of(std: float = 1.0, n: int = 9, m: int = 9, seed: int = 0) -> torch.Tensor:
    return torch.randn(3, n, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * std


def alternating(scores: torch.Tensor, n_iters: int) -> torch.Tensor:
    """Eq. 3 of the paper, literally: divide by row sums, then by column sums, and so on."""
    kernel = scores.exp()
    n, m = kernel.shape[-2:]
    for step in range(n_iters):
        kernel = (
            kernel / kernel.sum(-1, keepdim=True) if step % 2 == 0 else kernel / kernel.sum(-2, keepdim=True) * n / m
        )
    return kernel


@pytest.mark.parametrize(("n", "m"), [(9, 9), (4, 9), (9, 4), (1, 5), (5, 1), (1, 1)])
@pytest.mark.parametrize("n_iters", [1, 2, 3, 4, 5, 21])
def test_is_the_alternating_normalisation_of_the_paper(n: int, m: int, n_iters: int) -> None:
    scores = scores_of(n=n, m=m).requires_grad_()
    other = scores.detach().clone().requires_grad_()
    weights = scores_of(n=n, m=m, seed=1)
    got, want = sinkhorn_reference(scores, n_iters), alternating(other, n_iters)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
    (got * weights).sum().backward()
    (want * weights).sum().backward()
    torch.testing.assert_close(scores.grad, other.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sinkhorn_like", [sinkhorn_reference, sinkhorn])
def test_one_half_step_is_softmax_and_counts_end_on_the_side_they_say(sinkhorn_like) -> None:
    scores = scores_of(2.0, n=6, m=9)
    torch.testing.assert_close(sinkhorn_like(scores, 1), scores.softmax(-1), rtol=1e-12, atol=0)
    for n_iters in (1, 2, 3, 4):
        coupling = sinkhorn_like(scores, n_iters)
        error = marginal_error(coupling)
        ends, other = (error.rows, error.columns) if n_iters % 2 else (error.columns, error.rows)
        assert ends.max() < 1e-12
        assert other.min() > 1e-3
    uniform = sinkhorn_like(torch.zeros(2, 8, dtype=torch.float64), 2)
    torch.testing.assert_close(uniform, torch.full((2, 8), 1 / 8, dtype=torch.float64))


def test_one_half_step_equals_scaled_dot_product_attention() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 4, 7, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    bias = torch.randn(4, 7, 7, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 4, 7, 8, dtype=torch.float64)
    ours = sinkhorn_attention(*inputs, 1, attn_bias=bias)
    theirs = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=bias)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    gradients = [torch.autograd.grad((out * weights).sum(), [*inputs, bias]) for out in (ours, theirs)]
    for our, their in zip(*gradients, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("n", "m"), [(8, 8), (5, 8), (8, 5)])
def test_converges_to_the_plan_of_pot(n: int, m: int) -> None:
    for seed in range(3):
        scores = scores_of(1.5, n, m, seed)[0]
        rows, columns = np.full(n, 1 / n), np.full(m, 1 / m)
        plan = ot.sinkhorn(
            rows, columns, -scores.numpy(), reg=1.0, method="sinkhorn_log", stopThr=1e-14, numItermax=5000
        )
        got = sinkhorn(scores, 2001)
        torch.testing.assert_close(got, torch.from_numpy(plan) * n, rtol=0, atol=1e-10)


def test_row_shifts_change_nothing_and_column_shifts_nothing_at_convergence() -> None:
    """Proposition 1: exact in the rows at every odd count, in the columns at convergence only."""
    scores = scores_of(1.0)
    row_shift, column_shift = scores_of(seed=1)[..., :1], scores_of(seed=2)[..., :1, :]
    for n_iters in (1, 3, 5):
        torch.testing.assert_close(sinkhorn(scores + row_shift, n_iters), sinkhorn(scores, n_iters), rtol=0, atol=1e-12)
        assert (sinkhorn(scores + column_shift, n_iters) - sinkhorn(scores, n_iters)).abs().max() > 1e-6
    torch.testing.assert_close(sinkhorn(scores + column_shift, 501), sinkhorn(scores, 501), rtol=0, atol=1e-12)


def test_detached_gradient_is_the_one_of_softmax_with_a_constant_column_potential() -> None:
    scores = scores_of(1.5)
    weights = scores_of(seed=1)
    for n_iters in (1, 3, 5):
        variable = scores.clone().requires_grad_()
        (sinkhorn_reference(variable, n_iters, gradient="detached") * weights).sum().backward()
        # The column potential that n_iters half-steps end with, log K^T - log K^1 up to a constant of each row.
        ratio = sinkhorn_reference(scores, n_iters).log() - sinkhorn_reference(scores, 1).log()
        potential = (ratio - ratio.mean(-1, keepdim=True))[..., :1, :]
        constant = scores.clone().requires_grad_()
        ((constant + potential).softmax(-1) * weights).sum().backward()
        torch.testing.assert_close(variable.grad, constant.grad, rtol=1e-9, atol=1e-12)


def test_a_wrong_operator_would_be_noticed() -> None:
    """Without its column step the map is softmax: the marginals and the comparison with POT both tell."""
    scores = scores_of(1.5)
    assert marginal_error(sinkhorn(scores, 2001)).columns.max() < 1e-10
    assert marginal_error(sinkhorn(scores, 1)).columns.max() > 0.1


def test_scores_of_any_finite_size() -> None:
    scores = scores_of()[0] * 1e30
    for n_iters in (1, 2, 3, 7):
        coupling = sinkhorn_reference(scores, n_iters)
        assert coupling.isfinite().all()
        assert (coupling >= 0).all()
    assert math.isclose(float(sinkhorn_reference(scores, 3).sum()), 9.0, rel_tol=1e-9)


def test_attention_is_coupling_times_values_with_a_dropout_mask() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 5, 4, dtype=torch.float64) for _ in range(3))
    mask = (torch.rand(2, 5, 5) > 0.4).double() / 0.6
    got = sinkhorn_attention_reference(query, key, value, 3, 0.5, dropout_mask=mask)
    want = alternating(0.5 * query @ key.mT, 3) * mask @ value
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
