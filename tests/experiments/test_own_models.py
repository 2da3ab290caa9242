"""Any timm model, and any callable that returns a module, by the command line."""

import sys

import pytest
import timm
import torch
from sinkhorn_attention.interception import Intercepted

from experiments.config import compose, resolve
from experiments.errors import RunError
from experiments.models import any_timm_model, cloud_model
from experiments.own_model import locate, torch_model
from experiments.runners import lightning
from experiments.train import execute

BASE = (
    *("experiment=own_model", "data.val_size=200", "data.test_size=4400", "trainer.max_epochs=1", "logger=none"),
    "trainer.accelerator=cpu",
)
IMAGES = (torch.randn(2, 1, 28, 28),)
SINKHORN = {"name": "sinkhorn", "n_iters": 3}
MODULE = """
import torch
NUMBER = 3

class Model(torch.nn.Module):
    def __init__(self, num_classes, img_size, in_chans, depth=1):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(img_size * in_chans, 2, 16, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = torch.nn.Linear(img_size * in_chans, num_classes)

    def forward(self, images):
        return self.head(self.encoder(images.flatten(1, 2)).mean(1))

    @classmethod
    def deep(cls, **options):
        return cls(depth=2, **options)

def text():
    return "no module"

def plain(num_classes):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, num_classes))

def itself(num_classes, attention):
    model = plain(num_classes)
    model.attention = attention
    return model
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    name = f"model_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_broken.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    for known in [one for one in sys.modules if one.startswith(name)]:
        del sys.modules[known]


def built(data_folder, *words):
    return lightning.build(resolve(compose([*BASE, f"paths.data={data_folder}", *words])))[1].model


def test_a_timm_model_trains_by_its_name(tmp_path, data_folder):
    words = [*BASE, f"paths.data={data_folder}", f"paths.runs={tmp_path}", "attention=sinkhorn"]
    words += [
        "data.batch_size=10",
        "model.name=vit_tiny_patch16_224",
        "+model.patch_size=14",
        "+model.depth=1",
        "+model.embed_dim=24",
    ]
    outcome = execute(compose(words), words)
    assert outcome.result["best"]["test"]["accuracy"] > 0.15


def test_size_channels_and_classes_are_the_datas(data_folder):
    model = built(data_folder, "model.name=vit_tiny_patch16_224", "+model.patch_size=7", "+model.depth=1")
    assert model.patch_embed.img_size == (28, 28)
    assert model.patch_embed.proj.in_channels == 1
    assert model.head.out_features == 10
    other = built(data_folder, "experiment=mnist_patches", "model.name=vit_tiny_patch16_224", "+model.depth=1")
    assert other.patch_embed.proj.kernel_size == (7, 7)


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "test_efficientnet"])
def test_softmax_takes_any(name):
    options = {"patch_size": 7} if name == "test_vit" else {}
    model = any_timm_model(name, {"name": "softmax"}, 4, IMAGES, False, None, None, **options).eval()
    assert model(*IMAGES).shape == (2, 4)


def test_the_attention_is_converted_and_one_half_step_is_softmax():
    def outputs(attention):
        torch.manual_seed(0)
        model = any_timm_model("test_vit", attention, 4, IMAGES, False, None, None, patch_size=7)
        assert any(isinstance(module, Intercepted) or hasattr(module, "normalizer") for module in model.modules())
        for block in model.blocks:
            block.attn.qkv.weight.data.mul_(20)
        return model.eval()(*IMAGES)

    softmax = outputs({"name": "softmax"})
    assert torch.allclose(outputs({"name": "sinkhorn", "n_iters": 1}), softmax, atol=1e-4)
    assert (outputs(SINKHORN) - softmax).abs().max() > 1e-3


def test_weights_of_a_file(tmp_path):
    torch.manual_seed(0)
    stock = timm.create_model("test_vit", num_classes=4, img_size=28, in_chans=1, patch_size=7)
    torch.save(stock.state_dict(), tmp_path / "weights.pth")
    model = any_timm_model(
        "test_vit", SINKHORN, 4, IMAGES, False, str(tmp_path / "weights.pth"), ["head.*"], patch_size=7
    )
    assert torch.equal(model.blocks[0].attn.qkv.weight, stock.blocks[0].attn.qkv.weight)
    assert {name for name, one in model.named_parameters() if one.requires_grad} == {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("name", "attention", "words"),
    [
        ("vit_tiny_patch16_242", SINKHORN, "not registered with timm; near it are .*vit_tiny_patch16_224"),
        ("vit_tiny_patch16_224.typo", SINKHORN, "timm knows no weights typo; those of vit_tiny_patch16_224 are augreg"),
        (
            "test_resnet",
            SINKHORN,
            "model.name=test_resnet: ByobNet|ResNet has no attention to convert; attention=softmax",
        ),
        ("test_resnet", {"name": "softmax", "n_iters": 3}, "n_iters"),
        ("test_vit", SINKHORN, r"patches of 16 × 16 pixels do not fill images of 28 × 28"),
    ],
)
def test_what_timm_cannot_do_is_a_sentence(name, attention, words):
    with pytest.raises((ValueError, TypeError), match=words) as caught:
        any_timm_model(name, attention, 4, IMAGES, False, None, None)
    assert "\n" not in str(caught.value)


def test_points_are_no_images():
    with pytest.raises(ValueError, match=r"takes images .* these data have \(5, 3\)"):
        any_timm_model("test_vit", SINKHORN, 4, (torch.randn(2, 5, 3),), False, None, None)


def test_a_cloud_model_has_the_datas_features():
    options = {"hidden": 8, "num_heads": 2, "num_inducing": 4}
    points = torch.randn(2, 9, 5)
    for attention in (SINKHORN, {**SINKHORN, "layers": 1}):
        model = cloud_model("set_transformer_modelnet40", attention, 4, (points,), **options)
        assert model(points).shape == (2, 4)


def test_ones_own_trains_and_is_converted(module, tmp_path, data_folder):
    words = [*BASE, f"paths.data={data_folder}", f"paths.runs={tmp_path}", "attention=sinkhorn"]
    words += ["model=torch", f"model.target={module}.Model"]
    assert execute(compose(words), words).result["n_params"] > 1000
    model = built(
        data_folder, "attention=sinkhorn", "model=torch", f"model.target={module}.Model", "+model.kwargs.depth=3"
    )
    assert [layer.self_attn.normalizer.n_iters for layer in model.encoder.layers] == [5] * 3


def test_what_a_callable_takes_is_given(module):
    assert torch_model(f"{module}.plain", {}, {"name": "softmax"}, 4, IMAGES)(*IMAGES).shape == (2, 4)
    assert torch_model(f"{module}.itself", {}, SINKHORN, 4, IMAGES).attention == SINKHORN
    deep = torch_model(f"{module}.Model.deep", {"img_size": 28, "in_chans": 1}, SINKHORN, 4, IMAGES)
    assert len(deep.encoder.layers) == 2


@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        ("Modell", {}, r"has no Modell; near it are Model"),
        ("NUMBER", {}, "cannot be called: it is of the type int"),
        ("text", {}, "returns str, and not a torch.nn.Module"),
        ("Model", {"width": 3}, "got an unexpected keyword argument 'width'; it takes .*depth"),
        ("plain", {}, "nothing to convert in Sequential: .*; attention=softmax trains it as it is"),
    ],
)
def test_what_one_s_own_cannot_do_is_a_sentence(module, name, kwargs, words):
    with pytest.raises(ValueError, match=words) as caught:
        torch_model(f"{module}.{name}", kwargs, SINKHORN, 4, IMAGES)
    assert "\n" not in str(caught.value)


def test_targets_that_are_not_there(module, data_folder):
    for target, words in (
        ("Linear", "must name a callable as package.module.name"),
        ("no_such_package.make", "no_such_package cannot be imported"),
        (f"{module}_broken.make", "No module named 'no_such_package'"),
    ):
        with pytest.raises(ValueError, match=words):
            locate(target)
    with pytest.raises(RunError, match=r"model: model\.target: torch\.nn has no Linaer; near it are Linear"):
        built(data_folder, "model=torch", "model.target=torch.nn.Linaer")
    with pytest.raises(RunError, match=r"model\.target"):
        built(data_folder, "model=torch")
