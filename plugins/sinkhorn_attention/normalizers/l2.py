"""Attention from squared distances: softmax (Kim et al. 2021) and Sinkhorn (Sander et al. 2022, proposition 1).

-1/2 |q - k|^2 = q.k - 1/2 |k|^2 - 1/2 |q|^2. The last term is constant in a row, and the first row step takes it away
exactly, at any number of half-steps. The key's term is not taken away by a finite number of column steps (proposition 1
holds in the limit only): it goes in as one more column, q' = (q, 1) and k' = (k, -1/2 |k|^2), so that every engine for
dot products computes attention from distances, without a bias of n x m numbers.

Distances do not change when queries and keys move together. They are taken from the mean key, and the keys' column from
its mean, because far from the origin the small difference of large |q|^2, |k|^2 and 2 q.k is lost in float32. What
remains is an error of the scores of about 1e-7 * scale * |q - mean| * |k - mean|, as dot-product attention has.
"""

from typing import Any, Unpack

import torch
from torch import Tensor

from ..checks import CallOptions
from ..engines.operator import without_autocast
from .base import Normalizer, register_normalizer
from .scores import hide_padding
from .sinkhorn import Sinkhorn
from .softmax import Softmax


def augment(query: Tensor, key: Tensor, query_mask: Tensor | None, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Query and key of width d + 1 whose dot products are -1/2 |q - k|^2 up to a constant in each row.

    Float32 at least. Centring changes no result, so its derivative is zero and the means count as constants.
    """
    query, key, _ = hide_padding(query, key, key, query_mask, key_mask)
    dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), torch.float32)
    query, key = query.to(dtype), key.to(dtype)
    centre = _mean_over_keys(key.detach(), key_mask)
    query, key = query - centre, key - centre
    column = -0.5 * key.square().sum(-1, keepdim=True)
    column = column - _mean_over_keys(column.detach(), key_mask)
    return torch.cat([query, torch.ones_like(query[..., :1])], -1), torch.cat([key, column], -1)


def _mean_over_keys(key: Tensor, key_mask: Tensor | None) -> Tensor:
    """The mean over valid keys of (..., m, d), shape (..., 1, d); 0 where there is none."""
    if key_mask is None:
        return key.sum(-2, keepdim=True) / max(key.shape[-2], 1)
    mask = key_mask.unsqueeze(-1)
    return key.masked_fill(~mask, 0.0).sum(-2, keepdim=True) / mask.sum(-2, keepdim=True).clamp(min=1)


class _FromDistances(Normalizer):
    """A normalizer of dot products made one of -1/2 * scale * |q - k|^2."""

    def __init__(self, inner: Normalizer, head_dim: int | None, num_heads: int | None) -> None:
        super().__init__(head_dim, num_heads)
        self.inner = inner

    @property
    def options(self) -> dict[str, Any]:
        return self.inner.options

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[CallOptions]) -> Tensor:
        self.check_value(key, value)
        dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
        query, key = self._augment(query, key, options)
        # In bfloat16 the keys' column would lose what the scores differ by.
        with without_autocast(query):
            return self.inner.attend(query, key, value, **options).to(dtype)

    def coupling(self, query: Tensor, key: Tensor, **options: Unpack[CallOptions]) -> Tensor:
        return self.inner.coupling(*self._augment(query, key, options), **options)

    def _augment(self, query: Tensor, key: Tensor, options: CallOptions) -> tuple[Tensor, Tensor]:
        """Checked and augmented tokens; the scale of their own width becomes explicit."""
        self.check_inputs(query, key, **options)
        if options.get("scale") is None:
            options["scale"] = query.shape[-1] ** -0.5
        return augment(query, key, options.get("query_mask"), options.get("key_mask"))


@register_normalizer("l2")
class L2(_FromDistances):
    """Row softmax of -1/2 * scale * |q - k|^2 (Kim, Papamakarios and Mnih, The Lipschitz Constant of Self-Attention).

    Valid rows sum to 1, columns to anything. Kim et al. have no factor 1/2: twice the scale gives their map.
    """

    row_wise = True

    def __init__(self, head_dim: int | None = None, num_heads: int | None = None) -> None:
        super().__init__(Softmax(), head_dim, num_heads)


@register_normalizer("sinkhorn_l2")
class SinkhornL2(_FromDistances):
    """`n_iters` half-steps, rows first, on exp(-1/2 * scale * |q - k|^2) (Sander et al. 2022, proposition 1).

    Rows sum to 1 after an odd count; columns sum to n_valid / m_valid after an even count and, in the limit, always.
    In the limit it is the coupling of `sinkhorn`; at n_iters=1 it is `l2`.

    Args:
        n_iters: number of HALF-steps.
        gradient: as in `sinkhorn_attention`.
        backend: as in `sinkhorn_attention`.
        head_dim: width of a head; not used.
        num_heads: number of heads; not used.
    """

    def __init__(
        self,
        n_iters: int = 5,
        gradient: str = "unrolled",
        backend: str = "auto",
        head_dim: int | None = None,
        num_heads: int | None = None,
    ) -> None:
        super().__init__(Sinkhorn(n_iters, gradient, backend), head_dim, num_heads)
