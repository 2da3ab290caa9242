"""The registry, and what every normalizer shares: argument checks, scores, and the product with the values."""

import inspect
import sys
from collections.abc import Callable
from typing import TypeVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import CallOptions, check_bias, check_mask
from .scores import attention_scores, full_precision_matmul

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


def list_normalizers() -> list[str]:
    """The registered names, sorted."""
    return sorted(_REGISTRY)


def get_normalizer(name: str, **options: object) -> "Normalizer":
    """Builds the normalizer registered under `name`.

    Args:
        name: one of `list_normalizers()`.
        **options: the constructor's arguments; `head_dim` and `num_heads` may always be given, and are used by
            normalizers that own parameters.

    Raises:
        ValueError: for an unknown name, an option that this normalizer does not have, or a value that it does not take.
    """
    if name not in _REGISTRY:
        raise ValueError(f"unknown normalizer {name!r}; there are {', '.join(list_normalizers())}")
    known = list(inspect.signature(_REGISTRY[name]).parameters)
    unknown = [option for option in options if option not in known]
    if unknown:
        own = [option for option in known if option not in ("head_dim", "num_heads")]
        raise ValueError(f"normalizer {name!r} has no option {', '.join(unknown)}; it has {', '.join(own) or 'none'}")
    try:
        return _REGISTRY[name](**options)  # type: ignore[arg-type]
    except TypeError as error:  # a value of a wrong type, such as "5" for 5
        raise ValueError(f"normalizer {name!r} does not take these options, {options}: {error}") from error


class Normalizer(nn.Module):
    """Base class. Shapes are those of `sinkhorn_attention`; True in a mask = the token takes part.

    A normalizer of given scores overrides `from_scores` alone; one that needs queries and keys overrides `coupling`.
    `attend` is overridden where the output can be had without the map. `**options` are scale, attn_bias, query_mask and
    key_mask, and for `attend` dropout_p, each of them optional. The class attribute `row_wise` says that a row of the
    map depends on its own query alone; only such attention may be causal.
    """

    row_wise: bool = False

    def __init__(self, head_dim: int | None = None, num_heads: int | None = None) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.num_heads = num_heads

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
