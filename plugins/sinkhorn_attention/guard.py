"""The guard of the exponential domain: which map of scaling vectors can hold a matrix, decided for each by itself.

A. If |C| log2(e) <= `BOUNDED_LOG2` is known from norms, no intermediate can leave float32's range at any T: the map is
   positive, so that its scalings stay within 2^(+-2 bound), and no entry of a coupling is below 2^(-4 bound) / m.
B. Otherwise the row maximum, then the column maximum are subtracted. That leaves a 1 in every row and column of K, and
   what exp2 flushes to zero is below 2^-126 in float32. As long as max(u) max(v) <= 2^84 over all half-steps, such an
   entry is below 2^-42 of a unit row in every intermediate coupling, and nothing overflows.
C. What exceeds that (peaked logits, far rows or columns, many half-steps) is computed again in the log domain, in
   float64: maps of more than `dense.SLAB_BYTES` by blocks of rows (log_domain_blocks.py).
"""

import math

import torch
from torch import Tensor

from .problem import LOG2E, Problem

#: Guard A: largest |C| log2(e) that needs no maxima; 4 * 28 + log2(m) stays below 126, float32's range.
BOUNDED_LOG2 = 28.0
#: Guard B: log2 of the largest max(u) * max(v) that the exponential domain is trusted with, by dtype.
GUARD_LOG2 = {torch.float32: 84.0, torch.float64: 900.0}
#: log2 below which an entry of K is exactly 0: subnormal numbers make a product up to 200 times slower.
FLUSH_LOG2 = {torch.float32: -126.0, torch.float64: -1022.0}

#: From this entry of a coupling on, the gradient is a difference of nearly equal terms; see `dense`.
PEAK = 0.9
#: Runs of heads with the same mode that a chunk may be cut into; see `merge_modes`.
MAX_PIECES = 3
#: How a head was computed: by which case of the guard.
BOUNDED, SHIFTED, LOG_DOMAIN = 0, 1, 2


def bounded_heads(problem: Problem, padding: bool = False) -> Tensor:
    """Guard A: which heads' scores, by norms (|q.k| <= |q| |k|) or by their extremes, are small; NaN never is.

    Args:
        problem: the call.
        padding: whether what lies in the padding counts, too.
    """
    if problem.given_scores is not None:
        low, high = problem.given_scores.flatten(1).aminmax(dim=1)
        bound = torch.maximum(high, -low).to(problem.dtype)
    else:
        masks = (None, None) if padding else (problem.query_mask, problem.key_mask)
        query_norm, key_norm = map(_largest, problem.norms, masks)
        bound = query_norm.mul_(key_norm).mul_(abs(problem.scale))
        bias = problem.attn_bias
        if bias is not None and problem.bias_head is not None:
            low, high = bias.flatten(1).aminmax(dim=1)
            bound = bound + torch.maximum(high, -low).to(bound.dtype)[problem.bias_head]
    return bound <= BOUNDED_LOG2 / LOG2E


def _largest(norms: Tensor, mask: Tensor | None) -> Tensor:
    """The largest norm (heads, length) of each head, of the tokens in the mask if there is one."""
    return (norms if mask is None else norms.masked_fill(~mask, 0.0)).amax(1)


def must_hide_padding(problem: Problem, *factors: Tensor) -> bool:
    """Whether what lies in the padding could reach a result, on the CPU.

    Masked rows and columns have scalings of 0, which take out any finite number. Where padding passes guard A as well,
    and the sum of squares of what is multiplied with the map is finite, so are all products: then the tokens need not
    be copied with zeros in it, which costs a quarter of the time of a call.

    Args:
        problem: the call.
        factors: what else is multiplied, (..., length, d): values, and the gradient of the output.
    """
    if problem.query_mask is None and problem.key_mask is None:
        return False
    finite = all(math.isfinite(torch.linalg.vector_norm(factor)) for factor in factors)
    return not (finite and bool(bounded_heads(problem, padding=True).all()))


def trusted_heads(u: Tensor, v: Tensor) -> Tensor:
    """Guard B: which heads' scalings u (half-steps, heads, n) and v stayed in the trusted range; NaN never does."""
    product = u.amax((0, 2)).log2() + v.amax((0, 2)).log2()
    return product <= GUARD_LOG2[u.dtype]


def merge_modes(mode: Tensor, size: int) -> None:
    """Shifts bounded heads of a chunk too where shifted ones lie scattered among them: many small pieces cost more.

    Args:
        mode: BOUNDED or SHIFTED of each head, (heads,); is changed.
        size: heads in a chunk.
    """
    for chunk in mode.split(size):
        if int((chunk[1:] != chunk[:-1]).sum()) >= MAX_PIECES:
            chunk.fill_(SHIFTED)


def runs(modes: list[int], size: int) -> list[tuple[slice, int]]:
    """Cuts the heads into consecutive groups of at most `size` that have the same mode."""
    cut, start = [], 0
    for head in range(1, len(modes) + 1):
        if head == len(modes) or modes[head] != modes[start] or head - start == size:
            cut.append((slice(start, head), modes[start]))
            start = head
    return cut
