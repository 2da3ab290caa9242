import copy
import pickle

import pytest
import torch
from pyg_sinkhorn import SetTransformer, create_model
from torch_geometric.data import Batch, Data
from torch_geometric.utils import to_dense_batch

SMALL = {"hidden": 12, "num_heads": 3, "num_inducing": 4, "num_classes": 5, "dropout": 0.0}
VARIANTS = {
    "published": {"n_iters": 3},
    "softmax": {"normalizer": "softmax"},
    "even count": {"n_iters": 4},
    "softmax pooling": {"n_iters": 5, "pool_normalizer": "softmax"},
    "uniform rows": {"n_iters": 7, "row_mass": "uniform"},
    "set attention encoder": {"n_iters": 3, "num_inducing": 0},
    "decoder": {"n_iters": 3, "decoder_blocks": 1, "num_seeds": 3},
    "pre-norm": {"n_iters": 3, "norm": "pre", "residual": "input", "scale": "head"},
    "pct normalisation": {"normalizer": "pct"},
}


def small(**options):
    torch.manual_seed(0)
    return SetTransformer(**{**SMALL, **options}).double()


def test_published_configuration_has_the_stated_parameters():
    assert sum(p.numel() for p in create_model("set_sinkformer_modelnet40").parameters()) == 1_145_384


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_a_padded_batch_gives_the_results_of_its_clouds(options, ragged, batch_is_its_clouds):
    batch_is_its_clouds(small(**options), *ragged)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_the_order_of_the_points_does_not_matter(options, ragged, value_and_gradient):
    points, mask, _ = ragged
    model, order = small(**options), torch.randperm(11, generator=torch.Generator().manual_seed(1))
    straight = value_and_gradient(model, points, mask=mask)
    shuffled = value_and_gradient(model, points[:, order], mask=mask[:, order])
    torch.testing.assert_close(shuffled.output, straight.output)
    torch.testing.assert_close(shuffled.inputs[0], straight.inputs[0][:, order])
    torch.testing.assert_close(shuffled.parameters, straight.parameters)


def test_float32_agrees_to_a_hundred_thousandth():
    torch.manual_seed(0)
    model = create_model("set_sinkformer_modelnet40", n_iters=5).eval()
    points, mask = torch.randn(2, 60, 3), torch.arange(60) < torch.tensor([[60], [37]])
    logits = model(points, mask)
    for i, n in enumerate((60, 37)):
        torch.testing.assert_close(logits[i], model(points[i : i + 1, :n])[0], rtol=0, atol=1e-5)
    order = torch.randperm(60)
    torch.testing.assert_close(model(points[:, order], mask[:, order]), logits, rtol=0, atol=1e-5)


def test_ragged_clouds_come_from_torch_geometric():
    generator = torch.Generator().manual_seed(0)
    clouds = [Data(pos=torch.randn(n, 3, generator=generator, dtype=torch.float64)) for n in (6, 9, 4)]
    batch = Batch.from_data_list(clouds)
    points, mask = to_dense_batch(batch.pos, batch.batch)
    model = small(n_iters=3).eval()
    logits = model(points, mask)
    for cloud, expected in zip(clouds, logits, strict=True):
        torch.testing.assert_close(model(cloud.pos.unsqueeze(0))[0], expected)


def test_a_cloud_without_points_is_harmless(ragged, value_and_gradient):
    points, mask, _ = ragged
    mask = mask.clone()
    mask[1] = False
    model = small(n_iters=3)
    outcome = value_and_gradient(model, points, mask=mask)
    assert outcome.output.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in (*outcome.inputs, *outcome.parameters.values()))
    torch.testing.assert_close(outcome.output[2], model(points[2:, :7]).detach()[0])


def test_pooling_collapse_reaches_the_model():
    points = torch.randn(2, 9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for options, collapses in (({}, True), ({"pool_normalizer": "softmax"}, False), ({"num_seeds": 2}, False)):
        model = small(n_iters=3, **options)
        before = model(points)
        torch.nn.init.normal_(model.pool.attention.key.weight)
        changed = (model(points) - before).abs().max()
        assert changed < 1e-12 if collapses else changed > 1e-4, options


def test_pool_normalizer_takes_its_own_options():
    model = small(n_iters=3, pool_normalizer="sinkhorn", pool_normalizer_options={"n_iters": 1})
    assert model.pool.attention.normalizer.n_iters == 1
    assert model.encoder[0].gather.normalizer.n_iters == 3
    assert small(n_iters=3).pool.attention.normalizer.n_iters == 3


def test_copies_and_pickles():
    model, points = small(n_iters=3).eval(), torch.randn(1, 5, 3, dtype=torch.float64)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(points), model(points))


@pytest.mark.parametrize(
    ("points", "mask", "message"),
    [
        (torch.zeros(2, 3, 5), None, r"points must be floating, \(batch, points, 3\), got \(2, 3, 5\)"),
        (torch.zeros(5, 3), None, r"points must be floating"),
        (torch.zeros(2, 5, 3, dtype=torch.int64), None, r"got \(2, 5, 3\) torch\.int64"),
        (torch.zeros(2, 0, 3), None, "clouds without a single point"),
        (torch.zeros(2, 5, 3), torch.ones(2, 5), r"mask must be boolean, True = a real point, got torch\.float32"),
        (torch.zeros(2, 5, 3), torch.ones(2, 4, dtype=torch.bool), r"mask must have the shape \(2, 5\)"),
    ],
)
@pytest.mark.parametrize("name", ["set_sinkformer_modelnet40", "pct_sinkformer_modelnet40"])
def test_bad_clouds_are_refused_by_every_model(name, points, mask, message):
    model = create_model(name, num_classes=3)
    with pytest.raises(ValueError, match=message):
        model(points, mask)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoder_blocks": 0}, "encoder_blocks must be at least 1, got 0"),
        ({"num_classes": 0}, "num_classes must be at least 1"),
        ({"pool_normalizer_options": {"n_iters": 1}}, "pool_normalizer_options needs a pool_normalizer"),
        ({"normalizer": "sinkhron"}, "unknown normalizer 'sinkhron'"),
        ({"num_heads": 5}, "num_heads must divide the width 12"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)
