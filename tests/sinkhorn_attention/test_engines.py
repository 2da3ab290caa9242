"""One matrix: every way through the operator, every kind of call, value and gradient against the float64 reference.

The inputs are those that people met with Sinkhorn attention elsewhere, small, with the right values; see conftest.py
for the engines.
"""

import copy
import math
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sinkhorn_attention import get_normalizer, sinkhorn_attention
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
ON_GPU = torch.cuda.is_available()


def interpreted(engine: Any) -> bool:
    """Whether each call takes seconds: a test tries few numbers then; test_triton_kernels.py has more of them."""
    return engine.backend == "triton" and not ON_GPU


def sparing(engine: Any, wanted: bool) -> None:
    """Leaves a case out where each call takes seconds, and others of the test say as much."""
    if interpreted(engine) and not wanted:
        pytest.skip("Triton's interpreter is slow")


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mask_of(*shape: int, seed: int = 0, keep: float = 0.7) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < keep


#: Calls of (2, 3) heads of 40 queries and 23 keys: three blocks of rows, the last smaller.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "masks": {"query_mask": mask_of(2, 1, 40), "key_mask": mask_of(2, 3, 23, seed=1)},
    "queries": {"query_mask": mask_of(40)},
    "keys": {"key_mask": mask_of(2, 1, 23)},
    "bias": {"attn_bias": normal(3, 40, 23)},
    "bias and masks": {"attn_bias": normal(2, 1, 40, 23), "query_mask": mask_of(2, 3, 40), "key_mask": mask_of(23)},
    "row of bias": {"attn_bias": normal(2, 1, 1, 23)},
    "column of bias": {"attn_bias": normal(40, 1)},
    "number as bias": {"attn_bias": normal(2, 3, 1, 1)},
    "vector of bias": {"attn_bias": normal(23)},
    "support": {"attn_bias": mask_of(3, 40, 23, keep=0.3)},
    "support as bias": {"attn_bias": torch.zeros(40, 23).double().masked_fill(~mask_of(40, 23, keep=0.4), -math.inf)},
    "dropout": {"dropout_p": 0.3},
    "all dropped": {"dropout_p": 1.0},
    "dropout and masks": {"dropout_p": 0.3, "key_mask": mask_of(2, 1, 23), "attn_bias": mask_of(40, 23)},
    "detached": {"gradient": "detached"},
    "detached, masks": {"gradient": "detached", "query_mask": mask_of(2, 1, 40), "key_mask": mask_of(2, 1, 23)},
    "scale": {"scale": -0.2},
}
SEVERAL = ("bias and masks", "dropout and masks", "support as bias")


@pytest.mark.parametrize("n_iters", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("case", CASES)
def test_matches_the_reference(make_problem, agrees, engine, case: str, n_iters: int) -> None:
    """Bounded, shifted and peaked scores in float64, and single precision."""
    sparing(engine, n_iters == 4 and case in SEVERAL)  # test_triton_kernels.py has the counts, and each option alone
    for std in (1, 10, 60) if engine.dtype == torch.float64 else ():
        agrees(make_problem(40, 23, n_iters, std=std, **CASES[case]))
    agrees(make_problem(40, 23, n_iters, **CASES[case]), torch.float32, 2e-5 if "bias" in case else None)


@pytest.mark.parametrize(("n", "m"), [(1, 6), (6, 1), (1, 1), (7, 7), (5, 9), (9, 5), (16, 16), (17, 40), (33, 5)])
def test_shapes(make_problem, agrees, engine, n: int, m: int) -> None:
    sparing(engine, (n, m) in ((1, 1), (5, 9), (17, 40), (33, 5)))
    for lead in ((2,),) if interpreted(engine) else ((), (5,), (2, 3)):
        for n_iters in (4, 5) if interpreted(engine) else (1, 4, 5, 21):
            agrees(make_problem(n, m, n_iters, lead=lead))
    agrees(make_problem(n, m, 5, value_width=12, scale=0.9))


@pytest.mark.parametrize("n_iters", [1, 3, 4, 9])
def test_far_rows_and_columns(make_problem, agrees, engine, n_iters: int) -> None:
    """A column at -300, a row at +2000: single precision cannot hold exp of either."""
    sparing(engine, n_iters in (3, 4))
    for far in (-300.0, 2000.0) if interpreted(engine) else (-300.0, 300.0, 2000.0):
        column, row = torch.zeros(20).double(), torch.zeros(20, 1).double()
        column[3], row[17] = far, far
        for bias in (column, row):
            problem = make_problem(20, 20, n_iters, lead=(2,), attn_bias=bias)
            if engine.dtype == torch.float64:
                agrees(problem)
            # float32 rounds such a score by up to |score| 2^-24, which is the relative error of its exponential.
            agrees(problem, torch.float32, max(2e-5, 4 * abs(far) * 2**-24))


@pytest.mark.parametrize("std", [1, 10, 60])
def test_backward_may_be_called_again(make_problem, engine, std: float) -> None:
    """As for two losses: what forward has saved is read, never written to."""
    sparing(engine, std == 10)
    problem = make_problem(7, 5, 4, lead=(2,), std=std)
    tokens = [
        tensor.to(engine.device, engine.dtype).requires_grad_()
        for tensor in (problem.query, problem.key, problem.value)
    ]
    output = engine(*tokens, 4)
    first, second = (torch.autograd.grad(output.sum(), tokens, retain_graph=True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_saves_no_map_and_few_vectors_for_backward(engine, saved_bytes) -> None:
    """What autograd keeps: inputs and the scalings; bytes grow by vectors with n_iters, never by n * m."""
    if engine.name == "reference":
        pytest.skip("autograd keeps every step of the definition")
    heads, n, d = 2, 32, 4
    query, key, value = (torch.randn(2, n, d, requires_grad=True, device=engine.device) for _ in range(3))
    bias = torch.randn(n, n, requires_grad=True, device=engine.device)

    def saved(n_iters: int, **options: Any) -> int:
        return saved_bytes(lambda: engine(query, key, value, n_iters, **options))

    one, many = saved(1), saved(21)
    tokens = heads * n * d * 4
    assert one <= 4 * tokens + 3 * heads * n * 4, "query, key, value, output and the scalings"
    assert many - one == 20 * heads * n * 4
    assert saved(21, dropout_p=0.1) - many <= heads * n * n, "dropout keeps one byte per entry"
    assert saved(21, attn_bias=bias) - many <= n * n * 4 + heads * 8, "a bias is not expanded"


def tokens(engine: Any, n: int, m: int, *lead: int, width: int = 8, dtype: torch.dtype = torch.float32) -> list:
    generator = torch.Generator().manual_seed(0)
    shapes = (n, width), (m, width), (m, 5)
    return [torch.randn(*lead, *shape, generator=generator).to(engine.device, dtype) for shape in shapes]


def step(attend: Callable[..., Tensor], inputs: list[Tensor], exact: bool = False) -> list[Tensor]:
    """Output and gradients, for the same arriving gradient in float64 (`exact`) as in the inputs' dtype."""
    leaves = [(tensor.double() if exact else tensor.clone()).detach().requires_grad_() for tensor in inputs]
    output = attend(*leaves)
    arriving = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.device, inputs[0].dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, arriving.to(output.dtype))]


def definition(inputs: list[Tensor], n_iters: int, **options: Any) -> list[Tensor]:
    """`step` of the reference in float64."""
    return step(lambda *each: sinkhorn_attention(*each, n_iters, backend="reference", **options), inputs, exact=True)


def assert_near(got: list[Tensor], want: list[Tensor], tolerance: float = 1e-5) -> None:
    """Relative in norm; gradients relative to the largest of them, as one of them may be nothing."""
    size = max([float(each.norm()) for each in want[1:]], default=0.0)
    for place, (one, other) in enumerate(zip(got, want, strict=True)):
        assert one.isfinite().all(), place
        error = (one.double() - other).norm()
        assert error <= tolerance * (size if place else other.norm()), f"{place}: off by {error:.2e}"


# ------------------------------------------------------------------------------------------------- padding and support


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("garbage", [1e4, math.nan, -math.inf])
def test_padding_of_any_amount_on_any_side_with_anything_in_it(engine, garbage: float, side: str) -> None:
    """Padded tokens get exactly 0, take no part in any sum, and change no other token or gradient."""
    sparing(engine, math.isnan(garbage))
    sentences = [[t[i, :length] for t in tokens(engine, 18, 18, 3)] for i, length in enumerate((18, 5, 1))]
    for n_iters, pad in ((1, 3), (2, 20), (7, 3)) if engine.backend != "triton" else ((4, 3), (7, 16)):
        length, alone = 18 + pad, [definition(sentence, n_iters) for sentence in sentences]
        mask = torch.zeros(3, length, dtype=torch.bool, device=engine.device)
        batch = [torch.full((3, length, width), garbage, device=engine.device) for width in (8, 8, 5)]
        places = []
        for i, sentence in enumerate(sentences):
            valid = len(sentence[0])
            places.append(slice(0, valid) if side == "right" else slice(length - valid, length))
            mask[i, places[i]] = True
            for padded, one in zip(batch, sentence, strict=True):
                padded[i, places[i]] = one
        leaves = [padded.requires_grad_() for padded in batch]
        output = engine(*leaves, n_iters, query_mask=mask, key_mask=mask)
        arriving = torch.full_like(output, garbage)
        for i, place in enumerate(places):
            shape = alone[i][0].shape
            arriving[i, place] = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(engine.device)
        got = [output.detach(), *torch.autograd.grad(output, leaves, arriving)]
        for tensor in got:
            assert (tensor[~mask] == 0).all()
        for i, place in enumerate(places):
            assert_near([tensor[i, place] for tensor in got], alone[i], 2e-6)


@pytest.mark.parametrize("n_iters", [1, 2, 3])
def test_a_sample_with_nothing_valid(engine, n_iters: int) -> None:
    """Zeros, finite gradients everywhere, no NaN on the way, and nothing changes for the others."""
    sparing(engine, n_iters > 1)
    inputs = tokens(engine, 18, 18, 3)
    mask = torch.tensor([True, False, True], device=engine.device).unsqueeze(1).expand(3, 18)
    for masks in ({"query_mask": mask, "key_mask": mask}, {"query_mask": mask}, {"key_mask": mask}):
        with torch.autograd.detect_anomaly(check_nan=True):
            got = step(lambda *each, masks=masks: engine(*each, n_iters, **masks), inputs)
        assert all((tensor[1] == 0).all() for tensor in got)
        assert_near([tensor[::2] for tensor in got], [tensor[::2] for tensor in definition(inputs, n_iters)])


@pytest.mark.parametrize("n_iters", [1, 2, 3])
def test_rows_and_columns_without_support(engine, make_problem, agrees, n_iters: int) -> None:
    """False and -inf alike; they count as masked, and are 0."""
    sparing(engine, n_iters > 1)
    keep = torch.rand(2, 18, 20, generator=torch.Generator().manual_seed(2)) < 0.6
    keep[0, 4], keep[0, :, 7], keep[1] = False, False, False
    for bias in (keep, torch.zeros(2, 18, 20).masked_fill(~keep, -math.inf)):
        with torch.autograd.detect_anomaly(check_nan=True):
            agrees(make_problem(18, 20, n_iters, lead=(2,), attn_bias=bias), torch.float32)
    inputs, keep = tokens(engine, 18, 20, 2), keep.to(engine.device)
    got = step(lambda *each: engine(*each, n_iters, attn_bias=keep), inputs)
    assert all((tensor[1] == 0).all() for tensor in got)
    for tensor, dim, nothing in ((got[0], 0, 4), (got[1], 0, 4), (got[2], 0, 7), (got[3], 0, 7)):
        assert (tensor[0].select(dim, nothing) == 0).all()
    rows, columns = keep[0].any(1), keep[0].any(0)
    outer = step(lambda *each: engine(*each, n_iters, attn_bias=rows.unsqueeze(1) & columns), inputs)
    masked = definition(inputs, n_iters, query_mask=rows, key_mask=columns)
    assert_near(outer, masked)


def test_masks_are_those_of_scaled_dot_product_attention_at_one_half_step(engine) -> None:
    """Boolean True keeps; a float mask is added."""
    inputs = tokens(engine, 18, 20, 2)
    keep = torch.rand(2, 18, 20, generator=torch.Generator().manual_seed(2)).to(engine.device) < 0.6
    bias = torch.randn(18, 20, generator=torch.Generator().manual_seed(3)).to(engine.device)
    bias[keep[0]] = -math.inf
    for mask in (keep, bias):
        want = step(lambda *each, mask=mask: scaled_dot_product_attention(*each, attn_mask=mask), inputs)
        assert_near(step(lambda *each, mask=mask: engine(*each, 1, attn_bias=mask), inputs), want)


# ------------------------------------------------------------------------------------------------------------ precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n_iters", [1, 4, 7])
def test_half_precision_keeps_the_half_steps_in_single(engine, n_iters: int, dtype: torch.dtype) -> None:
    """Scores of standard deviation 8: iterations in bfloat16 would leave row sums off by 0.09."""
    sparing(engine, n_iters > 1)
    query, key, value = tokens(engine, 40, 40, 2, width=16)
    inputs = [8 * query, key, value]
    rounded = [tensor.to(dtype) for tensor in inputs]
    got = step(lambda *each: engine(*each, n_iters), rounded)
    assert all(tensor.dtype == dtype for tensor in got)
    assert_near(got, definition(rounded, n_iters), 2 * torch.finfo(dtype).eps)
    if n_iters % 2:
        rows = engine(*rounded[:2], torch.ones_like(rounded[2]), n_iters).float()
        assert (rows - 1).abs().max() < 1e-2
    # A temperature of 0.01 on top of it.
    assert all(tensor.isfinite().all() for tensor in step(lambda *each: engine(*each, n_iters, scale=25.0), rounded))


@pytest.mark.parametrize("n_iters", [1, 4, 7])
def test_autocast_leaves_single_precision_alone(engine, n_iters: int) -> None:
    query, key, value = tokens(engine, 18, 20, 2)
    inputs = [8 * query, key, value]

    def under_autocast(*each: Tensor) -> Tensor:
        with torch.autocast(engine.device, dtype=torch.bfloat16):
            return engine(*each, n_iters)

    got = step(under_autocast, inputs)
    assert all(tensor.dtype == torch.float32 for tensor in got)
    assert_near(got, definition(inputs, n_iters), 3e-5)


def test_large_scores(engine, make_problem, agrees) -> None:
    """Standard deviation 30: exp(scores) overflows. In float32 their own rounding is what is left."""
    for n_iters in (2, 7):
        problem = make_problem(20, 20, n_iters, lead=(2,), std=30)
        agrees(problem, tolerance=1e-4 if engine.dtype == torch.float32 else None)
        agrees(problem, torch.float32, 1e-4)


@pytest.mark.parametrize("n_iters", [1, 2, 3, 4, 7])
def test_scores_up_to_1e30_are_finite_and_normalised(engine, n_iters: int) -> None:
    sparing(engine, n_iters in (3, 4))
    query, key, _ = tokens(engine, 20, 20, 2)
    value = torch.eye(20, device=engine.device).expand(2, 20, 20)
    for size in (1e3, 1e6, 1e15):
        coupling, *gradients = step(lambda *each: engine(*each, n_iters), [size * query, size * key, value])
        assert all(gradient.isfinite().all() for gradient in gradients)
        sums = coupling.sum(-1 if n_iters % 2 else -2)
        if engine.backend == "triton" and n_iters % 2 == 0:
            # Without a map in memory columns are normalised by potentials, which have the rounding of the scores.
            assert coupling.isfinite().all()
            continue
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=1e-5, atol=1e-5)


def test_a_saturated_map_has_small_finite_gradients(engine, make_problem, agrees) -> None:
    eye = torch.eye(16, dtype=torch.float64)
    problem = make_problem(16, 16, 5, width=16, lead=(), scale=1.0)._replace(query=100 * eye, key=eye)
    agrees(problem)
    agrees(problem, torch.float32)


def test_finite_differences(engine) -> None:
    """So that a mistake shared with the reference would show too."""
    if engine.dtype != torch.float64:
        pytest.skip("finite differences want float64")
    inputs = [tensor.double().requires_grad_() for tensor in tokens(engine, 18, 5, 2, width=3)]
    mask = torch.tensor([True, True, False, True, True])
    for n_iters in (1, 4, 5):
        assert torch.autograd.gradcheck(
            lambda *each, t=n_iters: engine(*each, t, key_mask=mask), inputs, fast_mode=True
        )


@pytest.mark.parametrize("n", [7, 18])
@pytest.mark.parametrize("n_iters", [1, 4, 5])
def test_nan_stays_in_its_own_sample(engine, n: int, n_iters: int) -> None:
    sparing(engine, n == 18 and n_iters > 1)
    inputs = tokens(engine, n, n, 3)
    for place in range(3):
        broken = [tensor.clone() for tensor in inputs]
        broken[place][1, 3, 2] = math.nan
        got = step(lambda *each: engine(*each, n_iters), broken)
        assert got[0][1].isnan().any()
        if place < 2 and n_iters > 1:
            assert all(tensor[1].isnan().all() for tensor in got[:3])
        assert_near([tensor[::2] for tensor in got], [tensor[::2] for tensor in definition(inputs, n_iters)])


# ------------------------------------------------------------------------------------------------------ sums and shapes


@pytest.mark.parametrize(("n", "m"), [(18, 18), (2, 8), (20, 3), (1, 1)])
def test_sums_at_every_count_of_half_steps(engine, n: int, m: int) -> None:
    """Odd counts end on rows, which sum to 1; even ones on columns, which sum to n / m, so that nothing grows."""
    query, key, _ = tokens(engine, n, m, 2)
    value = torch.eye(m, device=engine.device).expand(2, m, m)
    for n_iters in (1, 2, 3, 4):
        got = step(lambda *each, t=n_iters: engine(*each, t), [query, key, value])
        want = definition([query, key, value], n_iters)
        assert_near(got, want)
        sums, target = (got[0].sum(-1), 1.0) if n_iters % 2 else (got[0].sum(-2), n / m)
        torch.testing.assert_close(sums, torch.full_like(sums, target), rtol=1e-5, atol=0)
        other = got[0].sum(-2 if n_iters % 2 else -1)
        assert min(n, m) == 1 or other.std() > 1e-4, "the other side is only met in the limit"
    softmax = scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(engine(query, key, value, 1), softmax, rtol=1e-5, atol=1e-6)
    for bad in (0, -1):
        with pytest.raises(ValueError, match="n_iters must be an integer >= 1"):
            engine(query, key, value, bad)


def test_a_batch_equals_a_loop_over_its_samples(engine) -> None:
    """Also where a neighbour is far from convergence, and for one head and one token."""
    for n in (18, 1):
        inputs = tokens(engine, n, n, 3, 2)
        inputs[0][2] *= 80
        batch = step(lambda *each: engine(*each, 7), inputs)
        assert batch[0].shape == (3, 2, n, 5)
        for i in range(3):
            for j in range(2):
                one = [tensor[i : i + 1, j : j + 1] for tensor in inputs]
                assert_near([tensor[i : i + 1, j : j + 1] for tensor in batch[:1]], definition(one, 7)[:1], 1e-4)
                alone = step(lambda *each: engine(*each, 7), [tensor[0, 0] for tensor in one])
                assert alone[0].shape == (n, 5)
                torch.testing.assert_close(alone[0], batch[0][i, j], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("empty", ["batch", "queries", "keys", "width of values"])
def test_empty_inputs_give_zeros_and_gradients(engine, empty: str) -> None:
    n, m, batch = (0 if empty == name else 4 for name in ("queries", "keys", "batch"))
    query, key, value = tokens(engine, n, m, batch)
    value = value[..., :0] if empty == "width of values" else value
    got = step(lambda *each: engine(*each, 4), [query, key, value])
    assert [tensor.shape for tensor in got] == [(batch, n, value.shape[2]), query.shape, key.shape, value.shape]
    assert all((tensor == 0).all() for tensor in got)


def test_tokens_of_width_zero_and_scale_zero_average_the_values(engine) -> None:
    query, key, value = tokens(engine, 18, 20, 2)
    mean = value.mean(-2, keepdim=True).expand(2, 18, 5)
    for n_iters in (3, 4):
        torch.testing.assert_close(engine(query, key, value, n_iters, scale=0.0), mean)
        torch.testing.assert_close(engine(query[..., :0], key[..., :0], value, n_iters), mean)
    negative = step(lambda *each: engine(*each, 3, scale=-0.5), [query, key, value])
    assert_near(negative, definition([query, key, value], 3, scale=-0.5))


def test_views_of_any_strides(engine) -> None:
    """Heads packed as a fused projection gives them, a value that all heads share, an arriving gradient expanded."""
    packed = torch.randn(2, 18, 2, 2, 8, generator=torch.Generator().manual_seed(0)).to(engine.device)
    query, key = packed.permute(2, 0, 3, 1, 4).unbind(0)
    shared = tokens(engine, 18, 18)[2].T.contiguous().T
    for value in (shared, shared.expand(1, 2, 18, 5), packed[:, :, 0].transpose(1, 2)[..., ::2]):
        results = []
        for attend, dtype in ((engine, torch.float32), (sinkhorn_attention, torch.float64)):
            leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (query, key, value)]
            assert dtype == torch.float64 or leaves[0].stride() == query.stride()
            output = attend(*leaves, 5, **({} if attend is engine else {"backend": "reference"}))
            results.append([output.detach(), *torch.autograd.grad(output.sum(), leaves)])
        assert_near(*results)


def test_a_bias_of_another_dtype_and_shape(engine) -> None:
    """Its gradient comes back in its own dtype and shape, also where nothing else wants one."""
    query, key, value = tokens(engine, 18, 20, 2, 2)
    for shape in ((20,), (2, 1, 18, 20)):
        for dtype, tolerance in ((torch.bfloat16, 2**-8), (torch.float64, 2e-5)):
            bias = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(engine.device, dtype)
            ours, theirs = bias.clone().requires_grad_(), bias.double().requires_grad_()
            got = engine(query, key, value, 4, attn_bias=ours)
            want = sinkhorn_attention(
                *(t.double() for t in (query, key, value)), 4, attn_bias=theirs, backend="reference"
            )
            (found,) = torch.autograd.grad(got.square().sum(), ours)
            (expected,) = torch.autograd.grad(want.square().sum(), theirs)
            assert (got.dtype, found.dtype, found.shape) == (torch.float32, dtype, bias.shape)
            assert_near([got.detach(), found], [want.detach(), expected], tolerance)


def test_shapes_without_data(engine) -> None:
    """On the meta device, forward and backward."""
    leaves = [tensor.to("meta").requires_grad_() for tensor in tokens(engine, 18, 20, 3)]
    if engine.backend == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        with pytest.raises(NotImplementedError, match="needs tensors on a CUDA device"):
            engine(*leaves, 4)
        return
    output = engine(*leaves, 4)
    gradients = torch.autograd.grad(output.sum(), leaves)
    assert output.shape == (3, 18, 5)
    assert [gradient.shape for gradient in gradients] == [leaf.shape for leaf in leaves]


# ----------------------------------------------------------------------------------------- programs around the operator


class Host(nn.Module):
    """A model's layer: a mask made on the way, and the operator."""

    def __init__(self, n_iters: int, backend: str) -> None:
        super().__init__()
        self.normalizer = get_normalizer("sinkhorn", n_iters=n_iters, backend=backend)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = torch.arange(key.shape[-2], device=key.device) != 2
        return self.normalizer.attend(2 * query, key, value, key_mask=mask)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """What was compiled with an engine's settings is compiled again for the next."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("n_iters", [3, 4])
def test_pickles_and_copies(engine, n_iters: int) -> None:
    sparing(engine, n_iters == 4)
    host, inputs = Host(n_iters, engine.backend), tokens(engine, 18, 20, 2)
    query, key, value = inputs
    mask = torch.arange(20, device=engine.device) != 2
    want = definition([query, key, value], n_iters, scale=2 * 8**-0.5, key_mask=mask)
    normalizer = pickle.loads(pickle.dumps(host.normalizer))
    for one in (host, copy.deepcopy(host), lambda q, k, v: normalizer.attend(2 * q, k, v, key_mask=mask)):
        assert_near(step(one, inputs), want)


@pytest.mark.usefixtures("fresh_compiler")
def test_compiles_without_a_graph_break(engine) -> None:
    """Also for scores of standard deviation 30, which have another guard's case than those it was compiled with."""
    inputs = tokens(engine, 18, 20, 2)
    host = Host(5, engine.backend)
    compiled = torch.compile(host, fullgraph=True, backend="aot_eager")
    mask = torch.arange(20, device=engine.device) != 2
    for size in (1.0, 15.0):
        sized = [size * inputs[0], *inputs[1:]]
        want = definition(sized, 5, scale=2 * 8**-0.5, key_mask=mask)
        assert_near(step(compiled, sized), want, 1e-5 if size == 1 else 1e-4)


def test_exports_with_dynamic_shapes(engine) -> None:
    dynamic = {0: torch.export.Dim("batch"), 1: torch.export.Dim("n", min=2)}, *({0: torch.export.Dim("batch")},) * 2
    example = tuple(tokens(engine, 18, 20, 2))
    exported = torch.export.export(Host(3, engine.backend), example, dynamic_shapes=dynamic, strict=False).module()
    inputs, mask = tokens(engine, 7, 20, 3), torch.arange(20, device=engine.device) != 2
    assert_near(step(exported, inputs), definition(inputs, 3, scale=2 * 8**-0.5, key_mask=mask))


def test_checkpointing_and_repetition_give_the_same_bits(engine) -> None:
    """Dropout too; and where deterministic algorithms are asked for."""
    inputs, dropout_p = tokens(engine, 18, 20, 2), 0.3

    def attend(*each: Tensor) -> Tensor:
        return engine(*each, 5, dropout_p=dropout_p)

    ways: list[Callable[..., Tensor]] = [
        attend,
        attend,
        lambda *each: checkpoint(attend, *each, use_reentrant=False),
        lambda *each: checkpoint(attend, *each, use_reentrant=True),
    ]
    results = []
    torch.use_deterministic_algorithms(True)
    try:
        for way in ways:
            torch.manual_seed(3)
            leaves = [tensor.clone().requires_grad_() for tensor in inputs]
            output = way(*leaves)
            output.square().sum().backward()
            results.append([output.detach(), *(leaf.grad for leaf in leaves)])
    finally:
        torch.use_deterministic_algorithms(False)
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))
    keep = torch.empty(2, 18, 20, dtype=torch.bool, device=engine.device)
    torch.manual_seed(3)
    factor = keep.bernoulli_(1 - dropout_p).double() / (1 - dropout_p)
    identity = torch.eye(20, device=engine.device).expand(2, 20, 20)
    coupling = sinkhorn_attention(*(tensor.double() for tensor in (*inputs[:2], identity)), 5, backend="reference")
    assert_near(results[0][:1], [(coupling * factor) @ inputs[2].double()])


def test_calls_from_several_threads(engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with numbers of its own: scratch that is shared would show."""
    inputs = [[size * tensor for tensor in tokens(engine, 18, 20, 2)] for size in (0.5, 1.0, 2.0)]
    if interpreted(engine):
        pytest.skip("Triton's interpreter is of one thread")
    want = [definition(each, 4) for each in inputs]
    got: dict[int, list[list[Tensor]]] = {i: [] for i in range(3)}

    def work(i: int) -> None:
        for _ in range(5):
            got[i].append(step(lambda *each: engine(*each, 4), inputs[i]))

    monkeypatch.setattr("sinkhorn_attention.engines.scratch.MIN_BYTES", 1)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(3):
        assert len(got[i]) == 5
        for result in got[i]:
            assert_near(result, want[i])
            assert all(torch.equal(one, two) for one, two in zip(result, got[i][0], strict=True))


def test_transforms(engine) -> None:
    """torch.func works on the reference, and is refused elsewhere rather than wrong."""
    query, key, value = tokens(engine, 4, 5, 2)
    calls: list[Callable[[], Any]] = [
        lambda: torch.func.grad(lambda q: engine(q, key, value, 3).square().sum())(query),
        lambda: torch.vmap(lambda q, k, v: engine(q, k, v, 3))(query, key, value),
        lambda: torch.func.jvp(lambda q: engine(q, key, value, 3), (query,), (query,))[1],
    ]
    if engine.name != "reference":
        for call in calls:
            with pytest.raises(NotImplementedError, match=r"use .*backend='reference'"):
                call()
        return
    leaf = query.clone().requires_grad_()
    (expected,) = torch.autograd.grad(sinkhorn_attention(leaf, key, value, 3).square().sum(), leaf)
    torch.testing.assert_close(calls[0](), expected)
    torch.testing.assert_close(calls[1](), sinkhorn_attention(query, key, value, 3))
    wide = [tensor.double() for tensor in (query, key, value)]
    ahead, behind = (sinkhorn_attention(sign * 1e-6 * wide[0] + wide[0], *wide[1:], 3) for sign in (1, -1))
    torch.testing.assert_close(calls[2]().double(), (ahead - behind) / 2e-6, rtol=1e-4, atol=1e-5)
