"""The unbalanced variant that the published ViT code holds beside its Sinkhorn module; its engine is damped.py."""

import math

from torch import Tensor

from ..damped import damped_attention, damped_coupling
from ..functional import check_n_iters
from .base import Normalizer, register_normalizer


@register_normalizer("unbalanced_sinkhorn")
class UnbalancedSinkhorn(Normalizer):
    """Half-steps, rows first, of which the column steps are damped (michaelsdr/sinkformers, vit_pytorch/unbalanced.py).

    With C the scores, n and m the numbers of valid queries and keys, and f = g = 0 to begin with, the half-steps are in
    turn

        f_i = -log n - logsumexp_j(C_ij + g_j)    and    g_j = rho / (rho + 1) * (-log m - logsumexp_i(C_ij + f_i)),

    the scaling form of unbalanced optimal transport with a Kullback-Leibler penalty of weight rho on the key marginal
    (Chizat et al. 2018), and the map is n * exp(C + f + g). The total mass is 1, as in the published code; because of
    the damping it matters after an even count (after an odd one the last row step takes a constant in g away). The
    published code multiplies by m instead of n, the same for square maps; with n rows sum to 1 whatever the shape.

    Rows sum to 1 after an odd count. Columns sum to n / m only nearly, also in the limit, the nearer the greater rho
    is; rho = inf is `sinkhorn`. After an even count neither sum is exact.

    `from_scores` is that definition; `attend` computes it by damped.py, with memory that does not depend on n_iters
    but for vectors. Second derivatives are those of `coupling`.

    Args:
        n_iters: number of HALF-steps; 1 is softmax.
        rho: weight of the penalty, positive; 10 in the published code, where it is called q.
        head_dim: width of a head; not used.
        num_heads: number of heads; not used.
    """

    def __init__(
        self, n_iters: int = 5, rho: float = 10.0, head_dim: int | None = None, num_heads: int | None = None
    ) -> None:
        super().__init__(head_dim, num_heads)
        check_n_iters(n_iters)
        if not rho > 0:
            raise ValueError(f"rho must be positive (the weight of the key marginal; inf is sinkhorn), got {rho!r}")
        self.n_iters = n_iters
        self.rho = float(rho)
        self.damping = 1.0 if math.isinf(rho) else rho / (rho + 1.0)

    def extra_repr(self) -> str:
        return f"n_iters={self.n_iters}, rho={self.rho}"

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
        return damped_attention(
            query, key, value, self.n_iters, self.damping, scale, attn_bias, query_mask, key_mask, dropout_p
        )

    def from_scores(self, scores: Tensor, query_mask: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        return damped_coupling(scores, self.n_iters, self.damping, query_mask, key_mask)
