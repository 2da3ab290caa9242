import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from sinkhorn_attention.reference import sinkhorn_attention_reference

WIDTH, HEADS = 8, 2
PADDING = {
    "none": None,
    "left": [[1, 1, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]],
    "right": [[0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]],
}


def padding(side: str) -> torch.Tensor | None:
    return None if PADDING[side] is None else torch.tensor(PADDING[side], dtype=torch.bool)


def build(plugin: ModuleType, n_iters: int | None = None, **options: Any) -> Any:
    return plugin.SinkhornMultiheadAttention(WIDTH, HEADS, self_attention=True, sinkhorn_iters=n_iters, **options)


@pytest.fixture
def x() -> torch.Tensor:
    return 2 * torch.randn(5, 3, WIDTH)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("side", PADDING)
@pytest.mark.parametrize("n_iters", [1, 2, 3, 8])
def test_value_and_gradient_are_the_definition(
    plugin: ModuleType, definition: Callable[..., Any], x: torch.Tensor, n_iters: int, side: str, need_weights: bool
) -> None:
    module = build(plugin, n_iters)
    exact = copy.deepcopy(module).double()
    inputs, inputs64 = x.requires_grad_(), x.detach().double().requires_grad_()
    hide = padding(side)
    valid = torch.ones(5, 3, dtype=torch.bool) if hide is None else ~hide.T

    out, weights = module(inputs, inputs, inputs, key_padding_mask=hide, need_weights=need_weights)
    expected, coupling = definition(exact, inputs64, hide, n_iters)
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=3e-6)  # of single precision, on any processor
    if need_weights:
        torch.testing.assert_close(weights, coupling.mean(1).float(), rtol=1e-5, atol=1e-6)
    else:
        assert weights is None

    cotangent = torch.randn_like(out)
    (out * cotangent)[valid].sum().backward()
    (expected * cotangent.double())[valid].sum().backward()
    torch.testing.assert_close(inputs.grad, inputs64.grad.float(), rtol=1e-4, atol=1e-6)
    for (name, parameter), other in zip(module.named_parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad.float(), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("side", PADDING)
def test_one_half_step_is_fairseq_and_weights_go_both_ways(plugin: ModuleType, x: torch.Tensor, side: str) -> None:
    from fairseq.modules import MultiheadAttention

    stock, module = MultiheadAttention(WIDTH, HEADS, self_attention=True), build(plugin, 1)
    assert list(module.state_dict()) == list(stock.state_dict())
    module.load_state_dict(stock.state_dict())
    hide = padding(side)
    rows = torch.ones(3, 5, dtype=torch.bool) if hide is None else ~hide
    ours, theirs = module(x, x, x, hide), stock(x, x, x, hide)
    torch.testing.assert_close(ours[0].transpose(0, 1)[rows], theirs[0].transpose(0, 1)[rows])
    torch.testing.assert_close(ours[1][rows], theirs[1][rows])

    other = build(plugin, 1)
    stock.load_state_dict(other.state_dict())
    torch.testing.assert_close(other(x, x, x)[0], stock(x, x, x)[0])


def test_maps_have_the_shapes_of_fairseq(plugin: ModuleType, definition: Callable[..., Any], x: torch.Tensor) -> None:
    module = build(plugin).double()
    _, coupling = definition(module, x.double(), padding("left"), 3)
    _, heads = module(x.double(), x.double(), x.double(), padding("left"), need_weights=False, need_head_weights=True)
    assert heads.shape == (HEADS, 3, 5, 5)
    torch.testing.assert_close(heads, coupling.transpose(0, 1))
    _, mean = module(x.double(), x.double(), x.double(), padding("left"))
    assert mean.shape == (3, 5, 5)
    torch.testing.assert_close(mean, coupling.mean(1))
    assert mean[0, :2].eq(0).all()
    assert mean[0, :, :2].eq(0).all()


@pytest.mark.parametrize("n_iters", [1, 2, 3, 9])
@pytest.mark.parametrize("left", [0, 2])
def test_padding_of_any_content_changes_nothing(plugin: ModuleType, n_iters: int, left: int) -> None:
    module = build(plugin, n_iters).double()
    sentence = torch.randn(4, 1, WIDTH, dtype=torch.double, requires_grad=True)
    alone, _ = module(sentence, sentence, sentence, need_weights=False)
    grad_alone = torch.autograd.grad(alone.square().sum(), sentence)[0]
    for right in (0, 1, 5):
        filler = torch.full((left, 1, WIDTH), 1e4, dtype=torch.double), torch.randn(right, 1, WIDTH).double()
        batch = torch.cat([filler[0], sentence, filler[1]])
        hide = torch.ones(1, batch.shape[0], dtype=torch.bool)
        hide[0, left : left + 4] = False
        out, _ = module(batch, batch, batch, hide, need_weights=False)
        out = out[left : left + 4]
        torch.testing.assert_close(out, alone, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(
            torch.autograd.grad(out.square().sum(), sentence)[0], grad_alone, rtol=1e-9, atol=1e-9
        )


def test_a_sentence_without_tokens_gives_the_bias(plugin: ModuleType, x: torch.Tensor) -> None:
    module = build(plugin)
    torch.nn.init.normal_(module.out_proj.bias)
    hide = torch.zeros(3, 5, dtype=torch.bool)
    hide[1] = True
    out, weights = module(x.requires_grad_(), x, x, hide)
    torch.testing.assert_close(out[:, 1], module.out_proj.bias.expand(5, WIDTH))
    assert weights[1].eq(0).all()
    out.sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32])
@pytest.mark.parametrize("fill", [-1e4, -1e8, float("-inf")])
def test_attention_masks_are_the_support(
    plugin: ModuleType, definition: Callable[..., Any], x: torch.Tensor, dtype: torch.dtype, fill: float
) -> None:
    """True hides, as in fairseq, whose encoder layers turn that into -1e8 (-1e4 in half precision)."""
    hide = torch.tensor([[0, 1, 0, 0, 1], [0, 0, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1], [1, 0, 0, 1, 0]]).bool()
    mask = hide.to(dtype) if dtype != torch.float32 else torch.zeros(5, 5).masked_fill(hide, fill)
    module = build(plugin)
    exact = copy.deepcopy(module).double()
    bias = torch.zeros(5, 5).double().masked_fill(hide, float("-inf"))
    expected, coupling = definition(exact, x.double(), padding("right"), 3, bias)
    for given in (mask, mask.expand(3 * HEADS, 5, 5)):
        out, weights = module(x, x, x, padding("right"), attn_mask=given)
        torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(weights, coupling.mean(1).float(), rtol=1e-5, atol=1e-6)


def test_padding_masks_may_be_bytes(plugin: ModuleType, x: torch.Tensor) -> None:
    module = build(plugin)
    hide = padding("left")
    assert hide is not None
    assert torch.equal(module(x, x, x, hide)[0], module(x, x, x, hide.to(torch.uint8))[0])


def test_cross_attention_of_encoders_has_rectangular_maps(plugin: ModuleType) -> None:
    """Without the flags of fairseq, keys may be other tokens; their padding is then none of the queries'."""
    module = plugin.SinkhornMultiheadAttention(WIDTH, HEADS, kdim=6, vdim=4, sinkhorn_iters=4).double()
    query, key, value = (torch.randn(length, 3, width).double() for length, width in ((4, WIDTH), (5, 6), (5, 4)))
    hide = padding("right")
    assert hide is not None
    q, k, v = (
        projection(tokens).unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3)
        for projection, tokens in ((module.q_proj, query), (module.k_proj, key), (module.v_proj, value))
    )
    out = sinkhorn_attention_reference(q, k, v, 4, 0.5, key_mask=~hide.unsqueeze(1))
    expected = module.out_proj(out.permute(2, 0, 1, 3).flatten(2))
    torch.testing.assert_close(module(query, key, value, hide)[0], expected)
    torch.testing.assert_close(module(query, key, value, hide, need_weights=False)[0], expected)


def test_causal_and_incremental_use_is_refused_with_the_reason(plugin: ModuleType, x: torch.Tensor) -> None:
    module = build(plugin)
    causal = torch.full((5, 5), float("-inf")).triu(1)
    for need_weights in (False, True):
        for mask in (causal, causal < 0, causal.clamp(min=-1e8)):
            with pytest.raises(ValueError, match="cannot be causal"):
                module(x, x, x, attn_mask=mask, need_weights=need_weights)
    with pytest.raises(ValueError, match=r"for decoders.*cannot be causal"):
        module(x, x, x, incremental_state={})
    with pytest.raises(ValueError, match=r"for decoders.*cannot be causal"):
        module(x, x, x, static_kv=True)
    with pytest.raises(ValueError, match="earlier target token depend on later ones"):
        plugin.SinkhornMultiheadAttention(WIDTH, HEADS, encoder_decoder_attention=True)


def test_a_row_wise_normalizer_may_be_causal(plugin: ModuleType, x: torch.Tensor) -> None:
    from fairseq.modules import MultiheadAttention

    module, stock = build(plugin, normalizer="softmax"), MultiheadAttention(WIDTH, HEADS, self_attention=True)
    module.load_state_dict(stock.state_dict())
    causal = torch.full((5, 5), float("-inf")).triu(1)
    torch.testing.assert_close(module(x, x, x, attn_mask=causal)[0], stock(x, x, x, attn_mask=causal)[0])


def test_bad_input_is_named(plugin: ModuleType, x: torch.Tensor) -> None:
    module = build(plugin)
    with pytest.raises(ValueError, match="must agree in B"):
        module(x, x[:4], x[:4])
    with pytest.raises(ValueError, match="must agree in B"):
        module(x, x, x[:, :1])
    with pytest.raises(ValueError, match="key_padding_mask must have shape"):
        module(x, x, x, torch.zeros(5, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="attn_mask must have shape"):
        module(x, x, x, attn_mask=torch.zeros(3, 5, 5))
    with pytest.raises(ValueError, match=r"attn_mask must be boolean .*int64"):
        module(x, x, x, attn_mask=torch.zeros(5, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match="key and value must be given"):
        module(x, None, None)
    with pytest.raises(ValueError, match="not a softmax of scores"):
        module(x, x, x, before_softmax=True)
    with pytest.raises(ValueError, match="n_iters must be an integer >= 1"):
        build(plugin, 0)
    with pytest.raises(ValueError, match="append keys"):
        build(plugin, add_zero_attn=True)
    with pytest.raises(ValueError, match="append keys"):
        build(plugin, add_bias_kv=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("need_weights", [False, True])
def test_half_precision_keeps_the_half_steps_in_float32(
    plugin: ModuleType, definition: Callable[..., Any], dtype: torch.dtype, need_weights: bool
) -> None:
    """The rest of the error is that of the projections in the narrow dtype, which stay narrow in the definition."""
    module = build(plugin, 7).to(dtype)
    inputs = (3 * torch.randn(5, 3, WIDTH)).to(dtype).requires_grad_()
    exact = copy.deepcopy(module).double()
    expected, coupling = definition(exact, inputs.detach().double(), padding("left"), 7)
    out, weights = module(inputs, inputs, inputs, padding("left"), need_weights=need_weights)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=0.03, atol=0.03)
    if need_weights:
        assert weights.dtype == torch.float32
        rows = weights.sum(-1)
        torch.testing.assert_close(rows, coupling.mean(1).sum(-1).float(), rtol=1e-5, atol=1e-5)
    out.sum().backward()
    assert inputs.grad.isfinite().all()


def test_autocast_equals_the_narrow_projections(plugin: ModuleType, x: torch.Tensor) -> None:
    module = build(plugin, 5)
    exact, _ = module(x, x, x, padding("left"), need_weights=False)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = module(x, x, x, padding("left"), need_weights=False)
        heads, _ = module(x, x, x, padding("left"))
    torch.testing.assert_close(out.float(), exact, rtol=0.05, atol=0.05)
    torch.testing.assert_close(heads.float(), out.float(), rtol=0.02, atol=0.02)


def test_dropout_acts_on_the_map_and_may_be_kept_for_inference(plugin: ModuleType, x: torch.Tensor) -> None:
    module = build(plugin, dropout=0.5)
    plain = build(plugin)
    plain.load_state_dict(module.state_dict())
    expected, coupling = plain(x, x, x, need_head_weights=True)
    _, weights = module(x, x, x, need_head_weights=True)
    torch.testing.assert_close(weights, coupling)  # as returned by fairseq's own code: before dropout
    for need_weights in (False, True):
        many = x.repeat(1, 4000, 1)
        mean = module(many, many, many, need_weights=need_weights)[0].unflatten(1, (4000, 3)).mean(1)
        torch.testing.assert_close(mean, expected, rtol=0.1, atol=0.06)
        assert (module(x, x, x, need_weights=need_weights)[0] - expected).abs().max() > 0.1
    module.eval()
    torch.testing.assert_close(module(x, x, x, need_weights=False)[0], expected)
    module.dropout_module.apply_during_inference = True
    assert (module(x, x, x, need_weights=False)[0] - expected).abs().max() > 0.1


def test_a_normalizer_with_parameters_for_its_heads(plugin: ModuleType, x: torch.Tensor) -> None:
    """One that owns parameters is made from the sizes of the heads."""
    module = build(plugin, 3, normalizer="lot", normalizer_options={"num_pivots": 4})
    assert module.normalizer.pivot.shape == (HEADS, 4, WIDTH // HEADS)
    out, weights = module(x, x, x, key_padding_mask=padding("right"))
    alone = module(x[:3, :1], x[:3, :1], x[:3, :1])[0]
    torch.testing.assert_close(out[:3, :1], alone)
    torch.testing.assert_close(weights[0, :3].sum(-1), torch.ones(3))


def test_a_normalizer_and_its_options_as_one_value(plugin: ModuleType) -> None:
    options = {"n_iters": 5, "gradient": "detached"}
    given = build(plugin, normalizer={"name": "sinkhorn", **options}).normalizer
    apart = build(plugin, 5, sinkhorn_gradient="detached").normalizer
    assert options.items() <= given.options.items()
    assert given.options == apart.options
    assert build(plugin, normalizer={"name": "lot"}).normalizer.n_iters == 3
    with pytest.raises(ValueError, match="n_iters is given twice: as 5 and as 3"):
        build(plugin, 3, normalizer={"name": "sinkhorn", **options})
    with pytest.raises(ValueError, match="gradient is given twice"):
        build(plugin, sinkhorn_gradient="implicit", normalizer={"name": "sinkhorn", **options})


def test_options_reach_the_normalizer(plugin: ModuleType, x: torch.Tensor) -> None:
    module = build(plugin, 5, normalizer="unbalanced_sinkhorn", normalizer_options={"rho": 2.0})
    assert (module.normalizer.n_iters, module.normalizer.rho) == (5, 2.0)
    detached = build(plugin, 3, sinkhorn_gradient="detached")
    unrolled = build(plugin, 3)
    unrolled.load_state_dict(detached.state_dict())
    grads = []
    for module in (detached, unrolled):
        inputs = x.clone().requires_grad_()
        module(inputs, inputs, inputs, need_weights=False)[0].square().sum().backward()
        grads.append(inputs.grad)
    assert (grads[0] - grads[1]).abs().max() > 1e-3
    with pytest.raises(ValueError, match="has one gradient only"):
        build(plugin, normalizer="softmax", sinkhorn_gradient="detached")
    with pytest.raises(ValueError, match="unknown normalizer 'sinkhron'"):
        build(plugin, normalizer="sinkhron")
    with pytest.raises(ValueError, match="has no option rho"):
        build(plugin, normalizer_options={"rho": 1.0})
