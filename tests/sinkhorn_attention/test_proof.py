"""What "auto" takes on a device: kernels that were right about a small problem, and the portable engine otherwise.

An engine that stands for Triton's and CPU tensors that stand for a device's show the choice; Triton's own kernels are
tried in its interpreter, which `test_triton.py` starts.
"""

import os
import subprocess
import sys
import warnings

import pytest
import torch
from sinkhorn_attention import sinkhorn_attention
from sinkhorn_attention.engines import domains, native, proof
from sinkhorn_attention.engines.native import LIBRARY
from sinkhorn_attention.engines.portable import Portable
from sinkhorn_attention.engines.problem import Problem
from sinkhorn_attention.engines.proof import Proofs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

IN_INTERPRETER = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="run by test_triton.py in Triton's interpreter"
)


class Kernels(Portable):
    """Stands for Triton's engine: other states, and as right or wrong as it is told."""

    def __init__(self) -> None:
        super().__init__("stand-in")
        self.factors = dict.fromkeys(("output", "query", "key", "value", "bias"), 1.0)
        self.calls: list[Problem] = []
        self.error: Exception | None = None

    def forward(self, problem):
        self.calls.append(problem)
        if self.error is not None:
            raise self.error
        output, rows, columns, domain = super().forward(problem)
        return output * self.factors["output"], rows * 2, columns, domain

    def backward(self, problem, results, state, bias_gradient):
        rows, columns, domain = state
        found = super().backward(problem, results, (rows / 2, columns, domain), bias_gradient)
        of_parts = [self.factors[name] for name in ("query", "key", "value", "bias")]
        return tuple(tensor * factor for tensor, factor in zip(found, of_parts, strict=True))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """What "auto" tries, on CPU tensors."""
    engine = Kernels()
    proofs = Proofs(lambda: engine)
    proofs.device_types = ("cpu",)
    monkeypatch.setattr(native, "PROOFS", proofs)
    monkeypatch.setattr(LIBRARY, "load", lambda: None)
    monkeypatch.setattr(native, "is_plain_softmax", lambda problem: False)
    return engine


def tokens(dtype: torch.dtype = torch.float32, n: int = 20, m: int = 13) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, n, 8), (2, 3, m, 8), (2, 3, m, 6))
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def step(inputs: list[Tensor], n_iters: int = 4, **options) -> list[Tensor]:
    output = sinkhorn_attention(*inputs, n_iters, **options)
    return [output.detach(), *torch.autograd.grad(output.float().square().sum(), inputs)]


def assert_same(found: list[Tensor], want: list[Tensor]) -> None:
    for one, other in zip(found, want, strict=True):
        assert torch.equal(one, other)


def test_a_form_is_tried_once_and_then_taken(kernels: Kernels) -> None:
    found = step(tokens())
    assert [call.query.shape[1] for call in kernels.calls] == [2, 3]  # two heads of the proof, then the problem
    step(tokens())
    step(tokens(), n_iters=6)  # as even as 4, and no other kernels
    assert len(kernels.calls) == 4
    assert native.describe_device_engine() == "triton, proven at its first use"
    assert_same(found, step(tokens(), backend="portable"))


OPTIONS = {
    "odd": {"n_iters": 5},
    "one": {"n_iters": 1},
    "masks": {"query_mask": torch.arange(20) < 15, "key_mask": torch.arange(13) > 3},
    "bias": {"attn_bias": torch.zeros(20, 13)},
    "row of bias": {"attn_bias": torch.zeros(13)},
    "half": {"attn_bias": torch.zeros(20, 13, dtype=torch.bfloat16)},
    "dropout": {"dropout_p": 0.5},
    "detached": {"gradient": "detached"},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_has_kernels_of_its_own_to_prove(kernels: Kernels, option: str) -> None:
    step(tokens())
    step(tokens(), **OPTIONS[option])
    assert len(kernels.calls) == 4
    assert native.describe_device_engine() == "triton, proven at its first use"


@pytest.mark.parametrize("part", ["output", "query", "key", "value", "bias"])
def test_one_wrong_part_leaves_the_form_to_the_portable_engine(kernels: Kernels, part: str) -> None:
    kernels.factors[part] = 1.001
    bias = torch.ones(20, 13)
    inputs = tokens()
    with pytest.warns(UserWarning, match=rf"torch.float32 on cpu .* portable engine: .*failed its proof: the .*{part}"):
        found = step(inputs, attn_bias=bias)
    assert_same(found, step(inputs, attn_bias=bias, backend="portable"))
    assert "portable (the Triton engine failed its proof: the" in native.describe_device_engine()
    kernels.factors[part] = 1.0
    calls = len(kernels.calls)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(inputs, attn_bias=bias)  # what was decided stays, and is said once
    assert len(kernels.calls) == calls


@pytest.mark.parametrize("broken", ["compiler", "nan", "missing", "refusal"])
def test_what_cannot_be_tried_is_not_taken(kernels: Kernels, monkeypatch, broken: str) -> None:
    if broken == "compiler":
        kernels.error = RuntimeError("the Triton engine of Sinkhorn attention failed on cpu: no ptxas\nPass ...")
    elif broken == "nan":
        kernels.factors["output"] = float("nan")
    elif broken == "missing":
        monkeypatch.setattr(native.PROOFS, "load", lambda: native.load_triton().engine)
        monkeypatch.setitem(sys.modules, "sinkhorn_attention.engines.triton", None)
    else:
        monkeypatch.setattr(kernels, "refusal", lambda problem: "a GPU of compute capability 8.0 (Ampere) or newer")
    said = {"compiler": "no ptxas$", "nan": "off by nan", "missing": "needs the triton package", "refusal": "Ampere"}
    with pytest.warns(UserWarning, match=said[broken]):
        found = step(tokens())
    assert_same(found, step(tokens(), backend="portable"))


def test_out_of_memory_is_not_taken_for_a_wrong_engine(kernels: Kernels) -> None:
    kernels.error = torch.OutOfMemoryError("2 GiB")
    with pytest.raises(torch.OutOfMemoryError):
        step(tokens())
    kernels.error = None
    step(tokens())
    assert native.describe_device_engine() == "triton, proven at its first use"


def test_a_form_that_is_first_captured_stays_with_the_portable_engine(kernels: Kernels, monkeypatch) -> None:
    monkeypatch.setattr(domains, "is_captured", lambda device: True)
    with pytest.warns(UserWarning, match="while a CUDA graph was captured: make a step without capturing before"):
        output = sinkhorn_attention(*(inputs := tokens()), 4)
    monkeypatch.setattr(domains, "is_captured", lambda device: False)
    found = torch.autograd.grad(output.square().sum(), inputs)
    for one, other in zip(found, step(inputs, backend="portable")[1:], strict=True):
        torch.testing.assert_close(one, other)  # forward was in the log domain
    assert kernels.calls == []


def test_what_is_proven_may_be_captured(kernels: Kernels, monkeypatch) -> None:
    step(tokens())
    monkeypatch.setattr(domains, "is_captured", lambda device: True)
    step(tokens())
    assert len(kernels.calls) == 3


def test_fake_tensors_decide_nothing(kernels: Kernels) -> None:
    with FakeTensorMode() as mode:
        inputs = [mode.from_tensor(tensor.detach()) for tensor in tokens()]
        assert native.PROOFS.engine(Problem(*inputs, n_iters=4, scale=0.3)) is None
    assert native.describe_device_engine() is None


def test_given_scores_and_other_devices_are_the_portable_engines(kernels: Kernels) -> None:
    assert native.PROOFS.engine(Problem(scores=torch.zeros(3, 4), n_iters=4)) is None
    native.PROOFS.device_types = ("cuda",)
    step(tokens())
    assert kernels.calls == []


def test_a_compiled_model_takes_it_too(kernels: Kernels) -> None:
    inputs = tokens()
    attend = torch.compile(lambda *each: sinkhorn_attention(*each, 4), backend="aot_eager", fullgraph=True)
    output = attend(*inputs)
    found = [output.detach(), *torch.autograd.grad(output.square().sum(), inputs)]
    assert len(kernels.calls) == 2
    for one, other in zip(found, step(inputs, backend="portable"), strict=True):
        torch.testing.assert_close(one, other)


def test_the_proof_leaves_torchs_generators_alone(kernels: Kernels) -> None:
    torch.manual_seed(3)
    want = torch.rand(4)
    torch.manual_seed(3)
    with torch.inference_mode():
        sinkhorn_attention(*tokens(), 4)
    assert torch.equal(torch.rand(4), want)
    assert len(kernels.calls) == 2


@IN_INTERPRETER
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities
@pytest.mark.parametrize("dtype", proof.TOLERANCES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_triton_passes_its_proof(kernels: Kernels, monkeypatch, dtype: torch.dtype, bias: bool) -> None:
    """With everything that there is, of both families of kernels; five times more exactly than is asked for."""
    monkeypatch.setattr(native.PROOFS, "load", lambda: native.load_triton().engine)
    monkeypatch.setattr(proof, "TOLERANCES", {each: size / 5 for each, size in proof.TOLERANCES.items()})
    inputs = [tensor[:1, :1].detach().requires_grad_() for tensor in tokens(dtype, 20, 33)]
    options = {"key_mask": torch.arange(33) > 3, "query_mask": torch.arange(20) < 12}
    options |= {"attn_bias": torch.ones(20, 33)} if bias else {}
    for n_iters in (3, 4):
        found = step(inputs, n_iters, **options)
        assert_same(found, step(inputs, n_iters, backend="triton", **options))
    assert native.describe_device_engine() == "triton, proven at its first use"


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        ("torch.set_float32_matmul_precision('high')", True),
        ("torch.set_float32_matmul_precision('highest')", False),
        ("torch.backends.cuda.matmul.allow_tf32 = True", True),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", True),
        ("torch.backends.cuda.matmul.fp32_precision = 'ieee'", False),
    ],
)
def test_tf32_is_asked_for_however_it_was_set(words: str, allowed: bool) -> None:
    """In a process of its own: torch refuses a program that has used both of its ways."""
    code = (
        f"import torch; from sinkhorn_attention.engines.proof import tf32_is_allowed; {words}; print(tf32_is_allowed())"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str(allowed)
