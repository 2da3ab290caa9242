"""Where a head is computed: which domain is taken, right on both sides of every bound, and how heads share a chunk."""

import math
from collections.abc import Callable

import pytest
import torch
from sinkhorn_attention import get_normalizer, sinkhorn, sinkhorn_attention
from sinkhorn_attention.engines import (
    PORTABLE,
    domains,
    exponential,
    exponential_backward,
    half_steps,
    log_domain,
    portable,
)
from sinkhorn_attention.engines.domains import BOUNDED, LOG_DOMAIN, SHIFTED, merge_domains, runs, trusted_heads
from sinkhorn_attention.engines.native import LIBRARY
from sinkhorn_attention.engines.problem import Problem
from sinkhorn_attention.reference import sinkhorn_reference
from torch import Tensor

PRECISIONS = [torch.float64, torch.float32]
BOUND = domains.BOUNDED_LOG2 / math.log2(math.e)


def domains_of(query: Tensor, key: Tensor, n_iters: int = 3, scale: float = 1.0, **options) -> list[int]:
    """The domain of each head of a call."""
    value = torch.ones(*key.shape[:-1], 2, dtype=key.dtype)
    with torch.no_grad():
        given = Problem(query, key, value, n_iters=n_iters, scale=scale, **options)
        return PORTABLE.engine.forward(given)[3].tolist()


def test_bounded_heads_are_where_it_says() -> None:
    """Norms, the scale and the bias count together; NaN, infinity and a -inf in the bias are never bounded."""
    query, key = torch.zeros(1, 4, 3), torch.zeros(1, 5, 3)
    query[0, 2, 0], key[0, 1, 1] = 2.0, 3.0  # orthogonal: the bound is by norms
    assert domains_of(query, key, scale=0.999 * BOUND / 6) == [BOUNDED]
    assert domains_of(query, key, scale=1.001 * BOUND / 6) == [SHIFTED]
    assert domains_of(query, key, scale=-1.001 * BOUND / 6) == [SHIFTED]
    for sign in (1, -1):
        bias = torch.zeros(4, 5)
        bias[1, 1] = sign * (BOUND - 6) * 0.999
        assert domains_of(query, key, attn_bias=bias) == [BOUNDED]
        bias[1, 1] = sign * (BOUND - 6) * 1.001
        assert domains_of(query, key, attn_bias=bias) == [SHIFTED]
    for odd in (-math.inf, math.nan):
        bias[1, 1] = odd
        assert domains_of(query, key, attn_bias=bias) != [BOUNDED]
    for odd in (math.inf, math.nan):
        query[0, 0, 0] = odd
        assert domains_of(query, key) == [LOG_DOMAIN]
        mask = torch.tensor([[False, True, True, True]])
        assert domains_of(query, key, query_mask=mask) == [BOUNDED], "what is masked counts nowhere"


def patterns(bound: float, random_mask: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Scores of +-bound, laid out so that rows, columns and blocks pull against each other."""
    found = {name: torch.full((12, 12), -bound, dtype=torch.float64) for name in ("triangle", "blocks", "one row")}
    found["triangle"][torch.ones(12, 12, dtype=torch.bool).tril()] = bound
    found["triangle"][0, -1] = found["triangle"][-1, 0] = bound
    found["blocks"][:5, :7] = found["blocks"][5:, 7:] = bound
    found["one row"][3] = found["one row"][:, 4] = bound
    found["signs"] = torch.where(random_mask(12, 12, keep=0.5), bound, -bound).double()
    return found


@pytest.mark.parametrize("rho", [math.inf, 0.5, 100.0])
@pytest.mark.parametrize("n_iters", [1, 4, 5, 101])
def test_bounded_scores_hold_at_their_bound(
    make_problem, matches_reference, matches_definition, random_mask, n_iters: int, rho: float
) -> None:
    problem = make_problem(12, 12, n_iters)
    flat = problem._replace(query=torch.zeros_like(problem.query), key=torch.zeros_like(problem.key))
    for bias in patterns(0.9999 * BOUND, random_mask).values():
        single = flat.query.float(), flat.key.float()
        damping = 1.0 if rho == math.inf else rho / (rho + 1)
        assert set(domains_of(*single, n_iters, attn_bias=bias.float()[None], damping=damping)) == {BOUNDED}
        at_bound = flat._replace(options={"attn_bias": bias, "scale": 1.0})
        if rho == math.inf:
            matches_reference(at_bound)
            matches_reference(at_bound, dtype=torch.float32, tolerance=2e-5)
        else:
            normalizer = get_normalizer("unbalanced_sinkhorn", n_iters=n_iters, rho=rho)
            matches_definition(normalizer, at_bound)
            matches_definition(normalizer, at_bound, torch.float32, 2e-5)


def test_trusted_heads_are_where_it_says() -> None:
    """Scalings just below the bound are trusted, just above are not, and NaN never is."""
    bound = domains.TRUSTED_LOG2[torch.float32]
    u, v = torch.ones(1, 4, 2), torch.ones(2, 4, 2)
    u[0, 0, 1], v[1, 0, 0] = 2.0 ** (bound / 2), 2.0 ** (bound / 2)
    u[0, 1, 1], v[1, 1, 0] = 2.0 ** (bound / 2), 2.0 ** (bound / 2 + 1)
    u[0, 2, 0] = math.nan
    u[0, 3, 0] = math.inf
    assert trusted_heads(u, v).tolist() == [True, False, False, False]


@pytest.mark.parametrize("n_iters", [21, 100, 101])
def test_the_domain_is_taken_per_head_and_right_on_both_sides(
    make_problem, matches_reference, random_mask, monkeypatch, n_iters: int
) -> None:
    """With peaked logits and many half-steps some heads leave the bound, others of the same batch do not."""
    problem = make_problem(10, 10, n_iters, std=100, lead=(4, 6))
    single = [tensor.float() for tensor in problem[:3]]
    in_log_domain = torch.tensor(domains_of(*single[:2], n_iters, 8**-0.5)) == LOG_DOMAIN
    if n_iters > 21:
        assert in_log_domain.any()
        assert not in_log_domain.all()
    # The scores have 7 digits in float32, and reach 300: their own rounding is 3e-5 of a map's entry, more in its tail.
    matches_reference(problem, dtype=torch.float32, tolerance=2e-3)
    for bound in (-1.0, 12.0, 25.0):  # in float64 both sides are exact, wherever the bound is put
        monkeypatch.setitem(domains.TRUSTED_LOG2, torch.float64, bound)
        flags = torch.tensor(domains_of(*problem[:2], n_iters, 8**-0.5)) == LOG_DOMAIN
        assert flags.all() if bound < 0 else flags.any()
        matches_reference(problem)
        matches_reference(problem._replace(options={"attn_bias": torch.randn(6, 10, 10).double(), "dropout_p": 0.2}))
        matches_reference(problem._replace(options={"gradient": "detached", "key_mask": random_mask(4, 1, 10)}))


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("n_iters", [1, 3, 4, 7])
@pytest.mark.parametrize("std", [3, 10, 50, 200])
def test_large_scores_in_single_precision(make_problem, matches_reference, std: float, n_iters: int, dtype) -> None:
    """In float32 the scores themselves are rounded: the map is compared from the very scores that it gives."""
    problem = make_problem(12, 12, n_iters, std=std)
    if dtype == torch.float64:
        matches_reference(problem)
        return
    query, key, value = (tensor.float() for tensor in problem[:3])
    scores = (8**-0.5 * query @ key.mT).double()
    got, want = sinkhorn(scores.float(), n_iters).double(), sinkhorn_reference(scores, n_iters)
    assert (got - want).norm() <= 1e-4 * want.norm()
    for tensor in (query, key, value):
        tensor.requires_grad_()
    sinkhorn_attention(query, key, value, n_iters).sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (query, key, value))


def test_single_precision_holds_its_bound_at_standard_deviation_3(make_problem, matches_reference) -> None:
    for seed in range(5):
        matches_reference(make_problem(24, 24, 5, std=3, seed=seed), dtype=torch.float32)


@pytest.mark.parametrize("chunk_bytes", [1, 400, 900])
def test_chunks_do_not_change_the_result(
    make_problem, matches_reference, matches_definition, random_mask, monkeypatch, chunk_bytes: int
) -> None:
    monkeypatch.setattr(portable, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(portable, "DEVICE_CHUNK_BYTES", chunk_bytes)
    others = [get_normalizer("unbalanced_sinkhorn", n_iters=4), get_normalizer("sigmoid")]
    for options in ({}, {"attn_bias": torch.randn(3, 1, 7).double()}, {"key_mask": random_mask(2, 1, 7)}):
        for std in (1, 60):
            matches_reference(make_problem(7, 7, 5, std=std, **options))
            for normalizer in others:
                matches_definition(normalizer, make_problem(7, 7, std=std, **options))


def test_how_a_map_is_passed_goes_by_its_size(monkeypatch) -> None:
    taken, query = [], torch.zeros(1, 20, 4)

    def recorded(heads, group, shifted, state, output, passes) -> None:
        taken.append("whole" if passes.rows == 20 else "kept" if passes.keep else "recomputed")
        for tensor in (*state, output):
            tensor.zero_()

    monkeypatch.setattr(portable, "exponential_forward", recorded)
    monkeypatch.setattr(portable, "BLOCK_BYTES", 1)
    for large, recompute, n_iters in ((1600, 1600, 3), (1599, 1600, 3), (1000, 1599, 3), (1599, 1600, 2)):
        monkeypatch.setattr(portable, "LARGE_MAP_BYTES", large)
        monkeypatch.setattr(portable, "RECOMPUTE_BYTES", recompute)
        PORTABLE.engine.forward(Problem(query, query, query, n_iters=n_iters, scale=0.5))
    assert taken == ["whole", "kept", "recomputed", "recomputed"]


# ------------------------------------------------------------------------------------------- heads that share a chunk


@pytest.mark.parametrize(
    ("given", "merged"),
    [
        ([0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]),
        ([0, 1, 1, 0, 0, 0], [0, 1, 1, 0, 0, 0]),  # three pieces
        ([0, 1, 0, 1, 0, 0], [1, 1, 1, 1, 1, 1]),
        ([0, 1, 0, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0, 0]),  # the next chunk is left as it is
        ([1], [1]),
    ],
)
def test_scattered_heads_are_shifted_with_their_chunk(given: list[int], merged: list[int]) -> None:
    domain = torch.tensor(given, dtype=torch.uint8)
    merge_domains(domain, 6)
    assert domain.tolist() == merged
    pieces = runs(domain.tolist(), 6)
    assert all(len({merged[head] for head in range(piece.start, piece.stop)}) == 1 for piece, _ in pieces)
    assert [head for piece, _ in pieces for head in range(piece.start, piece.stop)] == list(range(len(given)))


@pytest.mark.parametrize("n_iters", [1, 4, 5])
def test_mixed_heads_match_the_reference(make_problem, matches_reference, n_iters: int) -> None:
    """Bounded, shifted and log-domain heads side by side, in forward's chunks and in backward's."""
    problem = make_problem(12, 9, n_iters, lead=(4, 8))
    problem.query[:, 1::2] *= 30
    problem.query[2, 3] *= 1e4
    domain = torch.tensor(domains_of(*(tensor.float() for tensor in problem[:2]), n_iters, 8**-0.5)).view(4, 8)
    assert (domain != BOUNDED).all(), "one chunk, and every head of it is shifted"
    assert (domain[0] == SHIFTED).all()
    matches_reference(problem)
    matches_reference(problem, dtype=torch.float32, tolerance=1e-3)


def test_no_head_is_cut_off_from_its_chunk(monkeypatch) -> None:
    """One piece for each chunk, of attention and of couplings: half as many more calls cost half as much time again."""
    pieces = []

    def counted(given: list[int], size: int) -> list:
        pieces.extend(runs(given, size))
        return runs(given, size)

    monkeypatch.setattr(portable, "runs", counted)
    query, key, value = (torch.randn(16, 10, 8) for _ in range(3))
    query[::2] *= 30
    sinkhorn_attention(query, key, value, 3, backend="portable")
    sinkhorn(query @ key.mT, 3)
    assert len(pieces) == 2
    assert domains.MAX_PIECES > 1
    assert LOG_DOMAIN not in {domain for _, domain in pieces}


# ---------------------------------------------------------------------------------------------- couplings of scores


@pytest.mark.parametrize("gradient", ["unrolled", "detached"])
@pytest.mark.parametrize("n_iters", [1, 2, 3, 5])
@pytest.mark.parametrize("std", [1, 80])
@pytest.mark.parametrize("engine", ["whole", "log domain", "device", "captured"], indirect=True)
def test_coupling_of_given_scores(engine, random_mask, std: float, n_iters: int, gradient: str) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3, 6, 9, generator=generator, dtype=torch.float64) * std
    scores[0, 1, 2, 3] = -math.inf
    weights = torch.randn(2, 3, 6, 9, generator=generator, dtype=torch.float64)
    masks = {"query_mask": random_mask(2, 1, 6), "key_mask": random_mask(2, 3, 9, seed=1)}
    normalizer = get_normalizer("sinkhorn", n_iters=n_iters, gradient=gradient)
    for options in ({}, masks):
        ours, theirs = scores.clone().requires_grad_(), scores.clone().requires_grad_()
        got = normalizer.from_scores(ours, **options)
        want = sinkhorn_reference(theirs, n_iters, **options, gradient=gradient)
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
        (got * weights).sum().backward()
        (want * weights).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-10)
        assert (ours.grad[0, 1, 2, 3] == 0).all()


def test_coupling_by_finite_differences() -> None:
    scores = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([True, True, False, True, True])
    for n_iters in (1, 2, 3, 5):
        assert torch.autograd.gradcheck(lambda s, t=n_iters: sinkhorn(s, t, key_mask=mask), (scores,))


def test_dropout_keeps_the_expected_share() -> None:
    torch.manual_seed(0)
    query, key = torch.zeros(1, 200, 4), torch.zeros(1, 200, 4)
    dropped = sinkhorn_attention(query, key, torch.eye(200).unsqueeze(0), 3, dropout_p=0.25)
    kept = dropped != 0
    assert abs(kept.float().mean() - 0.75) < 0.01
    torch.testing.assert_close(dropped[kept], torch.full_like(dropped[kept], 1 / 200 / 0.75))


# ------------------------------------------------------------------------------------------- engines that are wrong


def without_column_steps(n_iters: int, row_step, column_step, columns):
    """The loop with column steps whose result is not used."""
    return half_steps.half_steps(n_iters, row_step, lambda step, rows: column_step(step, rows).copy_(columns), columns)


@pytest.mark.parametrize("n_iters", [2, 3])
@pytest.mark.parametrize("domain", [exponential, log_domain])
def test_the_column_step_matters(make_problem, matches_reference, monkeypatch, domain, n_iters: int) -> None:
    monkeypatch.setattr(domains, "is_captured", lambda device: domain is log_domain)
    matches_reference(make_problem(7, 7, n_iters))
    monkeypatch.setattr(domain, "half_steps", without_column_steps)
    if domain is log_domain and n_iters == 2:
        return  # the map of the last step comes from its sums, not from the potential
    with pytest.raises(AssertionError, match="output: off by"):
        matches_reference(make_problem(7, 7, n_iters))


@pytest.mark.parametrize("domain", [exponential_backward, log_domain])
def test_the_reverse_half_steps_matter(make_problem, matches_reference, monkeypatch, domain) -> None:
    monkeypatch.setattr(domains, "is_captured", lambda device: domain is log_domain)

    def forgets(steps, n_iters: int, detached: bool, *weights: Tensor) -> None:
        half_steps.reverse_half_steps(steps, n_iters, True, *weights)

    monkeypatch.setattr(domain, "reverse_half_steps", forgets)
    with pytest.raises(AssertionError, match="query: off by"):
        matches_reference(make_problem(7, 7, 3))


@pytest.mark.parametrize("std", [1, 30])
@pytest.mark.parametrize("side", ["gradient", "value"])
def test_the_damping_matters(make_problem, matches_definition, monkeypatch, side: str, std: float) -> None:
    monkeypatch.setattr(LIBRARY, "load", lambda: None)
    normalizer = get_normalizer("unbalanced_sinkhorn", n_iters=3)
    matches_definition(normalizer, make_problem(7, 7, std=std))
    honest = getattr(exponential.ExponentialMap, "prepare_reverse" if side == "gradient" else "column_step")

    def undamped(self, *arguments):
        damping, self.heads.problem = self.heads.problem, Problem(self.heads.problem.query, damping=1.0)
        try:
            return honest(self, *arguments)
        finally:
            self.heads.problem = damping

    monkeypatch.setattr(exponential.ExponentialMap, honest.__name__, undamped)
    with pytest.raises(AssertionError, match="off by"):
        matches_definition(normalizer, make_problem(7, 7, std=std))
