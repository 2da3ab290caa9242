"""Half-steps in the exponential domain: exact Sinkhorn attention at about the price of softmax.

    K = 2^(log2(e) C - shifts),    u = 1 / (K v)    and    v = (ratio / (K^T u))^lambda,    map = diag(u) K diag(v)

with ratio = n_valid / m_valid, and lambda = 1 unless the column steps are damped. A row step and the column step after
it need a block of rows of K once: its rows are normalised and its share of the column sums is added up. So T half-steps
pass K ceil(T/2) times, in blocks that stay in the cache; a small map is one block. K is kept, or made again for each
pass. Saved for backward are the inputs, the output and the scaling vectors. Backward makes K again; the derivative of
the half-steps adds a matrix of rank T to dO V^T,

    dL/dC = K * (diag(u_T) dO V^T diag(v_T) + A B^T),

with one column of A and B for each half-step, found by going through the half-steps in reverse with mat-vecs.

Masks live in the scaling vectors alone: 0 at what is masked, whatever the map holds there. Potentials that are
subtracted from the scores are two more columns of the factors of their product, (log2(e) scale q, -r, 1) (k, 1, -c)^T.
With a shift c of the columns a damped step is v = 2^((1 - lambda) c) (ratio / (K^T u))^lambda, from v = 2^c on.

Off the CPU, where each pass over the map is a kernel, K is the softmax of the scores' rows, which one kernel makes: the
map after the first half-step, with r its log-sum-exps and c = 0.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from . import domains
from .half_steps import half_steps
from .heads import ALL_ROWS, LOG2E, Heads, row_spans, target_ratio
from .scratch import borrow

#: log2 below which an entry of K is exactly 0: subnormal numbers make a product up to 200 times slower.
FLUSH_LOG2 = {torch.float32: -126.0, torch.float64: -1022.0}


@dataclass(frozen=True)
class Passes:
    """How maps of a size are passed: heads of a chunk, rows of a block, and whether K is kept between passes."""

    heads: int
    rows: int
    keep: bool


class ExponentialMap:
    """K of some heads, block of rows by block of rows, and the half-steps on it.

    Args:
        heads: the call.
        group: neighbouring heads of one domain.
        shifted: whether maxima are subtracted.
        scratch: (heads, rows of a block, m), where blocks are made.
        kept: (heads, n, m), where K is kept from the first pass on, `scratch` itself if that holds all rows; None makes
            it again for each pass.
        scalings: of the rows, u, (ceil(T/2), heads, n), and of the columns, v, (T//2 + 1, heads, m), which of damped
            steps stand apart; see `set_scalings`.
    """

    def __init__(
        self,
        heads: Heads,
        group: slice,
        shifted: bool,
        scratch: Tensor,
        kept: Tensor | None,
        scalings: tuple[Tensor, Tensor],
    ) -> None:
        self.heads, self.group, self.shifted = heads, group, shifted
        self.scratch, self.kept, self.filled = scratch, kept, False
        self.count, self.n, self.m = scratch.shape[0], heads.n, heads.m
        self.spans = row_spans(heads.n, scratch.shape[1])
        self.tiny = torch.finfo(heads.dtype).tiny
        self.asynchronous = domains.is_asynchronous(heads.device)
        #: What scores are in: logarithms to the base 2, or natural ones where softmax takes them.
        self.unit = 1.0 if self.asynchronous else LOG2E
        self.set_scalings(*scalings)
        #: What K is multiplied with when it is made, (heads, n, 1) and (heads, 1, m).
        self.multiplied: tuple[Tensor, Tensor] | None = None
        #: Whether copying the tokens is cheap against the map.
        self.wide = heads.value is not None and min(heads.n, heads.m) > 2 * heads.value.shape[2]
        if heads.scores is None:
            self.query, self.key = heads.queries(group), heads.keys(group)
            self.factors, self.alpha = (self.query, self.key), heads.scale * self.unit
        #: Where the result goes in the last pass.
        self.output: Tensor | None = None
        self.row_target: Tensor | None = None
        self.column_target: Tensor | None = None
        #: A by-product of one half-step that the next needs: K^T times its scaling or weight.
        self.column_sums: Tensor | None = None
        #: Columns of A (heads, 1, n) and B (heads, 1, m).
        self.left: list[Tensor] = []
        self.right: list[Tensor] = []

    def set_scalings(self, u: Tensor, v: Tensor) -> None:
        """Where the scalings of half-steps stand; v holds those of damped steps and 1 / (K^T u) in turn."""
        self.u, self.columns, self.v = u, v, v
        self.inverse_sums: Tensor | None = None
        if self.heads.problem.damping != 1.0:
            self.v, self.inverse_sums = v[::2], v[1::2]

    # ------------------------------------------------------------------------------------------------------ the map

    def add_potentials(self, row: Tensor, column: Tensor) -> None:
        """Adds potentials (heads, n) and (heads, m) to the log2 scores from now on; -inf takes a token out."""
        row, column = row.unsqueeze(2), column.unsqueeze(2)
        left = torch.cat([self.query * (self.heads.scale * LOG2E), row, torch.ones_like(row)], 2)
        right = torch.cat([self.key, torch.ones_like(column), column], 2)
        self.factors, self.alpha = (left, right), 1.0
        self.filled = False

    def become_coupling(self, u: Tensor, v: Tensor) -> None:
        """From now on K is diag(u) K diag(v), for scalings (heads, n) and (heads, m)."""
        if self.wide or self.kept is None:
            self.add_potentials(u.log2(), v.log2())
        else:
            self.multiplied, self.filled = (u.unsqueeze(2), v.unsqueeze(1)), False

    def log_scores(self, rows: slice) -> Tensor:
        """Scores of a block, in `unit`, plus the potentials, in scratch memory; padding is not hidden."""
        size = (rows.stop or self.n) - (rows.start or 0)
        block = self.scratch[:, :size]
        if size < self.scratch.shape[1]:  # contiguous, as products want it
            block = self.scratch.flatten()[: self.count * size * self.m].view(self.count, size, self.m)
        if self.heads.scores is not None:
            return block.copy_(self.heads.scores[self.group][:, rows]).mul_(self.unit)
        left, right = self.factors
        torch.baddbmm(block, left[:, rows], right.transpose(1, 2), beta=0, alpha=self.alpha, out=block)
        bias = self.heads.bias(self.group, rows)
        return block if bias is None else block.add_(bias, alpha=self.unit)

    def block(self, rows: slice) -> Tensor:
        """A block of K, (heads, rows, m)."""
        if self.kept is not None and self.filled:
            return self.kept[:, rows]
        block = self.log_scores(rows)
        if self.shifted:
            torch.threshold_(block, FLUSH_LOG2[block.dtype], -math.inf)
        if self.kept is None:
            return block.exp2_()
        self.filled = rows.stop == self.n
        block = torch.exp2(block, out=self.kept[:, rows])
        if self.multiplied is not None:
            block.mul_(self.multiplied[0][:, rows]).mul_(self.multiplied[1])
        return block

    def subtract_maxima(self) -> Tensor:
        """Subtracts the row maximum, then the column maximum, in one pass; gives the latter, (heads, 1, m)."""
        row_max = self.scratch.new_empty(self.count, self.n, 1)
        column_max = self.scratch.new_full((self.count, 1, self.m), -math.inf)
        for rows in self.spans:
            block = self.heads.mask_scores_(self.log_scores(rows), self.group, rows)
            row_max[:, rows] = peak = block.amax(2, keepdim=True)
            peak = peak.masked_fill(peak == -math.inf, 0.0)
            block = torch.sub(block, peak, out=block if self.kept is None else self.kept[:, rows])
            torch.maximum(column_max, block.amax(1, keepdim=True), out=column_max)
        rows_valid, columns_valid = row_max != -math.inf, column_max != -math.inf
        shift = column_max.masked_fill(~columns_valid, 0.0)
        if self.kept is None:
            row = torch.where(rows_valid, -row_max, -math.inf).squeeze(2)
            self.add_potentials(row, torch.where(columns_valid, -shift, -math.inf).squeeze(1))
        else:
            for rows in self.spans:
                block = torch.threshold_(self.kept[:, rows].sub_(shift), FLUSH_LOG2[shift.dtype], -math.inf)
                block.exp2_()
            self.filled = True
        counts = rows_valid.sum((1, 2), keepdim=True), columns_valid.sum((1, 2), keepdim=True)
        self.ratio = target_ratio(*counts, shift.dtype)
        self.row_target = rows_valid.transpose(1, 2).to(shift.dtype)
        self.column_target, self.may_be_empty = columns_valid * self.ratio, True
        return column_max

    def normalise_rows(self) -> Tensor | None:
        """Makes K, whole, by softmax; gives which columns have a support, (heads, 1, m), None if all have."""
        heads, queries, keys = self.heads, self.heads.query_mask, self.heads.key_mask
        # What came as scores is the result's memory, which a kernel should not read and write at once.
        scores = None if heads.scores is None else heads.scores[self.group].to(heads.dtype, copy=True)
        block = self.log_scores(ALL_ROWS) if scores is None else scores
        rows = None if queries is None else queries[self.group].unsqueeze(2)
        columns = None if keys is None else keys[self.group].unsqueeze(1)
        if scores is not None or heads.attn_bias is not None:  # -inf may be anywhere
            heads.mask_scores_(block, self.group)
            rows, columns = block.amax(2, keepdim=True) != -math.inf, block.amax(1, keepdim=True) != -math.inf
            block.masked_fill_(~rows, 0.0)
        elif columns is not None:
            block.masked_fill_(~columns & columns.any(2, keepdim=True), -math.inf)
        self.kept = (
            torch.softmax(block, 2)
            if self.kept is self.scratch and scores is None
            else torch.softmax(block, 2, out=self.kept)
        )
        self.filled, self.may_be_empty = True, rows is not None or columns is not None
        # A number may stay on the CPU.
        self.row_target, self.ratio = None, torch.tensor(heads.n / heads.m, dtype=heads.dtype)
        self.column_target = None if heads.n == heads.m else self.ratio
        if self.may_be_empty:
            full = block.new_ones(1, 1, 1, dtype=torch.bool)
            rows = (full if rows is None else rows).expand(-1, heads.n, 1)
            columns = (full if columns is None else columns).expand(-1, 1, heads.m)
            counts = rows.sum(1, keepdim=True), columns.sum(2, keepdim=True)
            alive = (counts[0] > 0) & (counts[1] > 0)
            self.ratio = target_ratio(*counts, heads.dtype)
            self.row_target, columns = (rows & alive).mT.to(heads.dtype), columns & alive
            self.column_target = columns * self.ratio
        return columns

    def prepare(self) -> Tensor | None:
        """Prepares targets, and K where something is subtracted; gives v[0], (heads, 1, m), None for ones."""
        mask, self.damped_factor = self.heads.key_mask, self.v[0].unsqueeze(1)  # 1, and 0 at what is masked
        if self.asynchronous:
            return self.normalise_rows()
        if not self.shifted:
            self.row_target, self.column_target, self.ratio, self.may_be_empty = self.heads.targets(self.group)
            return None if mask is None else mask[self.group].unsqueeze(1)
        shift = self.subtract_maxima()
        if self.inverse_sums is not None:  # a column without support has -inf, which times 0 would be NaN
            lowest = torch.finfo(shift.dtype).min
            self.damped_factor = shift.clamp(min=lowest).mul_(1.0 - self.heads.problem.damping).exp2_()
        return shift.exp2_()  # the first row step is then that of the scores themselves

    def begin(self) -> Tensor:
        """Prepares the first half-step: fills v[0], and gives it, (heads, 1, m)."""
        first, start = self.v[0].unsqueeze(1), self.prepare()
        return first.fill_(1.0) if start is None else first.copy_(start)

    # -------------------------------------------------------------------------------------------------- half-steps

    def invert_(self, sums: Tensor, target: Tensor | None) -> Tensor:
        """Target / sums in place; a row or column without support has a sum of 0, and a target of 0."""
        if self.may_be_empty:
            sums.clamp_(min=self.tiny)
        return sums.reciprocal_() if target is None else torch.div(target, sums, out=sums)

    def row_step(self, step: int, column: Tensor) -> Tensor:
        """The row scaling (heads, 1, n); also the sums for the column step that follows, or the result."""
        row = self.u[step // 2].unsqueeze(1)
        target = None if self.row_target is None else self.row_target.expand(-1, -1, self.n)
        last, self.column_sums = step == self.heads.n_iters - 1, None
        for rows in self.spans:
            block, part = self.block(rows), row[..., rows]
            # (heads, 1, length) with ordinary strides: bmm is 10 to 70 times slower on a column (heads, length, 1).
            part.copy_(torch.bmm(column, block.transpose(1, 2))) if len(self.spans) > 1 else torch.bmm(
                column, block.transpose(1, 2), out=part
            )
            self.invert_(part, None if target is None else target[..., rows])
            if not last:
                self.add_to_column_sums(part, block, self.v[step // 2 + 1].unsqueeze(1))
            elif self.output is not None:
                self.apply(rows, block, column)
        return row

    def add_to_column_sums(self, part: Tensor, block: Tensor, out: Tensor) -> None:
        """Adds part @ block to `column_sums`, which begins as `out`."""
        if self.column_sums is None:
            self.column_sums = torch.bmm(part.contiguous(), block, out=out)
        else:
            self.column_sums += torch.bmm(part.contiguous(), block)

    def column_step(self, step: int, row: Tensor) -> Tensor:
        """The column scaling (heads, 1, m) from the sums that the row step has made."""
        assert self.column_sums is not None
        column, i = self.invert_(self.column_sums, self.column_target), step // 2
        if self.inverse_sums is not None:
            torch.div(column, self.ratio, out=self.inverse_sums[i].unsqueeze(1))
            column.pow_(self.heads.problem.damping).mul_(self.damped_factor)
        return column

    def apply(self, rows: slice, block: Tensor, column: Tensor) -> None:
        """Fills a block of rows of the output: diag(u) K diag(v) V, or the map itself. Overwrites the block."""
        assert self.output is not None
        part, row = self.output[:, rows], self.u[-1][:, rows].unsqueeze(2)
        if self.heads.value is None:
            torch.mul(block, row, out=part).mul_(column)
            return
        if rows.start == 0:
            self.scaled_value = self.heads.values(self.group) * column.transpose(1, 2)
            if self.heads.keep is not None:
                self.scaled_value.mul_(self.heads.keep_factor)
        kept = self.heads.kept(self.group, rows)
        torch.bmm(block if kept is None else block.mul_(kept), self.scaled_value, out=part).mul_(row)

    def run(self, output: Tensor | None = None) -> None:
        """Runs the half-steps and fills the output (heads, n, d_v), or (heads, n, m) where there are no values."""
        self.output = output
        half_steps(self.heads.n_iters, self.row_step, self.column_step, self.begin())
        if output is not None and self.heads.n_iters % 2 == 0:
            for rows in self.spans:
                self.apply(rows, self.block(rows), self.v[-1].unsqueeze(1))

    # --------------------------------------------------------------------------------------------------- in reverse

    def prepare_reverse(self) -> None:
        """What weights are multiplied with, of all half-steps at once: a kernel each would cost as much."""
        self.row_factors = -self.u
        if self.inverse_sums is None:
            ratio = self.ratio if self.ratio.dim() == 0 else self.ratio.squeeze(2)
            self.column_factors = self.v[1:] / -ratio
        else:
            self.column_factors = self.inverse_sums * -self.heads.problem.damping

    def through_row_step(self, step: int, row_weights: Tensor, last: bool) -> Tensor | None:
        """As `Reversible`, with weights (heads, 1, length)."""
        i, column = step // 2, self.v[step // 2].unsqueeze(1)
        weight = row_weights * self.row_factors[i].unsqueeze(1)
        self.left.append(weight)
        self.right.append(column)
        if last:
            return None
        if self.column_sums is None:
            for rows in self.spans:
                self.add_to_column_sums(weight[..., rows], self.block(rows), torch.empty_like(column))
        passed, self.column_sums = self.column_sums, None
        assert passed is not None
        return passed.mul_(column)

    def through_column_step(self, step: int, column_weights: Tensor, row_weights: Tensor | None) -> Tensor:
        """As `Reversible`; of several blocks K^T times the weight of the row step that follows is had in this pass."""
        i, row = step // 2, self.u[step // 2].unsqueeze(1)
        weight = column_weights * self.column_factors[i].unsqueeze(1)
        self.left.append(row)
        self.right.append(weight)
        parts = []
        for rows in self.spans:
            block = self.block(rows)
            part = torch.bmm(weight, block.transpose(1, 2)).mul_(row[..., rows])
            if row_weights is not None:
                part.add_(row_weights[..., rows])
            parts.append(part)
            if len(self.spans) > 1 and step > 1:
                following = part * self.row_factors[i][:, rows].unsqueeze(1)
                self.add_to_column_sums(following, block, torch.empty_like(weight))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def exponential_forward(
    heads: Heads, group: slice, shifted: bool, state: tuple[Tensor, Tensor], output: Tensor, passes: Passes
) -> None:
    """Forward of some heads of one domain; fills all heads' scalings u and v, and output."""
    count, out = group.stop - group.start, output[group]
    scalings = state[0][:, group], state[1][:, group]
    if heads.scores is not None:  # the map is the result
        ExponentialMap(heads, group, shifted, out, out, scalings).run(out)
        return
    whole = (count, heads.n, heads.m) if passes.keep and passes.rows < heads.n else (0,)
    with borrow((count, passes.rows, heads.m), whole, dtype=heads.dtype, device=heads.device) as (scratch, all_rows):
        kept = None if not passes.keep else scratch if passes.rows == heads.n else all_rows
        ExponentialMap(heads, group, shifted, scratch, kept, scalings).run(out)
