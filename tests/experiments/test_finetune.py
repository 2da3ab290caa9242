"""Pretrained models with converted attention, runs that begin with another's weights, and epoch 0."""

import json

import pytest
import timm
import timm_sinkhorn
import torch
from sinkhorn_attention import get_normalizer
from timm.models import save_for_hf

from experiments.config import compose
from experiments.errors import RunError
from experiments.evaluate import load_run
from experiments.models import ImageNetCatsDogs, pretrained_timm_model, timm_model
from experiments.runners import classifier
from experiments.runners.checkpoints import read_checkpoint
from experiments.train import execute

SIZE = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2}
SINKHORN = {"name": "sinkhorn", "n_iters": 3}


@pytest.fixture(scope="module")
def stock():
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=7, **SIZE).eval()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(20)  # scores as of a trained model, not nearly even ones
    return model


@pytest.fixture(scope="module")
def weights(tmp_path_factory, stock):
    path = tmp_path_factory.mktemp("weights") / "vit.pth"
    torch.save(stock.state_dict(), path)
    return str(path)


def pretrained(weights, attention, num_classes=7, **options):
    settings = {"head": "new", "train": None, **SIZE, **options}
    return pretrained_timm_model("vit_tiny_patch16_224", attention, num_classes, weights, **settings).eval()


def body(state):
    return {name: tensor for name, tensor in state.items() if not name.startswith("head.")}


def test_a_file_gives_the_models_weights_and_features(stock, weights):
    images = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    for attention, tolerance in (({"name": "softmax"}, 1e-6), ({"name": "sinkhorn", "n_iters": 1}, 1e-5)):
        model = pretrained(weights, attention)
        for name, tensor in body(stock.state_dict()).items():
            assert torch.equal(model.state_dict()[name], tensor), name
        torch.testing.assert_close(
            model.forward_features(images), stock.forward_features(images), rtol=0, atol=tolerance
        )
    converted = timm.create_model("vit_tiny_patch16_224", num_classes=7, **SIZE).eval()
    converted.load_state_dict(stock.state_dict())
    timm_sinkhorn.convert(converted, "sinkhorn", n_iters=3)
    found = pretrained(weights, SINKHORN).forward_features(images)
    assert torch.equal(found, converted.forward_features(images))
    assert (found - stock.forward_features(images)).abs().max() > 1e-3


def test_a_local_folder(tmp_path, stock, weights):
    save_for_hf(stock, tmp_path / "saved", model_config={"model_args": SIZE})
    model = pretrained_timm_model(f"local-dir:{tmp_path}/saved", SINKHORN, 2, None, "new", None)
    assert torch.equal(model.blocks[2].attn.qkv.weight, stock.blocks[2].attn.qkv.weight)
    assert model.head.out_features == 2


def iters(model):
    return [getattr(block.attn.normalizer, "n_iters", None) for block in model.blocks]


def test_some_layers_alone(weights):
    softmax = getattr(get_normalizer("softmax", head_dim=8, num_heads=2), "n_iters", None)
    assert iters(pretrained(weights, {**SINKHORN, "layers": 2})) == [softmax, 3, 3]
    assert iters(pretrained(weights, {**SINKHORN, "layers": [0]})) == [3, softmax, softmax]
    assert iters(pretrained(weights, {**SINKHORN, "layers": "blocks.1.*"})) == [softmax, 3, softmax]
    ours = timm_model("sinkformer_vit_catsdogs", {**SINKHORN, "layers": 1}, 2, img_size=32, depth=3)
    assert iters(ours) == [softmax, softmax, 3]
    with pytest.raises(ValueError, match="asks for the last 9 attention modules; there are 3"):
        pretrained(weights, {**SINKHORN, "layers": 9})


def test_some_parameters_alone(weights):
    model = pretrained(weights, SINKHORN, train=["head.*", "blocks.2.attn.*"])
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {
        "head.weight",
        "head.bias",
        *(f"blocks.2.attn.{layer}.{kind}" for layer in ("qkv", "proj") for kind in ("weight", "bias")),
    }
    with pytest.raises(ValueError, match=r"model\.train: no parameter is named like 'neck\.\*'"):
        pretrained(weights, SINKHORN, train=["neck.*"])


def test_imagenets_cats_and_dogs():
    class Logits(torch.nn.Module):
        num_classes = 1000

        def forward(self, images):
            return images

    logits = torch.full((3, 1000), -50.0)
    logits[0, 281] = logits[0, 285] = 1.0  # tabby, Egyptian cat
    logits[1, 151] = logits[1, 268] = 2.0  # chihuahua, Mexican hairless
    logits[2, 150] = logits[2, 269] = logits[2, 280] = logits[2, 286] = 9.0  # sea lion, wolf, fox, cougar
    found = ImageNetCatsDogs(Logits())(logits)
    assert found[0, 0] == pytest.approx(1 + torch.log(torch.tensor(2.0)).item())
    assert found[1, 1] == pytest.approx(2 + torch.log(torch.tensor(2.0)).item())
    assert found[2].max() < -40
    with pytest.raises(ValueError, match="needs a model with the 1,000 classes"):
        ImageNetCatsDogs(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": "nowhere.pth"}, r"model\.weights: there is no file nowhere\.pth"),
        ({"head": "old"}, "model.head must be new or imagenet; got 'old'"),
        ({"head": "imagenet"}, "tells cats from dogs, and these data have 7 classes"),
        ({"embed_dim": 32}, r"the pretrained weights of vit_tiny_patch16_224 .* cannot be loaded: .*size mismatch"),
    ],
)
def test_what_is_refused(weights, changes, words):
    with pytest.raises(ValueError, match=words):
        pretrained(**{"weights": weights, "attention": SINKHORN, **changes})


SMALL = ("data.source=mnist5k", "data.size=100", "model.depth=1", "trainer.accelerator=cpu", "logger=none")
ORIGIN = ",".join(
    f"'{word}'" for word in ("experiment=cats_dogs_standin", "attention=softmax", *SMALL, "trainer.max_epochs=2")
)


@pytest.fixture
def start(tmp_path, data_folder):
    def call(*more, runs="runs", origin=ORIGIN):
        words = ["experiment=cats_dogs_standin_finetune", *SMALL, f"init_from.overrides=[{origin}]"]
        words += ["trainer.max_epochs=2", f"paths.runs={tmp_path / runs}", f"paths.data={data_folder}", *more]
        return execute(compose(words), words)

    return call


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_begins_with_the_weights_of_another(start, tmp_path):
    three = start("attention=sinkhorn", "attention.n_iters=3", "init_from.rate=0.5")
    (origin,) = (tmp_path / "runs" / "cats_dogs_standin").iterdir()
    before = (origin / "result.json").stat().st_mtime_ns
    softmax = start("attention=softmax", "init_from.rate=0.5")
    assert (origin / "result.json").stat().st_mtime_ns == before
    last = json.loads((origin / "result.json").read_text())["last"]
    # Softmax goes on from the very numbers that the other run ended with.
    assert softmax.result["initial"] == {"epoch": 0, "step": 0, "val": last["val"], "test": last["test"]}
    assert three.result["initial"]["val"]["loss"] != last["val"]["loss"]
    rows = rows_of(three.folder)
    assert [(row["epoch"], row["split"]) for row in rows[:3]] == [(0, "val"), (0, "test"), (1, "train")]
    assert rows[2]["lr"] == 0.5 * rows_of(origin)[0]["lr"]
    assert three.result["best"]["epoch"] > 0
    # Epoch 0 is the exchange alone: the other run's weights in a model with this attention.
    run = load_run(three.folder)
    run.module.load_state_dict(read_checkpoint(origin / last["checkpoint"])["state_dict"])
    assert run.metrics("test") == three.result["initial"]["test"]
    assert load_run(three.folder).metrics("test") == three.result["best"]["test"]


def test_a_stopped_run_goes_on(start, monkeypatch):
    words = ("attention=sinkhorn", "attention.n_iters=3")
    whole = start(*words, runs="whole")
    original = classifier.Classifier.training_step

    def stop(self, batch, batch_idx):
        if self.trainer.max_epochs == 2 and self.global_step == 1 and self.trainer.current_epoch == 1:
            raise KeyboardInterrupt
        return original(self, batch, batch_idx)

    start("attention=softmax", runs="stopped")  # so that the origin is finished
    monkeypatch.setattr(classifier.Classifier, "training_step", stop)
    with pytest.raises(SystemExit):
        start(*words, runs="stopped")
    monkeypatch.undo()
    again = start(*words, runs="stopped")
    assert (again.folder / "metrics.jsonl").read_bytes() == (whole.folder / "metrics.jsonl").read_bytes()
    assert (again.folder / "result.json").read_bytes() == (whole.folder / "result.json").read_bytes()


def test_epoch_0_changes_nothing_afterwards(start):
    words = ("attention=sinkhorn", "+model.drop_rate=0.2")
    origin = f"{ORIGIN},'+model.drop_rate=0.2'"
    with_it, without = (
        start(*words, f"protocol.initial={initial}", runs=initial, origin=origin) for initial in ("true", "false")
    )
    assert rows_of(with_it.folder)[2:] == rows_of(without.folder)
    assert "initial" not in without.result


def test_other_splits_are_refused(start):
    with pytest.raises(RunError, match="init_from: that run was trained with other splits of the same data"):
        start("data.split_seed=1")


def test_a_model_of_another_size_is_refused(start):
    with pytest.raises(RunError, match=r"init_from: .*size mismatch"):
        start("model.embed_dim=32")


def test_frozen_parameters_stay(start, weights, tmp_path, data_folder):
    words = [
        *("experiment=cats_dogs_standin", "model=timm_pretrained", "model.name=vit_tiny_patch16_224"),
        *(f"model.weights={weights}", "model.img_size=32", "model.train=[head.*]"),
        *(f"+model.{name}={value}" for name, value in SIZE.items() if name != "img_size"),
        *("+model.in_chans=1", "attention=sinkhorn", "attention.n_iters=3", "trainer.max_epochs=1"),
        *("data.source=mnist5k", "data.size=100", "trainer.accelerator=cpu", "logger=none", "protocol.initial=true"),
        *("+model.dynamic_img_size=true", "+model.dynamic_img_pad=true"),  # 28 is no multiple of 8
        *(f"paths.runs={tmp_path / 'frozen'}", f"paths.data={data_folder}"),
    ]
    outcome = execute(compose(words), words)
    assert outcome.result["n_params"] == 2 * 16 + 2
    state = read_checkpoint(outcome.folder / outcome.result["last"]["checkpoint"])["state_dict"]
    stock = torch.load(weights)
    assert torch.equal(state["model.blocks.1.attn.qkv.weight"], stock["blocks.1.attn.qkv.weight"])
    assert outcome.result["initial"]["val"]["loss"] != outcome.result["last"]["val"]["loss"]
