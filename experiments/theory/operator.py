"""The one door through which the theory reaches the operator and the registry of normalizers.

Every module of this package calls these functions by their module, `operator.coupling(...)`. What is put in the place
of `sinkhorn` and `get_normalizer` here is therefore what all statements are checked on.
"""

from typing import Any

import torch
from sinkhorn_attention import Normalizer, get_normalizer, marginal_error, sinkhorn
from sinkhorn_attention.engines import implicit
from torch import Tensor

#: Half-steps that are tried before a coupling is taken as it is.
FIRST_ITERS = 101
MOST_ITERS = 25_601


def coupling(scores: Tensor, n_iters: int, **masks: Tensor) -> Tensor:
    """The coupling K^n_iters of scores (..., n, m): `n_iters` half-steps, rows first (Sander et al. 2022, eq. 3)."""
    return sinkhorn(scores, n_iters, **masks)


def converged_iters(scores: Tensor, tolerance: float = 1e-13) -> int:
    """An odd number of half-steps after which no column of any coupling is further than `tolerance` from its target.

    Where `MOST_ITERS` are not enough, they are returned: what is then missing shows itself in the statements, which
    measure it.
    """
    with torch.no_grad():
        return _converge(scores.detach(), tolerance)[0]


def _converge(scores: Tensor, tolerance: float) -> tuple[int, Tensor]:
    """Half-steps done and the coupling they gave. The operator goes on from log K^l, l odd, where it stopped.

    The row step that each call begins with finds rows that sum to 1 already, so it counts as none.
    """
    n_iters = FIRST_ITERS
    found = coupling(scores, n_iters)
    while n_iters < MOST_ITERS and bool((marginal_error(found).columns > tolerance).any()):
        more = min(n_iters - 1, MOST_ITERS - n_iters)
        found = coupling(found.log(), more + 1)
        n_iters += more
    return n_iters, found


def converged(scores: Tensor, tolerance: float = 1e-13) -> Tensor:
    """K^infinity of scores (..., n, m), differentiable by its half-steps; see `converged_iters`."""
    if not (torch.is_grad_enabled() and scores.requires_grad):
        return _converge(scores, tolerance)[1]
    return coupling(scores, converged_iters(scores, tolerance))


def normalizer(name: str, **options: Any) -> Normalizer:
    """The normalizer registered under `name`."""
    return get_normalizer(name, **options)


def implicit_coupling(scores: Tensor, n_iters: int) -> Tensor:
    """The coupling with the derivative of the limit: what `gradient="implicit"` gives in the operator."""
    return implicit.implicit_coupling(scores, n_iters)
