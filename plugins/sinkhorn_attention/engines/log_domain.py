"""Half-steps in the log domain: right at any scale of the scores, at the price of one exponential per entry and step.

    f_i = -log sum_j exp(C_ij + g_j)    and    g_j = lambda (log ratio - log sum_i exp(C_ij + f_i)),    g = 0 to begin

The portable engine turns to it for the heads that the exponential domain cannot hold, and on devices where telling them
apart would need a synchronisation. Scores are passed by blocks of rows and made again for each half-step, one block if
they are few; of a half-step only vectors are kept, so that memory is O(n (d + T)). Backward goes through the half-steps
in reverse and keeps their weights as vectors, too; one last pass puts all of them together.
"""

import math

import torch
from torch import Tensor

from .half_steps import half_steps, reverse_half_steps
from .heads import ALL_ROWS, Gradients, Group, Heads, row_spans, target_ratio


class LogDomainMap:
    """The maps of some heads after each of their half-steps, by blocks of rows, in natural logarithms.

    Args:
        heads: the call.
        group: the heads.
        dtype: of the arithmetic.
        block_rows: rows of a block.
    """

    def __init__(self, heads: Heads, group: Group, dtype: torch.dtype, block_rows: int) -> None:
        self.heads, self.group, self.dtype = heads, group, dtype
        self.spans = row_spans(heads.n, block_rows)
        if heads.scores is None:
            self.query, self.key = heads.queries(group, dtype), heads.keys(group, dtype)
            self.scaled = self.query * heads.scale
        self.held: Tensor | None = None
        if len(self.spans) == 1:
            self.held = self._scores(ALL_ROWS)
        #: Which rows (heads, n, 1) and columns (heads, 1, m) have a support.
        self.rows, self.columns = self._supports()
        counts = self.rows.sum(1, keepdim=True), self.columns.sum(2, keepdim=True)
        #: What a column should sum to, (heads, 1, 1).
        self.ratio = target_ratio(*counts, dtype)
        #: Of each half-step, over rows or columns of C + the other side's potential: the maximum and the sum of
        #: exponentials. Kept apart: the rounding of a potential as large as 1e30 would be the exponent of a coupling.
        self.maxima: list[Tensor] = []
        self.totals: list[Tensor] = []
        #: The other side's potential that each half-step began with.
        self.others: list[Tensor] = []
        #: Terms of dL/dC: half-steps, and what multiplies the rows or columns of their exponentials.
        self.terms: list[tuple[int, Tensor]] = []
        start = torch.zeros_like(self.columns, dtype=dtype)
        half_steps(heads.n_iters, self.row_step, self.column_step, start)

    def _scores(self, rows: slice) -> Tensor:
        """The scores of a block, a new tensor (heads, rows, m); -inf outside the support."""
        heads, group = self.heads, self.group
        if heads.scores is not None:
            scores = heads.scores[group][:, rows].to(self.dtype, copy=True)
        else:
            scores = torch.bmm(self.scaled[:, rows], self.key.transpose(1, 2))
            bias = heads.bias(group, rows, self.dtype)
            if bias is not None:
                scores.add_(bias)
        return heads.mask_scores_(scores, group, rows)

    def _supports(self) -> tuple[Tensor, Tensor]:
        """Which rows and columns have a support: by the scores, if there are masks, a bias or given scores at all."""
        rows, columns = [], None
        for span in self.spans:
            support = self.scores(span) != -math.inf
            rows.append(support.any(2, keepdim=True))
            seen = support.any(1, keepdim=True)
            columns = seen if columns is None else columns | seen
        assert columns is not None
        return torch.cat(rows, 1), columns

    def scores(self, rows: slice) -> Tensor:
        """The scores of a block, which must not be changed."""
        return self._scores(rows) if self.held is None else self.held

    def shifted(self, rows: slice, other: Tensor) -> Tensor:
        """The scores of a block plus the other side's potential, a new tensor."""
        return self._scores(rows).add_(other) if self.held is None else self.held + other

    def _keep(self, other: Tensor, maximum: Tensor, total: Tensor, empty: Tensor) -> None:
        self.others.append(other)
        self.maxima.append(maximum.masked_fill(empty, 0.0))
        self.totals.append(total.masked_fill(empty, 1.0))

    def row_step(self, step: int, column: Tensor) -> Tensor:
        """The potential (heads, n, 1) of a row step."""
        maxima, totals = [], []
        for rows in self.spans:
            shifted = self.shifted(rows, column)
            maxima.append(shifted.amax(2, keepdim=True))
            finite = maxima[-1].masked_fill(maxima[-1] == -math.inf, 0.0)
            totals.append(shifted.sub_(finite).exp_().sum(2, keepdim=True))
        self._keep(column, torch.cat(maxima, 1), torch.cat(totals, 1), ~self.rows)
        return (-self.maxima[-1] - self.totals[-1].log()).masked_fill_(~self.rows, 0.0)

    def column_step(self, step: int, row: Tensor) -> Tensor:
        """The potential (heads, 1, m) of a column step, with a running maximum over the blocks."""
        maximum = torch.full_like(self.others[0], -math.inf)
        total = torch.zeros_like(maximum)
        for rows in self.spans:
            shifted = self.shifted(rows, row[:, rows])
            highest = torch.maximum(maximum, shifted.amax(1, keepdim=True))
            finite = highest.masked_fill(highest == -math.inf, 0.0)
            total = total * (maximum - finite).exp() + shifted.sub_(finite).exp_().sum(1, keepdim=True)
            maximum = highest
        self._keep(row, maximum, total, ~self.columns)
        return (self.undamped(step) * self.heads.problem.damping).masked_fill_(~self.columns, 0.0)

    def undamped(self, step: int) -> Tensor:
        """The potential of a column step before it was damped."""
        return self.ratio.log() - self.maxima[step] - self.totals[step].log()

    def exponentials(self, rows: slice, step: int) -> Tensor:
        """A block of exponentials of a half-step, a new tensor: over `totals`, they are the map after it."""
        of_rows = step % 2 == 0
        other = self.others[step] if of_rows else self.others[step][:, rows]
        return self.shifted(rows, other).sub_(self.maxima[step][:, rows] if of_rows else self.maxima[step]).exp_()

    def coupling(self, rows: slice) -> Tensor:
        """A block of the final map, a new tensor."""
        step = self.heads.n_iters - 1
        coupling = self.exponentials(rows, step)
        if step % 2 == 0:
            return coupling.div_(self.totals[step][:, rows])
        damping, sums = self.heads.problem.damping, self.ratio
        if damping != 1.0:
            sums = sums * ((damping - 1.0) * self.undamped(step)).exp()
        return coupling.mul_(sums / self.totals[step])

    def through_row_step(self, step: int, row_weights: Tensor, last: bool) -> Tensor | None:
        """As `Reversible`."""
        weights = row_weights / self.totals[step]
        self.terms.append((step, weights))
        if last:
            return None
        passed = torch.zeros_like(self.others[0])
        for rows in self.spans:  # a product of a vector and the map
            passed.baddbmm_(weights[:, rows].transpose(1, 2), self.exponentials(rows, step), alpha=-1)
        return passed

    def through_column_step(self, step: int, column_weights: Tensor, row_weights: Tensor | None) -> Tensor:
        """As `Reversible`."""
        weights = column_weights * self.heads.problem.damping / self.totals[step]
        self.terms.append((step, weights))
        sums = [torch.bmm(self.exponentials(rows, step), weights.transpose(1, 2)) for rows in self.spans]
        passed = torch.cat(sums, 1).neg_()
        return passed if row_weights is None else passed.add_(row_weights)

    def scores_gradient(self, rows: slice, weighted: Tensor) -> Tensor:
        """dL/dC of a block from P * dL/dP, which is overwritten, by the terms that were noted."""
        for step, weights in self.terms:
            block = weights[:, rows] if step % 2 == 0 else weights
            weighted.addcmul_(self.exponentials(rows, step), block, value=-1)
        return weighted


def log_domain_forward(heads: Heads, group: Group, dtype: torch.dtype, block_rows: int) -> Tensor:
    """The result of some heads: attention (heads, n, d_v), or the coupling of given scores (heads, n, m)."""
    maps, parts = LogDomainMap(heads, group, dtype, block_rows), []
    value = heads.values(group, dtype) if heads.value is not None else None
    for rows in maps.spans:
        coupling = maps.coupling(rows)
        dropout = heads.dropout(group, rows, dtype)
        if dropout is not None:
            coupling.mul_(dropout)
        parts.append(coupling if value is None else torch.bmm(coupling, value))
    return torch.cat(parts, 1)


def log_domain_backward(
    heads: Heads, group: Group, d_output: Tensor, gradients: Gradients, dtype: torch.dtype, block_rows: int
) -> None:
    """Writes the gradients of some heads; d_output (all heads, n, d_v or m) is dL/dO, or dL/dP for given scores."""
    maps, parts = LogDomainMap(heads, group, dtype, block_rows), gradients.parts(group, dtype)
    value = heads.values(group, dtype) if heads.value is not None else None
    d_out = heads.hide_queries(d_output[group].to(dtype), group) if value is not None else d_output[group].to(dtype)

    def weigh(rows: slice, coupling: Tensor) -> Tensor:
        """P * dL/dP of a block."""
        if value is None:
            return coupling * d_out[:, rows]
        product = torch.bmm(d_out[:, rows], value.transpose(1, 2)).mul_(coupling)
        dropout = heads.dropout(group, rows, dtype)
        return product if dropout is None else product.mul_(dropout)

    row_sums, column_sums, kept_weighted = [], torch.zeros_like(maps.others[0]), None
    for rows in maps.spans:
        coupling = maps.coupling(rows)
        weighted = weigh(rows, coupling)
        row_sums.append(weighted.sum(2, keepdim=True))
        column_sums += weighted.sum(1, keepdim=True)
        if value is not None:
            dropout = heads.dropout(group, rows, dtype)
            kept = coupling if dropout is None else coupling.mul_(dropout)
            torch.baddbmm(parts[2], kept.transpose(1, 2), d_out[:, rows], beta=int(rows.start > 0), out=parts[2])
        kept_weighted = weighted if len(maps.spans) == 1 else None
    reverse_half_steps(maps, heads.n_iters, heads.problem.detached, torch.cat(row_sums, 1), column_sums)
    for rows in maps.spans:
        weighted = weigh(rows, maps.coupling(rows)) if kept_weighted is None else kept_weighted
        d_scores = maps.scores_gradient(rows, weighted)
        if value is None:
            parts[0][:, rows] = d_scores
        else:
            gradients.add_block(group, rows, d_scores, (maps.query, maps.key), parts)
    gradients.put(group, parts)
