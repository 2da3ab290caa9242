"""MultiheadAttention against torch's class at n_iters=1, against the reference beyond, and inside torch's layers."""

import contextlib
import copy
import io
import itertools
import math
import pickle

import pytest
import torch
from sinkhorn_attention import MultiheadAttention
from sinkhorn_attention.reference import sinkhorn_reference
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True"),
]

WIDTH, HEADS, LENGTH, BATCH = 8, 2, 5, 3
#: True hides, as torch has it; the first sample is whole.
PADDING = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [1, 0, 0, 0, 0]], dtype=torch.bool)


def twins(
    n_iters: int = 1, dtype: torch.dtype = torch.float64, **options: object
) -> tuple[nn.Module, MultiheadAttention]:
    """The module of torch and ours, with the same weights, biases that are not zero among them."""
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(WIDTH, HEADS, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape))
    ours = MultiheadAttention(WIDTH, HEADS, dtype=dtype, n_iters=n_iters, **options)
    assert list(ours.state_dict()) == list(stock.state_dict())
    ours.load_state_dict(stock.state_dict())
    return stock, ours


def tokens(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


def same(stock: nn.Module, ours: nn.Module, inputs: list[Tensor], valid: Tensor | None = None, **call: object) -> None:
    """Equal outputs, weights, and gradients of inputs and parameters; `valid` selects rows of the output."""
    results = []
    for module in (stock, ours):
        out, weights = module(*inputs, **call)
        if valid is not None:
            out = out[valid]
        loss = out.square().sum()
        if weights is not None and valid is None:
            loss = loss + weights.square().sum()
        gradients = torch.autograd.grad(loss, [*dict.fromkeys(inputs), *module.parameters()])
        results.append((out, weights, gradients))
    (out, weights, gradients), (our_out, our_weights, our_gradients) = results
    torch.testing.assert_close(our_out, out, rtol=1e-6, atol=1e-6)
    assert (weights is None) == (our_weights is None)
    if weights is not None and valid is None:
        torch.testing.assert_close(our_weights, weights, rtol=1e-6, atol=1e-6)
    for one, other in zip(our_gradients, gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", [{}, {"kdim": 6, "vdim": 4}, {"vdim": 6}])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_cross_attention(bias: bool, widths: dict[str, int], batch_first: bool, need_weights: bool) -> None:
    stock, ours = twins(bias=bias, batch_first=batch_first, **widths)
    shapes = [(BATCH, 5, WIDTH), (BATCH, 7, widths.get("kdim", WIDTH)), (BATCH, 7, widths.get("vdim", WIDTH))]
    inputs = [tokens(*shape) if batch_first else tokens(shape[1], shape[0], shape[2]) for shape in shapes]
    same(stock, ours, inputs, need_weights=need_weights)
    same(stock, ours, [tensor.select(0 if batch_first else 1, 0) for tensor in inputs], need_weights=need_weights)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize(
    "extra", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}]
)
def test_self_attention_and_appended_keys(average: bool, extra: dict[str, bool]) -> None:
    stock, ours = twins(batch_first=True, **extra)
    x = tokens(BATCH, LENGTH, WIDTH)
    same(stock, ours, [x, x, x], average_attn_weights=average)
    same(stock, ours, [x, x, x], need_weights=False)
    same(stock, ours, [x[0], x[0], x[0]], average_attn_weights=average)
    masked = {"key_padding_mask": PADDING, "attn_mask": torch.eye(LENGTH, dtype=torch.bool)}
    same(stock, ours, [x, x, x], ~PADDING, **masked)
    same(stock, ours, [x, x, x], ~PADDING, need_weights=False, **masked)


@pytest.mark.parametrize(("n_keys", "add"), [(7, {}), (7, {"add_bias_kv": True, "add_zero_attn": True})])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    ("padding", "mask"),
    list(itertools.product([None, "bool", "inf", "float"], [None, "bool", "float", "bool 3d", "float 3d"])),
)
def test_masks_have_torchs_polarity(
    n_keys: int, add: dict[str, bool], need_weights: bool, padding: str | None, mask: str | None
) -> None:
    """True hides, floats are added, in both masks and every mixture of them."""
    stock, ours = twins(batch_first=True, **add)
    inputs = [tokens(BATCH, 5, WIDTH), tokens(BATCH, n_keys, WIDTH), tokens(BATCH, n_keys, WIDTH)]
    call: dict[str, object] = {"need_weights": need_weights}
    generator = torch.Generator().manual_seed(1)
    if padding is not None:
        hide = torch.zeros(BATCH, n_keys, dtype=torch.bool)
        hide[1, :2], hide[2, -3:] = True, True
        bias = torch.randn(hide.shape, dtype=torch.float64, generator=generator) if padding == "float" else 0.0 * hide
        call["key_padding_mask"] = hide if padding == "bool" else bias.double().masked_fill(hide, -math.inf)
    if mask is not None:
        shape = (BATCH * HEADS, 5, n_keys) if "3d" in mask else (5, n_keys)
        bias = torch.randn(shape, dtype=torch.float64, generator=generator)
        hide = (bias > 0.8) & (torch.arange(n_keys) != 3)
        call["attn_mask"] = hide if "bool" in mask else bias.masked_fill(hide, -math.inf)
    with pytest.warns(UserWarning, match="mismatched") if _mismatched(call) else contextlib.nullcontext():
        same(stock, ours, inputs, **call)


def _mismatched(call: dict[str, object]) -> bool:
    both = [call[name].dtype for name in ("key_padding_mask", "attn_mask") if name in call]  # type: ignore[attr-defined]
    return len(set(both)) == 2


def test_learned_masks_get_their_gradient() -> None:
    stock, ours = twins(batch_first=True)
    x = tokens(BATCH, LENGTH, WIDTH)
    for shape, name in (((LENGTH, LENGTH), "attn_mask"), ((BATCH, LENGTH), "key_padding_mask")):
        bias = tokens(*shape)
        gradients = [torch.autograd.grad(m(x, x, x, **{name: bias})[0].square().sum(), bias)[0] for m in (stock, ours)]
        torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("n_iters", [2, 3, 5])
def test_map_and_output_are_the_references(n_iters: int) -> None:
    _, ours = twins(n_iters, batch_first=True)
    x = tokens(BATCH, LENGTH, WIDTH)
    out, weights = ours(x, x, x, PADDING, average_attn_weights=False)
    q, k, v = ours.in_proj_weight.matmul(x.unsqueeze(-1)).squeeze(-1).add(ours.in_proj_bias).chunk(3, -1)
    q, k, v = (t.view(BATCH, LENGTH, HEADS, -1).transpose(1, 2) for t in (q, k, v))
    keep = ~PADDING.unsqueeze(1)
    coupling = sinkhorn_reference(q @ k.transpose(-1, -2) / 2, n_iters, keep, keep)
    want = ours.out_proj((coupling @ v).transpose(1, 2).reshape(BATCH, LENGTH, WIDTH))
    torch.testing.assert_close(weights, coupling)
    torch.testing.assert_close(out, want)
    got = torch.autograd.grad(out.square().sum(), [x, *ours.parameters()])
    expected = torch.autograd.grad(want.square().sum(), [x, *ours.parameters()])
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(ours(x, x, x, PADDING, need_weights=False)[0], out)
    if n_iters % 2:
        torch.testing.assert_close(weights.sum(-1), (~PADDING).double().unsqueeze(1).expand(-1, HEADS, -1))


@pytest.mark.parametrize("mask", ["bool", "float"])
def test_padding_equals_the_sample_alone(mask: str) -> None:
    """Left and right padding with garbage in it; padded queries leave the bias of out_proj."""
    _, ours = twins(3, batch_first=True)
    x = tokens(BATCH, LENGTH, WIDTH)
    padding = PADDING if mask == "bool" else torch.zeros(PADDING.shape).masked_fill(PADDING, -math.inf)
    garbage = x.masked_fill(PADDING.unsqueeze(-1), 1e4)
    for need_weights in (True, False):
        out = ours(garbage, garbage, garbage, padding, need_weights)[0]
        for sample, hidden in enumerate(PADDING):
            alone = x[sample][~hidden]
            torch.testing.assert_close(out[sample][~hidden], ours(alone, alone, alone)[0])
        torch.testing.assert_close(out[PADDING], ours.out_proj.bias.expand(3, -1))


@pytest.mark.parametrize("fill", [-1e4, -1e9, torch.finfo(torch.float32).min, -math.inf])
@pytest.mark.parametrize("mask", ["key_padding_mask", "attn_mask"])
def test_any_low_fill_hides(mask: str, fill: float) -> None:
    """Hosts write -1e4, -1e9 or the lowest number for -inf; a column step would undo a finite one."""
    ours = twins(n_iters=6, batch_first=True, dtype=torch.float32)[1].requires_grad_(False)
    x = tokens(BATCH, LENGTH, WIDTH, dtype=torch.float32)
    hidden = PADDING
    if mask == "attn_mask":
        hidden = (PADDING.unsqueeze(1) | PADDING.unsqueeze(2)).repeat_interleave(HEADS, 0)
    floating = torch.zeros(hidden.shape).masked_fill(hidden, fill)
    out, weights = ours(x, x, x, **{mask: floating})
    gradient = torch.autograd.grad(out[~PADDING].square().sum(), x)[0]
    for b in range(BATCH):
        alone = x.detach()[b : b + 1, ~PADDING[b]].requires_grad_()
        expected, map_alone = ours(alone, alone, alone)
        torch.testing.assert_close(out[b : b + 1, ~PADDING[b]], expected, atol=1e-6, rtol=0)
        torch.testing.assert_close(weights[b][~PADDING[b]][:, ~PADDING[b]], map_alone[0], atol=1e-6, rtol=0)
        assert (weights[b][:, PADDING[b]] == 0).all()
        gradient_alone = torch.autograd.grad(expected.square().sum(), alone)[0]
        torch.testing.assert_close(gradient[b : b + 1, ~PADDING[b]], gradient_alone, atol=1e-5, rtol=1e-5)


def test_padded_queries_without_self_attention() -> None:
    """query_padding_mask says what no object identity can: which queries of a cross-attention are padding."""
    _, ours = twins(3, batch_first=True)
    x, memory = tokens(BATCH, LENGTH, WIDTH), tokens(BATCH, 4, WIDTH)
    out = ours(x, memory, memory, query_padding_mask=PADDING)[0]
    alone = ours(x[1:2, :3], memory[1:2], memory[1:2])[0]
    torch.testing.assert_close(out[1:2, :3], alone)
    shifted = x + 0.1  # query = x + positions, key = x + positions, computed twice
    torch.testing.assert_close(
        ours(shifted, x + 0.1, x, PADDING, query_padding_mask=PADDING)[0], ours(shifted, shifted, x, PADDING)[0]
    )
    assert (ours(shifted, x + 0.1, x, PADDING)[0] - ours(shifted, shifted, x, PADDING)[0]).abs().max() > 1e-3


def test_everything_masked() -> None:
    """Finite everywhere: a sample that is padding alone, and a row with nothing to attend to."""
    _, ours = twins(3, batch_first=True)
    x = tokens(2, LENGTH, WIDTH)
    padding = torch.tensor([[True] * LENGTH, [False] * LENGTH])
    rows = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    rows[2] = True
    with torch.autograd.detect_anomaly(check_nan=True):
        for need_weights in (True, False):
            out, weights = ours(x, x, x, padding, need_weights, rows)
            torch.testing.assert_close(out[0], ours.out_proj.bias.expand(LENGTH, -1))
            torch.testing.assert_close(out[1, 2], ours.out_proj.bias)
            assert weights is None or (weights[0] == 0).all()
            gradients = torch.autograd.grad(out[~padding].sum(), [x, *ours.parameters()])
            assert all(gradient.isfinite().all() for gradient in gradients)


def test_causal_attention_is_refused() -> None:
    _, ours = twins(3, batch_first=True)
    x = tokens(BATCH, LENGTH, WIDTH)
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    for need_weights in (True, False):
        for mask in (causal, causal == -math.inf):
            with pytest.raises(ValueError, match="cannot be causal"):
                ours(x, x, x, need_weights=need_weights, attn_mask=mask)
            with pytest.raises(ValueError, match="cannot be causal"):
                ours(x, x, x, need_weights=need_weights, attn_mask=mask, is_causal=True)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True, dtype=torch.float64)
    layer.self_attn = ours
    with pytest.raises(ValueError, match="cannot be causal"):
        layer(x, src_mask=causal, is_causal=True)


def test_causal_softmax() -> None:
    """Where a row depends on its own query alone, is_causal is torch's hint about attn_mask."""
    stock, _ = twins(batch_first=True)
    ours = MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64, normalizer="softmax")
    ours.load_state_dict(stock.state_dict())
    x = tokens(BATCH, LENGTH, WIDTH)
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    same(stock, ours, [x, x, x], attn_mask=causal, is_causal=True)
    same(stock, ours, [x, x, x], attn_mask=causal, is_causal=True, need_weights=False)
    with pytest.raises(ValueError, match="is_causal=True is a hint about attn_mask"):
        ours(x, x, x, is_causal=True)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ({"key_padding_mask": PADDING.to(torch.uint8)}, "key_padding_mask must be boolean .* got torch.uint8"),
        ({"attn_mask": torch.zeros(5, 5, dtype=torch.long)}, "attn_mask must be boolean .* got torch.int64"),
        ({"key_padding_mask": PADDING.T}, r"key_padding_mask must have shape \(3, 5\), got \(5, 3\)"),
        ({"query_padding_mask": torch.zeros(3, 5)}, "query_padding_mask must be boolean"),
        ({"attn_mask": torch.zeros(3, 5, 5)}, r"attn_mask must have shape \(5, 5\) or \(6, 5, 5\), got \(3, 5, 5\)"),
    ],
)
def test_refused_masks(call: dict[str, Tensor], says: str) -> None:
    _, ours = twins(3, batch_first=True)
    x = tokens(BATCH, LENGTH, WIDTH)
    with pytest.raises(ValueError, match=says):
        ours(x, x, x, **call)


def test_refused_shapes() -> None:
    _, ours = twins(3, batch_first=True)
    x = tokens(BATCH, LENGTH, WIDTH)
    with pytest.raises(ValueError, match="query must have 2"):
        ours(x[None], x[None], x[None])
    with pytest.raises(ValueError, match="key must have 3 dimensions, as the query, and the last of 8"):
        ours(x, x[..., :4], x)
    with pytest.raises(ValueError, match="must agree in the batch"):
        ours(x, x[:2], x[:2])
    with pytest.raises(ValueError, match="must agree in the batch, key and value in length too"):
        ours(x, x, x[:, :4])
    with pytest.raises(ValueError, match="no option n_iter;"):
        MultiheadAttention(WIDTH, HEADS, n_iter=3)


def test_dropout_is_torchs() -> None:
    """On the final map, without renormalising, in train mode only; the returned weights are those applied."""
    stock, ours = twins(batch_first=True, dropout=0.5)
    x = tokens(BATCH, LENGTH, WIDTH)
    torch.manual_seed(3)
    out, weights = ours(x, x, x)
    assert 0.2 < (ours(x, x, x, average_attn_weights=False)[1] == 0).double().mean() < 0.8
    torch.manual_seed(3)
    want = stock(x, x, x)
    torch.testing.assert_close(out, want[0])
    torch.testing.assert_close(weights, want[1])
    same(stock.eval(), ours.eval(), [x, x, x])


MODES = {
    "train": (True, torch.enable_grad),
    "eval": (False, torch.enable_grad),
    "no_grad": (False, torch.no_grad),
    "inference": (False, torch.inference_mode),
}


class Counting(MultiheadAttention):
    calls = 0

    def forward(self, *args: object, **call: object) -> tuple[Tensor, Tensor | None]:
        self.calls += 1
        return super().forward(*args, **call)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_encoder_layer_calls_it(mode: str, norm_first: bool, masked: bool) -> None:
    """The encoder layer of torch has a fused softmax of its own for eval mode without gradients."""
    torch.manual_seed(0)
    options = {"batch_first": True, "dropout": 0.0, "norm_first": norm_first}
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, **options)
    layer.self_attn = Counting(WIDTH, HEADS, batch_first=True, n_iters=5)
    x = tokens(BATCH, LENGTH, WIDTH, dtype=torch.float32).detach()
    padding = PADDING if masked else None
    want = layer(x, src_key_padding_mask=padding)
    layer.self_attn.set_normalizer("softmax")
    assert (layer(x, src_key_padding_mask=padding) - want).abs().max() > 1e-3
    layer.self_attn.set_normalizer("sinkhorn", n_iters=5)
    layer.self_attn.calls = 0
    training, context = MODES[mode]
    layer.train(training)
    with context():
        torch.testing.assert_close(layer(x, src_key_padding_mask=padding), want, rtol=1e-6, atol=1e-6)
    assert layer.self_attn.calls == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("built", ["before", "after"])
@pytest.mark.parametrize("padding", [PADDING, PADDING.flip(1).sort(1).values], ids=["mixed", "right"])
def test_encoder_calls_it(mode: str, built: str, padding: Tensor) -> None:
    """nn.TransformerEncoder turns right-padded input into nested tensors where it decided so before our module came."""
    torch.manual_seed(0)

    def attention() -> Counting:
        return Counting(WIDTH, HEADS, batch_first=True, n_iters=5)

    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True, dropout=0.0)
    if built == "before":
        layer.self_attn = attention()
    encoder = nn.TransformerEncoder(layer, 2)
    if built == "after":
        for inner in encoder.layers:
            inner.self_attn = attention()
    assert encoder.use_nested_tensor == (built == "after")
    x = tokens(BATCH, LENGTH, WIDTH, dtype=torch.float32).detach()
    want = [encoder(sample[~hidden].unsqueeze(0))[0] for sample, hidden in zip(x, padding, strict=True)]
    for inner in encoder.layers:
        inner.self_attn.calls = 0
    training, context = MODES[mode]
    encoder.train(training)
    with context():
        out = encoder(x, src_key_padding_mask=padding)
    for sample, hidden, expected in zip(out, padding, want, strict=True):
        torch.testing.assert_close(sample[~hidden], expected, rtol=1e-5, atol=1e-5)
    assert all(inner.self_attn.calls >= 1 for inner in encoder.layers)


def test_nested_tensors() -> None:
    _, ours = twins(3, batch_first=True)
    samples = [tokens(n, WIDTH).detach() for n in (5, 3)]
    nested = torch.nested.nested_tensor(samples)
    out, weights = ours(nested, nested, nested, average_attn_weights=False)
    for one, sample in zip(out.unbind(), samples, strict=True):
        torch.testing.assert_close(one, ours(sample, sample, sample)[0])
    assert weights.shape == (2, HEADS, 5, 5)
    with pytest.raises(ValueError, match="a nested tensor is taken in self-attention only"):
        ours(nested, torch.nested.nested_tensor(samples), nested)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant: bool) -> None:
    """Reentrant recomputation passes three objects where there was one: it must still be self-attention."""
    _, ours = twins(3, batch_first=True)
    x = tokens(BATCH, LENGTH, WIDTH)
    want = torch.autograd.grad(ours(x, x, x, PADDING)[0].square().sum(), x)[0]
    out = checkpoint(lambda *qkv: ours(*qkv, PADDING)[0], x, x, x, use_reentrant=reentrant)
    out.square().sum().backward()
    torch.testing.assert_close(x.grad, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype: torch.dtype) -> None:
    """Scores of standard deviation near 8, 7 half-steps: rows sum to 1 up to the cast of the entries."""
    _, ours = twins(7, torch.float32, batch_first=True)
    with torch.no_grad():
        ours.in_proj_weight[: 2 * WIDTH] *= 3
    x = tokens(BATCH, 64, WIDTH, dtype=torch.float32)
    want, wide = ours(x, x, x)
    low = copy.deepcopy(ours).to(dtype)
    z = x.detach().to(dtype).requires_grad_()
    out, weights = low(z, z, z)
    assert out.dtype == weights.dtype == dtype
    assert (weights.float().sum(-1) - 1).abs().max() < 1e-2
    assert torch.autograd.grad(out.float().sum(), z)[0].isfinite().all()
    with torch.autocast("cpu", dtype):
        out, weights = ours(x, x, x)
        fast = ours(x, x, x, need_weights=False)[0]
    assert (weights.float().sum(-1) - 1).abs().max() < 1e-2
    assert weights.dtype == torch.float32
    # Projections in bfloat16 shift such scores by up to 0.1, so the outputs agree in norm, not entry by entry.
    assert (out.float() - want).norm() < 0.05 * want.norm()
    assert (fast.float() - want).norm() < 0.05 * want.norm()
    assert (weights - wide).norm() < 0.05 * wide.norm()


def test_saturated_map() -> None:
    """Identity projections and scores of 100 on the diagonal: the map is the identity and gradients are finite."""
    ours = MultiheadAttention(16, 1, batch_first=True, n_iters=7, bias=False)
    with torch.no_grad():
        ours.in_proj_weight.copy_(torch.eye(16).repeat(3, 1))
        ours.out_proj.weight.copy_(torch.eye(16))
    x = (20 * torch.eye(16)).unsqueeze(0).requires_grad_()
    out, weights = ours(x, x, x)
    torch.testing.assert_close(weights[0], torch.eye(16))
    torch.testing.assert_close(out, x)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], torch.ones(1, 16, 16))


def test_copies_and_state_dicts() -> None:
    stock, ours = twins(3, batch_first=True)
    x = tokens(BATCH, LENGTH, WIDTH)
    want = ours(x, x, x, PADDING)[0]
    saved = io.BytesIO()
    torch.save(ours, saved)
    saved.seek(0)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(saved, weights_only=False)):
        assert torch.equal(twin(x, x, x, PADDING)[0], want)
        assert twin.normalizer.n_iters == 3
    back = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, dtype=torch.float64)
    back.load_state_dict(ours.state_dict())
    for name, tensor in stock.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor)


def test_constructor_is_torchs() -> None:
    torch.manual_seed(0)
    stock = nn.MultiheadAttention(WIDTH, HEADS, 0.1, True, True, True, 6, 4, True, "cpu", torch.float64)
    torch.manual_seed(0)
    ours = MultiheadAttention(WIDTH, HEADS, 0.1, True, True, True, 6, 4, True, "cpu", torch.float64, n_iters=3)
    for (name, one), (other_name, other) in zip(ours.state_dict().items(), stock.state_dict().items(), strict=True):
        assert name == other_name
        assert torch.equal(one, other)
    assert isinstance(ours, nn.MultiheadAttention)
    for attribute in ("embed_dim", "num_heads", "dropout", "batch_first", "kdim", "vdim", "head_dim", "add_zero_attn"):
        assert getattr(ours, attribute) == getattr(stock, attribute)
    assert MultiheadAttention(WIDTH, HEADS).normalizer.n_iters == 5


def test_compile() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True, dropout=0.0)
    layer.self_attn = MultiheadAttention(WIDTH, HEADS, batch_first=True, n_iters=3)
    x = tokens(BATCH, LENGTH, WIDTH, dtype=torch.float32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for one in (x, x * 0.5):
        out, want = compiled(one, src_key_padding_mask=PADDING), layer(one, src_key_padding_mask=PADDING)
        torch.testing.assert_close(out, want)
        got, expected = (torch.autograd.grad(o.square().sum(), x, retain_graph=True)[0] for o in (out, want))
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("need_weights", [False, True])
def test_a_key_padding_mask_written_out_for_all_queries_is_one(need_weights: bool) -> None:
    torch.manual_seed(0)
    module, x = MultiheadAttention(8, 2, batch_first=True, n_iters=4), torch.randn(2, 5, 8)
    hide = torch.arange(5) >= torch.tensor([[5], [3]])
    want = module(x, x, x, key_padding_mask=hide, need_weights=need_weights)[0]
    whole = hide[:, None, None].expand(2, 2, 5, 5).flatten(0, 1)
    for mask in (whole, torch.zeros(4, 5, 5).masked_fill(whole, -1e9)):
        torch.testing.assert_close(module(x, x, x, attn_mask=mask, need_weights=need_weights)[0], want)
        for none in (torch.zeros_like(hide), torch.zeros(2, 5)):  # a second mask that hides nothing
            both = module(x, x, x, attn_mask=mask, key_padding_mask=none, need_weights=need_weights)[0]
            torch.testing.assert_close(both, want)
    same_for_all = module(x, x, x, attn_mask=hide[1:].expand(5, 5), need_weights=need_weights)[0]
    torch.testing.assert_close(same_for_all[:, :3], module(x[:, :3], x[:, :3], x[:, :3])[0])


def test_two_views_of_a_tensor_are_two_tensors_compiled_or_not() -> None:
    """Padding of keys alone says nothing of queries that are others, and no mode may take them for the same."""
    _, ours = twins(n_iters=3)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64).transpose(0, 1)

    def attend(tokens: Tensor, views: bool) -> Tensor:
        other = tokens[:] if views else tokens
        return ours(tokens[:] if views else tokens, other, other, PADDING)[0]

    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    apart = ours(x, x.clone(), x.clone(), PADDING)[0]
    for views, want in ((True, apart), (False, ours(x, x, x, PADDING)[0])):
        torch.testing.assert_close(attend(x, views), want)
        torch.testing.assert_close(compiled(x, views), want)
    assert not torch.allclose(apart, ours(x, x, x, PADDING)[0])
