"""The engine for maps whose entries know nothing of each other: sigmoid attention.

Chunks of heads that fit the cache, as in dense.py, or blocks of rows of one head, but no half-steps and no guard: an
entry is sigmoid(C + b), within [0, 1] whatever the score, and its derivative is p (1 - p). Saved for backward are the
inputs, the output and one number b per head; backward makes the map again. Padding stands as zeros in queries, keys and
values, so that the map may hold any number there.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .blockwise import block_rows
from .dense import BACKWARD_CHUNKS, SLAB_BYTES, attention_problem, chunk_size, fill_scores
from .functional import COUPLING_INSTEAD, attention_by_engine
from .masks import support_of
from .operators import AttentionOperator, compute_dtype, without_autocast
from .problem import Gradients, Problem, hide
from .reference import attention_by
from .scratch import borrow


def sigmoid_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: float | None,
    scale: float | None,
    attn_bias: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """Attention whose map is sigmoid(scale * query @ key^T + attn_bias + bias).

    Args:
        query: (..., n, d), floating.
        key: (..., m, d).
        value: (..., m, d_v).
        bias: added to the scores; None is -log of the number of keys that have support, for each head.
        scale: factor of the scores, d ** -0.5 by default.
        attn_bias: as in `sinkhorn_attention`, as are the masks; may be causal.
        query_mask: (n,) or (..., n).
        key_mask: (m,) or (..., m).
        dropout_p: probability of dropping an entry of the map.

    Returns:
        (..., n, d_v) in the promoted dtype of the inputs; 0 at masked queries.

    Raises:
        ValueError: names the argument, what it got and what it needs.
        NotImplementedError: under torch.func transforms and forward-mode derivatives.
    """
    options = scale, attn_bias, query_mask, key_mask, dropout_p
    return attention_by_engine(sigmoid_engine, (bias,), query, key, value, *options, row_wise=True)


def empty_state(like: Tensor, heads: int, n: int, m: int, bias: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """What forward saves beside its output: each head's bias, (heads,), between two empty tensors."""
    empty, dtype = like.new_empty(0, dtype=torch.uint8), compute_dtype(like)
    return like.new_empty(0, dtype=dtype), like.new_empty(heads, dtype=dtype), empty


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: float | None, scale: float, *masks: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Forward of the sigmoid engine; the other arguments as `dense.attention_forward`."""
    problem = attention_problem(query, key, value, scale, *masks)
    result = query.new_empty(*query.shape[:-1], value.shape[-1], dtype=problem.dtype)
    output = result.view(problem.heads, problem.n, -1)
    nothing, biases, nothing_else = empty_state(query, problem.heads, problem.n, problem.m, bias)
    with without_autocast(query):
        for heads, spans in _chunks(problem, chunk_size(query, key)):
            queries, keys, values = problem.queries(heads), problem.keys(heads), problem.values(heads)
            biases[heads] = -_log_support(problem, heads, spans) if bias is None else bias
            for rows in spans:
                with _scratch(problem, heads, rows, 1) as (map_,):
                    _fill_map(problem, heads, rows, queries, keys, biases, map_)
                    dropout = problem.dropout(heads, rows=rows)
                    if dropout is not None:
                        map_.mul_(dropout)
                    output[heads, rows] = torch.bmm(map_, values)
            if problem.query_mask is not None:
                output[heads] = hide(output[heads], problem.query_mask, heads)
    return result, nothing, biases, nothing_else


def attention_backward(
    output_gradient: Tensor,
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    nothing: Tensor,
    biases: Tensor,
    nothing_else: Tensor,
    bias: float | None,
    scale: float,
    attn_bias: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients with respect to query, key, value and, if asked for, attn_bias (otherwise an empty tensor)."""
    *masks, bias_gradient = options
    problem = attention_problem(query, key, value, scale, attn_bias, *masks)
    gradients = Gradients(problem, bias_gradient)
    d_output = output_gradient.reshape(problem.heads, problem.n, -1)
    with without_autocast(query):
        for heads, spans in _chunks(problem, chunk_size(query, key, BACKWARD_CHUNKS)):
            queries, keys, values = problem.queries(heads), problem.keys(heads), problem.values(heads)
            d_out = hide(d_output[heads].to(problem.dtype), problem.query_mask, heads)
            d_query, d_key, d_value = gradients.parts_of(heads)
            for rows in spans:
                add = int(rows.start > 0)
                dropout = problem.dropout(heads, rows=rows)
                with _scratch(problem, heads, rows, 2) as (map_, work):
                    _fill_map(problem, heads, rows, queries, keys, biases, map_)
                    kept = map_ if dropout is None else torch.mul(map_, dropout, out=work)
                    d_value.baddbmm_(kept.transpose(1, 2), d_out[:, rows], beta=add)
                    torch.bmm(d_out[:, rows], values.transpose(1, 2), out=work)
                    if dropout is not None:
                        work.mul_(dropout)
                    torch.ops.aten.sigmoid_backward.grad_input(work, map_, grad_input=work)  # p (1 - p) in one pass
                    d_query[:, rows].baddbmm_(work, keys, beta=0, alpha=scale)
                    d_key.baddbmm_(work.transpose(1, 2), queries[:, rows], beta=add, alpha=scale)
                    gradients.add_bias(heads, work, rows)
            gradients.put(heads, d_query, d_key, d_value)
    return gradients.like(query, key, value, attn_bias)


def _chunks(problem: Problem, size: int) -> list[tuple[slice, list[slice]]]:
    """Groups of at most `size` heads, each with the blocks of rows that it is passed in: one, unless it is large."""
    assert problem.query is not None
    n, m, step = problem.n, problem.m, problem.n
    if problem.query.device.type == "cpu" and n * m * problem.dtype.itemsize > SLAB_BYTES:
        step = block_rows(1, n, m, problem.dtype)
    spans = [slice(start, min(start + step, n)) for start in range(0, n, step)]
    return [(slice(start, min(start + size, problem.heads)), spans) for start in range(0, problem.heads, size)]


def _scratch(problem: Problem, heads: slice, rows: slice, count: int) -> AbstractContextManager[list[Tensor]]:
    """Context of `count` uninitialised blocks (heads, rows, m)."""
    assert problem.query is not None
    shape, device = (heads.stop - heads.start, rows.stop - rows.start, problem.m), problem.query.device
    if device.type == "cpu":
        return borrow(*[shape] * count, dtype=problem.dtype)
    return nullcontext([torch.empty(shape, dtype=problem.dtype, device=device) for _ in range(count)])


def _fill_map(
    problem: Problem, heads: slice, rows: slice, query: Tensor, key: Tensor, biases: Tensor, map_: Tensor
) -> None:
    """Fills a block of the map (heads, rows, m) from all queries and keys of the heads, and all heads' biases."""
    fill_scores(problem, heads, query[:, rows], key, map_, 1.0, rows)
    if problem.attn_bias is not None:  # padding may hold anything, NaN too
        problem.hide_scores_(map_, heads, rows)
    map_.add_(biases[heads].view(-1, 1, 1)).sigmoid_()


def _log_support(problem: Problem, heads: slice, spans: list[slice]) -> Tensor:
    """Log of the number of keys that some query may see, (heads,); 0 where there is none."""
    assert problem.query is not None
    keys = torch.ones(heads.stop - heads.start, problem.m, dtype=torch.bool, device=problem.query.device)
    bias = problem.bias(heads)
    if bias is not None:
        seen = torch.zeros_like(keys)
        for rows in spans:
            support = (bias if bias.shape[1] == 1 else bias[:, rows]) != -math.inf
            if problem.query_mask is not None:
                support = support & problem.query_mask[heads, rows].unsqueeze(2)
            seen |= support.any(1)
        keys = seen
    if problem.key_mask is not None:
        keys &= problem.key_mask[heads]
    # Without a valid query the map is 0, whatever the count is.
    return keys.sum(1).clamp(min=1).to(problem.dtype).log()


def sigmoid_coupling(
    scores: Tensor, bias: float | None, query_mask: Tensor | None = None, key_mask: Tensor | None = None
) -> Tensor:
    """The definition of the map, (..., n, m), from scores whose -inf is no support; in the dtype of the scores."""
    support = support_of(scores, query_mask, key_mask)
    logits = torch.where(support, scores.to(torch.promote_types(scores.dtype, torch.float32)), 0.0)
    if bias is None:
        keys = support.any(-2, keepdim=True).sum(-1, keepdim=True).clamp(min=1)
        logits = logits - keys.to(logits.dtype).log()
    else:
        logits = logits + bias
    return torch.where(support, logits.sigmoid(), 0.0).to(scores.dtype)


def define(
    query: Tensor, key: Tensor, value: Tensor, bias: float | None, scale: float, *masks: Tensor | None
) -> Tensor:
    """The definition, of the engine's arguments."""
    return attention_by(lambda scores: sigmoid_coupling(scores, bias, *masks[1:3]), query, key, value, scale, *masks)


sigmoid_engine = AttentionOperator(
    "sigmoid", attention_forward, attention_backward, empty_state, define, "float? bias, float scale", COUPLING_INSTEAD
)
