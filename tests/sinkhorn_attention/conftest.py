"""Holds an engine against the definition: the same problem, value and gradient, in float64."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from sinkhorn_attention import Normalizer, sinkhorn_attention
from sinkhorn_attention.normalizers import attention_scores
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
    return solve_by(
        lambda *tokens, **options: sinkhorn_attention(*tokens, problem.n_iters, backend=backend, **options),
        problem,
        dtype,
        device,
    )


def solve_by(attend: Callable[..., Tensor], problem: Problem, dtype: torch.dtype, device: str = "cpu") -> Outcome:
    """Runs the problem forward and backward by attend(query, key, value, **options), always from the same seed."""
    options = {
        name: option.to(device) if isinstance(option, Tensor) else option for name, option in problem.options.items()
    }
    tokens = problem.query, problem.key, problem.value
    inputs = [tensor.to(device, dtype, copy=True).requires_grad_() for tensor in tokens]
    bias = options.pop("attn_bias", None)
    if bias is not None and bias.is_floating_point():
        bias = bias.to(dtype, copy=True).requires_grad_()
        inputs.append(bias)
    torch.manual_seed(0)
    output = attend(*inputs[:3], attn_bias=bias, **options)
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
    assert_same_outcome(got, want, problem, tolerance)


def assert_same_outcome(got: Outcome, want: Outcome, problem: Problem, tolerance: float) -> None:
    """Relative in norm, with floors for gradients, as `assert_matches_reference` says."""
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


def assert_matches_definition(
    normalizer: Normalizer,
    problem: Problem,
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
) -> None:
    """As `assert_matches_reference`, for a normalizer's `attend`: against its `from_scores` in float64, by autograd."""

    def define(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        dropout_p, scale = options.pop("dropout_p", 0.0), options.pop("scale", None)
        scores = attention_scores(query, key, scale, **options)
        masks = {name: mask for name, mask in options.items() if name != "attn_bias"}
        coupling = normalizer.from_scores(scores, **masks)
        if dropout_p > 0:
            keep = torch.empty(scores.shape, dtype=torch.bool).bernoulli_(1 - dropout_p)
            coupling = coupling * keep / (1 - dropout_p)
        if options.get("key_mask") is not None:
            value = value.masked_fill(~options["key_mask"].unsqueeze(-1), 0.0)
        return coupling @ value

    tolerance = tolerance or {torch.float64: 1e-10, torch.float32: 1e-5}[dtype]
    got, want = solve_by(normalizer.attend, problem, dtype), solve_by(define, problem, torch.float64)
    assert_same_outcome(got, want, problem, tolerance)


@pytest.fixture(scope="session")
def matches_reference() -> Callable[..., None]:
    return assert_matches_reference


@pytest.fixture(scope="session")
def matches_definition() -> Callable[..., None]:
    return assert_matches_definition


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
