import copy
import pickle

import pytest
import torch
from pyg_sinkhorn import convert, create_model
from sinkhorn_attention.reference import sinkhorn_attention_reference
from torch import nn
from torch_geometric.nn import (
    GINConv,
    GPSConv,
    GraphMultisetTransformer,
    MultiAggregation,
    PointTransformerConv,
    Sequential,
    SetTransformerAggregation,
)
from torch_geometric.nn.aggr.utils import InducedSetAttentionBlock, MultiheadAttentionBlock

CHANNELS = 8


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def built(build):
    torch.manual_seed(0)
    model = build().double()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.5)
    return model


def aggregation():
    return built(lambda: SetTransformerAggregation(CHANNELS, 2, 2, 1, heads=2, layer_norm=True))


GRAPH_SIZES = [5, 3, 6]
INDEX = torch.arange(3).repeat_interleave(torch.tensor(GRAPH_SIZES))
NODES = normal(sum(GRAPH_SIZES), CHANNELS)
# Neighbours on a ring within each graph, in both directions.
EDGES = torch.cat(
    [
        torch.stack([torch.arange(n), torch.arange(n).roll(shift)]) + sum(GRAPH_SIZES[:g])
        for g, n in enumerate(GRAPH_SIZES)
        for shift in (1, -1)
    ],
    dim=1,
)

MODELS = {
    "set transformer": (aggregation, {"index": INDEX}),
    "multiset transformer": (lambda: built(lambda: GraphMultisetTransformer(CHANNELS, 3, heads=2)), {"index": INDEX}),
    "gps": (
        lambda: built(lambda: GPSConv(CHANNELS, GINConv(nn.Linear(CHANNELS, CHANNELS)), 2, norm="layer_norm")),
        {"edge_index": EDGES, "batch": INDEX},
    ),
    "aggregations": (
        lambda: built(
            lambda: MultiAggregation(
                ["mean", "max", "min"],
                mode="attn",
                mode_kwargs={"in_channels": CHANNELS, "out_channels": CHANNELS, "num_heads": 2},
            )
        ),
        {"index": INDEX},
    ),
    "point transformer": (
        lambda: built(
            lambda: Sequential("x, pos, edges", [(PointTransformerConv(CHANNELS, CHANNELS), "x, pos, edges -> x")])
        ),
        {"pos": normal(sum(GRAPH_SIZES), 3), "edges": EDGES},
    ),
}


@pytest.mark.parametrize(("build", "inputs"), MODELS.values(), ids=MODELS)
def test_one_half_step_is_the_original_and_five_are_not(build, inputs, value_and_gradient):
    original, converted = build(), build()
    names = convert(converted, "sinkhorn", n_iters=1)
    assert names
    assert list(converted.state_dict()) == list(original.state_dict())
    want, got = (value_and_gradient(model, NODES, **inputs) for model in (original, converted))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    assert convert(converted, "sinkhorn", n_iters=5) == names
    changed = value_and_gradient(converted, NODES, **inputs)
    assert (changed.output - want.output).abs().max() > 1e-3
    assert all(gradient.isfinite().all() for gradient in changed.parameters.values())
    convert(converted, "softmax")
    torch.testing.assert_close(value_and_gradient(converted, NODES, **inputs).output, want.output)


@pytest.mark.parametrize(("build", "inputs"), MODELS.values(), ids=MODELS)
def test_converted_models_copy_pickle_and_load(build, inputs):
    original, converted = build(), build()
    convert(converted, "sinkhorn", n_iters=3)
    expected = converted(NODES, **inputs)
    assert torch.equal(copy.deepcopy(converted)(NODES, **inputs), expected)
    if not isinstance(converted, Sequential):  # torch_geometric's own Sequential does not pickle
        assert torch.equal(pickle.loads(pickle.dumps(converted))(NODES, **inputs), expected)
    original.load_state_dict(converted.state_dict())
    convert(original, "sinkhorn", n_iters=3)
    assert torch.equal(original(NODES, **inputs), expected)


@pytest.mark.parametrize("n_iters", [2, 3, 6])
@pytest.mark.parametrize("name", ["set transformer", "multiset transformer", "gps", "point transformer"])
def test_a_batch_of_graphs_gives_each_graphs_result(name, n_iters):
    build, inputs = MODELS[name]
    model = build().eval()
    convert(model, "sinkhorn", n_iters=n_iters)
    together = model(NODES, **inputs)
    start = 0
    for g, n in enumerate(GRAPH_SIZES):
        own = slice(start, start + n)
        alone = {}
        for key, tensor in inputs.items():
            if key in ("edge_index", "edges"):
                alone[key] = tensor[:, (tensor[0] >= start) & (tensor[0] < start + n)] - start
            else:
                alone[key] = tensor[own] - g if key in ("index", "batch") else tensor[own]
        expected = together[own] if name in ("gps", "point transformer") else together[g : g + 1]
        torch.testing.assert_close(model(NODES[own], **alone), expected)
        start += n


def test_a_block_with_the_reference_in_its_middle(value_and_gradient):
    block = built(lambda: MultiheadAttentionBlock(CHANNELS, 2))
    convert(block, "sinkhorn", n_iters=4)
    x, y = normal(2, 4, CHANNELS, seed=1), normal(2, 5, CHANNELS, seed=2)
    x_mask, y_mask = torch.arange(4) < torch.tensor([[4], [2]]), torch.arange(5) < torch.tensor([[3], [5]])

    def on_paper(x, y):
        weights, biases = (getattr(block.attn, f"in_proj_{kind}").chunk(3) for kind in ("weight", "bias"))
        q, k, v = (
            (t @ w.T + b).unflatten(-1, (2, -1)).transpose(1, 2)
            for t, w, b in zip((x, y, y), weights, biases, strict=True)
        )
        masks = x_mask.unsqueeze(1), y_mask.unsqueeze(1)
        out = sinkhorn_attention_reference(q, k, v, 4, (CHANNELS // 2) ** -0.5, None, *masks)
        out = block.attn.out_proj(out.transpose(1, 2).flatten(2)) * x_mask.unsqueeze(-1)
        out = block.layer_norm1(out + x)
        return block.layer_norm2(out + block.lin(out).relu())

    got = value_and_gradient(block, x, y, x_mask=x_mask, y_mask=y_mask)
    torch.testing.assert_close(got, value_and_gradient(block, x, y, on_paper=on_paper))


def test_padded_queries_of_an_induced_block_take_no_mass():
    block = built(lambda: InducedSetAttentionBlock(CHANNELS, 3, heads=2))
    convert(block, "sinkhorn", n_iters=4)
    x = normal(2, 6, CHANNELS)
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    torch.testing.assert_close(block(x, mask)[1, :4], block(x[1:, :4], mask[1:, :4])[0])


def test_a_graph_without_nodes_is_harmless(value_and_gradient):
    model = aggregation()
    convert(model, "sinkhorn", n_iters=3)
    index = INDEX + (INDEX >= 1).long()  # graph 1 is empty now
    outcome = value_and_gradient(model, NODES, index=index, dim_size=4)
    assert outcome.output.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in (*outcome.inputs, *outcome.parameters.values()))
    torch.testing.assert_close(outcome.output[[0, 2, 3]], model(NODES, INDEX).detach())


def test_layers_are_selected_and_the_rest_keeps_softmax():
    model = aggregation()
    assert convert(model, "sinkhorn", n_iters=3, layers="encoders*") == ["encoders.0.mab.attn", "encoders.1.mab.attn"]
    assert type(model.pma.mab.attn) is nn.MultiheadAttention
    assert type(model.pma.mab) is MultiheadAttentionBlock
    assert convert(aggregation(), "sinkhorn", layers=1) == ["decoders.0.mab.attn"]
    assert convert(aggregation(), "sinkhorn", layers=[0, -1]) == ["encoders.0.mab.attn", "decoders.0.mab.attn"]


def test_a_layer_used_twice_is_replaced_twice_and_keeps_its_parameters():
    layer = PointTransformerConv(CHANNELS, CHANNELS, attn_nn=nn.Linear(CHANNELS, CHANNELS), aggr="mean")
    model = nn.ModuleDict({"first": layer, "again": layer}).double().eval()
    parameters = dict(model.named_parameters())
    assert convert(model, "sinkhorn", n_iters=3) == ["first"]
    assert model["first"] is model["again"]
    assert model["first"].n_iters == 3
    assert model["first"].aggr == "mean"
    assert not model["first"].training
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())


class OwnForward(nn.MultiheadAttention):
    def forward(self, query, key, value, **kwargs):
        return query, None


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (lambda: nn.ModuleList([MultiheadAttentionBlock(8), OwnForward(8, 2)]), {}, "OwnForward may have a forward"),
        (lambda: nn.Linear(2, 2), {}, "Linear has neither a torch.nn.MultiheadAttention outside decoders nor"),
        (MODELS["point transformer"][0], {"normalizer": "pct"}, "takes sinkhorn or softmax over its edges, not pct"),
        (MODELS["point transformer"][0], {"gradient": "detached"}, "unrolled gradient only, not detached"),
        (lambda: PointTransformerConv(2, 2), {}, "build SinkhornPointTransformerConv"),
        (aggregation, {"normalizer": "sinkhron"}, "unknown normalizer 'sinkhron'"),
        (aggregation, {"n_iters": 0}, "n_iters must be an integer >= 1"),
        (aggregation, {"layers": "no*"}, "matches no attention module"),
    ],
)
def test_what_cannot_be_converted_is_refused_and_left_alone(build, options, message):
    model = build()
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        convert(model, **options)
    assert [type(module) for module in model.modules()] == before


def test_a_normalizer_with_parameters_for_its_heads():
    """One that owns parameters is made from the sizes of each module's heads."""
    model = nn.Sequential(MultiheadAttentionBlock(8, heads=2))
    assert convert(model, "lot", n_iters=3) == ["0.attn"]
    assert model[0].attn.normalizer.pivot.shape[::2] == (2, 4)
    x, mask = torch.randn(2, 5, 8), torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.bool)
    torch.testing.assert_close(model[0](x, x, mask, mask)[1:, :3], model[0](x[1:, :3], x[1:, :3]))


def test_without_strict_the_rest_is_converted():
    assert convert(nn.Linear(2, 2), strict=False) == []
    model = nn.ModuleList([PointTransformerConv(CHANNELS, CHANNELS), MultiheadAttentionBlock(CHANNELS)])
    assert convert(model, "pct", strict=False) == ["1.attn"]
    assert type(model[0]) is PointTransformerConv
    model = nn.ModuleList([OwnForward(8, 2), MultiheadAttentionBlock(8)])
    with pytest.warns(UserWarning, match="OwnForward may have a forward of its own"):
        assert convert(model, strict=False) == ["1.attn"]


def test_decoders_are_left_alone():
    model = nn.ModuleList([nn.TransformerDecoderLayer(8, 2), nn.TransformerEncoderLayer(8, 2)])
    assert convert(model, "sinkhorn") == ["1.self_attn"]


BLOCKS = {
    "set_transformer_modelnet40": ({"hidden": 8, "num_heads": 2, "num_inducing": 3}, "softmax", 5),
    "pct_modelnet40": (
        {"embed_dim": 4, "num_samples": (8, 6), "num_neighbors": 3, "fuse_dim": 8, "head_dims": (8, 4)},
        "pct",
        4,
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_the_blocks_of_this_package(name):
    """All blocks converted are the model built with that normalizer; some converted, neither model."""
    options, own, number = BLOCKS[name]
    points = normal(2, 12, 3)

    def model(normalizer, n_iters=None):
        torch.manual_seed(0)
        # In training, where batch normalisation keeps what the attention does from being lost in small numbers.
        made = create_model(name, num_classes=4, normalizer=normalizer, n_iters=n_iters, dropout=0.0, **options)
        return made.double()

    whole, before, after = model(own), model(own)(points), model("sinkhorn", 5)(points)
    assert (before - after).abs().max() > 1e-6
    names = convert(whole, "sinkhorn", n_iters=5)
    assert len(names) == number
    torch.testing.assert_close(whole(points), after, rtol=0, atol=0)
    assert convert(whole, own) == names
    torch.testing.assert_close(whole(points), before, rtol=0, atol=0)
    last = model(own)
    assert convert(last, "sinkhorn", n_iters=5, layers=[0]) == names[:1]
    mixed = last(points)
    assert (mixed - before).abs().max() > 1e-6
    assert (mixed - after).abs().max() > 1e-6
    owning = model(own).eval()
    assert convert(owning, "lot", n_iters=3) == names
    assert owning.get_submodule(names[0]).normalizer.pivot.dtype == torch.float64
    assert not owning.get_submodule(names[0]).normalizer.training
