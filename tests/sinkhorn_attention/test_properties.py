"""A thousand random problems, every engine against the float64 definition, in value and in gradient."""

import pytest
import torch
from sinkhorn_attention import blockwise, dense, guard
from torch import Tensor

PROBLEMS_PER_SEED = 50
STANDARD_DEVIATIONS = [0.1, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0]


def choose(generator: torch.Generator, *values: object) -> object:
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
        options["attn_bias"] = mask(3, n, m)
        options["attn_bias"][..., 0, -1] = options["attn_bias"][..., -1, 0] = True  # no triangle
    elif kind is not None:
        size = 1.0 if kind == "bias" else float(choose(generator, 50, 500))
        options["attn_bias"] = (torch.randn(shape, generator=generator) * size).double()
    options["gradient"] = choose(generator, "unrolled", "unrolled", "detached")
    options["dropout_p"] = choose(generator, 0.0, 0.0, 0.3)
    return options


@pytest.mark.parametrize("seed", range(20))
def test_random_problems(make_problem, matches_reference, monkeypatch, seed: int) -> None:
    monkeypatch.setattr(blockwise, "BLOCK_BYTES", 1)
    generator = torch.Generator().manual_seed(seed)
    for number in range(PROBLEMS_PER_SEED):
        engine = choose(generator, "dense", "dense", "slab", "streaming")
        monkeypatch.setattr(dense, "SLAB_BYTES", 0 if engine == "slab" else 8 << 20)
        n, m = (int(torch.randint(1, 24, (), generator=generator)) for _ in range(2))
        n_iters = int(choose(generator, *range(1, 9), 120))
        std = float(choose(generator, *STANDARD_DEVIATIONS))
        dtype = choose(generator, torch.float64, torch.float32)
        options = random_options(generator, n, m)
        problem = make_problem(n, m, n_iters, std=std, seed=1000 * seed + number, **options)
        tolerance = 1e-10
        if dtype == torch.float32:
            # A score is rounded by up to |score| 2^-24, which is the relative error of its exponential; sums of
            # potentials do so a few times in each half-step.
            largest = float((problem.query @ problem.key.mT).abs().max()) * 8**-0.5
            bias = options.get("attn_bias")
            if bias is not None and bias.is_floating_point():
                largest += float(bias.abs().max())
            tolerance = max(1e-5, 30 * largest * 2**-24)
        backend = "streaming" if engine == "streaming" else "dense"
        try:
            matches_reference(problem, backend, dtype, tolerance)
        except AssertionError as error:
            described = f"{seed}/{number}: {engine} n={n} m={m} T={n_iters} std={std} {dtype} {list(options)}"
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
