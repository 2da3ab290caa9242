"""Sinkhorn's algorithm: the loop of half-steps and its derivative, whatever potentials are and however sums are had.

    rows_1 = R(columns_0),  columns_1 = C(rows_1),  rows_2 = R(columns_1),  ...        T half-steps, rows first

The map after half-step l is P_l. If dL/dP_T is G and W = P_T * G, then with r and c the sums of W over rows and columns

    dL/dC = W - sum over row steps of P_l * (r_l 1^T) - sum over column steps of P_l * (1 c_l^T / column sums of P_l),

where, in reverse, a row step passes -P_l^T r_l on to the columns and a column step -P_l (c_l / its sums) to the rows.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor

Potential = TypeVar("Potential")


def half_steps(
    n_iters: int,
    row_step: Callable[[int, Potential], Potential],
    column_step: Callable[[int, Potential], Potential],
    columns: Potential,
) -> tuple[Potential, Potential]:
    """Runs the half-steps.

    Args:
        n_iters: T, at least 1.
        row_step: of the number of the half-step and the columns' potential; gives that of the rows.
        column_step: of the number of the half-step and the rows' potential; gives that of the columns.
        columns: the columns' potential to begin with.

    Returns:
        The last potential of the rows and of the columns.
    """
    rows = columns
    for step in range(n_iters):
        if step % 2 == 0:
            rows = row_step(step, columns)
        else:
            columns = column_step(step, rows)
    return rows, columns


class Reversible(Protocol):
    """Half-steps that have been run, and can be gone through in reverse; see `reverse_half_steps`."""

    def through_row_step(self, step: int, row_weights: Tensor, last: bool) -> Tensor | None:
        """Notes the half-step's term and gives -P^T row_weights, for the columns; nothing where it is the last."""

    def through_column_step(self, step: int, column_weights: Tensor, row_weights: Tensor | None) -> Tensor:
        """Notes the half-step's term and gives -P (column_weights / sums), plus row_weights if there are any."""


def reverse_half_steps(
    steps: Reversible, n_iters: int, detached: bool, row_weights: Tensor, column_weights: Tensor
) -> None:
    """Differentiates the half-steps, the last first.

    Args:
        steps: notes a term of dL/dC for each half-step.
        n_iters: T.
        detached: whether the columns' potentials count as constants.
        row_weights: sums over rows of P_T * dL/dP_T.
        column_weights: sums over columns.
    """
    of_rows: Tensor | None = row_weights
    of_columns: Tensor | None = column_weights
    for step in reversed(range(n_iters)):
        if step % 2 == 0:
            assert of_rows is not None
            last = detached or step == 0
            passed = steps.through_row_step(step, of_rows, last)
            if last:
                return
            of_rows = None
            of_columns = passed if of_columns is None or passed is None else passed.add_(of_columns)
        elif not detached:
            assert of_columns is not None
            of_rows = steps.through_column_step(step, of_columns, of_rows)
            of_columns = None
