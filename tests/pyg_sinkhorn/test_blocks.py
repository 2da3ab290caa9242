import pytest
import torch
from pyg_sinkhorn import ISAB, MAB, PMA, SAB
from sinkhorn_attention.reference import sinkhorn_attention_reference, sinkhorn_reference
from torch import nn
from torch.nn.functional import layer_norm

DIM, HEADS = 12, 3
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape):
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def make(block, *args, seed=0, **kwargs):
    torch.manual_seed(seed)
    module = block(*args, **kwargs).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


def written_out(block, query, key, n_iters, query_mask=None, key_mask=None):
    """The published block on paper: one head after the other, the reference in the middle."""
    q, k, v = block.query(query), block.key(key), block.value(key)
    heads = [
        sinkhorn_attention_reference(
            q[..., part], k[..., part], v[..., part], n_iters, DIM**-0.5, None, query_mask, key_mask
        )
        for part in torch.arange(DIM).chunk(HEADS)
    ]
    hidden = q + torch.cat(heads, -1)
    hidden = layer_norm(hidden, (DIM,), block.norm_attention.weight, block.norm_attention.bias)
    hidden = hidden + torch.relu(block.feedforward(hidden))
    return layer_norm(hidden, (DIM,), block.norm_output.weight, block.norm_output.bias)


@pytest.mark.parametrize("n_iters", [1, 2, 3, 6])
def test_mab_is_the_published_block(n_iters, value_and_gradient):
    block, tokens = make(MAB, 5, 4, DIM, HEADS, n_iters=n_iters), (normal(2, 6, 5), normal(2, 8, 4))
    want = value_and_gradient(block, *tokens, on_paper=lambda query, key: written_out(block, query, key, n_iters))
    torch.testing.assert_close(value_and_gradient(block, *tokens), want)


@pytest.mark.parametrize("norm", ["post", "pre", "none"])
@pytest.mark.parametrize("residual", ["projected", "input"])
@pytest.mark.parametrize(
    ("block", "args"), [(SAB, (3, DIM, HEADS)), (SAB, (DIM, DIM, HEADS)), (ISAB, (3, DIM, HEADS, 4))]
)
def test_padding_changes_nothing_in_an_equivariant_block(block, args, norm, residual, value_and_gradient):
    module = make(block, *args, n_iters=4, norm=norm, residual=residual, row_mass="uniform")
    sizes = [5, 3]
    mask = torch.arange(7) < torch.tensor(sizes).unsqueeze(1)
    x = torch.full((2, 7, args[0]), torch.nan, dtype=torch.float64).masked_scatter(
        mask.unsqueeze(-1), normal(8, args[0])
    )
    weight = normal(2, 7, DIM)
    padded = value_and_gradient(module, x, mask=mask, weight=weight)
    assert (padded.output[~mask] == 0).all()
    assert (padded.inputs[0][~mask] == 0).all()
    alone = [value_and_gradient(module, x[i : i + 1, :n], weight=weight[i : i + 1, :n]) for i, n in enumerate(sizes)]
    for i, n in enumerate(sizes):
        torch.testing.assert_close(padded.output[i, :n], alone[i].output[0])
        torch.testing.assert_close(padded.inputs[0][i, :n], alone[i].inputs[0][0])
    for name, gradient in padded.parameters.items():
        torch.testing.assert_close(gradient, alone[0].parameters[name] + alone[1].parameters[name])


@pytest.mark.parametrize("block", [SAB, ISAB])
def test_set_blocks_are_permutation_equivariant(block, value_and_gradient):
    module, x, weight = make(block, 3, DIM, HEADS, n_iters=5), normal(2, 6, 3), normal(2, 6, DIM)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    straight = value_and_gradient(module, x, weight=weight)
    shuffled = value_and_gradient(module, x[:, order], weight=weight[:, order])
    torch.testing.assert_close(shuffled.output, straight.output[:, order])
    torch.testing.assert_close(shuffled.inputs[0], straight.inputs[0][:, order])
    torch.testing.assert_close(shuffled.parameters, straight.parameters)


def test_pooling_is_permutation_invariant(value_and_gradient):
    module, x = make(PMA, DIM, HEADS, num_seeds=2, n_iters=3), normal(2, 6, DIM)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    straight, shuffled = value_and_gradient(module, x), value_and_gradient(module, x[:, order])
    torch.testing.assert_close(shuffled.output, straight.output)
    torch.testing.assert_close(shuffled.inputs[0], straight.inputs[0][:, order])


@pytest.mark.parametrize("n_iters", [2, 3, 4, 7])
def test_sinkhorn_pooling_with_one_seed_is_mean_pooling(n_iters, value_and_gradient):
    module, x = make(PMA, DIM, HEADS, n_iters=n_iters, norm="none"), normal(2, 6, DIM)
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    pooled = value_and_gradient(module, x, mask=mask)
    block = module.attention
    mean = (block.value(x) * mask.unsqueeze(-1)).sum(1, keepdim=True) / mask.sum(1).view(2, 1, 1)
    hidden = block.query(module.seeds) + mean
    torch.testing.assert_close(pooled.output, (hidden + torch.relu(block.feedforward(hidden))).detach())
    # Keys and scores play no part, so nothing is learned through them.
    assert pooled.parameters["attention.key.weight"].abs().max() < 1e-12
    assert pooled.parameters["attention.value.weight"].abs().max() > 1e-3


def test_pooling_does_not_collapse_with_softmax_or_two_seeds():
    x = normal(2, 6, DIM)
    for options in ({"normalizer": "softmax"}, {"n_iters": 1}, {"n_iters": 3, "num_seeds": 2}):
        module = make(PMA, DIM, HEADS, norm="none", **options)
        before = module(x)
        nn.init.normal_(module.attention.key.weight)
        assert (module(x) - before).abs().max() > 1e-3, options


def test_uniform_rows_divide_by_the_valid_queries():
    one, uniform = (make(MAB, 4, 4, DIM, HEADS, n_iters=3, norm="none", row_mass=mass) for mass in ("one", "uniform"))
    for module in (one, uniform):
        nn.init.zeros_(module.feedforward.weight)
        nn.init.zeros_(module.feedforward.bias)
    x, mask = normal(1, 6, 4), torch.tensor([[True, True, True, True, False, False]])
    base = one.query(x)
    added = (one(x, x, mask, mask) - base)[:, :4]
    torch.testing.assert_close((uniform(x, x, mask, mask) - base)[:, :4], added / 4)
    torch.testing.assert_close(uniform(x, x) - base, (one(x, x) - base) / 6)


@pytest.mark.parametrize(("scale", "factor"), [("width", DIM**-0.5), ("head", (DIM / HEADS) ** -0.5), ("none", 1.0)])
def test_scale_of_the_scores(scale, factor):
    module = make(MAB, 4, 4, DIM, HEADS, n_iters=3, norm="none", scale=scale)
    x = normal(1, 6, 4)
    q, k, v = (
        getattr(module, name)(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for name in ("query", "key", "value")
    )
    coupling = sinkhorn_reference(factor * q @ k.transpose(-1, -2), 3)
    hidden = module.query(x) + (coupling @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(module(x, x), hidden + torch.relu(module.feedforward(hidden)))


def test_residual_on_the_input_needs_the_blocks_width():
    x = normal(1, 6, DIM)
    module = make(MAB, DIM, DIM, DIM, HEADS, norm="none", residual="input")
    for layer in (module.value, module.feedforward):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    torch.testing.assert_close(module(x, x), x)
    narrow = make(MAB, 3, DIM, DIM, HEADS, norm="none", residual="input")
    for layer in (narrow.value, narrow.feedforward):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    torch.testing.assert_close(narrow(x[..., :3], x), narrow.query(x[..., :3]))


def test_attention_dropout_acts_in_training_only():
    module, x = make(MAB, DIM, DIM, DIM, HEADS, attn_dropout=0.5), normal(1, 6, DIM)
    assert not torch.equal(module(x, x), module(x, x))
    module.eval()
    assert torch.equal(module(x, x), module(x, x))


@pytest.mark.parametrize("block", [SAB, ISAB, PMA])
def test_a_cloud_without_points_is_harmless(block, value_and_gradient):
    module = make(block, DIM, *(() if block is PMA else (DIM,)), HEADS, n_iters=3)
    mask = torch.tensor([[True] * 4, [False] * 4])
    x = normal(2, 4, DIM)
    with torch.autograd.detect_anomaly(check_nan=True):
        both = value_and_gradient(module, x, mask=mask, weight=torch.ones(1, dtype=torch.float64))
    assert both.output.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in both.parameters.values())
    torch.testing.assert_close(both.output[:1], module(x[:1]).detach())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 5}, "num_heads must divide the width 12, got 5"),
        ({"norm": "batch"}, "norm must be one of post, pre, none, got 'batch'"),
        ({"scale": "full"}, "scale must be one of width, head, none"),
        ({"residual": "none"}, "residual must be one of"),
        ({"row_mass": "half"}, "row_mass must be one of one, uniform"),
        ({"normalizer": "sinkhron"}, "unknown normalizer 'sinkhron'"),
        ({"normalizer": "softmax", "n_iters": 3}, "n_iters"),
        ({"n_iters": 0}, "n_iters must be an integer >= 1"),
        ({"n_iters": 3, "normalizer_options": {"n_iters": 5}}, "n_iters is given twice"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        MAB(4, 4, DIM, **{"num_heads": HEADS, **arguments})


def test_masks_of_the_wrong_kind_are_refused():
    module, x = make(SAB, 4, DIM, HEADS), normal(2, 6, 4)
    with pytest.raises(ValueError, match=r"query_mask must be boolean, True = a real point, got torch\.int64"):
        module(x, torch.ones(2, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"query_mask must have the shape \(2, 6\)"):
        module(x, torch.ones(6, 2, dtype=torch.bool))
