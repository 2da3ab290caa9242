"""Masks: what each host means by them, and what the operator needs.

Inside the suite True always keeps. Hosts differ: torch.nn.MultiheadAttention and fairseq hide where True,
scaled_dot_product_attention, timm and torch_geometric keep where True. Each plugin translates at its entry point.
"""

import math

import torch
from torch import Tensor

#: Finite values at or below this, laid out as a triangle, are taken for a causal mask rather than for a bias.
#: Hosts fill with -1e4 and less; a bias that is added to the fill may lift it a little.
CAUSAL_FILL = -9e3

CAUSAL_REFUSAL = (
    "Sinkhorn attention cannot be causal: the column step makes every row depend on later rows, and the only causal "
    "doubly stochastic matrix is the identity. Use softmax attention where the mask is triangular."
)


def keep_from_hide(mask: Tensor | None, name: str = "key_padding_mask") -> Tensor | None:
    """Turns a boolean mask that hides where True (torch.nn.MultiheadAttention, fairseq) into one that keeps.

    Raises:
        ValueError: if the mask is not boolean; an integer mask may mean either polarity.
    """
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} must be boolean (True hides), got {mask.dtype}; convert it with .to(torch.bool)")
    return ~mask


def bias_from_keep(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive form of a boolean mask that keeps where True: 0 where kept, -inf elsewhere. Same shape."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask.logical_not(), -math.inf)


def split_attention_mask(
    attn_mask: Tensor | None, self_attention: bool = True
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Splits a mask in the manner of scaled_dot_product_attention into (attn_bias, query_mask, key_mask).

    A mask that is the same for all queries, (..., 1, m), is a key-padding mask; in self-attention the padded tokens
    are then left out as queries too, because otherwise they would take a share of every column. Any other mask is the
    support of the map (-inf) or an additive bias, (..., n, m). A mask that is an outer product needs no special case:
    rows and columns without support count as masked.

    Args:
        attn_mask: (..., n or 1, m) or (m,), boolean (True keeps) or floating (added to the scores); None for no mask.
        self_attention: whether queries and keys are the same tokens.

    Raises:
        ValueError: for an integer mask, which may mean either polarity.
    """
    if attn_mask is None:
        return None, None, None
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise ValueError(f"attn_mask must be boolean (True keeps) or floating, got {attn_mask.dtype}")
    if attn_mask.dim() == 1:
        attn_mask = attn_mask.unsqueeze(0)
    if attn_mask.dim() >= 2 and attn_mask.shape[-2] == 1 and attn_mask.shape[-1] > 1:
        if attn_mask.dtype == torch.bool:
            keep = attn_mask.squeeze(-2)
            return None, keep if self_attention else None, keep
        keep = (attn_mask != -math.inf).squeeze(-2)
        bias = attn_mask.masked_fill(attn_mask == -math.inf, 0.0)
        return bias, keep if self_attention else None, keep
    return attn_mask, None, None


def padded_queries(attn_mask: Tensor) -> Tensor | None:
    """Which queries of a self-attention take part, by a whole mask (..., n, n), boolean (True keeps) or floating.

    Hosts expand a key-padding mask to all queries, the padded ones included: no row of it differs from another. Such a
    mask says of a token that it is padding, and the token is then left out as a query too. Nothing waits for a device:
    where a mask of the batch does depend on the query, all of its queries take part.

    Returns:
        (..., n), boolean; None where it can be seen that no mask hides a token from all queries alike.
    """
    keep = attn_mask if attn_mask.dtype == torch.bool else attn_mask != -math.inf
    alike = (keep == keep[..., :1, :]).all(-1).all(-1)
    queries = keep[..., 0, :] | ~alike.unsqueeze(-1)
    readable = queries.device.type == "cpu" and not torch.compiler.is_compiling() and not queries.is_meta
    return None if readable and type(queries) is Tensor and bool(queries.all()) else queries


def is_causal_bias(attn_bias: Tensor) -> bool:
    """Whether a bias (..., n, m) is a causal mask. Reads the data.

    Rows and columns that are hidden wholly are padding and tell nothing; what is looked for is a triangle in the rest:

    - in any one matrix, the whole triangle, lower or upper, aligned at the first or at the last token. A single entry
      that is missing makes no triangle there: in a small matrix it may be chance;
    - in all matrices together, any support within one triangle of a square map, since its only doubly stochastic limit
      is diagonal, or one such whole triangle of a rectangular map.
    """
    if attn_bias.dim() < 2 or attn_bias.shape[-2] < 2 or attn_bias.shape[-1] < 2:
        return False
    support = attn_bias if attn_bias.dtype == torch.bool else attn_bias > CAUSAL_FILL
    if bool((support[..., 0, -1] & support[..., -1, 0]).all()):  # both far corners are seen: no triangle
        return False
    n, m = support.shape[-2:]
    unpadded = support.any(-1, keepdim=True) & support.any(-2, keepdim=True)
    hidden = (unpadded & ~support).sum((-2, -1))
    for offset in {0, m - n}:
        for triangle in (unpadded.tril(offset), unpadded.triu(offset)):
            whole = (support == triangle).all(-1).all(-1)
            if bool((whole & (hidden > 1)).any()) or (bool(whole.all()) and bool(hidden.any())):
                return True
    return n == m and bool(hidden.any()) and bool(support.triu(1).any() != support.tril(-1).any())


def support_of(scores: Tensor, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
    """Where the map may be positive, boolean (..., n, m): unmasked, and not -inf."""
    support = scores != -math.inf
    if query_mask is not None:
        support = support & query_mask.unsqueeze(-1)
    if key_mask is not None:
        support = support & key_mask.unsqueeze(-2)
    return support


def as_support(attn_mask: Tensor | None, lowest_bias: float = CAUSAL_FILL) -> Tensor | None:
    """Turns entries of a floating mask that are too low for a bias, -1e4 and below, into -inf: no support.

    Models hide tokens by -1e4, -1e9 or their dtype's lowest number, as timm's NaFlex models do. Softmax makes the same
    of all of these; a column step would restore a column that is low throughout.
    """
    if attn_mask is None or not attn_mask.is_floating_point():
        return attn_mask
    return attn_mask.masked_fill(attn_mask <= lowest_bias, -math.inf)
