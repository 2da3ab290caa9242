"""The log domain by blocks of rows, for maps too large to be held in float64: memory O(n (d + T)).

Each half-step passes the scores once, made again block by block. A row step needs its own block alone; a column step
keeps a running maximum and sum. Backward goes through the half-steps in reverse, as log_domain.py does, but keeps their
weights as vectors; one last pass puts all of them together.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .blockwise import block_rows
from .log_domain import log_half_step
from .problem import Gradients, Problem, hide


class ScoreBlocks:
    """The scores of some heads in natural logarithms, block of rows by block of rows, and their half-steps.

    Args:
        problem: the call.
        heads: the heads.
        n_iters: T.
        dtype: of the arithmetic.
    """

    def __init__(self, problem: Problem, heads: Tensor, n_iters: int, dtype: torch.dtype) -> None:
        self.problem, self.heads, self.dtype = problem, heads, dtype
        count, size = len(heads), block_rows(len(heads), problem.n, problem.m, dtype)
        self.spans = [slice(start, min(start + size, problem.n)) for start in range(0, problem.n, size)]
        like = torch.empty(0, dtype=dtype)
        rows, columns = like.new_zeros(count, 1, 1), like.new_zeros(count, 1, problem.m, dtype=torch.bool)
        for _, scores in self:
            support = scores != -math.inf
            rows += support.any(2, keepdim=True).sum(1, keepdim=True)
            columns |= support.any(1, keepdim=True)
        #: What a column should sum to, (heads, 1, 1); see `log_domain.target_ratio`.
        self.ratio = torch.where(rows > 0, rows / columns.sum(2, keepdim=True).clamp(min=1), 1.0)
        #: Potentials of the rows (heads, n, 1) and of the columns (heads, 1, m), of which the first is zero.
        self.row_potentials: list[Tensor] = []
        self.column_potentials = [like.new_zeros(count, 1, problem.m)]
        for step in range(n_iters):
            if step % 2 == 0:
                self.row_potentials.append(self._row_step(like.new_empty(count, problem.n, 1)))
            else:
                self.column_potentials.append(self._column_step())

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        for span in self.spans:
            yield span, self.problem.scores(self.heads, self.dtype, 1.0, span)

    def _row_step(self, potential: Tensor) -> Tensor:
        for span, scores in self:
            potential[:, span] = log_half_step(scores, self.column_potentials[-1], 2, 1.0)[0]
        return potential

    def _column_step(self) -> Tensor:
        peak = torch.full_like(self.column_potentials[-1], -math.inf)
        total = torch.zeros_like(peak)
        for span, scores in self:
            shifted = scores.add_(self.row_potentials[-1][:, span])
            highest = torch.maximum(peak, shifted.amax(1, keepdim=True))
            finite = highest.masked_fill(highest == -math.inf, 0.0)
            total = total * (peak - finite).exp() + shifted.sub_(finite).exp_().sum(1, keepdim=True)
            peak = highest
        return (self.ratio.log() - peak - total.log()).masked_fill_(peak == -math.inf, 0.0)

    def coupling(self, span: slice, scores: Tensor, row: int = -1, column: int = -1) -> Tensor:
        """Overwrites a block of scores by the coupling of two potentials, those of the last half-steps by default."""
        return scores.add_(self.row_potentials[row][:, span]).add_(self.column_potentials[column]).exp_()


def output_by_blocks(problem: Problem, heads: Tensor, n_iters: int, dtype: torch.dtype) -> Tensor:
    """Attention of some heads, (heads, n, d_v)."""
    blocks, value = ScoreBlocks(problem, heads, n_iters, dtype), problem.values(heads, dtype)
    output = value.new_empty(len(heads), problem.n, value.shape[2])
    for span, scores in blocks:
        coupling = blocks.coupling(span, scores)
        dropout = problem.dropout(heads, dtype, span)
        output[:, span] = torch.bmm(coupling if dropout is None else coupling.mul_(dropout), value)
    return output


def backward_by_blocks(
    problem: Problem,
    heads: Tensor,
    settings: tuple[int, bool],
    d_output: Tensor,
    gradients: Gradients,
    dtype: torch.dtype,
) -> None:
    """Writes the gradients of some heads.

    Args:
        problem: the call.
        heads: the heads.
        settings: the number of half-steps, and whether column potentials are constants.
        d_output: all heads' dL/dO, (heads, n, d_v).
        gradients: to be filled.
        dtype: of the arithmetic.
    """
    n_iters, detached = settings
    blocks = ScoreBlocks(problem, heads, n_iters, dtype)
    query, key, value = problem.queries(heads, dtype), problem.keys(heads, dtype), problem.values(heads, dtype)
    d_out = hide(d_output[heads].to(dtype), problem.query_mask, heads)
    d_value = torch.zeros_like(value)
    row_sums, column_sums = d_out.new_empty(len(heads), problem.n, 1), d_out.new_zeros(len(heads), 1, problem.m)

    def weighted(span: slice, coupling: Tensor) -> Tensor:
        """P * dL/dP of a block."""
        d_coupling = torch.bmm(d_out[:, span], value.transpose(1, 2)).mul_(coupling)
        dropout = problem.dropout(heads, dtype, span)
        return d_coupling if dropout is None else d_coupling.mul_(dropout)

    for span, scores in blocks:
        coupling = blocks.coupling(span, scores)
        product = weighted(span, coupling)
        row_sums[:, span] = product.sum(2, keepdim=True)
        column_sums += product.sum(1, keepdim=True)
        dropout = problem.dropout(heads, dtype, span)
        kept = coupling if dropout is None else coupling.mul_(dropout)
        d_value.baddbmm_(kept.transpose(1, 2), d_out[:, span])
    #: The indices of each half-step's potentials, and what multiplies the rows or columns of its coupling.
    terms: list[tuple[int, int, Tensor]] = []
    for step in reversed(range(n_iters)):
        i = step // 2
        if step % 2 == 0:
            terms.append((i, i, row_sums))
            if detached or step == 0:
                break
            for span, scores in blocks:
                weights = blocks.coupling(span, scores, i, i).mul_(row_sums[:, span])
                column_sums = column_sums - weights.sum(1, keepdim=True)
        elif not detached:
            factor = column_sums / blocks.ratio
            terms.append((i, i + 1, factor))
            flow = torch.empty_like(row_sums)
            for span, scores in blocks:
                flow[:, span] = -blocks.coupling(span, scores, i, i + 1).mul_(factor).sum(2, keepdim=True)
            row_sums = row_sums + flow if step == n_iters - 1 else flow
            column_sums = torch.zeros_like(column_sums)
    d_query, d_key = torch.empty_like(query), torch.zeros_like(key)
    for span, scores in blocks:
        d_scores = weighted(span, blocks.coupling(span, scores.clone()))
        for row, column, factor in terms:
            coupling = blocks.coupling(span, scores.clone(), row, column)
            d_scores.sub_(coupling.mul_(factor.expand(-1, problem.n, -1)[:, span]))
        d_query[:, span] = torch.bmm(d_scores, key)
        d_key.baddbmm_(d_scores.transpose(1, 2), query[:, span])
        gradients.add_bias(heads, d_scores, span)
    gradients.query[heads] = d_query.mul_(problem.scale).to(gradients.query.dtype)
    gradients.key[heads] = d_key.mul_(problem.scale).to(gradients.key.dtype)
    gradients.value[heads] = hide(d_value, problem.key_mask, heads).to(gradients.value.dtype)
