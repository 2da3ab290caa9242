"""Sinkhorn's doubly stochastic normalisation, the attention of the Sinkformer."""

from dataclasses import replace
from typing import Unpack

from torch import Tensor

from ..checks import CallOptions, check_engine, check_n_iters
from ..engines import PORTABLE
from ..engines.implicit import implicit
from ..engines.problem import Problem
from ..functional import sinkhorn, sinkhorn_attention
from .base import Normalizer, register_normalizer


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

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[CallOptions]) -> Tensor:
        return sinkhorn_attention(
            *(query, key, value), n_iters=self.n_iters, gradient=self.gradient, backend=self.backend, **options
        )

    def from_scores(self, scores: Tensor, query_mask: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        if self.gradient == "unrolled":
            return sinkhorn(scores, self.n_iters, query_mask=query_mask, key_mask=key_mask)
        given = Problem(scores=scores, query_mask=query_mask, key_mask=key_mask, n_iters=self.n_iters)
        problem = replace(given, detached=self.gradient == "detached")
        return (implicit if self.gradient == "implicit" else PORTABLE)(problem).to(scores.dtype)
