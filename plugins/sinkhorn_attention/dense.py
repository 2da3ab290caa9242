"""The dense engine: exact Sinkhorn attention at about the price of softmax, memory independent of `n_iters`.

Per chunk of heads the map K = exp(C - row max - column max) is made once; every half-step is then one matrix-vector
product on a scaling vector, u = 1 / (K v) or v = (n_valid / m_valid) / (K^T u), and the coupling is diag(u) K diag(v).
Saved for backward are the inputs and the scaling vectors. Backward rebuilds K from the same operations. The derivative
of the T half-steps adds a matrix of rank T to dO V^T,

    dL/dC = K * (diag(u_T) dO V^T diag(v_T) + A B^T),

with one column of A and B for each half-step, found by going through the half-steps in reverse with mat-vecs.

The guard. The shifts leave a 1 in every row and column of K, so what exp flushes to zero is below 2^-126 in float32.
As long as max(u) max(v) <= 2^84 over all half-steps, such an entry is below 2^-42 of a unit row in every intermediate
coupling, and nothing overflows. A matrix that exceeds the bound (peaked logits, far rows or columns, many half-steps)
is computed again in the log domain, in float64 on the CPU. On other devices that decision would need a synchronisation:
the log domain is used throughout there.

Everything is a `torch.library` custom operator with a fake kernel and a registered backward, so that the engine
compiles without graph breaks and scripts.
"""

import math

import torch
from torch import Tensor

from .log_domain import log_domain_coupling, log_domain_scores_gradient, target_ratio

LOG2E = math.log2(math.e)

#: Bytes of K that one chunk of heads may take on the CPU: it stays in the last-level cache between half-steps.
CHUNK_BYTES = 6 << 20
#: Likewise on other devices, where a chunk only bounds the scratch memory.
DEVICE_CHUNK_BYTES = 256 << 20
#: log2 of the largest max(u) * max(v) that the exponential domain is trusted with, by dtype.
GUARD_LOG2 = {torch.float32: 84.0, torch.float64: 900.0}

NO_DOUBLE_BACKWARD = (
    "the dense backend of Sinkhorn attention has a hand-written backward that cannot be differentiated again; "
    "use backend='reference' for second derivatives"
)


class _Problem:
    """Views of one call's tensors with the leading dimensions flattened to `heads`, sliced chunk by chunk.

    Either (query, key) with an optional bias or given scores make the matrices; see `scores`.
    """

    def __init__(
        self,
        lead: torch.Size,
        n: int,
        m: int,
        dtype: torch.dtype,
        query_mask: Tensor | None,
        key_mask: Tensor | None,
        query: Tensor | None = None,
        key: Tensor | None = None,
        scale: float = 1.0,
        attn_bias: Tensor | None = None,
        given_scores: Tensor | None = None,
    ) -> None:
        self.heads, self.n, self.m = math.prod(lead), n, m
        self.dtype = dtype
        self.scale = scale
        self.query_mask = None if query_mask is None else query_mask.expand(*lead, n).reshape(-1, n)
        self.key_mask = None if key_mask is None else key_mask.expand(*lead, m).reshape(-1, m)
        self.query = None if query is None else query.reshape(self.heads, n, query.shape[-1])
        self.key = None if key is None else key.reshape(self.heads, m, key.shape[-1])
        self.given_scores = None if given_scores is None else given_scores.reshape(self.heads, n, m)
        self.attn_bias = self.bias_head = None
        if attn_bias is not None:
            # The bias stays as small as it came: bias_head[h] says which of its matrices belongs to head h.
            bias_lead = (1,) * (len(lead) + 2 - attn_bias.dim()) + attn_bias.shape[:-2]
            self.attn_bias = attn_bias.reshape(-1, *attn_bias.shape[-2:])
            index = torch.arange(self.attn_bias.shape[0], device=attn_bias.device).view(bias_lead)
            self.bias_head = index.expand(lead).reshape(-1)

    def chunks(self, device: torch.device) -> list[slice]:
        limit = CHUNK_BYTES if device.type == "cpu" else DEVICE_CHUNK_BYTES
        size = max(1, limit // (self.n * self.m * self.dtype.itemsize))
        return [slice(start, min(start + size, self.heads)) for start in range(0, self.heads, size)]

    def scores(self, heads: slice | Tensor, dtype: torch.dtype, unit: float) -> Tensor:
        """The scores times `unit` of some heads, (heads, n, m), as a new tensor; -inf outside the support."""
        if self.query is not None and self.key is not None:
            query = hide(self.query[heads].to(dtype), self.query_mask, heads)
            key = hide(self.key[heads].to(dtype), self.key_mask, heads)
            scores = torch.bmm(query * (self.scale * unit), key.transpose(1, 2))
            if self.attn_bias is not None and self.bias_head is not None:
                scores.add_(self.attn_bias[self.bias_head[heads]].to(dtype), alpha=unit)
        else:
            assert self.given_scores is not None
            scores = self.given_scores[heads].to(dtype) * unit
        if self.query_mask is not None:
            scores.masked_fill_(~self.query_mask[heads].unsqueeze(2), -math.inf)
        if self.key_mask is not None:
            scores.masked_fill_(~self.key_mask[heads].unsqueeze(1), -math.inf)
        return scores


def hide(tokens: Tensor, mask: Tensor | None, heads: slice | Tensor) -> Tensor:
    """Zeroes tokens (heads, length, d) where the mask (all heads, length) is False: padding may hold anything."""
    return tokens if mask is None else tokens.masked_fill(~mask[heads].unsqueeze(2), 0.0)


# ----------------------------------------------------------------------------------------- the exponential domain


def exponentiate(scores: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Turns log2 scores (heads, n, m) in place into K = 2^(scores - row max - column max).

    Returns:
        K, the first column scaling 2^(column max) (heads, 1, m), which makes the first row step that of the scores
        themselves, the valid rows (heads, 1, n) and columns (heads, 1, m), and n_valid / m_valid (heads, 1, 1).
    """
    row_max = scores.amax(2, keepdim=True)
    rows = row_max != -math.inf
    scores.sub_(row_max.masked_fill_(~rows, 0.0))
    column_max = scores.amax(1, keepdim=True)
    columns = column_max != -math.inf
    scores.sub_(column_max.masked_fill(~columns, 0.0))
    column_ratio = target_ratio(rows, columns, scores.dtype)
    return scores.exp2_(), column_max.exp2_(), rows.transpose(1, 2), columns, column_ratio


def scale_rows_and_columns(
    kernel: Tensor, n_iters: int, exponentials: tuple[Tensor, ...], u: Tensor, v: Tensor
) -> None:
    """Runs the half-steps in the exponential domain, filling u (heads, ceil(T/2), n) and v (heads, T//2 + 1, m)."""
    v[:, 0:1], rows, columns, ratio = exponentials
    for step in range(n_iters):
        i = step // 2
        if step % 2 == 0:
            sums = torch.bmm(v[:, i : i + 1], kernel.transpose(1, 2))
            u[:, i : i + 1] = sums.reciprocal_().masked_fill_(~rows, 0.0)
        else:
            sums = torch.bmm(u[:, i : i + 1], kernel)
            v[:, i + 1 : i + 2] = torch.div(ratio, sums, out=sums).masked_fill_(~columns, 0.0)


def scores_gradient(
    kernel: Tensor,
    ratio: Tensor,
    u: Tensor,
    v: Tensor,
    n_iters: int,
    row_sums: Tensor,
    column_sums: Tensor,
    detached: bool,
) -> tuple[Tensor, Tensor]:
    """The rank-T correction A B^T of dL/dC = K * (... + A B^T), by going through the half-steps in reverse.

    Args:
        kernel: K, (heads, n, m).
        ratio: n_valid / m_valid, (heads, 1, 1).
        u: row scalings, (heads, ceil(T/2), n).
        v: column scalings, (heads, T//2 + 1, m).
        n_iters: T.
        row_sums: of P * dL/dP, (heads, 1, n): the derivative with respect to log u_T.
        column_sums: (heads, 1, m), likewise for log v_T.
        detached: whether column potentials count as constants.

    Returns:
        A^T (heads, columns, n) and B^T (heads, columns, m), with as many columns as half-steps are differentiated.
    """
    left, right = [], []
    for step in reversed(range(n_iters)):
        i = step // 2
        if step % 2 == 0:
            weight = -row_sums * u[:, i : i + 1]
            left.append(weight)
            right.append(v[:, i : i + 1])
            if detached or step == 0:
                break
            column_sums = column_sums + v[:, i : i + 1] * torch.bmm(weight, kernel)
        elif not detached:
            weight = -column_sums * v[:, i + 1 : i + 2] / ratio
            left.append(u[:, i : i + 1])
            right.append(weight)
            flow = u[:, i : i + 1] * torch.bmm(weight, kernel.transpose(1, 2))
            row_sums = row_sums + flow if step == n_iters - 1 else flow
            column_sums = torch.zeros_like(column_sums)
    return torch.cat(left, 1), torch.cat(right, 1)


# --------------------------------------------------------------------------------------------- which of the two


def in_log_domain_throughout(device: torch.device) -> bool:
    """Whether all heads are computed in the log domain: where asking the guard would wait for the device."""
    return device.type != "cpu"


def split_by_guard(chunk: slice, u: Tensor, v: Tensor) -> Tensor:
    """Indices of the chunk's heads whose scalings left the range that the exponential domain is trusted with."""
    product = u.amax((1, 2)).log2() + v.amax((1, 2)).log2()
    trusted = product <= GUARD_LOG2[u.dtype]  # False for NaN as well
    return (~trusted).nonzero().squeeze(1) + chunk.start


def log_domain_groups(heads: Tensor, n: int, m: int) -> list[Tensor]:
    """Splits head indices so that a group's float64 scratch stays bounded."""
    return list(heads.split(max(1, CHUNK_BYTES // (n * m * 8))))


# ------------------------------------------------------------------------------------------------ attention operator


@torch.library.custom_op("sinkhorn_attention::dense_attention", mutates_args=())
def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    n_iters: int,
    scale: float,
    detached: bool,
    attn_bias: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    dropout_keep: Tensor | None,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Forward of the dense engine; arguments as `sinkhorn_attention`, leading dimensions already equal.

    `dropout_keep` (..., n, m), boolean, says which entries of the final map stay; they are divided by 1 - dropout_p.

    Returns:
        The output in float32 at least, the row scalings (heads, ceil(T/2), n), the column scalings (heads, T//2 + 1, m)
        and whether a head was computed in the log domain (heads,). Off the CPU the scalings are empty: all heads are.
    """
    problem = attention_problem(query, key, scale, attn_bias, query_mask, key_mask)
    n, m, device, dtype = problem.n, problem.m, query.device, problem.dtype
    values = value.reshape(-1, m, value.shape[-1])
    keep = None if dropout_keep is None else dropout_keep.reshape(-1, n, m)
    result = query.new_empty(*query.shape[:-1], value.shape[-1], dtype=dtype)
    output = result.view(problem.heads, n, -1)  # what is returned is no view: a caller may write into it
    u, v, in_log_domain = empty_scalings(query, problem.heads, n, m, n_iters)

    def apply_in_log_domain(heads: Tensor | slice, log_dtype: torch.dtype) -> None:
        coupling = log_domain_coupling(problem.scores(heads, log_dtype, 1.0), n_iters)[2]
        if keep is not None:
            coupling.mul_(dropout_factor(keep[heads], dropout_p, log_dtype))
        output[heads] = torch.bmm(coupling, hide(values[heads].to(log_dtype), problem.key_mask, heads)).to(dtype)

    with torch.autocast(device.type, enabled=False):
        for heads in problem.chunks(device):
            if in_log_domain_throughout(device):
                apply_in_log_domain(heads, dtype)
                continue
            kernel, *exponentials = exponentiate(problem.scores(heads, dtype, LOG2E))
            scale_rows_and_columns(kernel, n_iters, tuple(exponentials), u[heads], v[heads])
            last_u, last_v = u[heads, -1].unsqueeze(2), v[heads, -1].unsqueeze(2)
            visible = hide(values[heads].to(dtype), problem.key_mask, heads)
            if keep is not None:
                kernel.mul_(dropout_factor(keep[heads], dropout_p, dtype))
            torch.mul(torch.bmm(kernel, visible * last_v), last_u, out=output[heads])
            untrusted = split_by_guard(heads, u[heads], v[heads])
            in_log_domain[untrusted] = True
            for group in log_domain_groups(untrusted, n, m):
                apply_in_log_domain(group, torch.float64)
    return result, u, v, in_log_domain


@dense_attention.register_fake
def _(query, key, value, n_iters, scale, detached, attn_bias, query_mask, key_mask, dropout_keep, dropout_p):  # type: ignore[no-untyped-def]
    n, m, heads = query.shape[-2], key.shape[-2], math.prod(query.shape[:-2])
    output = query.new_empty(*query.shape[:-1], value.shape[-1], dtype=compute_dtype(query))
    return output, *empty_scalings(query, heads, n, m, n_iters)


def attention_problem(
    query: Tensor,
    key: Tensor,
    scale: float,
    attn_bias: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
) -> _Problem:
    """The matrices of an attention call."""
    lead, n, m = query.shape[:-2], query.shape[-2], key.shape[-2]
    return _Problem(lead, n, m, compute_dtype(query), query_mask, key_mask, query, key, scale, attn_bias)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Scores and scalings are kept in float32 at least."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def empty_scalings(like: Tensor, heads: int, n: int, m: int, n_iters: int) -> tuple[Tensor, Tensor, Tensor]:
    """What forward saves beside its output: row scalings, column scalings, and which heads the log domain computed."""
    throughout = in_log_domain_throughout(like.device)
    n_rows, n_columns = (0, 0) if throughout else ((n_iters + 1) // 2, n_iters // 2 + 1)
    u = like.new_empty(heads, n_rows, n, dtype=compute_dtype(like))
    v = like.new_empty(heads, n_columns, m, dtype=compute_dtype(like))
    return u, v, torch.full((heads,), throughout, device=like.device)


def dropout_factor(keep: Tensor, dropout_p: float, dtype: torch.dtype) -> Tensor:
    """What multiplies the coupling: 1 / (1 - p) where kept, 0 elsewhere."""
    return keep.to(dtype).mul_(0.0 if dropout_p >= 1 else 1 / (1 - dropout_p))


@torch.library.custom_op("sinkhorn_attention::dense_attention_backward", mutates_args=())
def dense_attention_backward(
    output_gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row_scalings: Tensor,
    column_scalings: Tensor,
    in_log_domain: Tensor,
    n_iters: int,
    scale: float,
    detached: bool,
    attn_bias: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    dropout_keep: Tensor | None,
    dropout_p: float,
    bias_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients with respect to query, key, value and, if asked for, attn_bias (otherwise an empty tensor)."""
    problem = attention_problem(query, key, scale, attn_bias, query_mask, key_mask)
    n, m, device, dtype = problem.n, problem.m, query.device, problem.dtype
    width = value.shape[-1]
    values = value.reshape(-1, m, width)
    keep = None if dropout_keep is None else dropout_keep.reshape(-1, n, m)
    d_output = output_gradient.reshape(-1, n, width)
    assert problem.query is not None
    assert problem.key is not None
    d_query, d_key, d_value = (  # contiguous, as the fake kernel promises, whatever the inputs' strides are
        torch.empty_like(tensor, memory_format=torch.contiguous_format)
        for tensor in (problem.query, problem.key, values)
    )
    d_bias = None
    if bias_gradient and problem.attn_bias is not None:
        d_bias = torch.zeros(problem.attn_bias.shape, dtype=dtype, device=device)

    def write(heads: Tensor | slice, d_scores: Tensor, d_visible: Tensor) -> None:
        """Takes dL/dC and dL/dV of some heads to the inputs. Masked tokens have zero rows and columns in dL/dC."""
        assert problem.query is not None
        assert problem.key is not None
        visible_query = hide(problem.query[heads].to(d_scores.dtype), problem.query_mask, heads)
        visible_key = hide(problem.key[heads].to(d_scores.dtype), problem.key_mask, heads)
        d_query[heads] = torch.bmm(d_scores, visible_key).mul_(scale).to(d_query.dtype)
        d_key[heads] = torch.bmm(d_scores.transpose(1, 2), visible_query).mul_(scale).to(d_key.dtype)
        d_value[heads] = hide(d_visible, problem.key_mask, heads).to(d_value.dtype)
        if d_bias is not None and problem.bias_head is not None:
            for axis in (1, 2):
                if d_bias.shape[axis] == 1:
                    d_scores = d_scores.sum(axis, keepdim=True)
            d_bias.index_add_(0, problem.bias_head[heads], d_scores.to(dtype))

    def differentiate_in_log_domain(heads: Tensor | slice, log_dtype: torch.dtype) -> None:
        scores = problem.scores(heads, log_dtype, 1.0)
        visible = hide(values[heads].to(log_dtype), problem.key_mask, heads)
        d_out = hide(d_output[heads].to(log_dtype), problem.query_mask, heads)
        coupling = log_domain_coupling(scores, n_iters)[2]
        d_coupling = torch.bmm(d_out, visible.transpose(1, 2))
        if keep is not None:
            factor = dropout_factor(keep[heads], dropout_p, log_dtype)
            coupling.mul_(factor)
            d_coupling.mul_(factor)
        d_visible = torch.bmm(coupling.transpose(1, 2), d_out)
        write(heads, log_domain_scores_gradient(scores, n_iters, d_coupling, detached), d_visible)

    def differentiate(heads: Tensor | slice) -> None:
        kernel, _, _, _, ratio = exponentiate(problem.scores(heads, dtype, LOG2E))
        u, v = row_scalings[heads], column_scalings[heads]
        last_u, last_v = u[:, -1].unsqueeze(2), v[:, -1].unsqueeze(2)
        visible = hide(values[heads].to(dtype), problem.key_mask, heads)
        d_out = hide(d_output[heads].to(dtype), problem.query_mask, heads)
        scaled_d_out, scaled_visible = d_out * last_u, visible * last_v
        kept = kernel if keep is None else kernel * dropout_factor(keep[heads], dropout_p, dtype)
        d_visible = torch.bmm(kept.transpose(1, 2), scaled_d_out).mul_(last_v)
        d_scores = torch.bmm(scaled_d_out, scaled_visible.transpose(1, 2))
        if keep is not None:
            d_scores.mul_(dropout_factor(keep[heads], dropout_p, dtype))
        # Summed from the very products that the correction is subtracted from, not from dO and the output: where the
        # map is saturated the difference is nearly nothing, and rounding its terms in two ways would be all of it.
        weighted = d_scores * kernel
        row_sums, column_sums = weighted.sum(2).unsqueeze(1), weighted.sum(1, keepdim=True)
        left, right = scores_gradient(kernel, ratio, u, v, n_iters, row_sums, column_sums, detached)
        d_scores.baddbmm_(left.transpose(1, 2), right)
        write(heads, d_scores.mul_(kernel), d_visible)

    with torch.autocast(device.type, enabled=False):
        for heads in problem.chunks(device):
            if in_log_domain_throughout(device):
                differentiate_in_log_domain(heads, dtype)
                continue
            untrusted = in_log_domain[heads].nonzero().squeeze(1) + heads.start
            if len(untrusted) == 0:
                differentiate(heads)
            elif len(untrusted) < heads.stop - heads.start:
                differentiate((~in_log_domain[heads]).nonzero().squeeze(1) + heads.start)
            for group in log_domain_groups(untrusted, n, m):
                differentiate_in_log_domain(group, torch.float64)
    if d_bias is None:
        d_bias = query.new_empty(0, dtype=dtype)
    elif attn_bias is not None:
        d_bias = d_bias.view(attn_bias.shape).to(attn_bias.dtype)
    return d_query.view(query.shape), d_key.view(key.shape), d_value.view(value.shape), d_bias


@dense_attention_backward.register_fake
def _(output_gradient, query, key, value, *arguments):  # type: ignore[no-untyped-def]
    attn_bias, bias_gradient = arguments[6], arguments[11]
    d_bias = attn_bias if bias_gradient and attn_bias is not None else query.new_empty(0, dtype=compute_dtype(query))
    return tuple(
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value, d_bias)
    )


def _save_attention(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    query, key, value, n_iters, scale, detached, attn_bias, query_mask, key_mask, dropout_keep, dropout_p = inputs
    ctx.save_for_backward(query, key, value, *output[1:], attn_bias, query_mask, key_mask, dropout_keep)
    ctx.settings = n_iters, scale, detached
    ctx.dropout_p = dropout_p
    ctx.set_materialize_grads(False)


def _attention_backward(ctx, output_gradient, *_):  # type: ignore[no-untyped-def]
    if output_gradient is None:
        return (None,) * 11
    query, key, value, u, v, in_log_domain, attn_bias, query_mask, key_mask, dropout_keep = ctx.saved_tensors
    tensors = query, key, value, u, v, in_log_domain
    masks = attn_bias, query_mask, key_mask, dropout_keep
    d_query, d_key, d_value, d_bias = dense_attention_backward(
        output_gradient, *tensors, *ctx.settings, *masks, ctx.dropout_p, ctx.needs_input_grad[6]
    )
    d_bias = d_bias if ctx.needs_input_grad[6] else None
    return d_query, d_key, d_value, None, None, None, d_bias, None, None, None, None


def _refuse_double_backward(ctx, *gradients):  # type: ignore[no-untyped-def]
    raise NotImplementedError(NO_DOUBLE_BACKWARD)


dense_attention.register_autograd(_attention_backward, setup_context=_save_attention)
dense_attention_backward.register_autograd(_refuse_double_backward)


# ------------------------------------------------------------------------------------------------- coupling operator


@torch.library.custom_op("sinkhorn_attention::dense_coupling", mutates_args=())
def dense_coupling(
    scores: Tensor, n_iters: int, query_mask: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The coupling of given scores (..., n, m), then the scalings and flags that `dense_attention` returns too."""
    problem = coupling_problem(scores, query_mask, key_mask)
    n, m, dtype = problem.n, problem.m, problem.dtype
    u, v, in_log_domain = empty_scalings(scores, problem.heads, n, m, n_iters)
    result = scores.new_empty(scores.shape, dtype=dtype)
    coupling = result.view(problem.heads, n, m)

    def fill_in_log_domain(heads: Tensor | slice, log_dtype: torch.dtype) -> None:
        coupling[heads] = log_domain_coupling(problem.scores(heads, log_dtype, 1.0), n_iters)[2].to(dtype)

    with torch.autocast(scores.device.type, enabled=False):
        for heads in problem.chunks(scores.device):
            if in_log_domain_throughout(scores.device):
                fill_in_log_domain(heads, dtype)
                continue
            kernel, *exponentials = exponentiate(problem.scores(heads, dtype, LOG2E))
            scale_rows_and_columns(kernel, n_iters, tuple(exponentials), u[heads], v[heads])
            torch.mul(kernel.mul_(u[heads, -1].unsqueeze(2)), v[heads, -1].unsqueeze(1), out=coupling[heads])
            untrusted = split_by_guard(heads, u[heads], v[heads])
            in_log_domain[untrusted] = True
            for group in log_domain_groups(untrusted, n, m):
                fill_in_log_domain(group, torch.float64)
    return result, u, v, in_log_domain


@dense_coupling.register_fake
def _(scores, n_iters, query_mask, key_mask):  # type: ignore[no-untyped-def]
    n, m, heads = scores.shape[-2], scores.shape[-1], math.prod(scores.shape[:-2])
    coupling = scores.new_empty(scores.shape, dtype=compute_dtype(scores))
    return coupling, *empty_scalings(scores, heads, n, m, n_iters)


def coupling_problem(scores: Tensor, query_mask: Tensor | None, key_mask: Tensor | None) -> _Problem:
    """The matrices of given scores."""
    lead, (n, m) = scores.shape[:-2], scores.shape[-2:]
    return _Problem(lead, n, m, compute_dtype(scores), query_mask, key_mask, given_scores=scores)


@torch.library.custom_op("sinkhorn_attention::dense_coupling_backward", mutates_args=())
def dense_coupling_backward(
    coupling_gradient: Tensor,
    scores: Tensor,
    row_scalings: Tensor,
    column_scalings: Tensor,
    in_log_domain: Tensor,
    n_iters: int,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
) -> Tensor:
    """The gradient with respect to the scores."""
    problem = coupling_problem(scores, query_mask, key_mask)
    n, m, dtype = problem.n, problem.m, problem.dtype
    d_coupling = coupling_gradient.reshape(-1, n, m)
    d_scores = torch.empty_like(d_coupling, dtype=scores.dtype, memory_format=torch.contiguous_format)

    def differentiate_in_log_domain(heads: Tensor | slice, log_dtype: torch.dtype) -> None:
        log_scores = problem.scores(heads, log_dtype, 1.0)
        gradient = log_domain_scores_gradient(log_scores, n_iters, d_coupling[heads].to(log_dtype), False)
        d_scores[heads] = gradient.to(scores.dtype)

    def differentiate(heads: slice) -> None:
        kernel, _, _, _, ratio = exponentiate(problem.scores(heads, dtype, LOG2E))
        u, v = row_scalings[heads], column_scalings[heads]
        direct = d_coupling[heads] * u[:, -1].unsqueeze(2) * v[:, -1].unsqueeze(1)
        weighted = direct * kernel
        row_sums, column_sums = weighted.sum(2).unsqueeze(1), weighted.sum(1, keepdim=True)
        left, right = scores_gradient(kernel, ratio, u, v, n_iters, row_sums, column_sums, False)
        d_scores[heads] = direct.baddbmm_(left.transpose(1, 2), right).mul_(kernel).to(scores.dtype)

    with torch.autocast(scores.device.type, enabled=False):
        for heads in problem.chunks(scores.device):
            if in_log_domain_throughout(scores.device):
                differentiate_in_log_domain(heads, dtype)
                continue
            differentiate(heads)
            for group in log_domain_groups(in_log_domain[heads].nonzero().squeeze(1) + heads.start, n, m):
                differentiate_in_log_domain(group, torch.float64)
    return d_scores.view(scores.shape)


@dense_coupling_backward.register_fake
def _(coupling_gradient, scores, *_):  # type: ignore[no-untyped-def]
    return torch.empty_like(scores, memory_format=torch.contiguous_format)


def _save_coupling(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    scores, ctx.n_iters, query_mask, key_mask = inputs
    ctx.save_for_backward(scores, *output[1:], query_mask, key_mask)
    ctx.set_materialize_grads(False)


def _coupling_backward(ctx, coupling_gradient, *_):  # type: ignore[no-untyped-def]
    if coupling_gradient is None:
        return (None,) * 4
    scores, u, v, in_log_domain, query_mask, key_mask = ctx.saved_tensors
    gradient = dense_coupling_backward(
        coupling_gradient, scores, u, v, in_log_domain, ctx.n_iters, query_mask, key_mask
    )
    return gradient, None, None, None


dense_coupling.register_autograd(_coupling_backward, setup_context=_save_coupling)
dense_coupling_backward.register_autograd(_refuse_double_backward)
