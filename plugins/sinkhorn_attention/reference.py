"""The definition of Sinkhorn attention: dense, in the log domain, differentiated by autograd. Never optimised.

Every other engine is held against this module, in value and in gradient, with float64 inputs.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def sinkhorn_reference(
    scores: Tensor,
    n_iters: int,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    gradient: str = "unrolled",
) -> Tensor:
    """Normalises exp(scores) by alternating row and column half-steps, rows first (Sander et al. 2022, eq. 3).

    Args:
        scores: (..., n, m). An entry of -inf lies outside the support and stays exactly 0.
        n_iters: number of half-steps; 1 is softmax.
        query_mask: (..., n), True = the row takes part.
        key_mask: (..., m), True = the column takes part.
        gradient: "unrolled" differentiates every half-step, "detached" treats the column potential as a constant.

    Returns:
        The coupling, (..., n, m). Rows sum to 1 after an odd half-step, columns to n_valid / m_valid after an even one;
        a row or column that is masked, or has no support, is 0 and counts in no sum.
    """
    support = scores != -math.inf
    if query_mask is not None:
        support = support & query_mask.unsqueeze(-1)
    if key_mask is not None:
        support = support & key_mask.unsqueeze(-2)
    rows, columns = support.any(-1, keepdim=True), support.any(-2, keepdim=True)
    n_valid, m_valid = rows.sum(-2, keepdim=True), columns.sum(-1, keepdim=True)
    log_column_target = (n_valid.clamp(min=1).to(scores.dtype) / m_valid.clamp(min=1)).log()

    log_map = torch.where(support, scores, -math.inf)
    for step in range(n_iters):
        if step % 2 == 0:
            # A row without support would make logsumexp -inf and its derivative NaN: it is replaced by zeros first.
            log_map = log_map - torch.where(rows, log_map, 0.0).logsumexp(-1, keepdim=True)
        else:
            excess = torch.where(columns, log_map, 0.0).logsumexp(-2, keepdim=True) - log_column_target
            log_map = log_map - (excess.detach() if gradient == "detached" else excess)
        log_map = torch.where(support, log_map, -math.inf)
    return log_map.exp()


def sinkhorn_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    n_iters: int,
    scale: float,
    attn_bias: Tensor | None = None,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    gradient: str = "unrolled",
) -> Tensor:
    """Sinkhorn(scale * query @ key^T + attn_bias) @ value; shapes as in `sinkhorn_attention`.

    `dropout_mask` (..., n, m) multiplies the final coupling: 0 where an entry is dropped, 1 / (1 - p) elsewhere.
    """
    return attention_by(
        lambda scores: sinkhorn_reference(scores, n_iters, query_mask, key_mask, gradient),
        *(query, key, value, scale, attn_bias, query_mask, key_mask, dropout_mask),
    )


def attention_by(
    normalise: Callable[[Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    attn_bias: Tensor | None = None,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    dropout_mask: Tensor | None = None,
) -> Tensor:
    """normalise(scale * query @ key^T + attn_bias) @ value, whatever makes the map (..., n, m) of the scores."""
    if query_mask is not None:  # whatever lies in the padding, NaN included, takes no part
        query = query.masked_fill(~query_mask.unsqueeze(-1), 0.0)
    if key_mask is not None:
        key = key.masked_fill(~key_mask.unsqueeze(-1), 0.0)
        value = value.masked_fill(~key_mask.unsqueeze(-1), 0.0)
    scores = scale * query @ key.transpose(-1, -2)
    if attn_bias is not None:
        scores = scores + attn_bias
    coupling = normalise(scores)
    if dropout_mask is not None:
        coupling = coupling * dropout_mask
    output = coupling @ value
    return output if query_mask is None else output.masked_fill(~query_mask.unsqueeze(-1), 0.0)
