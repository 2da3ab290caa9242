"""Row softmax, the attention of the Transformer."""

import math
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import CallOptions
from ..engines.operator import is_eager
from ..functional import sinkhorn
from .base import Normalizer, register_normalizer
from .scores import hide_padding


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, **options: Unpack[CallOptions]) -> Tensor:
    """The scaled_dot_product_attention of torch with token masks; 0 at masked queries and at rows without support."""
    scale, query_mask, key_mask = options.get("scale"), options.get("query_mask"), options.get("key_mask")
    if query_mask is not None or key_mask is not None:
        query, key, value = _hide_padding(query, key, value, query_mask, key_mask)
    mask = options.get("attn_bias")
    if key_mask is not None:
        keep = key_mask.unsqueeze(-2)
        if mask is None:
            mask = keep
        elif mask.dtype == torch.bool:
            mask = mask & keep
        else:
            mask = mask.masked_fill(~keep, -math.inf)
    # scaled_dot_product_attention wants one dtype; normalised queries and keys come in float32 under autocast.
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    if mask is not None and mask.dtype != torch.bool:
        mask = _cast_bias(mask, dtype)
    # Its fused kernels want queries, keys and values of one width; without them it takes twice the time.
    width, head_dim = value.shape[-1], query.shape[-1]
    if width < head_dim:
        value = F.pad(value, [0, head_dim - width])
    elif width > head_dim > 0:
        if scale is None:
            scale = head_dim**-0.5
        query, key = F.pad(query, [0, width - head_dim]), F.pad(key, [0, width - head_dim])
    tokens, dropout_p = (query.to(dtype), key.to(dtype), value.to(dtype)), options.get("dropout_p", 0.0)
    out = F.scaled_dot_product_attention(*tokens, attn_mask=mask, dropout_p=dropout_p, scale=scale)[..., :width]
    return out if query_mask is None else out.masked_fill(~query_mask.unsqueeze(-1), 0.0)


def _hide_padding(
    query: Tensor, key: Tensor, value: Tensor, query_mask: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Zeroes what stands at masked tokens, where the mask of the scores would not keep it out by itself.

    It does where all products are finite, and they are where the sums of squares are; copies cost a fifth of a call.
    """
    tokens = query, key, value
    may_look = is_eager(*tokens) and not torch._C._are_functorch_transforms_active() and query.device.type == "cpu"
    if may_look and all(math.isfinite(torch.linalg.vector_norm(tensor.detach())) for tensor in tokens):
        return tokens
    return hide_padding(query, key, value, query_mask, key_mask)


def _cast_bias(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A finite bias stays finite: -1e9 in float16 would be -inf, which hides what the host only pushed down."""
    if dtype != torch.float16 or bias.dtype == dtype:
        return bias.to(dtype)
    finite = bias.clamp(min=-65504.0, max=65504.0)
    return torch.where(bias == -math.inf, -math.inf, finite).to(dtype)


@register_normalizer("softmax")
class Softmax(Normalizer):
    """Row softmax (Vaswani et al. 2017), by torch's own scaled_dot_product_attention.

    Valid rows sum to 1, columns to anything. Equal to `sinkhorn` at n_iters=1.
    """

    row_wise = True

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[CallOptions]) -> Tensor:
        self.check_inputs(query, key, **options)
        self.check_value(key, value)
        return softmax_attention(query, key, value, **options)

    def from_scores(self, scores: Tensor, query_mask: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        return sinkhorn(scores, 1, query_mask=query_mask, key_mask=key_mask)
