"""Every way to a second, forward-mode or batched derivative raises or is right; none is zero in silence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sinkhorn_attention import get_normalizer, sinkhorn, sinkhorn_attention
from torch import Tensor
from torch.autograd import forward_ad, functional, grad

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def hand_written() -> dict[str, Attend]:
    """What has a backward written by hand."""
    found: dict[str, Attend] = {
        "auto": lambda *tokens: sinkhorn_attention(*tokens, 4),
        "streaming": lambda *tokens: sinkhorn_attention(*tokens, 4, backend="streaming"),
        "detached": lambda *tokens: sinkhorn_attention(*tokens, 4, gradient="detached"),
        "implicit": lambda *tokens: sinkhorn_attention(*tokens, 401, gradient="implicit"),
        "sinkhorn": lambda query, key, value: sinkhorn(query @ key.mT, 4) @ value,
    }
    for name in ("unbalanced_sinkhorn", "sinkhorn_l2"):
        found[name] = get_normalizer(name, n_iters=4).attend
    return found


def differentiable() -> dict[str, Attend]:
    """What autograd, or torch itself, differentiates as often as it can."""
    found: dict[str, Attend] = {"reference": lambda *tokens: sinkhorn_attention(*tokens, 4, backend="reference")}
    for name in ("softmax", "l2", "sigmoid", "esp"):
        found[name] = get_normalizer(name).attend
    found["lot"] = get_normalizer("lot", num_pivots=3, learned_masses=True, head_dim=4, num_heads=1).double().attend
    return found


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 1, size, 4, generator=generator).to(dtype).requires_grad_() for size in (5, 5, 5)]


def loss(attend: Attend, tokens: list[Tensor]) -> Tensor:
    """With a path around the attention, as a residual connection is."""
    return (attend(*tokens) + tokens[0]).square().sum()


def product_by_gradients(attend: Attend, tokens: list[Tensor], direction: list[Tensor]) -> tuple[Tensor, ...]:
    first = grad(loss(attend, tokens), tokens, create_graph=True)
    return grad(first, tokens, direction)


def product_where_some_are_unused(attend: Attend, tokens: list[Tensor], direction: list[Tensor]) -> tuple[Any, ...]:
    first = grad(attend(*tokens).square().sum(), tokens, create_graph=True)
    return grad(first, tokens, direction, allow_unused=True)


def gradient_penalty(attend: Attend, tokens: list[Tensor], direction: list[Tensor]) -> tuple[Tensor | None, ...]:
    first = grad(attend(*tokens).square().sum(), tokens, create_graph=True)
    sum((one * other).sum() for one, other in zip(first, direction, strict=True)).backward()
    return tuple(tensor.grad for tensor in tokens)


def by_hvp(attend: Attend, tokens: list[Tensor], direction: list[Tensor]) -> tuple[Tensor, ...]:
    return functional.hvp(lambda *given: loss(attend, list(given)), tuple(tokens), tuple(direction))[1]


def by_vhp(attend: Attend, tokens: list[Tensor], direction: list[Tensor]) -> tuple[Tensor, ...]:
    return functional.vhp(lambda *given: loss(attend, list(given)), tuple(tokens), tuple(direction))[1]


def by_hessian(attend: Attend, tokens: list[Tensor], direction: list[Tensor], vectorize: bool = False) -> tuple:
    blocks = functional.hessian(lambda *given: loss(attend, list(given)), tuple(tokens), vectorize=vectorize)
    return tuple(
        sum(torch.tensordot(block, one, 4) for block, one in zip(row, direction, strict=True)) for row in blocks
    )


def by_vectorized_hessian(attend: Attend, tokens: list[Tensor], direction: list[Tensor]) -> tuple[Tensor, ...]:
    return by_hessian(attend, tokens, direction, vectorize=True)


PRODUCTS = (
    product_by_gradients,
    product_where_some_are_unused,
    gradient_penalty,
    by_hvp,
    by_vhp,
    by_hessian,
    by_vectorized_hessian,
)


def tangent_through_forward(attend: Attend, tokens: list[Tensor]) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(tokens[0].detach(), torch.ones_like(tokens[0]))
        return forward_ad.unpack_dual(attend(dual, *tokens[1:])).tangent


def tangent_through_backward(attend: Attend, tokens: list[Tensor]) -> Any:
    with forward_ad.dual_level():
        output = attend(*tokens)
        arriving = forward_ad.make_dual(torch.ones_like(output), torch.ones_like(output))
        return forward_ad.unpack_dual(grad(output, tokens[0], arriving)[0]).tangent


def directional_by_two_backwards(attend: Attend, tokens: list[Tensor]) -> Any:
    return functional.jvp(lambda q: attend(q, *tokens[1:]), tokens[0].detach(), torch.ones_like(tokens[0]))[1]


def gradients_in_a_batch(attend: Attend, tokens: list[Tensor]) -> Any:
    output = attend(*tokens)
    return grad(output, tokens[0], torch.ones(2, *output.shape, dtype=output.dtype), is_grads_batched=True)


OTHERS = (
    tangent_through_forward,
    tangent_through_backward,
    directional_by_two_backwards,
    gradients_in_a_batch,
    lambda attend, tokens: torch.func.hessian(lambda q: attend(q, *tokens[1:]).sum())(tokens[0].detach()),
    lambda attend, tokens: torch.func.jacrev(lambda q: attend(q, *tokens[1:]))(tokens[0].detach()),
)


@pytest.mark.parametrize("name", hand_written())
@pytest.mark.parametrize("way", PRODUCTS)
def test_a_hand_written_backward_refuses_second_derivatives(way: Callable, name: str) -> None:
    tokens = inputs()
    with pytest.raises(NotImplementedError, match=r"cannot be differentiated again.*use "):
        way(hand_written()[name], tokens, [torch.ones_like(tensor) for tensor in tokens])


@pytest.mark.parametrize("name", hand_written())
@pytest.mark.parametrize("way", OTHERS)
def test_and_what_else_it_has_not(way: Callable, name: str) -> None:
    with pytest.raises(NotImplementedError, match="use "):
        way(hand_written()[name], inputs())


@pytest.mark.parametrize("name", differentiable())
@pytest.mark.parametrize("way", PRODUCTS)
def test_elsewhere_second_derivatives_are_right_or_refused(way: Callable, name: str) -> None:
    """Against differences of first derivatives; torch's own fused softmax refuses in its own words."""
    attend, tokens = differentiable()[name], inputs(torch.float64)
    generator = torch.Generator().manual_seed(1)
    direction = [torch.randn(tensor.shape, generator=generator, dtype=torch.float64) for tensor in tokens]
    of_loss = way not in (product_where_some_are_unused, gradient_penalty)

    def first(step: float) -> tuple[Tensor, ...]:
        moved = [(t + step * d).detach().requires_grad_() for t, d in zip(tokens, direction, strict=True)]
        return grad(loss(attend, moved) if of_loss else attend(*moved).square().sum(), moved)

    size = 1e-6
    want = [(ahead - behind) / (2 * size) for ahead, behind in zip(first(size), first(-size), strict=True)]
    if name in ("softmax", "l2"):
        with pytest.raises(RuntimeError, match="is not implemented"):
            way(attend, tokens, direction)
        return
    got = way(attend, tokens, direction)
    for one, other in zip(got, want, strict=True):
        assert (one - other).norm() <= 1e-6 * (1 + other.norm())


def test_a_call_that_is_differentiated_once_is_as_before() -> None:
    """`create_graph=True` alone changes no first derivative."""
    tokens = inputs()
    once = grad(sinkhorn_attention(*tokens, 4).sum(), tokens)
    kept = grad(sinkhorn_attention(*tokens, 4).sum(), tokens, create_graph=True)
    assert all(torch.equal(one, other) for one, other in zip(once, kept, strict=True))
