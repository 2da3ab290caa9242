r"""The derivative at convergence (`gradient="implicit"`): the equations that the half-steps solve are differentiated.

A coupling P = exp(C + f + g) with row sums a and column sums b depends on C directly and through the potentials, whose
derivatives solve

    [ diag(a)   P       ] [ df ]      [ (P * dC) 1   ]
    [ P^T       diag(b) ] [ dg ]  = - [ (P * dC)^T 1 ].

The matrix is symmetric and positive semi-definite; its null space holds (1, -1) for each connected part of the support,
which changes f + g nowhere. For dL/dP = G and W = P * G the adjoint is

    dL/dC = W - P * (lambda + nu),    (diag(b) - P^T diag(1/a) P) nu = W^T 1 - P^T diag(1/a) W 1,
                                      lambda = (W 1 - P nu) / a,

after the longer side has been eliminated (Eisenberger et al. 2022; Luise et al. 2018). The reduced system is solved by
conjugate gradients from products with P alone, the constant vector projected out; whatever else of the null space gets
into nu leaves lambda + nu again. Memory is P, whatever the number of half-steps.

a and b are the sums that P has, not those it should have, so that the system is consistent at any number of half-steps
and the result is the exact derivative of the limit that has these marginals. It is the derivative asked for only where
they are near their targets: on the CPU a backward pass further off than `CONVERGENCE_TOLERANCE` raises.
"""

import torch
from torch import Tensor

from . import domains
from .domains import trusted_heads
from .exponential import ExponentialMap
from .half_steps import half_steps
from .heads import Heads
from .log_domain import log_domain_forward
from .operator import Operator, Results, State, attend_by, without_autocast
from .problem import Problem

#: Largest deviation of a row or column sum, relative to its target, at which the derivative is still given.
CONVERGENCE_TOLERANCE = 1e-3
#: Half-steps between which scalings are kept, an even number; bounds the scratch memory of forward.
WINDOW = 64
#: Steps of the solver on the CPU before it gives up, for each unknown; in exact arithmetic 1 is enough.
SOLVER_STEPS_PER_COLUMN = 20
#: Off the CPU, where asking whether the solver is done would wait for the device, it makes this many steps.
DEVICE_SOLVER_STEPS = 64


class NotConvergedError(RuntimeError):
    """The derivative at convergence was asked for where the half-steps, or its solver, have not converged."""


class Implicit:
    """The engine, for given scores; see the module."""

    name = "implicit"

    def refusal(self, problem: Problem) -> str | None:
        """Takes everything."""
        return None

    def keeps_output(self, problem: Problem) -> bool:
        """The coupling is all that backward needs."""
        return True

    def state(self, problem: Problem) -> State:
        """Nothing beside the output."""
        nothing = problem.like.new_empty
        return nothing(0), nothing(0), nothing(0)

    def forward(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The coupling (..., n, m) by the half-steps of the portable engine, in memory that does not grow with them."""
        heads = Heads(problem)
        result = problem.like.new_empty(problem.output_shape, dtype=problem.dtype)
        coupling = result.view(heads.count, heads.n, heads.m)
        everything = slice(0, heads.count)
        with without_autocast(problem.like):
            if domains.is_captured(heads.device):
                coupling.copy_(log_domain_forward(heads, everything, heads.dtype, heads.n))
                return result, *self.state(problem)
            for head in _in_exponential_domain(heads, coupling).split(1):
                dtype = domains.log_domain_dtype(heads)
                coupling[head] = log_domain_forward(heads, head, dtype, heads.n).to(heads.dtype)
        return result, *self.state(problem)

    def backward(self, problem: Problem, results: tuple[Tensor, Tensor], state: State, bias_gradient: bool) -> Results:
        """dL/dC from P and dL/dP."""
        (n, m), nothing = problem.like.shape[-2:], self.state(problem)
        plan, gradient = (tensor.reshape(-1, n, m) for tensor in results)
        with without_autocast(plan):
            if plan.device.type == "cpu":
                _check_converged(plan, problem.n_iters)
            weighted = plan * gradient
            if n < m:  # the shorter side stays
                weighted.sub_(_correction(plan.mT, weighted.mT).mT)
            else:
                weighted.sub_(_correction(plan, weighted))
        return weighted.reshape(problem.like.shape).to(problem.like.dtype), *nothing


def _in_exponential_domain(heads: Heads, coupling: Tensor) -> Tensor:
    """Fills couplings (heads, n, m) and gives the indices of the heads that left the range trusted; see domains.py."""
    u = coupling.new_empty(WINDOW // 2, heads.count, heads.n)
    v = coupling.new_empty(WINDOW // 2 + 1, heads.count, heads.m)
    steps = ExponentialMap(heads, slice(0, heads.count), True, coupling, coupling, (u, v))
    column = steps.begin()
    largest_u, largest_v = u.new_zeros(1, heads.count, 1), v[:1].amax(2, keepdim=True)
    for done in range(0, heads.n_iters, WINDOW):
        count = min(WINDOW, heads.n_iters - done)
        row, last = half_steps(count, steps.row_step, steps.column_step, column)
        largest_u = torch.maximum(largest_u, u[: (count + 1) // 2].amax((0, 2), keepdim=True))
        largest_v = torch.maximum(largest_v, v[: count // 2 + 1].amax((0, 2), keepdim=True))
        column.copy_(last)  # what the next window begins with
    coupling.mul_(row.transpose(1, 2)).mul_(column)
    return (~trusted_heads(largest_u, largest_v)).nonzero().squeeze(1)


def _correction(plan: Tensor, weighted: Tensor) -> Tensor:
    """P * (lambda + nu) for P and W = P * dL/dP, both (heads, rows, columns); rows are eliminated."""
    row_sums, column_sums = plan.sum(2, keepdim=True), plan.sum(1, keepdim=True)
    inverse = torch.where(row_sums > 0, row_sums, 1.0).reciprocal()
    of_rows, of_columns = weighted.sum(2, keepdim=True), weighted.sum(1, keepdim=True)
    right = of_columns - (inverse * of_rows).mT @ plan
    nu = conjugate_gradients(plan, inverse, column_sums, right, weighted.abs().sum(1, keepdim=True))
    lam = inverse * (of_rows - plan @ nu.mT)
    return plan * (lam + nu)


def conjugate_gradients(plan: Tensor, inverse: Tensor, column_sums: Tensor, right: Tensor, size: Tensor) -> Tensor:
    """Solves (diag(b) - P^T diag(1/a) P) nu = right, for each head by itself.

    A head that is done stands still, so that no head's result depends on the others. The Jacobi scaling by 1/b puts the
    spectrum into [0, 1], the constant vector at 0.

    Args:
        plan: P, (heads, rows, columns).
        inverse: 1/a, (heads, rows, 1); anything finite where a = 0.
        column_sums: b, (heads, 1, columns).
        right: (heads, 1, columns), orthogonal to the null space.
        size: (heads, 1, columns), of the terms of `right`: rounding leaves a share of it, and the residual is compared
            with it, because what is left in the null space can be taken away by no solution.

    Raises:
        NotConvergedError: on the CPU, where a residual is still above the tolerance after the steps allowed.
    """
    valid = column_sums > 0
    scaling = torch.where(valid, column_sums, 1.0).reciprocal()
    on_cpu = plan.device.type == "cpu"
    steps = SOLVER_STEPS_PER_COLUMN * plan.shape[2] if on_cpu else DEVICE_SOLVER_STEPS
    tolerance = 32 * torch.finfo(plan.dtype).eps

    def project(vector: Tensor) -> Tensor:
        """Takes the share of the constant vector out of a residual: valid entries then sum to 0."""
        return vector - column_sums * vector.sum(2, keepdim=True) / column_sums.sum(2, keepdim=True).clamp(min=1e-30)

    solution = torch.zeros_like(right)
    residual = project(right.masked_fill(~valid, 0.0))
    preconditioned = scaling * residual
    direction = preconditioned
    energy = (residual * preconditioned).sum(2, keepdim=True)
    target = tolerance**2 * (scaling * size.square()).sum(2, keepdim=True)
    moving = energy > target
    for _ in range(steps):
        if on_cpu and not bool(moving.any()):
            return solution
        image = column_sums * direction - (inverse * (plan @ direction.mT)).mT @ plan
        curvature = (direction * image).sum(2, keepdim=True)
        moving = moving & (curvature > 0)
        length = torch.where(moving, energy / torch.where(moving, curvature, 1.0), 0.0)
        solution = solution + length * direction
        residual = project(residual - length * image)
        preconditioned = scaling * residual
        next_energy = (residual * preconditioned).sum(2, keepdim=True)
        ratio = torch.where(moving, next_energy / torch.where(moving, energy, 1.0), 0.0)
        direction = torch.where(moving, preconditioned + ratio * direction, direction)
        energy = torch.where(moving, next_energy, energy)
        moving = moving & (energy > target)
    if on_cpu and bool(moving.any()):
        raise NotConvergedError(
            f"gradient='implicit': conjugate gradients have not converged after {steps} steps; the couplings are "
            "nearly decomposed (peaked scores). Lower the scale of the scores or use gradient='unrolled'"
        )
    return solution


def _check_converged(plan: Tensor, n_iters: int) -> None:
    """Raises NotConvergedError where a row or column sum of (heads, n, m) is too far from its target."""
    row_sums, column_sums = plan.sum(2), plan.sum(1)
    rows, columns = row_sums > 0, column_sums > 0
    target = rows.sum(1, keepdim=True) / columns.sum(1, keepdim=True).clamp(min=1)
    off_rows = torch.where(rows, row_sums - 1, 0.0).abs().amax()
    off_columns = torch.where(columns, column_sums / target.clamp(min=1e-30) - 1, 0.0).abs().amax()
    off, side = (off_rows, "row") if off_rows > off_columns else (off_columns, "column")
    if off > CONVERGENCE_TOLERANCE:
        raise NotConvergedError(
            f"gradient='implicit' is the derivative at convergence, but after n_iters={n_iters} half-steps a {side} "
            f"sum is off by {float(off):.1e} of its target (at most {CONVERGENCE_TOLERANCE:g}): raise n_iters, lower "
            "the scale of the scores, or use gradient='unrolled'"
        )


implicit = Operator(Implicit(), instead="backend='reference' with gradient='unrolled'")


def implicit_coupling(
    scores: Tensor, n_iters: int, query_mask: Tensor | None = None, key_mask: Tensor | None = None
) -> Tensor:
    """Sinkhorn's coupling after `n_iters` half-steps, with the derivative of their limit.

    Args:
        scores: (..., n, m), floating; -inf outside the support. A row or column without support is 0 and counts in no
            sum.
        n_iters: number of HALF-steps, enough for the marginals to be met.
        query_mask: broadcastable to (..., n), boolean, True = takes part.
        key_mask: broadcastable to (..., m), likewise.

    Returns:
        (..., n, m), in float32 at least.

    Raises:
        NotConvergedError: in the backward pass, for CPU tensors, where a row or column sum is further than
            `CONVERGENCE_TOLERANCE` from its target.
    """
    return implicit(Problem(scores=scores, n_iters=n_iters, query_mask=query_mask, key_mask=key_mask))


def implicit_attention(problem: Problem) -> Tensor:
    """Sinkhorn attention with the derivative at convergence, in float32 at least; see `implicit_coupling`."""
    masks = problem.query_mask, problem.key_mask
    return attend_by(lambda scores: implicit_coupling(scores, problem.n_iters, *masks), problem)
