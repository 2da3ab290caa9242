"""The Point Cloud Transformer's own normalisation, in the suite's registry as `pct`."""

from sinkhorn_attention import Normalizer, register_normalizer, sinkhorn
from sinkhorn_attention.normalizers import attention_scores, hide_padding
from torch import Tensor
from torch.nn import functional as F

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
        coupling = self.coupling(
            query, key, scale=scale, attn_bias=attn_bias, query_mask=query_mask, key_mask=key_mask
        ).to(value.dtype)
        _, _, value = hide_padding(query, key, value, None, key_mask)
        return F.dropout(coupling, dropout_p) @ value

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
        return self.from_scores(scores, query_mask=query_mask, key_mask=key_mask)

    def from_scores(
        self, scores: Tensor, *, query_mask: Tensor | None = None, key_mask: Tensor | None = None
    ) -> Tensor:
        # A single half-step over the transposed scores is the column step, with the operator's exact masks.
        columns = sinkhorn(scores.transpose(-1, -2), 1, query_mask=key_mask, key_mask=query_mask).transpose(-1, -2)
        return columns / (EPSILON + columns.sum(-1, keepdim=True))
