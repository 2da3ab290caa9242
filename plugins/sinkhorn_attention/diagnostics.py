"""How far a coupling is from doubly stochastic."""

from typing import NamedTuple

import torch
from torch import Tensor


class MarginalError(NamedTuple):
    """Largest absolute deviation of the row sums and of the column sums from their targets, each of shape (...)."""

    rows: Tensor
    columns: Tensor


def marginal_error(coupling: Tensor, query_mask: Tensor | None = None, key_mask: Tensor | None = None) -> MarginalError:
    """Row and column marginal error of a coupling (..., n, m).

    Valid rows should sum to 1 and valid columns to n_valid / m_valid; masked ones are left out. Without a mask every
    row and column is valid, as `sinkhorn` leaves them where all scores are finite.

    Args:
        coupling: (..., n, m).
        query_mask: broadcastable to (..., n), True = the row takes part.
        key_mask: broadcastable to (..., m), True = the column takes part.
    """
    coupling = coupling.double() if coupling.dtype == torch.float64 else coupling.float()
    row_sums, column_sums = coupling.sum(-1), coupling.sum(-2)
    rows = torch.ones_like(row_sums, dtype=torch.bool) if query_mask is None else query_mask.expand_as(row_sums)
    columns = torch.ones_like(column_sums, dtype=torch.bool) if key_mask is None else key_mask.expand_as(column_sums)
    target = rows.sum(-1, keepdim=True).to(coupling.dtype) / columns.sum(-1, keepdim=True).clamp(min=1)
    return MarginalError(
        torch.where(rows, row_sums - 1, 0.0).abs().amax(-1),
        torch.where(columns, column_sums - target, 0.0).abs().amax(-1),
    )
