"""Sinkhorn over the edges of a graph: the dense operator on a map whose support is the edge list."""

import torch
from sinkhorn_attention.engines.half_steps import half_steps
from torch import Tensor
from torch_geometric.utils import scatter


def edge_sinkhorn(
    scores: Tensor,
    rows: Tensor,
    columns: Tensor,
    num_rows: int,
    num_columns: int,
    n_iters: int = 5,
    *,
    row_batch: Tensor | None = None,
    column_batch: Tensor | None = None,
) -> Tensor:
    """Normalises exp(scores) over the edges by `n_iters` alternating half-steps, rows first.

    Equals `sinkhorn_attention.sinkhorn` of the dense (num_rows, num_columns) matrix that holds the scores at the edges
    and -inf elsewhere, in memory linear in the edges. A sparse support need not admit a coupling with both marginals:
    then the last half-step's side is exact and the other as close as the support lets it.

    Args:
        scores: (E,) or (E, F), floating; each of the F channels is a map of its own. -inf is no support.
        rows: (E,), int64, row of each edge (the receiving node).
        columns: (E,), int64, column of each edge (the sending node).
        num_rows: number of rows.
        num_columns: number of columns.
        n_iters: number of HALF-steps; 1 is softmax over the edges of a row.
        row_batch: (num_rows,), int64, the graph of each row, where a batch of graphs is given as one. A column step
            makes columns sum to the number of rows that have an edge over the number of columns that have one, and
            that ratio is each graph's own; without it, that of everything together.
        column_batch: (num_columns,), likewise.

    Returns:
        The coupling at the edges, in the shape and dtype of `scores`.

    Raises:
        ValueError: for n_iters < 1, index vectors of another length than the scores, or one batch vector alone.
    """
    if not isinstance(n_iters, int) or isinstance(n_iters, bool) or n_iters < 1:
        raise ValueError(f"n_iters must be an integer >= 1 (it counts half-steps; 1 is softmax), got {n_iters!r}")
    if rows.shape != scores.shape[:1] or columns.shape != scores.shape[:1]:
        raise ValueError(
            f"rows and columns must have one entry per edge, {scores.shape[0]}, "
            f"got {tuple(rows.shape)} and {tuple(columns.shape)}"
        )
    if (row_batch is None) != (column_batch is None):
        raise ValueError("row_batch and column_batch go together; only one of them was given")
    log_map = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if n_iters > 1:
        support = (log_map.detach() != -torch.inf).to(log_map.dtype)
        n_valid = _count(support, rows, num_rows, row_batch, column_batch)
        m_valid = _count(support, columns, num_columns, column_batch, column_batch)
        log_column_mass = (n_valid / m_valid).log()

    def row_step(step: int, of_columns: Tensor) -> Tensor:
        return -_log_sum_exp(log_map + of_columns, rows, num_rows)[rows]

    def column_step(step: int, of_rows: Tensor) -> Tensor:
        return (log_column_mass - _log_sum_exp(log_map + of_rows, columns, num_columns))[columns]

    potentials = half_steps(n_iters, row_step, column_step, torch.zeros_like(log_map))
    return (log_map + sum(potentials)).exp().to(scores.dtype)


def _log_sum_exp(x: Tensor, index: Tensor, size: int) -> Tensor:
    """Log of the sum of exp(x) over the edges of each node, (size, ...); 0 where there is nothing to sum."""
    peak = scatter(x.detach(), index, 0, size, reduce="max")
    peak = torch.where(peak.isfinite(), peak, 0.0)
    total = scatter((x - peak[index]).exp(), index, 0, size, reduce="sum")
    return peak + torch.where(total > 0, total, 1.0).log()


def _count(support: Tensor, index: Tensor, size: int, batch: Tensor | None, column_batch: Tensor | None) -> Tensor:
    """For each column, how many nodes (rows or columns, by `index`) of its graph have an edge; at least 1."""
    used = scatter(support, index, 0, size, reduce="max")
    if batch is None or column_batch is None:
        return used.sum(0, keepdim=True).clamp(min=1)
    num_graphs = 1 + int(torch.cat([batch, column_batch]).max())
    return scatter(used, batch, 0, num_graphs, reduce="sum").clamp(min=1)[column_batch]
