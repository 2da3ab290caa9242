"""Half-steps by blocks of rows, for maps that the cache does not hold.

A row step followed by a column step needs a block of rows of K once: its rows are normalised, and its share of the
column sums is added up. So T half-steps pass K ceil(T/2) times forward and about as often backward, in blocks that stay
in the cache. K is either kept (the slab: its memory is one map) or made again from queries and keys for each pass (the
stream: memory O(n d)). The algorithm and the guard are those of the dense engine.

The potentials that are subtracted from the scores are two more columns of the factors of the product,
(log2(e) scale q, -r, 1) (k, 1, -c)^T, so that a block is one product and one exponential.
"""

import math

import torch
from torch import Tensor

from .guard import BOUNDED, FLUSH_LOG2, PEAK, SHIFTED
from .log_domain import target_ratio
from .problem import LOG2E, Gradients, Problem
from .scratch import borrow

#: Bytes of one block of rows for each thread, all heads of the chunk together. A block of 4,096 keys then has 256 rows:
#: with half as many a stream takes 5 to 7 % longer, with a quarter 20 %, and twice as many gain nothing.
BLOCK_BYTES = 2 << 20


class Blocks:
    """K of some heads, block of rows by block of rows.

    Args:
        problem: the call.
        heads: the heads, of the same mode.
        mode: BOUNDED or SHIFTED.
        scratch: at least one block, (heads, rows, m), contiguous when cut to fewer rows.
        kept: (heads, n, m), where K is kept from the first pass on; None makes it for each pass.
    """

    def __init__(self, problem: Problem, heads: slice, mode: int, scratch: Tensor, kept: Tensor | None) -> None:
        self.problem, self.heads, self.mode = problem, heads, mode
        self.query, self.key = problem.queries(heads), problem.keys(heads)
        self.bias = problem.bias(heads)
        self.scratch, self.kept = scratch, kept
        self.filled = False
        self.count, self.n, self.m = heads.stop - heads.start, problem.n, problem.m
        size = block_rows(self.count, self.n, self.m, problem.dtype)
        self.spans = [(start, min(start + size, self.n)) for start in range(0, self.n, size)]
        #: Subtracted from log2 scores: (heads, n, 1) and (heads, m, 1), or nothing.
        self.row_shift = self.column_shift = None
        self.factors = self.query * (problem.scale * LOG2E), self.key

    def shift(self, row: Tensor, column: Tensor) -> None:
        """Adds potentials (heads, n) and (heads, m) to the log2 scores from now on; -inf takes a token out."""
        row, column = row.unsqueeze(2), column.unsqueeze(2)
        left = torch.cat([self.query * (self.problem.scale * LOG2E), row, torch.ones_like(row)], 2)
        self.factors = left, torch.cat([self.key, torch.ones_like(column), column], 2)
        self.filled = False

    def scores(self, start: int, stop: int) -> Tensor:
        """Log2 scores of a block plus the potentials, in scratch memory."""
        block = self.scratch.flatten()[: self.count * (stop - start) * self.m].view(self.count, stop - start, self.m)
        torch.bmm(self.factors[0][:, start:stop], self.factors[1].transpose(1, 2), out=block)
        if self.bias is not None:
            block.add_(self.bias if self.bias.shape[1] == 1 else self.bias[:, start:stop], alpha=LOG2E)
        return block

    def kernel(self, start: int, stop: int) -> Tensor:
        """A block of K, (heads, rows, m)."""
        if self.kept is not None and self.filled:
            return self.kept[:, start:stop]
        block = self.scores(start, stop)
        if self.mode == SHIFTED:
            torch.threshold_(block, FLUSH_LOG2[block.dtype], -math.inf)
        if self.kept is None:
            return block.exp2_()
        self.filled = stop == self.n
        return torch.exp2(block, out=self.kept[:, start:stop])

    def subtract_maxima(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Guard B: shifts by the row maximum, then the column maximum, in one pass.

        Returns:
            The first column scaling, the targets of rows and columns and n_valid / m_valid, as `dense.exponentiate`.
        """
        key_mask, query_mask = self.problem.key_mask, self.problem.query_mask
        zero = self.query.new_zeros(())
        hidden_row = zero.expand(self.count, self.n)
        hidden_column = zero.expand(self.count, self.m)
        if query_mask is not None:
            hidden_row = hidden_row.masked_fill(~query_mask[self.heads], -math.inf)
        if key_mask is not None:
            hidden_column = hidden_column.masked_fill(~key_mask[self.heads], -math.inf)
        self.shift(hidden_row, hidden_column)
        row_max = self.query.new_empty(self.count, self.n, 1)
        column_max = self.query.new_full((self.count, 1, self.m), -math.inf)
        for start, stop in self.spans:
            block = self.scores(start, stop)
            peak = block.amax(2, keepdim=True)
            row_max[:, start:stop] = peak
            block.sub_(peak.masked_fill_(peak == -math.inf, 0.0))
            torch.maximum(column_max, block.amax(1, keepdim=True), out=column_max)
        rows, columns = row_max != -math.inf, column_max != -math.inf
        ratio = target_ratio(rows, columns, row_max.dtype)
        row_shift = hidden_row - row_max.masked_fill(~rows, 0.0).squeeze(2)
        self.shift(row_shift, hidden_column - column_max.masked_fill(~columns, 0.0).squeeze(1))
        return column_max.exp2_(), rows.transpose(1, 2).to(ratio.dtype), columns * ratio, ratio


def block_rows(count: int, n: int, m: int, dtype: torch.dtype) -> int:
    """Rows in a block of `count` heads."""
    return max(16, min(n, torch.get_num_threads() * BLOCK_BYTES // (count * m * dtype.itemsize)))


def scratch_shape(count: int, n: int, m: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """What `Blocks` wants as scratch."""
    return count, min(n, block_rows(count, n, m, dtype)), m


def _prepare(
    problem: Problem, heads: slice, blocks: Blocks
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, bool]:
    """The first column scaling, the targets of rows and columns, n_valid / m_valid, and whether sums may be 0."""
    if blocks.mode == SHIFTED:
        return *blocks.subtract_maxima(), True
    mask = problem.key_mask
    first = blocks.query.new_ones(()) if mask is None else mask[heads].unsqueeze(1)
    return first, *problem.targets(heads)


def run_forward(
    problem: Problem, heads: slice, mode: int, n_iters: int, output: Tensor, u: Tensor, v: Tensor, keep: bool
) -> None:
    """Forward of some heads that have the same mode; fills output (heads, n, d_v), u and v.

    `keep` says whether K is kept (slab) or made again (stream).
    """
    count, n, m = heads.stop - heads.start, problem.n, problem.m
    kept_shape = (count, n, m) if keep else (0,)
    with borrow(scratch_shape(count, n, m, problem.dtype), kept_shape, dtype=problem.dtype) as (scratch, kept):
        blocks = Blocks(problem, heads, mode, scratch, kept if keep else None)
        first, row_target, column_target, _, has_empty = _prepare(problem, heads, blocks)
        v[0].unsqueeze(1).copy_(first)
        if row_target is not None:
            row_target = row_target.expand(-1, -1, n)
        value, tiny = problem.values(heads), torch.finfo(problem.dtype).tiny

        def apply(block: Tensor, scaled_value: Tensor, start: int, stop: int) -> None:
            """The block's rows of the output, but for the row scaling."""
            dropout = problem.dropout(heads, rows=slice(start, stop))
            product = torch.bmm(block if dropout is None else block * dropout, scaled_value)
            torch.mul(product, u[-1, :, start:stop].unsqueeze(2), out=output[:, start:stop])

        def invert(sums: Tensor, target: Tensor | None) -> Tensor:
            if has_empty:
                sums.clamp_(min=tiny)
            return sums.reciprocal_() if target is None else torch.div(target, sums, out=sums)

        for i in range((n_iters + 1) // 2):
            last = 2 * i + 1 == n_iters
            column = v[i].unsqueeze(1)
            scaled_value = value * column.transpose(1, 2) if last else value
            sums = None if last else v.new_zeros(count, 1, m)
            for start, stop in blocks.spans:
                block = blocks.kernel(start, stop)
                row = torch.bmm(column, block.transpose(1, 2))
                row = invert(row, None if row_target is None else row_target[..., start:stop])
                u[i, :, start:stop] = row.squeeze(1)
                if sums is None:
                    apply(block, scaled_value, start, stop)
                else:
                    sums += torch.bmm(row, block)
            if sums is not None:
                v[i + 1] = invert(sums, column_target).squeeze(1)
        if n_iters % 2 == 0:
            scaled_value = value * v[-1].unsqueeze(2)
            for start, stop in blocks.spans:
                apply(blocks.kernel(start, stop), scaled_value, start, stop)


def run_backward(
    problem: Problem,
    heads: slice,
    mode: int,
    settings: tuple[int, bool],
    d_output: Tensor,
    output: Tensor,
    u: Tensor,
    v: Tensor,
    gradients: Gradients,
    keep: bool,
) -> None:
    """Backward of some heads that have the same mode; see `dense` for the formulas.

    Args:
        problem: the call.
        heads: the heads.
        mode: BOUNDED or SHIFTED.
        settings: the number of half-steps, and whether column potentials are constants.
        d_output: all heads' dL/dO, (heads, n, d_v).
        output: all heads' output.
        u: row scalings of these heads.
        v: column scalings.
        gradients: to be filled.
        keep: whether K is kept (slab) or made again (stream).
    """
    count, n, m = heads.stop - heads.start, problem.n, problem.m
    shape = scratch_shape(count, n, m, problem.dtype)
    kept_shape = (count, n, m) if keep else (0,)
    with borrow(shape, shape, kept_shape, dtype=problem.dtype) as (scratch, work, kept):
        blocks = Blocks(problem, heads, mode, scratch, kept if keep else None)
        _Backward(problem, heads, blocks, settings, d_output, output, u, v, work).fill(gradients)


class _Backward:
    """The passes over the blocks of K that make the gradients of some heads."""

    def __init__(
        self,
        problem: Problem,
        heads: slice,
        blocks: Blocks,
        settings: tuple[int, bool],
        d_output: Tensor,
        output: Tensor,
        u: Tensor,
        v: Tensor,
        work: Tensor,
    ) -> None:
        self.problem, self.heads, self.blocks, self.work = problem, heads, blocks, work
        self.n_iters, self.detached = settings
        self.value, self.output = problem.values(heads), output[heads]
        self.d_output = problem.hide_rows(d_output[heads].to(problem.dtype), heads)
        self.left, self.right = self.d_output, self.value
        if blocks.mode == BOUNDED:  # K is the final coupling itself, and the scalings are relative to it
            self.ratio = problem.targets(heads)[2]
            blocks.shift(u[-1].log2(), v[-1].log2())
            u, v = u / u[-1], v / v[-1]
            if problem.query_mask is not None or problem.key_mask is not None:
                u.nan_to_num_(nan=0.0)  # 0 / 0 at what is masked
                v.nan_to_num_(nan=0.0)
        else:
            self.ratio = blocks.subtract_maxima()[3]
            self.left, self.right = self.left * u[-1].unsqueeze(2), self.right * v[-1].unsqueeze(2)
        self.u, self.v = u, v

    def buffer(self, block: Tensor) -> Tensor:
        """Scratch of a block's shape."""
        return self.work.flatten()[: block.numel()].view(block.shape)

    def coupling_gradient(self, block: Tensor, start: int, stop: int) -> Tensor:
        """dL/dP scaled to K, of a block."""
        product = torch.bmm(self.left[:, start:stop], self.right.transpose(1, 2), out=self.buffer(block))
        dropout = self.problem.dropout(self.heads, rows=slice(start, stop))
        return product if dropout is None else product.mul_(dropout)

    def value_gradient(self) -> tuple[Tensor, bool]:
        """dL/dV, and whether the coupling is peaked; the first pass."""
        d_value, peaked = torch.zeros_like(self.value), self.blocks.mode == SHIFTED
        for start, stop in self.blocks.spans:
            block = self.blocks.kernel(start, stop)
            peaked = peaked or bool(block.amax() > PEAK)
            dropout = self.problem.dropout(self.heads, rows=slice(start, stop))
            if dropout is not None:
                block = torch.mul(block, dropout, out=self.buffer(block))
            d_value.baddbmm_(block.transpose(1, 2), self.left[:, start:stop])
        if self.blocks.mode == SHIFTED:
            d_value.mul_(self.v[-1].unsqueeze(2))
        return d_value, peaked

    def sums(self, peaked: bool, d_value: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of P * dL/dP over rows (heads, 1, n) and columns (heads, 1, m)."""
        if not peaked:
            rows = (self.d_output * self.output).sum(2).unsqueeze(1)
            return rows, (self.value * d_value).sum(2).unsqueeze(1)
        rows = self.left.new_empty(self.left.shape[0], 1, self.problem.n)
        columns = self.left.new_zeros(self.left.shape[0], 1, self.problem.m)
        for start, stop in self.blocks.spans:
            block = self.blocks.kernel(start, stop)
            weighted = self.coupling_gradient(block, start, stop).mul_(block)
            rows[..., start:stop] = weighted.sum(2).unsqueeze(1)
            columns += weighted.sum(1, keepdim=True)
        return rows, columns

    def correction(self, row_sums: Tensor, column_sums: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """The columns of A (heads, 1, n) and B (heads, 1, m): half-steps in reverse, a column and a row step a pass."""
        left: list[Tensor] = []
        right: list[Tensor] = []
        flow = column_sums
        step = self.n_iters - 1
        initial: Tensor | None = row_sums
        while step >= 0:
            weight = None
            if step % 2 == 1:
                after = self.v[(step + 1) // 2].unsqueeze(1)
                weight = (flow * after).div_(-self.ratio)
                if not self.detached:
                    left.append(self.u[step // 2].unsqueeze(1))
                    right.append(weight)
                step -= 1
            row, column = self.u[step // 2].unsqueeze(1), self.v[step // 2].unsqueeze(1)
            last = step == 0 or self.detached
            if weight is None or self.detached:
                assert initial is not None
                negative = (initial * row).neg_()
                flow = column_sums if last else self.passed(negative).mul_(column).add_(column_sums)
            else:
                negative, through = self.both(weight, row, initial, last)
                flow = through.mul_(column)
            left.append(negative)
            right.append(column)
            initial = None
            step = -1 if last else step - 1
        return left, right

    def passed(self, weight: Tensor) -> Tensor:
        """K^T weight, (heads, 1, m)."""
        total = weight.new_zeros(weight.shape[0], 1, self.problem.m)
        for start, stop in self.blocks.spans:
            total += torch.bmm(weight[..., start:stop].contiguous(), self.blocks.kernel(start, stop))
        return total

    def both(self, weight: Tensor, row: Tensor, initial: Tensor | None, last: bool) -> tuple[Tensor, Tensor]:
        """A column step and the row step before it in one pass: the row step's weight, and K^T of it unless `last`."""
        negative = torch.empty_like(row, memory_format=torch.contiguous_format)
        through = torch.zeros_like(weight)
        for start, stop in self.blocks.spans:
            block = self.blocks.kernel(start, stop)
            part = torch.bmm(weight, block.transpose(1, 2)).mul_(row[..., start:stop])
            if initial is not None:
                part.add_(initial[..., start:stop])
            part.mul_(row[..., start:stop]).neg_()
            negative[..., start:stop] = part
            if not last:
                through += torch.bmm(part, block)
        return negative, through

    def fill(self, gradients: Gradients) -> None:
        """Runs the passes and writes the gradients."""
        problem, heads, scale = self.problem, self.heads, self.problem.scale
        d_value, peaked = self.value_gradient()
        left, right = self.correction(*self.sums(peaked, d_value))
        factors = torch.cat(left, 1).transpose(1, 2), torch.cat(right, 1).transpose(1, 2)
        fused = not peaked and problem.keep is None
        if fused:
            self.left = torch.cat([self.left, factors[0]], 2)
            self.right = torch.cat([self.right, factors[1]], 2)
        d_query, d_key = torch.empty_like(self.blocks.query), torch.zeros_like(self.blocks.key)
        for start, stop in self.blocks.spans:
            block = self.blocks.kernel(start, stop)
            gradient = self.coupling_gradient(block, start, stop)
            if not fused:
                gradient.baddbmm_(factors[0][:, start:stop], factors[1].transpose(1, 2))
            gradient.mul_(block)
            d_query[:, start:stop] = torch.bmm(gradient, self.blocks.key)
            d_key.baddbmm_(gradient.transpose(1, 2), self.blocks.query[:, start:stop])
            gradients.add_bias(heads, gradient, slice(start, stop))
        gradients.query[heads] = d_query.mul_(scale).to(gradients.query.dtype)
        gradients.key[heads] = d_key.mul_(scale).to(gradients.key.dtype)
        gradients.value[heads] = problem.hide_columns(d_value, heads).to(gradients.value.dtype)
