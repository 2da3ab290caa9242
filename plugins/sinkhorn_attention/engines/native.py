"""The native engine: the exponential domain in C++, at about the price of fused softmax on a CPU.

1. Heads are dealt out to the threads of one parallel region; a head that is left over, or very large, is shared.
2. K is made by blocks of rows in a product of its own, whose last step takes the exponential (cpp/head.h).
3. A column step and the row step before it need one pass: four rows stay in the first-level cache while their sums, the
   scalings and their share of the column sums are found (cpp/forward.h). So T half-steps pass K (T + 1) / 2 times.
4. Backward makes K again and takes the half-steps in reverse by the same passes (cpp/backward.h).
5. Heads whose scalings left the trusted range go to the log domain, as with the portable engine (log_domain.py), whose
   formulas and state these are: exponential.py has them.

The library is built when the package is installed (native_library.py finds it). Without it, or where its check against
the definition fails, the portable engine takes every call, and torch's kernel for softmax one half-step. On a CUDA
device the Triton engine takes what it has been proven right about (proof.py), the portable one the rest.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from . import domains, portable
from .domains import LOG_DOMAIN, SHIFTED, trusted_heads
from .fused_softmax import is_plain_softmax, softmax_backward, softmax_forward
from .heads import LOG2E, Gradients, Heads
from .native_library import Library
from .operator import Operator, Results, State, define
from .portable import Portable
from .problem import Problem, keep_factor
from .proof import Proofs
from .scratch import borrow

#: Rows of a block of K whose products are made, 48 at most, and its columns, about: it stays in the second-level cache.
BLOCK_ROWS, BLOCK_COLUMNS = 48, 512
#: Bytes of a block of whole rows, which the half-steps pass.
PASS_BYTES = 256 << 10

#: Relative error, in norm, of the check at first use: a hundred times what is measured.
CHECK_TOLERANCE = 1e-4

#: As cpp/call.h has them.
MAX_LEAD = 8
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.bool: 4}


class Operand(ctypes.Structure):
    """A tensor; as cpp/call.h has it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int64),
        ("stride", ctypes.c_int64 * MAX_LEAD),
        ("row_stride", ctypes.c_int64),
        ("column_stride", ctypes.c_int64),
    )


class Call(ctypes.Structure):
    """A call; as cpp/call.h has it."""

    _fields_ = (
        ("dims", ctypes.c_int64),
        ("lead", ctypes.c_int64 * MAX_LEAD),
        *((name, ctypes.c_int64) for name in ("heads", "n", "m", "d", "dv", "half_steps", "threads")),
        *((name, ctypes.c_int64) for name in ("keep_bytes", "share_bytes", "block_rows", "block_columns")),
        *((name, ctypes.c_int64) for name in ("pass_bytes", "detached", "backward", "is_double", "bias_copy")),
        *((name, ctypes.c_double) for name in ("scale", "damping", "keep_factor", "bounded_log2")),
        *((name, Operand) for name in ("query", "key", "value", "bias", "bias_bound", "query_mask", "key_mask")),
        *((name, Operand) for name in ("dropout_keep", "d_output", "d_query", "d_key", "d_value", "d_bias")),
        *((name, ctypes.c_void_p) for name in ("output", "rows", "columns", "domain", "scratch")),
    )


def operand(tensor: Tensor | None, dims: int, is_mask: bool = False) -> Operand:
    """A tensor (lead..., rows, columns), or a mask (lead..., length), as the library takes it."""
    if tensor is None:
        return Operand()
    strides = tensor.stride()
    rows, columns = (0, strides[-1]) if is_mask else strides[-2:]
    return Operand(tensor.data_ptr(), DTYPES[tensor.dtype], strides[:dims], rows, columns)


def _in_memory(tensor: Tensor) -> Tensor:
    """A tensor whose numbers lie in memory: torch holds some negated, and some zeros not at all."""
    return tensor.new_zeros(tensor.shape) if tensor._is_zerotensor() else tensor.resolve_neg()


def _in_rows(tensor: Tensor) -> Tensor:
    """A tensor whose last dimension lies in memory in one piece."""
    tensor = _in_memory(tensor)
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


class Native(Portable):
    """The engine; see the module.

    Args:
        name: of its operator.
        recompute: whether K is made again for each pass whatever its size.
        alone: whether a call that it cannot take is refused; otherwise the portable engine takes it.
    """

    def __init__(self, name: str, recompute: bool = False, alone: bool = False) -> None:
        super().__init__(name, recompute)
        self.alone = alone

    def refusal(self, problem: Problem) -> str | None:
        """What the library has not, where no other engine may take its place."""
        if not self.alone:
            return None
        if problem.like.device.type not in ("cpu", "meta"):
            return f"tensors on the CPU (they are on {problem.like.device})"
        if problem.scores is not None or len(problem.lead) > MAX_LEAD:
            return f"tokens with {MAX_LEAD} leading dimensions at most"
        return None if LIBRARY.load() is not None else f"its library ({LIBRARY.reason})"

    def library(self, problem: Problem) -> ctypes.CDLL | None:
        """The library if it computes this problem; otherwise the portable engine does."""
        on_cpu = not domains.is_asynchronous(problem.like.device)
        suitable = on_cpu and problem.scores is None and len(problem.lead) <= MAX_LEAD
        return LIBRARY.load() if suitable else None

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The output, contiguous and in float32 at least, and the `state`."""
        library = self.library(problem)
        if library is not None:
            return self.forward_by(library, problem)
        kernels = PROOFS.engine(problem)
        if kernels is not None:
            return kernels.forward(problem)
        if is_plain_softmax(problem):
            state = self.state(problem)
            return softmax_forward(problem, state), *state
        return super().forward(problem)

    def backward(self, problem: Problem, results: tuple[Tensor, Tensor], state: State, bias_gradient: bool) -> Results:
        """Gradients of query, key, value and bias; see `operator.Engine`."""
        library = self.library(problem)
        if library is not None:
            return self.backward_by(library, problem, results, state, bias_gradient)
        kernels = PROOFS.engine(problem)
        if kernels is not None:
            return kernels.backward(problem, results, state, bias_gradient)
        if is_plain_softmax(problem):
            return softmax_backward(problem, results, state)
        return super().backward(problem, results, state, bias_gradient)

    def forward_by(self, library: ctypes.CDLL, problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`forward` by a library."""
        u, v, domain = self.state(problem)
        result = problem.like.new_empty(problem.output_shape, dtype=problem.dtype)
        self._run(library, problem, (result, u, v, domain))
        shifted = (domain == SHIFTED).nonzero().squeeze(1)
        if len(shifted):
            domain[shifted[~trusted_heads(u[:, shifted], v[:, shifted])]] = LOG_DOMAIN
        if bool((domain == LOG_DOMAIN).any()):
            heads = Heads(problem)
            self._log_domain_forward(heads, (u, v, domain), result.view(heads.count, heads.n, -1))
        return result, u, v, domain

    def backward_by(
        self, library: ctypes.CDLL, problem: Problem, results: Sequence[Tensor], state: State, bias_gradient: bool
    ) -> Results:
        """`backward` by a library."""
        gradients = Gradients(problem, bias_gradient)
        self._run(library, problem, (results[0], *state), results[1], gradients)
        if bool((state[2] == LOG_DOMAIN).any()):
            d_output = results[1].reshape(problem.heads, problem.n, -1)
            self._log_domain_backward(gradients.heads, state[2], d_output, gradients)
        return gradients.result()

    def _run(
        self,
        library: ctypes.CDLL,
        problem: Problem,
        results: Sequence[Tensor],
        d_output: Tensor | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        """Calls the library: forward, or backward where there are gradients to fill."""
        assert problem.query is not None and problem.key is not None and problem.value is not None  # noqa: PT018
        lead, dims, n, m = problem.lead, len(problem.lead), problem.n, problem.m
        call = Call(dims=dims, heads=problem.heads, n=n, m=m, d=problem.query.shape[-1], dv=problem.value.shape[-1])
        call.lead[:dims] = lead
        call.half_steps, call.scale, call.damping = problem.n_iters, problem.scale, problem.damping
        call.threads, call.detached = LIBRARY.threads(), problem.detached
        call.backward, call.is_double = gradients is not None, problem.dtype == torch.float64
        call.keep_bytes, call.share_bytes = 0 if self.recompute else portable.RECOMPUTE_BYTES, portable.LARGE_MAP_BYTES
        call.block_rows, call.block_columns, call.pass_bytes = BLOCK_ROWS, BLOCK_COLUMNS, PASS_BYTES
        call.bounded_log2 = domains.BOUNDED_LOG2
        # What the pointers point to has to live until the call has returned.
        tokens = [_in_rows(tensor) for tensor in (problem.query, problem.key, problem.value)]
        call.query, call.key, call.value = (operand(tensor, dims) for tensor in tokens)
        masks = [
            None if mask is None else _in_memory(mask).expand(*lead, length)
            for mask, length in ((problem.query_mask, n), (problem.key_mask, m))
        ]
        call.query_mask, call.key_mask = (operand(mask, dims, is_mask=True) for mask in masks)
        keep = None if problem.dropout_keep is None else _in_rows(problem.dropout_keep)
        call.dropout_keep = operand(keep, dims)
        call.keep_factor = keep_factor(problem.dropout_p)
        bias, bound = problem.attn_bias, None
        if bias is not None:
            bias = _in_memory(bias)
            bound = _bias_bound(bias, problem.dtype).expand(lead)
            call.bias = operand(bias.expand(*lead, n, m), dims)
            call.bias_bound = Operand(bound.data_ptr(), 0, bound.stride())
        call.output, call.rows, call.columns, call.domain = (tensor.data_ptr() for tensor in results)
        copies: Tensor | None = None
        if gradients is not None:
            assert d_output is not None
            d_output = _in_rows(d_output)
            call.d_output = operand(d_output, dims)
            parts = [part.view(*lead, *part.shape[1:]) for part in gradients.of_inputs]
            call.d_query, call.d_key, call.d_value = (operand(part, dims) for part in parts)
            if gradients.bias is not None and bias is not None:
                copies = gradients.bias.unsqueeze(0)
                apart = math.prod(bias.shape[:-2]) == problem.heads and bias.shape[-2] == n
                if call.threads > 1 and not apart:
                    copies = gradients.bias.new_zeros(call.threads, *gradients.bias.shape)
                    call.bias_copy = gradients.bias.numel()
                call.d_bias = operand(copies[0].view(bias.shape).expand(*lead, n, m), dims)
        size = library.sinkhorn_scratch_bytes(ctypes.byref(call))
        with borrow((size // problem.dtype.itemsize,), dtype=problem.dtype) as (scratch,):
            call.scratch = scratch.data_ptr()
            library.sinkhorn_run(ctypes.byref(call))
        if gradients is not None and copies is not None and call.bias_copy:
            torch.sum(copies, 0, out=gradients.bias)


def _bias_bound(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest absolute value of each matrix of a bias (..., n, m); infinite for -inf, NaN for NaN and +inf.

    The library takes the bias times log2(e): what overflows by that counts as infinite.
    """
    low, high = bias.amin((-2, -1)).to(dtype), bias.amax((-2, -1)).to(dtype)
    return torch.maximum(high, -low).masked_fill_(high * LOG2E == math.inf, math.nan)


def disagreement(library: ctypes.CDLL) -> str | None:
    """What a library gets wrong of three small problems, or None: value and gradients against the definition."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    query, key, value, bias = normal(2, 3, 50, 20), normal(2, 3, 70, 20), normal(2, 3, 70, 12), normal(3, 1, 70)
    key_mask, keep = normal(2, 1, 70) > -1, normal(2, 3, 50, 70) > -1
    problems = (
        Problem(query, key, value, n_iters=1, scale=0.2),
        Problem(query, key, value, key_mask=key_mask, query_mask=key_mask[..., :50], n_iters=3, scale=0.2),
        Problem(query * 20, key, value, attn_bias=bias, dropout_keep=keep, dropout_p=0.2, n_iters=4, scale=0.2),
    )
    engine, arriving = Native("check"), normal(2, 3, 50, 12)
    for problem in problems:
        given = {name: getattr(problem, name) for name in ("query", "key", "value", "attn_bias")}
        with torch.inference_mode(False), torch.enable_grad():
            leaves = {name: each.clone().requires_grad_() for name, each in given.items() if each is not None}
            output = define(replace(problem, **leaves))
            want = [output.detach(), *torch.autograd.grad(output, list(leaves.values()), arriving)]
        single = problem.in_dtype(torch.float32)
        output, *state = engine.forward_by(library, single)
        rows, columns, domain = state
        results = output, arriving.float()
        got = [output, *engine.backward_by(library, single, results, (rows, columns, domain), "attn_bias" in leaves)]
        for name, one, other in zip(("value", *leaves), got, want, strict=False):
            error = float((one.double() - other).norm() / other.norm())
            if not error <= CHECK_TOLERANCE:
                return f"its check failed: the {name} of a small problem is off by {error:.1e} of itself"
    return None


def load_triton() -> Operator:
    """The operator of the Triton engine, imported at its first use.

    Raises:
        NotImplementedError: where its package is missing.
    """
    try:
        from .triton import TRITON
    except ImportError as error:
        raise NotImplementedError(
            "backend='triton' needs the triton package, which comes with torch on Linux; use backend='auto'"
        ) from error
    return TRITON


#: The library of this process.
LIBRARY = Library(disagreement)
#: What this process has found out about its GPUs.
PROOFS = Proofs(lambda: load_triton().engine)


def describe_cpu_engine() -> str:
    """The engine that "auto" takes for tokens on the CPU, with its build, as a run card names it."""
    library = LIBRARY.load()
    return f"portable ({LIBRARY.reason})" if library is None else f"native {LIBRARY.build}"


def describe_device_engine() -> str | None:
    """What "auto" has taken on CUDA devices in this process, as a run card names it; None if it has used none."""
    return PROOFS.describe()
