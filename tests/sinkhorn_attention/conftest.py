"""Holds an engine against the definition: the same problem, value and gradient, in float64."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from sinkhorn_attention import sinkhorn_attention
from torch import Tensor


class Problem(NamedTuple):
    """One attention call: its tensors, the gradient that arrives at its output, and its options."""

    query: Tensor
    key: Tensor
    value: Tensor
    output_gradient: Tensor
    n_iters: int
    options: dict


class Outcome(NamedTuple):
    """Output and gradients of a call; `attn_bias` is None where the bias is not differentiated."""

    output: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    attn_bias: Tensor | None


def solve(problem: Problem, backend: str, dtype: torch.dtype, device: str = "cpu") -> Outcome:
    """Runs the problem forward and backward in `dtype`, with the same dropout mask whatever the backend."""
    options = {
        name: option.to(device) if isinstance(option, Tensor) else option for name, option in problem.options.items()
    }
    tokens = problem.query, problem.key, problem.value
    inputs = [tensor.to(device, dtype).requires_grad_() for tensor in tokens]
    bias = options.pop("attn_bias", None)
    if bias is not None and bias.is_floating_point():
        bias = bias.to(dtype).requires_grad_()
        inputs.append(bias)
    torch.manual_seed(0)
    output = sinkhorn_attention(*inputs[:3], problem.n_iters, attn_bias=bias, backend=backend, **options)
    gradients = torch.autograd.grad(output, inputs, problem.output_gradient.to(device, output.dtype))
    found = [tensor.cpu() for tensor in (output.detach(), *gradients)]
    return Outcome(*found[:4], found[4] if len(found) > 4 else None)


def assert_matches_reference(
    problem: Problem,
    backend: str = "dense",
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
    device: str = "cpu",
) -> None:
    """Value and gradient against the float64 reference, to the tolerance that the dtype's arithmetic allows.

    float64: 1e-10. float32: 1e-5, relative in norm, for values and for gradients, the latter with a floor of
    1e-5 |scale| |dO| max|v| max|k| (or max|q|): a saturated map's true gradient lies below the rounding of its terms.
    """
    tolerance = tolerance or {torch.float64: 1e-10, torch.float32: 1e-5}[dtype]
    got, want = solve(problem, backend, dtype, device), solve(problem, "reference", torch.float64, device)
    scale = problem.options.get("scale") or problem.query.shape[-1] ** -0.5
    largest = {name: getattr(problem, name).double().norm(dim=-1).max() for name in ("query", "key", "value")}
    through_scores = problem.output_gradient.double().norm() * largest["value"]
    floors = {
        "output": torch.tensor(tolerance),
        "query": abs(scale) * through_scores * largest["key"],
        "key": abs(scale) * through_scores * largest["query"],
        "value": problem.output_gradient.double().norm() * 1e-3,
        "attn_bias": through_scores,
    }
    for name, floor in floors.items():
        expected, found = getattr(want, name), getattr(got, name)
        if expected is None:
            continue
        assert found.isfinite().all(), f"{name} is not finite"
        error = (found.double() - expected).norm()
        assert error <= tolerance * (expected.norm() + floor), f"{name}: off by {error:.3e} of {expected.norm():.3e}"


@pytest.fixture(scope="session")
def matches_reference() -> Callable[..., None]:
    return assert_matches_reference


def build_problem(
    n: int = 7,
    m: int = 7,
    n_iters: int = 3,
    *,
    std: float = 1.0,
    lead: tuple[int, ...] = (2, 3),
    width: int = 8,
    value_width: int = 5,
    seed: int = 0,
    **options: object,
) -> Problem:
    """A problem with scores of the given standard deviation, from a seed."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*lead, *shape, generator=generator, dtype=torch.float64)

    # With the default scale width ** -0.5 the scores have standard deviation `std`. Rounded to float32 first, so that
    # both precisions start from the same numbers.
    tensors = [normal(n, width) * std, normal(m, width), normal(m, value_width), normal(n, value_width)]
    return Problem(*(tensor.float().double() for tensor in tensors), n_iters, options)


@pytest.fixture(scope="session")
def make_problem() -> Callable[..., Problem]:
    return build_problem
