"""The contract of the public functions: arguments, precisions, compilation, export, refusals."""

import math

import numpy as np
import pytest
import torch
from sinkhorn_attention import engines, marginal_error, sinkhorn, sinkhorn_attention
from sinkhorn_attention.engines.operator import Operator
from sinkhorn_attention.engines.problem import Problem
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import scaled_dot_product_attention


def tokens(*lead: int, n: int = 6, m: int = 6, width: int = 4, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = ((n, width), (m, width), (m, width))
    return [torch.randn(*lead, *shape).to(dtype).requires_grad_() for shape in shapes]


BAD_ARGUMENTS = [
    ({"n_iters": 0}, r"n_iters must be an integer >= 1 .* got 0"),
    ({"n_iters": -3}, r"n_iters .* got -3"),
    ({"n_iters": 2.0}, r"n_iters .* got 2\.0"),
    ({"n_iters": True}, r"n_iters .* got True"),
    ({"query": torch.randn(4)}, r"query must be a floating tensor .* got \(4,\) torch\.float32"),
    ({"key": torch.randn(2, 3, 6, 5)}, r"key must have the query's width 4, got 5"),
    ({"value": torch.randn(2, 3, 5, 4)}, r"value must have as many tokens as key, 6, got 5"),
    ({"key": torch.randn(5, 3, 6, 4)}, r"leading dimensions that broadcast, got .*\(5, 3, 6, 4\)"),
    ({"query": torch.ones(2, 3, 6, 4, dtype=torch.int64)}, r"query must be a floating tensor .* torch\.int64"),
    ({"query": [1.0]}, r"query must be a floating tensor .* got list"),
    ({"scale": math.nan}, r"scale must be a finite number .* got nan"),
    ({"scale": torch.tensor(0.5)}, r"scale must be a finite number"),
    ({"dropout_p": 1.5}, r"dropout_p must lie in \[0, 1\], got 1\.5"),
    ({"dropout_p": -0.1}, r"dropout_p .* got -0\.1"),
    ({"query_mask": torch.ones(2, 6, dtype=torch.bool)}, r"query_mask .* got shape \(2, 6\) \(insert a dimension of 1"),
    ({"key_mask": torch.ones(2, 1, 5, dtype=torch.bool)}, r"key_mask .* shape \(6,\) .* got shape \(2, 1, 5\)"),
    ({"key_mask": torch.ones(6)}, r"key_mask must be a boolean mask.* got dtype torch\.float32"),
    ({"key_mask": torch.ones(6, dtype=torch.uint8)}, r"key_mask must be a boolean mask.* torch\.uint8"),
    ({"key_mask": torch.ones(2, 3, 1, dtype=torch.bool)}, r"key_mask .* got shape \(2, 3, 1\)"),
    ({"attn_bias": torch.ones(6, 6, dtype=torch.int32)}, r"attn_bias must be floating .* got torch\.int32"),
    ({"attn_bias": torch.ones(6, 5)}, r"attn_bias must be broadcastable to \(2, 3, 6, 6\), got \(6, 5\)"),
    ({"attn_bias": torch.ones(1, 2, 3, 6, 6)}, r"attn_bias must be broadcastable"),
    ({"query": torch.eye(6, 4).to_sparse()}, r"query must be a floating tensor .* got \(6, 4\) .*torch\.sparse_coo"),
    (
        {"value": torch.nested.nested_tensor([torch.randn(6, 4)], layout=torch.jagged)},
        r"value .* nested tensor \(pad it",
    ),
    ({"query_mask": [True] * 6}, r"query_mask must be a boolean mask.* got list"),
    ({"key_mask": np.ones(6, dtype=bool)}, r"key_mask must be a boolean mask.* got ndarray"),
    ({"key_mask": torch.ones(6, dtype=torch.bool, device="meta")}, r"key_mask .* got one on meta for tokens on cpu"),
    ({"attn_bias": np.ones((6, 6))}, r"attn_bias must be a tensor broadcastable to \(2, 3, 6, 6\), got ndarray"),
    ({"attn_bias": torch.eye(6).to_sparse()}, r"attn_bias must be a tensor .* torch\.sparse_coo"),
    ({"attn_bias": torch.ones(6, 6, device="meta")}, r"attn_bias must be on the query's device cpu, got meta"),
    ({"dropout_p": "half"}, r"dropout_p must lie in \[0, 1\], got 'half'"),
    ({"dropout_p": None}, r"dropout_p must lie in \[0, 1\], got None"),
    ({"scale": 10**400}, r"scale must be a finite number"),
    ({"gradient": "exact"}, r"gradient must be one of unrolled, detached, implicit, got 'exact'"),
    (
        {"backend": "cuda"},
        r"backend must be one of auto, reference, native, portable, dense, streaming, triton, got 'cuda'",
    ),
]


@pytest.mark.parametrize(("bad", "message"), BAD_ARGUMENTS)
def test_bad_arguments_are_named(bad: dict, message: str) -> None:
    query, key, value = tokens(2, 3)
    arguments = {"query": query, "key": key, "value": value} | bad
    with pytest.raises(ValueError, match=message):
        sinkhorn_attention(**arguments)


def test_bad_arguments_of_sinkhorn() -> None:
    scores = torch.randn(2, 5, 6)
    for bad, message in (
        ({"n_iters": 0}, "n_iters"),
        ({"scores": torch.ones(5, 6, dtype=torch.int64)}, "scores must be a floating tensor"),
        ({"scores": torch.randn(5)}, "scores must be a floating tensor"),
        ({"scores": torch.eye(5).to_sparse()}, "scores must be a floating tensor"),
        ({"query_mask": torch.ones(2, 6, dtype=torch.bool)}, "query_mask"),
        ({"query_mask": torch.ones(5, dtype=torch.bool, device="meta")}, "query_mask .* got one on meta"),
        ({"key_mask": torch.ones(3, 6, dtype=torch.bool)}, "key_mask"),
    ):
        with pytest.raises(ValueError, match=message):
            sinkhorn(**({"scores": scores} | bad))


def causal_masks() -> list[Tensor]:
    lower = torch.ones(6, 6, dtype=torch.bool).tril()
    additive = torch.zeros(6, 6).masked_fill(~lower, -math.inf)
    return [lower, lower.T, additive, additive.expand(2, 1, 6, 6), torch.zeros(6, 6).masked_fill(~lower, -1e9)]


@pytest.mark.parametrize("mask", causal_masks())
@pytest.mark.parametrize("backend", engines.BACKENDS)
def test_causal_masks_are_refused(mask: Tensor, backend: str) -> None:
    with pytest.raises(ValueError, match="only causal doubly stochastic matrix is the identity"):
        sinkhorn_attention(*tokens(2, 3), attn_bias=mask, backend=backend)


def test_rectangular_causal_masks_are_refused_and_other_masks_are_not() -> None:
    query, key, value = tokens(2, 3, n=4, m=6)
    for offset in (0, 2):
        with pytest.raises(ValueError, match="causal"):
            sinkhorn_attention(query, key, value, attn_bias=torch.ones(4, 6, dtype=torch.bool).tril(offset))
    window = torch.ones(6, 6, dtype=torch.bool).tril(1).triu(-1)
    swin = torch.zeros(6, 6)
    swin[:3, 3:] = swin[3:, :3] = -100.0
    swin_half = torch.zeros(6, 6)
    swin_half[:3, 3:] = -100.0
    for allowed in (window, swin, swin_half, torch.eye(6, dtype=torch.bool), torch.ones(1, 6, dtype=torch.bool)):
        assert sinkhorn_attention(*tokens(2, 3), attn_bias=allowed).isfinite().all()


@pytest.mark.parametrize("n_iters", [1, 3, 7])
def test_couplings_are_normalised_in_single_precision(n_iters: int) -> None:
    """Scores of standard deviation 8; pure bfloat16 iterations would leave row sums off by 0.09."""
    scores = 8 * torch.randn(2, 2, 64, 64, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.bfloat16, torch.float16):
        coupling = sinkhorn(scores.to(dtype), n_iters)
        assert coupling.dtype == dtype
        assert marginal_error(coupling.float()).rows.max() < 1e-2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert marginal_error(sinkhorn(scores, n_iters)).rows.max() < 1e-5


def test_mixed_dtypes_promote() -> None:
    query, key, value = tokens(2, 3)
    assert sinkhorn_attention(query.bfloat16(), key, value).dtype == torch.float32
    assert sinkhorn_attention(query.double(), key, value).dtype == torch.float64
    assert sinkhorn_attention(query.bfloat16(), key.half(), value.half()).dtype == torch.float32
    bias = torch.randn(6, 6, dtype=torch.float64)
    assert sinkhorn_attention(query, key, value, attn_bias=bias).dtype == torch.float32


def test_leading_dimensions_broadcast() -> None:
    query, key, value = tokens(2, 3)
    shared = key[:1, :1]
    got = sinkhorn_attention(query, shared, value, 3)
    torch.testing.assert_close(got, sinkhorn_attention(query, shared.expand(2, 3, 6, 4), value, 3))
    got.sum().backward()
    assert key.grad[:1, :1].abs().sum() > 0


def test_results_may_be_written_into_or_say_that_they_may_not() -> None:
    """As with scaled_dot_product_attention, the output is kept for the gradient: torch names a write into it."""
    scores = torch.randn(2, 5, 6, requires_grad=True)
    want = torch.autograd.grad((2 * sinkhorn(scores, 3)).square().sum(), scores)[0]
    torch.testing.assert_close(torch.autograd.grad(sinkhorn(scores, 3).mul_(2).square().sum(), scores)[0], want)
    inputs = tokens(2, 3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sinkhorn_attention(*inputs, 3, backend="dense").mul_(2).sum().backward()
    want = sinkhorn_attention(*inputs, 3)
    with torch.no_grad():
        torch.testing.assert_close(sinkhorn_attention(*inputs, 3).mul_(2), 2 * want)


def test_operators_pass_opcheck() -> None:
    query, key, value = tokens(2, 3)
    bias = torch.randn(3, 6, 6, requires_grad=True)
    mask = torch.rand(2, 1, 6) > 0.3
    keep = torch.rand(2, 3, 6, 6) > 0.2
    plain = (None, None, None, None, None, 3, 0.5, False, 1.0, 0.0)
    full = (None, bias, mask, mask, keep, 4, 0.5, True, 1.0, 0.2)
    strided = [torch.randn(1, 6, 3, 4).transpose(1, 2) for _ in range(3)]
    scores = (query @ key.mT).detach().requires_grad_()
    of_scores = (None, None, None, scores, None, mask, mask, None, 3, 1.0, False, 1.0, 0.0)
    for operator in (engines.PORTABLE, engines.AUTO, engines.STREAMING):
        for options in (plain, full):
            torch.library.opcheck(operator.forward, (query, key, value, *options))
        # One sample of heads that a projection packed between the tokens: a reshape keeps its strides.
        output, *state = operator.forward(*strided, *plain)
        arguments = (output, torch.ones(1, 3, 6, 4), *state, *strided, *plain, False)
        torch.library.opcheck(operator.backward, arguments, test_utils="test_faketensor")
        torch.library.opcheck(operator.forward, of_scores)
        given = (None, None, None, torch.randn(1, 3, 6, 5).mT, *of_scores[4:5], None, None, *of_scores[7:])
        output, *state = operator.forward(*given)
        arguments = (output.new_empty(0), torch.randn(1, 3, 6, 5).mT, *state, *given, False)
        torch.library.opcheck(operator.backward, arguments, test_utils="test_faketensor")


def test_traces_with_fake_tensors_and_a_bias() -> None:
    """What may not look at data does not: neither for the causal check nor for the domains."""
    inputs = (*tokens(2, 3), torch.randn(6, 6))

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return sinkhorn_attention(query, key, value, 3, attn_bias=bias)

    with torch.no_grad():
        for mode in ("real", "fake", "symbolic"):
            traced = make_fx(attend, tracing_mode=mode)(*inputs)
            torch.testing.assert_close(traced(*inputs), attend(*inputs))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert attend(*inputs).shape == (2, 3, 6, 4)


@pytest.mark.parametrize("n_iters", [1, 4])
@pytest.mark.parametrize("operator", [engines.PORTABLE, engines.AUTO], ids=["portable", "auto"])
def test_eager_and_compiled_calls_run_the_same_engine(operator: Operator, n_iters: int) -> None:
    """Outside of tracing the engine is an autograd function, inside an operator: equal to the last bit."""
    inputs = tokens(2, 3)
    bias = torch.randn(6, 6, requires_grad=True)
    problem = Problem(*inputs, attn_bias=bias, n_iters=n_iters, scale=0.5)
    outputs = operator(problem), operator.forward(*problem.tensors(), *problem.numbers())[0]
    gradients = [torch.autograd.grad(output.square().sum(), (*inputs, bias)) for output in outputs]
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_compiles_once_for_all_shapes() -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        coupling = sinkhorn(query @ key.mT, 3, query_mask=mask)
        return sinkhorn_attention(query, key, value, 3, key_mask=mask) + coupling.sum(-1, keepdim=True)

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch, n in ((2, 5), (3, 8), (4, 6)):
            inputs = (*tokens(batch, 3, n=n, m=n), torch.rand(batch, 1, n) > 0.3)
            outputs = compiled(*inputs), attend(*inputs)
            torch.testing.assert_close(*outputs)
            gradients = [torch.autograd.grad(output.square().sum(), inputs[:3]) for output in outputs]
            torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_compiles_with_a_scale_and_a_count_that_vary() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(sinkhorn_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for n_iters, scale in ((3, 0.5), (4, 0.7), (5, 1.1)):
        inputs = (*tokens(2, 3), n_iters)
        torch.testing.assert_close(compiled(*inputs, scale=scale), sinkhorn_attention(*inputs, scale=scale))


@pytest.mark.parametrize("strict", [True, False])
def test_exports_with_dynamic_shapes(strict: bool) -> None:
    class Host(nn.Module):
        def forward(self, query: Tensor, mask: Tensor) -> Tensor:
            return sinkhorn_attention(query, query, query, 3, query_mask=mask, key_mask=mask)

    def example(batch: int, n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch, n, 4), torch.rand(batch, n) > 0.2

    dynamic = {0: torch.export.Dim("batch"), 1: torch.export.Dim("n")}
    exported = torch.export.export(Host(), example(2, 6), dynamic_shapes=(dynamic, dynamic), strict=strict).module()
    for inputs in (example(5, 9), example(3, 4)):
        torch.testing.assert_close(exported(*inputs), Host()(*inputs))


def test_the_reference_maps_over_biases() -> None:
    query, key, value = (tensor.detach() for tensor in tokens(3, 2, n=5, m=5))
    bias = torch.randn(3, 5, 5)

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        return sinkhorn_attention(query, key, value, 3, attn_bias=bias, backend="reference")

    expected = torch.stack([attend(*each) for each in zip(query, key, value, bias, strict=True)])
    torch.testing.assert_close(torch.vmap(attend)(query, key, value, bias), expected)


@pytest.mark.parametrize("options", [{"backend": "reference"}, {"gradient": "implicit"}, {}])
def test_shapes_on_the_meta_device(options: dict) -> None:
    query, key, value = (tensor.to("meta") for tensor in tokens(3, 2, n=5, m=4))
    assert sinkhorn_attention(query, key, value, **options).shape == (3, 2, 5, 4)


def test_auto_takes_no_kernel_that_has_not_been_run() -> None:
    assert engines.operator_of("auto") is engines.AUTO
    query = torch.zeros(1, 2, 3, device="meta")
    assert engines.AUTO.engine.library(Problem(query, query, query)) is None, "off the CPU the portable engine"


def test_old_names_of_backends_mean_the_portable_engine() -> None:
    """Keeping the map, or making it again."""
    assert engines.operator_of("dense") is engines.operator_of("portable") is engines.PORTABLE
    assert engines.operator_of("streaming").engine.recompute


def test_no_gradient_is_computed_for_what_needs_none() -> None:
    query, key, value = (tensor.detach() for tensor in tokens(2, 3))
    bias = torch.randn(6, 6, requires_grad=True)
    sinkhorn_attention(query, key, value, 3, attn_bias=bias).sum().backward()
    assert bias.grad.abs().sum() > 0
    assert not sinkhorn_attention(query, key, value, 3).requires_grad


# ------------------------------------------------------------------------------------- as scaled_dot_product_attention


@pytest.mark.parametrize(
    "mask", [torch.rand(6, 9) < 0.7, torch.randn(2, 1, 6, 9), None], ids=["keeps", "added", "none"]
)
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_arguments_of_torchs_function(mask, groups: int) -> None:
    """A mask by its name there, and heads that share a key and value; one half-step is softmax."""
    torch.manual_seed(0)
    query = torch.randn(2, 4, 6, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(2, 4 // groups, 9, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    options = {"attn_mask": mask.double() if mask is not None and mask.is_floating_point() else mask}
    if mask is not None and mask.dtype == torch.bool:
        mask[:, 0] = True
    results = []
    for attend in (lambda *tokens, **more: sinkhorn_attention(*tokens, 1, **more), scaled_dot_product_attention):
        output = attend(query, key, value, enable_gqa=groups > 1, **options)
        results.append([output, *torch.autograd.grad(output.square().sum(), (query, key, value))])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"is_causal": True}, "is_causal=True: .*identity"),
        ({"attn_mask": torch.zeros(5, 5), "attn_bias": torch.zeros(5, 5)}, "give one of them"),
        ({"n_iters": torch.ones(5, 5, dtype=torch.bool)}, r"fourth argument is n_iters.*\(5, 5\).*attn_mask="),
        ({"attn_mask": torch.ones(5, 5).tril().bool()}, "is a causal mask"),
    ],
)
def test_what_of_torchs_function_is_refused(options: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        sinkhorn_attention(*torch.randn(3, 2, 4, 5, 8), **options)


def test_heads_that_cannot_be_shared_are_named() -> None:
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 3, 5, 8)
    with pytest.raises(ValueError, match=r"multiple of the key's, got \(2, 4, 5, 8\) and \(2, 3, 5, 8\)"):
        sinkhorn_attention(query, key, key, enable_gqa=True)
