"""The Triton engine: attention of up to 256 keys on a GPU, forward and exact backward, without a map in memory.

One program per head keeps the keys on the chip and goes once through blocks of queries for each pair of half-steps,
with potentials in log2. Saved for backward are the inputs and the potentials of the half-steps. Backward first
differentiates by the potentials, half-step after half-step, in the same manner; then dL/dC is made block by block, each
half-step being one term, once for the queries and once for the keys and values, so that no two programs write to the
same place and results do not depend on their order. Nothing is decided by the data: no synchronisation.

float32 tokens are multiplied in float32, float16 and bfloat16 tokens on tensor cores with float32 sums; the coupling is
rounded to their dtype before the product with the values, as flash attention does.

Needs the `triton` package, which comes with torch on Linux. CPU tensors run in Triton's interpreter if
TRITON_INTERPRET=1 was set before the first import; that is for tests.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from . import triton_kernels as kernels
from .heads import LOG2E
from .operator import Operator, Results, State
from .problem import Problem

#: The keys of a head stay on the chip. Beyond 256 of them the compiler spills registers.
MAX_KEYS = 256
#: Widest queries, keys and values, by bytes of a number; 128 KB of keys and values stay on the chip at most, which fit,
#: with the scratch of the products, in the 163 KB that a program has on an A100 (compute capability 8.0).
MAX_WIDTH = {2: 128, 4: 64}
#: Queries and keys of a block of dL/dC, and warps of its program, in the kernels with one program per head and block.
#: The largest that spill no register, like the layouts below.
QUERY_TILE = {"ROWS": 32, "COLUMNS": 64, "num_warps": 4}
KEY_TILE = {"ROWS": 32, "COLUMNS": 32, "num_warps": 4}

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Layout(NamedTuple):
    """Sizes of the blocks, powers of two of at least 16, and warps of the programs that take a whole head.

    A test compiles them for compute capability 8.0 and 9.0 at 256 keys of width 64, where no register is spilled.
    float32 products are made by the ordinary units and need several times the registers.
    """

    columns: int
    width: int
    value_width: int
    rows: int
    forward_warps: int
    backward_warps: int


def block(length: int) -> int:
    """The power of two, 16 at least, that `length` fits in."""
    return max(16, triton.next_power_of_2(length))


def choose_layout(m: int, width: int, value_width: int, itemsize: int) -> Layout:
    """Blocks for m keys of `width` and values of `value_width` numbers of `itemsize` bytes."""
    columns = block(m)
    warps = 4 if columns <= 64 else 8
    if itemsize == 4:
        return Layout(columns, block(width), block(value_width), 16, min(max(columns // 16, 4), 16), warps)
    rows = 64 if columns <= 128 else 32
    if max(width, value_width) > 64:
        rows //= 2
    return Layout(columns, block(width), block(value_width), rows, warps, warps)


@torch.compiler.assume_constant_result
def refusal(device: torch.device, dtype: torch.dtype, m: int, width: int, value_width: int) -> str | None:
    """Why this engine does not take a problem, for an error message, or None if it does.

    Args:
        device: of the tensors.
        dtype: of the tokens.
        m: number of keys.
        width: of queries and keys.
        value_width: of values.
    """
    interpreted = triton.knobs.runtime.interpret
    if device.type != "cuda" and not interpreted:
        return f"tensors on a CUDA device (they are on {device}; CPU tensors need TRITON_INTERPRET=1)"
    if device.type == "cuda" and not interpreted and torch.cuda.get_device_capability(device) < (8, 0):
        return "a GPU of compute capability 8.0 (Ampere) or newer"
    if dtype not in DTYPES:
        return f"float16, bfloat16 or float32 (the tokens are {dtype})"
    if m > MAX_KEYS:
        return f"at most {MAX_KEYS} keys (there are {m})"
    widest = max(width, value_width)
    if widest > MAX_WIDTH[dtype.itemsize]:
        return f"heads of width {MAX_WIDTH[dtype.itemsize]} at most for {dtype} (the width is {widest})"
    return None


@contextmanager
def launching(device: torch.device) -> Iterator[None]:
    """Kernels inside run on the device; where they cannot be compiled or launched, the error says what to do.

    Raises:
        RuntimeError: in place of Triton's, which stays its cause.
    """
    try:
        with torch.cuda.device(device if device.type == "cuda" else -1):
            yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise RuntimeError(
            f"the Triton engine of Sinkhorn attention failed on {device}: {type(error).__name__}: {error}\n"
            "Pass backend='portable', or 'streaming', which need no kernels of their own."
        ) from error


class _Call:
    """The tensors of one call as the kernels take them: contiguous, heads first, with a stand-in for what is absent."""

    def __init__(self, problem: Problem) -> None:
        query, key, value, attn_bias = problem.query, problem.key, problem.value, problem.attn_bias
        assert query is not None and key is not None and value is not None  # noqa: PT018
        n_iters, dropout_keep = problem.n_iters, problem.dropout_keep
        self.lead, (self.n, self.width), self.m = query.shape[:-2], query.shape[-2:], key.shape[-2]
        self.value_width = value.shape[-1]
        self.heads = math.prod(self.lead)
        self.pairs, self.even = n_iters // 2, n_iters % 2 == 0
        self.row_steps = (n_iters + 1) // 2
        self.scale, self.dropout_p = problem.scale, problem.dropout_p
        self.query, self.key, self.value = (self.tokens(tensor) for tensor in (query, key, value))
        self.masks = [self.mask(problem.query_mask, self.n), self.mask(problem.key_mask, self.m)]
        self.keep = None if dropout_keep is None else dropout_keep.contiguous().view(torch.uint8)
        self.bias = self.bias_head = None
        self.bias_strides = 0, 0
        if attn_bias is not None:
            # The bias stays as small as it came: bias_head says where the matrix of each head begins.
            rows, columns = attn_bias.shape[-2:]
            self.bias = attn_bias.contiguous()
            self.bias_strides = (columns if rows > 1 else 0), (1 if columns > 1 else 0)
            matrices = (1,) * (len(self.lead) + 2 - attn_bias.dim()) + attn_bias.shape[:-2]
            begin = torch.arange(math.prod(matrices), device=query.device) * (rows * columns)
            self.bias_head = begin.view(matrices).expand(self.lead).contiguous()
        self.layout = choose_layout(self.m, self.width, self.value_width, query.dtype.itemsize)

    def tokens(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(self.heads, *tensor.shape[-2:]).contiguous()

    def mask(self, mask: Tensor | None, length: int) -> Tensor | None:
        return None if mask is None else mask.expand(*self.lead, length).contiguous().view(torch.uint8)

    def potentials(self, steps: int, length: int) -> Tensor:
        return self.query.new_empty(self.heads, steps, length, dtype=torch.float32)

    def pointers(self) -> list[Tensor]:
        """Masks, bias and dropout; what is absent is not read, and any tensor stands for it."""
        optional = [*self.masks, self.bias, self.bias_head, self.keep]
        return [self.query if tensor is None else tensor for tensor in optional]

    def sizes(self, factors: list[float]) -> list[float]:
        """Every kernel's numbers: sizes, steps, factors and strides of the bias."""
        keep_factor = 0.0 if self.dropout_p >= 1 else 1 / (1 - self.dropout_p)
        numbers = [self.n, self.m, self.width, self.value_width, self.pairs, self.row_steps]
        return [*numbers, self.scale * LOG2E, *factors, keep_factor, *self.bias_strides]

    def options(self) -> dict[str, bool | int]:
        return {
            "EVEN": self.even,
            "HAS_QUERY_MASK": self.masks[0] is not None,
            "HAS_KEY_MASK": self.masks[1] is not None,
            "HAS_BIAS": self.bias is not None,
            "HAS_KEEP": self.keep is not None,
            "WIDTH": self.layout.width,
            "VALUE_WIDTH": self.layout.value_width,
        }

    def head_blocks(self, warps: int) -> dict[str, int]:
        """Options of the kernels with one program per head."""
        return {"ROWS": self.layout.rows, "COLUMNS": self.layout.columns, "num_warps": warps}


class Triton:
    """The engine; see the module."""

    name = "triton"

    def refusal(self, problem: Problem) -> str | None:
        """What this engine needs and does not get."""
        if problem.scores is not None or problem.damping != 1.0:
            return "attention with undamped half-steps"
        assert problem.value is not None
        like = problem.like
        return refusal(like.device, like.dtype, problem.m, like.shape[-1], problem.value.shape[-1])

    def keeps_output(self, problem: Problem) -> bool:
        """Backward makes it anew."""
        return False

    def state(self, problem: Problem) -> State:
        """The row potentials (heads, ceil(T/2), n), the column potentials (heads, T//2 + 1, m), and log2(n / m) valid.

        All in log2 and float32.
        """
        heads, n_iters, empty = problem.heads, problem.n_iters, problem.like.new_empty
        rows = empty(heads, (n_iters + 1) // 2, problem.n, dtype=torch.float32)
        columns = empty(heads, n_iters // 2 + 1, problem.m, dtype=torch.float32)
        return rows, columns, empty(heads, dtype=torch.float32)

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The output and the `state`."""
        call, state = _Call(problem), self.state(problem)
        output = problem.like.new_empty(problem.output_shape)
        with launching(output.device):
            kernels.forward_kernel[(call.heads,)](
                call.query, call.key, call.value, output, *state, *call.pointers(), *call.sizes([]),
                **call.options(), **call.head_blocks(call.layout.forward_warps),
            )  # fmt: skip
        return output.to(problem.dtype), *state

    def backward(self, problem: Problem, results: tuple[Tensor, Tensor], state: State, bias_gradient: bool) -> Results:
        """The gradients."""
        call, attn_bias, like = _Call(problem), problem.attn_bias, problem.like
        row_potentials, column_potentials, log_ratio = state
        d_output = call.tokens(results[1].to(like.dtype))
        d_query, d_key, d_value = (
            torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for tensor in (problem.query, problem.key, problem.value)
            if tensor is not None
        )
        d_f, d_g = torch.empty_like(row_potentials), call.potentials(call.pairs, call.m)
        wants_bias = bias_gradient and attn_bias is not None
        # A bias is as large as the map or is summed over it: the map's gradient is written out.
        d_scores = d_f.new_empty((call.heads, call.n, call.m) if wants_bias else (0,))
        tensors = call.query, call.key, call.value, d_output, row_potentials, column_potentials, d_f, d_g, log_ratio
        options: dict[str, bool | int] = {"DETACHED": problem.detached, **call.options()}
        scale = problem.scale
        with launching(like.device):
            kernels.potential_gradient_kernel[(call.heads,)](
                *tensors, *call.pointers(), *call.sizes([]), **options, **call.head_blocks(call.layout.backward_warps)
            )
            kernels.query_gradient_kernel[(call.heads, triton.cdiv(call.n, QUERY_TILE["ROWS"]))](
                *tensors, *call.pointers(), d_query, d_scores, *call.sizes([scale]),
                BIAS_GRADIENT=wants_bias, **options, **QUERY_TILE,
            )  # fmt: skip
            kernels.key_gradient_kernel[(call.heads, triton.cdiv(call.m, KEY_TILE["COLUMNS"]))](
                *tensors, *call.pointers(), d_key, d_value, *call.sizes([scale]), **options, **KEY_TILE
            )
        d_bias = like.new_empty(0)
        if attn_bias is not None and wants_bias:
            d_bias = d_scores.view(*call.lead, call.n, call.m).sum_to_size(attn_bias.shape).to(attn_bias.dtype)
        return d_query, d_key, d_value, d_bias


TRITON = Operator(Triton())
