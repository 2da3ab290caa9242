# mypy: disable-error-code="no-untyped-def, import-untyped"
"""Kernels of the Triton engine that go over the map tile by tile, for any number of queries and keys.

A program has a block of the tokens of one side, x, and goes through blocks of those of the other, y: queries and keys
in a row step, keys and queries in a column step, by the pointers and strides it is given. So no two programs write to
the same place, results do not depend on their order, and no map is in memory.
"""

import triton
import triton.language as tl

from .triton_functions import (
    add_exponentials,
    coupling_entries,
    finite_or_zero,
    first_entry,
    kept_entries,
    load_potential,
    load_tokens,
    load_weights,
    log2_scores,
    map_offsets,
    potential_of,
    store_tokens,
    store_vector,
    takes_part,
    what_columns_sum_to,
)


@triton.jit
def half_step_kernel(
    X, Y, OWN, OTHER, X_MASK, Y_MASK, BIAS, BIAS_HEAD,
    heads, inner, n_x, n_y, width, own_step, other_step, scale, other_factor,
    x_batch, x_head, x_token, y_batch, y_head, y_token, bias_x, bias_y,
    HAS_X_MASK: tl.constexpr, HAS_Y_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr, X_BLOCK: tl.constexpr, Y_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One half-step: the potential OWN[own_step] of x from `other_factor` OTHER[other_step] of y."""
    head = tl.program_id(0).to(tl.int64)
    x_start = tl.program_id(1) * X_BLOCK
    x_index = x_start + tl.arange(0, X_BLOCK)
    x_taken = takes_part(X_MASK, head, x_index, n_x, HAS_X_MASK)
    x = load_tokens(X, head, inner, x_batch, x_head, x_token, x_index, x_taken, width, WIDTH, UPCAST)
    bias = BIAS + tl.load(BIAS_HEAD + head) if HAS_BIAS else BIAS
    maximum = tl.full([X_BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([X_BLOCK], tl.float32)
    for start in range(0, n_y, Y_BLOCK):
        y_index = start + tl.arange(0, Y_BLOCK)
        y_taken = takes_part(Y_MASK, head, y_index, n_y, HAS_Y_MASK)
        y = load_tokens(Y, head, inner, y_batch, y_head, y_token, y_index, y_taken, width, WIDTH, UPCAST)
        taken = x_taken[:, None] & y_taken[None, :]
        scores = log2_scores(x, y, scale, bias, x_start, start, bias_x, bias_y, taken, HAS_BIAS, PRECISION)
        other = load_potential(OTHER, other_step, heads, head, y_index, n_y)
        maximum, total = add_exponentials(maximum, total, scores + other_factor * other[None, :], 1)
    store_vector(OWN, potential_of(maximum, total, x_taken), own_step, heads, head, x_index, n_x)


@triton.jit
def column_sums_kernel(
    F, G, COLUMN_SUMS, heads, n, m, pairs, damping, power, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """One program per head: what the columns sum to after a last column step, (heads, m)."""
    head = tl.program_id(0).to(tl.int64)
    n_valid = 0.0
    for start in range(0, n, ROWS):
        f = load_potential(F, pairs - 1, heads, head, start + tl.arange(0, ROWS), n)
        n_valid += tl.sum((f != float("-inf")).to(tl.float32))
    m_valid = 0.0
    for start in range(0, m, COLUMNS):
        g = load_potential(G, pairs, heads, head, start + tl.arange(0, COLUMNS), m)
        m_valid += tl.sum((g != float("-inf")).to(tl.float32))
    for start in range(0, m, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        g = load_potential(G, pairs, heads, head, column, m)
        sums = what_columns_sum_to(g, n_valid, m_valid, damping, power)
        store_vector(COLUMN_SUMS, sums, 0, heads, head, column, m)


@triton.jit
def output_kernel(
    Q, K, V, OUT, F, G, COLUMN_SUMS, QUERY_MASK, KEY_MASK, BIAS, BIAS_HEAD, KEEP,
    heads, inner, n, m, width, value_width, pairs, last, scale, damping, keep_factor,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, bias_row, bias_column,
    EVEN: tl.constexpr, HAS_QUERY_MASK: tl.constexpr, HAS_KEY_MASK: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_KEEP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """One program per head and block of rows: the output, and the last row step with it where it comes last.

    A last row step is softmax attention with g for a bias, its sums gathered beside the output.
    """
    head = tl.program_id(0).to(tl.int64)
    first_row = tl.program_id(1) * ROWS
    row = first_row + tl.arange(0, ROWS)
    row_taken = takes_part(QUERY_MASK, head, row, n, HAS_QUERY_MASK)
    query = load_tokens(Q, head, inner, q_batch, q_head, q_token, row, row_taken, width, WIDTH, UPCAST)
    bias = BIAS + tl.load(BIAS_HEAD + head) if HAS_BIAS else BIAS
    f = load_potential(F, last, heads, head, row, n) if EVEN else tl.zeros([ROWS], tl.float32)
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    for start in range(0, m, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        column_taken = takes_part(KEY_MASK, head, column, m, HAS_KEY_MASK)
        key = load_tokens(K, head, inner, k_batch, k_head, k_token, column, column_taken, width, WIDTH, UPCAST)
        value = load_tokens(
            V, head, inner, v_batch, v_head, v_token, column, column_taken, value_width, VALUE_WIDTH, UPCAST
        )
        taken = row_taken[:, None] & column_taken[None, :]
        scores = log2_scores(
            query, key, scale, bias, first_row, start, bias_row, bias_column, taken, HAS_BIAS, PRECISION
        )
        g = load_potential(G, pairs, heads, head, column, m)
        if EVEN:
            sums = load_weights(COLUMN_SUMS, 0, heads, head, column, m)
            coupling = coupling_entries(scores + f[:, None] + g[None, :]) * sums[None, :]
        else:
            shifted = scores + damping * g[None, :]
            higher = tl.maximum(maximum, tl.max(shifted, 1))
            level = finite_or_zero(higher)
            coupling = tl.exp2(shifted - level[:, None])
            fading = tl.exp2(maximum - level)
            total = total * fading + tl.sum(coupling, 1)
            out *= fading[:, None]
            maximum = higher
        if HAS_KEEP:
            coupling *= kept_entries(KEEP + head * n * m, first_row, start, m, 1, keep_factor, taken, ROWS, COLUMNS)
        out += tl.dot(coupling.to(value.dtype), value, input_precision=PRECISION)
    if not EVEN:
        f = potential_of(maximum, total, row_taken)
        store_vector(F, f, last, heads, head, row, n)
        # Normalised by the sum itself: the rounding of a large potential does not reach the output.
        out = tl.where((f != float("-inf"))[:, None], out / total[:, None], 0.0)
    store_tokens(OUT, out, head, row, n, value_width, VALUE_WIDTH)


@triton.jit
def reverse_kernel(
    X, Y, X_OUT, Y_OUT, OWN, OTHER, WEIGHTS, RESULT, COLUMN_SUMS, X_MASK, Y_MASK, BIAS, BIAS_HEAD, KEEP,
    heads, inner, n_x, n_y, width, value_width, own_step, other_step, weights_step, result_step,
    scale, own_factor, other_factor, factor, keep_factor,
    x_batch, x_head, x_token, y_batch, y_head, y_token,
    x_out_batch, x_out_head, x_out_token, y_out_batch, y_out_head, y_out_token, bias_x, bias_y, keep_x, keep_y,
    FROM_OUTPUT: tl.constexpr, WEIGHTED: tl.constexpr, ADDED: tl.constexpr, EVEN: tl.constexpr, BY_ROWS: tl.constexpr,
    HAS_X_MASK: tl.constexpr, HAS_Y_MASK: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, X_BLOCK: tl.constexpr, Y_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """A half-step in reverse: what reaches the potential of x, written to RESULT[result_step].

    With the map M = 2^(C + own_factor OWN + other_factor OTHER) it is `factor` times the sums over y of

        - M * WEIGHTS[weights_step] of y, where WEIGHTED, and
        + M * the column sums where EVEN * dropout * dL/dM, where FROM_OUTPUT: dL/dM is X_OUT . Y_OUT, which are the
          gradient of the output and the values, or the other way round,

    plus what stands in RESULT already, where ADDED.
    """
    head = tl.program_id(0).to(tl.int64)
    x_start = tl.program_id(1) * X_BLOCK
    x_index = x_start + tl.arange(0, X_BLOCK)
    x_taken = takes_part(X_MASK, head, x_index, n_x, HAS_X_MASK)
    x = load_tokens(X, head, inner, x_batch, x_head, x_token, x_index, x_taken, width, WIDTH, UPCAST)
    bias = BIAS + tl.load(BIAS_HEAD + head) if HAS_BIAS else BIAS
    own = own_factor * load_potential(OWN, own_step, heads, head, x_index, n_x)
    if FROM_OUTPUT:
        x_out = load_tokens(
            X_OUT, head, inner, x_out_batch, x_out_head, x_out_token, x_index, x_taken, value_width, VALUE_WIDTH, UPCAST
        )
    result = tl.zeros([X_BLOCK], tl.float32)
    for start in range(0, n_y, Y_BLOCK):
        y_index = start + tl.arange(0, Y_BLOCK)
        y_taken = takes_part(Y_MASK, head, y_index, n_y, HAS_Y_MASK)
        y = load_tokens(Y, head, inner, y_batch, y_head, y_token, y_index, y_taken, width, WIDTH, UPCAST)
        taken = x_taken[:, None] & y_taken[None, :]
        scores = log2_scores(x, y, scale, bias, x_start, start, bias_x, bias_y, taken, HAS_BIAS, PRECISION)
        other = other_factor * load_potential(OTHER, other_step, heads, head, y_index, n_y)
        coupling = coupling_entries(scores + own[:, None] + other[None, :])
        if FROM_OUTPUT:
            y_out = load_tokens(
                Y_OUT, head, inner, y_out_batch, y_out_head, y_out_token, y_index, y_taken,
                value_width, VALUE_WIDTH, UPCAST,
            )  # fmt: skip
            weighted = coupling * tl.dot(x_out, tl.trans(y_out), input_precision=PRECISION)
            if EVEN and BY_ROWS:
                weighted *= load_weights(COLUMN_SUMS, 0, heads, head, y_index, n_y)[None, :]
            if HAS_KEEP:
                weighted *= kept_entries(
                    KEEP + head * n_x * n_y, x_start, start, keep_x, keep_y, keep_factor, taken, X_BLOCK, Y_BLOCK
                )
            result += tl.sum(weighted, 1)
        if WEIGHTED:
            weights = load_weights(WEIGHTS, weights_step, heads, head, y_index, n_y)
            result -= tl.sum(coupling * weights[None, :], 1)
    if EVEN and FROM_OUTPUT and not BY_ROWS:
        result *= load_weights(COLUMN_SUMS, 0, heads, head, x_index, n_x)
    result *= factor
    if ADDED:
        result += load_weights(RESULT, result_step, heads, head, x_index, n_x)
    store_vector(RESULT, result, result_step, heads, head, x_index, n_x)


@triton.jit
def gradient_tile(
    query, key, value, d_out, F, G, D_F, D_G, COLUMN_SUMS, bias, KEEP, heads, head, first_row, first_column,
    row_taken, column_taken, n, m, pairs, last, scale, damping, keep_factor, bias_row, bias_column,
    EVEN: tl.constexpr, DETACHED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The final coupling after dropout and dL/dC (natural logarithm) of a block of rows and columns.

    dL/dC = W - sum over row steps of w_i R_ij - sum over column steps of w_j S_ij. Each half-step has an exponential of
    its own: as one product of rank T they would be quotients of scalings, which overflow where scores are large.
    """
    ROWS: tl.constexpr = query.shape[0]
    COLUMNS: tl.constexpr = key.shape[0]
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    taken = row_taken[:, None] & column_taken[None, :]
    scores = log2_scores(
        query, key, scale, bias, first_row, first_column, bias_row, bias_column, taken, HAS_BIAS, PRECISION
    )
    f = load_potential(F, last, heads, head, row, n)
    g = load_potential(G, pairs, heads, head, column, m)
    coupling = coupling_entries(scores + f[:, None] + (g if EVEN else damping * g)[None, :])
    kept = coupling
    if EVEN:
        kept = coupling * load_weights(COLUMN_SUMS, 0, heads, head, column, m)[None, :]
    if HAS_KEEP:
        kept *= kept_entries(KEEP + head * n * m, first_row, first_column, m, 1, keep_factor, taken, ROWS, COLUMNS)
    d_scores = kept * tl.dot(d_out, tl.trans(value), input_precision=PRECISION)
    if not EVEN:
        d_scores -= load_weights(D_F, last, heads, head, row, n)[:, None] * coupling
    elif DETACHED:
        below = damping * load_potential(G, last, heads, head, column, m)
        row_map = coupling_entries(scores + f[:, None] + below[None, :])
        d_scores -= load_weights(D_F, last, heads, head, row, n)[:, None] * row_map
    if not DETACHED:
        for pair in range(pairs):
            shifted = scores + load_potential(F, pair, heads, head, row, n)[:, None]
            below = damping * load_potential(G, pair, heads, head, column, m)
            row_map = coupling_entries(shifted + below[None, :])
            d_scores -= load_weights(D_F, pair, heads, head, row, n)[:, None] * row_map
            column_map = coupling_entries(shifted + load_potential(G, pair + 1, heads, head, column, m)[None, :])
            d_scores -= load_weights(D_G, pair, heads, head, column, m)[None, :] * column_map
    return kept, d_scores


@triton.jit
def query_gradient_kernel(
    Q, K, V, D_OUT, F, G, D_F, D_G, COLUMN_SUMS, QUERY_MASK, KEY_MASK, BIAS, BIAS_HEAD, KEEP, D_Q, D_BIAS,
    heads, inner, n, m, width, value_width, pairs, last, scale, damping, query_factor, keep_factor,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, o_batch, o_head, o_token,
    bias_row, bias_column,
    EVEN: tl.constexpr, DETACHED: tl.constexpr, HAS_QUERY_MASK: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, BIAS_GRADIENT: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """One program per head and block of rows: dL/dquery, and dL/dC itself (heads, n, m) where a bias needs it."""
    head = tl.program_id(0).to(tl.int64)
    first_row = tl.program_id(1) * ROWS
    row = first_row + tl.arange(0, ROWS)
    row_taken = takes_part(QUERY_MASK, head, row, n, HAS_QUERY_MASK)
    query = load_tokens(Q, head, inner, q_batch, q_head, q_token, row, row_taken, width, WIDTH, UPCAST)
    d_out = load_tokens(D_OUT, head, inner, o_batch, o_head, o_token, row, row_taken, value_width, VALUE_WIDTH, UPCAST)
    bias = BIAS + tl.load(BIAS_HEAD + head) if HAS_BIAS else BIAS
    d_query = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(0, m, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        column_taken = takes_part(KEY_MASK, head, column, m, HAS_KEY_MASK)
        key = load_tokens(K, head, inner, k_batch, k_head, k_token, column, column_taken, width, WIDTH, UPCAST)
        value = load_tokens(
            V, head, inner, v_batch, v_head, v_token, column, column_taken, value_width, VALUE_WIDTH, UPCAST
        )
        _, d_scores = gradient_tile(
            query, key, value, d_out, F, G, D_F, D_G, COLUMN_SUMS, bias, KEEP, heads, head, first_row, start,
            row_taken, column_taken, n, m, pairs, last, scale, damping, keep_factor, bias_row, bias_column,
            EVEN, DETACHED, HAS_BIAS, HAS_KEEP, PRECISION,
        )  # fmt: skip
        if BIAS_GRADIENT:
            inside = (row < n)[:, None] & (column < m)[None, :]
            begin = D_BIAS + head * n * m + first_entry(first_row, start, m, 1)
            tl.store(begin + map_offsets(m, 1, ROWS, COLUMNS), d_scores, mask=inside)
        d_query += tl.dot(d_scores.to(key.dtype), key, input_precision=PRECISION)
    store_tokens(D_Q, d_query * query_factor, head, row, n, width, WIDTH)


@triton.jit
def key_gradient_kernel(
    Q, K, V, D_OUT, F, G, D_F, D_G, COLUMN_SUMS, QUERY_MASK, KEY_MASK, BIAS, BIAS_HEAD, KEEP, D_K, D_V,
    heads, inner, n, m, width, value_width, pairs, last, scale, damping, query_factor, keep_factor,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, o_batch, o_head, o_token,
    bias_row, bias_column,
    EVEN: tl.constexpr, DETACHED: tl.constexpr, HAS_QUERY_MASK: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_KEEP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """One program per head and block of columns: dL/dkey and dL/dvalue. `query_factor` is the scale as it was given."""
    head = tl.program_id(0).to(tl.int64)
    first_column = tl.program_id(1) * COLUMNS
    column = first_column + tl.arange(0, COLUMNS)
    column_taken = takes_part(KEY_MASK, head, column, m, HAS_KEY_MASK)
    key = load_tokens(K, head, inner, k_batch, k_head, k_token, column, column_taken, width, WIDTH, UPCAST)
    value = load_tokens(
        V, head, inner, v_batch, v_head, v_token, column, column_taken, value_width, VALUE_WIDTH, UPCAST
    )
    bias = BIAS + tl.load(BIAS_HEAD + head) if HAS_BIAS else BIAS
    d_key = tl.zeros([COLUMNS, WIDTH], tl.float32)
    d_value = tl.zeros([COLUMNS, VALUE_WIDTH], tl.float32)
    for start in range(0, n, ROWS):
        row = start + tl.arange(0, ROWS)
        row_taken = takes_part(QUERY_MASK, head, row, n, HAS_QUERY_MASK)
        query = load_tokens(Q, head, inner, q_batch, q_head, q_token, row, row_taken, width, WIDTH, UPCAST)
        d_out = load_tokens(
            D_OUT, head, inner, o_batch, o_head, o_token, row, row_taken, value_width, VALUE_WIDTH, UPCAST
        )
        kept, d_scores = gradient_tile(
            query, key, value, d_out, F, G, D_F, D_G, COLUMN_SUMS, bias, KEEP, heads, head, start, first_column,
            row_taken, column_taken, n, m, pairs, last, scale, damping, keep_factor, bias_row, bias_column,
            EVEN, DETACHED, HAS_BIAS, HAS_KEEP, PRECISION,
        )  # fmt: skip
        d_value += tl.dot(tl.trans(kept).to(d_out.dtype), d_out, input_precision=PRECISION)
        d_key += tl.dot(tl.trans(d_scores).to(query.dtype), query, input_precision=PRECISION)
    store_tokens(D_K, d_key * query_factor, head, column, m, width, WIDTH)
    store_tokens(D_V, d_value, head, column, m, value_width, VALUE_WIDTH)
