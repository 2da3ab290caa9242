# mypy: disable-error-code="no-untyped-def, import-untyped"
"""Kernels of the Triton engine for heads whose keys fit on the chip: all half-steps in one launch.

One program per head keeps the keys and goes once through blocks of queries for each pair of half-steps. What is larger
goes to triton_tiles.py, whose results these are.
"""

import triton
import triton.language as tl

from .triton_functions import (
    add_exponentials,
    coupling_entries,
    finite_or_zero,
    load_potential,
    load_tokens,
    load_weights,
    log2_products,
    potential_of,
    store_tokens,
    store_vector,
    takes_part,
    what_columns_sum_to,
)


@triton.jit
def forward_kernel(
    Q, K, V, OUT, F, G, QUERY_MASK, KEY_MASK,
    heads, inner, n, m, width, value_width, pairs, scale, damping, power,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    EVEN: tl.constexpr, HAS_QUERY_MASK: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """One program per head: all half-steps, then the output.

    The log-sum-exp of a column is gathered over the blocks with a running maximum, so that no scale of the scores
    under- or overflows.
    """
    head = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    column_taken = takes_part(KEY_MASK, head, column, m, HAS_KEY_MASK)
    key = load_tokens(K, head, inner, k_batch, k_head, k_token, column, column_taken, width, WIDTH, UPCAST)
    g = tl.where(column_taken, 0.0, float("-inf"))
    store_vector(G, g, 0, heads, head, column, m)
    n_valid = 0.0
    for pair in range(pairs):
        top = tl.full([COLUMNS], float("-inf"), tl.float32)
        total = tl.zeros([COLUMNS], tl.float32)
        n_valid = 0.0
        for start in range(0, n, ROWS):
            row = start + tl.arange(0, ROWS)
            row_taken = takes_part(QUERY_MASK, head, row, n, HAS_QUERY_MASK)
            query = load_tokens(Q, head, inner, q_batch, q_head, q_token, row, row_taken, width, WIDTH, UPCAST)
            scores = log2_products(query, key, scale, PRECISION)
            shifted = scores + damping * g[None, :]
            highest = tl.max(shifted, 1)
            row_total = tl.sum(tl.exp2(shifted - finite_or_zero(highest)[:, None]), 1)
            f = potential_of(highest, row_total, row_taken)
            store_vector(F, f, pair, heads, head, row, n)
            top, total = add_exponentials(top, total, scores + f[:, None], 0)
            n_valid += tl.sum((f != float("-inf")).to(tl.float32))
        g = potential_of(top, total, column_taken)
        store_vector(G, g, pair + 1, heads, head, column, m)
    sums = what_columns_sum_to(g, n_valid, tl.sum((g != float("-inf")).to(tl.float32)), damping, power)
    if EVEN:
        tl.debug_barrier()  # the row potentials that are read now may have been written by other threads
    value = load_tokens(
        V, head, inner, v_batch, v_head, v_token, column, column_taken, value_width, VALUE_WIDTH, UPCAST
    )
    for start in range(0, n, ROWS):
        row = start + tl.arange(0, ROWS)
        row_taken = takes_part(QUERY_MASK, head, row, n, HAS_QUERY_MASK)
        query = load_tokens(Q, head, inner, q_batch, q_head, q_token, row, row_taken, width, WIDTH, UPCAST)
        scores = log2_products(query, key, scale, PRECISION)
        if EVEN:
            f = load_potential(F, pairs - 1, heads, head, row, n)
            coupling = coupling_entries(scores + f[:, None] + g[None, :]) * sums[None, :]
            normalizer = tl.full([ROWS], 1.0, tl.float32)
        else:
            shifted = scores + damping * g[None, :]
            highest = tl.max(shifted, 1)
            coupling = tl.exp2(shifted - finite_or_zero(highest)[:, None])
            row_total = tl.sum(coupling, 1)
            f = potential_of(highest, row_total, row_taken)
            store_vector(F, f, pairs, heads, head, row, n)
            # Normalised by the sum itself: the rounding of a large potential does not reach the output.
            row_valid = f != float("-inf")
            normalizer = tl.where(row_valid, 1.0 / row_total, 0.0)
            coupling = tl.where(row_valid[:, None], coupling, 0.0)
        out = tl.dot(coupling.to(value.dtype), value, input_precision=PRECISION) * normalizer[:, None]
        store_tokens(OUT, out, head, row, n, value_width, VALUE_WIDTH)


@triton.jit
def potential_gradient_kernel(
    Q, K, V, D_OUT, F, G, D_F, D_G, COLUMN_SUMS, QUERY_MASK, KEY_MASK,
    heads, inner, n, m, width, value_width, pairs, last, scale, damping,
    q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token, o_batch, o_head, o_token,
    EVEN: tl.constexpr, DETACHED: tl.constexpr, HAS_QUERY_MASK: tl.constexpr, HAS_KEY_MASK: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """One program per head: the weights of the half-steps in dL/dC, D_F (as F) and D_G (pairs, heads, m).

    With W = P * dL/dP, those of the last half-step are W's row or column sums; a row step passes -sum_i w_i R_ij on to
    the columns, a column step -sum_j w_j S_ij to the rows. Each pair goes once through the blocks of rows.
    """
    head = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    column_taken = takes_part(KEY_MASK, head, column, m, HAS_KEY_MASK)
    key = load_tokens(K, head, inner, k_batch, k_head, k_token, column, column_taken, width, WIDTH, UPCAST)
    value = load_tokens(
        V, head, inner, v_batch, v_head, v_token, column, column_taken, value_width, VALUE_WIDTH, UPCAST
    )
    g = load_potential(G, pairs, heads, head, column, m)
    d_g = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, n, ROWS):
        row = start + tl.arange(0, ROWS)
        row_taken = takes_part(QUERY_MASK, head, row, n, HAS_QUERY_MASK)
        query = load_tokens(Q, head, inner, q_batch, q_head, q_token, row, row_taken, width, WIDTH, UPCAST)
        d_out = load_tokens(
            D_OUT, head, inner, o_batch, o_head, o_token, row, row_taken, value_width, VALUE_WIDTH, UPCAST
        )
        scores = log2_products(query, key, scale, PRECISION)
        f = load_potential(F, last, heads, head, row, n)
        coupling = coupling_entries(scores + f[:, None] + (g if EVEN else damping * g)[None, :])
        weighted = coupling * tl.dot(d_out, tl.trans(value), input_precision=PRECISION)
        if EVEN:
            weighted *= load_weights(COLUMN_SUMS, 0, heads, head, column, m)[None, :]
        d_f = tl.sum(weighted, 1)
        store_vector(D_F, d_f, last, heads, head, row, n)
        if not EVEN:
            weighted -= d_f[:, None] * coupling
        d_g += tl.sum(weighted, 0)
    if not DETACHED:
        for step in range(pairs):
            pair = pairs - 1 - step
            d_g *= damping
            store_vector(D_G, d_g, pair, heads, head, column, m)
            below = load_potential(G, pair, heads, head, column, m)
            passed = tl.zeros([COLUMNS], tl.float32)
            tl.debug_barrier()  # D_F of the step before was written, and is read, by different threads
            for start in range(0, n, ROWS):
                row = start + tl.arange(0, ROWS)
                row_taken = takes_part(QUERY_MASK, head, row, n, HAS_QUERY_MASK)
                query = load_tokens(Q, head, inner, q_batch, q_head, q_token, row, row_taken, width, WIDTH, UPCAST)
                scores = log2_products(query, key, scale, PRECISION)
                scores += load_potential(F, pair, heads, head, row, n)[:, None]
                d_f = -tl.sum(coupling_entries(scores + g[None, :]) * d_g[None, :], 1)
                if EVEN:
                    base = (pair * heads + head) * n
                    d_f += tl.load(D_F + base + row, mask=(row < n) & (pair == last), other=0.0)
                store_vector(D_F, d_f, pair, heads, head, row, n)
                passed -= tl.sum(d_f[:, None] * coupling_entries(scores + damping * below[None, :]), 0)
            d_g = passed
            g = below
