"""The derivative at convergence against the unrolled one, finite differences and its own equations."""

import math
from typing import Any

import pytest
import torch
from sinkhorn_attention import get_normalizer, sinkhorn_attention
from sinkhorn_attention.engines import domains, implicit
from sinkhorn_attention.engines.heads import Heads
from sinkhorn_attention.engines.implicit import NotConvergedError, implicit_attention, implicit_coupling
from sinkhorn_attention.engines.problem import Problem
from sinkhorn_attention.reference import sinkhorn_attention_reference, sinkhorn_reference
from torch import Tensor


def attend(query: Tensor, key: Tensor, value: Tensor, n_iters: int, scale: float, attn_bias=None, **options) -> Tensor:
    return implicit_attention(Problem(query, key, value, attn_bias=attn_bias, n_iters=n_iters, scale=scale, **options))


SHAPES = [(7, 7), (5, 9), (9, 5), (1, 4), (4, 1), (1, 1), (2, 30)]


def normal(*shape: int, seed: int = 0, std: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (std * torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)


def random_mask(*shape: int, seed: int = 0, keep: float = 0.7) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < keep


def value_and_gradients(function, inputs: list[Tensor], seed: int = 9) -> tuple[Tensor, tuple[Tensor, ...]]:
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    output = function(*inputs)
    weights = normal(*output.shape, seed=seed, dtype=output.dtype)
    return output.detach(), torch.autograd.grad(output, inputs, weights)


def assert_same_coupling(scores: Tensor, n_iters: int, tolerance: float = 1e-12) -> None:
    """Value and gradient of the coupling against the unrolled float64 definition."""
    got, (found,) = value_and_gradients(lambda c: implicit_coupling(c, n_iters), [scores])
    want, (expected,) = value_and_gradients(lambda c: sinkhorn_reference(c, n_iters), [scores.double()])
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=0)
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("n_iters", [200, 201, 64, 65, 128])
@pytest.mark.parametrize(("n", "m"), SHAPES)
def test_agrees_with_unrolled_at_convergence(n: int, m: int, n_iters: int) -> None:
    """Odd and even counts, whole blocks of half-steps and others, both sides eliminated."""
    assert_same_coupling(normal(2, 3, n, m), n_iters, 1e-12 if n_iters > 150 else 1e-6)


def test_agrees_for_scores_without_leading_dimensions() -> None:
    assert_same_coupling(normal(6, 8), 201)


@pytest.mark.parametrize("std", [3.0, 4.0])
def test_agrees_for_large_scores(std: float) -> None:
    assert_same_coupling(normal(2, 8, 8, std=std), 4001, 1e-9)


def test_agrees_where_the_exponential_domain_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no head is trusted, all are computed in the log domain."""
    monkeypatch.setitem(domains.TRUSTED_LOG2, torch.float64, -1e9)
    for n_iters in (200, 201):
        assert_same_coupling(normal(2, 6, 9), n_iters)
    given = Heads(Problem(scores=normal(2, 4, 4), n_iters=5))
    assert implicit._in_exponential_domain(given, torch.empty(2, 4, 4).double()).tolist() == [0, 1]


def test_float32() -> None:
    assert_same_coupling(normal(4, 12, 12, dtype=torch.float32), 101, 2e-6)
    assert_same_coupling(normal(4, 12, 20, std=2.0, dtype=torch.float32), 501, 1e-5)


def test_gradient_of_half_precision_comes_back_in_half_precision() -> None:
    scores = normal(3, 6, 6).bfloat16().requires_grad_()
    coupling = implicit_coupling(scores, 51)
    assert coupling.dtype == torch.float32
    (gradient,) = torch.autograd.grad(coupling.square().sum(), scores)
    assert gradient.dtype == torch.bfloat16


@pytest.mark.parametrize(("n", "m"), [(5, 5), (4, 6), (6, 4)])
def test_agrees_with_finite_differences(n: int, m: int) -> None:
    scores, weights, h = normal(n, m), normal(n, m, seed=5), 1e-5
    _, (found,) = value_and_gradients(lambda c: implicit_coupling(c, 401), [scores], seed=5)
    for i in range(n):
        for j in range(m):
            step = torch.zeros(n, m, dtype=torch.float64)
            step[i, j] = h
            higher, lower = (sinkhorn_reference(scores + s * step, 401) for s in (1, -1))
            assert abs(float(((higher - lower) * weights).sum()) / (2 * h) - float(found[i, j])) < 1e-9


def test_gradcheck_of_attention() -> None:
    query, key, value = (normal(2, *shape, seed=i).requires_grad_() for i, shape in enumerate([(4, 3), (5, 3), (5, 2)]))
    bias = normal(4, 5, seed=7).requires_grad_()
    mask = torch.tensor([True, True, False, True, True])

    def attention(*tensors: Tensor) -> Tensor:
        query, key, value, bias = tensors
        return attend(query, key, value, 401, 0.7, bias, key_mask=mask)

    torch.autograd.gradcheck(attention, (query, key, value, bias), atol=1e-7, fast_mode=True)


@pytest.mark.parametrize("which", ["none", "query_mask", "key_mask", "both", "bias", "support", "dropout"])
def test_attention_agrees_with_unrolled(which: str) -> None:
    query, key, value = (normal(2, 3, *shape, seed=i) for i, shape in enumerate([(6, 4), (8, 4), (8, 5)]))
    options: dict[str, Any] = {}
    if which in ("query_mask", "both"):
        options["query_mask"] = random_mask(2, 1, 6)
    if which in ("key_mask", "both"):
        options["key_mask"] = random_mask(2, 3, 8, seed=1)
    if which == "dropout":
        options |= {"dropout_keep": random_mask(2, 3, 6, 8, seed=2), "dropout_p": 0.3}
    inputs = [query, key, value]
    if which == "bias":
        inputs.append(normal(1, 6, 8, seed=4))
    if which == "support":
        keep = random_mask(6, 8, seed=5, keep=0.85)
        keep[:, 2] = False
        options["attn_bias"] = torch.zeros(6, 8).double().masked_fill(~keep, -math.inf)

    def ours(q: Tensor, k: Tensor, v: Tensor, *bias: Tensor) -> Tensor:
        return attend(q, k, v, 2001, 0.5, *bias, **options)

    def reference(q: Tensor, k: Tensor, v: Tensor, *bias: Tensor) -> Tensor:
        keep = options.get("dropout_keep")
        masks = {name: option for name, option in options.items() if "dropout" not in name}
        dropout_mask = None if keep is None else keep.double() / 0.7
        return sinkhorn_attention_reference(q, k, v, 2001, 0.5, *bias, **masks, dropout_mask=dropout_mask)

    got, want = value_and_gradients(ours, inputs), value_and_gradients(reference, inputs)
    torch.testing.assert_close(got[0], want[0], atol=1e-10, rtol=0)
    for found, expected in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


def test_padding_changes_nothing() -> None:
    """The valid block equals the computation without padding, whatever lies in the padding."""
    query, key, value = normal(5, 4), normal(5, 4, seed=1), normal(5, 3, seed=2)
    mask = torch.tensor([True] * 5 + [False] * 3)
    padded = [
        torch.cat([tensor, torch.full((3, tensor.shape[1]), math.nan).double()]) for tensor in (query, key, value)
    ]

    def padded_call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = attend(query, key, value, 301, 0.5, query_mask=mask, key_mask=mask)
        output.register_hook(lambda arriving: arriving.masked_fill(~mask.unsqueeze(-1), math.nan))
        return output[:5]

    got = value_and_gradients(padded_call, padded)
    want = value_and_gradients(lambda q, k, v: attend(q, k, v, 301, 0.5), [query, key, value])
    torch.testing.assert_close(got[0], want[0], atol=1e-13, rtol=0)
    for found, expected in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(found[:5], expected, atol=1e-12, rtol=0)
        assert (found[5:] == 0).all()


def test_a_support_in_several_parts_and_a_sample_without_any() -> None:
    """Each connected part adds a vector to the null space; a sample with nothing valid gives zeros."""
    scores = normal(2, 6, 6)
    scores[0, :3, 3:], scores[0, 3:, :3], scores[1] = -math.inf, -math.inf, -math.inf
    coupling, (gradient,) = value_and_gradients(lambda c: implicit_coupling(c, 301), [scores])
    want, (expected,) = value_and_gradients(lambda c: sinkhorn_reference(c, 301), [scores])
    torch.testing.assert_close(coupling, want, atol=1e-12, rtol=0)
    torch.testing.assert_close(gradient, expected, atol=1e-12, rtol=0)
    assert (coupling[1] == 0).all()
    assert (gradient[1] == 0).all()


def test_a_gradient_that_the_marginals_absorb_is_zero() -> None:
    """dL/dP = 1 sums the mass, which is fixed: the system's right side cancels and so does the gradient."""
    scores = normal(3, 7, 5).requires_grad_()
    (gradient,) = torch.autograd.grad(implicit_coupling(scores, 201).sum(), scores)
    assert gradient.abs().max() < 1e-14


def test_a_sample_does_not_depend_on_its_batch() -> None:
    scores = normal(4, 6, 6) * torch.tensor([0.1, 1.0, 2.0, 3.0]).double().view(4, 1, 1)
    _, (together,) = value_and_gradients(lambda c: implicit_coupling(c, 2001).square(), [scores])
    weights = normal(4, 6, 6, seed=9)
    for i in range(4):
        alone = scores[i : i + 1].clone().requires_grad_()
        output = implicit_coupling(alone, 2001).square()
        (gradient,) = torch.autograd.grad(output, alone, weights[i : i + 1])
        torch.testing.assert_close(gradient[0], together[i], atol=1e-14, rtol=0)


def test_nan_stays_in_its_sample() -> None:
    scores = normal(2, 5, 5)
    scores[0, 1, 1] = math.nan
    _, (gradient,) = value_and_gradients(lambda c: implicit_coupling(c, 101), [scores])
    assert gradient[1].isfinite().all()
    assert gradient[0].isnan().any()


@pytest.mark.parametrize(("n_iters", "side"), [(3, "column"), (4, "row")])
def test_says_when_the_half_steps_have_not_converged(n_iters: int, side: str) -> None:
    scores = normal(2, 8, 8, std=3.0).requires_grad_()
    coupling = implicit_coupling(scores, n_iters)  # the value is what it is
    torch.testing.assert_close(coupling, sinkhorn_reference(scores, n_iters))
    with pytest.raises(
        NotConvergedError, match=rf"after n_iters={n_iters} half-steps a {side} sum is off by .*raise n_iters"
    ):
        coupling.square().sum().backward()


def test_near_convergence_the_gradient_is_that_of_the_marginals_it_has() -> None:
    """Off by 1e-4 in the marginals, off by about as much in the gradient, never divergent."""
    scores = normal(8, 8)
    n_iters = next(n for n in range(3, 101, 2) if (sinkhorn_reference(scores, n).sum(0) - 1).abs().max() < 5e-4)
    _, (found,) = value_and_gradients(lambda c: implicit_coupling(c, n_iters), [scores])
    _, (limit,) = value_and_gradients(lambda c: sinkhorn_reference(c, 1001), [scores])
    assert 1e-9 < (found - limit).norm() / limit.norm() < 5e-3


def test_the_solver_says_when_it_has_not_converged(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = sinkhorn_reference(normal(1, 12, 12), 401)
    ones, right = plan.sum(1, keepdim=True), normal(1, 1, 12)
    monkeypatch.setattr(implicit, "SOLVER_STEPS_PER_COLUMN", 0)
    with pytest.raises(NotConvergedError, match="conjugate gradients"):
        implicit.conjugate_gradients(plan, 1 / plan.sum(2, keepdim=True), ones, right - right.mean(), right.abs())


def test_saved_memory_does_not_depend_on_the_number_of_half_steps(saved_bytes) -> None:
    scores = normal(2, 16, 16).requires_grad_()
    few, many = (saved_bytes(lambda t=n_iters: implicit_coupling(scores, t)) for n_iters in (21, 2001))
    assert few == many == (scores.numel() + 1) * 8, "the coupling, and the scores' shape"


def test_second_derivatives_are_refused() -> None:
    scores = normal(4, 4).requires_grad_()
    (gradient,) = torch.autograd.grad(implicit_coupling(scores, 101).square().sum(), scores, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        gradient.sum().backward()


def test_the_operators_meet_the_contract_of_custom_operators() -> None:
    scores = normal(2, 4, 5).requires_grad_()
    mask = random_mask(2, 4)
    checks, numbers = ("test_schema", "test_faketensor"), (65, 1.0, False, 1.0, 0.0)
    given = (None, None, None, scores, None, mask, None, None, *numbers)
    torch.library.opcheck(implicit.implicit.forward, given, test_utils=checks)
    plan, nothing = sinkhorn_reference(scores.detach(), 65, mask), torch.empty(0)
    arguments = (plan, normal(2, 4, 5, seed=1), nothing, nothing, nothing, *given, False)
    torch.library.opcheck(implicit.implicit.backward, arguments, test_utils=checks)


@pytest.mark.parametrize("backend", ["reference", "streaming", "triton"])
def test_backends_that_it_would_ignore_are_refused(backend: str) -> None:
    """It keeps the map: "streaming" would promise a memory that it has not."""
    message = f"gradient='implicit' keeps the map and has one way of computing, which backend='{backend}' is not"
    with pytest.raises(ValueError, match=message):
        sinkhorn_attention(*[normal(4, 3)] * 3, 101, gradient="implicit", backend=backend)
    with pytest.raises(ValueError, match=message):
        get_normalizer("sinkhorn", gradient="implicit", backend=backend)


@pytest.mark.parametrize("backend", ["auto", "portable", "dense"])
def test_the_operator_offers_it_on_every_backend(backend: str) -> None:
    """Value and gradient of sinkhorn_attention(..., gradient="implicit") against the unrolled operator."""
    inputs = [normal(2, 3, *shape, seed=i) for i, shape in enumerate([(6, 4), (8, 4), (8, 5)])]
    options = {"key_mask": random_mask(2, 1, 8), "attn_bias": normal(6, 8, seed=4)}
    got, want = (
        value_and_gradients(
            lambda q, k, v, kind=kind: sinkhorn_attention(q, k, v, 501, gradient=kind, backend=backend, **options),
            inputs,
        )
        for kind in ("implicit", "unrolled")
    )
    torch.testing.assert_close(got[0], want[0], atol=1e-12, rtol=0)
    for found, expected in zip(got[1], want[1], strict=True):
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    with pytest.raises(NotConvergedError):
        value_and_gradients(lambda q, k, v: sinkhorn_attention(3 * q, 3 * k, v, 3, gradient="implicit"), inputs)
