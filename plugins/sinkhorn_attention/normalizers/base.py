"""The registry, and what every normalizer shares: argument checks, scores, and the product with the values."""

import functools
import importlib
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import CallOptions, check_bias, check_mask
from .scores import attention_scores, full_precision_matmul

#: Entry points of installed packages whose import registers normalizers.
ENTRY_POINTS = "sinkhorn_attention.normalizers"
#: Environment variable with further modules that do, separated by commas.
MODULES = "SINKHORN_ATTENTION_NORMALIZERS"

_REGISTRY: dict[str, type["Normalizer"]] = {}
NormalizerClass = TypeVar("NormalizerClass", bound=type["Normalizer"])


def register_normalizer(name: str) -> Callable[[NormalizerClass], NormalizerClass]:
    """Class decorator that makes a normalizer available as `get_normalizer(name, **options)`.

    Raises:
        ValueError: if another class has the name already. The same class of the same file, imported again, may.
    """

    def origin(cls: type) -> tuple[str, str | None]:
        return cls.__qualname__, getattr(sys.modules.get(cls.__module__), "__file__", None)

    def register(cls: NormalizerClass) -> NormalizerClass:
        if name in _REGISTRY and origin(_REGISTRY[name]) != origin(cls):
            taken = _REGISTRY[name]
            raise ValueError(f"normalizer {name!r} is registered already, by {taken.__module__}.{taken.__qualname__}")
        _REGISTRY[name] = cls
        return cls

    return register


@functools.cache
def load_further_normalizers() -> None:
    """Imports what else registers normalizers, once: installed packages' entry points, and the modules of `MODULES`.

    Raises:
        ValueError: names what cannot be imported.
    """
    loads = [(f"entry point {one.name}", one.load) for one in importlib.metadata.entry_points(group=ENTRY_POINTS)]
    for module in filter(None, os.environ.get(MODULES, "").split(",")):
        loads.append((f"{MODULES}: {module}", functools.partial(importlib.import_module, module)))
    for name, load in loads:
        try:
            load()
        except Exception as error:  # whatever a module does at its import
            raise ValueError(f"{name} cannot be imported ({type(error).__name__}: {error})") from error


def list_normalizers() -> list[str]:
    """The registered names, sorted; see `load_further_normalizers` for what is registered by others."""
    load_further_normalizers()
    return sorted(_REGISTRY)


def choose_normalizer(
    normalizer: "NormalizerChoice",
    n_iters: int | None = None,
    options: Mapping[str, Any] | None = None,
    default: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A normalizer and its options as the one value that travels to `get_normalizer`: {"name": ..., **options}.

    Args:
        normalizer: a name of `list_normalizers()`, a mapping of "name" and options, or a Normalizer, which stands for
            its class and its options as they are now.
        n_iters: the option of that name; None, here or in a mapping, leaves it to `default` or to the normalizer.
        options: further options.
        default: a mapping of the same kind, whose options hold where its own normalizer is chosen.

    Raises:
        ValueError: for an option given twice, a mapping without a name, or something else than these three kinds.
    """
    if isinstance(normalizer, Normalizer):
        cls = type(normalizer)
        name = next((name for name, registered in _REGISTRY.items() if registered is cls), cls)
        chosen: dict[str, Any] = {"name": name, **normalizer.options}
    elif isinstance(normalizer, str):
        chosen = {"name": normalizer}
    elif isinstance(normalizer, Mapping) and "name" in normalizer:
        chosen = dict(normalizer)
    else:
        raise ValueError(
            "normalizer must be a name, a mapping of 'name' and options such as {'name': 'sinkhorn', 'n_iters': 3}, or "
            f"a Normalizer, got {normalizer!r}"
        )
    further = dict(options or {})
    for more in ({} if n_iters is None else {"n_iters": n_iters}, further):
        if twice := [option for option in more if chosen.get(option) is not None]:
            option = twice[0]
            raise ValueError(f"{option} is given twice: as {chosen[option]!r} and as {more[option]!r}")
        chosen.update(more)
    if chosen.get("n_iters", ...) is None:
        del chosen["n_iters"]
    return {**default, **chosen} if default is not None and default["name"] == chosen["name"] else chosen


def normalizer_class(choice: Mapping[str, Any]) -> type["Normalizer"]:
    """The class that a mapping of `choose_normalizer` names.

    Raises:
        ValueError: for a name that is not registered.
    """
    name = choice["name"]
    if isinstance(name, type) and issubclass(name, Normalizer):
        return name
    if isinstance(name, str) and name not in _REGISTRY:
        load_further_normalizers()
    if not isinstance(name, str) or name not in _REGISTRY:
        raise ValueError(f"unknown normalizer {name!r}; there are {', '.join(list_normalizers())}")
    return _REGISTRY[name]


def get_normalizer(
    normalizer: "NormalizerChoice", *, head_dim: int | None = None, num_heads: int | None = None, **options: Any
) -> "Normalizer":
    """Builds a normalizer. All of these are the same:

        get_normalizer("sinkhorn", n_iters=3)
        get_normalizer({"name": "sinkhorn", "n_iters": 3})
        get_normalizer(Sinkhorn(n_iters=3))

    Args:
        normalizer: a name of `list_normalizers()`, a mapping of "name" and options, or a Normalizer. What is built is
            always new, also from a Normalizer: of its class and with its options, for heads of this size, and with
            parameters of its own, so that the layers of a model share nothing.
        head_dim: width of a head; used by normalizers that own parameters, and ignored by the others.
        num_heads: number of heads, likewise.
        **options: options beside those in `normalizer`.

    Raises:
        ValueError: for an unknown name, an option given twice or that this normalizer does not have, or a value that it
            does not take.
    """
    chosen = choose_normalizer(normalizer, options=options)
    cls, name = normalizer_class(chosen), chosen.pop("name")
    known = cls.option_names()
    unknown = [option for option in chosen if option not in known]
    if unknown:
        raise ValueError(f"normalizer {name!r} has no option {', '.join(unknown)}; it has {', '.join(known) or 'none'}")
    if isinstance(normalizer, Normalizer):
        head_dim = normalizer.head_dim if head_dim is None else head_dim
        num_heads = normalizer.num_heads if num_heads is None else num_heads
    sizes = {"head_dim": head_dim, "num_heads": num_heads}
    taken = inspect.signature(cls).parameters
    try:
        built = cls(**chosen, **{size: value for size, value in sizes.items() if size in taken})
    except TypeError as error:  # a value of a wrong type, such as "5" for 5
        raise ValueError(f"normalizer {name!r} does not take these options, {chosen}: {error}") from error
    built.head_dim, built.num_heads = head_dim, num_heads
    return built


def normalizer_for(module: nn.Module, normalizer: "NormalizerChoice", heads: tuple[int, int] | None) -> "Normalizer":
    """A normalizer for an attention module: of its device, precision and mode.

    Args:
        module: the attention.
        normalizer: as for `get_normalizer`.
        heads: their number and width; None where unknown, which normalizers that own parameters refuse.
    """
    num_heads, head_dim = heads or (None, None)
    made = get_normalizer(normalizer, head_dim=head_dim, num_heads=num_heads)
    weight = next((parameter for parameter in module.parameters() if parameter.is_floating_point()), None)
    if weight is not None:
        made.to(device=weight.device, dtype=weight.dtype)
    return made.train(module.training)


class Normalizer(nn.Module):
    """Base class. Shapes are those of `sinkhorn_attention`; True in a mask = the token takes part.

    A normalizer of given scores overrides `from_scores` alone; one that needs queries and keys overrides `coupling`.
    `attend` is overridden where the output can be had without the map. `**options` are scale, attn_bias, query_mask and
    key_mask, and for `attend` dropout_p, each of them optional. The class attribute `row_wise` says that a row of the
    map depends on its own query alone; only such attention may be causal.

    The constructor's arguments are the options, each kept as an attribute of its own name; one that owns parameters
    takes `head_dim` and `num_heads` besides.
    """

    row_wise: bool = False

    def __init__(self, head_dim: int | None = None, num_heads: int | None = None) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.num_heads = num_heads

    @classmethod
    def option_names(cls) -> list[str]:
        """The options that this class takes, in the order of its constructor."""
        return [name for name in inspect.signature(cls).parameters if name not in ("head_dim", "num_heads")]

    @property
    def options(self) -> dict[str, Any]:
        """The options as they are now, by their names."""
        return {name: getattr(self, name) for name in self.option_names()}

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[CallOptions]) -> Tensor:
        """coupling(query, key) @ value, (..., n, d_v); dropout acts on the final coupling without renormalising."""
        self.check_value(key, value)
        dropout_p = options.pop("dropout_p", 0.0)
        coupling = self.coupling(query, key, **options)
        if dropout_p > 0.0:
            coupling = F.dropout(coupling, dropout_p)
        dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
        query_mask, key_mask = options.get("query_mask"), options.get("key_mask")
        if key_mask is not None:
            value = value.masked_fill(~key_mask.unsqueeze(-1), 0.0)
        wide = torch.promote_types(coupling.dtype, value.dtype)
        output = full_precision_matmul(coupling.to(wide), value.to(wide)).to(dtype)
        # What arrives at a padded query, NaN included, then reaches no gradient.
        return output if query_mask is None else output.masked_fill(~query_mask.unsqueeze(-1), 0.0)

    def coupling(self, query: Tensor, key: Tensor, **options: Unpack[CallOptions]) -> Tensor:
        """The map itself, (..., n, m), in float32 at least; exactly 0 in masked rows and columns."""
        self.check_inputs(query, key, **options)
        masks = options.get("query_mask"), options.get("key_mask")
        scores = attention_scores(query, key, options.get("scale"), options.get("attn_bias"), *masks)
        return self.from_scores(scores, *masks)

    def from_scores(self, scores: Tensor, query_mask: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        """The map of given scores (..., n, m), for normalizers that need nothing else. -inf is no support."""
        raise NotImplementedError("this normalizer needs queries and keys; it does not work on given scores")

    def check_inputs(self, query: Tensor, key: Tensor, **options: Unpack[CallOptions]) -> None:
        """Raises ValueError for what does not fit or would be misread, and for a causal bias unless `row_wise`."""
        if query.shape[-1] != key.shape[-1]:
            raise ValueError(f"key must have the query's width {query.shape[-1]}, got {key.shape[-1]}")
        try:
            lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
        except RuntimeError:
            shapes = f"{tuple(query.shape)}, {tuple(key.shape)}"
            raise ValueError(f"query and key must have leading dimensions that broadcast, got {shapes}") from None
        check_mask("query_mask", options.get("query_mask"), lead, query.shape[-2], query.device)
        check_mask("key_mask", options.get("key_mask"), lead, key.shape[-2], query.device)
        attn_bias = options.get("attn_bias")
        if attn_bias is not None:
            check_bias(attn_bias, (*lead, query.shape[-2], key.shape[-2]), query.device, may_be_causal=self.row_wise)

    def check_value(self, key: Tensor, value: Tensor) -> None:
        """Raises ValueError unless there is a value for each key: torch's fused softmax reads on past a short one."""
        if value.shape[-2] != key.shape[-2]:
            raise ValueError(f"value must have as many tokens as key, {key.shape[-2]}, got {value.shape[-2]}")


#: A normalizer and its options as one value: a name, {"name": ..., **options}, or a Normalizer to take after.
NormalizerChoice: TypeAlias = str | Mapping[str, Any] | Normalizer
