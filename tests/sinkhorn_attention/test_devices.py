"""The portable engine on a device that is not here: every tensor of a call lies where the call's tensors lie.

Its numbers are held by test_engines.py as "device" and "captured", its looks at data by the counts of the benchmarks.
"""

import pytest
import torch
from sinkhorn_attention.engines import AUTO, PORTABLE, domains, implicit, portable
from sinkhorn_attention.engines.implicit import Implicit
from sinkhorn_attention.engines.operator import define
from sinkhorn_attention.engines.problem import Problem
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the data pointer")


def ones(*shape: int, dtype: torch.dtype = torch.bool) -> Tensor:
    return torch.ones(*shape, dtype=dtype, device="cuda")


OPTIONS = {
    "plain": lambda: {},
    "masks": lambda: {"query_mask": ones(20), "key_mask": ones(2, 1, 13)},
    "bias": lambda: {"attn_bias": ones(2, 20, 13, dtype=torch.float32)},
    "row of bias and a mask": lambda: {"attn_bias": ones(2, 2, 1, 13, dtype=torch.float32), "key_mask": ones(13)},
    "dropout": lambda: {"dropout_keep": ones(2, 2, 20, 13), "dropout_p": 0.1},
    "damping": lambda: {"damping": 0.5},
    "detached": lambda: {"detached": True},
}


@pytest.fixture
def some_heads_are_untrusted(monkeypatch) -> None:
    """Which ones is data, that fake tensors have not."""
    found = [torch.zeros(2, dtype=torch.long)]
    monkeypatch.setattr(portable.Portable, "_log_domain_groups", lambda *_: [each.to("cuda") for each in found])


@pytest.mark.usefixtures("some_heads_are_untrusted")
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("operator", [PORTABLE, AUTO], ids=["portable", "auto"])
@pytest.mark.parametrize("n_iters", [1, 4])
@pytest.mark.parametrize("option", OPTIONS)
def test_nothing_lies_on_another_device(monkeypatch, option: str, n_iters: int, operator, captured: bool) -> None:
    monkeypatch.setattr(domains, "is_captured", lambda device: captured)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        tokens = [torch.empty(2, 2, length, width, device="cuda") for length, width in ((20, 8), (13, 8), (13, 6))]
        problem = Problem(*tokens, n_iters=n_iters, scale=0.3, **OPTIONS[option]())
        output, *state = operator.engine.forward(problem)
        arriving = torch.empty_like(output)
        rows, columns, domain = state
        has_bias = problem.attn_bias is not None
        gradients = operator.engine.backward(problem, (output, arriving), (rows, columns, domain), has_bias)
    for tensor in (output, *state, *gradients[: 3 + has_bias]):
        assert tensor.device.type == "cuda"


@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("n_iters", [1, 4])
@pytest.mark.parametrize("captured", [(False, False), (True, False), (False, True), (True, True)])
def test_only_one_of_forward_and_backward_may_be_captured(
    monkeypatch, captured: tuple[bool, bool], n_iters: int, scores: bool
) -> None:
    """The state of either is what the other one needs, and memory that nothing wrote is NaN here."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 20, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    problem = Problem(scores=query @ key.mT, n_iters=n_iters) if scores else Problem(query, key, value, n_iters=n_iters)
    leaves = [tensor.requires_grad_() for tensor in ((problem.scores,) if scores else (query, key, value))]
    arriving = torch.randn(problem.output_shape, generator=generator, dtype=torch.float64)
    want = torch.autograd.grad(define(problem), leaves, arriving)
    monkeypatch.setattr(domains, "is_asynchronous", lambda device: True)
    torch.use_deterministic_algorithms(True)  # fills what is allocated
    try:
        monkeypatch.setattr(domains, "is_captured", lambda device: captured[0])
        output = PORTABLE(problem)
        monkeypatch.setattr(domains, "is_captured", lambda device: captured[1])
        found = torch.autograd.grad(output, leaves, arriving)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("some_heads_are_untrusted")
@pytest.mark.parametrize("captured", [False, True])
def test_couplings_of_scores_neither(monkeypatch, captured: bool) -> None:
    monkeypatch.setattr(domains, "is_captured", lambda device: captured)
    monkeypatch.setattr(implicit, "_in_exponential_domain", _in_exponential_domain(implicit._in_exponential_domain))
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        scores = torch.empty(2, 3, 20, 13, device="cuda")
        problem = Problem(scores=scores, n_iters=3, key_mask=ones(13))
        for engine in (PORTABLE.engine, Implicit()):
            output, *state = engine.forward(problem)
            results = torch.empty_like(output), torch.empty_like(output)
            rows, columns, domain = state
            gradients = engine.backward(problem, results, (rows, columns, domain), False)
            assert {output.device.type, gradients[0].device.type} == {"cuda"}


def _in_exponential_domain(honest):
    """With heads that are found untrusted, since fake tensors have none to find."""

    def found(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "nonzero", lambda tensor: torch.zeros(2, 1, dtype=torch.long, device=tensor.device))
            return honest(*arguments)

    return found
