"""The Triton engine against the float64 reference, in value and gradient.

On a GPU where there is one; elsewhere `test_triton.py` runs this file in a process of its own, in Triton's interpreter.
"""

import math
import os

import pytest
import torch
from sinkhorn_attention import sinkhorn_attention
from sinkhorn_attention.engines import operator_of
from sinkhorn_attention.engines.problem import Problem
from sinkhorn_attention.engines.proof import disagreement
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="the triton package is not installed; it comes with torch on Linux")
from sinkhorn_attention.engines import triton as triton_engine  # noqa: E402
from sinkhorn_attention.engines import triton_whole_heads  # noqa: E402

pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="no GPU; run by test_triton.py in Triton's interpreter",
    ),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),
]


@pytest.fixture(params=["whole heads", "tiles"])
def family(request, small_tiles) -> str:
    """The kernels that keep a head's keys on the chip, and those that go tile by tile, in tiles of 32."""
    if request.param == "tiles":
        small_tiles()
    return request.param


@pytest.fixture
def check(matches_reference, family):  # type: ignore[no-untyped-def]
    def run(problem, dtype: torch.dtype = torch.float32, tolerance: float | None = None) -> None:  # type: ignore[no-untyped-def]
        matches_reference(problem, "triton", dtype, tolerance, DEVICE)

    return run


def tokens(n: int, m: int, *lead: int, width: int = 8, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(n, width), (m, width), (m, 5)]
    return [torch.randn(*lead, *shape, generator=generator).to(DEVICE, dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("n_iters", "gradient"),
    [*((n_iters, "unrolled") for n_iters in (1, 2, 3, 4, 5, 12, 21)), *((i, "detached") for i in (1, 2, 3, 4))],
)
def test_counts_of_half_steps(make_problem, check, n_iters: int, gradient: str) -> None:
    check(make_problem(7, 9, n_iters, lead=(1,), gradient=gradient))


@pytest.mark.parametrize(("n", "m", "width", "value_width"), [(1, 1, 8, 5), (70, 3, 1, 17), (19, 130, 24, 8)])
@pytest.mark.parametrize("n_iters", [3, 4])
def test_shapes(make_problem, check, n_iters: int, n: int, m: int, width: int, value_width: int) -> None:
    """Sizes at which blocks of rows, of columns and of widths are partly filled, once and several times."""
    check(make_problem(n, m, n_iters, lead=(1,), width=width, value_width=value_width))


@pytest.mark.parametrize(("n", "m", "n_iters"), [(300, 270, 3), (3, 300, 4)])
def test_more_keys_than_fit_on_the_chip(make_problem, matches_reference, n: int, m: int, n_iters: int) -> None:
    """Tiles as a GPU gets them, of which the last ones are partly filled."""
    matches_reference(make_problem(n, m, n_iters, lead=(1,)), "triton", torch.float32, None, DEVICE)


def test_wide_heads(make_problem, matches_reference) -> None:
    problem = make_problem(20, 40, 4, lead=(1,), width=130, value_width=256)
    matches_reference(problem, "triton", torch.float32, None, DEVICE)


@pytest.mark.parametrize("n_iters", [2, 5])
def test_damping(family, n_iters: int) -> None:
    """Of unbalanced steps, against the portable engine in float64, which test_unbalanced_and_sigmoid.py holds."""
    query, key, value = tokens(20, 18, 2)
    mask = torch.arange(18, device=DEVICE) > torch.tensor([[2], [11]], device=DEVICE)
    for damping in (0.5, 1e-3):
        problem = Problem(query, key, value, key_mask=mask, n_iters=n_iters, scale=0.5, damping=damping)
        assert disagreement(operator_of("triton").engine, problem, (1e-5, 1e-5)) is None


def test_interleaved_tokens_are_read_where_they_lie(family) -> None:
    """As timm's (batch, n, 3, heads, width) and fairseq's (n, batch, heads, width) projections have them."""
    generator = torch.Generator().manual_seed(0)
    of_timm = torch.randn(2, 20, 3, 2, 8, generator=generator).to(DEVICE).permute(2, 0, 3, 1, 4).unbind(0)
    of_fairseq = [torch.randn(20, 1, 2, 8, generator=generator).to(DEVICE).permute(1, 2, 0, 3) for _ in range(3)]
    for query, key, value in (of_timm, of_fairseq):
        problem = Problem(query, key, value, n_iters=2, scale=0.5)
        call = triton_engine._Call(problem, operator_of("triton").engine.state(problem))
        addresses = [call.arguments[name].data_ptr() for name in "QKV"]
        assert addresses == [tensor.data_ptr() for tensor in (query, key, value)]
        leaves = [[t.detach().requires_grad_() for t in (query, key, value)]]
        leaves.append([t.detach().contiguous().requires_grad_() for t in (query, key, value)])
        found = []
        for inputs in leaves:
            output = sinkhorn_attention(*inputs, 2, backend="triton")
            found.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
        for one, other in zip(*found, strict=True):
            assert torch.equal(one, other)


def test_leading_dimensions(make_problem, check) -> None:
    check(make_problem(5, 6, 2, lead=()))
    check(make_problem(5, 6, 2, lead=(2, 1, 2)))


@pytest.mark.parametrize("n_iters", [3, 4])
def test_masks(make_problem, check, n_iters: int) -> None:
    """The columns' target n_valid / m_valid differs between samples; one sample has nothing."""
    query_mask = torch.arange(20) < torch.tensor([[17], [3], [0]])
    key_mask = torch.arange(9) >= torch.tensor([[0], [5], [9]])
    check(make_problem(20, 9, n_iters, lead=(3,), query_mask=query_mask, key_mask=key_mask))
    check(make_problem(20, 9, n_iters, lead=(1, 2), key_mask=torch.arange(9) > 3))


@pytest.mark.parametrize(
    ("shape", "n_iters"), [((20, 18), 4), ((2, 1, 20, 18), 3), ((2, 20, 1), 3), ((1, 18), 4), ((18,), 3)]
)
def test_bias(make_problem, check, shape: tuple[int, ...], n_iters: int) -> None:
    bias = torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    # What adds the same number to a row, or to a column, has next to no gradient: an absolute tolerance.
    check(make_problem(20, 18, n_iters, lead=(2, 2), attn_bias=bias), tolerance=2e-5)


@pytest.mark.parametrize("n_iters", [3, 4])
def test_support(make_problem, check, n_iters: int) -> None:
    """A row and a column without support count as masked, in the counts too."""
    keep = torch.rand(20, 18, generator=torch.Generator().manual_seed(2)) > 0.3
    keep[4], keep[:, 7] = False, False
    check(make_problem(20, 18, n_iters, lead=(1,), attn_bias=keep))
    added = torch.zeros(1, 20, 18).masked_fill(~keep, -math.inf)
    check(make_problem(20, 18, n_iters, lead=(1,), attn_bias=added.double()))


@pytest.mark.parametrize(("n_iters", "gradient"), [(1, "unrolled"), (3, "unrolled"), (4, "unrolled"), (4, "detached")])
def test_dropout(make_problem, check, n_iters: int, gradient: str) -> None:
    check(make_problem(20, 18, n_iters, lead=(1,), dropout_p=0.4, gradient=gradient))


@pytest.mark.parametrize("std", [30.0, 300.0])
@pytest.mark.parametrize("n_iters", [4, 7])
def test_large_scores(make_problem, check, n_iters: int, std: float) -> None:
    """Scores up to about 1000: float32 leaves their exponentials an error of 1e-4."""
    check(make_problem(24, 24, n_iters, lead=(1,), std=std), tolerance=1e-4)


def test_far_rows_and_columns(make_problem, check) -> None:
    """A column 2000 below all others has no weight that float32 could hold in any row before its own step."""
    bias = torch.zeros(12, 12, dtype=torch.float64)
    bias[3] -= 2000
    bias[:, 5] -= 2000
    check(make_problem(12, 12, 5, lead=(1,), attn_bias=bias), tolerance=2e-4)
    query, key, value = (1e15 * t for t in tokens(12, 12))
    assert sinkhorn_attention(query, key, value, 7, backend="triton").isfinite().all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 1.5e-2)])
@pytest.mark.parametrize("n_iters", [3, 4])
def test_low_precision(make_problem, check, n_iters: int, dtype: torch.dtype, tolerance: float) -> None:
    """Tokens rounded to the dtype on both sides: what is left is the coupling's own rounding, once.

    The interpreter has no products of bfloat16: it takes the tokens in float32 there, without that rounding.
    """
    problem = make_problem(40, 33, n_iters, lead=(1,), std=4.0, width=16)
    rounded = [tensor.to(dtype).double() for tensor in problem[:4]]
    check(problem._replace(**dict(zip(problem._fields[:4], rounded, strict=True))), dtype, tolerance)


def test_one_sample_does_not_see_its_batch() -> None:
    query, key, value = tokens(20, 18, 3, 1)
    out = sinkhorn_attention(query, key, value, 5, backend="triton")
    assert torch.equal(out[1:2], sinkhorn_attention(query[1:2], key[1:2], value[1:2], 5, backend="triton"))


def test_operator_is_registered_soundly() -> None:
    """Schema, fake kernel and autograd registration, as torch checks them."""
    operator = operator_of("triton")
    query, key, value = (t.requires_grad_() for t in tokens(6, 7, 2))
    bias = torch.zeros(6, 7, device=DEVICE, requires_grad=True)
    mask = torch.ones(2, 7, dtype=torch.bool, device=DEVICE)
    keep = torch.ones(2, 6, 7, dtype=torch.bool, device=DEVICE)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    for optional, dropout_p in (((None, None, None, None), 0.0), ((bias, mask[:, :6], mask, keep), 0.5)):
        given = (query, key, value, None, *optional, 3, 0.3, False, 1.0, dropout_p)
        torch.library.opcheck(operator.forward, given, test_utils=checks)


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU: there is nothing to synchronise with")
def test_no_synchronisation() -> None:
    inputs = [t.requires_grad_() for t in tokens(40, 33, 2, 2)]
    sinkhorn_attention(*inputs, 5, backend="triton").sum().backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        sinkhorn_attention(*inputs, 5, backend="triton").sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Broken(dict):
    """A kernel that can be looked at, but not run."""

    arg_names = ("Q",)


def test_a_failing_kernel_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_whole_heads, "forward_kernel", Broken({(2,): None}))
    with pytest.raises(RuntimeError, match=r"(?s)Triton engine .* failed on c.*backend='portable'") as raised:
        sinkhorn_attention(*tokens(4, 5, 2), backend="triton")
    assert isinstance(raised.value.__cause__, TypeError)


def test_refusals() -> None:
    query, key, value = tokens(4, 5, 2)
    with pytest.raises(NotImplementedError, match=r"needs float16, bfloat16 or float32 .*float64"):
        sinkhorn_attention(*(t[..., :4, :].double() for t in (query, key, value)), backend="triton")
    with pytest.raises(NotImplementedError, match=r"heads of width 256 at most \(the width is 257\)"):
        sinkhorn_attention(*tokens(4, 5, 2, width=257), backend="triton")
    with pytest.raises(NotImplementedError, match=r"'triton' needs tokens, not given scores"):
        operator_of("triton")(Problem(scores=query))
    query, key, value = (t[..., :4, :].requires_grad_() for t in (query, key, value))
    out = sinkhorn_attention(query, key, value, backend="triton")
    (first,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        first.sum().backward()
