"""The operator: `sinkhorn` and `sinkhorn_attention`."""

from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from .checks import (
    CallOptions,
    broadcast_lead,
    check_attention_arguments,
    check_engine,
    check_mask,
    check_n_iters,
    describe,
    is_floating_matrix,
    share_heads,
)
from .engines import operator_of
from .engines.implicit import implicit_attention
from .engines.operator import define
from .engines.problem import Problem
from .masks import CAUSAL_REFUSAL, bias_from_keep


def sinkhorn(
    scores: Tensor, n_iters: int = 5, *, query_mask: Tensor | None = None, key_mask: Tensor | None = None
) -> Tensor:
    """Normalises exp(scores) by `n_iters` alternating half-steps, rows first: K^l of Sander et al. 2022, eq. 3.

    Args:
        scores: (..., n, m), floating. An entry of -inf lies outside the support and stays exactly 0.
        n_iters: number of HALF-steps. 1 is softmax over the last dimension; odd counts end on a row step.
        query_mask: (..., n), boolean, True = the row takes part.
        key_mask: (..., m), boolean, True = the column takes part.

    Returns:
        The coupling, (..., n, m), in the dtype of `scores`. After an odd count rows sum to 1; after an even count
        columns sum to n_valid / m_valid.

    Raises:
        ValueError: names the argument, what it got and what it needs.
    """
    check_n_iters(n_iters)
    if not is_floating_matrix(scores):
        raise ValueError(f"scores must be a floating tensor (..., n, m), got {describe(scores)}")
    query_mask = check_mask("query_mask", query_mask, scores.shape[:-2], scores.shape[-2], scores.device)
    key_mask = check_mask("key_mask", key_mask, scores.shape[:-2], scores.shape[-1], scores.device)
    if scores.numel() == 0:
        return scores.clone()
    problem = Problem(scores=scores, query_mask=query_mask, key_mask=key_mask, n_iters=n_iters)
    return operator_of("portable")(problem).to(scores.dtype)


def sinkhorn_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    n_iters: int = 5,
    *,
    scale: float | None = None,
    attn_bias: Tensor | None = None,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    gradient: str = "unrolled",
    backend: str = "auto",
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention whose map is Sinkhorn(scale * query @ key^T + attn_bias): `n_iters` half-steps, rows first.

    Argument order and meaning follow torch.nn.functional.scaled_dot_product_attention, which `n_iters=1` equals.

    Args:
        query: (..., n, d), floating.
        key: (..., m, d).
        value: (..., m, d_v).
        n_iters: number of HALF-steps. Odd counts end on a row step (rows of the map sum to 1), even counts on a column
            step (columns sum to n_valid / m_valid, so 1 for a square map).
        scale: factor of the scores, d ** -0.5 by default.
        attn_bias: broadcastable to (..., n, m), floating (added to the scores, differentiable) or boolean (True keeps).
            An entry of -inf or False is no support: the map is 0 there, and a row or column without support counts as
            masked.
        query_mask: (n,) or (..., n) with as many dimensions as the query less one, boolean, True = takes part.
        key_mask: (m,) or (..., m), likewise.
        dropout_p: probability of dropping an entry of the final map, without renormalising.
        gradient: "unrolled" is the exact derivative of the half-steps; "detached" takes the column potential for a
            constant, as the published sentiment code does; "implicit" is the derivative at convergence, which keeps the
            map and takes no other backend than "auto" and "portable" (see engines/implicit.py; a backward pass on the
            CPU raises where the half-steps have not converged).
        backend: "reference" is the definition; "native" the engine in C++ for CPUs; "portable" (also named "dense")
            that of torch operations, which on the CPU works in cache-sized chunks of heads while a head's map is
            below 8 MB, and in blocks of rows above. Both keep a map up to 256 MB between half-steps and make it again
            above that; on other devices the portable engine looks at the data once a call, forward and backward, and
            computes in the log domain without a look while a CUDA graph is captured. "triton" is for CUDA devices and
            holds no map, O(n d) memory. "auto" is "native" where its library is, "triton" where that was proven right
            on the device at its first use, forward and backward, and "portable" elsewhere (`python -m
            sinkhorn_attention` says which); "streaming" is "auto" where a map is always made again: memory O(n d), up
            to twice the time. All agree in value and gradient, to the rounding of the scores; Triton shows it from
            scores of 1e3 on in the column sums of an even count.
        attn_mask: `attn_bias` by the name that torch gives it.
        is_causal: refused, with the reason.
        enable_gqa: key and value (..., heads / g, m, d) serve g heads of the query each, as in torch.

    Returns:
        (..., n, d_v) in the promoted dtype of the inputs; 0 at masked queries.

    Raises:
        ValueError: names the argument, what it got and what it needs; also for a causal `attn_bias` on the CPU.
        NotImplementedError: for a problem that the backend does not take; says what it needs.
        RuntimeError: if the Triton engine fails on the device; says what does without it.
    """
    check_n_iters(n_iters)
    check_engine(gradient, backend)
    if is_causal:
        raise ValueError(f"is_causal=True: {CAUSAL_REFUSAL}")
    if attn_mask is not None:
        if attn_bias is not None:
            raise ValueError("attn_mask is attn_bias by its other name: give one of them")
        attn_bias = attn_mask
    if enable_gqa:
        key, value = (share_heads(name, tensor, query) for name, tensor in (("key", key), ("value", value)))
    options: CallOptions = {
        "scale": scale,
        "attn_bias": attn_bias,
        "query_mask": query_mask,
        "key_mask": key_mask,
        "dropout_p": dropout_p,
    }
    problem = prepare(query, key, value, n_iters=n_iters, **options)
    dtype = problem.like.dtype
    if problem.is_empty:
        return empty_attention(problem)
    if gradient == "implicit":
        return implicit_attention(problem).to(dtype)
    problem = replace(problem, detached=gradient == "detached")
    return (define if backend == "reference" else operator_of(backend))(problem).to(dtype)


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    n_iters: int = 1,
    may_be_causal: bool = False,
    **options: Unpack[CallOptions],
) -> Problem:
    """The problem of a call's arguments, after they have been checked.

    Query, key and value get one dtype and equal leading dimensions, a boolean bias becomes one of 0 and -inf, and the
    dropout mask is drawn.

    Raises:
        ValueError: names the argument, what it got and what it needs.
    """
    check_attention_arguments(query, key, value, may_be_causal, **options)
    lead = broadcast_lead(query, key, value)
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    query, key, value = (tensor.to(dtype).expand(*lead, *tensor.shape[-2:]) for tensor in (query, key, value))
    scale, attn_bias, dropout_p = options.get("scale"), options.get("attn_bias"), options.get("dropout_p", 0.0)
    if scale is None:
        scale = query.shape[-1] ** -0.5 if query.shape[-1] > 0 else 1.0
    if attn_bias is not None:
        if attn_bias.dtype == torch.bool:
            attn_bias = bias_from_keep(attn_bias, torch.float32)
        if attn_bias.dim() < 2:
            attn_bias = attn_bias.view(1, -1)
    dropout_keep = None
    if dropout_p > 0:
        shape = *lead, query.shape[-2], key.shape[-2]
        dropout_keep = torch.empty(shape, dtype=torch.bool, device=query.device).bernoulli_(1 - dropout_p)
    return Problem(
        *(query, key, value),
        attn_bias=attn_bias,
        query_mask=options.get("query_mask"),
        key_mask=options.get("key_mask"),
        dropout_keep=dropout_keep,
        n_iters=n_iters,
        scale=scale,
        dropout_p=dropout_p,
    )


def empty_attention(problem: Problem) -> Tensor:
    """The result without a query, key, value or sample: the plain products, which are zeros and carry a gradient."""
    assert problem.query is not None and problem.key is not None and problem.value is not None  # noqa: PT018
    return problem.query @ problem.key.transpose(-1, -2) @ problem.value
