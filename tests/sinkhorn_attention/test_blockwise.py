"""Blocks of rows, kept (slab), made again (streaming) or in the log domain: tests at many block borders."""

import math

import pytest
import torch
from sinkhorn_attention import blockwise, dense, guard, sinkhorn_attention, streaming


def random_mask(*shape: int, seed: int = 0, keep: float = 0.7) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < keep


@pytest.fixture(params=["slab", "streaming", "log domain"])
def backend(request, monkeypatch) -> str:
    """Blocks of 16 rows, of which the last is smaller; the slab is the dense engine's way with large maps."""
    monkeypatch.setattr(blockwise, "BLOCK_BYTES", 1)
    monkeypatch.setattr(dense, "SLAB_BYTES", 0)
    if request.param == "log domain":  # no head passes guards A and B
        monkeypatch.setattr(guard, "BOUNDED_LOG2", -1.0)
        for dtype in guard.GUARD_LOG2:
            monkeypatch.setitem(guard.GUARD_LOG2, dtype, -math.inf)
    return "dense" if request.param == "slab" else "streaming"


OPTIONS = {
    "plain": {},
    "masks": {"query_mask": random_mask(2, 1, 40), "key_mask": random_mask(2, 3, 23, seed=1)},
    "keys": {"key_mask": random_mask(2, 1, 23)},
    "bias": {"attn_bias": torch.randn(3, 40, 23, generator=torch.Generator().manual_seed(1)).double()},
    "row of bias": {"attn_bias": torch.randn(2, 1, 1, 23, generator=torch.Generator().manual_seed(1)).double()},
    "column of bias": {"attn_bias": torch.randn(40, 1, generator=torch.Generator().manual_seed(1)).double()},
    "support": {"attn_bias": random_mask(3, 40, 23, keep=0.3)},
    "dropout": {"dropout_p": 0.3},
    "dropout and masks": {"dropout_p": 0.3, "key_mask": random_mask(2, 1, 23), "attn_bias": random_mask(40, 23)},
    "detached": {"gradient": "detached", "query_mask": random_mask(2, 1, 40)},
}


@pytest.mark.parametrize("n_iters", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", OPTIONS)
def test_matches_the_reference(make_problem, matches_reference, backend: str, name: str, n_iters: int) -> None:
    for std in (1, 10, 60):
        matches_reference(make_problem(40, 23, n_iters, std=std, **OPTIONS[name]), backend)
    matches_reference(make_problem(40, 23, n_iters, **OPTIONS[name]), backend, torch.float32)


@pytest.mark.parametrize(("n", "m"), [(1, 6), (6, 1), (1, 1), (16, 16), (17, 40), (33, 5)])
def test_shapes(make_problem, matches_reference, backend: str, n: int, m: int) -> None:
    for lead in ((), (5,), (2, 3)):
        matches_reference(make_problem(n, m, 5, lead=lead), backend)


def test_far_rows_and_columns(make_problem, matches_reference, backend: str) -> None:
    for far in (-300.0, 300.0, 2000.0):
        column, row = torch.zeros(20).double(), torch.zeros(20, 1).double()
        column[3], row[17] = far, far
        for bias in (column, row):
            for n_iters in (1, 4, 5):
                matches_reference(make_problem(20, 20, n_iters, attn_bias=bias), backend)
                tolerance = max(1e-5, 4 * abs(far) * 2**-24)
                matches_reference(make_problem(20, 20, n_iters, attn_bias=bias), backend, torch.float32, tolerance)


@pytest.mark.parametrize("n_iters", [21, 100])
def test_the_guard(make_problem, matches_reference, monkeypatch, backend: str, n_iters: int) -> None:
    """Bounded heads and others in one batch, the others on either side of the bound."""
    monkeypatch.setattr(guard, "BOUNDED_LOG2", 28.0)
    problem = make_problem(20, 20, n_iters, std=100, lead=(4, 6))
    problem.query[0] /= 100
    options = n_iters, 8**-0.5, False, None, None, None, None, 0.0
    engine = dense if backend == "dense" else streaming
    for bound, wanted in ((-1.0, guard.LOG_DOMAIN), (900.0, guard.SHIFTED)):
        monkeypatch.setitem(guard.GUARD_LOG2, torch.float64, bound)
        with torch.no_grad():
            modes = engine.attention_forward(*problem[:3], *options)[3].view(4, 6)
        assert (modes[0] == guard.BOUNDED).all()
        assert (modes[1:] == wanted).all()
        matches_reference(problem, backend)


def test_gradcheck(backend: str) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, size, 3, dtype=torch.float64, requires_grad=True) for size in (18, 5, 5)]
    bias = torch.randn(18, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, True, False, True, True])
    for n_iters in (1, 4, 5):
        assert torch.autograd.gradcheck(
            lambda q, k, v, b, t=n_iters: sinkhorn_attention(q, k, v, t, attn_bias=b, key_mask=mask, backend=backend),
            (*inputs, bias),
            fast_mode=True,
        )


def test_the_stream_is_an_operator() -> None:
    query, key, value = (torch.randn(2, 3, 6, 4, requires_grad=True) for _ in range(3))
    bias, mask = torch.randn(3, 6, 6, requires_grad=True), random_mask(2, 1, 6)
    operator = streaming.streaming_attention
    torch.library.opcheck(operator.forward, (query, key, value, 4, 0.5, True, bias, mask, mask, None, 0.0))
    compiled = torch.compile(
        lambda q, k, v: sinkhorn_attention(q, k, v, 3, backend="streaming"), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(query, key, value), sinkhorn_attention(query, key, value, 3))


def test_the_dense_engine_goes_over_to_blocks_by_size(monkeypatch) -> None:
    query, kept = torch.zeros(1, 20, 4), []
    monkeypatch.setattr(dense, "_run_forward", lambda *arguments: kept.append(None))
    monkeypatch.setattr(blockwise, "run_forward", lambda *arguments, keep: kept.append(keep))
    for slab, stream, n_iters in ((1600, 1600, 3), (1599, 1600, 3), (1000, 1599, 3), (1599, 1600, 2)):
        monkeypatch.setattr(dense, "SLAB_BYTES", slab)
        monkeypatch.setattr(dense, "STREAM_BYTES", stream)
        dense.attention_forward(query, query, query, n_iters, 0.5, False, None, None, None, None, 0.0)
    assert kept == [None, True, False, False]
