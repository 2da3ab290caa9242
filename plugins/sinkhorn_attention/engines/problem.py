"""One call of the operator: what every engine is given, whole."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Problem:
    """An attention call, or the normalisation of given scores.

    Attention: the map is Sinkhorn(scale * query @ key^T + attn_bias), its product with `value` the result. Given
    `scores` stand in place of query, key, value, scale and bias, and the map itself is the result.

    Attributes:
        query: (..., n, d); query, key, value and scores have one dtype, and the same leading dimensions.
        key: (..., m, d).
        value: (..., m, d_v).
        scores: (..., n, m), -inf = no support.
        attn_bias: broadcastable to (..., n, m), floating, of two dimensions at least; -inf = no support.
        query_mask: broadcastable to (..., n), boolean, True = takes part.
        key_mask: broadcastable to (..., m), likewise.
        dropout_keep: (..., n, m), boolean: which entries of the final map stay.
        n_iters: T, the number of half-steps.
        scale: factor of the scores.
        detached: whether column potentials count as constants in the derivative.
        damping: the power of a column step on scalings, lambda in (0, 1]; 1 is Sinkhorn's.
        dropout_p: probability that an entry was dropped; those that stay are divided by 1 - dropout_p.
    """

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    scores: Tensor | None = None
    attn_bias: Tensor | None = None
    query_mask: Tensor | None = None
    key_mask: Tensor | None = None
    dropout_keep: Tensor | None = None
    n_iters: int = 5
    scale: float = 1.0
    detached: bool = False
    damping: float = 1.0
    dropout_p: float = 0.0

    @property
    def like(self) -> Tensor:
        """A tensor of the call's dtype and device: the query, or the given scores."""
        tensor = self.query if self.scores is None else self.scores
        assert tensor is not None
        return tensor

    @property
    def lead(self) -> torch.Size:
        """The leading dimensions."""
        return self.like.shape[:-2]

    @property
    def heads(self) -> int:
        """Number of maps. Not `torch.Size.numel()`, which would fix the sizes of a program that is exported."""
        return math.prod(self.lead)

    @property
    def n(self) -> int:
        """Number of queries, the rows of the map."""
        return self.like.shape[-2]

    @property
    def m(self) -> int:
        """Number of keys, the columns of the map."""
        if self.key is not None:
            return self.key.shape[-2]
        return self.like.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        """Of the arithmetic: float32 at least."""
        return compute_dtype(self.like)

    @property
    def output_shape(self) -> tuple[int, ...]:
        """Of the result."""
        return *self.like.shape[:-1], self.m if self.value is None else self.value.shape[-1]

    @property
    def is_empty(self) -> bool:
        """Whether there is no query, no key, no value or no sample."""
        return 0 in self.output_shape or self.m == 0

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors, in the order of the fields."""
        return tuple(getattr(self, name) for name in TENSORS)

    def numbers(self) -> tuple[Any, ...]:
        """What is no tensor, in the order of the fields."""
        return tuple(getattr(self, name) for name in NUMBERS)

    def dropout_factor(self, dtype: torch.dtype) -> Tensor | None:
        """What multiplies the coupling, (..., n, m): 1 / (1 - p) where kept, 0 elsewhere; None without dropout."""
        return None if self.dropout_keep is None else dropout_factor(self.dropout_keep, self.dropout_p, dtype)

    def in_dtype(self, dtype: torch.dtype) -> "Problem":
        """The same call with floating tensors of another dtype."""
        names = [name for name in FLOATING if getattr(self, name) is not None]
        return replace(self, **{name: getattr(self, name).to(dtype) for name in names})


TENSORS = tuple(field.name for field in fields(Problem) if field.default is None)
NUMBERS = tuple(field.name for field in fields(Problem) if field.default is not None)
FLOATING = TENSORS[: TENSORS.index("attn_bias") + 1]


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Scores and scalings are kept in float32 at least."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def dropout_factor(keep: Tensor, dropout_p: float, dtype: torch.dtype) -> Tensor:
    """What multiplies the coupling: 1 / (1 - p) where kept, 0 elsewhere."""
    return keep.to(dtype).mul_(keep_factor(dropout_p))


def keep_factor(dropout_p: float) -> float:
    """What the entries that stay are multiplied with; 0 where all are dropped."""
    return 0.0 if dropout_p >= 1 else 1 / (1 - dropout_p)
