"""Whether the Triton engine may be trusted on the device at hand: "auto" and "streaming" try it before they take it.

Each form of a problem (device, dtype, block sizes, parity of the half-steps, which masks, bias and dropout there are),
for which kernels of its own are compiled, is tried once in a process: a small problem of that form goes through them
and through the portable engine in float64, forward and backward. Agreement takes the kernels. Where they disagree, do
not compile, or are not there, the portable engine takes every problem of the form, with one warning that says why.

What was decided stays: forward and backward of a problem, whose states have one shape but two meanings, go to the same
engine. So a form that is first met while a CUDA graph is captured, when nothing can be tried, stays with the portable
engine. Fake tensors decide nothing.
"""

import threading
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from . import domains
from .operator import Engine
from .portable import Portable
from .problem import Problem

#: Relative error, in norm, from which on kernels are wrong, by the dtype of the tokens: ten times what is measured.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
#: float32 tokens whose products may be of TF32, with 11 bits in place of 24.
TF32_TOLERANCE = 2e-2
#: Tokens of the small problem at most, where the problem has more: several blocks, the last of them not full.
MAX_LENGTH = 300


class Form(NamedTuple):
    """What kernels are compiled for: of a problem, and so of its backward too."""

    device: torch.device
    dtype: torch.dtype
    lengths: tuple[int, int]
    widths: tuple[int, int]
    n_iters: int
    bias: tuple[torch.dtype, bool, bool] | None
    has_masks: tuple[bool, bool]
    has_dropout: bool
    detached: bool
    damping: float


def form_of(problem: Problem) -> Form:
    """The form; lengths and widths are rounded up to the powers of two that blocks are made by."""
    assert problem.query is not None and problem.value is not None  # noqa: PT018
    bias, n_iters = problem.attn_bias, problem.n_iters
    return Form(
        problem.query.device,
        problem.query.dtype,
        (_power(min(problem.n, MAX_LENGTH)), _power(min(problem.m, MAX_LENGTH))),
        (_power(problem.query.shape[-1]), _power(problem.value.shape[-1])),
        n_iters if n_iters <= 4 else 4 + n_iters % 2,
        None if bias is None else (bias.dtype, bias.shape[-2] > 1, bias.shape[-1] > 1),
        (problem.query_mask is not None, problem.key_mask is not None),
        problem.dropout_keep is not None,
        problem.detached,
        problem.damping,
    )


def _power(length: int) -> int:
    """The next power of two, 16 at least."""
    return max(16, 1 << (length - 1).bit_length())


def small_problem(form: Form, problem: Problem) -> Problem:
    """A problem of a form, of random numbers that do not touch torch's generators.

    Args:
        form: of the problem.
        problem: whose widths and, where they are small, lengths it has.
    """
    generator = torch.Generator().manual_seed(0)
    n, m = min(problem.n, MAX_LENGTH), min(problem.m, MAX_LENGTH)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(form.device)

    assert problem.query is not None and problem.value is not None  # noqa: PT018
    width, value_width = problem.query.shape[-1], problem.value.shape[-1]
    query, key, value = (normal(1, 2, *shape).to(form.dtype) for shape in ((n, width), (m, width), (m, value_width)))
    bias = None
    if form.bias is not None:
        dtype, has_rows, has_columns = form.bias
        bias = normal(2, n if has_rows else 1, m if has_columns else 1).to(dtype)
    masks = [normal(1, 1, length) > -1 if has else None for length, has in zip((n, m), form.has_masks, strict=True)]
    return Problem(
        *(query, key, value),
        attn_bias=bias,
        query_mask=masks[0],
        key_mask=masks[1],
        dropout_keep=normal(1, 2, n, m) > -1 if form.has_dropout else None,
        n_iters=form.n_iters,
        scale=1.5 * width**-0.5,
        detached=form.detached,
        damping=form.damping,
        dropout_p=problem.dropout_p,
    )


def tf32_is_allowed() -> bool:
    """Whether torch's products of float32 on CUDA devices may be of TF32, whose factors have 11 bits.

    Asked by the backend's own name: once a program has set that, torch.get_float32_matmul_precision() raises.
    """
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision == "tf32" if hasattr(matmul, "fp32_precision") else bool(matmul.allow_tf32)


def tolerances(problem: Problem) -> tuple[float, float]:
    """Of the tokens' results, and of the bias's gradient, which has the bias's dtype."""
    dtype, bias = problem.like.dtype, problem.attn_bias
    of_tokens = TF32_TOLERANCE if dtype == torch.float32 and tf32_is_allowed() else TOLERANCES[dtype]
    return of_tokens, max(of_tokens, 0.0 if bias is None else TOLERANCES.get(bias.dtype, 0.0))


def disagreement(engine: Engine, problem: Problem, allowed: tuple[float, float]) -> str | None:
    """What an engine gets wrong of a problem, or None: value and gradients against the portable one in float64.

    Args:
        engine: to be tried.
        problem: to be solved.
        allowed: errors, as `tolerances` gives them.
    """
    assert problem.value is not None
    generator = torch.Generator().manual_seed(1)
    arriving = torch.randn(problem.output_shape, generator=generator).to(problem.like)
    has_bias = problem.attn_bias is not None
    found = []
    for solver, given in ((engine, problem), (Portable("proof"), problem.in_dtype(torch.float64))):
        output, rows, columns, domain = solver.forward(given)
        results = output, arriving.to(output.dtype)
        gradients = solver.backward(given, results, (rows, columns, domain), has_bias)
        found.append([output, *gradients[: 3 + has_bias]])
    parts = ("output", *(f"gradient of the {name}" for name in ("query", "key", "value", "bias")))
    for name, one, other in zip(parts, *found, strict=False):
        # What a bias adds to a whole row or column has next to no gradient, of which no share could be asked.
        floor = 0.1 * float(arriving.norm()) if name.endswith("bias") else 0.0
        error = float((one.double() - other).norm()) / max(float(other.norm()), floor, 1e-30)
        if not error <= allowed[name.endswith("bias")]:
            return f"the {name} of a small problem is off by {error:.1e} of itself"
    return None


class Proofs:
    """The forms that were tried in this process.

    Args:
        load: gives the engine.

    Attributes:
        device_types: of tensors that the engine is for.
    """

    def __init__(self, load: Callable[[], Engine]) -> None:
        self.load, self.device_types = load, ("cuda",)
        self._known: dict[Form, str | None] = {}
        self._lock = threading.RLock()

    def engine(self, problem: Problem) -> Engine | None:
        """The engine, if it takes a problem and was right about its form; a form that is new is tried."""
        like = problem.like
        if like.device.type not in self.device_types or problem.scores is not None or isinstance(like, FakeTensor):
            return None
        form = form_of(problem)
        if form not in self._known:
            with self._lock:
                if form not in self._known:
                    self._known[form] = self._why_not(form, problem)
        return self.load() if self._known[form] is None else None

    def _why_not(self, form: Form, problem: Problem) -> str | None:
        """Why a form is left to the portable engine, said in a warning, or None."""
        try:
            engine = self.load()
        except NotImplementedError as error:
            return self._warn(form, str(error))
        reason = engine.refusal(problem)
        if reason is not None:
            return self._warn(form, f"the Triton engine needs {reason}")
        if domains.is_captured(form.device):
            return self._warn(
                form, "it was first used while a CUDA graph was captured: make a step without capturing before"
            )
        small = small_problem(form, problem)
        try:
            wrong = disagreement(engine, small, tolerances(small))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a compiler or driver ends in, attention goes on
            wrong = str(error).partition("\n")[0]
        return None if wrong is None else self._warn(form, f"the Triton engine failed its proof: {wrong}")

    def _warn(self, form: Form, reason: str) -> str:
        if reason not in self._known.values():
            warnings.warn(
                f"Sinkhorn attention of {form.dtype} on {form.device} is computed by the portable engine: {reason}",
                stacklevel=2,
            )
        return reason

    def describe(self) -> str | None:
        """What was decided in this process, in words; None before the first problem."""
        if not self._known:
            return None
        reasons = dict.fromkeys(reason for reason in self._known.values() if reason is not None)
        proven = ["triton, proven at its first use"] if None in self._known.values() else []
        return "; ".join([*proven, *(f"portable ({reason})" for reason in reasons)])
