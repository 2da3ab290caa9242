import pytest
import torch
from pyg_sinkhorn import OffsetAttention, PointCloudTransformer, SampleAndGroup, create_model
from pyg_sinkhorn.point_cloud_transformer import PointwiseLayer, pool_max
from sinkhorn_attention.reference import sinkhorn_attention_reference
from torch import nn

SMALL = {
    "num_classes": 5,
    "embed_dim": 4,
    "num_samples": (6, 4),
    "num_neighbors": 3,
    "num_layers": 2,
    "fuse_dim": 12,
    "head_dims": (8, 6),
    "dropout": 0.0,
}
NORMALIZERS = {
    "pct": {"normalizer": "pct"},
    "softmax": {"normalizer": "softmax"},
    "sinkhorn": {"normalizer": "sinkhorn", "n_iters": 3},
    "even count, scaled": {"normalizer": "sinkhorn", "n_iters": 4, "scale": "head"},
}


def small(train=False, **options):
    """A small model whose running statistics are not the trivial ones, with weights that let the clouds through."""
    torch.manual_seed(0)
    model = PointCloudTransformer(**{**SMALL, **options}).double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=2 * module.in_features**-0.5)
    return model.train(train)


def test_published_configuration_has_the_stated_parameters():
    assert sum(p.numel() for p in create_model("pct_modelnet40").parameters()) == 2_876_136


@pytest.mark.parametrize("options", NORMALIZERS.values(), ids=NORMALIZERS)
def test_a_padded_batch_gives_the_results_of_its_clouds(options, ragged, batch_is_its_clouds):
    batch_is_its_clouds(small(**options), *ragged)  # the second cloud has fewer points than samples are taken


@pytest.mark.parametrize("normalizer", ["pct", "sinkhorn"])
def test_a_padded_lattice_gives_the_result_of_the_lattice(normalizer):
    """Its many equal distances leave the choice of neighbours open."""
    grid = torch.cartesian_prod(*[torch.arange(5.0)] * 3) / 3
    alone = grid[torch.randperm(125, generator=torch.Generator().manual_seed(0))[:90]][None]
    model = small(normalizer=normalizer, num_samples=(32, 16), num_neighbors=8).float()
    padded = nn.functional.pad(alone, (0, 0, 0, 400))
    out = model(padded, torch.arange(490)[None] < 90)
    torch.testing.assert_close(out, model(alone), atol=1e-6, rtol=1e-6)


def test_padding_stays_out_of_the_batch_statistics(ragged, value_and_gradient):
    points, mask, _ = ragged
    outcomes, buffers = [], []
    for width in (9, 11):  # the longest cloud has 9 points
        model = small(train=True, n_iters=3)
        outcomes.append(value_and_gradient(model, points[:, :width], mask=mask[:, :width]))
        buffers.append(dict(model.named_buffers()))
    torch.testing.assert_close(outcomes[0].output, outcomes[1].output)
    torch.testing.assert_close(outcomes[0].inputs[0], outcomes[1].inputs[0][:, :9])
    torch.testing.assert_close(outcomes[0].parameters, outcomes[1].parameters)
    torch.testing.assert_close(buffers[0], buffers[1])


def test_a_mask_without_padding_changes_nothing_in_training(value_and_gradient):
    points = torch.randn(2, 9, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    without = value_and_gradient(small(train=True), points)
    masked = value_and_gradient(small(train=True), points, mask=torch.ones(2, 9, dtype=torch.bool))
    torch.testing.assert_close(masked, without)


@pytest.mark.parametrize("options", NORMALIZERS.values(), ids=NORMALIZERS)
@pytest.mark.parametrize("train", [False, True])
def test_the_order_of_the_points_does_not_matter(options, train, ragged, value_and_gradient):
    points, mask, _ = ragged
    order = torch.randperm(11, generator=torch.Generator().manual_seed(1))
    straight = value_and_gradient(small(train, **options), points, mask=mask)
    shuffled = value_and_gradient(small(train, **options), points[:, order], mask=mask[:, order])
    torch.testing.assert_close(shuffled.output, straight.output)
    torch.testing.assert_close(shuffled.inputs[0], straight.inputs[0][:, order])
    torch.testing.assert_close(shuffled.parameters, straight.parameters)


def test_float32_agrees_to_a_hundred_thousandth():
    torch.manual_seed(0)
    model = create_model("pct_sinkformer_modelnet40", num_samples=(40, 20), num_neighbors=8)
    points, mask = torch.randn(2, 80, 3), torch.arange(80) < torch.tensor([[80], [51]])
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.momentum = 1.0
    model(points, mask)  # running statistics of these clouds: with those of a new model nearly nothing gets through
    logits = model.eval()(points, mask)
    assert (logits[0] - logits[1]).abs().max() > 0.05
    order = torch.randperm(80)
    shuffled = model(points[:, order], mask[:, order])
    for i, n in enumerate((80, 51)):
        assert (model(points[i : i + 1, :n])[0] - logits[i]).norm() < 1e-5 * logits[i].norm()
        assert (shuffled[i] - logits[i]).norm() < 1e-5 * logits[i].norm()


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("empty", [[1], [0, 1, 2]])
def test_clouds_without_points_are_harmless(train, empty, ragged, value_and_gradient):
    points, mask, _ = ragged
    mask = mask.clone()
    mask[empty] = False
    model = small(train, n_iters=3)
    outcome = value_and_gradient(model, points, mask=mask)
    assert outcome.output.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in (*outcome.inputs, *outcome.parameters.values()))
    assert all(buffer.isfinite().all() for buffer in model.buffers())
    if not train and empty == [1]:
        torch.testing.assert_close(outcome.output[2], model(points[2:, :7]).detach()[0])


@pytest.mark.parametrize("n_iters", [1, 4, 5])
def test_offset_attention_with_the_reference_in_its_middle(n_iters, value_and_gradient):
    torch.manual_seed(0)
    layer = OffsetAttention(8, "sinkhorn", n_iters).double()
    assert layer.query_key.weight.shape == (2, 8)

    def on_paper(x):
        shared = layer.query_key(x)
        attended = sinkhorn_attention_reference(shared, shared, layer.value(x), n_iters, 1.0)
        offset = layer.transform.linear(x - attended)
        mean, var = offset.mean((0, 1)), offset.var((0, 1), correction=0)
        norm = layer.transform.norm
        return x + torch.relu((offset - mean) / (var + norm.eps).sqrt() * norm.weight + norm.bias)

    x = torch.randn(2, 6, 8, dtype=torch.float64)
    torch.testing.assert_close(value_and_gradient(layer, x), value_and_gradient(layer, x, on_paper=on_paper))


def test_grouping_takes_the_maximum_over_each_samples_neighbours():
    torch.manual_seed(0)
    group = SampleAndGroup(2, 3, 2).double().eval()
    points, x = torch.randn(1, 7, 3, dtype=torch.float64), torch.randn(1, 7, 2, dtype=torch.float64)
    centers, features, mask = group(points, x, None)
    assert mask is None
    for center, feature in zip(centers[0], features[0], strict=True):
        distance = (points[0] - center).norm(dim=-1)
        own, nearest = x[0, distance.argmin()], x[0, distance.argsort()[:2]]
        described = torch.cat([nearest - own, own.expand(2, 2)], dim=-1)
        for layer in group.local:
            described = layer(described)
        torch.testing.assert_close(feature, described.amax(0))


def test_pointwise_layer_keeps_its_statistics_from_an_empty_batch():
    layer = PointwiseLayer(3, 4)
    out = layer(torch.randn(2, 5, 3), torch.zeros(2, 5, dtype=torch.bool))
    assert out.shape == (2, 5, 4)
    assert (out == 0).all()
    assert (layer.norm.running_mean == 0).all()
    assert (layer.norm.running_var == 1).all()


def test_pool_max_sees_valid_tokens_only():
    x = torch.tensor([[[-3.0, 1.0], [-5.0, -2.0], [9.0, 9.0]]]).repeat(2, 1, 1)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    assert pool_max(x, mask).tolist() == [[-3.0, 1.0], [0.0, 0.0]]
    assert pool_max(x, None).tolist() == [[9.0, 9.0]] * 2


def test_normalizers_make_a_difference(ragged):
    points, mask, _ = ragged
    logits = [small(**options)(points, mask) for options in NORMALIZERS.values()]
    for i, a in enumerate(logits):
        assert all((a - b).abs().max() > 1e-2 for b in logits[:i])


def test_a_training_batch_of_one_cloud_is_refused():
    with pytest.raises(ValueError, match="at least 2 clouds"):
        small(train=True)(torch.randn(1, 9, 3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": (6,)}, "num_samples must be two positive numbers"),
        ({"num_neighbors": 0}, "num_neighbors positive"),
        ({"scale": "width"}, "scale must be one of none, head, got 'width'"),
        ({"normalizer": "pct", "n_iters": 3}, "n_iters"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        small(**options)
