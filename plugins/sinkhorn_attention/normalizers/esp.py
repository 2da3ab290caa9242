"""Expected sliced transport plans (ESPFormer): doubly stochastic attention from sorting instead of scaling."""

import math
from typing import Unpack

import torch
from torch import Tensor

from ..checks import CallOptions
from .base import Normalizer, register_normalizer
from .scores import full_precision_matmul, hide_padding


def monotone_plan(n_valid: Tensor, m_valid: Tensor, n: int, m: int, dtype: torch.dtype) -> Tensor:
    """The optimal plan between sorted points on a line, n_valid of mass 1/n_valid and m_valid of mass 1/m_valid.

    Args:
        n_valid: (..., 1, 1), number of points on the left.
        m_valid: (..., 1, 1), number of points on the right.
        n: rows of the result; those from n_valid on are 0.
        m: columns of the result, likewise.
        dtype: of the result.

    Returns:
        (..., n, m): how far the i-th interval of length 1/n_valid and the j-th of length 1/m_valid overlap. The
        identity over n where both numbers are n.
    """
    rows = torch.arange(n, device=n_valid.device, dtype=dtype).unsqueeze(-1)
    columns = torch.arange(m, device=n_valid.device, dtype=dtype)
    # In whole numbers, over the common denominator: 1/3 + 1/3 + 1/3 would leave a sliver beside 1.
    low = torch.maximum(rows * m_valid, columns * n_valid)
    high = torch.minimum(torch.minimum((rows + 1) * m_valid, (columns + 1) * n_valid), (n_valid * m_valid).to(dtype))
    return (high - low).clamp(min=0.0) / (n_valid * m_valid).clamp(min=1)


def soft_sort(points: Tensor, mask: Tensor, temperature: float, power: float) -> Tensor:
    """SoftSort (Prillo and Eisenschlos 2020): rows softmax(-|sorted_i - x_j|^power / temperature), ascending.

    Args:
        points: (..., slices, tokens).
        mask: (..., 1, tokens), True = takes part; the others are sorted to the end and get no weight.
        temperature: positive; the rows tend to those of the sorting permutation as it tends to 0.
        power: 1 in the paper on SoftSort, 2 in ESPFormer's code.

    Returns:
        (..., slices, tokens, tokens), sorted position by token. Rows sum to 1; positions without a token get anything.
    """
    ordered = points.masked_fill(~mask, math.inf).sort(-1)[0]
    ordered = torch.where(ordered == math.inf, 0.0, ordered)
    distance = (ordered.unsqueeze(-1) - points.masked_fill(~mask, 0.0).unsqueeze(-2)).abs()
    logits = -distance.pow(power) / temperature
    # A sample without tokens would make softmax NaN: its logits stay finite, and the plan has no mass there.
    hidden = (~mask & mask.any(-1, keepdim=True)).unsqueeze(-2)
    return logits.masked_fill(hidden, -math.inf).softmax(-1)


@register_normalizer("esp")
class ESP(Normalizer):
    """Expected sliced plans (Shahbazi et al., ESPFormer, ICML 2025, algorithm 1), one slice per coordinate of a head.

    With x = scale * query, y = scale * key, A_l and B_l the soft sorting matrices of their l-th coordinates and W the
    monotone plan of the sorted points (1/n times the identity for a square map),

        U_l = A_l^T W B_l,   D_l = sum_ij |x_i - y_j|^2 (U_l)_ij,   map = n * sum_l softmax_l(-sharpness * D_l) U_l.

    A slice with a small cost weighs more. As the temperature tends to 0, rows sum to 1 and columns to n / m exactly; at
    a given temperature they do nearly. Memory is that of `head_dim` maps. There are no scores: a bias is refused.

    The published code differs from the formulas of the algorithm in three points. It sorts with power 2, at temperature
    1e-3, which are the defaults here, it weighs slices by the distance without the square, and it leaves the factor 1/n
    out of D.

    Args:
        temperature: of the soft sorting, positive.
        power: of the differences in the soft sorting, positive.
        sharpness: inverse temperature of the weights of slices; 0 is the mean over slices.
        head_dim: width of a head; not used.
        num_heads: number of heads; not used.
    """

    def __init__(
        self,
        temperature: float = 1e-3,
        power: float = 2.0,
        sharpness: float = 0.1,
        head_dim: int | None = None,
        num_heads: int | None = None,
    ) -> None:
        super().__init__(head_dim, num_heads)
        if not temperature > 0 or not power > 0:
            raise ValueError(f"temperature and power must be positive, got {temperature!r} and {power!r}")
        if not 0 <= sharpness < math.inf:
            raise ValueError(f"sharpness must be a number >= 0 (0 weighs all slices alike), got {sharpness!r}")
        self.temperature = float(temperature)
        self.power = float(power)
        self.sharpness = float(sharpness)

    def coupling(self, query: Tensor, key: Tensor, **options: Unpack[CallOptions]) -> Tensor:
        if options.get("attn_bias") is not None:
            raise ValueError("esp sorts queries and keys and has no scores that attn_bias could be added to")
        self.check_inputs(query, key, **options)
        scale, query_mask, key_mask = options.get("scale"), options.get("query_mask"), options.get("key_mask")
        n, m = query.shape[-2], key.shape[-2]
        query, key, _ = hide_padding(query, key, key, query_mask, key_mask)
        dtype = torch.promote_types(torch.promote_types(query.dtype, key.dtype), torch.float32)
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        x, y = factor * query.to(dtype), factor * key.to(dtype)
        if n == 0 or m == 0:
            return x @ y.transpose(-1, -2)
        rows = torch.ones(n, dtype=torch.bool, device=x.device) if query_mask is None else query_mask
        columns = torch.ones(m, dtype=torch.bool, device=x.device) if key_mask is None else key_mask
        n_valid = rows.sum(-1).unsqueeze(-1).unsqueeze(-1)
        m_valid = columns.sum(-1).unsqueeze(-1).unsqueeze(-1)

        order_x = soft_sort(x.transpose(-1, -2), rows.unsqueeze(-2), self.temperature, self.power)
        order_y = soft_sort(y.transpose(-1, -2), columns.unsqueeze(-2), self.temperature, self.power)
        monotone = monotone_plan(n_valid, m_valid, n, m, dtype).unsqueeze(-3)
        plans = full_precision_matmul(full_precision_matmul(order_x.transpose(-1, -2), monotone), order_y)
        dots = full_precision_matmul(x, y.transpose(-1, -2))
        cost = x.square().sum(-1).unsqueeze(-1) + y.square().sum(-1).unsqueeze(-2) - 2 * dots
        # Tokens outside the masks have no weight in any plan, but a sample without tokens has finite garbage there.
        keep = rows.unsqueeze(-1) & columns.unsqueeze(-2)
        plans = torch.where(keep.unsqueeze(-3), plans, 0.0)
        slice_costs = (cost.unsqueeze(-3) * plans).sum(-1).sum(-1)
        weights = (-self.sharpness * slice_costs).softmax(-1)
        return n_valid * (weights.unsqueeze(-1).unsqueeze(-1) * plans).sum(-3)
