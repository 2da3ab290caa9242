# mypy: disable-error-code="no-untyped-def, import-untyped"
"""What the kernels of the Triton engine share: tokens, scores and entries of couplings. Device code only.

Everything is in powers of two: scores C are log2(e) * (scale * query @ key^T + bias), f and g are the row and column
potentials in log2, each minus a log-sum-exp, and damping multiplies g where it is used. The map of a row step is then
R = 2^(C + f + damping g), whose rows sum to 1, and that of a column step S = 2^(C + f + g), whose columns do. What the
columns should sum to enters the last map alone: constants cancel between a column step and the row step after it.

A token that takes no part has the potential -inf. Potentials lie as (half-steps, heads, length); tokens where their
strides say, a head being a batch and a head in it, `inner` of them in a batch.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_tokens(
    pointer, head, inner, batch_stride, head_stride, token_stride, index, taken, width,
    WIDTH: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Tokens (index, WIDTH) of one head; zeros where not taken, whatever lies there, and beyond the width."""
    column = tl.arange(0, WIDTH)
    # The base is a scalar of 64 bits, the offsets in a head are of 32: half the registers of a block of pointers.
    base = pointer + (head // inner) * batch_stride + (head % inner) * head_stride
    offset = index[:, None] * token_stride + column[None, :]
    tokens = tl.load(base + offset, mask=taken[:, None] & (column < width)[None, :], other=0.0)
    return tokens.to(tl.float32) if UPCAST else tokens


@triton.jit
def store_tokens(pointer, tokens, head, index, length, width, WIDTH: tl.constexpr):
    """Writes tokens (index, WIDTH) of one head, contiguous; those beyond `length` and `width` are left out."""
    column = tl.arange(0, WIDTH)
    base = pointer + head * length * width
    offset = index[:, None] * width + column[None, :]
    kept = (index < length)[:, None] & (column < width)[None, :]
    tl.store(base + offset, tokens.to(pointer.dtype.element_ty), mask=kept)


@triton.jit
def takes_part(mask, head, index, length, HAS_MASK: tl.constexpr):
    """Which of the tokens exist and are not masked."""
    taken = index < length
    if HAS_MASK:
        taken = taken & (tl.load(mask + head * length + index, mask=taken, other=0) != 0)
    return taken


@triton.jit
def load_potential(pointer, step, heads, head, index, length):
    """The potential of a half-step; -inf beyond the length."""
    base = pointer + (step * heads + head) * length
    return tl.load(base + index, mask=index < length, other=float("-inf"))


@triton.jit
def load_weights(pointer, step, heads, head, index, length):
    """The derivative by a potential; 0 beyond the length."""
    return tl.load(pointer + (step * heads + head) * length + index, mask=index < length, other=0.0)


@triton.jit
def store_vector(pointer, vector, step, heads, head, index, length):
    """Writes a potential or weights."""
    tl.store(pointer + (step * heads + head) * length + index, vector, mask=index < length)


@triton.jit
def map_offsets(x_stride, y_stride, X_BLOCK: tl.constexpr, Y_BLOCK: tl.constexpr):
    """Where the entries of a block of a map or bias lie, from its first one: of 32 bits, half the registers of 64."""
    return tl.arange(0, X_BLOCK)[:, None] * x_stride + tl.arange(0, Y_BLOCK)[None, :] * y_stride


@triton.jit
def first_entry(x_start, y_start, x_stride, y_stride):
    """Where the block begins, of 64 bits: a map of more than 46,340 tokens a side has more than 2^31 entries."""
    return tl.cast(x_start, tl.int64) * x_stride + tl.cast(y_start, tl.int64) * y_stride


@triton.jit
def log2_products(x, y, scale, PRECISION: tl.constexpr):
    """C without a bias of a block of tokens of both sides, in float32. `scale` holds log2(e) already."""
    return tl.dot(x, tl.trans(y), input_precision=PRECISION) * scale


@triton.jit
def log2_scores(
    x, y, scale, bias, x_start, y_start, x_stride, y_stride, taken, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr
):
    """C of a block of tokens of both sides, in float32, whichever side x is.

    Args:
        x: tokens of one side, from `x_start` on.
        y: of the other side, from `y_start` on.
        scale: as of `log2_products`.
        bias: where the bias of the head begins.
        x_start: the first token of the block.
        y_start: likewise.
        x_stride: of the bias.
        y_stride: of the bias.
        taken: which entries are read.
        HAS_BIAS: whether there is a bias.
        PRECISION: of products of float32 tokens.
    """
    scores = log2_products(x, y, scale, PRECISION)
    if HAS_BIAS:
        begin = bias + first_entry(x_start, y_start, x_stride, y_stride)
        entries = begin + map_offsets(x_stride, y_stride, x.shape[0], y.shape[0])
        scores += tl.load(entries, mask=taken, other=0.0).to(tl.float32) * LOG2E
    return scores


@triton.jit
def finite_or_zero(maximum):
    """What is subtracted before exp2: the maximum, or 0 where there is no support.

    The sum of the exponentials then is 1 at least, 0 without support, and NaN where there was a NaN, which a maximum
    passes over.
    """
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def add_exponentials(maximum, total, scores, AXIS: tl.constexpr):
    """A running maximum and sum of exponentials, and the same with the scores of another block along the axis."""
    higher = tl.maximum(maximum, tl.max(scores, AXIS))
    level = finite_or_zero(higher)
    total = total * tl.exp2(maximum - level) + tl.sum(tl.exp2(scores - tl.expand_dims(level, AXIS)), AXIS)
    return higher, total


@triton.jit
def potential_of(maximum, total, taken):
    """Minus the log-sum-exp; -inf for what is masked or has no support."""
    return tl.where(taken & (total != 0.0), -maximum - tl.log2(total), float("-inf"))


@triton.jit
def coupling_entries(exponent):
    """2^exponent. Where rows or columns are normalised to 1 no entry is above 1, of which the rounding of potentials
    near 1e30 knows nothing. A NaN stays one.
    """
    return tl.exp2(tl.minimum(exponent, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def what_columns_sum_to(g, n_valid, m_valid, damping, power):
    """The column sums of the map after a column step, as last one: (n_valid / m_valid)^power 2^((damping - 1) g).

    Undamped it is n_valid / m_valid; `power` is damping to the number of column steps.
    """
    log_ratio = tl.log2(tl.maximum(n_valid, 1.0)) - tl.log2(tl.maximum(m_valid, 1.0))
    return tl.where(g == float("-inf"), 0.0, tl.exp2(power * log_ratio + (damping - 1.0) * g))


@triton.jit
def kept_entries(
    keep, x_start, y_start, x_stride, y_stride, factor, taken, X_BLOCK: tl.constexpr, Y_BLOCK: tl.constexpr
):
    """What dropout multiplies the final coupling with: 0, or 1 / (1 - p); the head's mask begins at `keep`."""
    begin = keep + first_entry(x_start, y_start, x_stride, y_stride)
    kept = tl.load(begin + map_offsets(x_stride, y_stride, X_BLOCK, Y_BLOCK), mask=taken, other=0)
    return tl.where(kept != 0, factor, 0.0)
