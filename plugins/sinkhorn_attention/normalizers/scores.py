"""Scores and their support, in float32 at least whatever the inputs and autocast say."""

import math

import torch
from torch import Tensor

from ..engines.operator import without_autocast


def hide_padding(
    query: Tensor, key: Tensor, value: Tensor, query_mask: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Zeroes what stands at masked tokens, so that garbage there (NaN included) cannot reach a product."""
    if query_mask is not None:
        query = query.masked_fill(~query_mask.unsqueeze(-1), 0.0)
    if key_mask is not None:
        key = key.masked_fill(~key_mask.unsqueeze(-1), 0.0)
        value = value.masked_fill(~key_mask.unsqueeze(-1), 0.0)
    return query, key, value


def full_precision_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Left @ right in their own dtype: autocast would take float32 scores to bfloat16 and lose 8 bits of 24."""
    with without_autocast(left):
        return left @ right


def attention_scores(
    query: Tensor,
    key: Tensor,
    scale: float | None = None,
    attn_bias: Tensor | None = None,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Scale * query @ key^T + attn_bias, (..., n, m), in float32 at least; a boolean bias (True keeps) becomes -inf."""
    query, key, _ = hide_padding(query, key, key, query_mask, key_mask)
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), torch.float32)
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = full_precision_matmul(factor * query.to(dtype), key.to(dtype).transpose(-1, -2))
    if attn_bias is None:
        return scores
    if attn_bias.dtype == torch.bool:
        return scores.masked_fill(~attn_bias, -math.inf)
    return scores + attn_bias
