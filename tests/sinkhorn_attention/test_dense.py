"""The dense engine against the definition, in value and in gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sinkhorn_attention import dense, guard, sinkhorn, sinkhorn_attention
from sinkhorn_attention.reference import sinkhorn_reference

SHAPES = [(7, 7), (5, 9), (9, 5), (1, 6), (6, 1), (1, 1)]
PRECISIONS = [torch.float64, torch.float32]


def random_mask(*shape: int, seed: int = 0, keep: float = 0.7) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < keep


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("n_iters", [1, 2, 3, 4, 5, 21])
@pytest.mark.parametrize(("n", "m"), SHAPES)
def test_matches_the_reference(make_problem, matches_reference, n: int, m: int, n_iters: int, dtype) -> None:
    matches_reference(make_problem(n, m, n_iters), dtype=dtype)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("n_iters", [1, 3, 4, 7])
@pytest.mark.parametrize("std", [3, 10, 50, 200])
def test_matches_the_reference_for_large_logits(make_problem, std: float, n_iters: int, dtype, solve_both) -> None:
    """In float32 the scores themselves are rounded: value and gradient are compared at the scores' own precision."""
    solve_both(make_problem(12, 12, n_iters, std=std), dtype)


@pytest.fixture
def solve_both(matches_reference):
    """float64 as everywhere; float32 up to a standard deviation where rounding the scores is not what is measured."""

    def check(problem, dtype) -> None:
        if dtype == torch.float64:
            matches_reference(problem, dtype=dtype)
            return
        query, key, value = (tensor.float() for tensor in problem[:3])
        scale = query.shape[-1] ** -0.5
        # The reference from the very scores that float32 arithmetic gives, so that only the normalisation is compared.
        scores = (scale * query @ key.mT).double()
        want = sinkhorn_reference(scores, problem.n_iters)
        got = sinkhorn(scores.float(), problem.n_iters).double()
        assert got.isfinite().all()
        assert (got - want).norm() <= 1e-4 * want.norm()
        for tensor in (query, key, value):
            tensor.requires_grad_()
        sinkhorn_attention(query, key, value, problem.n_iters).sum().backward()
        assert all(tensor.grad.isfinite().all() for tensor in (query, key, value))

    return check


def test_float32_gradients_hold_their_bound_at_standard_deviation_3(make_problem, matches_reference) -> None:
    for seed in range(5):
        matches_reference(make_problem(24, 24, 5, std=3, seed=seed), dtype=torch.float32)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("n_iters", [1, 2, 3, 6])
@pytest.mark.parametrize(("n", "m"), [(7, 7), (5, 9), (9, 5)])
def test_masks(make_problem, matches_reference, n: int, m: int, n_iters: int, dtype) -> None:
    query_mask, key_mask = random_mask(2, 1, n), random_mask(2, 3, m, seed=1)
    for masks in ({"query_mask": query_mask}, {"key_mask": key_mask}, {"query_mask": query_mask, "key_mask": key_mask}):
        matches_reference(make_problem(n, m, n_iters, **masks), dtype=dtype)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("n_iters", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", [(2, 3, 6, 8), (3, 6, 8), (2, 1, 6, 8), (6, 8), (1, 8), (8,), (6, 1), (2, 3, 1, 1)])
def test_bias_of_every_broadcastable_shape(make_problem, matches_reference, shape, n_iters: int, dtype) -> None:
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()
    matches_reference(make_problem(6, 8, n_iters, attn_bias=bias), dtype=dtype)
    matches_reference(make_problem(6, 8, n_iters, attn_bias=bias, key_mask=random_mask(2, 1, 8)), dtype=dtype)


@pytest.mark.parametrize("n_iters", [1, 2, 3, 6])
def test_support(make_problem, matches_reference, n_iters: int) -> None:
    """-inf and False are no support; a row or column without any counts as masked."""
    keep = random_mask(3, 6, 6, keep=0.6)
    keep[0, 2], keep[1, :, 4] = False, False
    bias = torch.zeros(3, 6, 6, dtype=torch.float64).masked_fill(~keep, -math.inf)
    for attn_bias in (bias, keep):
        matches_reference(make_problem(6, 6, n_iters, attn_bias=attn_bias))
    problem = make_problem(6, 6, n_iters)
    output = sinkhorn_attention(*problem[:3], n_iters, attn_bias=keep)
    assert (output[:, 0, 2] == 0).all()
    masked = sinkhorn_attention(*problem[:3], n_iters, key_mask=random_mask(6, seed=3), query_mask=random_mask(6))
    outer = random_mask(6).unsqueeze(1) & random_mask(6, seed=3)
    torch.testing.assert_close(sinkhorn_attention(*problem[:3], n_iters, attn_bias=outer), masked)


@pytest.mark.parametrize("n_iters", [1, 2, 3, 5])
def test_detached_gradient(make_problem, matches_reference, n_iters: int) -> None:
    for std in (1, 60):
        matches_reference(make_problem(8, 8, n_iters, std=std, gradient="detached"))
        matches_reference(make_problem(6, 9, n_iters, std=std, gradient="detached", key_mask=random_mask(2, 1, 9)))


@pytest.mark.parametrize("dropout_p", [0.2, 1.0])
@pytest.mark.parametrize("n_iters", [1, 2, 3])
def test_dropout_acts_on_the_final_coupling(make_problem, matches_reference, n_iters: int, dropout_p: float) -> None:
    bias = torch.randn(1, 6, 6).double()
    for std in (1, 60):
        matches_reference(make_problem(6, 6, n_iters, std=std, dropout_p=dropout_p))
        matches_reference(make_problem(6, 6, n_iters, std=std, dropout_p=dropout_p, attn_bias=bias))


def test_dropout_keeps_the_expected_share() -> None:
    torch.manual_seed(0)
    query, key = torch.zeros(1, 200, 4), torch.zeros(1, 200, 4)
    dropped = sinkhorn_attention(query, key, torch.eye(200).unsqueeze(0), 3, dropout_p=0.25)
    kept = dropped != 0
    assert abs(kept.float().mean() - 0.75) < 0.01
    torch.testing.assert_close(dropped[kept], torch.full_like(dropped[kept], 1 / 200 / 0.75))


@pytest.mark.parametrize("n_iters", [1, 3, 4, 9])
def test_far_rows_and_columns(make_problem, matches_reference, n_iters: int) -> None:
    """A column at -300, a row at +2000: single precision cannot hold exp of either."""
    for far in (-300.0, 300.0, 2000.0):
        column, row = torch.zeros(10).double(), torch.zeros(10, 1).double()
        column[3], row[4] = far, far
        for bias in (column, row):
            matches_reference(make_problem(10, 10, n_iters, attn_bias=bias))
            # float32 rounds such a score by up to |score| 2^-24, which is the relative error of its exponential.
            tolerance = max(1e-5, 4 * abs(far) * 2**-24)
            matches_reference(make_problem(10, 10, n_iters, attn_bias=bias), dtype=torch.float32, tolerance=tolerance)


@pytest.mark.parametrize("n_iters", [21, 100, 101])
def test_guard_is_taken_per_matrix_and_right_on_both_sides(
    make_problem, matches_reference, monkeypatch, n_iters: int
) -> None:
    """With peaked logits and many half-steps some heads leave the bound, others of the same batch do not."""
    problem = make_problem(10, 10, n_iters, std=100, lead=(4, 6))
    single = [tensor.float() for tensor in problem[:3]]
    in_log_domain = torch.tensor(modes_of(*single[:2], n_iters, 8**-0.5)) == guard.LOG_DOMAIN
    if n_iters > 21:
        assert in_log_domain.any()
        assert not in_log_domain.all()
    # The scores have 7 digits in float32, and reach 300: their own rounding is 3e-5 of a map's entry, more in its tail.
    matches_reference(problem, dtype=torch.float32, tolerance=2e-3)
    for bound in (-1.0, 12.0, 25.0):  # in float64 both sides are exact, wherever the bound is put
        monkeypatch.setitem(guard.GUARD_LOG2, torch.float64, bound)
        flags = torch.tensor(modes_of(*problem[:2], n_iters, 8**-0.5)) == guard.LOG_DOMAIN
        assert flags.all() if bound < 0 else flags.any()
        matches_reference(problem)
        matches_reference(problem._replace(options={"attn_bias": torch.randn(6, 10, 10).double(), "dropout_p": 0.2}))
        matches_reference(problem._replace(options={"gradient": "detached", "key_mask": random_mask(4, 1, 10)}))


def test_guard_b_is_where_it_says() -> None:
    """Scalings just below the bound are trusted, just above are not, and NaN never is."""
    bound = guard.GUARD_LOG2[torch.float32]
    u, v = torch.ones(1, 4, 2), torch.ones(2, 4, 2)
    u[0, 0, 1], v[1, 0, 0] = 2.0 ** (bound / 2), 2.0 ** (bound / 2)
    u[0, 1, 1], v[1, 1, 0] = 2.0 ** (bound / 2), 2.0 ** (bound / 2 + 1)
    u[0, 2, 0] = math.nan
    u[0, 3, 0] = math.inf
    assert guard.trusted_heads(u, v).tolist() == [True, False, False, False]


def modes_of(query, key, n_iters: int = 3, scale: float = 1.0, **masks) -> list[int]:
    """By which case of the guard each head was computed."""
    masks = {"attn_bias": None, "query_mask": None, "key_mask": None} | masks
    value = torch.ones(*key.shape[:-1], 2, dtype=key.dtype)
    with torch.no_grad():
        return dense.attention_forward(query, key, value, n_iters, scale, False, *masks.values(), None, 0.0)[3].tolist()


def test_guard_a_is_where_it_says() -> None:
    """Norms, the scale and the bias count together; NaN, infinity and a -inf in the bias are never bounded."""
    bound = guard.BOUNDED_LOG2 / math.log2(math.e)
    query, key = torch.zeros(1, 4, 3), torch.zeros(1, 5, 3)
    query[0, 2, 0], key[0, 1, 1] = 2.0, 3.0  # orthogonal: the bound is by norms
    assert modes_of(query, key, scale=0.999 * bound / 6) == [guard.BOUNDED]
    assert modes_of(query, key, scale=1.001 * bound / 6) == [guard.SHIFTED]
    assert modes_of(query, key, scale=-1.001 * bound / 6) == [guard.SHIFTED]
    for sign in (1, -1):
        bias = torch.zeros(4, 5)
        bias[1, 1] = sign * (bound - 6) * 0.999
        assert modes_of(query, key, attn_bias=bias) == [guard.BOUNDED]
        bias[1, 1] = sign * (bound - 6) * 1.001
        assert modes_of(query, key, attn_bias=bias) == [guard.SHIFTED]
    for odd in (-math.inf, math.nan):
        bias[1, 1] = odd
        assert modes_of(query, key, attn_bias=bias) != [guard.BOUNDED]
    for odd in (math.inf, math.nan):
        query[0, 0, 0] = odd
        assert modes_of(query, key) == [guard.LOG_DOMAIN]
        mask = torch.tensor([[False, True, True, True]])
        assert modes_of(query, key, query_mask=mask) == [guard.BOUNDED], "what is masked counts nowhere"


@pytest.mark.parametrize("n_iters", [1, 4, 5, 101])
def test_guard_a_holds_at_its_bound(make_problem, matches_reference, n_iters: int) -> None:
    """Scores of +-bound, laid out so that rows, columns and blocks pull against each other."""
    bound = 0.9999 * guard.BOUNDED_LOG2 / math.log2(math.e)
    problem = make_problem(12, 12, n_iters)
    base = torch.zeros_like(problem.query[..., :1])
    for pattern in ("triangle", "blocks", "one row", "signs"):
        bias = torch.full((12, 12), -bound, dtype=torch.float64)
        if pattern == "triangle":
            bias[torch.ones(12, 12, dtype=torch.bool).tril()] = bound
            bias[0, -1] = bias[-1, 0] = bound
        elif pattern == "blocks":
            bias[:5, :7] = bias[5:, 7:] = bound
        elif pattern == "one row":
            bias[3] = bound
            bias[:, 4] = bound
        else:
            bias = torch.where(random_mask(12, 12, keep=0.5), bound, -bound).double()
        flat = problem._replace(query=base, key=base, options={"attn_bias": bias, "scale": 1.0})
        assert set(modes_of(base.float(), base.float(), n_iters, attn_bias=bias.float()[None])) == {guard.BOUNDED}
        matches_reference(flat)
        matches_reference(flat, dtype=torch.float32, tolerance=2e-5)


@pytest.mark.parametrize("n_iters", [1, 2, 3, 6])
def test_the_path_of_other_devices(make_problem, matches_reference, monkeypatch, n_iters: int) -> None:
    """Off the CPU everything runs in the log domain and in the inputs' precision; here that path runs on the CPU."""
    monkeypatch.setattr(dense, "in_log_domain_throughout", lambda device: True)
    monkeypatch.setattr(dense, "DEVICE_CHUNK_BYTES", 400)
    monkeypatch.setattr(torch.Tensor, "nonzero", None)  # what would synchronise
    for options in (
        {},
        {"attn_bias": torch.randn(3, 6, 8).double(), "dropout_p": 0.3},
        {"query_mask": random_mask(2, 1, 6), "key_mask": random_mask(2, 3, 8)},
        {"gradient": "detached"},
    ):
        for dtype in PRECISIONS:
            matches_reference(make_problem(6, 8, n_iters, **options), dtype=dtype)
    matches_reference(make_problem(6, 8, n_iters, std=100))
    scores = torch.randn(2, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(sinkhorn(scores, n_iters), sinkhorn_reference(scores, n_iters))


@pytest.mark.parametrize("chunk_bytes", [1, 400, 900])
def test_chunks_do_not_change_the_result(make_problem, matches_reference, monkeypatch, chunk_bytes: int) -> None:
    monkeypatch.setattr(dense, "CHUNK_BYTES", chunk_bytes)
    for options in ({}, {"attn_bias": torch.randn(3, 1, 7).double()}, {"key_mask": random_mask(2, 1, 7)}):
        for std in (1, 60):
            matches_reference(make_problem(7, 7, 5, std=std, **options))


@pytest.mark.parametrize(
    "shape", [((0, 3, 5, 4), (0, 3, 6, 4)), ((2, 3, 0, 4), (2, 3, 6, 4)), ((2, 3, 5, 4), (2, 3, 0, 4))]
)
def test_empty_dimensions(shape) -> None:
    query, key = torch.randn(shape[0], requires_grad=True), torch.randn(shape[1], requires_grad=True)
    for backend in ("dense", "reference"):
        output = sinkhorn_attention(query, key, key, 3, backend=backend)
        assert output.shape == query.shape
        assert (output == 0).all()
        output.sum().backward()
        assert (query.grad == 0).all()
    assert sinkhorn(query @ key.mT, 3).shape == (*query.shape[:-1], key.shape[-2])


def test_saves_no_map_and_few_vectors_for_backward() -> None:
    """What autograd keeps: inputs and the scalings; bytes grow by vectors with n_iters, never by n * m."""

    def saved_bytes(n_iters: int, **options: object) -> int:
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            sinkhorn_attention(query, key, value, n_iters, **options)
        return sum(sizes.values())

    heads, n, d = 6, 64, 8
    query, key, value = (torch.randn(2, 3, n, d, requires_grad=True) for _ in range(3))
    one, many = saved_bytes(1), saved_bytes(21)
    tokens = heads * n * d * 4
    assert one <= 4 * tokens + 3 * heads * n * 4, "query, key, value, output and the scalings"
    assert many - one == 20 * heads * n * 4
    assert saved_bytes(21, dropout_p=0.1) - many <= heads * n * n, "dropout keeps one byte per entry"


def test_a_bias_is_not_expanded_for_backward() -> None:
    query, key, value = (torch.randn(8, 4, 16, 8, requires_grad=True) for _ in range(3))
    bias = torch.randn(16, 16, requires_grad=True)
    largest = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        sinkhorn_attention(query, key, value, 3, attn_bias=bias)
    assert largest <= query.numel() * 4


@pytest.mark.parametrize("n_iters", [1, 2, 3, 5])
@pytest.mark.parametrize("std", [1, 80])
def test_coupling_of_given_scores(n_iters: int, std: float) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 6, 9, generator=generator, dtype=torch.float64) * std
    scores[0, 1, 2, 3] = -math.inf
    weights = torch.randn(2, 3, 6, 9, generator=generator, dtype=torch.float64)
    masks = {"query_mask": random_mask(2, 1, 6), "key_mask": random_mask(2, 3, 9, seed=1)}
    for options in ({}, masks):
        ours, theirs = scores.clone().requires_grad_(), scores.clone().requires_grad_()
        got, want = sinkhorn(ours, n_iters, **options), sinkhorn_reference(theirs, n_iters, **options)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
        (got * weights).sum().backward()
        (want * weights).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10)
        assert (ours.grad[0, 1, 2, 3] == 0).all()


def test_gradcheck() -> None:
    """Against finite differences, so that a mistake shared with the reference's autograd would show too."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, 2, size, 4, dtype=torch.float64, requires_grad=True) for size in (4, 5, 5)]
    bias = torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, True, False, True, True])
    for n_iters in (1, 2, 3, 5):
        assert torch.autograd.gradcheck(
            lambda q, k, v, b, t=n_iters: sinkhorn_attention(q, k, v, t, attn_bias=b, key_mask=mask), (*inputs, bias)
        )
        assert torch.autograd.gradcheck(lambda s, t=n_iters: sinkhorn(s, t, key_mask=mask), (bias,))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_problems(make_problem, matches_reference, data) -> None:
    n, m = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    options: dict[str, object] = {}
    seed = data.draw(st.integers(0, 2**16))
    if data.draw(st.booleans()):
        options["query_mask"] = random_mask(2, 1, n, seed=seed)
    if data.draw(st.booleans()):
        options["key_mask"] = random_mask(2, 3, m, seed=seed + 1)
    if data.draw(st.booleans()):
        shape = data.draw(st.sampled_from([(n, m), (3, n, m), (2, 1, 1, m), (1, m), (2, 3, n, 1)]))
        options["attn_bias"] = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()
    options["gradient"] = data.draw(st.sampled_from(["unrolled", "detached"]))
    options["dropout_p"] = data.draw(st.sampled_from([0.0, 0.0, 0.3]))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    std = data.draw(st.sampled_from([0.3, 1, 3] if dtype == torch.float32 else [0.3, 1, 3, 20, 100]))
    problem = make_problem(n, m, data.draw(st.integers(1, 9)), std=std, seed=seed, **options)
    matches_reference(problem, dtype=dtype)


def test_the_column_step_matters(make_problem, matches_reference, monkeypatch) -> None:
    """A deliberately wrong engine, whose column step does nothing, is caught."""
    honest = dense.half_steps

    def without_column_step(kernel, n_iters, u, v, *targets) -> None:
        honest(kernel, n_iters, u, v, *targets)
        v[1:] = v[:1]

    monkeypatch.setattr(dense, "half_steps", without_column_step)
    with pytest.raises(AssertionError, match="output: off by"):
        matches_reference(make_problem(7, 7, 3))
