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

import math

import torch
from torch import Tensor
from torch._decomp import register_decomposition

from .dense import exponentiate, half_steps, trusted_heads
from .log_domain import log_half_step, target_ratio
from .operators import compute_dtype, refuse_transforms, without_autocast
from .problem import LOG2E
from .reference import sinkhorn_reference

#: Largest deviation of a row or column sum, relative to its target, at which the derivative is still given.
CONVERGENCE_TOLERANCE = 1e-3
#: Half-steps between which scalings are kept; bounds the scratch memory of forward.
BLOCK = 64
#: Steps of the solver on the CPU before it gives up, for each unknown; in exact arithmetic 1 is enough.
SOLVER_STEPS_PER_COLUMN = 20
#: Off the CPU, where asking whether the solver is done would wait for the device, it makes this many steps.
DEVICE_SOLVER_STEPS = 64


class NotConvergedError(RuntimeError):
    """The derivative at convergence was asked for where the half-steps, or its solver, have not converged."""


def implicit_coupling(scores: Tensor, n_iters: int) -> Tensor:
    """Sinkhorn's coupling after `n_iters` half-steps, with the derivative of their limit.

    Args:
        scores: (..., n, m), floating; -inf outside the support, masked rows and columns included. A row or column
            without support is 0 and counts in no sum.
        n_iters: number of HALF-steps, enough for the marginals to be met.

    Returns:
        (..., n, m), in float32 at least.

    Raises:
        NotConvergedError: in the backward pass, for CPU tensors, where a row or column sum is further than
            `CONVERGENCE_TOLERANCE` from its target.
    """
    if torch.onnx.is_in_onnx_export():
        return _define(scores, n_iters)
    return implicit_sinkhorn(scores, n_iters)


def implicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    n_iters: int,
    scale: float,
    attn_bias: Tensor | None = None,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    dropout_mask: Tensor | None = None,
) -> Tensor:
    """Sinkhorn attention with the derivative at convergence; see `implicit_coupling` and `sinkhorn_attention`.

    Args:
        query: (..., n, d).
        key: (..., m, d).
        value: (..., m, d_v).
        n_iters: number of HALF-steps.
        scale: factor of the scores.
        attn_bias: broadcastable to (..., n, m), floating; -inf is no support.
        query_mask: (..., n), boolean, True = takes part.
        key_mask: (..., m), likewise.
        dropout_mask: (..., n, m), multiplies the final coupling.

    Returns:
        (..., n, d_v), in float32 at least.
    """
    dtype = compute_dtype(query)
    with without_autocast(query):
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if query_mask is not None:  # whatever lies in the padding, NaN included, takes no part
            query = query.masked_fill(~query_mask.unsqueeze(-1), 0.0)
        if key_mask is not None:
            key = key.masked_fill(~key_mask.unsqueeze(-1), 0.0)
            value = value.masked_fill(~key_mask.unsqueeze(-1), 0.0)
        scores = scale * query @ key.transpose(-1, -2)
        if attn_bias is not None:
            scores = scores + attn_bias.to(dtype)
        if query_mask is not None:
            scores = scores.masked_fill(~query_mask.unsqueeze(-1), -math.inf)
        if key_mask is not None:
            scores = scores.masked_fill(~key_mask.unsqueeze(-2), -math.inf)
        coupling = implicit_coupling(scores, n_iters)
        if dropout_mask is not None:
            coupling = coupling * dropout_mask
        output = coupling @ value
        return output if query_mask is None else output.masked_fill(~query_mask.unsqueeze(-1), 0.0)


# ------------------------------------------------------------------------------------------------ the coupling itself


@torch.library.custom_op("sinkhorn_attention::implicit_sinkhorn", mutates_args=())
def implicit_sinkhorn(scores: Tensor, n_iters: int) -> Tensor:
    """The coupling of scores (..., n, m) from the dense engine's half-steps, in memory that does not grow with them."""
    n, m = scores.shape[-2:]
    flat = scores.reshape(-1, n, m).to(compute_dtype(scores))
    with without_autocast(scores):
        if scores.device.type != "cpu":
            return _in_log_domain(flat, n_iters).reshape(scores.shape)
        coupling, untrusted = _in_exponential_domain(flat, n_iters)
        for head in untrusted.tolist():
            wide = flat[head : head + 1].double()
            coupling[head] = _in_log_domain(wide, n_iters)[0].to(coupling.dtype)
    return coupling.reshape(scores.shape)


@implicit_sinkhorn.register_fake
def _(scores: Tensor, n_iters: int) -> Tensor:
    return scores.new_empty(scores.shape, dtype=compute_dtype(scores))


@register_decomposition(torch.ops.sinkhorn_attention.implicit_sinkhorn.default)
def _define(scores: Tensor, n_iters: int) -> Tensor:
    """The value by the definition, for ONNX, which has no operator of ours."""
    return sinkhorn_reference(scores.to(compute_dtype(scores)), n_iters)


def _in_exponential_domain(scores: Tensor, n_iters: int) -> tuple[Tensor, Tensor]:
    """Couplings (heads, n, m) and the indices of the heads that left the range trusted; see dense.py."""
    kernel, first, row_target, column_target, _ = exponentiate(scores * LOG2E)
    heads, n, m = kernel.shape
    v = first.transpose(0, 1)
    largest_u, largest_v = kernel.new_zeros(1, heads, 1), v.amax(2, keepdim=True)
    u, done = kernel.new_ones(1, heads, n), 0
    while done < n_iters:
        count = min(BLOCK, n_iters - done)  # BLOCK is even: each block begins with a row step
        rows_kept = kernel.new_empty((count + 1) // 2, heads, n)
        columns_kept = kernel.new_empty(count // 2 + 1, heads, m)
        columns_kept[0] = v[0]
        half_steps(kernel, count, rows_kept, columns_kept, row_target, column_target, has_empty=True)
        largest_u = torch.maximum(largest_u, rows_kept.amax((0, 2), keepdim=True))
        largest_v = torch.maximum(largest_v, columns_kept.amax((0, 2), keepdim=True))
        u, v, done = rows_kept[-1:], columns_kept[-1:], done + count
    untrusted = (~trusted_heads(largest_u, largest_v)).nonzero().squeeze(1)
    return kernel.mul_(u[0].unsqueeze(2)).mul_(v[0].unsqueeze(1)), untrusted


def _in_log_domain(scores: Tensor, n_iters: int) -> Tensor:
    """Couplings (heads, n, m), right at any scale of the scores."""
    support = scores != -math.inf
    ratio = target_ratio(support.any(2, keepdim=True), support.any(1, keepdim=True), scores.dtype)
    row = scores.new_zeros(scores.shape[0], scores.shape[1], 1)
    column = scores.new_zeros(scores.shape[0], 1, scores.shape[2])
    coupling = scores
    for step in range(n_iters):
        if step % 2 == 0:
            row, coupling = log_half_step(scores, column, 2, 1.0)
        else:
            column, coupling = log_half_step(scores, row, 1, ratio)
    return coupling


# --------------------------------------------------------------------------------------------------- its derivative


@torch.library.custom_op("sinkhorn_attention::implicit_sinkhorn_backward", mutates_args=())
def implicit_sinkhorn_backward(coupling_gradient: Tensor, coupling: Tensor, n_iters: int) -> Tensor:
    """dL/dC, (..., n, m), from dL/dP and P."""
    n, m = coupling.shape[-2:]
    plan, gradient = coupling.reshape(-1, n, m), coupling_gradient.reshape(-1, n, m)
    with without_autocast(coupling):
        if coupling.device.type == "cpu":
            _check_converged(plan, n_iters)
        weighted = plan * gradient
        if n < m:  # the shorter side stays
            return weighted.sub_(_correction(plan.mT, weighted.mT).mT).reshape(coupling.shape)
        return weighted.sub_(_correction(plan, weighted)).reshape(coupling.shape)


@implicit_sinkhorn_backward.register_fake
def _(coupling_gradient: Tensor, coupling: Tensor, n_iters: int) -> Tensor:
    return torch.empty_like(coupling, memory_format=torch.contiguous_format)


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


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    scores, ctx.n_iters = inputs
    ctx.dtype = scores.dtype
    ctx.save_for_backward(output)


def _backward(ctx, coupling_gradient):  # type: ignore[no-untyped-def]
    refuse_transforms(coupling_gradient)
    gradient = implicit_sinkhorn_backward(coupling_gradient, *ctx.saved_tensors, ctx.n_iters)
    return gradient.to(ctx.dtype), None


def _refuse_double_backward(ctx, *gradients):  # type: ignore[no-untyped-def]
    raise NotImplementedError(
        "gradient='implicit' cannot be differentiated again; use backend='reference' with gradient='unrolled'"
    )


implicit_sinkhorn.register_autograd(_backward, setup_context=_save)
implicit_sinkhorn_backward.register_autograd(_refuse_double_backward)
