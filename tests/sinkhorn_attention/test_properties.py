"""A thousand random problems, every engine against the float64 definition, in value and in gradient."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sinkhorn_attention import blockwise, dense, guard
from torch import Tensor

PROBLEMS_PER_SEED = 50
STANDARD_DEVIATIONS = [0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def choose(generator: torch.Generator, *values: Any) -> Any:
    return values[int(torch.randint(len(values), (), generator=generator))]


def random_options(generator: torch.Generator, n: int, m: int) -> dict:
    """Masks, bias or support, dropout and kind of gradient, each in about half of the problems."""

    def mask(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator) < 0.7

    options: dict[str, object] = {}
    if choose(generator, True, False):
        options["query_mask"] = mask(*choose(generator, (n,), (2, 1, n), (2, 3, n)))
    if choose(generator, True, False):
        options["key_mask"] = mask(*choose(generator, (m,), (2, 1, m), (2, 3, m)))
    kind = choose(generator, None, None, "bias", "far", "support")
    shape = choose(generator, (n, m), (3, n, m), (2, 1, 1, m), (2, 3, n, 1), (2, 3, n, m))
    if kind == "support":
        support = mask(3, n, m)
        support[..., 0, -1] = support[..., -1, 0] = True  # no triangle
        options["attn_bias"] = support
    elif kind is not None:
        size = 1.0 if kind == "bias" else float(choose(generator, 50, 500))
        options["attn_bias"] = (torch.randn(shape, generator=generator) * size).double()
    options["gradient"] = choose(generator, "unrolled", "unrolled", "detached")
    options["dropout_p"] = choose(generator, 0.0, 0.0, 0.3)
    return options


def rounding(problem: Any, dtype: torch.dtype, least: float, of_scores: float) -> float:
    """Tolerance, in the dtype's roundings, by half a unit: `least`, or `of_scores` times the largest score.

    A score is rounded by half a unit times its size, which is the relative error of its exponential.
    """
    largest = float((problem.query @ problem.key.mT).abs().max()) * 8**-0.5
    bias = problem.options.get("attn_bias")
    if bias is not None and bias.is_floating_point():
        largest += float(bias.abs().max())
    return max(least, of_scores * largest) * torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("seed", range(20))
def test_random_problems(make_problem, matches_reference, monkeypatch, seed: int) -> None:
    """Tolerances are three times the largest errors measured: another processor's products round in another order.

    Where scores are below 20 these are 5.7 half units in float32 and 9.0 in float64; beyond that, as multiples of the
    largest score, 0.66 and 0.85 half units.
    """
    monkeypatch.setattr(blockwise, "BLOCK_BYTES", 1)
    generator = torch.Generator().manual_seed(seed)
    for number in range(PROBLEMS_PER_SEED):
        engine = choose(generator, "dense", "dense", "slab", "streaming")
        monkeypatch.setattr(dense, "SLAB_BYTES", 0 if engine == "slab" else 8 << 20)
        n, m = (int(torch.randint(1, 24, (), generator=generator)) for _ in range(2))
        n_iters = choose(generator, *range(1, 9), 120)
        std = choose(generator, *STANDARD_DEVIATIONS)
        dtype = choose(generator, torch.float64, torch.float32)
        options = random_options(generator, n, m)
        problem = make_problem(n, m, n_iters, std=std, seed=1000 * seed + number, **options)
        tolerance = rounding(problem, dtype, *((17, 2.0) if dtype == torch.float32 else (27, 2.6)))
        described = f"{seed}/{number}: {engine} n={n} m={m} T={n_iters} std={std} {dtype} {list(options)}"
        check(
            matches_reference, described, problem, "streaming" if engine == "streaming" else "dense", dtype, tolerance
        )


@pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="no GPU; run by test_triton.py in Triton's interpreter",
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities, in the interpreter
@pytest.mark.parametrize("seed", range(5))
def test_random_problems_in_triton(make_problem, matches_reference, seed: int) -> None:
    """The largest errors are 4.7 half units where scores are below 20, and 0.35 times the largest score beyond that."""
    generator = torch.Generator().manual_seed(100 + seed)
    for number in range(10):
        n, m = (int(torch.randint(1, 24, (), generator=generator)) for _ in range(2))
        n_iters = choose(generator, *range(1, 9))
        std = choose(generator, *STANDARD_DEVIATIONS)
        options = random_options(generator, n, m)
        problem = make_problem(n, m, n_iters, std=std, seed=1000 * seed + number, **options)
        described = f"{seed}/{number}: n={n} m={m} T={n_iters} std={std} {list(options)}"
        tolerance = rounding(problem, torch.float32, 14, 1.1)
        check(matches_reference, described, problem, "triton", torch.float32, tolerance, DEVICE)


def check(matches_reference: Callable[..., None], described: str, *arguments: Any) -> None:
    try:
        matches_reference(*arguments)
    except AssertionError as error:
        raise AssertionError(f"{described}: {error}") from None


def test_the_problems_take_every_case_of_the_guard(make_problem) -> None:
    """Otherwise the test above would say less than it seems to."""
    cases = set()
    for std in STANDARD_DEVIATIONS:
        problem = make_problem(12, 12, 120, std=std)
        far = torch.zeros(12, 12).double()
        far[3], far[:, 5] = 500.0, -500.0
        for bias in (None, far):
            with torch.no_grad():
                arguments = *(tensor.float() for tensor in problem[:3]), 120, 8**-0.5, False
                bias = None if bias is None else bias.float()
                cases |= set(dense.attention_forward(*arguments, bias, None, None, None, 0.0)[3].tolist())
    assert cases == {guard.BOUNDED, guard.SHIFTED, guard.LOG_DOMAIN}
