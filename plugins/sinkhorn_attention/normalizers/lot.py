"""Low-rank optimal transport attention (LOTFormer): queries and keys are coupled through a few learned pivots."""

import math
from typing import Unpack

import torch
from torch import Tensor, nn

from ..checks import CallOptions, check_engine, check_n_iters
from ..engines.half_steps import half_steps
from ..functional import sinkhorn, sinkhorn_attention
from .base import Normalizer, register_normalizer
from .scores import attention_scores, full_precision_matmul


def plan_with_masses(scores: Tensor, log_rows: Tensor, log_columns: Tensor, n_iters: int) -> Tensor:
    """Log of the plan after `n_iters` half-steps, rows first, for any marginals.

    Args:
        scores: (..., n, m), finite.
        log_rows: (..., n, 1), logarithms of the row marginal; -inf for a row that takes no part.
        log_columns: (..., 1, m), likewise.
        n_iters: number of half-steps.

    Returns:
        (..., n, m); -inf in rows and columns that take no part.
    """
    rows, columns = log_rows != -math.inf, log_columns != -math.inf
    support = rows & columns
    any_row, any_column = rows.any(-2, keepdim=True), columns.any(-1, keepdim=True)
    log_plan = torch.where(support, scores, -math.inf)

    # What has no support would make logsumexp -inf and its derivative NaN: it is replaced by zeros first.
    def row_step(step: int, g: Tensor) -> Tensor:
        total = torch.where(rows & any_column, log_plan + g, 0.0).logsumexp(-1, keepdim=True)
        return torch.where(rows, log_rows, 0.0) - total

    def column_step(step: int, f: Tensor) -> Tensor:
        total = torch.where(columns & any_row, log_plan + f, 0.0).logsumexp(-2, keepdim=True)
        return torch.where(columns, log_columns, 0.0) - total

    f, g = half_steps(n_iters, row_step, column_step, torch.zeros_like(log_plan[..., :1, :]))
    return torch.where(support, log_plan + f + g, -math.inf)


@register_normalizer("lot")
class LOT(Normalizer):
    """Two transport plans glued at a pivot measure (Shahbazi et al., LOTFormer, 2025, arXiv 2509.23436).

    r pivots z with masses w are learned for every head. P1 (n x r) couples queries (mass 1/n each) to pivots (w) from
    the scores scale * q.z, P2 (r x m) couples pivots (w) to keys (1/m each) from scale * z.k, each by `n_iters`
    half-steps, rows first, as in the authors' code, and

        map = n * P1 diag(1/w) P2,

    of rank r at most. After an odd count the rows of P1 and P2 have their masses exactly, so that the map's rows sum to
    1; columns sum to n_valid / m_valid in the limit. With w = 1/r the two factors are couplings of `sinkhorn`, and the
    output is had in O((n + m) r) operations, without the map, by its engines. There are no scores between queries and
    keys: a bias is refused. Dropout needs the map and makes it.

    The authors' code glues with learned masses plans that were made for equal ones; here both have the same w.

    Args:
        n_iters: number of HALF-steps of each plan; 5 in the authors' code.
        num_pivots: r; 32 in the authors' code.
        learned_masses: whether w = softmax of learned numbers; otherwise w = 1/r.
        backend: as in `sinkhorn_attention`; used where the masses are equal.
        head_dim: width of a head, needed.
        num_heads: number of heads, needed; the third dimension of the queries from the right, or 1.
    """

    def __init__(
        self,
        n_iters: int = 5,
        num_pivots: int = 32,
        learned_masses: bool = False,
        backend: str = "auto",
        head_dim: int | None = None,
        num_heads: int | None = None,
    ) -> None:
        super().__init__(head_dim, num_heads)
        check_n_iters(n_iters)
        check_engine("unrolled", backend)
        if not isinstance(num_pivots, int) or num_pivots < 1:
            raise ValueError(f"num_pivots must be an integer >= 1, got {num_pivots!r}")
        if head_dim is None or num_heads is None:
            raise ValueError("lot owns a pivot for every head: give head_dim and num_heads")
        self.n_iters = n_iters
        self.num_pivots = num_pivots
        self.learned_masses = bool(learned_masses)
        self.backend = backend
        self.pivot = nn.Parameter(0.02 * torch.randn(num_heads, num_pivots, head_dim))
        self.mass_logits = nn.Parameter(torch.zeros(num_heads, num_pivots)) if learned_masses else None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[CallOptions]) -> Tensor:
        if self.mass_logits is not None or options.get("dropout_p", 0.0) > 0.0:
            return super().attend(query, key, value, **options)
        self._check(query, key, **options)
        scale, query_mask, key_mask = options.get("scale"), options.get("query_mask"), options.get("key_mask")
        pivot = self._pivot_like(query)
        at_pivots = sinkhorn_attention(
            pivot, key, value, self.n_iters, scale=scale, key_mask=key_mask, backend=self.backend
        )
        return sinkhorn_attention(
            query, pivot, at_pivots, self.n_iters, scale=scale, query_mask=query_mask, backend=self.backend
        )

    def coupling(self, query: Tensor, key: Tensor, **options: Unpack[CallOptions]) -> Tensor:
        self._check(query, key, **options)
        scale, query_mask, key_mask = options.get("scale"), options.get("query_mask"), options.get("key_mask")
        pivot = self._pivot_like(query)
        to_pivots = attention_scores(query, pivot, scale, None, query_mask, None)
        to_keys = attention_scores(pivot, key, scale, None, None, key_mask)
        if self.mass_logits is None:
            first = sinkhorn(to_pivots, self.n_iters, query_mask=query_mask)
            second = sinkhorn(to_keys, self.n_iters, key_mask=key_mask)
            return full_precision_matmul(first, second)
        log_masses = self.mass_logits.to(to_pivots.dtype).log_softmax(-1)
        rows = _log_uniform(query_mask, query.shape[-2], to_pivots)
        columns = _log_uniform(key_mask, key.shape[-2], to_pivots)
        first = plan_with_masses(to_pivots, rows.unsqueeze(-1), log_masses.unsqueeze(-2), self.n_iters)
        second = plan_with_masses(to_keys, log_masses.unsqueeze(-1), columns.unsqueeze(-2), self.n_iters)
        n_valid = (rows != -math.inf).sum(-1).unsqueeze(-1).unsqueeze(-1)
        return n_valid * full_precision_matmul((first - log_masses.unsqueeze(-2)).exp(), second.exp())

    def _pivot_like(self, query: Tensor) -> Tensor:
        """The pivots with the leading dimensions of the queries, (..., r, d)."""
        pivot = self.pivot.to(query.dtype)
        return pivot if query.dim() > 2 else pivot.squeeze(0)

    def _check(self, query: Tensor, key: Tensor, **options: Unpack[CallOptions]) -> None:
        if options.get("attn_bias") is not None:
            raise ValueError("lot couples queries and keys through pivots and has no scores to add attn_bias to")
        self.check_inputs(query, key, **options)
        heads, width = query.shape[-3] if query.dim() > 2 else 1, query.shape[-1]
        if width != self.pivot.shape[2] or (self.pivot.shape[0] != 1 and heads != self.pivot.shape[0]):
            raise ValueError(
                f"lot was made for {self.pivot.shape[0]} heads of width {self.pivot.shape[2]}, "
                f"got a query of shape {list(query.shape)}"
            )


def _log_uniform(mask: Tensor | None, length: int, like: Tensor) -> Tensor:
    """Logarithm of equal masses of the valid tokens, (..., length); -inf at the others."""
    if mask is None:
        return torch.full((length,), -math.log(max(length, 1)), dtype=like.dtype, device=like.device)
    count = mask.sum(-1, keepdim=True).clamp(min=1).to(like.dtype)
    return torch.where(mask, -count.log(), -math.inf)
