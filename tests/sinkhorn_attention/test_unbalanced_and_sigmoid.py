"""`unbalanced_sinkhorn` and `sigmoid`, whose `attend` is not their formula, against `from_scores` in float64."""

import math

import pytest
import torch
from sinkhorn_attention import Normalizer, get_normalizer
from sinkhorn_attention.engines import portable
from sinkhorn_attention.engines.operator import Operator
from sinkhorn_attention.normalizers import sigmoid, unbalanced
from sinkhorn_attention.reference import sinkhorn_attention_reference
from torch import Tensor, nn
from torch.autograd import forward_ad

PRECISIONS = [torch.float64, torch.float32]
BUILT = {
    "odd": ("unbalanced_sinkhorn", {"n_iters": 3}),
    "even": ("unbalanced_sinkhorn", {"n_iters": 4, "rho": 1.5}),
    "sigmoid": ("sigmoid", {}),
    "fixed bias": ("sigmoid", {"bias": -0.7}),
}


@pytest.fixture(params=BUILT.values(), ids=BUILT.keys())
def normalizer(request: pytest.FixtureRequest) -> Normalizer:
    name, options = request.param
    return get_normalizer(name, **options)


def random_mask(*shape: int, seed: int = 0, keep: float = 0.7) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < keep


def tokens(*lead: int, n: int = 6, m: int = 6, width: int = 4, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(n, width), (m, width), (m, width)]
    return [torch.randn(*lead, *shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize(("n", "m"), [(7, 7), (5, 9)])
def test_token_masks(normalizer, make_problem, matches_definition, n: int, m: int, dtype) -> None:
    query_mask, key_mask = random_mask(2, 3, n), random_mask(2, 1, m, seed=1)
    for masks in ({"query_mask": query_mask}, {"key_mask": key_mask}, {"query_mask": query_mask, "key_mask": key_mask}):
        for std in (1, 20):
            problem = make_problem(n, m, std=std, **masks)
            if std == 1 or dtype == torch.float64:
                matches_definition(normalizer, problem, dtype)
        problem.query[~query_mask.expand(2, 3, n)] = math.nan
        problem.key[~key_mask.expand(2, 3, m)] = math.inf
        problem.value[~key_mask.expand(2, 3, m)] = math.nan
        problem.output_gradient[~query_mask.expand(2, 3, n)] = 1e30
        if len(masks) == 2:
            dirty = [tensor.to(dtype).requires_grad_() for tensor in problem[:3]]
            clean = [tensor.detach().nan_to_num(0.0, 0.0, 0.0).requires_grad_() for tensor in dirty]
            outputs = [normalizer.attend(*inputs, **masks) for inputs in (dirty, clean)]
            assert torch.equal(*outputs)
            assert (outputs[0][~query_mask.expand(2, 3, n)] == 0).all()
            arriving = problem.output_gradient.to(dtype)
            gradients = [
                torch.autograd.grad(output, x, arriving) for output, x in zip(outputs, (dirty, clean), strict=True)
            ]
            for got, want in zip(*gradients, strict=True):
                assert torch.equal(got, want)
                assert got.isfinite().all()


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("shape", [(7,), (1, 7), (5, 1), (5, 7), (3, 5, 7), (2, 1, 1, 7), (2, 1, 5, 7), (2, 3, 5, 7)])
def test_bias_of_every_broadcastable_shape(normalizer, make_problem, matches_definition, shape, dtype) -> None:
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(5)).double()
    matches_definition(normalizer, make_problem(5, 7, attn_bias=bias), dtype)
    masks = {"query_mask": random_mask(2, 1, 5), "key_mask": random_mask(2, 3, 7, seed=1)}
    matches_definition(normalizer, make_problem(5, 7, attn_bias=bias, **masks), dtype)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("masked", [False, True])
def test_support(normalizer, make_problem, matches_definition, masked: bool, dtype) -> None:
    """Entries of -inf, among them a whole row, a whole column and a whole matrix; the finite rest has a gradient."""
    bias = torch.randn(2, 1, 6, 8, generator=torch.Generator().manual_seed(5)).double()
    bias.masked_fill_(~random_mask(2, 1, 6, 8, seed=2), -math.inf)
    bias[0, :, 2], bias[0, :, :, 3] = -math.inf, -math.inf
    masks = {"query_mask": random_mask(2, 1, 6), "key_mask": random_mask(2, 3, 8, seed=1)} if masked else {}
    matches_definition(normalizer, make_problem(6, 8, attn_bias=bias, **masks), dtype)
    bias[1] = -math.inf
    matches_definition(normalizer, make_problem(6, 8, attn_bias=bias, **masks), dtype)


def test_padding_of_the_bias_may_hold_anything(normalizer) -> None:
    query, key, value = tokens(2, 3)
    mask = torch.tensor([True] * 4 + [False] * 2)
    bias = torch.randn(6, 6)
    dirty = bias.clone()
    dirty[4:], dirty[:, 4:] = math.nan, math.inf
    masks = {"query_mask": mask, "key_mask": mask}
    outputs = [normalizer.attend(query, key, value, attn_bias=each, **masks) for each in (bias, dirty)]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)
    gradients = [torch.autograd.grad(output.square().sum(), (query, key, value)) for output in outputs]
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("dropout_p", [0.3, 1.0])
def test_dropout(normalizer, make_problem, matches_definition, dropout_p: float, dtype) -> None:
    """The entries that are kept come from the seed: value and gradient are compared under the same ones."""
    if dropout_p == 1.0:
        query, key, value = tokens(2, 3, dtype=dtype)
        output = normalizer.attend(query, key, value, dropout_p=1.0)
        assert (output == 0).all()
        assert all((gradient == 0).all() for gradient in torch.autograd.grad(output.sum(), (query, key, value)))
        return
    for std, options in ((1, {}), (1, {"key_mask": random_mask(2, 1, 9)}), (8, {})):
        if std == 1 or dtype == torch.float64:
            matches_definition(normalizer, make_problem(7, 9, std=std, dropout_p=dropout_p, **options), dtype)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_stays_in_its_own_sample(normalizer, which: int) -> None:
    clean = tokens(3, 2)
    dirty = [tensor.detach().clone() for tensor in clean]
    dirty[which][1, 0, 2] = math.nan
    dirty = [tensor.requires_grad_() for tensor in dirty]
    outputs = [normalizer.attend(*inputs) for inputs in (clean, dirty)]
    assert outputs[1][1, 0].isnan().any()
    others = torch.ones(3, 2, dtype=torch.bool)
    others[1, 0] = False
    torch.testing.assert_close(outputs[0][others], outputs[1][others], rtol=1e-5, atol=1e-6)
    gradients = [
        torch.autograd.grad(output.sum(), inputs) for output, inputs in zip(outputs, (clean, dirty), strict=True)
    ]
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got[others], want[others], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [300.0, 1e15])
def test_huge_scores_are_finite(normalizer, size: float) -> None:
    query, key, value = tokens(2, 3)
    output = normalizer.attend(query * size, key * size, value)
    assert output.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(output.sum(), (query, key, value)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_are_computed_in_single_precision(normalizer, make_problem, dtype) -> None:
    """The output is the float32 one rounded once; gradients arrive in the inputs' dtype, the bias's in its own."""
    problem = make_problem(9, 9, std=3)
    low = [tensor.to(dtype).requires_grad_() for tensor in problem[:3]]
    wide = [tensor.detach().float().requires_grad_() for tensor in low]
    bias = torch.randn(9, 9, requires_grad=True)
    weights = problem.output_gradient.to(dtype)
    got, want = normalizer.attend(*low, attn_bias=bias), normalizer.attend(*wide, attn_bias=bias)
    assert got.dtype == dtype
    assert torch.equal(got, want.to(dtype))
    found = torch.autograd.grad(got, (*low, bias), weights)
    expected = torch.autograd.grad(want, (*wide, bias), weights.float())
    for one, other in zip(found[:3], expected, strict=False):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other.to(dtype), rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(found[3], expected[3], rtol=1e-4, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(normalizer.attend(*wide, attn_bias=bias), want, rtol=0, atol=0)


def test_strides_and_leading_dimensions_do_not_matter(normalizer) -> None:
    """Heads packed between the tokens, one query and one value for all samples, a broadcast gradient."""
    query = torch.randn(1, 6, 3, 4, requires_grad=True)
    key = torch.randn(2, 6, 3, 4, requires_grad=True)
    value = torch.randn(6, 4, requires_grad=True)
    output = normalizer.attend(query.transpose(1, 2), key.transpose(1, 2), value)
    full = query.transpose(1, 2).expand(2, 3, 6, 4), key.transpose(1, 2), value.expand(2, 3, 6, 4)
    expected = normalizer.coupling(*full[:2]) @ full[2]
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(result.sum(), (query, key, value)) for result in (output, expected)]
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_gradcheck(normalizer) -> None:
    """Against finite differences."""
    inputs = [torch.randn(1, 2, size, 3, dtype=torch.float64, requires_grad=True) for size in (3, 4, 4)]
    bias = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, True, False, True])
    assert torch.autograd.gradcheck(
        lambda q, k, v, b: normalizer.attend(q, k, v, attn_bias=b, key_mask=mask), (*inputs, bias)
    )


class Attend(nn.Module):
    """A host with a mask and a bias."""

    def __init__(self, normalizer: Normalizer) -> None:
        super().__init__()
        self.normalizer = normalizer

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
        mask = torch.tensor([True, True, False, True, True, True], device=query.device)
        return self.normalizer.attend(query, key, value, attn_bias=bias, query_mask=mask, key_mask=mask)


def assert_same_step(first: nn.Module, second: nn.Module, inputs: list[Tensor], tolerance: float) -> None:
    outputs = [module(*inputs) for module in (first, second)]
    torch.testing.assert_close(*outputs, rtol=tolerance, atol=tolerance)
    gradients = [torch.autograd.grad(output.square().sum(), inputs) for output in outputs]
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def test_compiles_without_graph_breaks(normalizer) -> None:
    torch._dynamo.reset()
    module, inputs = Attend(normalizer), [*tokens(2, 3), torch.randn(6, 6, requires_grad=True)]
    assert_same_step(torch.compile(module, fullgraph=True, backend="aot_eager"), module, inputs, 0.0)


def test_derivatives_it_does_not_have_are_refused_in_words() -> None:
    normalizer = get_normalizer("unbalanced_sinkhorn", n_iters=3)
    query, key, value = tokens(2, 3)
    output = normalizer.attend(query, key, value)
    (gradient,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"use the normalizer's coupling\(query, key, \.\.\.\) @ value"):
        gradient.sum().backward()
    fixed = [tensor.detach() for tensor in (query, key, value)]
    with pytest.raises(NotImplementedError, match=r"torch\.func transforms .* the normalizer's coupling"):
        torch.func.grad(lambda q: normalizer.attend(q, *fixed[1:]).sum())(fixed[0])
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        normalizer.attend(forward_ad.make_dual(fixed[0], torch.ones_like(fixed[0])), *fixed[1:])
    small = [tensor[0, 0].double() for tensor in fixed]  # and the advice holds
    torch.func.hessian(lambda q: (normalizer.coupling(q, small[1]) @ small[2]).square().sum())(small[0])


def test_works_under_gradient_checkpointing(normalizer) -> None:
    query, key, value = tokens(2, 3)

    def attend(*inputs: Tensor) -> Tensor:
        return normalizer.attend(*inputs, dropout_p=0.3)

    gradients = []
    for call in (attend, lambda *inputs: torch.utils.checkpoint.checkpoint(attend, *inputs, use_reentrant=False)):
        torch.manual_seed(1)
        gradients.append(torch.autograd.grad(call(query, key, value).square().sum(), (query, key, value)))
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


PORTABLE = "whole", "kept", "recomputed", "log domain", "log domain by blocks", "device", "captured"


@pytest.mark.parametrize("engine", [*PORTABLE, "native blocks", "native threads"], indirect=True)
@pytest.mark.parametrize("options", range(4))
def test_every_way_through_the_engines(engine, make_problem, matches_definition, options: int) -> None:
    """Blocks of 16 rows, of which the last is smaller."""
    masks = {"query_mask": random_mask(2, 3, 40), "key_mask": random_mask(2, 1, 9, seed=1), "dropout_p": 0.2}
    bias = torch.randn(3, 40, 9).double().masked_fill(~random_mask(3, 40, 9), -math.inf)
    bias[1, :, 2] = bias[2, 20] = -math.inf
    given = ({}, masks, {"attn_bias": bias}, {"attn_bias": bias[:, :1], **masks})[options]
    normalizers = [get_normalizer("sigmoid"), get_normalizer("sigmoid", bias=-3.5)]
    normalizers += [
        get_normalizer("unbalanced_sinkhorn", n_iters=n_iters, rho=rho) for n_iters in (1, 2, 5) for rho in (0.05, 10.0)
    ]
    for normalizer in normalizers:
        for std in (1, 30):
            matches_definition(normalizer, make_problem(40, 9, std=std, **given))


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("rho", [0.05, 0.5, 10.0, 1e4])
@pytest.mark.parametrize("n_iters", [1, 2, 3, 4, 5, 20, 21])
def test_unbalanced_matches_its_definition(make_problem, matches_definition, n_iters: int, rho: float, dtype) -> None:
    for n, m in ((7, 7), (5, 9), (9, 5), (6, 1), (1, 1)):
        matches_definition(get_normalizer("unbalanced_sinkhorn", n_iters=n_iters, rho=rho), make_problem(n, m), dtype)


@pytest.mark.parametrize("n_iters", [3, 4])
def test_undamped_it_is_sinkhorn(make_problem, n_iters: int) -> None:
    normalizer = get_normalizer("unbalanced_sinkhorn", n_iters=n_iters, rho=math.inf)
    for std in (1, 100):
        query, key, value, weights, *_ = make_problem(7, 9, std=std)
        inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
        got = normalizer.attend(*inputs, key_mask=torch.arange(9) < 7)
        want = sinkhorn_attention_reference(*inputs, n_iters, query.shape[-1] ** -0.5, key_mask=torch.arange(9) < 7)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
        for one, other in zip(*(torch.autograd.grad(out, inputs, weights) for out in (got, want)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


def exact_problem(make_problem, std: float, n: int = 12, m: int = 12, **options: object):
    """Scores of about that standard deviation that float32 holds exactly: integers over 4."""
    problem = make_problem(n, m, std=std, scale=0.25, **options)
    query, key = (problem.query * math.sqrt(2)).round(), (problem.key * 2).round() / 2
    return problem._replace(query=(2 * query).round() / 2, key=key)


@pytest.mark.parametrize("rho", [0.5, 10.0])
@pytest.mark.parametrize("n_iters", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("std", [1, 30, 100])
def test_unbalanced_with_large_logits(make_problem, matches_definition, std: float, n_iters: int, rho: float) -> None:
    normalizer = get_normalizer("unbalanced_sinkhorn", n_iters=n_iters, rho=rho)
    masks = {"query_mask": random_mask(2, 3, 12), "key_mask": random_mask(2, 1, 12, seed=1), "dropout_p": 0.2}
    for dtype in PRECISIONS:
        matches_definition(normalizer, exact_problem(make_problem, std), dtype)
        matches_definition(normalizer, exact_problem(make_problem, std, **masks), dtype)


@pytest.mark.parametrize("n_iters", [100, 101])
@pytest.mark.parametrize("std", [100, 300])
def test_what_the_exponential_domain_cannot_hold(make_problem, matches_definition, std: float, n_iters: int) -> None:
    """Peaked logits, many half-steps and little damping: some heads leave the trusted range, others do not."""
    problem = exact_problem(make_problem, std, 10, 10, lead=(4, 6))
    normalizer = get_normalizer("unbalanced_sinkhorn", n_iters=n_iters, rho=100.0)
    for dtype in PRECISIONS:
        matches_definition(normalizer, problem, dtype, 1e-10 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("rho", [0.05, 10.0, 1e3])
@pytest.mark.parametrize("n_iters", [1, 3, 4, 9])
def test_unbalanced_far_rows_and_columns(make_problem, matches_definition, n_iters: int, rho: float) -> None:
    """A damped column step sees how far a column was shifted, also where 2 to that shift is 0 in single precision."""
    normalizer = get_normalizer("unbalanced_sinkhorn", n_iters=n_iters, rho=rho)
    for far in (-2000.0, -300.0, 300.0, 2000.0):
        column, row = torch.zeros(10).double(), torch.zeros(10, 1).double()
        column[3], row[4] = far, far
        for bias in (column, row):
            matches_definition(normalizer, make_problem(10, 10, attn_bias=bias))
            # float32 rounds such a score by up to |score| 2^-24, which is the relative error of its exponential.
            tolerance = max(1e-5, 4 * abs(far) * 2**-24)
            matches_definition(normalizer, make_problem(10, 10, attn_bias=bias), torch.float32, tolerance)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("bias", [None, 0.0, -3.5, 40.0])
@pytest.mark.parametrize(("n", "m"), [(7, 7), (5, 9), (40, 3), (6, 1), (1, 1)])
def test_sigmoid_matches_its_definition(
    make_problem, matches_definition, n: int, m: int, bias: float | None, dtype
) -> None:
    matches_definition(get_normalizer("sigmoid", bias=bias), make_problem(n, m), dtype)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("std", [30, 100, 300])
def test_sigmoid_with_large_logits(make_problem, matches_definition, std: float, dtype) -> None:
    """Scores that float32 holds exactly, so that the map alone is compared."""
    problem = make_problem(12, 12, scale=0.25)
    problem = problem._replace(query=(problem.query * math.sqrt(2) * std).round(), key=(problem.key * 2).round() / 2)
    matches_definition(get_normalizer("sigmoid"), problem, dtype)


@pytest.mark.parametrize("n_hidden", [0, 2])
def test_the_bias_of_sigmoid_counts_the_keys_that_are_seen(n_hidden: int) -> None:
    """By masks, and by columns of -inf: at scores of 0 a row that sees all m keys sums to m / (m + 1)."""
    query, key, value = torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 8, 4), torch.ones(2, 3, 8, 1)
    key_mask = torch.arange(8) < 6
    bias = torch.zeros(2, 1, 5, 8)
    bias[1, ..., :n_hidden] = -math.inf
    bias[0, ..., 0, 3] = -math.inf  # hidden from one query alone: the key counts
    output = get_normalizer("sigmoid").attend(query, key, value, attn_bias=bias, key_mask=key_mask)
    torch.testing.assert_close(output[1], torch.full((3, 5, 1), (6 - n_hidden) / (7 - n_hidden)))
    torch.testing.assert_close(output[0, :, 1:], torch.full((3, 4, 1), 6 / 7))
    torch.testing.assert_close(output[0, :, 0], torch.full((3, 1), 5 / 7))


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_sigmoid_with_a_causal_bias(make_problem, matches_definition, dtype) -> None:
    causal = torch.zeros(7, 7).double().masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -math.inf)
    matches_definition(get_normalizer("sigmoid"), make_problem(7, 7, attn_bias=causal), dtype)
    matches_definition(get_normalizer("sigmoid"), make_problem(7, 7, attn_bias=causal == 0), dtype)
    rows = {"query_mask": random_mask(2, 3, 7), "key_mask": random_mask(2, 1, 7, seed=1)}
    matches_definition(get_normalizer("sigmoid"), make_problem(7, 7, attn_bias=causal, **rows), dtype)


def test_the_count_of_keys_matters(make_problem, matches_definition, monkeypatch) -> None:
    """A deliberately wrong sigmoid, whose bias misses a key, is caught."""
    honest, calls = sigmoid._log_count, []

    def missing_one(support: Tensor) -> Tensor:
        calls.append(None)
        return honest(support) if len(calls) > 1 else (honest(support).exp() - 1).log()

    monkeypatch.setattr(sigmoid, "_log_count", missing_one)
    with pytest.raises(AssertionError, match="off by"):
        matches_definition(get_normalizer("sigmoid"), make_problem(7, 7))


def test_saves_no_map_for_backward(normalizer, saved_bytes, monkeypatch) -> None:
    """Inputs, output and vectors, whatever the number of chunks; a chunk of sigmoid may keep its tokens."""
    monkeypatch.setattr(portable, "CHUNK_BYTES", 1)
    heads, n, m, width = 6, 96, 80, 8
    inputs = tokens(2, 3, n=n, m=m, width=width)
    without_map = heads * 4 * (2 * (n + m) * width + 3 * (n + 2 * m))
    saved = saved_bytes(lambda: normalizer.attend(*inputs))
    assert saved <= without_map < heads * n * m * 4
    bias = torch.randn(n, m, requires_grad=True)
    assert saved_bytes(lambda: normalizer.attend(*inputs, attn_bias=bias)) <= without_map + n * m * 4
    assert saved_bytes(lambda: normalizer.attend(*inputs, dropout_p=0.1)) <= without_map + heads * n * m


def test_a_damped_step_saves_its_scaling_and_the_inverse_column_sums(saved_bytes) -> None:
    heads, n, m = 6, 64, 48
    inputs = [torch.randn(2, 3, size, 8, requires_grad=True) for size in (n, m, m)]
    one, many = (
        saved_bytes(lambda t=t: get_normalizer("unbalanced_sinkhorn", n_iters=t).attend(*inputs)) for t in (1, 21)
    )
    assert many - one == 4 * heads * (10 * n + 20 * m)


def test_the_operator_of_damped_steps_passes_opcheck() -> None:
    query, key, value = tokens(2, 3)
    bias, mask = torch.randn(3, 6, 6, requires_grad=True), torch.rand(2, 1, 6) > 0.3
    operator: Operator = unbalanced.unbalanced
    numbers = (4, 0.5, False, 0.7)
    torch.library.opcheck(operator.forward, (query, key, value, None, None, None, None, None, *numbers, 0.0))
    keep = torch.rand(2, 3, 6, 6) > 0.2
    torch.library.opcheck(operator.forward, (query, key, value, None, bias, mask, mask, keep, *numbers, 0.2))
