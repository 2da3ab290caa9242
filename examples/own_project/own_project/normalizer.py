"""Attention with squares in place of exponentials."""

from sinkhorn_attention import Normalizer, register_normalizer
from torch import Tensor


@register_normalizer("own_squares")
class OwnSquares(Normalizer):
    """Squared scores over their sum along each row; -inf is no support."""

    def __init__(self, offset: float = 1.0) -> None:
        super().__init__()
        self.offset = offset

    def from_scores(self, scores: Tensor, query_mask: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        """Scores (..., n, m) to a map of the same shape, whose rows sum to 1."""
        weights = (scores.masked_fill(scores.isinf(), -self.offset) + self.offset).square()
        return weights / weights.sum(-1, keepdim=True).clamp(min=1e-6)
