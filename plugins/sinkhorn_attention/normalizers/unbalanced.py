"""The unbalanced variant that the published ViT code holds beside its Sinkhorn module."""

import math
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from ..checks import CallOptions, check_n_iters
from ..engines.half_steps import half_steps
from ..engines.native import Native
from ..engines.operator import Operator, attend_by
from ..engines.problem import Problem
from ..functional import empty_attention, prepare
from ..masks import support_of
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

    `from_scores` is that definition; `attend` computes it by the engine that "auto" takes, with memory that does not
    depend on n_iters but for vectors. Second derivatives are those of `coupling`.

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

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[CallOptions]) -> Tensor:
        problem = prepare(query, key, value, n_iters=self.n_iters, **options)
        if problem.is_empty:
            return empty_attention(problem)
        return unbalanced(replace(problem, damping=self.damping)).to(problem.like.dtype)

    def from_scores(self, scores: Tensor, query_mask: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        return damped_coupling(scores, self.n_iters, self.damping, query_mask, key_mask)


def damped_coupling(
    scores: Tensor, n_iters: int, damping: float, query_mask: Tensor | None = None, key_mask: Tensor | None = None
) -> Tensor:
    """The definition of the map, (..., n, m), from scores whose -inf is no support; in the dtype of the scores."""
    support = support_of(scores, query_mask, key_mask)
    rows, columns = support.any(-1, keepdim=True), support.any(-2, keepdim=True)
    kernel = torch.where(support, scores.to(torch.promote_types(scores.dtype, torch.float32)), -math.inf)
    log_n = rows.sum(-2, keepdim=True).clamp(min=1).to(kernel.dtype).log()
    log_m = columns.sum(-1, keepdim=True).clamp(min=1).to(kernel.dtype).log()

    # A row or column without support would make logsumexp -inf and its derivative NaN: it is replaced by zeros.
    def row_step(step: int, g: Tensor) -> Tensor:
        return -log_n - torch.where(rows, kernel + g, 0.0).logsumexp(-1, keepdim=True)

    def column_step(step: int, f: Tensor) -> Tensor:
        return damping * (-log_m - torch.where(columns, kernel + f, 0.0).logsumexp(-2, keepdim=True))

    f, g = half_steps(n_iters, row_step, column_step, torch.zeros_like(log_n))
    return torch.where(support, kernel + f + g + log_n, -math.inf).exp().to(scores.dtype)


def define(problem: Problem) -> Tensor:
    """The definition, of an attention problem."""
    masks = problem.query_mask, problem.key_mask
    return attend_by(lambda scores: damped_coupling(scores, problem.n_iters, problem.damping, *masks), problem)


#: The engines of "auto", whose column steps are damped; `coupling` has the second derivatives.
unbalanced = Operator(Native("unbalanced"), define, "the normalizer's coupling(query, key, ...) @ value")
