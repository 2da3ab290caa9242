"""What each host means by a mask, translated to the suite's own meaning."""

import math

import pytest
import torch
from sinkhorn_attention import sinkhorn, sinkhorn_attention
from sinkhorn_attention.masks import bias_from_keep, is_causal_bias, keep_from_hide, split_attention_mask


def test_hiding_masks_are_turned_round_and_integers_refused() -> None:
    hide = torch.tensor([[False, True], [True, False]])
    assert keep_from_hide(None) is None
    assert torch.equal(keep_from_hide(hide), ~hide)
    for dtype in (torch.uint8, torch.int64, torch.float32):
        with pytest.raises(ValueError, match=r"my_mask must be boolean \(True hides\)"):
            keep_from_hide(hide.to(dtype), "my_mask")


def test_bias_from_keep() -> None:
    bias = bias_from_keep(torch.tensor([True, False]), torch.float64)
    assert bias.dtype == torch.float64
    assert bias.tolist() == [0.0, -math.inf]


@pytest.mark.parametrize("additive", [False, True])
def test_a_key_padding_mask_also_hides_the_queries_of_self_attention(additive: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 6, 4)
    keep = torch.tensor([[True] * 6, [True] * 4 + [False] * 2]).view(2, 1, 1, 6)
    mask = bias_from_keep(keep, torch.float32) if additive else keep
    bias, query_mask, key_mask = split_attention_mask(mask)
    assert torch.equal(query_mask, keep.squeeze(-2))
    assert torch.equal(key_mask, keep.squeeze(-2))
    got = sinkhorn_attention(x, x, x, 5, attn_bias=bias, query_mask=query_mask, key_mask=key_mask)
    short = x[1:, :, :4]
    torch.testing.assert_close(got[1:, :, :4], sinkhorn_attention(short, short, short, 5))
    assert (got[1, :, 4:] == 0).all()
    assert split_attention_mask(mask, self_attention=False)[1] is None


def test_a_finite_part_of_a_padding_mask_stays_a_bias() -> None:
    mask = torch.tensor([0.5, -1.0, -math.inf]).view(1, 1, 3)
    bias, query_mask, key_mask = split_attention_mask(mask)
    assert bias.flatten().tolist() == [0.5, -1.0, 0.0]
    assert key_mask.tolist() == query_mask.tolist() == [[True, True, False]]


def test_any_other_mask_is_support_or_bias() -> None:
    keep = torch.ones(4, 4, dtype=torch.bool)
    keep[0, 1] = False
    bias, query_mask, key_mask = split_attention_mask(keep)
    assert query_mask is None
    assert key_mask is None
    assert bias is keep
    additive = torch.randn(4, 4)
    assert split_attention_mask(additive)[0] is additive
    assert split_attention_mask(None) == (None, None, None)
    with pytest.raises(ValueError, match=r"boolean \(True keeps\) or floating"):
        split_attention_mask(torch.ones(4, 4, dtype=torch.int64))


def test_an_outer_product_mask_is_the_token_masks() -> None:
    torch.manual_seed(0)
    scores = torch.randn(2, 5, 5, dtype=torch.float64)
    rows, columns = torch.rand(2, 5) > 0.3, torch.rand(2, 5) > 0.3
    outer = bias_from_keep(rows.unsqueeze(2) & columns.unsqueeze(1), torch.float64)
    torch.testing.assert_close(sinkhorn(scores + outer, 5), sinkhorn(scores, 5, query_mask=rows, key_mask=columns))


def test_why_a_finite_fill_is_not_a_mask() -> None:
    """Filling padded keys with a large negative score is undone by the column step: they get their uniform share."""
    torch.manual_seed(0)
    scores = torch.randn(20, 8, 8, dtype=torch.float64)
    filled = scores.clone()
    filled[..., 5:] = -1e4
    leak = sinkhorn(filled, 7)[..., 5:].sum((-1, -2)) / 8
    torch.testing.assert_close(leak, torch.full_like(leak, 3 / 8), rtol=0.15, atol=0)
    mask = torch.arange(8) < 5
    exact = sinkhorn(scores, 7, query_mask=mask, key_mask=mask)
    assert (exact[..., 5:] == 0).all()
    assert (exact[:, 5:] == 0).all()
    torch.testing.assert_close(exact[:, :5, :5], sinkhorn(scores[:, :5, :5], 7))


def test_causal_patterns() -> None:
    lower = torch.ones(5, 5, dtype=torch.bool).tril()
    assert is_causal_bias(lower)
    assert is_causal_bias(lower.T)
    assert is_causal_bias(lower & torch.tensor([True, True, False, True, True]))
    assert not is_causal_bias(torch.eye(5, dtype=torch.bool))
    assert not is_causal_bias(torch.ones(5, 5, dtype=torch.bool))
    assert not is_causal_bias(torch.ones(1, 5, dtype=torch.bool))
    assert not is_causal_bias(torch.ones(2, 10, dtype=torch.bool).tril(7))
    assert is_causal_bias(torch.ones(4, 6, dtype=torch.bool).tril(2))


def test_why_a_causal_mask_is_refused() -> None:
    """The column step lets the future into the past: change the last query, and earlier rows move."""
    torch.manual_seed(0)
    scores = torch.randn(6, 6, dtype=torch.float64).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -math.inf)
    changed = scores.clone()
    changed[-1] += torch.randn(6, dtype=torch.float64)
    assert (sinkhorn(changed, 1)[:-1] - sinkhorn(scores, 1)[:-1]).abs().max() == 0
    assert (sinkhorn(changed, 5)[:-1] - sinkhorn(scores, 5)[:-1]).abs().max() > 1e-3
    diagonal = sinkhorn(scores, 20001).diagonal()
    assert diagonal.min() > 0.99
