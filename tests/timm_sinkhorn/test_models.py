import copy
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from sysconfig import get_path

import pytest
import timm
import timm_sinkhorn
import torch
from safetensors.torch import save_file
from sinkhorn_attention import get_normalizer
from sinkhorn_attention.functional import sinkhorn
from timm_sinkhorn import NormalizedAttention, load_published_state_dict, sinkhorn_attn_layer, to_published_state_dict
from timm_sinkhorn.attention import _rebuild

SMALL = {"img_size": 32, "depth": 2, "num_classes": 5}  # four patches of 16 and the class token
COUNTS = {
    "sinkformer_vit_tiny_patch16_224": 5_717_416,
    "sinkformer_vit_small_patch16_224": 22_050_664,
    "sinkformer_vit_base_patch16_224": 86_567_656,
    "sinkformer_vit_catsdogs": 1_899_138,
    "sinkformer_vit_mnist": 128 * 7 * 7 + 128 + 17 * 128 + 128 + 256 + 3 * 64 * 128 + 64 * 128 + 128 + 256 + 1290,
}


def tiny(name="sinkformer_vit_tiny_patch16_224", **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **{**SMALL, **kwargs})


@pytest.fixture(scope="module")
def images():
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def stock():
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", **SMALL)


@pytest.fixture(scope="module")
def checkpoint(stock, tmp_path_factory):
    """A folder as timm saves one: weights and config.json, for the stock model's architecture."""
    folder = tmp_path_factory.mktemp("vit_tiny")
    save_file(stock.state_dict(), folder / "model.safetensors")
    config = {
        "architecture": "sinkformer_vit_tiny_patch16_224",
        "num_classes": 5,
        "pretrained_cfg": {
            "input_size": [3, 32, 32],
            "num_classes": 5,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def output_and_gradients(model, images):
    images = images.clone().requires_grad_()
    out = model(images)
    weight = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    return out.detach(), torch.autograd.grad((out * weight).sum(), [images, *model.parameters()])


def assert_models_agree(ours, theirs, images, tolerance=1e-5):
    """Outputs to `tolerance`; gradients to `tolerance` of their own size."""
    out, grads = output_and_gradients(ours, images)
    wanted, wanted_grads = output_and_gradients(theirs, images)
    torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance)
    scale = torch.cat([grad.flatten() for grad in wanted_grads]).abs().max()
    for got, want in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * scale.item())


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[name]


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_parameters_are_those_of_timms_model(size):
    with torch.device("meta"):
        ours, theirs = (
            timm.create_model(f"{kind}_{size}_patch16_224", depth=1).state_dict() for kind in ("sinkformer_vit", "vit")
        )
    assert {name: tensor.shape for name, tensor in ours.items()} == {
        name: tensor.shape for name, tensor in theirs.items()
    }


def test_importing_the_package_registers_the_models():
    code = "import timm, timm_sinkhorn; print(*timm.list_models('sinkformer_*'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == sorted(COUNTS)


@pytest.mark.parametrize(
    ("name", "default"),
    [("sinkformer_vit_tiny_patch16_224", 3), ("sinkformer_vit_catsdogs", 3), ("sinkformer_vit_mnist", 5)],
)
def test_half_steps_by_default_and_by_argument(name, default):
    def counts(**kwargs):
        model = timm.create_model(name, **kwargs)
        return {module.normalizer.n_iters for module in model.modules() if isinstance(module, NormalizedAttention)}

    assert counts() == {default}
    assert counts(n_iters=None) == {default}
    assert counts(n_iters=7) == {7}
    assert counts(normalizer_options={"n_iters": 2}) == {2}


def test_other_normalizers_keep_their_own_defaults(images):
    softmax = tiny(normalizer="softmax").eval()
    one = tiny(n_iters=1).eval()
    assert_models_agree(softmax, one, images)
    assert (tiny(n_iters=3).eval()(images) - one(images)).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"n_iters": 0}, "n_iters must be an integer >= 1"),
        ({"n_iters": -1}, "n_iters must be an integer >= 1"),
        ({"n_iters": 2.5}, "n_iters must be an integer >= 1"),
        ({"normalizer": "softmax", "n_iters": 3}, "normalizer 'softmax'.*n_iters"),
        ({"normalizer": "unknown"}, "unknown normalizer"),
        ({"n_iters": 3, "normalizer_options": {"n_iters": 5}}, "n_iters is given twice"),
        ({"patch_size": 5}, "patch_size must divide img_size .*; got 5"),
        ({"patch_size": 0}, "patch_size must divide img_size .*; got 0"),
        ({"img_size": (28, 30), "patch_size": 7}, r"patch_size must divide img_size \(28, 30\)"),
        ({"attn_layer": sinkhorn_attn_layer(3)}, "has its attention already"),
        ({"weight_init": "jax"}, "one initialisation"),
    ],
)
def test_bad_arguments_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model("sinkformer_vit_mnist", **kwargs)


def test_patches_must_tile_after_a_resize_too():
    model = tiny()
    model.set_input_size((48, 48))
    assert model(torch.zeros(1, 3, 48, 48)).shape == (1, 5)
    with pytest.raises(ValueError, match="patch_size must divide img_size"):
        model.set_input_size((40, 40))
    padded = tiny(img_size=40, dynamic_img_size=True, dynamic_img_pad=True)
    assert padded(torch.zeros(1, 3, 40, 40)).shape == (1, 5)


@pytest.mark.parametrize("way", ["pretrained_cfg_overlay", "checkpoint_path", "local-dir", "local-dir of timm's model"])
def test_pretrained_weights_load_and_one_half_step_equals_timm(way, checkpoint, stock, images):
    name, weights = "sinkformer_vit_tiny_patch16_224", str(checkpoint / "model.safetensors")
    sizes = {"img_size": 32, "depth": 2}
    if way == "pretrained_cfg_overlay":
        overlay = {"file": weights, "num_classes": 5}
        model = timm.create_model(
            name, pretrained=True, pretrained_cfg_overlay=overlay, num_classes=5, n_iters=1, **sizes
        )
    elif way == "checkpoint_path":
        model = timm.create_model(name, checkpoint_path=weights, n_iters=1, **SMALL)
    elif way == "local-dir":
        model = timm.create_model(f"local-dir:{checkpoint}", pretrained=True, n_iters=1, **sizes)
    else:
        config = json.loads((checkpoint / "config.json").read_text())
        folder = checkpoint / "stock"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**config, "architecture": "vit_tiny_patch16_224"}))
        (folder / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
        model = timm.create_model(f"local-dir:{folder}", pretrained=True, attn_layer=sinkhorn_attn_layer(1), **sizes)
    assert {type(block.attn) for block in model.blocks} == {NormalizedAttention}
    assert all(torch.equal(model.state_dict()[key], value) for key, value in stock.state_dict().items())
    for training in (True, False):
        assert_models_agree(model.train(training), stock.train(training), images)


def test_pretrained_weights_take_a_new_head(checkpoint, stock):
    overlay = {"file": str(checkpoint / "model.safetensors"), "num_classes": 5}
    model = timm.create_model(
        "sinkformer_vit_tiny_patch16_224",
        pretrained=True,
        pretrained_cfg_overlay=overlay,
        **{**SMALL, "num_classes": 3},
    )
    assert model.head.weight.shape == (3, 192)
    assert torch.equal(model.blocks[1].attn.qkv.weight, stock.blocks[1].attn.qkv.weight)


def test_state_dicts_are_byte_identical_both_ways(stock):
    ours = tiny()
    ours.load_state_dict(stock.state_dict())
    back = timm.create_model("vit_tiny_patch16_224", **SMALL)
    back.load_state_dict(ours.state_dict())
    assert list(back.state_dict()) == list(ours.state_dict()) == list(stock.state_dict())
    assert all(torch.equal(back.state_dict()[name], tensor) for name, tensor in stock.state_dict().items())


@pytest.mark.parametrize(("suffix", "n_iters"), [("T1", 1), ("T3", 3)])
def test_catsdogs_is_the_published_model(golden, suffix, n_iters):
    published = {}
    for k, (name, shape) in enumerate(golden["params"].items()):
        j = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
        sharp = any(part in name for part in ("fc_q", "fc_k", "to_qkv", "WQ", "WK"))
        weight = (0.3 if sharp else 0.08) * torch.sin(0.7 * j + 1.3 * k)
        if "norm" in name and name.endswith("weight"):
            weight += 1
        published[name] = weight.float().reshape(shape)
    model = timm.create_model("sinkformer_vit_catsdogs", img_size=64, n_iters=n_iters).eval()
    load_published_state_dict(model, published)

    j = torch.arange(2 * 3 * 64 * 64, dtype=torch.float64)
    images = torch.sin(0.9 * j + 0.05 * (j % 97) ** 1.5).float().reshape(2, 3, 64, 64).requires_grad_()
    wanted = golden[f"catsdogs64_{suffix}"]
    torch.testing.assert_close(model(images), torch.tensor(wanted["out"]), rtol=1e-5, atol=0)
    weight = torch.tensor([[1, -0.5], [0.3, 0.7]])
    (grad,) = torch.autograd.grad((model(images) * weight).sum(), images)
    assert grad.norm().item() == pytest.approx(wanted["grad_norm"], rel=2e-3)
    # These maps are saturated, and float32 shows it; the arithmetic itself is held to more in float64.
    (exact,) = torch.autograd.grad((copy.deepcopy(model).double()(images.double()) * weight).sum(), images)
    assert exact.norm().item() == pytest.approx(wanted["grad_norm"], rel=3e-4)
    assert (grad - exact).norm() <= 1e-3 * exact.norm()

    captured = []
    model.blocks[0].attn.qkv.register_forward_hook(lambda module, args, output: captured.append(output))
    model(images)
    qkv = captured[0].unflatten(-1, (3, 8, 64))
    scores = torch.einsum("bihd,bjhd->bhij", qkv[:, :, 0], qkv[:, :, 1]) / 8
    column_sums = sinkhorn(scores, n_iters)[0, 0].sum(0)[:5]
    torch.testing.assert_close(column_sums, torch.tensor(wanted["attn0_colsum"]), rtol=1e-3, atol=1e-6)


def test_published_names_translate_both_ways(golden):
    torch.manual_seed(0)
    model = timm.create_model("sinkformer_vit_catsdogs", img_size=64)
    published = to_published_state_dict(model)
    assert {name: list(tensor.shape) for name, tensor in published.items()} == golden["params"]
    assert list(published) == list(golden["params"])
    other = timm.create_model("sinkformer_vit_catsdogs", img_size=64)
    load_published_state_dict(other, published)
    assert all(torch.equal(other.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_published_digits_checkpoint_loads_without_its_unused_feed_forward():
    torch.manual_seed(0)
    model = timm.create_model("sinkformer_vit_mnist")
    published = to_published_state_dict(model)
    published["transformer.layers.0.1.fn.net.0.weight"] = torch.zeros(128, 128)
    other = timm.create_model("sinkformer_vit_mnist")
    load_published_state_dict(other, published)
    assert all(torch.equal(other.state_dict()[name], tensor) for name, tensor in model.state_dict().items())


def test_published_translation_names_what_does_not_fit(golden):
    model = timm.create_model("sinkformer_vit_mnist")
    with pytest.raises(ValueError, match=r"'blocks\.0\.weight' is no entry of a published"):
        load_published_state_dict(model, {"blocks.0.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"to_patch_embedding\.1\.weight \(128, 768\) does not fit"):
        load_published_state_dict(model, {"to_patch_embedding.1.weight": torch.zeros(128, 768)})
    with pytest.raises(ValueError, match=r"'blocks\.0\.attn\.qkv\.bias' has no counterpart"):
        to_published_state_dict(timm.create_model("sinkformer_vit_mnist", qkv_bias=True))


def test_papers_models_draw_positions_and_layers_as_the_paper():
    torch.manual_seed(0)
    model = timm.create_model("sinkformer_vit_catsdogs")
    assert model.pos_embed.std().item() == pytest.approx(1, abs=0.02)
    assert model.cls_token.std().item() == pytest.approx(1, abs=0.2)
    bound = 128**-0.5  # torch's own draw: uniform within 1 / sqrt(fan_in)
    assert 0.95 * bound < model.blocks[0].attn.qkv.weight.abs().max().item() <= bound
    assert {module.eps for module in model.modules() if isinstance(module, torch.nn.LayerNorm)} == {1e-5}
    weight = model.blocks[0].attn.qkv.weight.clone()
    model.init_weights()
    assert 0.95 * bound < model.blocks[0].attn.qkv.weight.abs().max().item() <= bound
    assert not torch.equal(model.blocks[0].attn.qkv.weight, weight)


@pytest.mark.parametrize("patch_size", [1, 2, 4, 7, 14, 28])
def test_digits_model_for_every_patch_size_of_the_paper(patch_size):
    torch.manual_seed(0)
    model = timm.create_model("sinkformer_vit_mnist", patch_size=patch_size).eval()
    assert model.pos_embed.shape == (1, (28 // patch_size) ** 2 + 1, 128)
    image = torch.randn(1, 1, 28, 28)
    block = model.blocks[0]
    tokens = torch.cat([model.cls_token, model.patch_embed(image)], 1) + model.pos_embed
    query, key, value = block.attn.qkv(block.norm1(tokens)).chunk(3, -1)
    attended = sinkhorn(query @ key.transpose(-1, -2) / 8, 5) @ value
    wanted = model.head(model.norm(tokens + block.attn.proj(attended))[:, 0])
    torch.testing.assert_close(model(image), wanted, rtol=1e-5, atol=1e-5)


def test_gradient_checkpointing_changes_nothing(images):
    model = tiny(n_iters=3)
    out, grads = output_and_gradients(model, images)
    model.set_grad_checkpointing()
    again, grads_again = output_and_gradients(model, images)
    assert torch.equal(out, again)
    assert all(torch.equal(a, b) for a, b in zip(grads, grads_again, strict=True))
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    mask[1, ..., 3:] = False
    masked = model.forward_features(images, attn_mask=mask)
    torch.testing.assert_close(masked[:1], model.forward_features(images[:1]))
    assert (masked[1, 0] - model.forward_features(images)[1, 0]).abs().max() > 1e-4


def test_copies_and_pickles(images):
    for model in (tiny(), tiny("vit_tiny_patch16_224", attn_layer=sinkhorn_attn_layer(3))):
        wanted = model.eval()(images)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(images), wanted)
            with torch.no_grad():
                twin.blocks[0].attn.qkv.weight.zero_()
        assert torch.equal(model(images), wanted)


def test_channels_last(images):
    model = tiny().eval()
    wanted = model(images)
    out = model.to(memory_format=torch.channels_last)(images.to(memory_format=torch.channels_last))
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


def test_dynamic_image_size():
    model = tiny(dynamic_img_size=True).eval()
    assert model(torch.randn(1, 3, 48, 32)).shape == (1, 5)


def test_features_only(images):
    features = tiny(features_only=True, out_indices=(0, 1))(images)
    assert [feature.shape for feature in features] == [(2, 192, 2, 2)] * 2
    model = tiny()
    _, wanted = model.forward_intermediates(images, indices=[0, 1])
    for feature, want in zip(features, wanted, strict=True):
        torch.testing.assert_close(feature, want)


def test_compiles_without_a_graph_break(images):
    model = tiny(n_iters=3)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    out, grads = output_and_gradients(model, images)
    again, grads_again = output_and_gradients(compiled, images)
    torch.testing.assert_close(again, out, rtol=1e-5, atol=1e-5)
    for got, want in zip(grads_again, grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


NO_COMPILER = (
    not (shutil.which("g++") or shutil.which("clang++")) or not Path(get_path("include"), "Python.h").is_file()
)
INDUCTOR = pytest.param(
    "inductor", marks=pytest.mark.skipif(NO_COMPILER, reason="inductor needs a C++ compiler and Python's headers")
)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", INDUCTOR])
def test_the_cats_and_dogs_model_trains_compiled_without_a_graph_break(backend):
    """Whole, at its own size (but for the layers, all alike, where each is compiled to C++): a step of SGD, then the
    loss again.
    """
    depth = {} if backend == "aot_eager" else {"depth": 1}
    losses = {}
    for compiled in (False, True):
        torch.manual_seed(0)
        model = timm.create_model("sinkformer_vit_catsdogs", n_iters=3, **depth)
        step = torch.compile(model, backend=backend, fullgraph=True) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        images, labels = torch.randn(2, 3, 224, 224), torch.tensor([0, 1])
        losses[compiled] = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(step(images), labels)
            loss.backward()
            optimizer.step()
            losses[compiled].append(loss.item())
    assert abs(losses[False][1] - losses[False][0]) > 1e-2  # the step moved it
    assert losses[True] == pytest.approx(losses[False], abs=1e-5)


def test_a_training_step_moves_every_parameter(images):
    model = tiny(n_iters=3)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    torch.nn.functional.cross_entropy(model(images), torch.tensor([0, 1])).backward()
    optimizer.step()
    assert all(not torch.equal(before[name], parameter) for name, parameter in model.named_parameters())


LOT = {"name": "lot", "n_iters": 2, "num_pivots": 3}


@pytest.mark.parametrize("chosen", [LOT, get_normalizer(LOT, head_dim=1, num_heads=1)], ids=["mapping", "normalizer"])
def test_a_normalizer_and_its_options_as_one_value(chosen, images):
    apart = {"normalizer": "lot", "n_iters": 2, "normalizer_options": {"num_pivots": 3}}
    models = [pickle.loads(pickle.dumps(tiny(**given))) for given in (apart, {"normalizer": chosen})]
    converted = tiny(normalizer="softmax")
    timm_sinkhorn.convert(converted, chosen)
    for model in (*models[1:], converted):
        model.load_state_dict(models[0].state_dict())
        torch.testing.assert_close(model(images), models[0](images))
    with pytest.raises(ValueError, match="n_iters is given twice: as 2 and as 3"):
        tiny(normalizer=chosen, n_iters=3)


def test_a_mapping_without_a_count_has_the_models_own():
    assert (
        timm.create_model("sinkformer_vit_mnist", normalizer={"name": "sinkhorn"}).blocks[0].attn.normalizer.n_iters
        == 5
    )


def test_a_class_pickled_with_name_and_options_apart_is_read():
    layer = _rebuild("sinkhorn", 5, {"n_iters": 4})(32, num_heads=2)
    assert (layer.normalizer.n_iters, layer.head_dim) == (4, 5)


def test_public_names_exist():
    assert all(hasattr(timm_sinkhorn, name) for name in timm_sinkhorn.__all__)
