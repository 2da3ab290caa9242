"""The operator: `sinkhorn` and `sinkhorn_attention`, their argument checks and the choice of backend."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import flash_streaming
from .dense import dense_attention, dense_coupling
from .implicit import implicit_attention
from .masks import CAUSAL_REFUSAL, bias_from_keep, is_causal_bias
from .operators import compute_dtype, is_eager, refuse_transforms, without_autocast
from .problem import dropout_factor
from .reference import sinkhorn_attention_reference
from .streaming import streaming_attention

BACKENDS = ("auto", "reference", "dense", "streaming", "triton")
GRADIENTS = ("unrolled", "detached", "implicit")
#: What "auto" is, on every device: no kernel is taken unasked that has not been run on the hardware it is for.
AUTO = "dense"
#: What has the derivatives that the engine of a comparator has not.
COUPLING_INSTEAD = "the normalizer's coupling(query, key, ...) @ value"


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
    refuse_transforms(scores)
    return dense_coupling(scores, n_iters, query_mask, key_mask).to(scores.dtype)


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
            map and takes no other backend than "auto" and "dense" (see implicit.py; a backward pass on the CPU raises
            where the half-steps have not converged).
        backend: "reference" is the definition; "dense" the fast engine, which on the CPU works in cache-sized chunks of
            heads while a head's map is below 8 MB, in blocks of rows of a kept map up to 256 MB, and makes the blocks
            again above that and for one or two half-steps; "streaming" always makes them again: memory O(n d), up to
            twice the time; "triton" is for CUDA devices and up to 256 keys. Off the CPU "dense" and "streaming" compute
            in the log domain throughout, without a synchronisation, the latter by fused attention calls where there is
            no bias and no dropout. "auto" is "dense", which chooses by shape as said; "streaming" and "triton" have not
            been run on a GPU yet and so are taken there only by their names. All agree in value and gradient, to the
            rounding of the scores; fused calls and Triton, which hold no map, show it from scores of 1e3 on in the
            column sums of an even count.

    Returns:
        (..., n, d_v) in the promoted dtype of the inputs; 0 at masked queries.

    Raises:
        ValueError: names the argument, what it got and what it needs; also for a causal `attn_bias` on the CPU.
        NotImplementedError: for a problem that the backend does not take; says what it needs.
        RuntimeError: if the Triton engine fails on the device; says what does without it.
    """
    check_n_iters(n_iters)
    check_attention_arguments(query, key, value, scale, attn_bias, query_mask, key_mask, dropout_p)
    check_engine(gradient, backend)
    query, key, value, scale, attn_bias, query_mask, key_mask, dropout_keep = prepare(
        query, key, value, scale, attn_bias, query_mask, key_mask, dropout_p
    )
    masks, dtype = (attn_bias, query_mask, key_mask, dropout_keep), query.dtype
    if is_empty(query, key, value):
        return query @ key.transpose(-1, -2) @ value
    if gradient == "implicit":
        refuse_transforms(query, key, value, attn_bias)
        dropout_mask = None if dropout_keep is None else dropout_factor(dropout_keep, dropout_p, compute_dtype(query))
        return implicit_attention(query, key, value, n_iters, scale, *masks[:3], dropout_mask).to(dtype)
    if backend == "reference":
        return in_reference(query, key, value, n_iters, scale, gradient, *masks, dropout_p)
    refuse_transforms(query, key, value, attn_bias)
    attend = ENGINES[AUTO if backend == "auto" else backend]
    return attend(query, key, value, n_iters, scale, gradient == "detached", *masks, dropout_p).to(dtype)


def attention_by_engine(
    engine: Callable[..., Tensor],
    settings: tuple[Any, ...],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    attn_bias: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    dropout_p: float,
    row_wise: bool = False,
) -> Tensor:
    """Attention by the engine of another normalizer; everything else as `sinkhorn_attention`.

    Args:
        engine: an `operators.AttentionOperator`, whose settings end with the scale.
        settings: the ones before the scale.
        query: (..., n, d).
        key: (..., m, d).
        value: (..., m, d_v).
        scale: factor of the scores.
        attn_bias: broadcastable to (..., n, m).
        query_mask: (n,) or (..., n).
        key_mask: (m,) or (..., m).
        dropout_p: probability of dropping an entry of the map.
        row_wise: whether the bias may be causal.

    Raises:
        ValueError: names the argument, what it got and what it needs.
        NotImplementedError: under torch.func transforms and forward-mode derivatives.
    """
    check_attention_arguments(query, key, value, scale, attn_bias, query_mask, key_mask, dropout_p, row_wise)
    query, key, value, scale, *masks = prepare(query, key, value, scale, attn_bias, query_mask, key_mask, dropout_p)
    if is_empty(query, key, value):
        return query @ key.transpose(-1, -2) @ value
    refuse_transforms(query, key, value, masks[0], instead=COUPLING_INSTEAD)
    return engine(query, key, value, *settings, scale, *masks, dropout_p).to(query.dtype)


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    attn_bias: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    dropout_p: float,
) -> tuple[Any, ...]:
    """What every engine is given, from checked arguments.

    Returns:
        Query, key and value of one dtype and with equal leading dimensions, the scale, and attn_bias (floating, of at
        least two dimensions), query_mask, key_mask and dropout_keep, (..., n, m), boolean, or None.
    """
    lead = broadcast_lead(query, key, value)
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
    query, key, value = (tensor.to(dtype).expand(*lead, *tensor.shape[-2:]) for tensor in (query, key, value))
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
    return query, key, value, scale, attn_bias, query_mask, key_mask, dropout_keep


def is_empty(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether there is no query, no key or no sample: the plain products are zeros then, and carry a gradient."""
    return 0 in (*query.shape[:-1], key.shape[-2], value.shape[-1])


def broadcast_lead(query: Tensor, key: Tensor, value: Tensor) -> torch.Size:
    """The leading dimensions; torch.broadcast_shapes alone costs as much as five operations on a small map."""
    lead, of_key, of_value = query.shape[:-2], key.shape[:-2], value.shape[:-2]
    return lead if lead == of_key == of_value else torch.broadcast_shapes(lead, of_key, of_value)


def in_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    n_iters: int,
    scale: float,
    gradient: str,
    attn_bias: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    dropout_keep: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """Runs the definition in the precision, and with the dropout mask, that every backend uses."""
    dtype = compute_dtype(query)
    dropout_mask = None if dropout_keep is None else dropout_factor(dropout_keep, dropout_p, dtype)
    bias = None if attn_bias is None else attn_bias.to(dtype)
    tokens = query.to(dtype), key.to(dtype), value.to(dtype)
    with without_autocast(query):
        output = sinkhorn_attention_reference(
            *tokens, n_iters, scale, bias, query_mask, key_mask, dropout_mask, gradient
        )
    return output.to(query.dtype)


def in_streaming(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    n_iters: int,
    scale: float,
    detached: bool,
    attn_bias: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    dropout_keep: Tensor | None,
    dropout_p: float,
) -> Tensor:
    """Runs the streaming engine: by fused attention calls on a CUDA device where they take the problem."""
    arguments = n_iters, float(scale), detached
    has_bias, has_dropout = attn_bias is not None, dropout_keep is not None
    needs = flash_streaming.refusal(query, query.shape[-1], value.shape[-1], has_bias, has_dropout)
    if query.device.type == "cuda" and needs is None:
        return flash_streaming.flash_streaming_attention(query, key, value, *arguments, query_mask, key_mask)[0]
    masks = attn_bias, query_mask, key_mask, dropout_keep
    return streaming_attention(query, key, value, *arguments, *masks, dropout_p)


def triton_refusal(device: torch.device, dtype: torch.dtype, m: int, width: int, value_width: int) -> str | None:
    """What the Triton engine, imported at its first use, needs and does not get; None if it takes the problem."""
    try:
        from .triton import refusal
    except ImportError:
        return "the triton package, which comes with torch on Linux"
    return refusal(device, dtype, m, width, value_width)


def in_triton(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> Tensor:
    """Runs the Triton engine, or says what it needs and did not get."""
    needs = triton_refusal(query.device, query.dtype, key.shape[-2], query.shape[-1], value.shape[-1])
    if needs is not None:
        raise NotImplementedError(f"backend='triton' needs {needs}; use backend='auto' or 'dense'")
    from .triton import triton_attention

    return triton_attention(query, key, value, *arguments)[0]


#: What runs each backend, the reference excepted; arguments as those of `dense.attention_forward`.
ENGINES: dict[str, Callable[..., Tensor]] = {
    "dense": dense_attention,
    "streaming": in_streaming,
    "triton": in_triton,
}


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor is an ordinary one, neither sparse nor nested."""
    return tensor.layout == torch.strided and not tensor.is_nested


def is_floating_matrix(argument: object) -> bool:
    """Whether the argument is a dense floating tensor of at least two dimensions."""
    return isinstance(argument, Tensor) and is_dense(argument) and argument.dim() >= 2 and argument.is_floating_point()


def is_finite_number(argument: object) -> bool:
    """Whether the argument is a Python number that a float can hold; a comparison, which torch.compile can trace.

    A number that torch.jit.trace works out of a shape, for ONNX, is a tensor.
    """
    if torch.jit.is_tracing() and isinstance(argument, Tensor):
        return argument.dim() == 0
    return isinstance(argument, int | float) and abs(argument) <= sys.float_info.max


def describe(argument: object) -> str:
    """Shape and dtype of a tensor, the type's name of anything else."""
    if not isinstance(argument, Tensor):
        return type(argument).__name__
    if argument.is_nested:
        return "a nested tensor (pad it and pass query_mask and key_mask)"
    return f"{tuple(argument.shape)} {argument.dtype}" + ("" if is_dense(argument) else f" {argument.layout}")


def check_engine(gradient: str, backend: str) -> None:
    """Raises ValueError unless `gradient` and `backend` are known names that go together."""
    for option, given, names in (("gradient", gradient, GRADIENTS), ("backend", backend, BACKENDS)):
        if given not in names:
            raise ValueError(f"{option} must be one of {', '.join(names)}, got {given!r}")
    if gradient == "implicit" and backend not in ("auto", "dense"):
        raise ValueError(
            f"gradient='implicit' keeps the map and has one way of computing, which backend={backend!r} is not: "
            "take backend='auto', or gradient='unrolled'"
        )


def check_n_iters(n_iters: int) -> None:
    """Raises ValueError unless `n_iters` is an integer of at least 1."""
    if not isinstance(n_iters, int) or isinstance(n_iters, bool) or n_iters < 1:
        raise ValueError(
            f"n_iters must be an integer >= 1 (a Python int; it counts half-steps, 1 is softmax), got {n_iters!r}"
        )


def check_mask(name: str, mask: Tensor | None, lead: torch.Size, length: int, device: torch.device) -> Tensor | None:
    """Checks a token mask against (lead..., length) and the tokens' device.

    A mask with fewer dimensions than that would be aligned from the right, batch against heads, and run silently:
    only (length,) and (..., length) with every leading dimension present are taken.
    """
    if mask is None:
        return None
    got = None
    if not isinstance(mask, Tensor) or not is_dense(mask):
        got = describe(mask)
    elif mask.dtype != torch.bool:
        got = f"dtype {mask.dtype}"
    elif mask.device != device:
        got = f"one on {mask.device} for tokens on {device}"
    else:
        full_rank = mask.dim() == len(lead) + 1
        fits = full_rank and all(have in (1, want) for have, want in zip(mask.shape[:-1], lead, strict=True))
        if mask.dim() == 0 or mask.shape[-1] != length or not (mask.dim() == 1 or fits):
            hint = " (insert a dimension of 1 for the heads)" if not full_rank and mask.dim() > 1 else ""
            got = f"shape {tuple(mask.shape)}{hint}"
    if got is not None:
        needs = f"a boolean mask, True = takes part, of shape ({length},) or broadcastable to {(*lead, length)}"
        raise ValueError(f"{name} must be {needs}, got {got}")
    return mask


def check_attention_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    attn_bias: Tensor | None,
    query_mask: Tensor | None,
    key_mask: Tensor | None,
    dropout_p: float,
    may_be_causal: bool = False,
) -> None:
    """Raises ValueError that names the argument, what it got and what it needs."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not is_floating_matrix(tensor):
            raise ValueError(
                f"{name} must be a floating tensor with at least 2 dimensions (..., tokens, dim), "
                f"got {describe(tensor)}"
            )
        if tensor.device != query.device:
            raise ValueError(f"{name} must be on the query's device {query.device}, got {tensor.device}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key must have the query's width {query.shape[-1]}, got {key.shape[-1]}")
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value must have as many tokens as key, {key.shape[-2]}, got {value.shape[-2]}")
    try:
        lead = broadcast_lead(query, key, value)
    except RuntimeError:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (query, key, value))
        raise ValueError(f"query, key and value must have leading dimensions that broadcast, got {shapes}") from None
    if scale is not None and not is_finite_number(scale):
        raise ValueError(f"scale must be a finite number (a learned one multiplies the query instead), got {scale!r}")
    if not is_finite_number(dropout_p) or not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must lie in [0, 1], got {dropout_p!r}")
    if attn_bias is not None:
        check_bias(attn_bias, (*lead, query.shape[-2], key.shape[-2]), query.device, may_be_causal)
    check_mask("query_mask", query_mask, lead, query.shape[-2], query.device)
    check_mask("key_mask", key_mask, lead, key.shape[-2], query.device)


def check_bias(attn_bias: Tensor, shape: tuple[int, ...], device: torch.device, may_be_causal: bool = False) -> None:
    """Checks a bias against (..., n, m) and the tokens' device; on the CPU its data too, unless it may be causal."""
    if not isinstance(attn_bias, Tensor) or not is_dense(attn_bias):
        raise ValueError(f"attn_bias must be a tensor broadcastable to {shape}, got {describe(attn_bias)}")
    if attn_bias.dtype != torch.bool and not attn_bias.is_floating_point():
        raise ValueError(f"attn_bias must be floating (added) or boolean (True keeps), got {attn_bias.dtype}")
    if attn_bias.device != device:
        raise ValueError(f"attn_bias must be on the query's device {device}, got {attn_bias.device}")
    have = (1,) * (len(shape) - attn_bias.dim()) + tuple(attn_bias.shape)
    if len(have) != len(shape) or any(size not in (1, want) for size, want in zip(have, shape, strict=True)):
        raise ValueError(f"attn_bias must be broadcastable to {shape}, got {tuple(attn_bias.shape)}")
    if may_be_causal:
        return
    if attn_bias.device.type != "cpu" or not is_eager(attn_bias) or torch._C._are_functorch_transforms_active():
        return
    if is_causal_bias(attn_bias.detach()):
        raise ValueError(f"attn_bias is a causal mask. {CAUSAL_REFUSAL}")
