"""One half-step without the native library: softmax attention, for which torch has a fused kernel on the CPU.

Its operator and that operator's derivative are called by themselves, so that they fit an engine's two functions; the
log-sum-exp of each row, which the derivative needs, stands where an engine keeps its row scalings.
"""

import math

import torch
from torch import Tensor

from .operator import Results, State
from .problem import Problem


def is_plain_softmax(problem: Problem) -> bool:
    """Whether torch's kernel computes a problem: one half-step on the CPU, without masks, bias, dropout or half dtypes.

    Masks and a bias are left to the portable engine: padding may hold anything, which the kernel would multiply by 0.
    """
    rest = (problem.scores, problem.attn_bias, problem.query_mask, problem.key_mask, problem.dropout_keep)
    if problem.n_iters != 1 or any(tensor is not None for tensor in rest):
        return False
    query, value = problem.query, problem.value
    assert query is not None and value is not None  # noqa: PT018
    return query.device.type == "cpu" and query.dtype == problem.dtype and query.shape[-1] == value.shape[-1] > 0


def softmax_forward(problem: Problem, state: State) -> Tensor:
    """The output, contiguous; the row scalings of the state become log-sum-exps."""
    output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_in_four_dimensions(problem, problem.query, problem.key, problem.value), scale=problem.scale
    )
    state[0].copy_(logsumexp.reshape(state[0].shape))
    return output.reshape(problem.output_shape).contiguous()


def softmax_backward(problem: Problem, results: tuple[Tensor, Tensor], state: State) -> Results:
    """The gradients of query, key and value, contiguous."""
    output, d_output, query, key, value = _in_four_dimensions(
        problem, *results, problem.query, problem.key, problem.value
    )
    rows = state[0].view(output.shape[:3])
    found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        d_output, query, key, value, output, rows, 0.0, False, scale=problem.scale
    )
    tokens = problem.query, problem.key, problem.value
    first, second, third = (
        part.reshape(token.shape).contiguous() for part, token in zip(found, tokens, strict=True) if token is not None
    )
    return first, second, third, problem.like.new_empty(0)


def _in_four_dimensions(problem: Problem, *tensors: Tensor | None) -> list[Tensor]:
    """Tensors (..., length, d) as (batch, heads, length, d), each row in one piece."""
    lead = problem.lead if len(problem.lead) == 2 else (1, math.prod(problem.lead))
    shaped = [tensor.reshape(*lead, *tensor.shape[-2:]) for tensor in tensors if tensor is not None]
    return [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in shaped]
