"""Clouds as torch_geometric has them, and points with features."""

import pytest
import torch
from pyg_sinkhorn import create_model
from torch_geometric.data import Batch, Data

SMALL = {
    "set_sinkformer_modelnet40": {"hidden": 8, "num_heads": 2, "num_inducing": 4},
    "pct_sinkformer_modelnet40": {
        **{"embed_dim": 4, "num_samples": (12, 8), "num_neighbors": 4, "num_layers": 2, "fuse_dim": 16},
        "head_dims": (16, 8),
    },
}


def model_of(name, features=0):
    torch.manual_seed(0)
    model = create_model(name, num_classes=5, features=features, **SMALL[name]).eval()
    with torch.no_grad():  # an untrained one hardly tells clouds apart
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.mul_(3)
    return model


def clouds(sizes, features):
    torch.manual_seed(1)
    return [Data(pos=torch.randn(n, 3), x=torch.randn(n, features) if features else None) for n in sizes]


def columns(data):
    return data.pos if data.x is None else torch.cat([data.pos, data.x], -1)


@pytest.mark.parametrize("features", [0, 2])
@pytest.mark.parametrize("name", SMALL)
def test_equal_sizes_are_the_tensor(name, features):
    given, model = clouds([20, 20, 20], features), model_of(name, features)
    expected = model(torch.stack([columns(one) for one in given]))
    assert torch.equal(model(Batch.from_data_list(given)), expected)
    assert torch.allclose(model(given[1]), expected[1:2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("features", [0, 2])
@pytest.mark.parametrize("name", SMALL)
def test_other_sizes_are_each_cloud_alone(name, features):
    given, model = clouds([20, 13, 17], features), model_of(name, features)
    alone = torch.cat([model(columns(one)[None]) for one in given])
    assert torch.allclose(model(Batch.from_data_list(given)), alone, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(alone[0], alone[1], atol=1e-3)


@pytest.mark.parametrize("name", SMALL)
def test_features_matter_and_learn(name):
    points, model = torch.randn(2, 20, 5), model_of(name, 2)
    other = torch.cat([points[..., :3], points[..., 3:] + 1], -1).requires_grad_()
    assert (model(points) - model(other)).abs().max() > 1e-4
    model(other).sum().backward()
    assert other.grad[..., 3:].abs().sum() > 0


@pytest.mark.parametrize(
    ("given", "mask", "words"),
    [
        (Data(x=torch.randn(4, 3)), None, "has no pos"),
        (Data(pos=torch.randn(4, 3)), torch.ones(1, 4).bool(), "a mask goes with points as a tensor"),
        (Data(pos=torch.randn(4, 3), x=torch.randn(4, 2)), None, r"\(batch, points, 3\), got \(1, 4, 5\)"),
    ],
)
def test_what_is_refused(given, mask, words):
    with pytest.raises(ValueError, match=words):
        model_of("set_sinkformer_modelnet40")(given, mask)


def test_widths_of_features_are_told():
    with pytest.raises(ValueError, match=r"\(batch, points, 5\), 3 coordinates and 2 features, got \(2, 4, 3\)"):
        model_of("pct_sinkformer_modelnet40", 2)(torch.randn(2, 4, 3))
