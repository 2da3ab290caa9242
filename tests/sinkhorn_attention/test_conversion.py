"""convert: which modules of other people's models it takes, and that their weights and objects stay."""

import copy
import pickle
import warnings
from collections.abc import Callable

import pytest
import torch
from sinkhorn_attention import MultiheadAttention, convert, get_normalizer, list_normalizers
from torch import Tensor, nn
from torchvision.models import VisionTransformer

pytestmark = pytest.mark.filterwarnings("error:sinkhorn attention was not put into")

VIT_NAMES = [f"encoder.layers.encoder_layer_{i}.self_attention" for i in range(3)]


def vit() -> VisionTransformer:
    torch.manual_seed(0)
    model = VisionTransformer(16, 8, 3, 2, 8, 16, num_classes=5)
    nn.init.normal_(model.heads.head.weight)
    return model


def converted_vit() -> VisionTransformer:
    model = vit()
    convert(model, "sinkhorn", n_iters=3)
    return model


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2)


def images() -> Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def sequences() -> Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(("build", "inputs"), [(vit, images), (encoder, sequences)])
def test_softmax_at_one_half_step(build: Callable[[], nn.Module], inputs: Callable[[], Tensor], train: bool) -> None:
    """n_iters=1 gives the original's outputs and gradients, 5 differ, in every mode."""
    model, x = build().train(train), inputs()
    stock = copy.deepcopy(model)
    convert(model, n_iters=1)
    want, got = stock(x), model(x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    gradients = [
        torch.autograd.grad(out.square().sum(), list(m.parameters())) for out, m in ((want, stock), (got, model))
    ]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    convert(model, n_iters=5)
    assert (model(x) - want).abs().max() > 1e-4
    assert all(g.abs().sum() > 0 for g in torch.autograd.grad(model(x).square().sum(), list(model.parameters())))
    convert(model, "softmax")
    torch.testing.assert_close(model(x), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("build", "inputs"), [(vit, images), (encoder, sequences)])
def test_no_fused_softmax_in_eval_mode(build: Callable[[], nn.Module], inputs: Callable[[], Tensor]) -> None:
    model, x = build(), inputs()
    convert(model, n_iters=5)
    want = model(x)
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            torch.testing.assert_close(model.eval()(x), want, rtol=1e-6, atol=1e-6)


def test_objects_stay() -> None:
    model = vit()
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    calls = []
    model.encoder.layers[0].self_attention.register_forward_hook(lambda *_: calls.append(1))
    assert convert(model, n_iters=3) == VIT_NAMES
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert all(dict(model.named_modules())[name] is module for name, module in modules.items())
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(isinstance(model.get_submodule(name), MultiheadAttention) for name in VIT_NAMES)
    assert all(model.get_submodule(name).normalizer.n_iters == 3 for name in VIT_NAMES)
    model(images())
    assert calls == [1]


def test_state_dicts_go_both_ways() -> None:
    model = converted_vit()
    stock = vit()
    stock.load_state_dict(model.state_dict())
    model.load_state_dict(stock.state_dict())
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in stock.state_dict().items())


def test_copies() -> None:
    model = converted_vit()
    want = model(images())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(images()), want)


def test_meta_device() -> None:
    with torch.device("meta"):
        model = vit()
    assert convert(model) == VIT_NAMES
    assert model(torch.empty(2, 3, 16, 16, device="meta")).shape == (2, 5)


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [
        (None, [0, 1, 2]),
        (1, [2]),
        (3, [0, 1, 2]),
        ([0, 2], [0, 2]),
        ([-1], [2]),
        ((1,), [1]),
        ("*layer_[01].*", [0, 1]),
    ],
)
def test_layers(layers: object, chosen: list[int]) -> None:
    model = vit()
    assert convert(model, layers=layers) == [VIT_NAMES[i] for i in chosen]
    for index, name in enumerate(VIT_NAMES):
        assert isinstance(model.get_submodule(name), MultiheadAttention) == (index in chosen)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"layers": 4}, "layers=4 asks for the last 4 attention modules; there are 3: encoder"),
        ({"layers": 0}, "layers=0 asks for the last 0"),
        ({"layers": [3]}, r"layers=\[3\] holds indices of no attention module, \[3\]"),
        ({"layers": []}, r"layers must be None \(all\), an int .* got \[\]"),
        ({"layers": True}, r"layers must be None .* got True"),
        ({"layers": "blocks.*"}, r"layers='blocks\.\*' matches no attention module; there are 3"),
        ({"n_iter": 3}, "no option n_iter;"),
        ({"normalizer": "softmx"}, "unknown normalizer 'softmx'"),
    ],
)
def test_refusals_leave_the_model_alone(call: dict, says: str) -> None:
    model = vit()
    with pytest.raises(ValueError, match=says):
        convert(model, **call)
    assert not any(isinstance(module, MultiheadAttention) for module in model.modules())


@pytest.mark.parametrize("name", list_normalizers())
def test_every_normalizer(name: str) -> None:
    """One that owns parameters is made from the sizes of each module's heads."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True, dropout=0.0), 2)
    assert convert(model, name) == ["layers.0.self_attn", "layers.1.self_attn"]
    x = torch.randn(2, 5, 8)
    layer = model.layers[0].self_attn
    query, key, value = nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, -1)
    heads = [tensor.unflatten(-1, (2, 4)).transpose(1, 2) for tensor in (query, key, value)]
    built = get_normalizer(name, head_dim=4, num_heads=2)
    built.load_state_dict(layer.normalizer.state_dict())
    expected = layer.out_proj(built.attend(*heads).transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, x, x, need_weights=False)[0], expected)


def test_attention_module_itself() -> None:
    module = nn.MultiheadAttention(8, 2)
    assert convert(module, n_iters=3) == [""]
    assert type(module) is MultiheadAttention


def test_models_without_attention() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"nothing to convert in Sequential: it has no torch\.nn\.MultiheadAttention"):
        convert(model)
    assert convert(model, strict=False) == []


class OwnForward(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_unknown_attention() -> None:
    """A subclass, or a module whose forward was replaced on the object, would go on computing its own thing."""
    patched = nn.MultiheadAttention(8, 2)
    patched.forward = lambda *inputs: inputs
    model = nn.ModuleDict({"known": nn.MultiheadAttention(8, 2), "own": OwnForward(8, 2), "patched": patched})
    with pytest.raises(ValueError, match=r"cannot convert own \(OwnForward may .*; patched \(MultiheadAttention may"):
        convert(model)
    assert type(model["known"]) is nn.MultiheadAttention
    with pytest.warns(UserWarning, match=r"sinkhorn attention was not put into own \(OwnForward"):
        assert convert(model, strict=False) == ["known"]
    assert type(model["own"]) is OwnForward


def transformer() -> nn.Transformer:
    torch.manual_seed(0)
    return nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True)


def test_decoders_are_left() -> None:
    """With a causal decoder earlier outputs must not move when a later target token does."""
    model = transformer()
    decoder_state = copy.deepcopy(model.decoder)
    with pytest.warns(
        UserWarning, match=r"not put into decoder.*multihead_attn \(an earlier token of a decoder"
    ) as caught:
        assert convert(model, n_iters=3) == ["encoder.layers.0.self_attn", "encoder.layers.1.self_attn"]
    assert len([w for w in caught if "not put into" in str(w.message)]) == 1
    assert all(type(m) is not MultiheadAttention for m in model.decoder.modules())
    source, target = sequences(), sequences()[:, :4]
    causal = nn.Transformer.generate_square_subsequent_mask(4)
    before = model(source, target, tgt_mask=causal)
    changed = torch.cat([target[:, :3], target[:, 3:] + 1], 1)
    assert torch.equal(model(source, changed, tgt_mask=causal)[:, :3], before[:, :3])
    memory = model.encoder(source)
    torch.testing.assert_close(before, decoder_state(target, memory, tgt_mask=causal))


def test_cross_attention_would_leak() -> None:
    """Why cross-attention is left as well: the column step shows earlier target tokens the later ones."""
    model = transformer()
    assert len(convert(model, n_iters=3, decoders=True, layers="decoder.*.multihead_attn")) == 2
    source, target = sequences(), sequences()[:, :4]
    causal = nn.Transformer.generate_square_subsequent_mask(4)
    changed = torch.cat([target[:, :3], target[:, 3:] + 1], 1)
    moved = model(source, changed, tgt_mask=causal)[:, :3] - model(source, target, tgt_mask=causal)[:, :3]
    assert moved.abs().max() > 1e-5


def test_decoders_on_request() -> None:
    model = transformer()
    assert len(convert(model, n_iters=1, decoders=True)) == 6
    stock = transformer()
    torch.testing.assert_close(model(sequences(), sequences()), stock(sequences(), sequences()), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="cannot be causal"):
        model(sequences(), sequences(), tgt_mask=nn.Transformer.generate_square_subsequent_mask(5))


def test_row_wise_normalizers_go_into_decoders() -> None:
    model, stock = transformer(), transformer()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(convert(model, "softmax")) == 6
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    want = stock(sequences(), sequences(), tgt_mask=causal, tgt_is_causal=True)
    got = model(sequences(), sequences(), tgt_mask=causal, tgt_is_causal=True)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_only_a_decoder() -> None:
    with pytest.raises(
        ValueError, match=r"nothing to convert .* all of it is left as it is: self_attn, multihead_attn"
    ):
        convert(nn.TransformerDecoderLayer(8, 2))
    with pytest.raises(ValueError, match=r"matches no attention module; .* left as it is: decoder"):
        convert(transformer(), layers="decoder.*")


class Tower(nn.Module):
    """The text tower of CLIP in miniature: its blocks get the buffer `attn_mask` of the tower."""

    def __init__(self, attribute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2)])
        mask = torch.full((5, 5), -torch.inf).triu(1)
        if attribute:
            self.attn_mask = mask
        else:
            self.register_buffer("attn_mask", mask, persistent=False)


@pytest.mark.parametrize("attribute", [True, False])
def test_towers_with_a_causal_mask_are_left(attribute: bool) -> None:
    model = nn.ModuleDict({"visual": nn.MultiheadAttention(8, 2), "text": Tower(attribute)})
    with pytest.warns(UserWarning, match=r"not put into text\.blocks\.0, text\.blocks\.1 \(text holds a causal mask\)"):
        assert convert(model) == ["visual"]


def test_shared_attention() -> None:
    """One module under two names is converted once; under a decoder as well, it is left."""
    shared = nn.MultiheadAttention(8, 2)
    assert convert(nn.ModuleDict({"a": shared, "b": shared})) == ["a"]
    layer = nn.TransformerDecoderLayer(8, 2)
    with pytest.warns(UserWarning, match="not put into tied, layer.multihead_attn"):
        assert convert(
            nn.ModuleDict({"tied": layer.self_attn, "layer": layer, "free": nn.MultiheadAttention(8, 2)})
        ) == ["free"]
