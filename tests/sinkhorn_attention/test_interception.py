"""convert on modules that this project has never named, by catching their scaled_dot_product_attention."""

import copy
import io
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from sinkhorn_attention import convert, record_attention, sinkhorn_attention
from sinkhorn_attention.interception import Intercepted
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    """Somebody's self-attention, with a mask and dropout."""

    def __init__(self, width: int = 16, heads: int = 2, dropout: float = 0.0, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.dropout, self.causal = heads, dropout, causal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout_p = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(query, key, value, mask, dropout_p, is_causal=self.causal)
        return self.proj(out.transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """Queries of one sequence, keys and values of another, whose heads are shared in groups."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        query = self.q(x).unflatten(-1, (4, 4)).transpose(1, 2)
        key, value = self.kv(context).unflatten(-1, (2, 2, 4)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)


def helper(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """A function outside of the class that calls torch's."""
    return F.scaled_dot_product_attention(query, key, value)


class Hidden(nn.Module):
    """Attention whose class does not show what it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return helper(self.scale * x, x, x)


class Block(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.attention, self.norm = Attention(**options), nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


def model(**options) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(**options), Block(**options))


def tokens(n: int = 7) -> Tensor:
    return torch.randn(3, n, 16, generator=torch.Generator().manual_seed(1))


def expected(attention: Attention, x: Tensor, n_iters: int, **options) -> Tensor:
    query, key, value = attention.qkv(x).unflatten(-1, (3, attention.heads, -1)).permute(2, 0, 3, 1, 4)
    out = sinkhorn_attention(query, key, value, n_iters, **options)
    return attention.proj(out.transpose(1, 2).flatten(2))


def test_one_half_step_is_the_stock_model_and_five_are_the_operator() -> None:
    stock, ours, x = model(), model(), tokens()
    assert convert(ours, n_iters=1) == ["0.attention", "1.attention"]
    torch.testing.assert_close(ours(x), stock(x), rtol=1e-5, atol=1e-6)
    convert(ours, n_iters=5)
    attention = ours[0].attention
    torch.testing.assert_close(attention(x), expected(attention, x, 5))
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    (got,) = torch.autograd.grad(attention(leaf).square().sum(), leaf)
    (want,) = torch.autograd.grad(expected(attention, other, 5).square().sum(), other)
    torch.testing.assert_close(got, want)


def test_names_parameters_and_state_dicts_stay() -> None:
    stock, ours = model(), model()
    parameters = dict(ours.named_parameters())
    convert(ours, n_iters=3)
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert all(parameter is parameters[name] for name, parameter in ours.named_parameters())
    stock.load_state_dict(ours.state_dict())
    ours.load_state_dict(stock.state_dict())
    assert isinstance(ours[0].attention, Attention)
    assert isinstance(ours[0].attention, Intercepted)


@pytest.mark.parametrize("n_iters", [3, 4])
def test_copies_pickles_saves_and_checkpoints(n_iters: int) -> None:
    ours, x = model(), tokens()
    convert(ours, n_iters=n_iters)
    want, buffer = ours(x), io.BytesIO()
    torch.save(ours, buffer)
    buffer.seek(0)
    twins = [copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(buffer, weights_only=False)]
    for twin in twins:
        assert type(twin[0].attention) is type(ours[0].attention)
        assert torch.equal(twin(x), want)
    leaf = x.clone().requires_grad_()
    for reentrant in (True, False):
        assert torch.equal(checkpoint(ours, leaf, use_reentrant=reentrant), want)


@pytest.mark.parametrize("n_iters", [3, 4])
def test_compiles_without_a_graph_break_and_exports(n_iters: int) -> None:
    ours, x = model(), tokens()
    convert(ours, n_iters=n_iters)
    torch.compiler.reset()
    torch.testing.assert_close(torch.compile(ours, fullgraph=True, backend="aot_eager")(x), ours(x))
    exported = torch.export.export(ours, (x,), strict=False).module()
    torch.testing.assert_close(exported(x), ours(x))


def test_autocast_leaves_the_half_steps_in_single_precision() -> None:
    ours, x = model(), tokens()
    convert(ours, n_iters=5)
    with torch.autocast("cpu", torch.bfloat16):
        low = ours(x)
    assert (low - ours(x)).abs().max() < 0.1


def test_masks_keep_where_true_and_padding_takes_no_part() -> None:
    attention, x = model()[0].attention, tokens()
    convert(attention, n_iters=4)
    keep = torch.arange(7) < torch.tensor([[7], [5], [2]])
    for mask in (keep[:, None, None], torch.zeros(3, 1, 1, 7).masked_fill(~keep[:, None, None], -1e9)):
        out = attention(x, mask)
        for i, length in enumerate((7, 5, 2)):
            torch.testing.assert_close(out[i, :length], attention(x[i : i + 1, :length])[0], rtol=1e-5, atol=1e-6)
    support = torch.rand(3, 1, 7, 7, generator=torch.Generator().manual_seed(2)) < 0.8
    torch.testing.assert_close(attention(x, support), expected(attention, x, 4, attn_bias=support))


@pytest.mark.parametrize("floating", [False, True])
def test_a_padding_mask_that_the_host_expands_to_all_queries_is_one(floating: bool) -> None:
    """As the transformers package does: (B, 1, n, n), every row alike. A mask that depends on the query is support."""
    attention, x = model()[0].attention, tokens()
    convert(attention, n_iters=4)
    lengths = (7, 5, 2)
    keep = (torch.arange(7) < torch.tensor(lengths).unsqueeze(1))[:, None, None].expand(3, 1, 7, 7)
    mask = torch.zeros(3, 1, 7, 7).masked_fill(~keep, torch.finfo(torch.float32).min) if floating else keep
    for given in (mask, mask.contiguous()):
        out = attention(x, given)
        for i, length in enumerate(lengths):
            torch.testing.assert_close(out[i, :length], attention(x[i : i + 1, :length])[0], rtol=1e-5, atol=1e-6)
    same = mask[1, 0]
    torch.testing.assert_close(attention(x, same)[:, :5], attention(x[:, :5]), rtol=1e-5, atol=1e-6)
    mixed = keep.clone()
    mixed[1] = torch.rand(7, 7, generator=torch.Generator().manual_seed(3)) < 0.8
    out = attention(x, mixed)
    torch.testing.assert_close(out[1:2], expected(attention, x[1:2], 4, attn_bias=mixed[1:2]))
    torch.testing.assert_close(out[2, :2], attention(x[2:, :2])[0], rtol=1e-5, atol=1e-6)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, mask), attention(x, mask))


def test_queries_of_another_sequence_are_not_hidden_by_the_keys_padding() -> None:
    """Not even where both are of one length; groups of heads share their keys."""
    torch.manual_seed(0)
    attention, x, context = CrossAttention(), tokens(6), tokens(7)
    convert(attention, n_iters=3)
    keep = torch.arange(7) < 5
    torch.testing.assert_close(attention(x, context, keep), attention(x, context[:, :5]), rtol=1e-5, atol=1e-6)
    same_length = torch.arange(6) < 5
    by_keyword = attention(x, context=context[:, :6], mask=same_length)
    got = attention(x, context[:, :6], same_length)
    assert torch.equal(by_keyword, got)
    torch.testing.assert_close(got, attention(x, context[:, :5]), rtol=1e-5, atol=1e-6)
    assert (got[:, 5] != 0).any()


def test_positions_beside_the_tokens_are_no_other_sequence() -> None:
    class WithPositions(nn.Module):
        def forward(self, x: Tensor, pos: Tensor, mask: Tensor | None = None) -> Tensor:
            return F.scaled_dot_product_attention(x + pos, x + pos, x, attn_mask=mask)

    attention, x, pos = WithPositions(), tokens(6), tokens(6).flip(0)
    convert(attention, n_iters=4)
    got = attention(x, pos, torch.arange(6) < 4)
    torch.testing.assert_close(got[:, :4], attention(x[:, :4], pos[:, :4]), rtol=1e-5, atol=1e-6)


def test_causal_calls_are_refused_unless_rows_are_independent() -> None:
    x = tokens()
    ours = model(causal=True)
    convert(ours, n_iters=3)
    with pytest.raises(ValueError, match="cannot be causal"):
        ours(x)
    stock = model(causal=True)
    convert(ours, "softmax")
    torch.testing.assert_close(ours(x), stock(x), rtol=1e-5, atol=1e-6)


def test_dropout_acts_in_training_only() -> None:
    ours, x = model(dropout=1.0), tokens()
    convert(ours, n_iters=3)
    attention = ours[0].attention
    torch.testing.assert_close(attention(x), attention.proj.bias.expand(3, 7, 16))
    assert (attention.eval()(x) - attention.proj.bias).abs().max() > 1e-3


def test_what_calls_it_elsewhere_is_found_by_an_example() -> None:
    hidden, x = nn.Sequential(Hidden(), nn.Linear(16, 16)), tokens()
    with pytest.raises(ValueError, match="no module that calls scaled_dot_product_attention"):
        convert(hidden, n_iters=5)
    assert convert(hidden, n_iters=5, example=(x,)) == ["0"]
    torch.testing.assert_close(hidden[0](x), sinkhorn_attention(x, x, x, 5))
    other = nn.Sequential(Hidden())
    assert convert(other, n_iters=5, example={"input": x}) == ["0"]


def test_a_forward_that_does_not_reach_it_is_no_silent_softmax() -> None:
    """As where a library takes another path in eval mode."""

    class Fickle(Attention):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                return F.scaled_dot_product_attention(x, x, x)
            return (x @ x.mT).softmax(-1) @ x

    ours = Fickle()
    convert(ours, n_iters=3)
    assert ours(tokens()).isfinite().all()
    with pytest.raises(RuntimeError, match=r"Fickle was converted, but its forward has not called scaled_dot"):
        ours.eval()(tokens())


def test_it_is_recorded_and_converted_back() -> None:
    stock, ours, x = model(), model(), tokens()
    convert(ours, n_iters=201)
    with record_attention(ours) as log:
        ours(x)
    assert list(log) == ["0.attention", "1.attention"]
    assert log["0.attention"][0].column_error.max() < 1e-3
    convert(ours, "softmax")
    torch.testing.assert_close(ours(x), stock(x), rtol=1e-5, atol=1e-6)


def test_layers_pick_among_all_kinds_of_attention() -> None:
    torch.manual_seed(0)
    mixed = nn.ModuleList([Attention(), nn.MultiheadAttention(16, 2), Attention()])
    assert convert(mixed, n_iters=3, layers=[0, 1]) == ["0", "1"]
    assert [isinstance(module, Intercepted) for module in mixed] == [True, False, False]
    with pytest.raises(ValueError, match=r"asks for the last 4 attention modules; there are 3: 0, 1, 2"):
        convert(mixed, n_iters=3, layers=4)


def test_a_wrapped_projection_is_no_obstacle_and_a_refusal_changes_nothing() -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    torch.manual_seed(0)
    layers = nn.ModuleList([nn.MultiheadAttention(16, 2, batch_first=True) for _ in range(2)])
    layers[1].out_proj = Wrapped(layers[1].out_proj)
    x = tokens()
    want = layers[0](x, x, x)[0]
    assert convert(layers, n_iters=1) == ["0", "1"]
    torch.testing.assert_close(layers[0](x, x, x)[0], want)
    assert layers[1](x, x, x)[0].isfinite().all()
    fresh = nn.ModuleList([nn.MultiheadAttention(16, 2), Attention()])
    with pytest.raises(ValueError, match="lot owns a pivot for every head"):
        convert(fresh, "lot")  # the second one's heads are unknown
    assert [type(module) for module in fresh] == [nn.MultiheadAttention, Attention]


def test_no_warning_where_nothing_is_left() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(model(), n_iters=3)
