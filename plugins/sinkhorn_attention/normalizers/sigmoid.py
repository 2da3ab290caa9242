"""Sigmoid attention: entries that know nothing of each other; its engine is elementwise.py."""

import math

from torch import Tensor

from ..elementwise import sigmoid_attention, sigmoid_coupling
from .base import Normalizer, register_normalizer


@register_normalizer("sigmoid")
class Sigmoid(Normalizer):
    """sigmoid(scores - log m), m the number of valid keys (Ramapuram et al., Sigmoid Self-Attention, 2024).

    Neither rows nor columns sum to a given number. The bias makes them start near softmax: at scores of 0 every valid
    row sums to m / (m + 1) and every valid column to n / (m + 1).

    `from_scores` is that definition; `attend` computes it by elementwise.py, which keeps no map for backward. Second
    derivatives are those of `coupling`.

    Args:
        bias: added to the scores in place of -log m.
        head_dim: width of a head; not used.
        num_heads: number of heads; not used.
    """

    row_wise = True

    def __init__(self, bias: float | None = None, head_dim: int | None = None, num_heads: int | None = None) -> None:
        super().__init__(head_dim, num_heads)
        if bias is not None and (not isinstance(bias, int | float) or not math.isfinite(bias)):
            raise ValueError(f"bias must be a finite number, or None for -log m, got {bias!r}")
        self.bias = None if bias is None else float(bias)

    def extra_repr(self) -> str:
        return "bias=-log(m)" if self.bias is None else f"bias={self.bias}"

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None = None,
        attn_bias: Tensor | None = None,
        query_mask: Tensor | None = None,
        key_mask: Tensor | None = None,
        dropout_p: float = 0.0,
    ) -> Tensor:
        return sigmoid_attention(query, key, value, self.bias, scale, attn_bias, query_mask, key_mask, dropout_p)

    def from_scores(self, scores: Tensor, query_mask: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        return sigmoid_coupling(scores, self.bias, query_mask, key_mask)
