# mypy: disable-error-code="no-untyped-def, import-untyped"
"""Kernels of the Triton engine. Device code only; `triton.py` calls it and explains the method.

Everything is in powers of two: scores C are log2(e) * (scale * query @ key^T + bias), f and g are the row and column
potentials in log2, and a coupling is 2^(C + f_i + g_j). A row or column that takes no part has the potential -inf.
Tensors are contiguous, heads first: query (heads, n, width), f (heads, row steps, n), g (heads, pairs + 1, m), where a
pair is a row step and the column step after it and g_0 = 0.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
#: Products of float32 tokens are exact products of float32: tf32 would be off by 2^-11 times the scores.
PRECISION = tl.constexpr("ieee")


@triton.jit
def load_tokens(pointer, head, index, taken, length, width, WIDTH: tl.constexpr):
    """Tokens (index, WIDTH) of one head; zeros where not taken, whatever lies there, and beyond the width."""
    column = tl.arange(0, WIDTH)
    # The base is a scalar of 64 bits, the offsets in a head are of 32: half the registers of a block of pointers.
    base = pointer + head * length * width
    offset = index[:, None] * width + column[None, :]
    return tl.load(base + offset, mask=taken[:, None] & (column < width)[None, :], other=0.0)


@triton.jit
def store_tokens(pointer, tokens, head, index, length, width, WIDTH: tl.constexpr):
    """Writes tokens (index, WIDTH) of one head; those beyond `length` and numbers beyond `width` are left out."""
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
def log2_scores(query, key, scale, bias, bias_head, row, column, bias_row, bias_column, taken, HAS_BIAS: tl.constexpr):
    """C of a block of queries and keys, (rows, columns), in float32. `scale` holds log2(e) already."""
    scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
    if HAS_BIAS:
        offset = row[:, None] * bias_row + column[None, :] * bias_column
        scores += tl.load(bias + bias_head + offset, mask=taken, other=0.0).to(tl.float32) * LOG2E
    return scores


@triton.jit
def finite_or_zero(maximum):
    """What is subtracted before exp2: the maximum, or 0 where there is no support.

    The sum of the exponentials then is 1 at least, 0 without support, and NaN where there was a NaN, which a maximum
    passes over.
    """
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def coupling_entries(exponent, bound):
    """2^exponent. Where columns are normalised to 1, as where rows are, no entry is above 1, of which the rounding of
    potentials near 1e30 knows nothing. A NaN stays one.
    """
    return tl.exp2(tl.minimum(exponent, bound, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def kept_entries(keep, head, row, column, n, m, factor, inside):
    """What dropout multiplies the final coupling with: 0, or 1 / (1 - p)."""
    kept = tl.load(keep + head * n * m + (row[:, None] * m + column[None, :]), mask=inside, other=0)
    return tl.where(kept != 0, factor, 0.0)


@triton.jit
def forward_kernel(
    Q, K, V, OUT, F, G, LOG_RATIO, QUERY_MASK, KEY_MASK, BIAS, BIAS_HEAD, KEEP,
    n, m, width, value_width, pairs, row_steps, scale, keep_factor, bias_row, bias_column,
    EVEN: tl.constexpr, HAS_QUERY_MASK: tl.constexpr, HAS_KEY_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_KEEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """One program per head: all half-steps, then the output.

    The keys stay on the chip; each pair of half-steps goes once through the blocks of rows. The log-sum-exp of a column
    is gathered over the blocks with a running maximum, so that no scale of the scores under- or overflows.
    """
    head = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    column_taken = takes_part(KEY_MASK, head, column, m, HAS_KEY_MASK)
    key = load_tokens(K, head, column, column_taken, m, width, WIDTH)
    bias_head = tl.load(BIAS_HEAD + head) if HAS_BIAS else head
    g = tl.where(column_taken, 0.0, float("-inf"))
    tl.store(G + head * (pairs + 1) * m + column, g, mask=column < m)
    log_ratio = 0.0
    for pair in range(pairs):
        top = tl.full([COLUMNS], float("-inf"), tl.float32)
        total = tl.zeros([COLUMNS], tl.float32)
        n_valid = 0.0
        for start in range(0, n, ROWS):
            row = start + tl.arange(0, ROWS)
            row_taken = takes_part(QUERY_MASK, head, row, n, HAS_QUERY_MASK)
            query = load_tokens(Q, head, row, row_taken, n, width, WIDTH)
            taken = row_taken[:, None] & column_taken[None, :]
            scores = log2_scores(
                query, key, scale, BIAS, bias_head, row, column, bias_row, bias_column, taken, HAS_BIAS
            )
            peak = finite_or_zero(tl.max(scores + g[None, :], 1))
            # In the order in which the peak was found, so that the largest is 1 whatever the scores' rounding.
            row_total = tl.sum(tl.exp2((scores + g[None, :]) - peak[:, None]), 1)
            row_valid = row_taken & (row_total != 0.0)
            f = tl.where(row_valid, -peak - tl.log2(row_total), float("-inf"))
            tl.store(F + (head * row_steps + pair) * n + row, f, mask=row < n)
            scores += f[:, None]
            higher = tl.maximum(top, tl.max(scores, 0))
            level = finite_or_zero(higher)
            total = total * tl.exp2(top - level) + tl.sum(tl.exp2(scores - level[None, :]), 0)
            top = higher
            n_valid += tl.sum(row_valid.to(tl.float32))
        column_valid = column_taken & (total != 0.0)
        m_valid = tl.sum(column_valid.to(tl.float32))
        log_ratio = tl.log2(tl.maximum(n_valid, 1.0)) - tl.log2(tl.maximum(m_valid, 1.0))
        g = tl.where(column_valid, log_ratio - top - tl.log2(total), float("-inf"))
        tl.store(G + (head * (pairs + 1) + pair + 1) * m + column, g, mask=column < m)
    tl.store(LOG_RATIO + head, log_ratio)
    if EVEN:
        tl.debug_barrier()  # the row potentials that are read now may have been written by other threads
    value = load_tokens(V, head, column, column_taken, m, value_width, VALUE_WIDTH)
    for start in range(0, n, ROWS):
        row = start + tl.arange(0, ROWS)
        row_taken = takes_part(QUERY_MASK, head, row, n, HAS_QUERY_MASK)
        query = load_tokens(Q, head, row, row_taken, n, width, WIDTH)
        taken = row_taken[:, None] & column_taken[None, :]
        scores = log2_scores(query, key, scale, BIAS, bias_head, row, column, bias_row, bias_column, taken, HAS_BIAS)
        if EVEN:
            f = tl.load(F + (head * row_steps + pairs - 1) * n + row, mask=row < n, other=float("-inf"))
            coupling = coupling_entries(scores + f[:, None] + g[None, :], log_ratio)
            normalizer = tl.full([ROWS], 1.0, tl.float32)
        else:
            peak = finite_or_zero(tl.max(scores + g[None, :], 1))
            coupling = tl.exp2((scores + g[None, :]) - peak[:, None])
            row_total = tl.sum(coupling, 1)
            row_valid = row_taken & (row_total != 0.0)
            f = tl.where(row_valid, -peak - tl.log2(row_total), float("-inf"))
            tl.store(F + (head * row_steps + pairs) * n + row, f, mask=row < n)
            # Normalised by the sum itself: the rounding of a large potential does not reach the output.
            normalizer = tl.where(row_valid, 1.0 / row_total, 0.0)
            coupling = tl.where(row_valid[:, None], coupling, 0.0)
        if HAS_KEEP:
            coupling *= kept_entries(KEEP, head, row, column, n, m, keep_factor, taken)
        out = tl.dot(coupling.to(value.dtype), value, input_precision=PRECISION) * normalizer[:, None]
        store_tokens(OUT, out, head, row, n, value_width, VALUE_WIDTH)


@triton.jit
def potential_gradient_kernel(
    Q, K, V, D_OUT, F, G, D_F, D_G, LOG_RATIO, QUERY_MASK, KEY_MASK, BIAS, BIAS_HEAD, KEEP,
    n, m, width, value_width, pairs, row_steps, scale, keep_factor, bias_row, bias_column,
    EVEN: tl.constexpr, DETACHED: tl.constexpr, HAS_QUERY_MASK: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """One program per head: the loss differentiated by every potential, D_F (as F) and D_G (heads, pairs, m).

    With W = P * dL/dP, the derivatives by the last potentials are W's row and column sums; a row step passes
    -sum_i df_i R_ij on to its g, a column step -sum_j dg_j S_ij to its f, where R = 2^(C + f + g) sums to 1 in rows and
    S = 2^(C + f + g - log ratio) in columns. Each pair goes once through the blocks of rows.
    """
    head = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    column_taken = takes_part(KEY_MASK, head, column, m, HAS_KEY_MASK)
    key = load_tokens(K, head, column, column_taken, m, width, WIDTH)
    value = load_tokens(V, head, column, column_taken, m, value_width, VALUE_WIDTH)
    bias_head = tl.load(BIAS_HEAD + head) if HAS_BIAS else head
    log_ratio = tl.load(LOG_RATIO + head)
    last = row_steps - 1
    g = tl.load(G + (head * (pairs + 1) + pairs) * m + column, mask=column < m, other=float("-inf"))
    d_g = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, n, ROWS):
        row = start + tl.arange(0, ROWS)
        row_taken = takes_part(QUERY_MASK, head, row, n, HAS_QUERY_MASK)
        query = load_tokens(Q, head, row, row_taken, n, width, WIDTH)
        d_out = load_tokens(D_OUT, head, row, row_taken, n, value_width, VALUE_WIDTH)
        taken = row_taken[:, None] & column_taken[None, :]
        scores = log2_scores(query, key, scale, BIAS, bias_head, row, column, bias_row, bias_column, taken, HAS_BIAS)
        f = tl.load(F + (head * row_steps + last) * n + row, mask=row < n, other=float("-inf"))
        coupling = coupling_entries(scores + f[:, None] + g[None, :], log_ratio if EVEN else 0.0)
        weighted = coupling * tl.dot(d_out, tl.trans(value), input_precision=PRECISION)
        if HAS_KEEP:
            weighted *= kept_entries(KEEP, head, row, column, n, m, keep_factor, taken)
        d_f = tl.sum(weighted, 1)
        tl.store(D_F + (head * row_steps + last) * n + row, d_f, mask=row < n)
        if not EVEN:
            weighted -= d_f[:, None] * coupling
        d_g += tl.sum(weighted, 0)
    if not DETACHED:
        for step in range(pairs):
            pair = pairs - 1 - step
            tl.store(D_G + (head * pairs + pair) * m + column, d_g, mask=column < m)
            below = tl.load(G + (head * (pairs + 1) + pair) * m + column, mask=column < m, other=float("-inf"))
            passed = tl.zeros([COLUMNS], tl.float32)
            tl.debug_barrier()  # D_F of the step before was written, and is read, by different threads
            for start in range(0, n, ROWS):
                row = start + tl.arange(0, ROWS)
                row_taken = takes_part(QUERY_MASK, head, row, n, HAS_QUERY_MASK)
                query = load_tokens(Q, head, row, row_taken, n, width, WIDTH)
                taken = row_taken[:, None] & column_taken[None, :]
                scores = log2_scores(
                    query, key, scale, BIAS, bias_head, row, column, bias_row, bias_column, taken, HAS_BIAS
                )
                f_base = (head * row_steps + pair) * n
                scores += tl.load(F + f_base + row, mask=row < n, other=float("-inf"))[:, None]
                d_f = -tl.sum(coupling_entries(scores + (g - log_ratio)[None, :], 0.0) * d_g[None, :], 1)
                if EVEN:
                    d_f += tl.load(D_F + f_base + row, mask=(row < n) & (pair == last), other=0.0)
                tl.store(D_F + f_base + row, d_f, mask=row < n)
                passed -= tl.sum(d_f[:, None] * coupling_entries(scores + below[None, :], 0.0), 0)
            d_g = passed
            g = below


@triton.jit
def gradient_tile(
    query, key, value, d_out, F, G, D_F, D_G, log_ratio, BIAS, bias_head, KEEP, head, row, column, row_taken,
    column_taken, n, m, pairs, row_steps, scale, keep_factor, bias_row, bias_column,
    EVEN: tl.constexpr, DETACHED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr,
):  # fmt: skip
    """The final coupling after dropout and dL/dC (natural logarithm) of a block of rows and columns.

    dL/dC = W - sum over row steps of df_i R_ij - sum over column steps of dg_j S_ij.
    """
    taken = row_taken[:, None] & column_taken[None, :]
    scores = log2_scores(query, key, scale, BIAS, bias_head, row, column, bias_row, bias_column, taken, HAS_BIAS)
    last = row_steps - 1
    in_rows, in_columns = row < n, column < m
    f = tl.load(F + (head * row_steps + last) * n + row, mask=in_rows, other=float("-inf"))
    g = tl.load(G + (head * (pairs + 1) + pairs) * m + column, mask=in_columns, other=float("-inf"))
    coupling = coupling_entries(scores + f[:, None] + g[None, :], log_ratio if EVEN else 0.0)
    kept = coupling
    if HAS_KEEP:
        kept = coupling * kept_entries(KEEP, head, row, column, n, m, keep_factor, taken)
    d_scores = kept * tl.dot(d_out, tl.trans(value), input_precision=PRECISION)
    if not EVEN:
        d_f = tl.load(D_F + (head * row_steps + last) * n + row, mask=in_rows, other=0.0)
        d_scores -= d_f[:, None] * coupling
    elif DETACHED:
        d_f = tl.load(D_F + (head * row_steps + last) * n + row, mask=in_rows, other=0.0)
        below = tl.load(G + (head * (pairs + 1) + last) * m + column, mask=in_columns, other=float("-inf"))
        d_scores -= d_f[:, None] * coupling_entries(scores + f[:, None] + below[None, :], 0.0)
    if not DETACHED:
        for pair in range(pairs):
            f = tl.load(F + (head * row_steps + pair) * n + row, mask=in_rows, other=float("-inf"))
            d_f = tl.load(D_F + (head * row_steps + pair) * n + row, mask=in_rows, other=0.0)
            below = tl.load(G + (head * (pairs + 1) + pair) * m + column, mask=in_columns, other=float("-inf"))
            above = tl.load(G + (head * (pairs + 1) + pair + 1) * m + column, mask=in_columns, other=float("-inf"))
            d_g = tl.load(D_G + (head * pairs + pair) * m + column, mask=in_columns, other=0.0)
            shifted = scores + f[:, None]
            d_scores -= d_f[:, None] * coupling_entries(shifted + below[None, :], 0.0)
            d_scores -= d_g[None, :] * coupling_entries(shifted + (above - log_ratio)[None, :], 0.0)
    return kept, d_scores


@triton.jit
def query_gradient_kernel(
    Q, K, V, D_OUT, F, G, D_F, D_G, LOG_RATIO, QUERY_MASK, KEY_MASK, BIAS, BIAS_HEAD, KEEP, D_Q, D_BIAS,
    n, m, width, value_width, pairs, row_steps, scale, query_factor, keep_factor, bias_row, bias_column,
    EVEN: tl.constexpr, DETACHED: tl.constexpr, HAS_QUERY_MASK: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, BIAS_GRADIENT: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """One program per head and block of rows: dL/dquery, and dL/dC itself (heads, n, m) where a bias needs it."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row_taken = takes_part(QUERY_MASK, head, row, n, HAS_QUERY_MASK)
    query = load_tokens(Q, head, row, row_taken, n, width, WIDTH)
    d_out = load_tokens(D_OUT, head, row, row_taken, n, value_width, VALUE_WIDTH)
    bias_head = tl.load(BIAS_HEAD + head) if HAS_BIAS else head
    log_ratio = tl.load(LOG_RATIO + head)
    d_query = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, m, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        column_taken = takes_part(KEY_MASK, head, column, m, HAS_KEY_MASK)
        key = load_tokens(K, head, column, column_taken, m, width, WIDTH)
        value = load_tokens(V, head, column, column_taken, m, value_width, VALUE_WIDTH)
        _, d_scores = gradient_tile(
            query, key, value, d_out, F, G, D_F, D_G, log_ratio, BIAS, bias_head, KEEP, head, row, column, row_taken,
            column_taken, n, m, pairs, row_steps, scale, keep_factor, bias_row, bias_column,
            EVEN, DETACHED, HAS_BIAS, HAS_KEEP,
        )  # fmt: skip
        if BIAS_GRADIENT:
            inside = (row < n)[:, None] & (column < m)[None, :]
            tl.store(D_BIAS + head * n * m + (row[:, None] * m + column[None, :]), d_scores, mask=inside)
        d_query += tl.dot(d_scores.to(key.dtype), key, input_precision=PRECISION)
    store_tokens(D_Q, d_query * query_factor, head, row, n, width, WIDTH)


@triton.jit
def key_gradient_kernel(
    Q, K, V, D_OUT, F, G, D_F, D_G, LOG_RATIO, QUERY_MASK, KEY_MASK, BIAS, BIAS_HEAD, KEEP, D_K, D_V,
    n, m, width, value_width, pairs, row_steps, scale, query_factor, keep_factor, bias_row, bias_column,
    EVEN: tl.constexpr, DETACHED: tl.constexpr, HAS_QUERY_MASK: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """One program per head and block of columns: dL/dkey and dL/dvalue. `query_factor` is the scale as it was given."""
    head = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_taken = takes_part(KEY_MASK, head, column, m, HAS_KEY_MASK)
    key = load_tokens(K, head, column, column_taken, m, width, WIDTH)
    value = load_tokens(V, head, column, column_taken, m, value_width, VALUE_WIDTH)
    bias_head = tl.load(BIAS_HEAD + head) if HAS_BIAS else head
    log_ratio = tl.load(LOG_RATIO + head)
    d_key = tl.zeros([COLUMNS, WIDTH], tl.float32)
    d_value = tl.zeros([COLUMNS, VALUE_WIDTH], tl.float32)
    for start in range(0, n, ROWS):
        row = start + tl.arange(0, ROWS)
        row_taken = takes_part(QUERY_MASK, head, row, n, HAS_QUERY_MASK)
        query = load_tokens(Q, head, row, row_taken, n, width, WIDTH)
        d_out = load_tokens(D_OUT, head, row, row_taken, n, value_width, VALUE_WIDTH)
        kept, d_scores = gradient_tile(
            query, key, value, d_out, F, G, D_F, D_G, log_ratio, BIAS, bias_head, KEEP, head, row, column, row_taken,
            column_taken, n, m, pairs, row_steps, scale, keep_factor, bias_row, bias_column,
            EVEN, DETACHED, HAS_BIAS, HAS_KEEP,
        )  # fmt: skip
        d_value += tl.dot(tl.trans(kept).to(d_out.dtype), d_out, input_precision=PRECISION)
        d_key += tl.dot(tl.trans(d_scores).to(query.dtype), query, input_precision=PRECISION)
    store_tokens(D_K, d_key * query_factor, head, column, m, width, WIDTH)
    store_tokens(D_V, d_value, head, column, m, value_width, VALUE_WIDTH)
