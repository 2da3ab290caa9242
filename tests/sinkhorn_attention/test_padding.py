"""What lies in the padding reaches nothing, whether the engines had to put zeros there or could leave it alone."""

import math

import pytest
import torch
from sinkhorn_attention import get_normalizer, sinkhorn_attention
from sinkhorn_attention.engines import heads
from sinkhorn_attention.reference import sinkhorn_attention_reference
from torch import Tensor

#: Small enough for guard A, beyond it, products that overflow float32, and what is no number.
GARBAGE = (0.0, 1.0, -3.0, 1e3, 1e14, 1e20, 3e38, math.inf, -math.inf, math.nan)
N, M, WIDTH, VALUE_WIDTH = 20, 40, 4, 6


def tokens(scale: float) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Queries, keys and values, the gradient that arrives at the output, and which tokens take part."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(N, WIDTH), (M, WIDTH), (M, VALUE_WIDTH), (N, VALUE_WIDTH)]
    *tensors, gradient = [torch.randn(2, 3, *shape, generator=generator) for shape in shapes]
    masks = [torch.rand(2, 1, length, generator=generator) < 0.7 for length in (N, M)]
    masks[1][1] = False  # a sample of which nothing takes part
    masks[0][1] = False
    tensors[0] *= scale
    return tensors, gradient, masks


def outcome(
    tensors: list[Tensor], gradient: Tensor, masks: list[Tensor], n_iters: int, backend: str, bias: Tensor | None
) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    options = {"attn_bias": bias, "query_mask": masks[0], "key_mask": masks[1]}
    if backend == "softmax":
        output = get_normalizer("softmax").attend(*leaves, **options)
    else:
        output = sinkhorn_attention(*leaves, n_iters, backend=backend, **options)
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, M)], ids=["plain", "bias"])
@pytest.mark.parametrize("n_iters", [1, 4, 5])
@pytest.mark.parametrize("scale", [0.3, 30.0])  # bounded scores and others
@pytest.mark.parametrize("engine", ["whole", "kept", "recomputed", "log domain"], indirect=True)
def test_the_padding_is_out_of_sight(engine, scale: float, n_iters: int, bias: Tensor | None) -> None:
    assert_out_of_sight(engine.backend, scale, n_iters, bias)


@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, M)], ids=["plain", "bias"])
def test_nor_does_softmax_see_it(bias: Tensor | None) -> None:
    assert_out_of_sight("softmax", 0.3, 1, bias)


def assert_out_of_sight(backend: str, scale: float, n_iters: int, bias: Tensor | None) -> None:
    tensors, gradient, masks = tokens(scale)
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    wide = None if bias is None else bias.double()
    want = sinkhorn_attention_reference(*exact, n_iters, WIDTH**-0.5, wide, *masks)
    expected = [want.detach(), *torch.autograd.grad(want, exact, gradient.double())]
    of_result = [masks[0], masks[0], masks[1], masks[1]]
    for garbage in GARBAGE:
        for first in (0, 2):  # in all tokens, or in the values alone: these have a bound of their own
            filled = [
                tensor if i < first else tensor.masked_fill(~mask.unsqueeze(-1), garbage)
                for i, (tensor, mask) in enumerate(zip(tensors, of_result[1:], strict=True))
            ]
            arriving = gradient.masked_fill(~masks[0].unsqueeze(-1), garbage)
            found = outcome(filled, arriving, masks, n_iters, backend, bias)
            for got, right, mask in zip(found, expected, of_result, strict=True):
                assert not got.masked_fill(mask.unsqueeze(-1), 0.0).any(), (garbage, first)
                assert (got.double() - right).norm() <= 1e-5 * scale * right.norm(), (garbage, first)


@pytest.mark.parametrize(("garbage", "hides"), [(1.0, False), (1e3, True), (math.nan, True)])
def test_zeros_are_put_there_only_where_they_are_needed(monkeypatch, garbage: float, hides: bool) -> None:
    """Copying the tokens costs a quarter of the time of a call."""
    tensors, gradient, masks = tokens(0.3)
    filled = [
        tensor.masked_fill(~mask.unsqueeze(-1), garbage)
        for tensor, mask in zip(tensors, [masks[0], masks[1], masks[1]], strict=True)
    ]
    hidden, hide = [], heads.hide

    def counted(tensor: Tensor, mask: Tensor | None, group: slice) -> Tensor:
        hidden.extend([] if mask is None else [mask])
        return hide(tensor, mask, group)

    monkeypatch.setattr(heads, "hide", counted)
    outcome(filled, gradient, masks, 3, "portable", None)
    assert bool(hidden) == hides


@pytest.mark.parametrize(("width", "value_width"), [(4, 4), (4, 9), (9, 4), (0, 4)])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_softmax_of_every_width(width: int, value_width: int, scale: float | None) -> None:
    """Narrow tokens are filled up with zeros for torch's fused kernels; the scale is that of their own width."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(N, width), (M, width), (M, value_width)]
    leaves = [torch.randn(2, *shape, generator=generator).double().requires_grad_() for shape in shapes]
    got = get_normalizer("softmax").attend(*leaves, scale=scale)
    factor = scale or (width or 1) ** -0.5
    want = (leaves[0] @ leaves[1].mT * factor).softmax(-1) @ leaves[2]
    torch.testing.assert_close(got, want)
    gradient = torch.randn(want.shape, generator=generator).double()
    for one, other in zip(*(torch.autograd.grad(out, leaves, gradient) for out in (got, want)), strict=True):
        torch.testing.assert_close(one, other)
