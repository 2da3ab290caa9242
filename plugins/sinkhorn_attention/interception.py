"""Attention of any module by catching what its own forward calls: no copy of a forward that its library may change.

A converted module is of a subclass of its own class, made here, whose forward runs the inherited one while
`torch.nn.functional.scaled_dot_product_attention` is handed to the module's normalizer, and, where the map is known to
be a softmax over keys, that softmax too. Everything else of the module stays: attributes, parameters, names, hooks.
"""

import copyreg
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from .masks import CAUSAL_REFUSAL, as_support, padded_queries, split_attention_mask
from .normalizers import Normalizer

SOFTMAX = (torch.softmax, F.softmax, Tensor.softmax)
#: Parts of the names of tensors that a forward takes beside its tokens.
ASIDE = ("mask", "bias", "pos", "rope", "rel")


# Functions with names, because a converted module pickles what is known of its kind.


def unknown_heads(module: Any) -> tuple[int, int] | None:
    """Number and width of the heads of a module of which nothing is known."""
    return None


def several_queries(module: Any) -> bool:
    """That a module's maps have more than one query."""
    return False


def single_query(module: Any) -> bool:
    """That a module's maps have one query."""
    return True


def leave(module: Any) -> None:
    """Leaves a converted module as it is."""


@dataclass(frozen=True)
class Kind:
    """What must be known of a class of attention modules beside that it calls scaled_dot_product_attention.

    Attributes:
        heads: number and width of the heads of a module, for normalizers that own parameters; None where unknown.
        given_scores: whether the map is a softmax over the last dimension of scores that the module makes itself.
        single_query: whether a module's maps have one query: two half-steps or more then weigh all keys alike.
        self_attention: whether queries and keys are the same tokens; None to judge by a call's arguments.
        prepare: brings a module's own state in order when it has just been converted.
    """

    heads: Callable[[Any], tuple[int, int] | None] = unknown_heads
    given_scores: bool = False
    single_query: Callable[[Any], bool] = several_queries
    self_attention: bool | None = None
    prepare: Callable[[Any], None] = leave


class _Handover(TorchFunctionMode):
    """Hands attention to a normalizer while it is active."""

    def __init__(self, normalizer: Normalizer, kind: Kind, self_attention: bool) -> None:
        super().__init__()
        self.normalizer, self.kind, self.self_attention, self.reached = normalizer, kind, self_attention, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.reached = True
            return self.attend(*args, **kwargs)
        if self.kind.given_scores and func in SOFTMAX:
            self.reached = True
            return self.normalizer.from_scores(args[0])
        return func(*args, **kwargs)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if is_causal and not self.normalizer.row_wise:
            raise ValueError(CAUSAL_REFUSAL)
        if is_causal:
            attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
        same_tokens = self.self_attention and query.shape[-2] == key.shape[-2]
        bias, query_mask, key_mask = split_attention_mask(as_support(attn_mask), same_tokens)
        if same_tokens and bias is not None and query_mask is None and bias.shape[-2] > 1:
            query_mask = padded_queries(bias)
            if query_mask is not None and query_mask.dim() > 1:  # heads, and samples, that the mask has not
                query_mask = query_mask.view((1,) * (query.dim() - 1 - query_mask.dim()) + query_mask.shape)
        masks = {"attn_bias": bias, "query_mask": query_mask, "key_mask": key_mask}
        return self.normalizer.attend(query, key, value, scale=scale, dropout_p=dropout_p, **masks)


class Intercepted(nn.Module):
    """Mixin of converted modules, the first base, before the class of their library."""

    normalizer: Normalizer
    kind = Kind()
    #: Names of the arguments of the inherited forward.
    argument_names: tuple[str, ...] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The inherited forward, with the normalizer in place of its softmax.

        Raises:
            ValueError: for causal attention, which only a `row_wise` normalizer can have.
            RuntimeError: where the forward has not reached what is handed over: it would have been another attention.
        """
        if getattr(self, "fused_attn", None) is False and not self.kind.given_scores:
            self.fused_attn = True  # timm's modules call what is handed over only then
        same = self.kind.self_attention
        handover = _Handover(self.normalizer, self.kind, self._one_sequence(args, kwargs) if same is None else same)
        with handover:
            result = super().forward(*args, **kwargs)
        if not handover.reached and not torch.compiler.is_compiling():
            raise RuntimeError(
                f"{type(self).__mro__[2].__qualname__} was converted, but its forward has not called "
                "scaled_dot_product_attention this time, so its attention is not the normalizer's; leave it out by "
                "layers="
            )
        return result

    def _one_sequence(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call has one sequence of tokens, as self-attention has: what else it is given is no sequence."""
        given = [*zip(self.argument_names, args, strict=False), *kwargs.items()]
        tokens = [
            argument
            for name, argument in given
            if isinstance(argument, Tensor) and argument.is_floating_point() and not any(part in name for part in ASIDE)
        ]
        return all(one is tokens[0] for one in tokens)


class _InterceptedClass(type):
    """Metaclass of the classes that `intercepted` makes, so that they pickle by what they are made of."""


def intercepted(cls: type[nn.Module], kind: Kind = Intercepted.kind) -> type[nn.Module]:
    """The subclass of a class of attention modules whose softmax is a normalizer's; the same one each time."""
    make: Any = _intercepted
    return make(cls, kind)


@cache
def _intercepted(cls: Any, kind: Kind) -> type[nn.Module]:
    names = tuple(inspect.signature(cls.forward).parameters)[1:]
    namespace = {"__module__": __name__, "kind": kind, "made_of": (cls, kind), "argument_names": names}
    made: Any = _InterceptedClass(f"Normalized{cls.__name__}", (Intercepted, cls), namespace)
    return made


def _rebuild(cls: Any) -> Any:
    return intercepted, cls.made_of


copyreg.pickle(_InterceptedClass, _rebuild)


@cache
def calls_attention(cls: type[nn.Module]) -> bool:
    """Whether the forward of a class calls scaled_dot_product_attention, by its source."""
    if cls.__module__.startswith("torch.") or issubclass(cls, Intercepted):
        return False
    try:
        return "scaled_dot_product_attention(" in inspect.getsource(cls.forward)
    except (OSError, TypeError):  # made in an interactive session
        return False


def attending_modules(model: nn.Module, example: Any = None) -> dict[str, nn.Module]:
    """The modules of a model that call scaled_dot_product_attention themselves, by name.

    Args:
        model: any module.
        example: arguments of one call, a tuple or a mapping of keywords: the model is run once without gradients, and
            what calls it is seen, wherever the call is written. Without, the sources of the classes are searched.
    """
    if example is None:
        classes: list[tuple[str, nn.Module, Any]] = [(name, one, type(one)) for name, one in model.named_modules()]
        return {name: module for name, module, cls in classes if calls_attention(cls)}
    running: list[nn.Module] = []
    seen: list[nn.Module] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is F.scaled_dot_product_attention and running:
                seen.append(running[-1])
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), _hooks(running), Watch():
        model(**example) if isinstance(example, Mapping) else model(*example)
    return {name: module for name, module in model.named_modules() if any(module is one for one in seen)}


@contextmanager
def _hooks(running: list[nn.Module]) -> Iterator[None]:
    """Keeps the stack of the modules whose forward is running."""

    def leave_module(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    before = register_module_forward_pre_hook(lambda module, args: running.append(module))
    after = register_module_forward_hook(leave_module, always_call=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()
