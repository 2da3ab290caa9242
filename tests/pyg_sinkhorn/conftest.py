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


def run(
    module: nn.Module,
    *inputs: Tensor,
    weight: Tensor | None = None,
    on_paper: Callable[..., Tensor] | None = None,
    **kwargs: object,
) -> Outcome:
    """Value, and the gradient of sum(weight * output) with respect to the inputs and every parameter.

    `on_paper` computes with the module's parameters in its place.
    """
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    output = (module if on_paper is None else on_paper)(*inputs, **kwargs)
    if weight is None:
        weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    names, parameters = zip(*module.named_parameters(), strict=True)
    grads = torch.autograd.grad((weight * output).sum(), (*inputs, *parameters), allow_unused=True)
    grads = [torch.zeros_like(p) if g is None else g for p, g in zip((*inputs, *parameters), grads, strict=True)]
    return Outcome(output.detach(), grads[: len(inputs)], dict(zip(names, grads[len(inputs) :], strict=True)))


@pytest.fixture(scope="session")
def value_and_gradient() -> Callable[..., Outcome]:
    return run


@pytest.fixture(scope="session")
def batch_is_its_clouds() -> Callable[..., None]:
    """A padded batch gives each cloud's output and gradient, and the sum of their parameters' gradients."""

    def check(model: nn.Module, points: Tensor, mask: Tensor, sizes: list[int]) -> None:
        weight = torch.linspace(-1, 1, 5 * len(sizes), dtype=torch.float64).view(len(sizes), 5)
        padded = run(model, points, mask=mask, weight=weight)
        alone = [run(model, points[i : i + 1, :n], weight=weight[i : i + 1]) for i, n in enumerate(sizes)]
        for i, n in enumerate(sizes):
            torch.testing.assert_close(padded.output[i], alone[i].output[0])
            torch.testing.assert_close(padded.inputs[0][i, :n], alone[i].inputs[0][0])
        assert (padded.inputs[0][~mask] == 0).all()
        for name, gradient in padded.parameters.items():
            torch.testing.assert_close(gradient, sum(outcome.parameters[name] for outcome in alone))

    return check


@pytest.fixture
def ragged() -> tuple[Tensor, Tensor, list[int]]:
    """Three clouds of 9, 5 and 7 points padded to 11 with NaN, their mask, and their sizes; float64."""
    sizes = [9, 5, 7]
    generator = torch.Generator().manual_seed(3)
    points = torch.full((3, 11, 3), torch.nan, dtype=torch.float64)
    mask = torch.arange(11) < torch.tensor(sizes).unsqueeze(1)
    points[mask] = torch.randn(sum(sizes), 3, generator=generator, dtype=torch.float64)
    return points, mask, sizes
