"""Plans glued at pivots: the formula, marginals, rank and gradients; masks are in test_normalizers.py."""

import math

import pytest
import torch
from sinkhorn_attention import Normalizer, get_normalizer, list_normalizers
from torch import Tensor


def tokens(n: int = 6, m: int = 6, d: int = 4, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(n, d), (m, d), (m, 3)]
    return [torch.randn(2, 2, *shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes]


def build(learned_masses: bool, n_iters: int = 5, dtype: torch.dtype = torch.float64) -> Normalizer:
    """Three pivots, far enough apart to matter; unequal masses where they are learned."""
    normalizer = get_normalizer(
        "lot", n_iters=n_iters, num_pivots=3, learned_masses=learned_masses, head_dim=4, num_heads=2
    ).to(dtype)
    with torch.no_grad():
        normalizer.pivot.copy_(torch.linspace(-3, 3, 24).sin().reshape(2, 3, 4))
        if learned_masses:
            normalizer.mass_logits.copy_(torch.tensor([[0.0, 1.0, -1.0], [0.5, 0.0, 0.3]]))
    return normalizer


def masses(normalizer: Normalizer) -> Tensor:
    if normalizer.mass_logits is None:
        return torch.full((2, 3), 1 / 3, dtype=torch.float64)
    return normalizer.mass_logits.softmax(-1)


def plan(scores: Tensor, rows: Tensor, columns: Tensor, n_iters: int) -> Tensor:
    """The half-steps on exp(scores), rows first, for marginals rows (n,) and columns (m,)."""
    kernel = scores.exp()
    for step in range(n_iters):
        by_row, by_column = (rows / kernel.sum(1))[:, None], (columns / kernel.sum(0))[None]
        kernel = kernel * (by_row if step % 2 == 0 else by_column)
    return kernel


def formula(normalizer: Normalizer, query: Tensor, key: Tensor, scale: float) -> Tensor:
    n, m = query.shape[-2], key.shape[-2]
    maps = []
    for sample in range(2):
        for head in range(2):
            pivot, w = normalizer.pivot[head], masses(normalizer)[head]
            equal = [torch.full((size,), 1 / size, dtype=torch.float64) for size in (n, m)]
            first = plan(scale * query[sample, head] @ pivot.T, equal[0], w, normalizer.n_iters)
            second = plan(scale * pivot @ key[sample, head].T, w, equal[1], normalizer.n_iters)
            maps.append(n * first @ torch.diag(1 / w) @ second)
    return torch.stack(maps).unflatten(0, (2, 2))


def same(have: Tensor, want: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-10)
    weights = torch.linspace(-1, 1, want.numel(), dtype=want.dtype).reshape(want.shape)
    pairs = [torch.autograd.grad((out * weights).sum(), inputs, retain_graph=True) for out in (have, want)]
    for got, expected in zip(*pairs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("shape", [(6, 6), (5, 7), (1, 4), (2, 1)])
@pytest.mark.parametrize("n_iters", [1, 2, 5])
@pytest.mark.parametrize("learned", [False, True])
def test_formula(learned: bool, n_iters: int, shape: tuple[int, int]) -> None:
    query, key, value = (tensor.requires_grad_() for tensor in tokens(*shape))
    normalizer = build(learned, n_iters)
    want = formula(normalizer, query, key, 0.7)
    parameters = list(normalizer.parameters())
    same(normalizer.coupling(query, key, scale=0.7), want, [query, key, *parameters])
    same(normalizer.attend(query, key, value, scale=0.7), want @ value, [query, key, value, *parameters])


@pytest.mark.parametrize(("n", "m"), [(6, 6), (5, 9)])
@pytest.mark.parametrize("learned", [False, True])
def test_marginals_and_rank(learned: bool, n: int, m: int) -> None:
    query, key, _ = tokens(n, m)
    few, many = build(learned, 5).coupling(query, key), build(learned, 401).coupling(query, key)
    torch.testing.assert_close(few.sum(-1), torch.ones_like(few.sum(-1)))
    assert (few.sum(-2) - n / m).abs().max() > 1e-6
    torch.testing.assert_close(many.sum(-1), torch.ones_like(many.sum(-1)))
    torch.testing.assert_close(many.sum(-2), torch.full_like(many.sum(-2), n / m), rtol=1e-8, atol=1e-8)
    assert (torch.linalg.matrix_rank(few) == 3).all()


def test_gradient() -> None:
    query, key, _ = (tensor.requires_grad_() for tensor in tokens(3, 4))
    normalizer = build(True, 3)

    def from_inputs(query: Tensor, key: Tensor, pivot: Tensor, mass_logits: Tensor) -> Tensor:
        parameters = {"pivot": pivot, "mass_logits": mass_logits}
        return torch.func.functional_call(normalizer, parameters, (query, key, torch.eye(4, dtype=torch.float64)))

    normalizer.forward = normalizer.attend
    assert torch.autograd.gradcheck(from_inputs, (query, key, *normalizer.parameters()))


@pytest.mark.parametrize("learned", [False, True])
def test_the_order_of_the_pivots_does_not_matter(learned: bool) -> None:
    query, key, _ = tokens(6, 7)
    normalizer = build(learned)
    want = normalizer.coupling(query, key)
    with torch.no_grad():
        for parameter in normalizer.parameters():
            parameter.copy_(parameter[:, [2, 0, 1]].clone())
    torch.testing.assert_close(normalizer.coupling(query, key), want)


@pytest.mark.parametrize("learned", [False, True])
def test_low_precision_and_large_scores(learned: bool) -> None:
    query, key, value = tokens(8, 8, dtype=torch.bfloat16)
    normalizer = build(learned, dtype=torch.float32)
    want = build(learned).attend(query.double(), key.double(), value.double())
    torch.testing.assert_close(normalizer.attend(query, key, value).double(), want, rtol=0.05, atol=0.05)
    wide = query.float(), key.float(), value.float()
    assert normalizer.attend(1e20 * wide[0], wide[1], wide[2]).isfinite().all()


def test_one_head_without_a_dimension_for_it() -> None:
    query, key, value = (tensor[0, 0] for tensor in tokens())
    normalizer = get_normalizer("lot", num_pivots=3, head_dim=4, num_heads=1).double()
    want = normalizer.attend(query[None], key[None], value[None])[0]
    torch.testing.assert_close(normalizer.attend(query, key, value), want)


def test_refusals() -> None:
    query, key, value = tokens()
    assert "lot" in list_normalizers()
    with pytest.raises(ValueError, match="head_dim and num_heads"):
        get_normalizer("lot")
    with pytest.raises(ValueError, match="num_pivots must be"):
        get_normalizer("lot", num_pivots=0, head_dim=4, num_heads=2)
    with pytest.raises(ValueError, match="no scores to add attn_bias to"):
        build(False).attend(query, key, value, attn_bias=torch.zeros(6, 6))
    with pytest.raises(ValueError, match="made for 2 heads of width 4"):
        build(False).attend(query[..., :3], key[..., :3], value)
    with pytest.raises(ValueError, match="made for 2 heads of width 4"):
        build(False).coupling(query[:, :1].expand(2, 5, 6, 4), key[:, :1].expand(2, 5, 6, 4))
    assert math.isclose(build(False).pivot[0, 0, 0].item(), math.sin(-3), rel_tol=1e-6)
