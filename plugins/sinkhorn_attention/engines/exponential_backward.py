"""Backward of the exponential domain: K made again, the half-steps in reverse, one pass that makes the gradients.

See exponential.py for the formula.
"""

import torch
from torch import Tensor

from . import domains
from .exponential import ExponentialMap, Passes
from .half_steps import reverse_half_steps
from .heads import Gradients
from .scratch import borrow

#: From this entry of a coupling on, the gradient is a difference of nearly equal terms; see `_Backward`.
PEAK = 0.9


def exponential_backward(
    gradients: Gradients,
    group: slice,
    shifted: bool,
    state: tuple[Tensor, Tensor],
    results: tuple[Tensor, Tensor],
    passes: Passes,
) -> None:
    """Backward of some heads of one domain, from all heads' scalings and (output, dL/d output)."""
    heads = gradients.heads
    count, n, m = group.stop - group.start, heads.n, heads.m
    # A map that is used transposed gets a row stride that is no multiple of 64 * 2^k bytes: up to 1.4 times faster.
    padded = m + 8 if m % 16 == 0 and not domains.is_asynchronous(heads.device) else m
    shape = count, passes.rows, m
    shapes = shape, (0,) if passes.keep else shape, (count, n, padded) if passes.keep else (0,)
    with borrow(*shapes, dtype=heads.dtype, device=heads.device) as buffers:
        work, again, whole = buffers
        # Where K is kept, a block's scores are no longer needed when its gradient is made.
        scratch, kept = (work, whole[..., :m]) if passes.keep else (again, None)
        scalings = state[0][:, group], state[1][:, group]
        _Backward(ExponentialMap(heads, group, shifted, scratch, kept, scalings), results, work).fill(gradients)


class _Backward:
    """The passes over the blocks of K that make the gradients of some heads.

    The rank-T correction begins with the sums of P * dL/dP over rows and columns. They equal dO.O and V.dV, and then
    one product makes both terms of dL/dC. Where the map is peaked, though, dL/dC is nearly nothing, and rounding the
    two terms in two ways would be all of it: there the sums are taken from the very products that they are subtracted
    from, which is 50 times more accurate on saturated maps and costs a tenth of the time.
    """

    def __init__(self, map_: ExponentialMap, results: tuple[Tensor, Tensor], work: Tensor) -> None:
        self.map, self.work, self.heads = map_, work, map_.heads
        heads, group, u, v = map_.heads, map_.group, map_.u, map_.v
        self.d_output = results[1][group].to(heads.dtype)
        if heads.value is not None:
            self.output, self.value = results[0][group], heads.values(group)
            self.d_output = heads.hide_queries(self.d_output, group)
            self.left, self.right = self.d_output, self.value
        if map_.shifted:
            map_.prepare()
            if heads.value is not None:
                self.left, self.right = self.left * u[-1].unsqueeze(2), self.right * v[-1].unsqueeze(2)
            return
        # K is the final coupling itself, and the scalings are relative to it.
        map_.ratio = heads.targets(group)[2]
        map_.become_coupling(u[-1], v[-1])
        relative = u / u[-1], map_.columns / v[-1]
        if heads.query_mask is not None or heads.key_mask is not None:
            for scaling in relative:
                scaling.nan_to_num_(nan=0.0)  # 0 / 0 at what is masked
        map_.set_scalings(*relative)

    def buffer(self, rows: slice) -> Tensor:
        """Scratch of a block's shape."""
        size = rows.stop - rows.start
        return self.work.flatten()[: len(self.work) * size * self.heads.m].view(len(self.work), size, self.heads.m)

    def coupling_gradient(self, rows: slice) -> Tensor:
        """dL/dP scaled to K, of a block."""
        if self.heads.value is None:
            gradient = self.buffer(rows).copy_(self.d_output[:, rows])
            if self.map.shifted:
                gradient.mul_(self.map.u[-1][:, rows].unsqueeze(2)).mul_(self.map.v[-1].unsqueeze(1))
            return gradient
        product, factor = self.buffer(rows), self.heads.keep_factor
        torch.baddbmm(product, self.left[:, rows], self.right.transpose(1, 2), beta=0, alpha=factor, out=product)
        kept = self.heads.kept(self.map.group, rows)
        return product if kept is None else product.mul_(kept)

    def value_gradient(self, d_value: Tensor) -> bool:
        """Fills dL/dV, and says whether the coupling is peaked."""
        peaked = self.map.shifted
        for rows in self.map.spans:
            block = self.map.block(rows)
            peaked = peaked or bool(block.amax() > PEAK)
            kept = self.heads.kept(self.map.group, rows)
            if kept is not None:
                block = torch.mul(block, kept, out=self.buffer(rows))
            beta, factor = int(rows.start > 0), self.heads.keep_factor
            torch.baddbmm(d_value, block.transpose(1, 2), self.left[:, rows], beta=beta, alpha=factor, out=d_value)
        if self.map.shifted:
            d_value.mul_(self.map.v[-1].unsqueeze(2))
        return peaked

    def sums(self) -> tuple[Tensor, Tensor]:
        """Sums of P * dL/dP over rows (heads, 1, n) and columns (heads, 1, m), from the products themselves."""
        row_sums, column_sums = [], None
        for rows in self.map.spans:
            block = self.map.block(rows)  # first: it is made in the memory that the gradient takes then
            weighted = self.coupling_gradient(rows).mul_(block)
            row_sums.append(weighted.sum(2))
            total = weighted.sum(1)
            column_sums = total if column_sums is None else column_sums.add_(total)
        assert column_sums is not None
        of_rows = row_sums[0] if len(row_sums) == 1 else torch.cat(row_sums, 1)
        return of_rows.unsqueeze(1), column_sums.unsqueeze(1)

    def fill(self, gradients: Gradients) -> None:
        """Runs the passes and writes the gradients."""
        map_, heads = self.map, self.heads
        parts, peaked = gradients.parts(map_.group, heads.dtype), True
        if heads.value is not None:
            peaked = self.value_gradient(parts[2])
        weights = self.sums() if peaked else (_dot(self.d_output, self.output), _dot(self.value, parts[2]))
        map_.prepare_reverse()
        reverse_half_steps(map_, heads.n_iters, heads.problem.detached, *weights)
        columns = torch.cat(map_.left, 1), torch.cat(map_.right, 1)
        fused = not peaked and heads.keep is None and map_.wide
        if fused:
            self.left = torch.cat([self.left, columns[0].transpose(1, 2)], 2)
            self.right = torch.cat([self.right, columns[1].transpose(1, 2)], 2)
        for rows in map_.spans:
            block = map_.block(rows)
            gradient = self.coupling_gradient(rows)
            if not fused:
                gradient.baddbmm_(columns[0][..., rows].transpose(1, 2), columns[1])
            gradient = block.mul_(gradient)  # in the memory whose rows are padded
            if heads.value is None:
                parts[0][:, rows] = gradient
            else:
                gradients.add_block(map_.group, rows, gradient, (map_.query, map_.key), parts)
        gradients.put(map_.group, parts)


def _dot(first: Tensor, second: Tensor) -> Tensor:
    """Scalar products of tokens (heads, length, d), as (heads, 1, length)."""
    with borrow(tuple(first.shape), dtype=first.dtype, device=first.device) as (product,):
        return torch.mul(first, second, out=product).sum(2).unsqueeze(1)
