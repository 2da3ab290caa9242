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
from .problem import Gradients, Problem


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
        #: Of each half-step: its maxima and sums over them, of rows (heads, n, 1) or columns (heads, 1, m). Kept apart:
        #: the rounding of a potential as large as 1e30 would be the exponent of a coupling.
        self.maxima: list[Tensor] = []
        self.totals: list[Tensor] = []
        #: Potentials of the columns before each row step, (heads, 1, m), and of the rows before each column step.
        self.others = [like.new_zeros(count, 1, problem.m)]
        for step in range(n_iters):
            maximum, total = self._row_step() if step % 2 == 0 else self._column_step()
            self.maxima.append(maximum.masked_fill(maximum == -math.inf, 0.0))
            self.totals.append(total.masked_fill_(maximum == -math.inf, 1.0))
            self.others.append((-self.maxima[-1] - self.totals[-1].log()).masked_fill_(maximum == -math.inf, 0.0))

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        for span in self.spans:
            yield span, self.problem.scores(self.heads, self.dtype, 1.0, span)

    def _row_step(self) -> tuple[Tensor, Tensor]:
        maximum = self.others[-1].new_empty(len(self.heads), self.problem.n, 1)
        total = torch.empty_like(maximum)
        for span, scores in self:
            shifted = scores.add_(self.others[-1])
            maximum[:, span] = peak = shifted.amax(2, keepdim=True)
            total[:, span] = shifted.sub_(peak.masked_fill(peak == -math.inf, 0.0)).exp_().sum(2, keepdim=True)
        return maximum, total

    def _column_step(self) -> tuple[Tensor, Tensor]:
        peak = torch.full_like(self.others[0], -math.inf)
        total = torch.zeros_like(peak)
        for span, scores in self:
            shifted = scores.add_(self.others[-1][:, span])
            highest = torch.maximum(peak, shifted.amax(1, keepdim=True))
            finite = highest.masked_fill(highest == -math.inf, 0.0)
            total = total * (peak - finite).exp() + shifted.sub_(finite).exp_().sum(1, keepdim=True)
            peak = highest
        return peak, total.div_(self.ratio)

    def coupling(self, span: slice, scores: Tensor, step: int = -1) -> Tensor:
        """Overwrites a block of scores by the coupling after a half-step, the last by default."""
        step %= len(self.totals)
        of_rows = step % 2 == 0
        other = self.others[step] if of_rows else self.others[step][:, span]
        maximum, total = (each[step][:, span] if of_rows else each[step] for each in (self.maxima, self.totals))
        return scores.add_(other).sub_(maximum).exp_().div_(total)


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
    d_out = problem.hide_rows(d_output[heads].to(dtype), heads)
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
    #: Half-steps, and what multiplies the rows or columns of their couplings.
    terms: list[tuple[int, Tensor]] = []
    for step in reversed(range(n_iters)):
        if step % 2 == 0:
            terms.append((step, row_sums))
            if detached or step == 0:
                break
            for span, scores in blocks:
                weights = blocks.coupling(span, scores, step).mul_(row_sums[:, span])
                column_sums = column_sums - weights.sum(1, keepdim=True)
        elif not detached:
            factor = column_sums / blocks.ratio
            terms.append((step, factor))
            flow = torch.empty_like(row_sums)
            for span, scores in blocks:
                flow[:, span] = -blocks.coupling(span, scores, step).mul_(factor).sum(2, keepdim=True)
            row_sums = row_sums + flow if step == n_iters - 1 else flow
            column_sums = torch.zeros_like(column_sums)
    d_query, d_key = torch.empty_like(query), torch.zeros_like(key)
    for span, scores in blocks:
        d_scores = weighted(span, blocks.coupling(span, scores.clone()))
        for step, factor in terms:
            coupling = blocks.coupling(span, scores.clone(), step)
            d_scores.sub_(coupling.mul_(factor.expand(-1, problem.n, -1)[:, span]))
        d_query[:, span] = torch.bmm(d_scores, key)
        d_key.baddbmm_(d_scores.transpose(1, 2), query[:, span])
        gradients.add_bias(heads, d_scores, span)
    gradients.query[heads] = d_query.mul_(problem.scale).to(gradients.query.dtype)
    gradients.key[heads] = d_key.mul_(problem.scale).to(gradients.key.dtype)
    gradients.value[heads] = problem.hide_columns(d_value, heads).to(gradients.value.dtype)
