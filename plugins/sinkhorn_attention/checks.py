"""What the public functions take: argument checks that say what they got and what they need."""

import sys
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from .engines import BACKENDS
from .engines.operator import is_eager
from .masks import CAUSAL_REFUSAL, is_causal_bias


class CallOptions(TypedDict, total=False):
    """What a call may be given beside its tokens, by keyword; meanings as in `sinkhorn_attention`."""

    scale: float | None
    attn_bias: Tensor | None
    query_mask: Tensor | None
    key_mask: Tensor | None
    dropout_p: float


GRADIENTS = ("unrolled", "detached", "implicit")


def broadcast_lead(query: Tensor, key: Tensor, value: Tensor) -> torch.Size:
    """The leading dimensions; torch.broadcast_shapes alone costs as much as five operations on a small map."""
    lead, of_key, of_value = query.shape[:-2], key.shape[:-2], value.shape[:-2]
    return lead if lead == of_key == of_value else torch.broadcast_shapes(lead, of_key, of_value)


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
    if gradient == "implicit" and backend not in ("auto", "portable", "dense"):
        raise ValueError(
            f"gradient='implicit' keeps the map and has one way of computing, which backend={backend!r} is not: "
            "take backend='auto', or gradient='unrolled'"
        )


def share_heads(name: str, tensor: Tensor, query: Tensor) -> Tensor:
    """A key or value (..., heads / g, m, d) for all heads of the query, each g times.

    Raises:
        ValueError: where the query's heads are no multiple of its heads.
    """
    heads, few = query.shape[-3:-2], tensor.shape[-3:-2]
    if not heads or not few or few[0] == 0 or heads[0] % few[0]:
        raise ValueError(
            f"enable_gqa needs a number of query heads (dimension -3) that is a multiple of the {name}'s, got "
            f"{tuple(query.shape)} and {tuple(tensor.shape)}"
        )
    return tensor if heads == few else tensor.repeat_interleave(heads[0] // few[0], -3)


def check_n_iters(n_iters: int) -> None:
    """Raises ValueError unless `n_iters` is an integer of at least 1."""
    if isinstance(n_iters, Tensor):
        raise ValueError(
            f"the fourth argument is n_iters, the number of half-steps, got {describe(n_iters)}: pass a mask by name, "
            "attn_mask=… (or query_mask=…, key_mask=… for padding)"
        )
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
    query: Tensor, key: Tensor, value: Tensor, may_be_causal: bool = False, **options: Unpack[CallOptions]
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
    scale, attn_bias, dropout_p = options.get("scale"), options.get("attn_bias"), options.get("dropout_p", 0.0)
    if scale is not None and not is_finite_number(scale):
        raise ValueError(f"scale must be a finite number (a learned one multiplies the query instead), got {scale!r}")
    if not is_finite_number(dropout_p) or not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must lie in [0, 1], got {dropout_p!r}")
    if attn_bias is not None:
        check_bias(attn_bias, (*lead, query.shape[-2], key.shape[-2]), query.device, may_be_causal)
    check_mask("query_mask", options.get("query_mask"), lead, query.shape[-2], query.device)
    check_mask("key_mask", options.get("key_mask"), lead, key.shape[-2], query.device)


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
