"""A thousand random problems, every engine against the float64 definition, in value and in gradient.

The tolerance comes from the rounding of the scores and is stated once, in `tolerance_of`.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from sinkhorn_attention.engines import PORTABLE, domains, native, portable
from sinkhorn_attention.engines.native import LIBRARY
from sinkhorn_attention.engines.problem import Problem
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


def random_size(generator: torch.Generator) -> int:
    """Up to 300, half of them below 24: where blocks, chunks and domains change, and where everything is small."""
    return int(torch.randint(1, choose(generator, 24, 24, 80, 301), (), generator=generator))


def tolerance_of(problem: Any, dtype: torch.dtype) -> float:
    """Twice the largest error measured, or more: another processor's products round in another order.

    A score is rounded by half a unit times the size of the terms it is a sum of, which is the relative error of its
    exponential. Where scores are below 20 the errors are those of the sums, up to `FLOOR` half units.
    """
    tokens = problem.query.norm(dim=-1).amax() * problem.key.norm(dim=-1).amax()
    largest = float(tokens) * problem.query.shape[-1] ** -0.5
    bias = problem.options.get("attn_bias")
    if bias is not None and bias.is_floating_point():
        largest += float(bias.abs().max())
    return max(FLOOR, OF_SCORES * largest) * torch.finfo(dtype).eps / 2


#: In half units: see `tolerance_of`.
FLOOR, OF_SCORES = 27.0, 2.6


@pytest.mark.parametrize("seed", range(20))
def test_random_problems(make_problem, matches_reference, monkeypatch, seed: int) -> None:
    monkeypatch.setattr(portable, "BLOCK_BYTES", 1)
    generator = torch.Generator().manual_seed(seed)
    native_too = LIBRARY.load() is not None
    for number in range(PROBLEMS_PER_SEED):
        engine = choose(generator, "whole", "whole", "kept", "recomputed")
        monkeypatch.setattr(portable, "LARGE_MAP_BYTES", 0 if engine == "kept" else 8 << 20)
        n, m = random_size(generator), random_size(generator)
        n_iters = choose(generator, *range(1, 9), *range(1, 9), 120)
        width, value_width = choose(generator, 1, 5, 8, 32, 128), choose(generator, 1, 5, 32, 128)
        std = choose(generator, *STANDARD_DEVIATIONS)
        dtype = choose(generator, torch.float64, torch.float32)
        options = random_options(generator, n, m)
        sizes = {"width": width, "value_width": value_width, "std": std, "seed": 1000 * seed + number}
        problem = make_problem(n, m, n_iters, **sizes, **options)
        described = f"{seed}/{number}: {engine} n={n} m={m} T={n_iters} {sizes} {dtype} {list(options)}"
        # Of the native engine all ways, too: its blocks, its passes, and 1 to 4 threads for 6 heads.
        native_pass = "streaming" if engine == "recomputed" else "native"
        monkeypatch.setattr(LIBRARY, "threads", lambda threads=1 + number % 4: threads)
        small = number % 3 > 0
        monkeypatch.setattr(native, "BLOCK_ROWS", 12 if small else 48)
        monkeypatch.setattr(native, "BLOCK_COLUMNS", 32 if small else 512)
        with monkeypatch.context() as patch:
            if engine == "recomputed":
                patch.setattr(PORTABLE.engine, "recompute", True)
            backends = ("portable", native_pass) if native_too else ("portable",)
            check(matches_reference, described, problem, backends, dtype, tolerance_of(problem, dtype))


@pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
    reason="no GPU; run by test_triton.py in Triton's interpreter",
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities, in the interpreter
@pytest.mark.parametrize("seed", range(5))
def test_random_problems_in_triton(make_problem, matches_reference, seed: int) -> None:
    generator = torch.Generator().manual_seed(100 + seed)
    for number in range(10 if DEVICE == "cuda" else 4):  # the interpreter takes about a second for each
        n, m = (int(torch.randint(1, 24, (), generator=generator)) for _ in range(2))
        n_iters = choose(generator, *range(1, 9))
        std = choose(generator, *STANDARD_DEVIATIONS)
        options = random_options(generator, n, m)
        problem = make_problem(n, m, n_iters, std=std, seed=1000 * seed + number, **options)
        described = f"{seed}/{number}: n={n} m={m} T={n_iters} std={std} {list(options)}"
        tolerance = tolerance_of(problem, torch.float32)
        check(matches_reference, described, problem, "triton", torch.float32, tolerance, DEVICE)


def check(matches_reference: Callable[..., None], described: str, *arguments: Any) -> None:
    try:
        matches_reference(*arguments)
    except AssertionError as error:
        raise AssertionError(f"{described}: {error}") from None


def test_the_problems_take_every_domain(make_problem) -> None:
    """Otherwise the test above would say less than it seems to."""
    found = set()
    for std in STANDARD_DEVIATIONS:
        problem = make_problem(12, 12, 120, std=std)
        far = torch.zeros(12, 12)
        far[3], far[:, 5] = 500.0, -500.0
        for bias in (None, far):
            tokens = (tensor.float() for tensor in problem[:3])
            with torch.no_grad():
                given = Problem(*tokens, attn_bias=bias, n_iters=120, scale=8**-0.5)
                found |= set(PORTABLE.engine.forward(given)[3].tolist())
    assert found == {domains.BOUNDED, domains.SHIFTED, domains.LOG_DOMAIN}
