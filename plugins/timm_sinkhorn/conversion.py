"""`convert`: another normalizer in the attention of a model that is already built."""

import functools
import inspect
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sinkhorn_attention.conversion import select_layers
from sinkhorn_attention.interception import Intercepted, calls_attention
from sinkhorn_attention.normalizers import Normalizer, NormalizerChoice, choose_normalizer, normalizer_for
from torch import nn

from .kinds import KINDS, LEFT_BY_DESIGN, NOT_ATTENTION, converted

Layers = int | Sequence[int] | str | None

_ATTENDS = re.compile(r"softmax\(|scaled_dot_product_attention\(|multi_head_attention_forward\(")


def convert(
    model: nn.Module,
    normalizer: NormalizerChoice = "sinkhorn",
    *,
    layers: Layers = None,
    strict: bool = True,
    **options: Any,
) -> list[str]:
    """Replaces the softmax of a built timm model's attention, in place, and keeps weights and parameter names.

    The classes of the attention modules change to subclasses of their own that call the normalizer, so that the model
    still copies, pickles, saves and loads as before, in both directions; the state dict gains entries only where the
    normalizer owns parameters. A model can be converted again, also back to "softmax".

    What a coupling means depends on the map. Square maps, over all tokens or within windows, become doubly stochastic.
    In rectangular ones (twins, pvt_v2: fewer keys than queries) rows sum to 1 and columns to n / m. With a single query
    (class attention in cait, crossvit, volo; SigLIP's pooling) two half-steps or more give plain mean pooling, of which
    a warning tells. Relative positions and window masks are added to the scores, as under softmax. Talking heads (cait)
    and outlook attention (volo) normalise given scores, which not every normalizer can.

    Modules whose softmax is no map between tokens (davit's and xcit's channel attention, linear attention) stay as they
    are, are not counted by `layers`, and are named in a warning.

    Args:
        model: a timm model, or any module that contains some of its layers; not yet scripted or traced.
        normalizer: a name, a mapping of "name" and options, or a Normalizer: see `sinkhorn_attention.get_normalizer`.
        layers: which attention modules: None for all, an int k for the last k, a list of indices in the order of
            `model.named_modules()`, or an fnmatch pattern of their names, such as "blocks.[0-5].attn".
        strict: whether attention of unknown kind among `layers` is an error; otherwise it stays a softmax.
        **options: the normalizer's options, such as `n_iters=3`.

    Returns:
        The names of the converted modules.

    Raises:
        ValueError: for attention of unknown kind, of which all are listed, for a model without attention, for `layers`
            that pick nothing, and for bad options. The model is then unchanged.

    Example:
        >>> model = timm.create_model("swin_tiny_patch4_window7_224", pretrained=True)
        >>> convert(model, "sinkhorn", n_iters=3, layers=4)
        ['layers.2.blocks.4.attn', 'layers.2.blocks.5.attn', 'layers.3.blocks.0.attn', 'layers.3.blocks.1.attn']
    """
    wanted = choose_normalizer(normalizer, options=options)
    known: dict[str, nn.Module] = {}
    unknown: dict[str, nn.Module] = {}
    left: dict[str, str] = {}
    candidates: list[str] = []
    for name, module in model.named_modules():
        cls: Any = type(module)
        known_kind = cls in KINDS or isinstance(module, Intercepted)
        if cls in LEFT_BY_DESIGN:
            left[name] = LEFT_BY_DESIGN[cls]
        elif known_kind or _attends(cls):
            candidates.append(name)
            # One that was put into the object would still be called; a subclass may have a forward of its own.
            taken = known_kind or (calls_attention(cls) and not _extends_known(cls))
            (known if taken and "forward" not in module.__dict__ else unknown)[name] = module
    if not candidates:
        raise ValueError(_nothing_to_convert(model, left))
    chosen = select_layers(candidates, layers)
    foreign = {name: unknown[name] for name in chosen if name in unknown}
    if foreign and strict:
        raise ValueError(
            f"convert does not know this attention: {_describe(foreign)}; pass strict=False to leave it as it is, or "
            "pick other modules by layers="
        )
    chosen = [name for name in chosen if name in known]
    if not chosen:
        raise ValueError(f"convert knows none of the attention modules that were picked: {_describe(foreign)}")
    normalizers = {name: _normalizer_for(name, known[name], wanted) for name in chosen}

    for name in chosen:
        module = known[name]
        if not isinstance(module, Intercepted):
            module.__class__ = converted(type(module))
        module.kind.prepare(module)  # type: ignore[operator, union-attr]
        module.normalizer = normalizers[name]
    _warn_of_what_to_know(chosen, known, left, foreign, normalizers)
    return chosen


@functools.cache  # finding a class in its file takes long
def _attends(kind: type[nn.Module]) -> bool:
    """Whether modules of a kind that is not known seem to hold an attention map, by their source."""
    if issubclass(kind, nn.MultiheadAttention) or _extends_known(kind):
        return True
    if issubclass(kind, NOT_ATTENTION) or kind.__module__.startswith("torch."):
        return False
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # made in an interactive session: only its name is left to judge by
        return "attn" in kind.__name__.lower() or "attention" in kind.__name__.lower()
    return _ATTENDS.search(source) is not None


def _extends_known(kind: type[nn.Module]) -> bool:
    """Whether a class extends a known one, whose attention it may have changed."""
    return issubclass(kind, tuple(KINDS)) and kind not in KINDS


def _normalizer_for(name: str, module: nn.Module, wanted: Mapping[str, Any]) -> Normalizer:
    """The normalizer of one module.

    Raises:
        ValueError: for one that needs queries and keys where the module has scores.
    """
    cls: Any = type(module) if isinstance(module, Intercepted) else converted(type(module))
    built = normalizer_for(module, wanted, cls.kind.heads(module))
    if cls.kind.given_scores and type(built).from_scores is Normalizer.from_scores:
        raise ValueError(
            f"{name} ({type(module).__name__}) normalises given scores, and normalizer {wanted['name']!r} needs "
            "queries and keys; leave the module out by layers="
        )
    return built


def _nothing_to_convert(model: nn.Module, left: dict[str, str]) -> str:
    kind = type(model).__name__
    if isinstance(model, torch.jit.ScriptModule | torch.fx.GraphModule) or any(
        isinstance(module, torch.fx.GraphModule) for module in model.modules()
    ):
        return f"{kind} is scripted or traced, so its attention can no longer be exchanged; convert it before that"
    if left:
        return f"{kind} has no attention between tokens to convert: {_describe_left(left)}"
    return f"{kind} has no attention to convert"


def _describe(modules: dict[str, nn.Module]) -> str:
    kinds = {
        name: f"{type(module).__module__}.{type(module).__qualname__}"
        + (" with a forward that was put into it" if "forward" in module.__dict__ else "")
        for name, module in modules.items()
    }
    return ", ".join(f"{name or 'the model itself'} ({kind})" for name, kind in kinds.items())


def _describe_left(left: dict[str, str]) -> str:
    reasons = dict.fromkeys(left.values())
    return "; ".join(f"{', '.join(name for name in left if left[name] == reason)} ({reason})" for reason in reasons)


def _warn_of_what_to_know(
    chosen: list[str],
    known: dict[str, nn.Module],
    left: dict[str, str],
    foreign: dict[str, nn.Module],
    normalizers: dict[str, Normalizer],
) -> None:
    if left:
        warnings.warn(f"left as it is by design: {_describe_left(left)}", stacklevel=3)
    if foreign:
        warnings.warn(f"left a softmax because convert does not know it: {_describe(foreign)}", stacklevel=3)
    single = []
    for name in chosen:
        module = known[name]
        if module.kind.single_query(module):  # type: ignore[operator, union-attr]
            single.append(name)
    if single and normalizers[single[0]].options.get("n_iters", 1) > 1:
        warnings.warn(
            f"{', '.join(single)}: a single query, so that two half-steps or more are mean pooling, whatever its keys",
            stacklevel=3,
        )
