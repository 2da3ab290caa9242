"""The Point Cloud Transformer's own normalisation, in the suite's registry as `pct`."""

from sinkhorn_attention import Normalizer, register_normalizer, sinkhorn
from torch import Tensor

#: Added to the row sums by the original.
EPSILON = 1e-9


@register_normalizer("pct")
class PCT(Normalizer):
    """Column softmax, then division of each row by its sum + 1e-9 (Guo et al., PCT, CVMJ 2021).

    Public ports write it with the keys as rows (softmax over the last axis, then division by the sum over the other)
    and multiply the values from the left; with rows = queries that is a COLUMN step followed by a ROW step. These are
    two half-steps of Sinkhorn in the other order, so "one half-step" (softmax) is not PCT's attention.

    Rows sum to 1 (up to the 1e-9, which matters only to a query that every key turns away), columns only roughly.
    """

    def from_scores(self, scores: Tensor, query_mask: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        # A single half-step over the transposed scores is the column step, with the operator's exact masks.
        columns = sinkhorn(scores.transpose(-1, -2), 1, query_mask=key_mask, key_mask=query_mask).transpose(-1, -2)
        return columns / (EPSILON + columns.sum(-1, keepdim=True))
