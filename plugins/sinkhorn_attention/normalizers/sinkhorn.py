"""Sinkhorn's doubly stochastic normalisation, the attention of the Sinkformer."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..functional import check_n_iters, sinkhorn, sinkhorn_attention
from ..masks import bias_from_keep
from ..reference import sinkhorn_attention_reference, sinkhorn_reference
from .base import Normalizer, register_normalizer


def sinkhorn_map(
    scores: Tensor, n_iters: int, query_mask: Tensor | None, key_mask: Tensor | None, gradient: str
) -> Tensor:
    """The coupling of given scores (..., n, m), in their dtype, with the derivative that `gradient` names."""
    if not torch.jit.is_scripting() and gradient == "unrolled":
        return sinkhorn(scores, n_iters, query_mask=query_mask, key_mask=key_mask)
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return sinkhorn_reference(wide, n_iters, query_mask, key_mask, gradient).to(scores.dtype)


def sinkhorn_product(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    n_iters: int,
    scale: float | None,
    attn_bias: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    dropout_p: float,
    gradient: str,
    backend: str,
) -> Tensor:
    """`sinkhorn_attention`, and in TorchScript, which cannot compile it, the reference: same numbers, more memory."""
    if torch.jit.is_scripting():
        out_dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
        dtype = torch.promote_types(out_dtype, torch.float32)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if attn_bias is not None:
            attn_bias = bias_from_keep(attn_bias, dtype) if attn_bias.dtype == torch.bool else attn_bias.to(dtype)
        keep: Tensor | None = None
        if dropout_p > 0.0:
            keep = F.dropout(torch.ones_like(query[..., :1] * key[..., :1].transpose(-1, -2)), dropout_p)
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        return sinkhorn_attention_reference(
            query, key, value, n_iters, factor, attn_bias, query_mask, key_mask, keep, gradient
        ).to(out_dtype)
    else:  # noqa: RET505 - TorchScript leaves only an explicit else branch uncompiled
        return sinkhorn_attention(
            query,
            key,
            value,
            n_iters,
            scale=scale,
            attn_bias=attn_bias,
            query_mask=query_mask,
            key_mask=key_mask,
            dropout_p=dropout_p,
            gradient=gradient,
            backend=backend,
        )


@register_normalizer("sinkhorn")
class Sinkhorn(Normalizer):
    """`n_iters` alternating half-steps, rows first (Sander et al., Sinkformers, AISTATS 2022).

    Rows sum to 1 after an odd count; columns sum to n_valid / m_valid after an even count and, in the limit, always.

    Args:
        n_iters: number of HALF-steps; 1 is softmax.
        gradient: as in `sinkhorn_attention`.
        backend: as in `sinkhorn_attention`.
        head_dim: width of a head; not used.
        num_heads: number of heads; not used.
    """

    def __init__(
        self,
        n_iters: int = 5,
        gradient: str = "unrolled",
        backend: str = "auto",
        head_dim: int | None = None,
        num_heads: int | None = None,
    ) -> None:
        super().__init__(head_dim, num_heads)
        check_n_iters(n_iters)
        self.n_iters = n_iters
        self.gradient = gradient
        self.backend = backend

    def extra_repr(self) -> str:
        return f"n_iters={self.n_iters}, gradient={self.gradient!r}, backend={self.backend!r}"

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None = None,
        attn_bias: Tensor | None = None,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        return sinkhorn_product(
            query,
            key,
            value,
            self.n_iters,
            scale,
            attn_bias,
            query_mask,
            key_mask,
            dropout_p,
            self.gradient,
            self.backend,
        )

    def from_scores(self, scores: Tensor, query_mask: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        return sinkhorn_map(scores, self.n_iters, query_mask, key_mask, self.gradient)
