from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn


class Outcome(NamedTuple):
    """Output of a module, and the gradients of a fixed functional of it."""

    output: Tensor
    inputs: list[Tensor]
    parameters: dict[str, Tensor]


def run(module: nn.Module, *inputs: Tensor, weight: Tensor | None = None, **kwargs: object) -> Outcome:
    """Value, and the gradient of sum(weight * output) with respect to the inputs and every parameter."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    output = module(*inputs, **kwargs)
    if weight is None:
        weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    names, parameters = zip(*module.named_parameters(), strict=True)
    grads = torch.autograd.grad((weight * output).sum(), (*inputs, *parameters), allow_unused=True)
    grads = [torch.zeros_like(p) if g is None else g for p, g in zip((*inputs, *parameters), grads, strict=True)]
    return Outcome(output.detach(), grads[: len(inputs)], dict(zip(names, grads[len(inputs) :], strict=True)))


@pytest.fixture(scope="session")
def value_and_gradient() -> Callable[..., Outcome]:
    return run


@pytest.fixture
def ragged() -> tuple[Tensor, Tensor, list[int]]:
    """Three clouds of 9, 5 and 7 points padded to 11 with NaN, their mask, and their sizes; float64."""
    sizes = [9, 5, 7]
    generator = torch.Generator().manual_seed(3)
    points = torch.full((3, 11, 3), torch.nan, dtype=torch.float64)
    mask = torch.arange(11) < torch.tensor(sizes).unsqueeze(1)
    points[mask] = torch.randn(sum(sizes), 3, generator=generator, dtype=torch.float64)
    return points, mask, sizes
