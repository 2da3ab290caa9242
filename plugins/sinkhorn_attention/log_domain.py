"""Half-steps in the log domain: right at any scale of the scores, at the price of one exponential per entry and step.

The dense engine turns to it for the matrices that the exponential domain cannot hold, and on devices where telling them
apart would need a synchronisation. Chunks of heads (heads, n, m), -inf outside the support.
"""

import math

import torch
from torch import Tensor


def target_ratio(rows: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """What a column should sum to, n_valid / m_valid, (heads, 1, 1); 1 where nothing is valid, so that it divides."""
    n_valid, m_valid = rows.sum((1, 2), keepdim=True), columns.sum((1, 2), keepdim=True)
    return torch.where(n_valid > 0, n_valid.to(dtype) / m_valid.clamp(min=1), 1.0)


def log_half_step(
    scores: Tensor, other: Tensor, dim: int, target: Tensor | float, damping: float = 1.0
) -> tuple[Tensor, Tensor]:
    """One half-step from scores (heads, n, m) and the other side's potential.

    Returns:
        The new potential damping * (log(target) - logsumexp(scores + other, dim)), 0 where there is no support, and the
        coupling after the step, exp(scores + other + potential), normalised directly so that no rounding of a large
        potential reaches it.
    """
    shifted = scores + other
    peak = shifted.amax(dim, keepdim=True)
    valid = peak != -math.inf
    peak = peak.masked_fill(~valid, 0.0)
    coupling = shifted.sub_(peak).exp_()
    total = coupling.sum(dim, keepdim=True).masked_fill_(~valid, 1.0)
    coupling.mul_(target / total)
    potential = (-peak - (total / target).log()).masked_fill_(~valid, 0.0)
    if damping != 1.0:
        coupling.mul_(torch.exp((damping - 1.0) * potential))
        potential.mul_(damping)
    return potential, coupling


def log_domain_coupling(
    scores: Tensor, n_iters: int, damping: float = 1.0
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """All half-steps of scores (heads, n, m) in natural logarithms, the column steps damped as in damped.py.

    Returns:
        The row potentials, the column potentials (the first is zero) and the final coupling.
    """
    rows, columns = (scores != -math.inf).any(2, keepdim=True), (scores != -math.inf).any(1, keepdim=True)
    ratio = target_ratio(rows, columns, scores.dtype)
    row_potentials, column_potentials = [], [scores.new_zeros(scores.shape[0], 1, scores.shape[2])]
    coupling = scores
    for step in range(n_iters):
        if step % 2 == 0:
            potential, coupling = log_half_step(scores, column_potentials[-1], 2, 1.0)
            row_potentials.append(potential)
        else:
            potential, coupling = log_half_step(scores, row_potentials[-1], 1, ratio, damping)
            column_potentials.append(potential)
    return row_potentials, column_potentials, coupling


def log_domain_scores_gradient(
    scores: Tensor, n_iters: int, coupling_gradient: Tensor, detached: bool, damping: float = 1.0
) -> Tensor:
    """dL/dC, (heads, n, m), from dL/dP, by recomputing each half-step's coupling from its potentials."""
    row_potentials, column_potentials, coupling = log_domain_coupling(scores, n_iters, damping)
    gradient = coupling.mul_(coupling_gradient)
    row_sums, column_sums = gradient.sum(2, keepdim=True), gradient.sum(1, keepdim=True)
    for step in reversed(range(n_iters)):
        i = step // 2
        if step % 2 == 0:
            weights = log_half_step(scores, column_potentials[i], 2, 1.0)[1].mul_(row_sums)
            gradient.sub_(weights)
            if detached or step == 0:
                break
            column_sums = column_sums - weights.sum(1, keepdim=True)
        elif not detached:
            weights = log_half_step(scores, row_potentials[i], 1, 1.0)[1].mul_(damping * column_sums)
            gradient.sub_(weights)
            flow = -weights.sum(2, keepdim=True)
            row_sums = row_sums + flow if step == n_iters - 1 else flow
            column_sums = torch.zeros_like(column_sums)
    return gradient
