import subprocess
import sys

import pytest
import torch
from pyg_sinkhorn import PointCloudTransformer, SetTransformer, convert, create_model, list_models, register_model
from pyg_sinkhorn.registry import _MODELS
from sinkhorn_attention import get_normalizer


def test_the_papers_models_are_there():
    assert set(list_models()) >= {
        "set_transformer_modelnet40",
        "set_sinkformer_modelnet40",
        "set_sinkformer_modelnet40_official",
        "pct_modelnet40",
        "pct_sinkformer_modelnet40",
    }
    assert list_models("pct_*") == ["pct_modelnet40", "pct_sinkformer_modelnet40"]


@pytest.mark.parametrize("name", list_models())
def test_every_model_takes_clouds_and_learns(name):
    torch.manual_seed(0)
    small = {"hidden": 16} if name.startswith("set") else {"embed_dim": 4, "num_samples": (8, 4), "num_neighbors": 3}
    model = create_model(name, num_classes=7, **small)
    points, labels = torch.randn(4, 20, 3), torch.tensor([0, 1, 2, 3])
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(15):
        logits = model(points)
        assert logits.shape == (4, 7)
        loss = torch.nn.functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert min(losses[-3:]) < 0.8 * losses[0]


@pytest.mark.parametrize(
    ("name", "kwargs", "normalizer", "n_iters"),
    [
        ("set_transformer_modelnet40", {}, "Softmax", None),
        ("set_transformer_modelnet40", {"normalizer": "sinkhorn", "n_iters": 3}, "Sinkhorn", 3),
        ("set_sinkformer_modelnet40", {}, "Sinkhorn", 21),
        ("set_sinkformer_modelnet40", {"n_iters": 9}, "Sinkhorn", 9),
        ("set_sinkformer_modelnet40", {"normalizer": "sinkhorn"}, "Sinkhorn", 21),
        ("set_sinkformer_modelnet40", {"normalizer": "softmax"}, "Softmax", None),
        ("set_sinkformer_modelnet40_official", {}, "Sinkhorn", 7),
    ],
)
def test_set_models_take_a_normalizer(name, kwargs, normalizer, n_iters):
    model = create_model(name, hidden=8, **kwargs)
    assert isinstance(model, SetTransformer)
    for block in (model.encoder[0].gather, model.encoder[1].scatter, model.pool.attention):
        assert type(block.normalizer).__name__ == normalizer
        assert getattr(block.normalizer, "n_iters", None) == n_iters
        assert block.uniform_rows == name.endswith("official")


@pytest.mark.parametrize(
    ("name", "kwargs", "normalizer", "n_iters"),
    [
        ("pct_modelnet40", {}, "PCT", None),
        ("pct_modelnet40", {"normalizer": "softmax"}, "Softmax", None),
        ("pct_sinkformer_modelnet40", {}, "Sinkhorn", 5),
        ("pct_sinkformer_modelnet40", {"normalizer_options": {"gradient": "detached"}}, "Sinkhorn", 5),
        ("pct_sinkformer_modelnet40", {"normalizer": "pct"}, "PCT", None),
    ],
)
def test_point_cloud_transformers_take_a_normalizer(name, kwargs, normalizer, n_iters):
    model = create_model(name, embed_dim=4, **kwargs)
    assert isinstance(model, PointCloudTransformer)
    for layer in model.layers:
        assert type(layer.normalizer).__name__ == normalizer
        assert getattr(layer.normalizer, "n_iters", None) == n_iters
        if "normalizer_options" in kwargs:
            assert layer.normalizer.gradient == "detached"


@pytest.mark.parametrize("model", ["set_sinkformer_modelnet40", "pct_sinkformer_modelnet40"])
def test_a_normalizer_and_its_options_as_one_value(model):
    small = {"hidden": 8} if model.startswith("set") else {"embed_dim": 4}
    chosen = {"name": "unbalanced_sinkhorn", "n_iters": 4, "rho": 2.0}
    one = create_model(model, normalizer=chosen, **small)
    converted = create_model(model, normalizer="softmax", **small)
    names = convert(converted, get_normalizer(chosen))
    found = [dict(made.named_modules())[name].normalizer for made in (one, converted) for name in names]
    assert len(names) >= 3
    assert all(normalizer.options == {"n_iters": 4, "rho": 2.0} for normalizer in found)
    with pytest.raises(ValueError, match="n_iters is given twice"):
        create_model(model, normalizer=chosen, n_iters=3, **small)


def test_the_entrys_count_gives_way_to_one_among_the_options():
    model = create_model("set_sinkformer_modelnet40", hidden=8, normalizer_options={"n_iters": 2})
    assert model.encoder[0].gather.normalizer.n_iters == 2


def test_mistakes_are_named():
    with pytest.raises(ValueError, match=r"unknown point-cloud model 'pct'; there are .*pct_modelnet40"):
        create_model("pct")
    with pytest.raises(TypeError, match="hiden"):
        create_model("set_transformer_modelnet40", hiden=3)
    with pytest.raises(ValueError, match="n_iters"):
        create_model("pct_modelnet40", n_iters=3)


def test_own_models_can_be_registered():
    def tiny_set(**kwargs):
        return SetTransformer(hidden=8, **kwargs)

    try:
        register_model(tiny_set)
        assert isinstance(create_model("tiny_set", num_classes=2), SetTransformer)
        taken = type(tiny_set)(tiny_set.__code__, {"__name__": "elsewhere"}, "tiny_set")
        with pytest.raises(ValueError, match="model 'tiny_set' is registered already"):
            register_model(taken)
    finally:
        _MODELS.pop("tiny_set", None)


def test_the_plugin_stands_alone():
    code = (
        "import sys, pyg_sinkhorn; forbidden = {'timm', 'timm_sinkhorn', 'fairseq_sinkhorn', 'hydra', 'wandb', "
        "'lightning', 'experiments', 'sklearn'}; print(*sorted(forbidden & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
