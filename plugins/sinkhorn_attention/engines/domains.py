"""Where a head is computed: with its exponentials as they are, with maxima subtracted, or in the log domain.

On the CPU the data say it. On other devices looking at data waits for the device: there every head is SHIFTED, by the
softmax of its rows in place of maxima (exponential.py), and one look at the scalings tells which of them go on to the
log domain; none may be taken while a CUDA graph is captured.

BOUNDED. If |C| log2(e) <= `BOUNDED_LOG2` is known from norms, no intermediate can leave float32's range at any T: the
    map is positive, so that its scalings stay within 2^(+-2 bound), and no entry of a coupling is below
    2^(-4 bound) / m. Damping changes nothing of it: one pair of half-steps on log v keeps order and takes a constant s
    to lambda s, so that from log v = 0 on it stays within max - min of its limit, which a column step bounds by
    2 lambda max|C|.
SHIFTED. Otherwise the row maximum, then the column maximum are subtracted. That leaves a 1 in every row and column of
    K, and what exp2 flushes to zero is below 2^-126 in float32. As long as max(u) max(v) <= 2^84 over all half-steps,
    such an entry is below 2^-42 of a unit row in every intermediate coupling, and nothing overflows.
LOG_DOMAIN. What exceeds that (peaked logits, far rows or columns, many half-steps) is computed again in the log domain,
    in float64 (log_domain.py).
"""

import math

import torch
from torch import Tensor

from .heads import LOG2E, Heads

#: Largest |C| log2(e) that needs no maxima; 4 * 28 + log2(m) stays below 126, float32's range.
BOUNDED_LOG2 = 28.0
#: log2 of the largest max(u) * max(v) that the exponential domain is trusted with, by dtype.
TRUSTED_LOG2 = {torch.float32: 84.0, torch.float64: 900.0}

#: Runs of heads of one domain that a chunk may be cut into; see `merge_domains`.
MAX_PIECES = 3
BOUNDED, SHIFTED, LOG_DOMAIN = 0, 1, 2


def is_asynchronous(device: torch.device) -> bool:
    """Whether a device works behind the program, so that looking at its data waits for it: all but the CPU."""
    return device.type != "cpu"


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured, in which data cannot be looked at."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def log_domain_dtype(heads: Heads) -> torch.dtype:
    """Of the heads that are computed again: float64, which not all devices have, on the CPU."""
    return heads.dtype if is_asynchronous(heads.device) else torch.float64


def bounded_heads(heads: Heads, padding: bool = False) -> Tensor:
    """Which heads' scores, by norms (|q.k| <= |q| |k|) or by their extremes, are small; NaN never is.

    Args:
        heads: the call.
        padding: whether what lies in the padding counts, too.
    """
    if heads.scores is not None:
        low, high = heads.scores.flatten(1).aminmax(dim=1)
        bound = torch.maximum(high, -low).to(heads.dtype)
    else:
        masks = (None, None) if padding else (heads.query_mask, heads.key_mask)
        query_norm, key_norm = map(_largest, heads.norms, masks)
        bound = query_norm.mul_(key_norm).mul_(abs(heads.scale))
        if heads.attn_bias is not None and heads.bias_head is not None:
            low, high = heads.attn_bias.flatten(1).aminmax(dim=1)
            bound = bound + torch.maximum(high, -low).to(bound.dtype)[heads.bias_head]
    return bound <= BOUNDED_LOG2 / LOG2E


def _largest(norms: Tensor, mask: Tensor | None) -> Tensor:
    """The largest norm (heads, length) of each head, of the tokens in the mask if there is one."""
    return (norms if mask is None else norms.masked_fill(~mask, 0.0)).amax(1)


def padding_may_stay(heads: Heads, *factors: Tensor) -> bool:
    """Whether what lies in the padding reaches no result, on the CPU, so that it needs no zeros.

    Masked rows and columns have scalings of 0, which take out any finite number. Where padding is bounded as well, and
    the sum of squares of what is multiplied with the map is finite, so are all products: then the tokens need not be
    copied with zeros in it, which costs a quarter of the time of a call.

    Args:
        heads: the call.
        factors: what else is multiplied, (..., length, d): values, and the gradient of the output.
    """
    finite = all(math.isfinite(torch.linalg.vector_norm(factor)) for factor in factors)
    return finite and bool(bounded_heads(heads, padding=True).all())


def trusted_heads(u: Tensor, v: Tensor) -> Tensor:
    """Which heads' scalings u (half-steps, heads, n) and v stayed in the trusted range; NaN never does."""
    return u.amax((0, 2)) * v.amax((0, 2)) <= 2.0 ** TRUSTED_LOG2[u.dtype]


def merge_domains(domain: Tensor, size: int) -> None:
    """Shifts bounded heads of a chunk too where shifted ones lie scattered among them: many small pieces cost more.

    Args:
        domain: BOUNDED or SHIFTED of each head, (heads,); is changed.
        size: heads in a chunk.
    """
    for chunk in domain.split(size):
        if int((chunk[1:] != chunk[:-1]).sum()) >= MAX_PIECES:
            chunk.fill_(SHIFTED)


def runs(domains: list[int], size: int) -> list[tuple[slice, int]]:
    """Cuts the heads into consecutive groups of at most `size` that have the same domain."""
    cut, start = [], 0
    for head in range(1, len(domains) + 1):
        if head == len(domains) or domains[head] != domains[start] or head - start == size:
            cut.append((slice(start, head), domains[start]))
            start = head
    return cut
