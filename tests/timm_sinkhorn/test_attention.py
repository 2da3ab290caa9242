import copy
import pickle

import pytest
import timm
import torch
from sinkhorn_attention.reference import sinkhorn_attention_reference
from timm.layers import Attention, LayerNorm
from timm_sinkhorn import NormalizedAttention, attn_layer, sinkhorn_attn_layer
from torch import nn

B, N, DIM, HEADS = 2, 7, 12, 3
OPTIONS = {
    "plain": {},
    "qkv_bias": {"qkv_bias": True},
    "qk_norm": {"qk_norm": True, "norm_layer": LayerNorm},
    "scale_norm": {"scale_norm": True, "norm_layer": LayerNorm},
    "gated": {"gated": True, "qkv_bias": True},
    "head_dim": {"attn_head_dim": 5},
    "dim_out": {"dim_out": 10, "proj_bias": False},
    "all": {
        "qkv_bias": True,
        "qk_norm": True,
        "scale_norm": True,
        "gated": True,
        "attn_head_dim": 5,
        "dim_out": 10,
        "norm_layer": LayerNorm,
        "proj_drop": 0.0,
        "dtype": torch.float64,
    },
}


def pair(n_iters=1, **options):
    """The attention of timm and ours with the same weights, in float64, and an input."""
    torch.manual_seed(0)
    theirs = Attention(DIM, HEADS, **options).double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = NormalizedAttention(DIM, HEADS, normalizer_options={"n_iters": n_iters}, **options).double()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours, torch.randn(B, N, DIM, dtype=torch.float64, requires_grad=True)


def value_and_gradients(module, x, weight=None, **kwargs):
    x = x.detach().requires_grad_()
    out = module(x, **kwargs)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape) if weight is None else weight
    grads = torch.autograd.grad((out * weight).sum(), [x, *module.parameters()])
    return [out.detach(), *grads]


def assert_same(got, wanted, tolerance=1e-10):
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_one_half_step_is_timms_attention_with_every_option(options):
    theirs, ours, x = pair(**options)
    assert_same(value_and_gradients(ours, x), value_and_gradients(theirs, x))
    assert set(ours.state_dict()) == set(theirs.state_dict())


def written_out(module, x, n_iters, bias=None, query_mask=None, key_mask=None):
    """The layer with the reference in its middle, as one would write it on paper."""
    qkv = module.qkv(x).unflatten(-1, (3, HEADS, module.head_dim)).permute(2, 0, 3, 1, 4)
    query, key, value = module.q_norm(qkv[0]), module.k_norm(qkv[1]), qkv[2]
    out = sinkhorn_attention_reference(query, key, value, n_iters, module.head_dim**-0.5, bias, query_mask, key_mask)
    out = module.norm(out.transpose(1, 2).flatten(2))
    return module.proj(out if module.gate is None else out * module.gate(x).sigmoid())


class WrittenOut(nn.Module):
    def __init__(self, module, n_iters, **masks):
        super().__init__()
        self.module, self.n_iters, self.masks = module, n_iters, masks

    def forward(self, x):
        return written_out(self.module, x, self.n_iters, **self.masks)


@pytest.mark.parametrize("options", [OPTIONS["plain"], OPTIONS["all"]], ids=["plain", "all"])
@pytest.mark.parametrize("n_iters", [2, 5])
def test_agrees_with_the_reference_in_value_and_gradient(n_iters, options):
    _, ours, x = pair(n_iters, **options)
    got = value_and_gradients(ours, x)
    assert_same(got, value_and_gradients(WrittenOut(ours, n_iters), x))
    softmax = value_and_gradients(pair(1, **options)[1], x)
    assert (got[0] - softmax[0]).abs().max() > 1e-3


#: How a mask hides: by False, or by what it adds to the scores.
fills = pytest.mark.parametrize("fill", [None, -torch.inf, torch.finfo(torch.float64).min, -1e9, -1e4])


def padding(fill=None):
    """Right padding in the first sample, left padding in the second."""
    keep = torch.ones(B, 1, 1, N, dtype=torch.bool)
    keep[0, ..., 4:] = False
    keep[1, ..., :2] = False
    return keep if fill is None else torch.zeros(keep.shape, dtype=torch.float64).masked_fill(~keep, fill)


@fills
def test_mask_polarity_is_timms(fill):
    theirs, ours, x = pair()
    mask = padding(fill)
    keep = padding()[:, 0, 0]
    out, wanted = ours(x, attn_mask=mask), theirs(x, attn_mask=mask)
    torch.testing.assert_close(out[keep], wanted[keep])
    torch.testing.assert_close(out[~keep], ours.proj.bias.expand_as(out[~keep]))


@pytest.mark.parametrize("as_float", [False, True])
def test_support_mask_is_timms(as_float):
    theirs, ours, x = pair()
    mask = torch.rand(B, 1, N, N) < 0.6
    mask[..., range(N), range(N)] = True
    if as_float:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    assert_same(value_and_gradients(ours, x, attn_mask=mask), value_and_gradients(theirs, x, attn_mask=mask))


def test_finite_bias_is_added():
    theirs, ours, x = pair()
    bias = torch.randn(1, HEADS, N, N, dtype=torch.float64)
    assert_same(value_and_gradients(ours, x, attn_mask=bias), value_and_gradients(theirs, x, attn_mask=bias))
    five = pair(5)[1]
    assert_same(value_and_gradients(five, x, attn_mask=bias), value_and_gradients(WrittenOut(five, 5, bias=bias), x))


@fills
@pytest.mark.parametrize("n_iters", [2, 7])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_padded_result_is_that_of_the_unpadded_sample(backend, n_iters, fill):
    _, ours, x = pair(n_iters)
    ours.normalizer.backend = backend
    out = ours(x, attn_mask=padding(fill))
    for sample, real in enumerate([slice(0, 4), slice(2, N)]):
        torch.testing.assert_close(out[sample : sample + 1, real], ours(x[sample : sample + 1, real]))


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
def test_a_sample_with_nothing_valid_gives_zeros_and_finite_gradients():
    _, ours, x = pair(5)
    mask = torch.ones(B, 1, 1, N, dtype=torch.bool)
    mask[1] = False
    with torch.autograd.detect_anomaly(check_nan=True):
        values = value_and_gradients(ours, x, attn_mask=mask)
    assert all(value.isfinite().all() for value in values)
    torch.testing.assert_close(values[0][1], ours.proj.bias.expand(N, DIM))
    torch.testing.assert_close(values[0][:1], ours(x[:1]))
    assert values[1][1].abs().max() == 0


def test_integer_masks_are_refused():
    _, ours, x = pair()
    with pytest.raises(ValueError, match=r"attn_mask must be boolean .* or floating, got torch\.uint8"):
        ours(x, attn_mask=padding().to(torch.uint8))


def test_causal_attention_is_refused():
    _, ours, x = pair(3)
    with pytest.raises(ValueError, match="cannot be causal"):
        ours(x, is_causal=True)
    for mask in (torch.ones(N, N, dtype=torch.bool).tril(), torch.full((N, N), -torch.inf).triu(1).double()):
        with pytest.raises(ValueError, match="causal mask"):
            ours(x, attn_mask=mask)


def test_attention_dropout_acts_in_training_only():
    torch.manual_seed(0)
    ours = NormalizedAttention(DIM, HEADS, attn_drop=0.5, normalizer_options={"n_iters": 3}).double()
    x = torch.randn(B, N, DIM, dtype=torch.float64)
    kept = copy.deepcopy(ours)
    kept.attn_drop.p = 0.0
    torch.testing.assert_close(ours.eval()(x), kept(x), rtol=0, atol=0)
    ours.train()
    with torch.no_grad():
        draws = torch.stack([ours(x) for _ in range(2000)])
    assert draws.std(0).min() > 1e-3
    error = (draws.mean(0) - kept(x)).abs() / (draws.std(0) / 2000**0.5)
    assert error.max() < 5  # 168 means, each within five standard errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_low_precision_stay_finite_and_close(dtype):
    _, ours, x = pair(7)
    wanted = ours(x)
    low = copy.deepcopy(ours).to(dtype)
    out = low(x.to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), wanted, rtol=0.05, atol=0.05 * wanted.abs().max().item())
    single = copy.deepcopy(ours).float()
    with torch.autocast("cpu", dtype=dtype):
        values = value_and_gradients(single, x.float())
    assert all(value.isfinite().all() for value in values)
    torch.testing.assert_close(values[0].double(), wanted, rtol=0.05, atol=0.05 * wanted.abs().max().item())


def test_models_that_mean_a_gate_by_attn_layer_say_so():
    """ByobNet takes the class, for a gate on feature maps; its attention would stay a softmax."""
    model = timm.create_model("mobilevit_xxs", attn_layer=sinkhorn_attn_layer(n_iters=3))
    with pytest.raises(ValueError, match=r"x must be tokens, .*ByobNet.*use timm_sinkhorn\.convert"):
        model(torch.randn(1, 3, 64, 64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalizer_options": {"n_iters": 0}}, "n_iters must be an integer >= 1"),
        ({"normalizer_options": {"n_iters": 2.0}}, "n_iters must be an integer >= 1"),
        ({"normalizer_options": {"iterations": 3}}, "normalizer 'sinkhorn'.*iterations"),
        ({"normalizer": "sinkhron"}, "unknown normalizer 'sinkhron'; there are .*sinkhorn"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        NormalizedAttention(DIM, HEADS, **options)


def test_attn_layer_makes_instances_of_the_importable_class():
    layer = sinkhorn_attn_layer(n_iters=4, gradient="detached")(DIM, num_heads=HEADS)
    assert type(layer) is NormalizedAttention
    assert (layer.normalizer.n_iters, layer.normalizer.gradient) == (4, "detached")
    assert sinkhorn_attn_layer()(DIM, HEADS).normalizer.n_iters == 3
    assert type(attn_layer("softmax")(DIM, HEADS).normalizer).__name__ == "Softmax"
    assert attn_layer(attn_head_dim=5)(DIM, HEADS).qkv.out_features == 3 * HEADS * 5


def test_instances_and_configured_classes_pickle():
    cls = sinkhorn_attn_layer(n_iters=4)
    assert issubclass(cls, Attention)
    again = pickle.loads(pickle.dumps(cls))
    assert again(DIM, HEADS).normalizer.n_iters == 4
    layer = cls(DIM, HEADS)
    x = torch.randn(B, N, DIM)
    for twin in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
        torch.testing.assert_close(twin(x), layer(x), rtol=0, atol=0)
