"""The dense engine for half-steps whose column step is damped: unbalanced Sinkhorn attention.

With lambda in (0, 1] the half-steps on scaling vectors are in turn

    u = 1 / (K v)    and    v = (ratio / (K^T u))^lambda,    ratio = n_valid / m_valid,

from v = 1 on, and the map is diag(u) K diag(v); lambda = 1 is `dense`. Everything else is that engine's: chunks of
heads that fit the cache, the guard, masks in the scaling vectors, and a backward pass that makes the map again. Saved
are the inputs, the output, the scaling vectors and the inverses of the column sums K^T u, which cannot be had from v
where lambda is small. A map too large for the cache is a chunk by itself: it is held, twice in backward.

In guard B, K = 2^(C - r - c) with r and c the maxima of rows and columns. A damped step sees that shift: with scalings
relative to it, v = 2^((1 - lambda) c) (ratio / (K^T u))^lambda, from v = 2^c on.

Guard A holds as it stands. One pair of half-steps on log v keeps order and takes a constant s to lambda s, so that from
log v = 0 on it stays within max - min of its limit, which a column step bounds by 2 lambda max|C|.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .dense import (
    BACKWARD_CHUNKS,
    _run_backward,
    apply_coupling,
    backward_with_guard,
    chunk_size,
    forward_with_guard,
    half_steps,
    make_kernel,
    scores_gradient,
)
from .dense import empty_state as empty_dense_state
from .functional import COUPLING_INSTEAD, attention_by_engine, check_n_iters
from .guard import SHIFTED
from .masks import support_of
from .operators import AttentionOperator
from .problem import Problem
from .reference import attention_by
from .scratch import borrow


def damped_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    n_iters: int,
    damping: float,
    scale: float | None,
    attn_bias: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """Attention whose map comes from `n_iters` half-steps, rows first, with damped column steps.

    Args:
        query: (..., n, d), floating.
        key: (..., m, d).
        value: (..., m, d_v).
        n_iters: number of HALF-steps.
        damping: the power of a column step, lambda in (0, 1].
        scale: factor of the scores, d ** -0.5 by default.
        attn_bias: as in `sinkhorn_attention`, as are the masks.
        query_mask: (n,) or (..., n).
        key_mask: (m,) or (..., m).
        dropout_p: probability of dropping an entry of the final map, without renormalising.

    Returns:
        (..., n, d_v) in the promoted dtype of the inputs; 0 at masked queries.

    Raises:
        ValueError: names the argument, what it got and what it needs.
        NotImplementedError: under torch.func transforms and forward-mode derivatives.
    """
    check_n_iters(n_iters)
    options = scale, attn_bias, query_mask, key_mask, dropout_p
    return attention_by_engine(damped_engine, (n_iters, damping), query, key, value, *options)


def empty_state(like: Tensor, heads: int, n: int, m: int, n_iters: int) -> tuple[Tensor, Tensor, Tensor]:
    """What forward saves beside its output; as `dense.empty_state`.

    The column vectors are in turn a scaling and the inverse column sums that the next scaling is made of,
    (2 * (T//2) + 1, heads, m), so that the first and the last are scalings.
    """
    u, v, mode = empty_dense_state(like, heads, n, m, n_iters)
    return u, v.new_empty(max(2 * len(v) - 1, 0), heads, m), mode


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, n_iters: int, damping: float, scale: float, *masks: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Forward of the damped engine; as `dense.attention_forward`."""
    run = partial(_run_forward, damping=damping)
    tokens = query, key, value
    return forward_with_guard(
        run, chunk_size(query, key), *tokens, n_iters, scale, *masks, damping=damping, state=empty_state
    )


def _run_forward(
    problem: Problem, heads: slice, mode: int, n_iters: int, output: Tensor, u: Tensor, v: Tensor, damping: float
) -> None:
    """Forward of some heads that have the same mode; fills output (heads, n, d_v), u and v."""
    tokens = problem.queries(heads), problem.keys(heads)
    shift = output.new_zeros(output.shape[0], 1, problem.m)
    with borrow((output.shape[0], problem.n, problem.m), dtype=problem.dtype) as (kernel,):
        first, rows, columns, ratio, has_empty = make_kernel(problem, heads, mode, *tokens, kernel, kernel, shift)
        v[0].unsqueeze(1).copy_(first)
        damp = _damper(v, ratio, mode, shift, damping)
        half_steps(kernel, n_iters, u, v[::2], rows, columns, has_empty, damp)
        apply_coupling(problem, heads, kernel, u[-1], v[-1], output)


def _damper(v: Tensor, ratio: Tensor, mode: int, shift: Tensor, damping: float) -> Callable[[int, Tensor], None]:
    """What makes a damped column scaling of a plain one, ratio / (K^T u), and keeps 1 / (K^T u)."""
    if mode == SHIFTED:  # a column without support has -inf, which times 0 would be NaN
        factor = shift.clamp_(min=torch.finfo(shift.dtype).min).mul_(1.0 - damping).exp2_()
    else:
        factor = v[0].unsqueeze(1)  # 1, and 0 at what is masked

    def damp(i: int, column: Tensor) -> None:
        torch.div(column, ratio, out=v[2 * i + 1].unsqueeze(1))
        column.pow_(damping).mul_(factor)

    return damp


def attention_backward(
    output_gradient: Tensor,
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    u: Tensor,
    v: Tensor,
    mode: Tensor,
    n_iters: int,
    damping: float,
    scale: float,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the damped engine; as `dense.attention_backward`."""
    run = partial(_run_backward, correct=partial(_scores_gradient, damping=damping))
    tensors = output_gradient, output, query, key, value, u, v, mode
    size = chunk_size(query, key, BACKWARD_CHUNKS)
    return backward_with_guard(run, size, *tensors, n_iters, scale, False, *options, damping=damping)


def _scores_gradient(
    kernel: Tensor,
    ratio: Tensor,
    u: Tensor,
    v: Tensor,
    n_iters: int,
    row_sums: Tensor,
    column_sums: Tensor,
    detached: bool,
    damping: float,
) -> tuple[Tensor, Tensor]:
    """As `dense.scores_gradient`; log v = lambda log(ratio / (K^T u)) has the derivative -lambda / (K^T u)."""
    gains = v[1::2] * damping
    return scores_gradient(kernel, ratio, u, v[::2], n_iters, row_sums, column_sums, detached, gains)


def damped_coupling(
    scores: Tensor, n_iters: int, damping: float, query_mask: Tensor | None = None, key_mask: Tensor | None = None
) -> Tensor:
    """The definition of the map, (..., n, m), from scores whose -inf is no support; in the dtype of the scores."""
    support = support_of(scores, query_mask, key_mask)
    rows, columns = support.any(-1, keepdim=True), support.any(-2, keepdim=True)
    kernel = torch.where(support, scores.to(torch.promote_types(scores.dtype, torch.float32)), -math.inf)
    log_n = rows.sum(-2, keepdim=True).clamp(min=1).to(kernel.dtype).log()
    log_m = columns.sum(-1, keepdim=True).clamp(min=1).to(kernel.dtype).log()
    # A row or column without support would make logsumexp -inf and its derivative NaN: it is replaced by zeros.
    f = torch.zeros_like(log_n)
    g = torch.zeros_like(log_n)
    for step in range(n_iters):
        if step % 2 == 0:
            f = -log_n - torch.where(rows, kernel + g, 0.0).logsumexp(-1, keepdim=True)
        else:
            g = damping * (-log_m - torch.where(columns, kernel + f, 0.0).logsumexp(-2, keepdim=True))
    return torch.where(support, kernel + f + g + log_n, -math.inf).exp().to(scores.dtype)


def define(
    query: Tensor, key: Tensor, value: Tensor, n_iters: int, damping: float, scale: float, *masks: Tensor | None
) -> Tensor:
    """The definition, of the engine's arguments."""
    return attention_by(
        lambda scores: damped_coupling(scores, n_iters, damping, *masks[1:3]), query, key, value, scale, *masks
    )


damped_engine = AttentionOperator(
    "damped",
    attention_forward,
    attention_backward,
    empty_state,
    define,
    "int n_iters, float damping, float scale",
    COUPLING_INSTEAD,
)
