"""The Triton engine: attention on a GPU, forward and exact backward, without a map in memory.

Potentials are in log2; saved for backward are the inputs and the potentials of the half-steps, O(n d + T n). Backward
first goes through the half-steps in reverse, which gives a weight to each; then dL/dC is made block by block, each
half-step being one term, once for the queries and once for the keys and values. No two programs write to the same
place, so results do not depend on their order. Nothing is decided by the data: no synchronisation, any scale of scores.

Two families of kernels for the half-steps, chosen by shape (`whole_heads`): up to 256 keys stay on the chip, one
program has a head, and all half-steps are one launch (triton_whole_heads.py); what is larger goes tile by tile, one
launch for each half-step (triton_tiles.py). The gradients of the tokens are of tiles in both.

float32 tokens are multiplied in float32, or in TF32 where torch's own products may be
(`torch.set_float32_matmul_precision`); float16 and bfloat16 on tensor cores with float32 sums, the coupling being
rounded to their dtype before the product with the values, as flash attention does.

Needs the `triton` package, which comes with torch on Linux. CPU tensors run in Triton's interpreter if
TRITON_INTERPRET=1 was set before the first import; that is for tests.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from . import triton_tiles as tiles
from . import triton_whole_heads as whole
from .heads import LOG2E
from .operator import Operator, Results, State
from .portable import empty_state
from .problem import Problem, keep_factor
from .proof import tf32_is_allowed

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
#: Widest queries, keys and values.
MAX_WIDTH = 256
#: Keys, and their width, up to which a head stays on the chip. Beyond 256 of them, or with more than 64 numbers each,
#: registers are spilled or the 163 KB of shared memory of an A100 (compute capability 8.0) do not suffice.
WHOLE_KEYS, WHOLE_WIDTH = 256, 64
#: Largest offset in a head, which has 32 bits.
MAX_OFFSET = 2**31 - 1


class Layout(NamedTuple):
    """Sizes of the blocks, powers of two of at least 16, and warps of a program."""

    rows: int
    columns: int
    width: int
    value_width: int
    warps: int

    def options(self) -> dict[str, int]:
        """What a kernel is compiled for."""
        return {
            **{"ROWS": self.rows, "COLUMNS": self.columns, "X_BLOCK": self.rows, "Y_BLOCK": self.columns},
            **{"WIDTH": self.width, "VALUE_WIDTH": self.value_width, "num_warps": self.warps},
        }


def block(length: int) -> int:
    """The power of two, 16 at least, that `length` fits in."""
    return max(16, triton.next_power_of_2(length))


def whole_heads(m: int, width: int, value_width: int, itemsize: int, reads_map: bool) -> tuple[Layout, Layout] | None:
    """Layouts, forward and backward, of the kernels that keep m keys on the chip; None if these are too many.

    Args:
        m: number of keys.
        width: of queries and keys.
        value_width: of values.
        itemsize: bytes of a number.
        reads_map: whether there is a bias or a dropout mask, for which there are no registers left.
    """
    if m > WHOLE_KEYS or max(width, value_width) > WHOLE_WIDTH or reads_map:
        return None
    # At least 32 wide: narrower blocks of 256 keys are laid out so that registers are spilled.
    columns, widths = block(m), (max(32, block(width)), max(32, block(value_width)))
    warps = 4 if columns <= 64 else 8
    if itemsize == 4:  # products of ordinary units, which need several times the registers
        forward = Layout(16, columns, *widths, min(max(columns // 16, 4), 16))
        return forward, forward._replace(warps=warps)
    rows = 64 if columns == 128 else 16 if columns == 256 and max(widths) == 32 else 32
    layout = Layout(rows, columns, *widths, warps)
    return layout, layout


#: Tiles (queries and keys, or the other way round, and warps), by bytes of a number and by the larger block of widths
#: up to which they hold: the largest that spill no register and fit the shared memory of compute capability 8.0 and 9.0
#: (test_triton.py compiles them). Of the half-steps and the output; the same where a bias or a dropout mask is read,
#: which takes registers; of the query's gradient; and of that of key and value, which has two sums.
TILES = {
    2: {64: ((64, 64, 4), (32, 32, 4), (64, 32, 4), (64, 32, 8)),
        128: ((64, 64, 8), (64, 32, 8), (32, 32, 4), (32, 32, 4)),
        256: ((32, 32, 8), (32, 32, 8), (32, 32, 8), (16, 32, 8))},
    4: {64: ((32, 16, 4), (32, 32, 4), (32, 32, 4), (16, 32, 4)),
        128: ((32, 16, 8), (32, 16, 8), (16, 16, 4), (16, 16, 4)),
        256: ((16, 16, 8), (16, 16, 8), (16, 16, 8), (16, 16, 8))},
}  # fmt: skip


class Tiles(NamedTuple):
    """Layouts of the kernels by tiles."""

    half_step: Layout
    query: Layout
    key: Layout


def choose_tiles(width: int, value_width: int, itemsize: int, reads_map: bool) -> Tiles:
    """The layouts.

    Args:
        width: of queries and keys.
        value_width: of values.
        itemsize: bytes of a number.
        reads_map: whether there is a bias or a dropout mask.
    """
    widths = block(width), block(value_width)
    found = next(layouts for up_to, layouts in TILES[itemsize].items() if max(widths) <= up_to)
    plain, reading, query, key = (Layout(rows, columns, *widths, warps) for rows, columns, warps in found)
    return Tiles(reading if reads_map else plain, query, key)


@torch.compiler.assume_constant_result
def refusal(device: torch.device, dtype: torch.dtype, width: int, value_width: int) -> str | None:
    """Why this engine does not take a problem, for an error message, or None if it does.

    Args:
        device: of the tensors.
        dtype: of the tokens.
        width: of queries and keys.
        value_width: of values.
    """
    interpreted = triton.knobs.runtime.interpret
    if device.type not in ("cuda", "meta") and not interpreted:
        return f"tensors on a CUDA device (they are on {device}; CPU tensors need TRITON_INTERPRET=1)"
    if device.type == "cuda" and not interpreted and torch.cuda.get_device_capability(device) < (8, 0):
        return "a GPU of compute capability 8.0 (Ampere) or newer"
    if dtype not in DTYPES:
        return f"float16, bfloat16 or float32 (the tokens are {dtype})"
    if max(width, value_width) > MAX_WIDTH:
        return f"heads of width {MAX_WIDTH} at most (the width is {max(width, value_width)})"
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


def launch(kernel: Any, programs: tuple[int, ...], arguments: dict[str, Any], layout: Layout) -> None:
    """Runs a kernel with those of the arguments that it names."""
    options = layout.options()
    wanted = {name: options[name] if name in options else arguments[name] for name in kernel.arg_names}
    kernel[programs](**wanted, num_warps=layout.warps)


class _Call:
    """One call: the arguments of all kernels by their names, with a stand-in for what is absent."""

    def __init__(self, problem: Problem, state: State) -> None:
        query, key, value, attn_bias = problem.query, problem.key, problem.value, problem.attn_bias
        assert query is not None and key is not None and value is not None  # noqa: PT018
        self.lead, self.heads, self.n, self.m = problem.lead, problem.heads, problem.n, problem.m
        self.pairs, self.even = problem.n_iters // 2, problem.n_iters % 2 == 0
        self.last, self.damping = (problem.n_iters + 1) // 2 - 1, problem.damping
        self.device, self.rows, self.columns = query.device, *state[:2]
        widths = query.shape[-1], value.shape[-1], query.dtype.itemsize
        reads_map = attn_bias is not None or problem.dropout_keep is not None
        self.whole, self.tiles = whole_heads(self.m, *widths, reads_map), choose_tiles(*widths, reads_map)
        masks = [_in_heads(mask, self.lead, length) for mask, length in
                 ((problem.query_mask, self.n), (problem.key_mask, self.m))]  # fmt: skip
        bias, bias_head, bias_strides = _bias_in_heads(attn_bias, self.lead)
        keep = None if problem.dropout_keep is None else problem.dropout_keep.contiguous().view(torch.uint8)
        single = query.dtype == torch.float32
        self.arguments: dict[str, Any] = {
            **{"F": self.rows, "G": self.columns, "COLUMN_SUMS": self.columns, "D_F": self.rows, "D_G": self.columns},
            # What is absent is not read, and any tensor stands for it.
            **{"QUERY_MASK": masks[0], "KEY_MASK": masks[1], "BIAS": bias, "BIAS_HEAD": bias_head, "KEEP": keep},
            **{"heads": self.heads, "inner": self.lead[-1] if self.lead else 1, "n": self.n, "m": self.m},
            **{"width": widths[0], "value_width": widths[1], "pairs": self.pairs, "last": self.last},
            **{
                "scale": problem.scale * LOG2E,
                "query_factor": problem.scale,
                "keep_factor": keep_factor(problem.dropout_p),
            },
            **{"damping": self.damping, "power": self.damping**self.pairs},
            **{"bias_row": bias_strides[0], "bias_column": bias_strides[1]},
            **{"EVEN": self.even, "DETACHED": problem.detached, "HAS_BIAS": bias is not None},
            **{"HAS_QUERY_MASK": masks[0] is not None, "HAS_KEY_MASK": masks[1] is not None},
            **{"HAS_KEEP": keep is not None, "PRECISION": "tf32" if single and tf32_is_allowed() else "ieee"},
            "UPCAST": triton.knobs.runtime.interpret and query.dtype == torch.bfloat16,  # it has no products of these
        }
        for name, letter, tensor in (("Q", "q", query), ("K", "k", key), ("V", "v", value)):
            self.add_tokens(name, letter, tensor)
        self.arguments.update({name: query for name, given in self.arguments.items() if given is None})

    def add_tokens(self, name: str, letter: str, tensor: Tensor) -> None:
        """Tokens (..., length, width) with their strides, where they lie if their numbers lie side by side."""
        inner = self.arguments["inner"]
        tokens = tensor.reshape(self.heads // inner, inner, *tensor.shape[-2:])
        if tokens.stride(3) != 1 or tokens.shape[2] * tokens.stride(2) > MAX_OFFSET:
            tokens = tokens.contiguous()
        strides = dict(zip((f"{letter}_batch", f"{letter}_head", f"{letter}_token"), tokens.stride(), strict=False))
        self.arguments |= {name: tokens, **strides}

    def sides(self, by_rows: bool) -> dict[str, Any]:
        """The arguments of a half-step: x are the queries and y the keys in a row step, the other way in a column step.

        Of the output's gradient and the values likewise, where they are there.
        """
        given = self.arguments
        found: dict[str, Any] = {"BY_ROWS": by_rows}
        names = [("Q", "q", "D_OUT", "o", "QUERY", "n", "row"), ("K", "k", "V", "v", "KEY", "m", "column")]
        strides = {"row": self.m, "column": 1}
        for side, (tokens, letter, out, out_letter, mask, length, axis) in zip(
            "xy", names if by_rows else names[::-1], strict=True
        ):
            upper = side.upper()
            found |= {upper: given[tokens], f"{upper}_MASK": given[f"{mask}_MASK"], f"n_{side}": given[length]}
            found |= {f"HAS_{upper}_MASK": given[f"HAS_{mask}_MASK"], f"bias_{side}": given[f"bias_{axis}"]}
            found |= {f"keep_{side}": strides[axis]}
            found |= {f"{side}_{part}": given[f"{letter}_{part}"] for part in ("batch", "head", "token")}
            # Not there in forward, whose kernels do not name it.
            found |= {f"{side}_out_{part}": given.get(f"{out_letter}_{part}") for part in ("batch", "head", "token")}
            found[f"{upper}_OUT"] = given.get(out)
        return {**given, **found}

    def blocks(self, length: int, size: int) -> tuple[int, int]:
        """Programs: each head, and each block of `size` of its tokens."""
        return self.heads, triton.cdiv(length, size)

    def column_sums(self) -> None:
        """What columns sum to, where a column step comes last."""
        if not self.even:
            return
        sums = self.columns.new_empty(self.heads, self.m)
        self.arguments["COLUMN_SUMS"] = sums
        launch(
            tiles.column_sums_kernel,
            (self.heads,),
            self.arguments,
            self.tiles.half_step._replace(rows=256, columns=256),
        )

    def half_steps(self) -> None:
        """All half-steps by tiles, but a row step that comes last."""
        self.columns[0].zero_()
        if self.arguments["HAS_KEY_MASK"]:
            masked = self.arguments["KEY_MASK"].view(self.heads, self.m) == 0
            self.columns[0].masked_fill_(masked, -math.inf)
        by_rows, by_columns = self.sides(by_rows=True), self.sides(by_rows=False)
        by_rows |= {"OWN": self.rows, "OTHER": self.columns, "other_factor": self.damping}
        by_columns |= {"OWN": self.columns, "OTHER": self.rows, "other_factor": 1.0}
        layout = self.tiles.half_step
        for pair in range(self.pairs):
            steps = {"own_step": pair, "other_step": pair}
            launch(tiles.half_step_kernel, self.blocks(self.n, layout.rows), by_rows | steps, layout)
            steps = {"own_step": pair + 1, "other_step": pair}
            launch(tiles.half_step_kernel, self.blocks(self.m, layout.rows), by_columns | steps, layout)

    def reverse_half_steps(self, detached: bool) -> None:
        """The weights of all half-steps by tiles: D_F and D_G."""
        layout, pairs, last = self.tiles.half_step, self.pairs, self.last
        d_f, d_g, damping = self.arguments["D_F"], self.arguments["D_G"], self.damping
        # Of R in a row step, damping multiplies g; S of a column step is without.
        by_rows = self.sides(by_rows=True) | {"OWN": self.rows, "own_factor": 1.0, "OTHER": self.columns}
        by_rows |= {"RESULT": d_f, "WEIGHTS": d_g, "factor": 1.0}
        by_columns = self.sides(by_rows=False) | {"OWN": self.columns, "OTHER": self.rows, "other_factor": 1.0}
        by_columns |= {"RESULT": d_g, "WEIGHTS": d_f, "factor": damping}

        def run(sides: dict[str, Any], result: int, own: int, other: int, weights: int | None = None, **options: Any):  # type: ignore[no-untyped-def]
            length = self.n if sides["BY_ROWS"] else self.m
            given = {"FROM_OUTPUT": False, "ADDED": False, "WEIGHTED": weights is not None, **sides, **options}
            given |= {"result_step": result, "own_step": own, "other_step": other, "weights_step": weights or 0}
            launch(tiles.reverse_kernel, self.blocks(length, layout.rows), given, layout)

        of_last = 1.0 if self.even else damping
        run(by_rows, last, last, pairs, FROM_OUTPUT=True, other_factor=of_last)
        if detached or not pairs:
            return
        run(
            by_columns, pairs - 1, pairs, last, None if self.even else last, FROM_OUTPUT=True, own_factor=of_last
        )  # fmt: skip
        for pair in reversed(range(pairs)):
            added = self.even and pair == last
            run(by_rows, pair, pair, pair + 1, pair, other_factor=1.0, ADDED=added)
            if pair:
                run(by_columns, pair - 1, pair, pair, pair, own_factor=damping)


def _in_heads(mask: Tensor | None, lead: torch.Size, length: int) -> Tensor | None:
    """A mask, contiguous, as bytes."""
    return None if mask is None else mask.expand(*lead, length).contiguous().view(torch.uint8)


def _bias_in_heads(attn_bias: Tensor | None, lead: torch.Size) -> tuple[Tensor | None, Tensor | None, tuple[int, int]]:
    """The bias, which stays as small as it came, where the matrix of each head begins in it, and a matrix's strides."""
    if attn_bias is None:
        return None, None, (0, 0)
    rows, columns = attn_bias.shape[-2:]
    matrices = (1,) * (len(lead) + 2 - attn_bias.dim()) + attn_bias.shape[:-2]
    begin = torch.arange(math.prod(matrices), device=attn_bias.device) * (rows * columns)
    strides = (columns if rows > 1 else 0), (1 if columns > 1 else 0)
    return attn_bias.contiguous(), begin.view(matrices).expand(lead).contiguous(), strides


class Triton:
    """The engine; see the module."""

    name = "triton"

    def refusal(self, problem: Problem) -> str | None:
        """What this engine needs and does not get."""
        if problem.scores is not None:
            return "tokens, not given scores"
        assert problem.value is not None
        like = problem.like
        return refusal(like.device, like.dtype, like.shape[-1], problem.value.shape[-1])

    def keeps_output(self, problem: Problem) -> bool:
        """Backward makes it anew."""
        return False

    def state(self, problem: Problem) -> State:
        """The row potentials (ceil(T/2), heads, n), the column potentials (T//2 + 1, heads, m), and nothing of use.

        In log2, laid out as the portable engine's are, so that "auto" may take either engine.
        """
        return empty_state(problem)

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The output and the `state`."""
        state = self.state(problem)
        output = problem.like.new_empty(problem.output_shape)
        call = _Call(problem, state)
        call.arguments["OUT"] = output
        with launching(output.device):
            if call.whole is not None:
                launch(whole.forward_kernel, (call.heads,), call.arguments, call.whole[0])
            else:
                call.half_steps()
                call.column_sums()
                layout = call.tiles.half_step
                launch(tiles.output_kernel, call.blocks(call.n, layout.rows), call.arguments, layout)
        return output.to(problem.dtype), *state

    def backward(self, problem: Problem, results: tuple[Tensor, Tensor], state: State, bias_gradient: bool) -> Results:
        """The gradients."""
        call, attn_bias, like = _Call(problem, state), problem.attn_bias, problem.like
        call.add_tokens("D_OUT", "o", results[1].to(like.dtype))
        d_query, d_key, d_value = (
            torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for tensor in (problem.query, problem.key, problem.value)
            if tensor is not None
        )
        wants_bias = bias_gradient and attn_bias is not None
        # A bias is as large as the map or is summed over it: the map's gradient is written out.
        d_scores = call.rows.new_empty((call.heads, call.n, call.m) if wants_bias else (0,))
        call.arguments |= {"D_F": torch.empty_like(call.rows), "D_G": torch.empty_like(call.columns)}
        call.arguments |= {
            "D_Q": d_query,
            "D_K": d_key,
            "D_V": d_value,
            "D_BIAS": d_scores,
            "BIAS_GRADIENT": wants_bias,
        }
        with launching(like.device):
            call.column_sums()
            if call.whole is not None:
                launch(whole.potential_gradient_kernel, (call.heads,), call.arguments, call.whole[1])
            else:
                call.reverse_half_steps(problem.detached)
            layouts = call.tiles
            programs = call.blocks(call.n, layouts.query.rows)
            launch(tiles.query_gradient_kernel, programs, call.arguments, layouts.query)
            programs = call.blocks(call.m, layouts.key.columns)
            launch(tiles.key_gradient_kernel, programs, call.arguments, layouts.key)
        d_bias = like.new_empty(0)
        if attn_bias is not None and wants_bias:
            d_bias = d_scores.view(*call.lead, call.n, call.m).sum_to_size(attn_bias.shape).to(attn_bias.dtype)
        return d_query, d_key, d_value, d_bias


TRITON = Operator(Triton())
