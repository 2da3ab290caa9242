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


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_of_the_keys_alone_is_the_same_with_fewer_dimensions(additive: bool) -> None:
    """(m,) broadcasts as (1, m) does, for every sample and query."""
    keep = torch.tensor([True, True, True, False])
    mask = bias_from_keep(keep, torch.float32) if additive else keep
    x = torch.randn(2, 3, 4, 4)
    bias, query_mask, key_mask = split_attention_mask(mask)
    got = sinkhorn_attention(x, x, x, 5, attn_bias=bias, query_mask=query_mask, key_mask=key_mask)
    torch.testing.assert_close(got[..., :3, :], sinkhorn_attention(*[x[..., :3, :]] * 3, 5))
    assert (got[..., 3, :] == 0).all()


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


def test_causal_patterns_are_seen_in_each_matrix_and_beside_padding() -> None:
    lower = torch.ones(5, 5, dtype=torch.bool).tril()
    everything = torch.ones(5, 5, dtype=torch.bool)
    assert is_causal_bias(torch.stack((everything, lower)))  # one sample of a batch
    assert is_causal_bias(torch.stack((lower, lower.T)))  # heads that look back and heads that look ahead
    assert is_causal_bias(torch.stack((lower, lower & (torch.arange(5) < 1))))  # a sample of one token is no excuse
    rectangle = torch.ones(4, 6, dtype=torch.bool).tril(2)
    assert is_causal_bias(rectangle & (torch.arange(6) > 0))
    assert is_causal_bias(rectangle & (torch.arange(6) != 4))
    assert is_causal_bias(rectangle.flip(0, 1))
    for n, m in ((5, 5), (4, 6)):  # padding alone, whatever remains
        for token in (0, -1):
            one_key = torch.zeros(1, n, m, dtype=torch.bool)
            one_key[..., token] = True
            one_query = torch.zeros(1, n, m, dtype=torch.bool)
            one_query[:, token] = True
            assert not is_causal_bias(one_key)
            assert not is_causal_bias(one_query)
            assert not is_causal_bias(one_key & one_query)
    assert not is_causal_bias(torch.zeros(5, 5, dtype=torch.bool))
    small = torch.ones(2, 2, dtype=torch.bool).tril()
    assert is_causal_bias(small)
    assert not is_causal_bias(torch.stack((small, torch.ones_like(small))))  # one entry of one matrix: no triangle


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_causal_fills_of_every_precision(dtype: torch.dtype) -> None:
    upper = torch.ones(6, 6, dtype=torch.bool).triu(1)
    slopes = torch.rand(6, 6).to(dtype)
    for fill in (-1e4, torch.finfo(dtype).min, -math.inf):
        assert is_causal_bias(torch.zeros(6, 6, dtype=dtype).masked_fill(upper, fill))
        assert is_causal_bias(slopes.masked_fill(upper, fill))
        assert is_causal_bias(slopes + torch.zeros(6, 6, dtype=dtype).masked_fill(upper, fill))
    assert not is_causal_bias(torch.zeros(6, 6, dtype=dtype).masked_fill(upper, -100.0))


def test_linear_slopes_are_a_bias_however_far_they_reach() -> None:
    back = torch.arange(64.0)[:, None] - torch.arange(64.0)
    slopes = torch.tensor([0.5, 100.0, 5000.0])[:, None, None]
    for bias in (-slopes * back.abs(), -slopes * back.clamp(min=0), slopes * back.clamp(max=0), -slopes * back):
        assert not is_causal_bias(bias)


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
