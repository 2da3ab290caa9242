"""Sinkhorn's doubly stochastic normalisation, the attention of the Sinkformer."""

import math

import torch
from torch import Tensor

from ..functional import check_engine, check_n_iters, sinkhorn, sinkhorn_attention
from ..implicit import implicit_coupling
from ..masks import support_of
from ..reference import sinkhorn_reference
from .base import Normalizer, register_normalizer


@torch.jit.unused
def _implicit_coupling(scores: Tensor, n_iters: int, query_mask: Tensor | None, key_mask: Tensor | None) -> Tensor:
    """The coupling with the derivative at convergence; a scripted model raises here, any other runs it."""
    return implicit_coupling(scores.masked_fill(~support_of(scores, query_mask, key_mask), -math.inf), n_iters)


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
        check_engine(gradient, backend)
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
        return sinkhorn_attention(
            query,
            key,
            value,
            self.n_iters,
            scale=scale,
            attn_bias=attn_bias,
            query_mask=query_mask,
            key_mask=key_mask,
            dropout_p=dropout_p,
            gradient=self.gradient,
            backend=self.backend,
        )

    def from_scores(self, scores: Tensor, query_mask: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        if self.gradient == "unrolled":
            return sinkhorn(scores, self.n_iters, query_mask=query_mask, key_mask=key_mask)
        # The operator's coupling of given scores knows the exact derivative only.
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if self.gradient == "implicit":
            return _implicit_coupling(wide, self.n_iters, query_mask, key_mask).to(scores.dtype)
        return sinkhorn_reference(wide, self.n_iters, query_mask, key_mask, self.gradient).to(scores.dtype)
