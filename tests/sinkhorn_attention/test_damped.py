"""Damped half-steps (`unbalanced_sinkhorn`) against `from_scores` in float64, in value and in gradient."""

import math

import pytest
import torch
from sinkhorn_attention import Normalizer, damped, dense, get_normalizer, guard
from sinkhorn_attention.reference import sinkhorn_attention_reference
from torch import Tensor

PRECISIONS = [torch.float64, torch.float32]


def unbalanced(n_iters: int = 3, rho: float = 10.0) -> Normalizer:
    return get_normalizer("unbalanced_sinkhorn", n_iters=n_iters, rho=rho)


def exact_problem(make_problem, std: float, n: int = 12, m: int = 12, **options: object):
    """Scores of about that standard deviation that float32 holds exactly: integers over 4."""
    problem = make_problem(n, m, std=std, scale=0.25, **options)
    query, key = (problem.query * math.sqrt(2)).round(), (problem.key * 2).round() / 2
    return problem._replace(query=(2 * query).round() / 2, key=key)


def modes_of(problem, n_iters: int, rho: float, bias: Tensor | None = None) -> set[int]:
    """Which cases of the guard forward takes in single precision."""
    scale = problem.options.get("scale", 8**-0.5)
    options = n_iters, rho / (rho + 1), scale, None if bias is None else bias.float(), None, None, None, 0.0
    with torch.no_grad():
        state = damped.attention_forward(*(tensor.float() for tensor in problem[:3]), *options)
    return set(state[3].tolist())


def random_mask(*shape: int, seed: int = 0, keep: float = 0.7) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < keep


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("rho", [0.05, 0.5, 10.0, 1e4])
@pytest.mark.parametrize("n_iters", [1, 2, 3, 4, 5, 20, 21])
@pytest.mark.parametrize(("n", "m"), [(7, 7), (5, 9), (9, 5)])
def test_matches_the_definition(make_problem, matches_definition, n, m, n_iters: int, rho: float, dtype) -> None:
    matches_definition(unbalanced(n_iters, rho), make_problem(n, m), dtype)


@pytest.mark.parametrize("n_iters", [3, 4])
def test_undamped_it_is_sinkhorn(make_problem, n_iters: int) -> None:
    for std in (1, 100):
        query, key, value, weights, *_ = make_problem(7, 9, std=std)
        inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
        got = unbalanced(n_iters, math.inf).attend(*inputs, key_mask=torch.arange(9) < 7)
        want = sinkhorn_attention_reference(*inputs, n_iters, query.shape[-1] ** -0.5, key_mask=torch.arange(9) < 7)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10)
        for one, other in zip(*(torch.autograd.grad(out, inputs, weights) for out in (got, want)), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("rho", [0.5, 10.0])
@pytest.mark.parametrize("n_iters", [1, 2, 3, 4, 7])
@pytest.mark.parametrize(("std", "case"), [(1, guard.BOUNDED), (30, guard.SHIFTED), (100, guard.SHIFTED)])
def test_large_logits(make_problem, matches_definition, std: float, case: int, n_iters: int, rho: float) -> None:
    problem = exact_problem(make_problem, std)
    assert modes_of(problem, n_iters, rho) == {case}
    for dtype in PRECISIONS:
        matches_definition(unbalanced(n_iters, rho), problem, dtype)
        masks = {"query_mask": random_mask(2, 3, 12), "key_mask": random_mask(2, 1, 12, seed=1), "dropout_p": 0.2}
        matches_definition(unbalanced(n_iters, rho), exact_problem(make_problem, std, **masks), dtype)


@pytest.mark.parametrize("n_iters", [100, 101])
@pytest.mark.parametrize("std", [100, 300])
def test_what_the_exponential_domain_cannot_hold(make_problem, matches_definition, std: float, n_iters: int) -> None:
    """Peaked logits, many half-steps and little damping: some heads leave guard B's bound, others do not."""
    problem = exact_problem(make_problem, std, 10, 10, lead=(4, 6))
    assert modes_of(problem, n_iters, 100.0) == {guard.SHIFTED, guard.LOG_DOMAIN}
    for dtype in PRECISIONS:
        matches_definition(unbalanced(n_iters, 100.0), problem, dtype, 1e-10 if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("n_iters", [1, 2, 3, 6])
def test_both_sides_of_guard_b_agree(make_problem, matches_definition, monkeypatch, n_iters: int) -> None:
    """In float64 every case is exact, wherever the bound is put."""
    for std in (30, 300):
        for bound in (-1.0, 12.0, 900.0):
            monkeypatch.setitem(guard.GUARD_LOG2, torch.float64, bound)
            masks = {"query_mask": random_mask(2, 3, 12), "key_mask": random_mask(2, 1, 9, seed=1), "dropout_p": 0.2}
            bias = torch.randn(3, 12, 9).double()
            bias[1, :, 2] = bias[2, 3] = -math.inf
            for options in ({}, masks, {"attn_bias": bias}, {"attn_bias": bias, **masks}):
                matches_definition(unbalanced(n_iters, 2.0), make_problem(12, 9, std=std, **options))


@pytest.mark.parametrize("rho", [0.05, 10.0, 1e3])
@pytest.mark.parametrize("n_iters", [1, 3, 4, 9])
def test_far_rows_and_columns(make_problem, matches_definition, n_iters: int, rho: float) -> None:
    """A damped column step sees how far a column was shifted, also where 2 to that shift is 0 in single precision."""
    for far in (-2000.0, -300.0, 300.0, 2000.0):
        column, row = torch.zeros(10).double(), torch.zeros(10, 1).double()
        column[3], row[4] = far, far
        for bias in (column, row):
            matches_definition(unbalanced(n_iters, rho), make_problem(10, 10, attn_bias=bias))
            # float32 rounds such a score by up to |score| 2^-24, which is the relative error of its exponential.
            tolerance = max(1e-5, 4 * abs(far) * 2**-24)
            matches_definition(unbalanced(n_iters, rho), make_problem(10, 10, attn_bias=bias), torch.float32, tolerance)


@pytest.mark.parametrize("rho", [0.5, 100.0])
@pytest.mark.parametrize("n_iters", [1, 4, 5, 101])
def test_guard_a_holds_at_its_bound(make_problem, matches_definition, n_iters: int, rho: float) -> None:
    """Scores of +-bound, laid out so that rows, columns and blocks pull against each other."""
    bound = 0.9999 * guard.BOUNDED_LOG2 / math.log2(math.e)
    problem = make_problem(12, 12)
    flat = problem._replace(query=torch.zeros_like(problem.query), key=torch.zeros_like(problem.key))
    for pattern in ("triangle", "blocks", "one row", "signs"):
        bias = torch.full((12, 12), -bound, dtype=torch.float64)
        if pattern == "triangle":
            bias[torch.ones(12, 12, dtype=torch.bool).tril()] = bound
            bias[0, -1] = bias[-1, 0] = bound
        elif pattern == "blocks":
            bias[:5, :7] = bias[5:, 7:] = bound
        elif pattern == "one row":
            bias[3] = bias[:, 4] = bound
        else:
            bias = torch.where(random_mask(12, 12, keep=0.5), bound, -bound).double()
        assert modes_of(flat, n_iters, rho, bias) == {guard.BOUNDED}
        at_bound = flat._replace(options={"attn_bias": bias})
        matches_definition(unbalanced(n_iters, rho), at_bound)
        matches_definition(unbalanced(n_iters, rho), at_bound, torch.float32, 2e-5)


@pytest.mark.parametrize("n_iters", [1, 2, 3, 6])
def test_the_path_of_other_devices(make_problem, matches_definition, monkeypatch, n_iters: int) -> None:
    """Off the CPU everything runs in the log domain and in the inputs' precision; here that path runs on the CPU."""
    monkeypatch.setattr(dense, "in_log_domain_throughout", lambda device: True)
    monkeypatch.setattr(dense, "DEVICE_CHUNK_BYTES", 400)
    monkeypatch.setattr(torch.Tensor, "nonzero", None)  # what would synchronise
    for options in (
        {},
        {"attn_bias": torch.randn(3, 6, 8).double(), "dropout_p": 0.3},
        {"query_mask": random_mask(2, 1, 6), "key_mask": random_mask(2, 3, 8)},
    ):
        for dtype in PRECISIONS:
            matches_definition(unbalanced(n_iters, 3.0), make_problem(6, 8, **options), dtype)
    matches_definition(unbalanced(n_iters, 3.0), make_problem(6, 8, std=100))


@pytest.mark.parametrize("side", ["gradient", "value"])
def test_the_damping_matters(make_problem, matches_definition, monkeypatch, side: str) -> None:
    """A deliberately wrong engine, which forgets the damping, is caught."""
    if side == "gradient":
        honest = damped._scores_gradient
        monkeypatch.setattr(damped, "_scores_gradient", lambda *given, damping: honest(*given, damping=1.0))
    else:
        undamped = damped._damper
        monkeypatch.setattr(damped, "_damper", lambda *given: undamped(*given[:-1], 1.0))
    for std in (1, 30):
        with pytest.raises(AssertionError, match="off by"):
            matches_definition(unbalanced(3), make_problem(7, 7, std=std))


def test_saves_vectors_alone_for_each_half_step() -> None:
    """A row step adds its scaling, a column step its scaling and the inverse column sums."""

    def saved_bytes(n_iters: int) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            unbalanced(n_iters).attend(query, key, value)
        return sum(sizes.values())

    heads, n, m = 6, 64, 48
    query, key, value = (torch.randn(2, 3, size, 8, requires_grad=True) for size in (n, m, m))
    assert saved_bytes(1) <= 4 * heads * (2 * n + 2 * m) * 8 + 4 * heads * (n + 2 * m)
    assert saved_bytes(21) - saved_bytes(1) == 4 * heads * (10 * n + 20 * m)
