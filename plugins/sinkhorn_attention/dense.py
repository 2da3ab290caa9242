"""The dense engine: exact Sinkhorn attention at about the price of softmax, memory independent of `n_iters`.

Per chunk of heads, small enough for the cache, the map K = 2^(log2(e) C) is made once; every half-step is then one
matrix-vector product on a scaling vector, u = 1 / (K v) or v = (n_valid / m_valid) / (K^T u), and the coupling is
diag(u) K diag(v). Saved for backward are the inputs, the output and the scaling vectors. Backward makes the map again.
The derivative of the T half-steps adds a matrix of rank T to dO V^T,

    dL/dC = K * (diag(u_T) dO V^T diag(v_T) + A B^T),

with one column of A and B for each half-step, found by going through the half-steps in reverse with mat-vecs.

Masks live in the scaling vectors alone: 0 at what is masked, whatever the map holds there.

A matrix above `SLAB_BYTES` is passed in blocks of rows instead, one above `STREAM_BYTES` is never held (blockwise.py).
Which matrices the exponential domain can hold is decided by guard.py; the others are computed again in the log domain,
in float64. Off the CPU a decision by the data would need a synchronisation: there the log domain is used throughout.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import blockwise
from .guard import (
    BOUNDED,
    FLUSH_LOG2,
    LOG_DOMAIN,
    PEAK,
    SHIFTED,
    bounded_heads,
    merge_modes,
    must_hide_padding,
    runs,
    trusted_heads,
)
from .log_domain import log_domain_coupling, log_domain_scores_gradient, target_ratio
from .log_domain_blocks import backward_by_blocks, output_by_blocks
from .operators import AttentionOperator, CouplingOperator, State, compute_dtype
from .problem import LOG2E, Gradients, Problem
from .reference import sinkhorn_attention_reference, sinkhorn_reference
from .scratch import borrow, hold

#: Bytes of K that a chunk of heads may take on the CPU for each thread: it stays in a core's cache (2 MB where this was
#: measured) between half-steps. At n = 197 half as much costs 8 %, four times as much 10 %.
CHUNK_BYTES = 5 << 18
#: How many times as much a chunk may take in backward, whose many operations on vectors want fewer, larger chunks:
#: 4 % faster than 1 at n = 197 and 512; 4 is no better.
BACKWARD_CHUNKS = 2
#: Likewise on other devices, where a chunk only bounds the scratch memory.
DEVICE_CHUNK_BYTES = 256 << 20
#: Bytes of one matrix from which on it is passed in blocks of rows; see blockwise.py.
SLAB_BYTES = 8 << 20
#: Bytes of one matrix from which on its blocks are made again for each pass: it would take too much memory.
STREAM_BYTES = 256 << 20
#: Half-steps from which on blocks are kept at all: for fewer passes, making them again is cheaper than memory.
KEPT_N_ITERS = 3


# ---------------------------------------------------------------------------------------- chunks


def in_log_domain_throughout(device: torch.device) -> bool:
    """Whether all heads are computed in the log domain: where asking the guard would wait for the device."""
    return device.type != "cpu"


def chunk_size(query: Tensor, key: Tensor, times: int = 1) -> int:
    """Heads in a chunk of `times` the usual size: a multiple of the number of threads, so that none waits."""
    return _chunk_size(query.shape[-2], key.shape[-2], compute_dtype(query), query.device, times)


def _chunk_size(n: int, m: int, dtype: torch.dtype, device: torch.device, times: int = 1) -> int:
    threads = torch.get_num_threads()
    limit = times * CHUNK_BYTES * threads if device.type == "cpu" else DEVICE_CHUNK_BYTES
    size = limit // (n * m * dtype.itemsize)
    return size // threads * threads if size > threads else max(1, size)


def _choose(query: Tensor, key: Tensor, n_iters: int, in_chunks: Callable, by_blocks: Callable) -> Callable:
    """How a matrix of this size is passed: in a chunk with others, in blocks of rows that are kept, or made again."""
    size = query.shape[-2] * key.shape[-2] * compute_dtype(query).itemsize
    keep = size <= STREAM_BYTES and n_iters >= KEPT_N_ITERS
    return partial(by_blocks, keep=keep) if size > SLAB_BYTES else in_chunks


# ---------------------------------------------------------------------------------------- the exponential domain


def exponentiate(
    scores: Tensor, kernel: Tensor | None = None, column_maxima: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Turns log2 scores (heads, n, m) into K = 2^(scores - row max - column max); guard B.

    Args:
        scores: is overwritten.
        kernel: where K goes, in place of the scores by default.
        column_maxima: is filled with the column maxima, (heads, 1, m), -inf without support.

    Returns:
        K, the first column scaling 2^(column max) (heads, 1, m), which makes the first row step that of the scores
        themselves, what rows should sum to (heads, 1, n), 1 or 0, and columns (heads, 1, m), n_valid / m_valid or 0,
        and n_valid / m_valid (heads, 1, 1).
    """
    row_max = scores.amax(2, keepdim=True)
    rows = row_max != -math.inf
    scores.sub_(row_max.masked_fill_(~rows, 0.0))
    column_max = scores.amax(1, keepdim=True)
    if column_maxima is not None:
        column_maxima.copy_(column_max)
    columns = column_max != -math.inf
    scores.sub_(column_max.masked_fill(~columns, 0.0))
    ratio = target_ratio(rows, columns, scores.dtype)
    torch.threshold_(scores, FLUSH_LOG2[scores.dtype], -math.inf)
    kernel = torch.exp2(scores, out=scores if kernel is None else kernel)
    return kernel, column_max.exp2_(), rows.transpose(1, 2).to(ratio.dtype), columns * ratio, ratio


def half_steps(
    kernel: Tensor,
    n_iters: int,
    u: Tensor,
    v: Tensor,
    row_target: Tensor | None,
    column_target: Tensor | None,
    has_empty: bool,
    damp: Callable[[int, Tensor], None] | None = None,
) -> None:
    """Runs the half-steps in the exponential domain on vectors, from v[0] on.

    Args:
        kernel: K, (heads, n, m).
        n_iters: T.
        u: row scalings to be filled, (ceil(T/2), heads, n).
        v: column scalings, (T//2 + 1, heads, m); the first is given.
        row_target: what rows should sum to, (heads, 1, n), None for 1.
        column_target: what columns should sum to, broadcastable to (heads, 1, m), None for 1.
        has_empty: whether a row or column may be without support, whose sum is 0, and so is its target.
        damp: is given i and v[i + 1], (heads, 1, m), after each column step, and may change it in place.
    """
    transposed, tiny = kernel.transpose(1, 2), torch.finfo(kernel.dtype).tiny
    for step in range(n_iters):
        i = step // 2
        # (heads, 1, length) with ordinary strides: bmm is 10 to 70 times slower on a column (heads, length, 1).
        if step % 2 == 0:
            sums, target = u[i].unsqueeze(1), row_target
            torch.bmm(v[i].unsqueeze(1), transposed, out=sums)
        else:
            sums, target = v[i + 1].unsqueeze(1), column_target
            torch.bmm(u[i].unsqueeze(1), kernel, out=sums)
        if has_empty:
            sums.clamp_(min=tiny)
        if target is None:
            sums.reciprocal_()
        else:
            torch.div(target, sums, out=sums)
        if damp is not None and step % 2 == 1:
            damp(i, sums)


def scores_gradient(
    kernel: Tensor,
    ratio: Tensor,
    u: Tensor,
    v: Tensor,
    n_iters: int,
    row_sums: Tensor,
    column_sums: Tensor,
    detached: bool,
    gains: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The rank-T correction A B^T of dL/dC = K * (... + A B^T), by going through the half-steps in reverse.

    Args:
        kernel: K, (heads, n, m).
        ratio: n_valid / m_valid, (heads, 1, 1).
        u: row scalings, (ceil(T/2), heads, n).
        v: column scalings, (T//2 + 1, heads, m).
        n_iters: T.
        row_sums: of P * dL/dP, (heads, 1, n): the derivative with respect to log u_T.
        column_sums: (heads, 1, m), likewise for log v_T.
        detached: whether column potentials count as constants.
        gains: -d log v[i + 1] / d (K^T u[i]), (T//2, heads, m); v[i + 1] / ratio, a plain column step's, by default.

    Returns:
        A^T (heads, columns, n) and B^T (heads, columns, m), with as many columns as half-steps are differentiated.
    """
    transposed = kernel.transpose(1, 2)
    left, right = [], []
    flow: Tensor | None = column_sums
    for step in reversed(range(n_iters)):
        i = step // 2
        row, column = u[i].unsqueeze(1), v[(step + 1) // 2].unsqueeze(1)
        if step % 2 == 0:
            weight = (row_sums * row).neg_()
            left.append(weight)
            right.append(column)
            if detached or step == 0:
                break
            passed = torch.bmm(weight, kernel).mul_(column)
            flow = passed if flow is None else passed.add_(flow)
        elif not detached:
            assert flow is not None
            weight = (flow * column).div_(-ratio) if gains is None else (flow * gains[i].unsqueeze(1)).neg_()
            left.append(row)
            right.append(weight)
            passed = torch.bmm(weight, transposed).mul_(row)
            row_sums = passed.add_(row_sums) if step == n_iters - 1 else passed
            flow = None
    return torch.cat(left, 1), torch.cat(right, 1)


def fill_scores(
    problem: Problem,
    heads: slice,
    query: Tensor,
    key: Tensor,
    scores: Tensor,
    unit: float,
    rows: slice = slice(None),
) -> None:
    """Fills scores (heads, n, m) with `unit` times those of the given queries and keys; padding is not hidden.

    `rows` says which queries of the heads are given.
    """
    torch.baddbmm(scores, query, key.transpose(1, 2), beta=0, alpha=problem.scale * unit, out=scores)
    bias = problem.bias(heads)
    if bias is not None:
        scores.add_(bias if bias.shape[1] == 1 else bias[:, rows], alpha=unit)


def make_kernel(
    problem: Problem,
    heads: slice,
    mode: int,
    query: Tensor | None,
    key: Tensor | None,
    scores: Tensor,
    kernel: Tensor,
    column_maxima: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, bool]:
    """Fills K (heads, n, m) from query and key, or from the problem's given scores.

    Args:
        problem: the call.
        heads: the heads of this chunk.
        mode: BOUNDED or SHIFTED.
        query: the chunk's queries (heads, n, d).
        key: (heads, m, d).
        scores: scratch, (heads, n, m).
        kernel: is filled; may be `scores`.
        column_maxima: is filled with what was subtracted from columns where the mode is SHIFTED, (heads, 1, m).

    Returns:
        The first column scaling, and what `half_steps` wants besides it: the targets of rows and columns, n_valid /
        m_valid, and whether there may be rows or columns without support.
    """
    if query is not None and key is not None:
        fill_scores(problem, heads, query, key, scores, LOG2E)
    else:
        assert problem.given_scores is not None
        scores.copy_(problem.given_scores[heads]).mul_(LOG2E)
    if mode == SHIFTED:
        problem.hide_scores_(scores, heads)
        return *exponentiate(scores, kernel, column_maxima)[1:], True
    torch.exp2(scores, out=kernel)
    mask = problem.key_mask
    return scores.new_ones(()) if mask is None else mask[heads].unsqueeze(1), *problem.targets(heads)


# --------------------------------------------------------------------------------------------------------- attention


def empty_state(like: Tensor, heads: int, n: int, m: int, n_iters: int) -> tuple[Tensor, Tensor, Tensor]:
    """What forward saves beside its output: row scalings, column scalings, and the guard's case of each head.

    Shapes (ceil(T/2), heads, n), (T//2 + 1, heads, m) and (heads,); off the CPU the scalings are empty.
    """
    throughout = in_log_domain_throughout(like.device)
    n_rows, n_columns = (0, 0) if throughout else ((n_iters + 1) // 2, n_iters // 2 + 1)
    u = like.new_empty(n_rows, heads, n, dtype=compute_dtype(like))
    v = like.new_empty(n_columns, heads, m, dtype=compute_dtype(like))
    return u, v, torch.full((heads,), LOG_DOMAIN if throughout else BOUNDED, dtype=torch.uint8, device=like.device)


def attention_problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    attn_bias: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    dropout_keep: Tensor | None,
    dropout_p: float,
) -> Problem:
    """The matrices of an attention call."""
    lead, n, m = query.shape[:-2], query.shape[-2], key.shape[-2]
    options = query, key, value, scale, attn_bias, dropout_keep, dropout_p
    return Problem(lead, n, m, compute_dtype(query), query_mask, key_mask, *options)


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, n_iters: int, scale: float, detached: bool, *masks: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Forward of the dense engine; arguments as `sinkhorn_attention`, leading dimensions already equal.

    `masks` are attn_bias, query_mask, key_mask, dropout_keep and dropout_p. dropout_keep (..., n, m), boolean, says
    which entries of the final map stay; they are divided by 1 - dropout_p.

    Returns:
        The output in float32 at least, and what `empty_state` makes.
    """
    run = _choose(query, key, n_iters, _run_forward, blockwise.run_forward)
    return forward_with_guard(run, chunk_size(query, key), query, key, value, n_iters, scale, *masks)


def forward_with_guard(
    run: Callable,
    size: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    n_iters: int,
    scale: float,
    *masks: Any,
    damping: float = 1.0,
    state: State = empty_state,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Forward in chunks of `size` heads by `run`, and in the log domain where the guard says so."""
    problem = attention_problem(query, key, value, scale, *masks)
    result = query.new_empty(*query.shape[:-1], value.shape[-1], dtype=problem.dtype)
    output = result.view(problem.heads, problem.n, -1)  # what is returned is no view: a caller may write into it
    u, v, mode = state(query, problem.heads, problem.n, problem.m, n_iters)
    with torch.autocast(query.device.type, enabled=False), hold():
        if in_log_domain_throughout(query.device):
            for heads, _ in runs([LOG_DOMAIN] * problem.heads, size):
                output[heads] = _output_in_log_domain(problem, heads, n_iters, problem.dtype, damping)
            return result, u, v, mode
        mode.copy_(~bounded_heads(problem))
        merge_modes(mode, size)
        problem.hides_padding = must_hide_padding(problem, value)
        for heads, head_mode in runs(mode.tolist(), size):
            run(problem, heads, head_mode, n_iters, output[heads], u[:, heads], v[:, heads])
            if head_mode == SHIFTED:
                mode[heads].masked_fill_(~trusted_heads(u[:, heads], v[:, heads]), LOG_DOMAIN)
        for group in _log_domain_groups(mode, problem):
            output[group] = _output_in_log_domain(problem, group, n_iters, torch.float64, damping).to(problem.dtype)
    return result, u, v, mode


def _run_forward(problem: Problem, heads: slice, mode: int, n_iters: int, output: Tensor, u: Tensor, v: Tensor) -> None:
    """Forward of some heads that have the same mode; fills output (heads, n, d_v), u and v."""
    tokens = problem.queries(heads), problem.keys(heads)
    with borrow((output.shape[0], problem.n, problem.m), dtype=problem.dtype) as (kernel,):
        first, row_target, column_target, _, has_empty = make_kernel(problem, heads, mode, *tokens, kernel, kernel)
        v[0].unsqueeze(1).copy_(first)
        half_steps(kernel, n_iters, u, v, row_target, column_target, has_empty)
        apply_coupling(problem, heads, kernel, u[-1], v[-1], output)


def apply_coupling(problem: Problem, heads: slice, kernel: Tensor, u: Tensor, v: Tensor, output: Tensor) -> None:
    """Fills the output (heads, n, d_v) with diag(u) K diag(v) V; K (heads, n, m) is overwritten."""
    dropout, value = problem.dropout(heads), problem.values(heads)
    if dropout is not None:
        kernel.mul_(dropout)
    if problem.n <= value.shape[2]:  # the map is smaller than the values
        torch.bmm(kernel.mul_(v.unsqueeze(1)), value, out=output)
    else:
        with borrow(tuple(value.shape), dtype=problem.dtype) as (scaled,):
            torch.bmm(kernel, torch.mul(value, v.unsqueeze(2), out=scaled), out=output)
    output.mul_(u.unsqueeze(2))


def _passes_log_domain_by_blocks(problem: Problem, damping: float) -> bool:
    """Whether heads of guard C are passed by blocks: where a map in float64 takes more than an engine may hold."""
    return damping == 1.0 and problem.n * problem.m * torch.float64.itemsize > SLAB_BYTES


def _output_in_log_domain(
    problem: Problem, heads: Tensor | slice, n_iters: int, dtype: torch.dtype, damping: float
) -> Tensor:
    if isinstance(heads, Tensor) and _passes_log_domain_by_blocks(problem, damping):
        return output_by_blocks(problem, heads, n_iters, dtype)
    coupling = log_domain_coupling(problem.scores(heads, dtype, 1.0), n_iters, damping)[2]
    dropout = problem.dropout(heads, dtype)
    if dropout is not None:
        coupling.mul_(dropout)
    return torch.bmm(coupling, problem.values(heads, dtype))


def _log_domain_groups(mode: Tensor, problem: Problem) -> list[Tensor]:
    """The heads of guard C, in groups whose float64 scratch stays bounded."""
    heads = (mode == LOG_DOMAIN).nonzero().squeeze(1)
    return list(heads.split(max(1, CHUNK_BYTES // (problem.n * problem.m * 8)))) if len(heads) else []


def attention_backward(
    output_gradient: Tensor,
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    u: Tensor,
    v: Tensor,
    mode: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients with respect to query, key, value and, if asked for, attn_bias (otherwise an empty tensor).

    `options` are n_iters, scale, detached, the masks of `attention_forward`, and whether attn_bias needs a gradient.
    """
    run = _choose(query, key, options[0], _run_backward, blockwise.run_backward)
    tensors = output_gradient, output, query, key, value, u, v, mode
    return backward_with_guard(run, chunk_size(query, key, BACKWARD_CHUNKS), *tensors, *options)


def backward_with_guard(
    run: Callable,
    size: int,
    output_gradient: Tensor,
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    u: Tensor,
    v: Tensor,
    mode: Tensor,
    n_iters: int,
    scale: float,
    detached: bool,
    attn_bias: Tensor | None,
    *options: Any,
    damping: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Backward in chunks of `size` heads by `run`, and in the log domain where forward was."""
    *masks, bias_gradient = options
    problem = attention_problem(query, key, value, scale, attn_bias, *masks)
    device, dtype = query.device, problem.dtype
    gradients = Gradients(problem, bias_gradient)
    d_output = output_gradient.reshape(problem.heads, problem.n, -1)
    output = output.view(problem.heads, problem.n, -1)
    settings = n_iters, detached
    with torch.autocast(device.type, enabled=False), hold():
        if in_log_domain_throughout(device):
            for heads, _ in runs([LOG_DOMAIN] * problem.heads, size):
                _backward_in_log_domain(problem, heads, settings, d_output, gradients, dtype, damping)
        else:
            problem.hides_padding = must_hide_padding(problem, value, d_output)
            for heads, head_mode in runs(mode.tolist(), size):
                if head_mode != LOG_DOMAIN:
                    tensors = d_output, output, u[:, heads], v[:, heads]
                    run(problem, heads, head_mode, settings, *tensors, gradients)
            for group in _log_domain_groups(mode, problem):
                _backward_in_log_domain(problem, group, settings, d_output, gradients, torch.float64, damping)
    return gradients.like(query, key, value, attn_bias)


def _run_backward(
    problem: Problem,
    heads: slice,
    mode: int,
    settings: tuple[int, bool],
    d_output: Tensor,
    output: Tensor,
    u: Tensor,
    v: Tensor,
    gradients: Gradients,
    correct: Callable[..., tuple[Tensor, Tensor]] = scores_gradient,
) -> None:
    """Backward of some heads that have the same mode; `correct` differentiates the half-steps.

    The rank-T correction begins with the sums of P * dL/dP over rows and columns. They equal dO.O and V.dV, and then
    one product makes both terms of dL/dC. Where the map is peaked, though, dL/dC is nearly nothing, and rounding the
    two terms in two ways would be all of it: there the sums are taken from the very products that they are subtracted
    from, which is 50 times more accurate on saturated maps and costs a tenth of the time.
    """
    n_iters, detached = settings
    count, n, m = heads.stop - heads.start, problem.n, problem.m
    # The map that is used transposed gets a row stride that is no multiple of 64 * 2^k bytes: up to 1.4 times faster.
    padded = m + 8 if m % 16 == 0 else m
    with borrow((count, n, padded), (count, n, m), dtype=problem.dtype) as (map_, work):
        map_ = map_[..., :m]
        query, key, value = problem.queries(heads), problem.keys(heads), problem.values(heads)
        d_out = problem.hide_rows(d_output[heads].to(problem.dtype), heads)
        width = value.shape[2]
        wide = min(n, m) > 2 * width  # copying the tokens is cheap against the map
        left, right = d_out, value
        if mode == BOUNDED:  # K is the final coupling itself, and the scalings are relative to it
            ratio = problem.targets(heads)[2]
            final_u, final_v = u[-1], v[-1]
            if wide and problem.attn_bias is None:
                _coupling_by_product(problem, query, key, final_u, final_v, work)
                torch.exp2(work, out=map_)
            else:
                make_kernel(problem, heads, mode, query, key, work, map_)
                map_.mul_(final_u.unsqueeze(2)).mul_(final_v.unsqueeze(1))
            u, v = u / final_u, v / final_v
            if problem.query_mask is not None or problem.key_mask is not None:
                u.nan_to_num_(nan=0.0)  # 0 / 0 at what is masked
                v.nan_to_num_(nan=0.0)
            peaked = bool(map_.amax() > PEAK)
        else:
            ratio = make_kernel(problem, heads, mode, query, key, work, map_)[3]
            left, right = d_out * u[-1].unsqueeze(2), value * v[-1].unsqueeze(2)
            peaked = True
        dropout = problem.dropout(heads)
        kept = map_ if dropout is None else torch.mul(map_, dropout, out=work)
        d_value = gradients.value_of(heads)
        torch.bmm(kept.transpose(1, 2), left, out=d_value)
        if mode != BOUNDED:
            d_value.mul_(v[-1].unsqueeze(2))
        correction = ratio, u, v, n_iters
        if not peaked:
            row_sums, column_sums = _dot(d_out, output[heads]), _dot(value, d_value)
            rank = correct(map_, *correction, row_sums, column_sums, detached)
            if wide and dropout is None:
                _product_with(work, (left, right), (rank[0].transpose(1, 2), rank[1].transpose(1, 2)))
            else:
                torch.bmm(left, right.transpose(1, 2), out=work)
                if dropout is not None:
                    work.mul_(dropout)
                work.baddbmm_(rank[0].transpose(1, 2), rank[1])
        else:
            torch.bmm(left, right.transpose(1, 2), out=work)
            if dropout is not None:
                work.mul_(dropout)
            with borrow(tuple(work.shape), dtype=work.dtype) as (weighted,):
                torch.mul(work, map_, out=weighted)
                row_sums = torch.bmm(weighted.new_ones(1, 1, m).expand(count, 1, -1), weighted.transpose(1, 2))
                column_sums = torch.bmm(weighted.new_ones(1, 1, n).expand(count, 1, -1), weighted)
            rank = correct(map_, *correction, row_sums, column_sums, detached)
            work.baddbmm_(rank[0].transpose(1, 2), rank[1])
        gradients.write(heads, query, key, map_.mul_(work), d_value)


def _coupling_by_product(problem: Problem, query: Tensor, key: Tensor, u: Tensor, v: Tensor, scores: Tensor) -> None:
    """Log2 of the final coupling (heads, n, m) by one product: the potentials are two more columns of its factors."""
    row, column = u.log2().unsqueeze(2), v.log2().unsqueeze(2)
    left = torch.cat([row, torch.ones_like(row)], 2)
    right = torch.cat([torch.ones_like(column), column], 2)
    _product_with(scores, (query, key), (left, right), problem.scale * LOG2E)


def _product_with(
    product: Tensor, factors: tuple[Tensor, Tensor], columns: tuple[Tensor, Tensor], scale: float = 1.0
) -> None:
    """Fills (heads, n, m) with scale * left @ right^T + the same of more columns, in one product."""
    width, more = factors[0].shape[2], columns[0].shape[2]
    shapes = [(*factor.shape[:2], width + more) for factor in factors]
    with borrow(*shapes, dtype=product.dtype) as (left, right):  # fresh pages would cost as much as the copies
        torch.mul(factors[0], scale, out=left[..., :width])
        right[..., :width] = factors[1]
        left[..., width:], right[..., width:] = columns
        torch.bmm(left, right.transpose(1, 2), out=product)


def _dot(first: Tensor, second: Tensor) -> Tensor:
    """Scalar products of tokens (heads, length, d), as (heads, 1, length)."""
    with borrow(tuple(first.shape), dtype=first.dtype) as (product,):
        return torch.mul(first, second, out=product).sum(2).unsqueeze(1)


def _backward_in_log_domain(
    problem: Problem,
    heads: Tensor | slice,
    settings: tuple[int, bool],
    d_output: Tensor,
    gradients: Gradients,
    dtype: torch.dtype,
    damping: float,
) -> None:
    if isinstance(heads, Tensor) and _passes_log_domain_by_blocks(problem, damping):
        backward_by_blocks(problem, heads, settings, d_output, gradients, dtype)
        return
    n_iters, detached = settings
    scores, value = problem.scores(heads, dtype, 1.0), problem.values(heads, dtype)
    d_out = problem.hide_rows(d_output[heads].to(dtype), heads)
    coupling = log_domain_coupling(scores, n_iters, damping)[2]
    d_coupling = torch.bmm(d_out, value.transpose(1, 2))
    dropout = problem.dropout(heads, dtype)
    if dropout is not None:
        coupling.mul_(dropout)
        d_coupling.mul_(dropout)
    d_value = torch.bmm(coupling.transpose(1, 2), d_out)
    d_scores = log_domain_scores_gradient(scores, n_iters, d_coupling, detached, damping)
    gradients.write(heads, problem.queries(heads, dtype), problem.keys(heads, dtype), d_scores, d_value)


# ---------------------------------------------------------------------------------------------------------- coupling


def coupling_problem(scores: Tensor, query_mask: Tensor | None, key_mask: Tensor | None) -> Problem:
    """The matrices of given scores."""
    lead, (n, m) = scores.shape[:-2], scores.shape[-2:]
    return Problem(lead, n, m, compute_dtype(scores), query_mask, key_mask, given_scores=scores)


def coupling_forward(
    scores: Tensor, n_iters: int, query_mask: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The coupling of given scores (..., n, m), then what `empty_state` makes."""
    problem = coupling_problem(scores, query_mask, key_mask)
    n, m, dtype = problem.n, problem.m, problem.dtype
    u, v, mode = empty_state(scores, problem.heads, n, m, n_iters)
    result = scores.new_empty(scores.shape, dtype=dtype)
    coupling = result.view(problem.heads, n, m)
    size = _chunk_size(n, m, dtype, scores.device)
    with torch.autocast(scores.device.type, enabled=False):
        if in_log_domain_throughout(scores.device):
            for heads, _ in runs([LOG_DOMAIN] * problem.heads, size):
                coupling[heads] = log_domain_coupling(problem.scores(heads, dtype, 1.0), n_iters)[2]
            return result, u, v, mode
        mode.copy_(~bounded_heads(problem))
        merge_modes(mode, size)
        for heads, head_mode in runs(mode.tolist(), size):
            kernel, rows, columns = coupling[heads], u[:, heads], v[:, heads]
            first, *targets, _, has_empty = make_kernel(problem, heads, head_mode, None, None, kernel, kernel)
            columns[0].unsqueeze(1).copy_(first)
            half_steps(kernel, n_iters, rows, columns, targets[0], targets[1], has_empty)
            kernel.mul_(rows[-1].unsqueeze(2)).mul_(columns[-1].unsqueeze(1))
            if head_mode == SHIFTED:
                mode[heads].masked_fill_(~trusted_heads(rows, columns), LOG_DOMAIN)
        for group in _log_domain_groups(mode, problem):
            coupling[group] = log_domain_coupling(problem.scores(group, torch.float64, 1.0), n_iters)[2].to(dtype)
    return result, u, v, mode


def coupling_backward(
    coupling_gradient: Tensor,
    scores: Tensor,
    u: Tensor,
    v: Tensor,
    mode: Tensor,
    n_iters: int,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
) -> Tensor:
    """The gradient with respect to the scores."""
    problem = coupling_problem(scores, query_mask, key_mask)
    n, m, dtype = problem.n, problem.m, problem.dtype
    d_coupling = coupling_gradient.reshape(problem.heads, n, m)
    d_scores = torch.empty_like(d_coupling, dtype=scores.dtype, memory_format=torch.contiguous_format)

    def differentiate_in_log_domain(heads: Tensor | slice, log_dtype: torch.dtype) -> None:
        log_scores = problem.scores(heads, log_dtype, 1.0)
        gradient = log_domain_scores_gradient(log_scores, n_iters, d_coupling[heads].to(log_dtype), False)
        d_scores[heads] = gradient.to(scores.dtype)

    size = _chunk_size(n, m, dtype, scores.device)
    with torch.autocast(scores.device.type, enabled=False):
        if in_log_domain_throughout(scores.device):
            for heads, _ in runs([LOG_DOMAIN] * problem.heads, size):
                differentiate_in_log_domain(heads, dtype)
            return d_scores.view(scores.shape)
        shape = min(size, problem.heads), n, m
        with borrow(shape, shape, dtype=dtype) as (maps, scratch):
            for heads, head_mode in runs(mode.tolist(), size):
                if head_mode == LOG_DOMAIN:
                    continue
                kernel, weighted = maps[: heads.stop - heads.start], scratch[: heads.stop - heads.start]
                rows, columns = u[:, heads], v[:, heads]
                ratio = make_kernel(problem, heads, head_mode, None, None, kernel, kernel)[3]
                direct = d_coupling[heads] * rows[-1].unsqueeze(2)
                direct.mul_(columns[-1].unsqueeze(1))
                torch.mul(direct, kernel, out=weighted)
                sums = weighted.sum(2).unsqueeze(1), weighted.sum(1, keepdim=True)
                left, right = scores_gradient(kernel, ratio, rows, columns, n_iters, *sums, False)
                d_scores[heads] = direct.baddbmm_(left.transpose(1, 2), right).mul_(kernel)
        for group in _log_domain_groups(mode, problem):
            differentiate_in_log_domain(group, torch.float64)
    return d_scores.view(scores.shape)


def define_attention(
    query: Tensor, key: Tensor, value: Tensor, n_iters: int, scale: float, detached: bool, *masks: Tensor | None
) -> Tensor:
    """The definition, of an engine's arguments."""
    gradient = "detached" if detached else "unrolled"
    return sinkhorn_attention_reference(query, key, value, n_iters, scale, *masks, gradient=gradient)


def define_coupling(scores: Tensor, n_iters: int, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
    """The definition, of an engine's arguments."""
    return sinkhorn_reference(scores.to(compute_dtype(scores)), n_iters, query_mask, key_mask)


dense_attention = AttentionOperator("dense", attention_forward, attention_backward, empty_state, define_attention)
dense_coupling = CouplingOperator("dense", coupling_forward, coupling_backward, empty_state, define_coupling)
