"""convert: other attention into any torch model, with its weights kept."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from .interception import Intercepted, attending_modules, intercepted
from .masks import is_causal_bias
from .modules import MultiheadAttention
from .normalizers import NormalizerChoice, choose_normalizer, get_normalizer, normalizer_for


def convert(
    model: nn.Module,
    normalizer: NormalizerChoice = "sinkhorn",
    *,
    layers: int | Sequence[int] | str | None = None,
    strict: bool = True,
    decoders: bool = False,
    example: Sequence[Any] | Mapping[str, Any] | None = None,
    **options: Any,
) -> list[str]:
    """Gives the attention of a model another normalizer, in place.

    Every torch.nn.MultiheadAttention becomes a `MultiheadAttention`. Any other module whose own forward calls
    torch.nn.functional.scaled_dot_product_attention becomes a subclass of its class whose calls are handed to the
    normalizer, see interception.py: its masks keep where True, as in that function, and a causal call raises. Attention
    that is written out in another way is left as it is; the plugins know more of it (`timm_sinkhorn.convert`).

    The modules stay the same objects with the same Parameters, names, hooks and mode: optimizers, tied weights and
    state dicts are not affected. A module converted before gets the new normalizer; `convert(model, "softmax")` gives
    torch's attention again, as `record_attention` can see it.

    Left as they are, with one warning that names them, unless each row of the normalizer's map depends on its own query
    alone (`softmax`, `l2`, `sigmoid`):

    - `self_attn` of nn.TransformerDecoderLayer: it is causal, and a causal doubly stochastic map is the identity;
    - `multihead_attn` of nn.TransformerDecoderLayer, the cross-attention: its map is rectangular, which is no obstacle
      (columns would sum to n / m), but the column step makes an earlier target token depend on later ones. The paper
      converts the encoder alone, too;
    - attention below a module that holds a triangular mask (a square tensor whose name has `mask` in it), as the text
      towers of CLIP do.

    A host that passes a triangular mask unseen by this function gets the module's own refusal when it runs.

    Args:
        model: any module, or an attention module itself.
        normalizer: as for `get_normalizer`: a name, a mapping of "name" and options, or a Normalizer.
        layers: which of the modules that can be converted: None for all, an int k for the last k, a list of indices
            (negative ones count from the end), or an fnmatch pattern of module names.
        strict: whether it is an error when there is nothing to convert, or a subclass of torch.nn.MultiheadAttention
            whose forward may be its own; such a module is left with a warning otherwise.
        decoders: converts decoders, too, for those that are not causal, such as DETR's.
        example: arguments of one call of the model, a sequence or keywords. The model is run once without gradients and
            what calls scaled_dot_product_attention is seen, also where the call stands in a function of another file,
            as in the transformers package. Without it the sources of the classes are searched.
        **options: the normalizer's options, such as `n_iters`.

    Returns:
        The names of the converted modules, in the order of the model.

    Raises:
        ValueError: before anything is changed: for an unknown normalizer or option, for `layers` that select nothing or
            do not exist, and, with `strict`, for modules that cannot be converted and for models without any.

    Example:
        >>> convert(torchvision.models.vit_b_16(), "sinkhorn", n_iters=3, layers=6)
    """
    chosen = choose_normalizer(normalizer, options=options)
    # A normalizer may need the sizes of the heads to be made; what is asked of this one does not depend on them.
    row_wise = get_normalizer(chosen, head_dim=1, num_heads=1).row_wise
    causal = {} if row_wise or decoders else _causal_attention(model)
    left: dict[str, str] = {}
    unknown: dict[str, str] = {}
    modules: dict[str, nn.Module] = {}
    attending = set(attending_modules(model, example).values())
    for name, module in model.named_modules():
        handed = module in attending or isinstance(module, Intercepted)
        if not isinstance(module, nn.MultiheadAttention) and not handed:
            continue
        if module in causal:
            left[name] = causal[module]
        elif not (handed or _is_plain(module)) or "forward" in module.__dict__:
            unknown[name] = f"{type(module).__qualname__} may have a forward of its own"
        else:
            modules[name] = module

    if strict and unknown:
        raise ValueError(f"cannot convert {_listed(unknown)}; strict=False converts the rest")
    if strict and not modules:
        reason = (
            f"all of it is left as it is: {_listed(left)}"
            if left
            else "it has no torch.nn.MultiheadAttention and no module that calls scaled_dot_product_attention"
        )
        raise ValueError(f"nothing to convert in {type(model).__qualname__}: {reason}")
    selected = (
        select_layers(list(modules), layers, f"; left as it is: {_listed(left)}" if left else "") if modules else []
    )
    # Everything is made before anything is changed.
    made = {name: normalizer_for(modules[name], chosen, _heads(modules[name])) for name in selected}
    for name in selected:
        module = modules[name]
        if _is_plain(module):
            module.__class__ = MultiheadAttention
            module._qkv_same_embed_dim = False  # type: ignore[assignment]  # torch's encoder layers then call the module
        elif not isinstance(module, Intercepted):
            module.__class__ = intercepted(type(module))
        module.normalizer = made[name]
    if left or unknown:
        warnings.warn(f"{chosen['name']} attention was not put into {_listed({**left, **unknown})}", stacklevel=2)
    return selected


def _is_plain(module: nn.Module) -> bool:
    """Whether the module is torch's own attention, or what this function has made of it."""
    return type(module) in (nn.MultiheadAttention, MultiheadAttention)


def _heads(module: nn.Module) -> tuple[int, int] | None:
    """Number and width of a module's heads, None where unknown."""
    if isinstance(module, nn.MultiheadAttention):
        return module.num_heads, module.head_dim
    return module.kind.heads(module) if isinstance(module, Intercepted) else None


def select_layers(names: Sequence[str], layers: int | Sequence[int] | str | None, note: str = "") -> list[str]:
    """The names that `layers` selects: None for all, an int for the last k, indices, or an fnmatch pattern.

    Args:
        names: of what can be selected, in order.
        layers: the selection.
        note: added to the error about a selection that is not there.

    Raises:
        ValueError: where there are fewer layers than asked for, or the pattern matches none; says what there is.
    """
    there_are = f"there are {len(names)}: {', '.join(names)}{note}"
    if layers is None:
        return list(names)
    if isinstance(layers, str):
        matching = [name for name in names if fnmatchcase(name, layers)]
        if not matching:
            raise ValueError(f"layers={layers!r} matches no attention module; {there_are}")
        return matching
    if isinstance(layers, int) and not isinstance(layers, bool):
        if not 1 <= layers <= len(names):
            raise ValueError(f"layers={layers} asks for the last {layers} attention modules; {there_are}")
        return list(names[-layers:])
    if isinstance(layers, Iterable) and all(isinstance(i, int) and not isinstance(i, bool) for i in layers) and layers:
        outside = [index for index in layers if not -len(names) <= index < len(names)]
        if outside:
            raise ValueError(f"layers={list(layers)} holds indices of no attention module, {outside}; {there_are}")
        indices = {index % len(names) for index in layers}
        return [name for index, name in enumerate(names) if index in indices]
    raise ValueError(
        f"layers must be None (all), an int (the last k), a list of indices or a pattern of names, got {layers!r}"
    )


def _causal_attention(model: nn.Module) -> dict[nn.Module, str]:
    """Modules whose attention, if they attend, must not let rows depend on later ones, with the reason."""
    found: dict[nn.Module, str] = {}
    for prefix, parent in model.named_modules():
        if isinstance(parent, nn.TransformerDecoderLayer):
            reason = "an earlier token of a decoder must not depend on later ones"
        elif _holds_causal_mask(parent):
            reason = f"{prefix or 'the model'} holds a causal mask"
        else:
            continue
        for module in parent.modules():
            found.setdefault(module, reason)
    return found


def _holds_causal_mask(module: nn.Module) -> bool:
    """Whether a buffer or attribute of the module itself, with `mask` in its name, is a triangular square."""
    for name, tensor in {**module.__dict__, **module._buffers}.items():
        if "mask" in name.lower() and isinstance(tensor, Tensor) and tensor.dim() >= 2 and not tensor.is_meta:
            square = tensor.shape[-1] == tensor.shape[-2]
            if square and (tensor.dtype == torch.bool or tensor.is_floating_point()) and is_causal_bias(tensor):
                return True
    return False


def _listed(reasons: Mapping[str, str]) -> str:
    """The modules of each reason: "a, b (reason); c (reason)"."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name or "the model itself")
    return "; ".join(f"{', '.join(group)} ({reason})" for reason, group in names.items())
