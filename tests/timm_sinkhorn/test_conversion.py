import copy
import pickle
import warnings

import pytest
import timm
import torch
import torch.nn.functional as F
from sinkhorn_attention.interception import Intercepted
from sinkhorn_attention.reference import sinkhorn_reference
from timm_sinkhorn import NormalizedAttention, convert
from timm_sinkhorn.kinds import KINDS
from timm_sinkhorn.kinds import converted as converted_class
from torch import nn
from torch.overrides import TorchFunctionMode

from tests.timm_sinkhorn.survey import FAMILIES, relative_difference, spread

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*single query:UserWarning"),
    pytest.mark.filterwarnings("ignore:left as it is by design:UserWarning"),
]
every_family = pytest.mark.parametrize("family", FAMILIES)
VIT = FAMILIES["vit"]


def converted(family, n_iters, **kwargs):
    model = FAMILIES[family].create(**kwargs)
    return model, convert(model, "sinkhorn", n_iters=n_iters)


def output_and_gradients(model, images, seed=0):
    """Output, and the gradients of a fixed combination of it, of the images first and then of all parameters."""
    torch.manual_seed(seed)  # stochastic depth draws the same in both models
    images = images.clone().requires_grad_()
    out = model(images)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    grads = torch.autograd.grad((out * weight).sum(), [images, *model.parameters()], allow_unused=True)
    return out.detach(), grads


def assert_models_agree(ours, theirs, images, tolerance):
    """Outputs, and gradients by name, to `tolerance` of the largest entry of their kind; in the models' precision."""
    out, grads = output_and_gradients(ours, images)
    wanted, wanted_grads = output_and_gradients(theirs, images)
    assert relative_difference(out, wanted) < tolerance
    names = ["images", *dict(theirs.named_parameters())]
    assert names[1:] == list(dict(ours.named_parameters()))
    scale = max(grad.abs().max() for grad in wanted_grads if grad is not None)
    for name, got, want in zip(names, grads, wanted_grads, strict=True):
        got, want = (torch.zeros(()) if grad is None else grad for grad in (got, want))
        assert (got - want).abs().max().item() <= tolerance * max(want.abs().max(), 1e-2 * scale).item(), name


class SoftmaxIsSinkhorn(TorchFunctionMode):
    """Runs timm's own code with the reference where it takes a softmax inside the named modules."""

    def __init__(self, model, names, n_iters):
        super().__init__()
        self.n_iters, self.inside, self.hits = n_iters, 0, 0
        for name, module in model.named_modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = False
            if name in names:
                module.register_forward_pre_hook(lambda *args: self.move(1))
                module.register_forward_hook(lambda *args: self.move(-1))

    def move(self, step):
        self.inside += step

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (F.softmax, torch.softmax, torch.Tensor.softmax) and self.inside:
            self.hits += 1
            return sinkhorn_reference(args[0], self.n_iters)
        return func(*args, **(kwargs or {}))


class WithReference(nn.Module):
    def __init__(self, model, names, n_iters):
        super().__init__()
        self.model, self.mode, self.names = model, SoftmaxIsSinkhorn(model, names, n_iters), names

    def forward(self, images):
        self.mode.hits = 0
        with self.mode:
            out = self.model(images)
        assert self.mode.hits == len(self.names)
        return out

    def named_parameters(self, *args, **kwargs):
        return self.model.named_parameters(*args, **kwargs)


@every_family
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_one_half_step_reproduces_timm(family, training):
    stock = FAMILIES[family].create().train(training)
    model = FAMILIES[family].create().train(training)
    convert(model, "sinkhorn", n_iters=1)
    images = FAMILIES[family].images(4)  # batch norm of fewer values magnifies rounding
    assert relative_difference(output_and_gradients(model, images)[0], output_and_gradients(stock, images)[0]) < 1e-5
    # Deep in a network float32 rounding alone moves a gradient by more: those are compared in float64.
    assert_models_agree(model.double(), stock.double(), images.double(), 1e-8)


@every_family
def test_five_half_steps_are_timms_code_with_the_reference_for_its_softmax(family):
    images = FAMILIES[family].images().double()
    model = FAMILIES[family].create().double()
    softmax = model(images).detach()
    names = convert(model, "sinkhorn", n_iters=5)
    assert_models_agree(model, WithReference(FAMILIES[family].create().double(), names, 5), images, 1e-7)
    assert relative_difference(model(images), softmax) > 1e-4


@every_family
def test_copies_pickles_and_loads_in_both_directions(family):
    model, names = converted(family, 5)
    images = FAMILIES[family].images()
    wanted = model(images).detach()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(images), wanted)
        assert [type(twin.get_submodule(name)) for name in names] == [type(model.get_submodule(name)) for name in names]
    stock = FAMILIES[family].create()
    state = {
        name: torch.rand_like(tensor) if tensor.is_floating_point() else tensor
        for name, tensor in stock.state_dict().items()
    }
    stock.load_state_dict(state)
    assert list(model.state_dict()) == list(state)
    model.load_state_dict(stock.state_dict())
    back = FAMILIES[family].create()
    back.load_state_dict(model.state_dict())
    assert all(torch.equal(tensor, state[name]) for name, tensor in back.state_dict().items())


@every_family
def test_channels_last(family):
    model, _ = converted(family, 3)
    images = FAMILIES[family].images()
    wanted = model(images)
    out = model.to(memory_format=torch.channels_last)(images.to(memory_format=torch.channels_last))
    assert relative_difference(out, wanted) < 1e-5


@every_family
def test_fused_attn_never_brings_softmax_back(family):
    model, names = converted(family, 5)
    images = FAMILIES[family].images()
    wanted = model(images)
    for fused in (True, False):
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = fused
        assert relative_difference(model(images), wanted) < 1e-6
    assert names


@pytest.mark.parametrize("family", ["vit", "eva02", "swin", "cait", "volo"])
def test_compiles_without_a_graph_break(family):
    model, _ = converted(family, 5)
    images = FAMILIES[family].images()
    torch.compiler.reset()
    out = torch.compile(model, backend="aot_eager", fullgraph=True)(images)
    assert relative_difference(out, model(images)) < 1e-5


def grown(family, **kwargs):
    """A family's stock and converted (one half-step) models, made with `kwargs`."""
    stock = FAMILIES[family].create(**kwargs)
    return stock, converted(family, 1, **kwargs)[0]


@pytest.mark.parametrize(
    ("family", "kwargs", "size"),
    [
        ("vit", {"dynamic_img_size": True}, (48, 32)),
        ("eva02", {"dynamic_img_size": True}, (42, 28)),
        ("swin", {"strict_img_size": False}, (48, 64)),
        ("swinv2", {"strict_img_size": False}, (48, 64)),
        ("naflexvit", {}, (48, 32)),
        ("mobilevit", {}, (96, 64)),
        ("davit", {}, (64, 32)),
        ("pvt_v2", {}, (96, 64)),
        ("twins", {}, (96, 64)),
        ("metaformer", {}, (64, 32)),
    ],
)
def test_dynamic_image_size(family, kwargs, size):
    stock, model = grown(family, **kwargs)
    images = torch.randn(2, 3, *size)
    assert relative_difference(model(images), stock(images)) < 1e-5


@pytest.mark.parametrize(("family", "size"), [("vit", 48), ("beit", 48), ("swin", 64), ("swinv2", 64)])
def test_the_image_size_can_be_set_after_conversion(family, size):
    stock, model = grown(family)
    for each in (stock, model):
        each.set_input_size((size, size))
    images = torch.randn(2, 3, size, size)
    assert relative_difference(model(images), stock(images)) < 1e-5


@pytest.mark.parametrize("family", ["vit", "swin", "pvt_v2", "davit", "maxxvit", "mobilevit", "tiny_vit"])
def test_features_only(family):
    images = FAMILIES[family].images()
    stock, model = grown(family, features_only=True, out_indices=(3, 4) if family == "mobilevit" else (0, 1))
    for got, wanted in zip(model(images), stock(images), strict=True):
        assert relative_difference(got, wanted) < 1e-5
    convert(model, "sinkhorn", n_iters=5)
    assert relative_difference(model(images)[-1], stock(images)[-1]) > 1e-4


def ragged(size, valid):
    """NaFlex input: patches of 16 on a row of `size`, of which the first `valid` are real."""
    generator = torch.Generator().manual_seed(0)
    patches = torch.randn(1, valid, 16 * 16 * 3, generator=generator)
    coord = torch.stack([torch.zeros(valid, dtype=torch.long), torch.arange(valid)], -1)[None]
    pad = size - valid
    return {
        "patches": torch.cat([patches, torch.full((1, pad, 768), 7.0)], 1),
        "patch_coord": F.pad(coord, (0, 0, 0, pad)),
        "patch_valid": torch.arange(size)[None] < valid,
    }


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_naflex_padding_takes_no_part_in_any_sum(checkpointing, backend):
    model = FAMILIES["naflexvit"].create()
    convert(model, "sinkhorn", n_iters=7, backend=backend)
    model.set_grad_checkpointing(checkpointing)
    wanted, out = model(ragged(6, 6)), model(ragged(9, 6))
    assert relative_difference(out, wanted) < 1e-5
    grads = torch.autograd.grad(out.sum(), model.parameters(), allow_unused=True)
    wanted_grads = torch.autograd.grad(wanted.sum(), model.parameters(), allow_unused=True)
    for got, want in zip(grads, wanted_grads, strict=True):
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


def test_siglip_pooling_follows_its_mask():
    model, _ = converted("siglip", 3)
    tokens = torch.randn(2, 9, 32)
    mask = torch.arange(9) < 6
    out = model.attn_pool(tokens, attn_mask=mask.view(1, 1, 1, 9).expand(2, 1, 1, 9))
    torch.testing.assert_close(out, model.attn_pool(tokens[:, :6]))


def test_converted_attention_refuses_causal_masks():
    for family in ("vit", "eva02", "vit rope"):
        model, names = converted(family, 3)
        with pytest.raises(ValueError, match="cannot be causal"):
            model.get_submodule(names[0])(torch.randn(1, 5, 32), is_causal=True)


def test_a_single_query_is_mean_pooling_and_says_so():
    model = FAMILIES["cait"].create()
    with pytest.warns(UserWarning, match=r"blocks_token_only\.0\.attn, .*: a single query"):
        convert(model, "sinkhorn", n_iters=3)
    attention = model.blocks_token_only[0].attn
    x = torch.randn(2, 7, 32)
    wanted = attention.proj(attention.v(x).mean(1, keepdim=True))
    torch.testing.assert_close(attention(x), wanted)
    for options in ({"normalizer": "sinkhorn", "n_iters": 1}, {"normalizer": "softmax"}):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            convert(FAMILIES["cait"].create(), **options)


def test_channel_attention_stays_and_is_reported():
    model = FAMILIES["davit"].create()
    channel = {name for name, module in model.named_modules() if type(module).__name__ == "ChannelAttention"}
    with pytest.warns(UserWarning, match="left as it is by design.*attends over channels") as caught:
        names = convert(model, "sinkhorn", n_iters=3)
    assert channel
    assert not channel & set(names)
    assert all(name in str(caught[0].message) for name in channel)
    assert {type(model.get_submodule(name)).__name__ for name in channel} == {"ChannelAttention"}


ALL = ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]


@pytest.mark.parametrize(
    ("layers", "picked"),
    [
        (None, ALL),
        (1, ALL[2:]),
        (3, ALL),
        ([0], ALL[:1]),
        ((2, 0), [ALL[0], ALL[2]]),
        ([-1], ALL[2:]),
        ("blocks.[12].*", ALL[1:]),
        ("blocks.0.attn", ALL[:1]),
    ],
)
def test_layers_pick_modules(layers, picked):
    model = VIT.create(depth=3)
    assert convert(model, "sinkhorn", n_iters=5, layers=layers) == picked
    kinds = {name: type(model.get_submodule(name)) is NormalizedAttention for name in ALL}
    assert kinds == {name: name in picked for name in ALL}


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (0, "asks for the last 0 attention modules; there are 3"),
        (4, "asks for the last 4 attention modules; there are 3"),
        (-1, "asks for the last -1 attention modules; there are 3"),
        ([3], r"layers=\[3\] holds indices of no attention module, \[3\]; there are 3"),
        ([], r"a list of indices or a pattern of names, got \[\]"),
        ([1.0], r"a list of indices or a pattern of names, got \[1\.0\]"),
        (True, r"must be None \(all\), an int \(the last k\), a list of indices or a pattern of names, got True"),
        (1.5, "a list of indices or a pattern of names, got 1.5"),
        ("blocks.7.attn", r"matches no attention module; there are 3: blocks\.0\.attn, "),
    ],
)
def test_bad_layers_are_named_and_change_nothing(layers, message):
    model = VIT.create(depth=3)
    with pytest.raises(ValueError, match=message):
        convert(model, "sinkhorn", n_iters=3, layers=layers)
    assert not any(isinstance(module, NormalizedAttention) for module in model.modules())


@pytest.mark.parametrize(
    ("normalizer", "options", "message"),
    [
        ("sinkhorn", {"n_iters": 0}, "n_iters must be an integer >= 1"),
        ("sinkhron", {}, "unknown normalizer 'sinkhron'"),
        ("softmax", {"n_iters": 3}, "normalizer 'softmax'.*n_iters"),
    ],
)
def test_bad_options_are_named_and_change_nothing(normalizer, options, message):
    model = VIT.create()
    with pytest.raises(ValueError, match=message):
        convert(model, normalizer, **options)
    assert not any(isinstance(module, NormalizedAttention) for module in model.modules())


def unknown_kinds():
    """A model with attention of a known kind and of one that convert does not know."""
    from timm.models.convit import GPSA

    torch.manual_seed(0)
    return nn.Sequential(VIT.create().blocks[0], GPSA(32, num_heads=2))


def test_attention_of_unknown_kind_is_listed():
    model = unknown_kinds()
    with pytest.raises(ValueError, match=r"does not know this attention: 1 \(timm\.models\.convit\.GPSA\)"):
        convert(model, "sinkhorn", n_iters=3)
    assert type(model[0].attn) is timm.layers.Attention
    assert convert(model, "sinkhorn", n_iters=3, layers="0.*") == ["0.attn"]
    with pytest.warns(UserWarning, match=r"left a softmax because convert does not know it: 1 \("):
        assert convert(unknown_kinds(), "sinkhorn", n_iters=3, strict=False) == ["0.attn"]
    with pytest.raises(ValueError, match="knows none of the attention modules"):
        convert(model[1:], "sinkhorn", n_iters=3, strict=False)


def test_attention_that_was_never_named_converts_where_it_calls_torchs_function():
    """Timm's differential attention subtracts two maps of the same tokens."""
    from timm.layers import DiffAttention

    torch.manual_seed(0)
    x, stock = torch.randn(2, 9, 32), DiffAttention(32, num_heads=2).eval()
    for n_iters in (1, 5):
        model = nn.Sequential(copy.deepcopy(stock))
        assert convert(model, "sinkhorn", n_iters=n_iters) == ["0"]
        assert (relative_difference(model(x), stock(x)) < 1e-5) == (n_iters == 1)


@pytest.mark.parametrize(
    "name", ["levit_128s", "gcvit_xxtiny", "convit_tiny", "swinv2_cr_tiny_224", "efficientformer_l1", "hiera_tiny_224"]
)
@pytest.mark.filterwarnings("ignore:left a softmax")
def test_further_families(name):
    images = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1))
    outputs = []
    for n_iters in (None, 1, 5):
        torch.manual_seed(0)
        model = timm.create_model(name, num_classes=5).eval()
        spread(model)
        if n_iters is not None:
            assert convert(model, "sinkhorn", n_iters=n_iters, strict=False)
        with torch.no_grad():
            outputs.append(model(images))
    assert relative_difference(outputs[1], outputs[0]) < 1e-4
    assert relative_difference(outputs[2], outputs[0]) > 1e-3


class Inherited(timm.layers.Attention):
    """Attention by its base class: its own source has no softmax."""


def test_subclasses_of_known_attention_are_of_unknown_kind():
    """They would stay a softmax without a word beside modules that were converted."""
    model = nn.Sequential(VIT.create().blocks[0], Inherited(32, num_heads=2))
    with pytest.raises(ValueError, match=r"does not know this attention: 1 \(\S*Inherited\)"):
        convert(model, "sinkhorn", n_iters=3)


def test_a_forward_put_into_a_module_is_not_passed_over():
    """As recorders of attention maps do; it would be called in place of the normalizer's."""
    model = VIT.create()
    name, attention = next((n, m) for n, m in model.named_modules() if type(m) is timm.layers.Attention)
    attention.forward = attention.forward
    with pytest.raises(ValueError, match=rf"does not know this attention: {name} \(\S+ with a forward that"):
        convert(model, "sinkhorn", n_iters=3)
    assert type(attention) is timm.layers.Attention
    del attention.forward
    assert name in convert(model, "sinkhorn", n_iters=3)


def test_attention_that_has_no_source_file_is_judged_by_its_name():
    namespace = {"nn": nn}
    exec("class MyAttention(nn.Module):\n    pass", namespace)
    with pytest.raises(ValueError, match=r"does not know this attention: 0 \(\S*MyAttention\)"):
        convert(nn.Sequential(namespace["MyAttention"]()), "sinkhorn", n_iters=3)


@pytest.mark.parametrize(
    "name", ["resnet18", "test_byobnet", "skresnet18", "resnest14d", "gcresnet33ts", "test_resnet"]
)
def test_models_without_attention_say_so(name):
    model = timm.create_model(name, num_classes=2)
    with pytest.raises(ValueError, match="has no attention to convert"):
        convert(model, "sinkhorn", n_iters=3)


def test_models_with_other_mixing_only_say_what_they_have():
    with pytest.raises(ValueError, match=r"no attention between tokens.*linear: one score per token"):
        convert(timm.create_model("mobilevitv2_050", num_classes=2), "sinkhorn", n_iters=3)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:FutureWarning")
def test_scripted_models_are_refused():
    with pytest.raises(ValueError, match="scripted or traced"):
        convert(torch.jit.script(VIT.create()), "sinkhorn", n_iters=3)


def test_a_converted_model_can_be_converted_again_and_back():
    images = VIT.images()
    wanted = VIT.create()(images)
    model = VIT.create()
    names = convert(model, "sinkhorn", n_iters=5)
    assert convert(model, "sinkhorn", n_iters=3) == names
    assert {model.get_submodule(name).normalizer.n_iters for name in names} == {3}
    convert(model, "softmax")
    assert relative_difference(model(images), wanted) < 1e-5


def test_conversion_keeps_mode_precision_and_shared_weights():
    model = VIT.create().double().eval()
    model.blocks[1].attn = model.blocks[0].attn
    assert convert(model, "sinkhorn", n_iters=3) == ["blocks.0.attn"]
    assert model.blocks[1].attn is model.blocks[0].attn
    assert not model.blocks[0].attn.normalizer.training
    assert model(VIT.images().double()).dtype == torch.float64


def test_a_part_of_a_model_and_a_bare_attention_module_convert():
    block = VIT.create().blocks[0]
    assert convert(block, "sinkhorn", n_iters=3) == ["attn"]
    assert convert(VIT.create().blocks[0].attn, "sinkhorn", n_iters=3) == [""]


def test_tiny_vit_keeps_no_bias_between_calls():
    model = FAMILIES["tiny_vit"].create()
    model(FAMILIES["tiny_vit"].images())  # timm fills its cache here
    convert(model, "sinkhorn", n_iters=3)
    copy.deepcopy(model)
    images = FAMILIES["tiny_vit"].images()
    before = model(images)
    before.sum().backward()
    model(images).sum().backward()  # a kept bias would belong to a graph that has been freed
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("attention_biases"):
                parameter.normal_(std=3.0)
    assert relative_difference(model(images), before) > 1e-3
    assert model.train() is model


@every_family
def test_attention_dropout_acts_where_it_did_and_in_training_only(family):
    """A probability of 1 drops every weight, without a draw: the models agree where both drop, and differ elsewhere."""
    stock, images = FAMILIES[family].create(), FAMILIES[family].images()
    model = FAMILIES[family].create()
    names = convert(model, "sinkhorn", n_iters=1)
    wanted = model(images)
    dropping = 0
    for each in (stock, model):
        for name in names:
            module = each.get_submodule(name)
            if hasattr(module, "fused_attn"):
                module.fused_attn = False
            if hasattr(module, "attn_drop"):
                module.attn_drop.p = 1.0
                module.train()
                dropping += 1
    assert relative_difference(model(images), stock(images)) < 1e-5
    if dropping:
        assert relative_difference(model(images), wanted) > 1e-3
    else:  # no dropout but that of the projection
        inside = [child for name in names for child in stock.get_submodule(name).named_modules()]
        assert {name for name, child in inside if isinstance(child, nn.Dropout)} <= {"proj_drop"}
    assert relative_difference(model.eval()(images), wanted) < 1e-6


def test_swinv2_temperature_is_clamped_as_in_timm():
    stock, model = grown("swinv2")
    for each in (stock, model):
        for name, parameter in each.named_parameters():
            if name.endswith("logit_scale"):
                nn.init.constant_(parameter, 6.0)  # exp(6) is above the bound of 100
    images = FAMILIES["swinv2"].images().double()
    assert relative_difference(model.double()(images), stock.double()(images)) < 1e-8


def test_every_converted_class_extends_timms():
    for theirs in KINDS:
        ours = converted_class(theirs)
        assert issubclass(ours, theirs)
        assert issubclass(ours, Intercepted)
        assert pickle.loads(pickle.dumps(ours)) is ours
