"""The streaming engine by fused attention calls: exact Sinkhorn attention without a map, on GPUs without own kernels.

A half-step is a log-sum-exp of the scores C plus the other side's potential, which fused attention computes anyway:

    u_i = -logsumexp_j(C_ij + v_j)                   attention of queries to keys, with the key bias v
    v_j = log(n_valid / m_valid) - logsumexp_i(C_ij + u_i)       attention of keys to queries, with the bias u

After an odd count the output is softmax attention with the key bias v; after an even count its rows are rescaled by
exp(u_i + logsumexp_j(C_ij + v_j)). A bias needs no argument of the kernel: it is one more column of the keys beside a
column of ones of the queries, three columns in half precision, which hold 24 bits of it together.

Backward is exact and made of such calls too. Fused attention's own backward takes the last coupling P from the
log-sum-exp that it is given, here -u_T; with an output of zeros in place of the true one it leaves softmax's correction
out, as it must where the last half-step was a column step. Each pair of half-steps before it takes four calls whose
values are tokens weighted with the potentials' gradients. Saved are the inputs and the potentials.

Nothing is decided by the data and nothing waits for the device. CUDA tensors in half precision use flash attention,
those in float32 torch's memory-efficient attention, CPU tensors torch's fused CPU attention, on which all of this is
tested; where there is a GPU the tests run there too.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten

#: Potential of a token that takes no part: finite, because fused attention would make NaN of -inf minus -inf.
ABSENT = -1e30
#: Widest head, after the columns of the bias and padding to a multiple of 8, that flash attention takes.
MAX_WIDTH = 256


def refusal(tokens: Tensor, width: int, value_width: int, has_bias: bool, has_dropout: bool) -> str | None:
    """What this engine needs and a problem does not have, for an error message, or None if it takes the problem."""
    if has_bias:
        return "no attn_bias: fused attention cannot return its gradient"
    if has_dropout:
        return "dropout_p=0: fused attention draws its own mask, in every call anew"
    if tokens.device.type == "cuda" and tokens.dtype == torch.float64:
        return "float16, bfloat16 or float32 on CUDA devices"
    if tokens.device.type not in ("cuda", "cpu"):
        return f"a CUDA or CPU device (the tokens are on {tokens.device})"
    if _padded(max(width, value_width), tokens.dtype) > MAX_WIDTH:
        return f"heads of width {MAX_WIDTH - 8} at most (the width is {max(width, value_width)})"
    return None


def _bias_columns(dtype: torch.dtype) -> int:
    return 3 if dtype.itemsize == 2 else 1


def _padded(width: int, dtype: torch.dtype) -> int:
    return -(-(width + _bias_columns(dtype)) // 8) * 8


class _Problem(NamedTuple):
    """Tokens (batch, heads, length, width), zero where they take no part, and which do, (batch, heads, length)."""

    query: Tensor
    key: Tensor
    value: Tensor
    rows: Tensor
    columns: Tensor
    log_ratio: Tensor
    #: (batch, heads, 1, 1): 0, or NaN where a token of the head that takes part is not finite. Added to what is
    #: returned, because fused attention on the CPU makes zeros of rows with a NaN.
    poison: Tensor
    scale: float
    width: int

    def to_keys(self, bias: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Softmax attention of the queries to the keys with a key bias (batch, heads, m), and its log-sum-exp."""
        return self._attend(self.query, self.key, bias, values)

    def to_queries(self, bias: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Softmax attention of the keys to the queries with a bias (batch, heads, n), and its log-sum-exp."""
        return self._attend(self.key, self.query, bias, values)

    def _attend(self, left: Tensor, right: Tensor, bias: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        left, right = with_bias(left, right, bias, self.scale, self.width)
        out, logsumexp = fused_forward(left, right, pad(values.to(left.dtype), self.width), self.scale)
        return out[..., : values.shape[-1]], logsumexp.to(bias.dtype)

    def row_potential(self, v: Tensor, logsumexp: Tensor) -> Tensor:
        """The potential u of a row step from the log-sum-exp of the rows of C + v."""
        return torch.where(self.rows, -logsumexp, ABSENT).to(v.dtype)

    def column_potential(self, u: Tensor) -> Tensor:
        """The column step."""
        logsumexp = self.to_queries(u, self.query[..., :1])[1]
        return torch.where(self.columns, self.log_ratio - logsumexp, ABSENT).to(u.dtype)


def pad(tokens: Tensor, width: int) -> Tensor:
    """Zeros up to `width`."""
    return F.pad(tokens, (0, width - tokens.shape[-1]))


def with_bias(left: Tensor, right: Tensor, bias: Tensor, scale: float, width: int) -> tuple[Tensor, Tensor]:
    """Left and right of `width` whose scaled products are scale * left @ right^T + bias, (..., bias of right)."""
    columns = _bias_columns(right.dtype)
    largest = torch.finfo(right.dtype).max / 2
    rest = (bias / scale).clamp(-largest, largest).unsqueeze(-1)
    pieces = []
    for _ in range(columns):  # the leading bits first; what they leave over goes to the next column
        pieces.append(rest.to(right.dtype))
        rest = rest - pieces[-1].to(rest.dtype)
    ones = left.new_ones(*left.shape[:-1], columns)
    return pad(torch.cat([left, ones], -1), width), pad(torch.cat([right, *pieces], -1), width)


def fused_forward(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Fused attention of equally wide tensors (batch, heads, tokens, width): output and log-sum-exp of the rows."""
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, False, scale=scale)
    if query.dtype == torch.float32:
        found = aten._scaled_dot_product_efficient_attention(query, key, value, None, True, 0.0, False, scale=scale)
        return found[0], found[1][..., : query.shape[-2]]  # its rows are padded
    found = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, False, False, scale=scale)
    return found[0], found[1]


def fused_backward(
    output_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the fused attention whose coupling is exp(scale * query @ key^T - logsumexp)."""
    tensors = output_gradient, query, key, value
    if query.device.type == "cpu":
        logsumexp = logsumexp.to(torch.float64 if query.dtype == torch.float64 else torch.float32).contiguous()
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *tensors, output, logsumexp, 0.0, False, scale=scale
        )
    logsumexp = logsumexp.float()
    if query.dtype == torch.float32:
        logsumexp = F.pad(logsumexp, (0, -logsumexp.shape[-1] % 32), value=math.inf)
        seed = torch.zeros((), dtype=torch.int64, device=query.device)
        wanted = [True, True, True, False]
        return aten._scaled_dot_product_efficient_attention_backward(
            *tensors, None, output, logsumexp, seed, seed, 0.0, wanted, False, scale=scale
        )[:3]
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of a generator that nothing draws from
    lengths = None, None, query.shape[-2], key.shape[-2]
    return aten._scaled_dot_product_flash_attention_backward(
        *tensors, output, logsumexp.contiguous(), *lengths, 0.0, False, state, state[0], scale=scale
    )


def _problem(
    query: Tensor, key: Tensor, value: Tensor, scale: float, query_mask: Tensor | None, key_mask: Tensor | None
) -> _Problem:
    lead, n, m = query.shape[:-2], query.shape[-2], key.shape[-2]

    def as_heads(tensor: Tensor) -> Tensor:
        """(batch, heads, ...), as fused attention wants it; one head each if there are no such dimensions."""
        return tensor.reshape(math.prod(lead[:-1]), lead[-1] if lead else 1, *tensor.shape[len(lead) :])

    def taken(mask: Tensor | None, length: int) -> Tensor:
        if mask is None:
            return torch.ones(length, dtype=torch.bool, device=query.device).expand(
                (*as_heads(query).shape[:2], length)
            )
        return as_heads(mask.expand(*lead, length))

    rows, columns = taken(query_mask, n), taken(key_mask, m)
    # A sample without queries, or without keys, has no row and no column.
    rows, columns = rows & columns.any(-1, keepdim=True), columns & rows.any(-1, keepdim=True)
    if scale == 0:
        query, scale = torch.zeros_like(query), 1.0
    elif scale < 0:
        query, scale = -query, -scale
    query, key, value = (as_heads(tensor) for tensor in (query, key, value))
    if query_mask is not None:
        query = query.masked_fill(~rows.unsqueeze(-1), 0.0)
    if key_mask is not None:
        key, value = (tensor.masked_fill(~columns.unsqueeze(-1), 0.0) for tensor in (key, value))
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    counts = [mask.sum(-1, keepdim=True).clamp(min=1).to(dtype).log() for mask in (rows, columns)]
    width = _padded(max(query.shape[-1], value.shape[-1]), query.dtype)
    poison = sum((0 * tensor).sum((-2, -1), keepdim=True).to(dtype) for tensor in (query, key, value))
    assert isinstance(poison, Tensor)
    return _Problem(query, key, value, rows, columns, counts[0] - counts[1], poison, scale, width)


@torch.library.custom_op("sinkhorn_attention::flash_streaming_attention", mutates_args=())
def flash_streaming_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    n_iters: int,
    scale: float,
    detached: bool,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Forward; arguments as `dense_attention`, for problems without a `refusal`.

    Returns:
        The output in the tokens' dtype, the row potentials (ceil(T/2), batch, heads, n) and the column potentials
        (T//2 + 1, batch, heads, m), natural logarithms in float32 at least.
    """
    problem = _problem(query, key, value, scale, query_mask, key_mask)
    v = torch.where(problem.columns, 0.0, ABSENT).to(problem.log_ratio.dtype)
    us, vs = [], [v]
    for _ in range(n_iters // 2):
        us.append(problem.row_potential(v, problem.to_keys(v, problem.key[..., :1])[1]))
        v = problem.column_potential(us[-1])
        vs.append(v)
    out, logsumexp = problem.to_keys(v, problem.value)
    if n_iters % 2:
        us.append(problem.row_potential(v, logsumexp))
    else:
        # A row's sum is n at most, which the rounding of scores near 1e30 would forget.
        us[-1] = torch.minimum(us[-1], math.log(query.shape[-2]) - logsumexp)
        out = out * (us[-1] + logsumexp).exp().unsqueeze(-1)
    out = torch.where(problem.rows.unsqueeze(-1), out + problem.poison, 0.0).to(query.dtype)
    return out.reshape(*query.shape[:-1], value.shape[-1]).clone(), torch.stack(us), torch.stack(vs)


@flash_streaming_attention.register_fake
def _(query, key, value, n_iters, *_):  # type: ignore[no-untyped-def]
    heads = query.shape[-3] if query.dim() > 2 else 1
    batch = math.prod(query.shape[:-3]) if query.dim() > 3 else 1
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    u = query.new_empty((n_iters + 1) // 2, batch, heads, query.shape[-2], dtype=dtype)
    v = query.new_empty(n_iters // 2 + 1, batch, heads, key.shape[-2], dtype=dtype)
    return query.new_empty(*query.shape[:-1], value.shape[-1]), u, v


@torch.library.custom_op("sinkhorn_attention::flash_streaming_attention_backward", mutates_args=())
def flash_streaming_attention_backward(
    output_gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    row_potentials: Tensor,
    column_potentials: Tensor,
    n_iters: int,
    scale: float,
    detached: bool,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients with respect to query, key and value."""
    problem = _problem(query, key, value, scale, query_mask, key_mask)
    us, vs = row_potentials, column_potentials
    even, dtype = n_iters % 2 == 0, us.dtype
    shape = (*problem.query.shape[:-1], value.shape[-1])
    d_out = torch.where(problem.rows.unsqueeze(-1), output_gradient.reshape(shape), 0.0).to(query.dtype)
    out = torch.zeros_like(d_out) if even else output.reshape(shape)
    d_query, d_key, d_value, d_v = _last_coupling(problem, d_out, out, us[-1], vs[-1])
    if even:
        d_u = (d_out.to(dtype) * output.reshape(shape).to(dtype)).sum(-1)
    if even and detached:
        _row_step(problem, us[-1], vs[-2], d_u, d_query, d_key)
    for pair in () if detached else reversed(range(n_iters // 2)):
        through = _column_step(problem, us[pair], vs[pair + 1], d_v, d_query, d_key)
        d_u = through + d_u if even and pair == n_iters // 2 - 1 else through
        d_v = _row_step(problem, us[pair], vs[pair], d_u, d_query, d_key)
    if scale < 0:
        d_query = -d_query
    elif scale == 0:
        d_query, d_key = torch.zeros_like(d_query), torch.zeros_like(d_key)
    gradients = []
    pairs = (d_query, problem.rows, query), (d_key, problem.columns, key), (d_value, problem.columns, value)
    for gradient, taken, like in pairs:
        gradient = torch.where(taken.unsqueeze(-1), gradient + problem.poison, 0.0)
        gradients.append(gradient.to(like.dtype).reshape(like.shape).clone(memory_format=torch.contiguous_format))
    return gradients[0], gradients[1], gradients[2]


def _last_coupling(problem: _Problem, d_out: Tensor, out: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Gradients by query, key, value and v through P = exp(C + u + v), with softmax's correction unless out is 0."""
    query, key = with_bias(problem.query, problem.key, v, problem.scale, problem.width)
    value, d_out, out = (pad(tensor, problem.width) for tensor in (problem.value, d_out, out))
    # -u is large where a row takes no part, which makes its coupling 0.
    d_query, d_key, d_value = fused_backward(d_out, query, key, value, out, -u, problem.scale)
    width = problem.query.shape[-1]
    d_v = d_key[..., width].to(u.dtype) / problem.scale  # the bias came in as bias / scale
    by_tokens = (gradient[..., :width].to(u.dtype) for gradient in (d_query, d_key))
    return *by_tokens, d_value[..., : problem.value.shape[-1]].to(u.dtype), d_v


def _weighted(tokens: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens and a column of ones, times weights brought to a size of 1 at most; and that size, per head.

    Gradients may be far below what float16 holds.
    """
    size = weights.abs().amax(-1, keepdim=True)
    size = torch.where(size > 0, size, 1.0)
    ones = tokens.new_ones(*tokens.shape[:-1], 1)
    return torch.cat([tokens, ones], -1) * (weights / size).unsqueeze(-1), size


def _column_step(problem: _Problem, u: Tensor, v: Tensor, d_v: Tensor, d_query: Tensor, d_key: Tensor) -> Tensor:
    """Through v = log_ratio - logsumexp_i(C + u): adds to the tokens' gradients in place and returns u's, (.., n)."""
    d_v = torch.where(problem.columns, d_v, 0.0)
    mean, _ = problem.to_queries(u, problem.query)
    d_key -= problem.scale * d_v.unsqueeze(-1) * mean
    weighted, size = _weighted(problem.key, d_v)
    summed, logsumexp = problem.to_keys(v, weighted)
    sums = (logsumexp + u - problem.log_ratio).clamp(max=math.log(v.shape[-1])).exp()  # rounding may forget the bound
    factor = size * torch.where(problem.rows, sums, 0.0)
    summed = summed * factor.unsqueeze(-1)
    d_query -= problem.scale * summed[..., :-1]
    return -summed[..., -1]


def _row_step(problem: _Problem, u: Tensor, v: Tensor, d_u: Tensor, d_query: Tensor, d_key: Tensor) -> Tensor:
    """Through u = -logsumexp_j(C + v): adds to the tokens' gradients in place and returns v's, (.., m)."""
    d_u = torch.where(problem.rows, d_u, 0.0)
    mean, _ = problem.to_keys(v, problem.key)
    d_query -= problem.scale * d_u.unsqueeze(-1) * mean
    weighted, size = _weighted(problem.query, d_u)
    summed, logsumexp = problem.to_queries(u, weighted)
    factor = size * torch.where(problem.columns, (logsumexp + v).clamp(max=math.log(u.shape[-1])).exp(), 0.0)
    summed = summed * factor.unsqueeze(-1)
    d_key -= problem.scale * summed[..., :-1]
    return -summed[..., -1]


@flash_streaming_attention_backward.register_fake
def _(output_gradient, query, key, value, *_):  # type: ignore[no-untyped-def]
    return tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value))


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    query, key, value, n_iters, scale, detached, query_mask, key_mask = inputs
    ctx.save_for_backward(query, key, value, *output, query_mask, key_mask)
    ctx.settings = n_iters, scale, detached
    ctx.set_materialize_grads(False)


def _backward(ctx, output_gradient, *_):  # type: ignore[no-untyped-def]
    if output_gradient is None:
        return (None,) * 8
    *tensors, query_mask, key_mask = ctx.saved_tensors
    gradients = flash_streaming_attention_backward(output_gradient, *tensors, *ctx.settings, query_mask, key_mask)
    return *gradients, *(None,) * 5


def _refuse_double_backward(ctx, *gradients):  # type: ignore[no-untyped-def]
    raise NotImplementedError(
        "the streaming backend of Sinkhorn attention has a hand-written backward that cannot be differentiated again; "
        "use backend='reference' for second derivatives"
    )


flash_streaming_attention.register_autograd(_backward, setup_context=_save)
flash_streaming_attention_backward.register_autograd(_refuse_double_backward)
