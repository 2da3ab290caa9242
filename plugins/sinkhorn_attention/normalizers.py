"""The registry of attention normalizers that the experiments sweep over. Adding one is adding one class.

A normalizer turns queries and keys into a coupling (`coupling`), applies it to values (`attend`) and, where it works on
given scores, normalises those (`from_scores`). Names and options are the same in Python, in Hydra and on fairseq's
command line.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .functional import check_n_iters, sinkhorn, sinkhorn_attention

_REGISTRY: dict[str, type["Normalizer"]] = {}
NormalizerClass = TypeVar("NormalizerClass", bound=type["Normalizer"])


def register_normalizer(name: str) -> Callable[[NormalizerClass], NormalizerClass]:
    """Class decorator that makes a normalizer available as `get_normalizer(name, **options)`."""

    def register(cls: NormalizerClass) -> NormalizerClass:
        if name in _REGISTRY and _REGISTRY[name].__qualname__ != cls.__qualname__:
            raise ValueError(f"normalizer {name!r} is registered already, by {_REGISTRY[name].__qualname__}")
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
        ValueError: for an unknown name, or an option that this normalizer does not have.
    """
    if name not in _REGISTRY:
        raise ValueError(f"unknown normalizer {name!r}; there are {', '.join(list_normalizers())}")
    try:
        return _REGISTRY[name](**options)  # type: ignore[arg-type]
    except TypeError as error:
        raise ValueError(f"normalizer {name!r}: {error}") from None


class Normalizer(nn.Module):
    """Base class. Shapes are those of `sinkhorn_attention`; True in a mask = the token takes part."""

    def __init__(self, head_dim: int | None = None, num_heads: int | None = None) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.num_heads = num_heads

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        attn_bias: Tensor | None = None,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        """coupling(query, key) @ value, (..., n, d_v); dropout acts on the final coupling without renormalising."""
        raise NotImplementedError

    def coupling(
        self,
        query: Tensor,
        key: Tensor,
        *,
        scale: float | None = None,
        attn_bias: Tensor | None = None,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        """The map itself, (..., n, m); exactly 0 in masked rows and columns."""
        raise NotImplementedError

    def from_scores(
        self, scores: Tensor, *, query_mask: Tensor | None = None, key_mask: Tensor | None = None
    ) -> Tensor:
        """The map of given scores (..., n, m), for normalizers that need nothing else."""
        raise NotImplementedError(f"{type(self).__name__} needs queries and keys; it does not work on given scores")


@register_normalizer("sinkhorn")
class Sinkhorn(Normalizer):
    """`n_iters` alternating half-steps, rows first (Sander et al., Sinkformers, AISTATS 2022).

    Rows sum to 1 after an odd count; columns sum to n_valid / m_valid after an even count and, in the limit, always.
    """

    def __init__(
        self,
        n_iters: int = 5,
        gradient: str = "unrolled",
        backend: str = "auto",
        head_dim: int | None = None,
        num_heads: int | None = None,
    ) -> None:
        super().__init__(head_dim, num_heads)
        check_n_iters(n_iters)
        self.n_iters = n_iters
        self.gradient = gradient
        self.backend = backend

    def extra_repr(self) -> str:
        return f"n_iters={self.n_iters}, gradient={self.gradient!r}, backend={self.backend!r}"

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        attn_bias: Tensor | None = None,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        return sinkhorn_attention(
            query,
            key,
            value,
            self.n_iters,
            scale=scale,
            attn_bias=attn_bias,
            query_mask=query_mask,
            key_mask=key_mask,
            dropout_p=dropout_p,
            gradient=self.gradient,
            backend=self.backend,
        )

    def coupling(
        self,
        query: Tensor,
        key: Tensor,
        *,
        scale: float | None = None,
        attn_bias: Tensor | None = None,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        scores = attention_scores(query, key, scale, attn_bias, query_mask, key_mask)
        return sinkhorn(scores, self.n_iters, query_mask=query_mask, key_mask=key_mask)

    def from_scores(
        self, scores: Tensor, *, query_mask: Tensor | None = None, key_mask: Tensor | None = None
    ) -> Tensor:
        return sinkhorn(scores, self.n_iters, query_mask=query_mask, key_mask=key_mask)


@register_normalizer("softmax")
class Softmax(Normalizer):
    """Row softmax (Vaswani et al. 2017), by torch's own scaled_dot_product_attention.

    Valid rows sum to 1, columns to anything. Equal to `sinkhorn` at n_iters=1.
    """

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float | None = None,
        attn_bias: Tensor | None = None,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        query, key, value = hide_padding(query, key, value, query_mask, key_mask)
        mask = attn_bias
        if key_mask is not None:
            keep = key_mask.unsqueeze(-2)
            if mask is None:
                mask = keep
            elif mask.dtype == torch.bool:
                mask = mask & keep
            else:
                mask = mask.masked_fill(~keep, -torch.inf)
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.to(query.dtype)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout_p, scale=scale)
        return out if query_mask is None else out.masked_fill(~query_mask.unsqueeze(-1), 0.0)

    def coupling(
        self,
        query: Tensor,
        key: Tensor,
        *,
        scale: float | None = None,
        attn_bias: Tensor | None = None,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        scores = attention_scores(query, key, scale, attn_bias, query_mask, key_mask)
        return sinkhorn(scores, 1, query_mask=query_mask, key_mask=key_mask)

    def from_scores(
        self, scores: Tensor, *, query_mask: Tensor | None = None, key_mask: Tensor | None = None
    ) -> Tensor:
        return sinkhorn(scores, 1, query_mask=query_mask, key_mask=key_mask)


def hide_padding(
    query: Tensor, key: Tensor, value: Tensor, query_mask: Tensor | None, key_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Zeroes what stands at masked tokens, so that garbage there (NaN included) cannot reach a product."""
    if query_mask is not None:
        query = query.masked_fill(~query_mask.unsqueeze(-1), 0.0)
    if key_mask is not None:
        key = key.masked_fill(~key_mask.unsqueeze(-1), 0.0)
        value = value.masked_fill(~key_mask.unsqueeze(-1), 0.0)
    return query, key, value


def attention_scores(
    query: Tensor,
    key: Tensor,
    scale: float | None = None,
    attn_bias: Tensor | None = None,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """Scale * query @ key^T + attn_bias, (..., n, m), in float32 at least; a boolean bias (True keeps) becomes -inf."""
    query, key, _ = hide_padding(query, key, key, query_mask, key_mask)
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), torch.float32)
    scores = (query.shape[-1] ** -0.5 if scale is None else scale) * query.to(dtype) @ key.to(dtype).transpose(-1, -2)
    if attn_bias is None:
        return scores
    return scores.masked_fill(~attn_bias, -torch.inf) if attn_bias.dtype == torch.bool else scores + attn_bias
