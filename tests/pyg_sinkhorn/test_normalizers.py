import pytest
import torch
from pyg_sinkhorn.normalizers import PCT
from sinkhorn_attention import get_normalizer, list_normalizers
from sinkhorn_attention.reference import sinkhorn_reference


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ports_arithmetic(scores, value):
    """As public ports of PCT have it, the keys as rows: softmax, L1 over the other axis, values from the left."""
    energy = scores.transpose(-1, -2)
    attention = energy.softmax(-1)
    attention = attention / (1e-9 + attention.sum(dim=-2, keepdim=True))
    return (value.transpose(-1, -2) @ attention).transpose(-1, -2)


def test_it_is_registered_and_has_no_half_steps():
    assert "pct" in list_normalizers()
    assert isinstance(get_normalizer("pct"), PCT)
    with pytest.raises(ValueError, match="n_iters"):
        get_normalizer("pct", n_iters=3)


@pytest.mark.parametrize("std", [1.0, 30.0])
def test_value_and_gradient_are_those_of_the_ports(std):
    query, key, value = normal(2, 1, 6, 4) * std, normal(2, 1, 6, 4, seed=1), normal(2, 1, 6, 3, seed=2)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    got = get_normalizer("pct").attend(*inputs, scale=1.0)
    want = ports_arithmetic(query @ key.transpose(-1, -2), value)
    weight = normal(2, 1, 6, 3, seed=3)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, inputs, weight), torch.autograd.grad(want, inputs, weight))


def test_it_is_two_half_steps_in_the_other_order():
    scores = normal(7, 7).requires_grad_()
    got = get_normalizer("pct").from_scores(scores)
    want = sinkhorn_reference(scores.transpose(-1, -2), 2).transpose(-1, -2)
    weight = normal(7, 7, seed=1)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-8)
    torch.testing.assert_close(
        torch.autograd.grad(got, scores, weight), torch.autograd.grad(want, scores, weight), rtol=0, atol=1e-8
    )
    torch.testing.assert_close(got.sum(-1), torch.ones(7, dtype=torch.float64), rtol=0, atol=1e-8)
    assert (got.sum(-2) - 1).abs().max() > 0.05
    assert (got - scores.softmax(-1)).abs().max() > 0.05


def test_masks_give_the_unpadded_map():
    query, key, value = normal(1, 1, 6, 4), normal(1, 1, 5, 4, seed=1), normal(1, 1, 5, 3, seed=2)
    for x, valid in ((query, 4), (key, 3), (value, 3)):
        x[:, :, valid:] = torch.nan
    query_mask, key_mask = (torch.arange(n).view(1, 1, n) < valid for n, valid in ((6, 4), (5, 3)))
    inputs = [x.requires_grad_() for x in (query, key, value)]
    pct = get_normalizer("pct")
    padded = pct.attend(*inputs, query_mask=query_mask, key_mask=key_mask)
    alone = pct.attend(query[:, :, :4], key[:, :, :3], value[:, :, :3])
    torch.testing.assert_close(padded[:, :, :4], alone)
    assert (padded[:, :, 4:] == 0).all()
    weight = normal(1, 1, 4, 3, seed=3)
    got = torch.autograd.grad(padded[:, :, :4], inputs, weight, retain_graph=True)
    want = torch.autograd.grad(alone, inputs, weight)
    torch.testing.assert_close(got, want)


def test_nothing_valid_gives_zeros_and_finite_gradients():
    inputs = [normal(1, 1, 4, 3, seed=s).requires_grad_() for s in range(3)]
    nothing = torch.zeros(1, 1, 4, dtype=torch.bool)
    out = get_normalizer("pct").attend(*inputs, query_mask=nothing, key_mask=nothing)
    assert (out == 0).all()
    assert all((gradient == 0).all() for gradient in torch.autograd.grad(out.sum(), inputs))
