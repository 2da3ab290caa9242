"""Holds an engine against the definition: the same problem, value and gradient, in float64."""

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from sinkhorn_attention import Normalizer, sinkhorn_attention
from sinkhorn_attention.engines import domains, native, portable
from sinkhorn_attention.engines.native import LIBRARY
from sinkhorn_attention.normalizers import attention_scores
from torch import Tensor

ON_GPU = torch.cuda.is_available()
#: Triton's kernels run where there is a GPU; elsewhere `test_triton.py` runs these tests for them in a process of its
#: own, in Triton's interpreter.
TRITON_MARKS = [
    pytest.mark.skipif(
        not ON_GPU and os.environ.get("TRITON_INTERPRET") != "1",
        reason="no GPU; run by test_triton.py in Triton's interpreter",
    ),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of infinities, in the interpreter
]
#: With a head's keys on the chip, and by tiles.
TRITON = [pytest.param(name, marks=TRITON_MARKS) for name in ("triton", "triton tiles")]
#: The ways through the portable engine: whole maps in chunks of heads, blocks of rows of a kept map, blocks that are
#: made again, the log domain with a map and by blocks, and the path of devices where looking at data is to wait, as it
#: is and while a CUDA graph is captured.
PORTABLE = ("whole", "kept", "recomputed", "log domain", "log domain by blocks", "device", "captured")
#: Those through the native engine: as it is, in blocks of 6 rows and 16 columns, with K made again for each pass, with
#: threads that share the heads which are left over, and with threads that share every head. Its log domain is the
#: portable engine's.
NATIVE = ("native", "native blocks", "native recomputed", "native threads", "native shared")
ENGINES = ("reference", *PORTABLE, *NATIVE, *TRITON)
#: Of the ways, where it is not the portable engine's or the native one's.
BACKENDS = {"reference": "reference", "recomputed": "streaming", "native recomputed": "streaming"}


class Engine(NamedTuple):
    """A way through the operator: its backend's name, the widest dtype it takes, and where its tensors lie."""

    name: str
    backend: str
    dtype: torch.dtype
    device: str

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, n_iters: int = 5, **options: Any) -> Tensor:
        return sinkhorn_attention(query, key, value, n_iters, backend=self.backend, **options)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """When called: Triton keeps no head on the chip, and its tiles are of 32 tokens."""

    def choose() -> None:
        from sinkhorn_attention.engines import triton

        layouts = {256: ((32, 32, 4),) * 4}
        monkeypatch.setattr(triton, "WHOLE_KEYS", 0)
        monkeypatch.setattr(triton, "TILES", {2: layouts, 4: layouts})

    return choose


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, small_tiles: Callable[[], None]) -> Engine:
    name = request.param
    if name == "triton tiles":
        small_tiles()
    if name in NATIVE and LIBRARY.load() is None:
        pytest.skip(f"no native engine: {LIBRARY.reason}")
    if name in ("kept", "recomputed", "log domain by blocks"):  # blocks of 16 rows, of which the last is smaller
        monkeypatch.setattr(portable, "BLOCK_BYTES", 1)
        monkeypatch.setattr(portable, "LARGE_MAP_BYTES", 0)
    if name in ("log domain", "log domain by blocks"):  # no head is bounded, and none trusted
        monkeypatch.setattr(domains, "BOUNDED_LOG2", -1.0)
        for dtype in domains.TRUSTED_LOG2:
            monkeypatch.setitem(domains.TRUSTED_LOG2, dtype, -math.inf)
    if name in ("device", "captured"):
        monkeypatch.setattr(domains, "is_asynchronous", lambda device: True)
    if name == "captured":
        monkeypatch.setattr(domains, "is_captured", lambda device: True)
        monkeypatch.setattr(torch.Tensor, "nonzero", None)  # what would synchronise
    if name.startswith("native ") and name != "native threads":
        monkeypatch.setattr(native, "BLOCK_ROWS", 6)
        monkeypatch.setattr(native, "BLOCK_COLUMNS", 16)
        monkeypatch.setattr(native, "PASS_BYTES", 1)
    if name in ("native threads", "native shared"):
        monkeypatch.setattr(LIBRARY, "threads", lambda: 4)
    if name == "native shared":
        monkeypatch.setattr(portable, "LARGE_MAP_BYTES", 0)
    if name in PORTABLE:
        monkeypatch.setattr(LIBRARY, "load", lambda: None)
    of_triton = name.startswith("triton")
    family = next((each for each in ("native", "triton") if name.startswith(each)), "portable")
    dtype = torch.float32 if of_triton else torch.float64
    return Engine(name, BACKENDS.get(name, family), dtype, "cuda" if of_triton and ON_GPU else "cpu")


@pytest.fixture
def agrees(engine: Engine) -> Callable[..., None]:
    """Value and gradient of a problem against the float64 reference, in the widest dtype of the engine by default."""

    def check(problem: "Problem", dtype: torch.dtype | None = None, tolerance: float | None = None) -> None:
        assert_matches_reference(problem, engine.backend, dtype or engine.dtype, tolerance, engine.device)

    return check


def mask_of(*shape: int, seed: int = 0, keep: float = 0.7) -> Tensor:
    """True for about `keep` of the entries."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < keep


@pytest.fixture(scope="session")
def random_mask() -> Callable[..., Tensor]:
    return mask_of


def bytes_saved(run: Callable[[], Any]) -> int:
    """Bytes that autograd keeps for backward of what is run."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(sizes.values())


@pytest.fixture(scope="session")
def saved_bytes() -> Callable[..., int]:
    return bytes_saved


class Problem(NamedTuple):
    """One attention call: its tensors, the gradient that arrives at its output, and its options."""

    query: Tensor
    key: Tensor
    value: Tensor
    output_gradient: Tensor
    n_iters: int
    options: dict


class Outcome(NamedTuple):
    """Output and gradients of a call; `attn_bias` is None where the bias is not differentiated."""

    output: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    attn_bias: Tensor | None


def solve(problem: Problem, backend: str, dtype: torch.dtype, device: str = "cpu") -> Outcome:
    """Runs the problem forward and backward in `dtype`, with the same dropout mask whatever the backend."""
    return solve_by(
        lambda *tokens, **options: sinkhorn_attention(*tokens, problem.n_iters, backend=backend, **options),
        problem,
        dtype,
        device,
    )


def solve_by(attend: Callable[..., Tensor], problem: Problem, dtype: torch.dtype, device: str = "cpu") -> Outcome:
    """Runs the problem forward and backward by attend(query, key, value, **options), always from the same seed."""
    options = {
        name: option.to(device) if isinstance(option, Tensor) else option for name, option in problem.options.items()
    }
    tokens = problem.query, problem.key, problem.value
    inputs = [tensor.to(device, dtype, copy=True).requires_grad_() for tensor in tokens]
    bias = options.pop("attn_bias", None)
    if bias is not None and bias.is_floating_point():
        bias = bias.to(dtype, copy=True).requires_grad_()
        inputs.append(bias)
    torch.manual_seed(0)
    output = attend(*inputs[:3], attn_bias=bias, **options)
    gradients = torch.autograd.grad(output, inputs, problem.output_gradient.to(device, output.dtype))
    found = [tensor.cpu() for tensor in (output.detach(), *gradients)]
    return Outcome(*found[:4], found[4] if len(found) > 4 else None)


def assert_matches_reference(
    problem: Problem,
    backend: str | tuple[str, ...] = "portable",
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
    device: str = "cpu",
) -> None:
    """Value and gradient of one or several backends against the float64 reference, to the dtype's tolerance.

    float64: 1e-10. float32: 1e-5, relative in norm, for values and for gradients, the latter with a floor of
    1e-5 |scale| |dO| max|v| max|k| (or max|q|): a saturated map's true gradient lies below the rounding of its terms.
    """
    tolerance = tolerance or {torch.float64: 1e-10, torch.float32: 1e-5}[dtype]
    want = solve(problem, "reference", torch.float64, device)
    for each in (backend,) if isinstance(backend, str) else backend:
        assert_same_outcome(solve(problem, each, dtype, device), want, problem, tolerance, each)


def assert_same_outcome(got: Outcome, want: Outcome, problem: Problem, tolerance: float, who: str = "") -> None:
    """Relative in norm, with floors for gradients, as `assert_matches_reference` says."""
    scale = problem.options.get("scale") or problem.query.shape[-1] ** -0.5
    largest = {name: getattr(problem, name).double().norm(dim=-1).max() for name in ("query", "key", "value")}
    through_scores = problem.output_gradient.double().norm() * largest["value"]
    floors = {
        "output": torch.tensor(tolerance),
        "query": abs(scale) * through_scores * largest["key"],
        "key": abs(scale) * through_scores * largest["query"],
        "value": problem.output_gradient.double().norm() * 1e-3,
        "attn_bias": through_scores,
    }
    for name, floor in floors.items():
        expected, found = getattr(want, name), getattr(got, name)
        if expected is None:
            continue
        assert found.isfinite().all(), f"{who} {name} is not finite"
        error = (found.double() - expected).norm()
        assert error <= tolerance * (expected.norm() + floor), (
            f"{who} {name}: off by {error:.3e} of {expected.norm():.3e}"
        )


def assert_matches_definition(
    normalizer: Normalizer,
    problem: Problem,
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
) -> None:
    """As `assert_matches_reference`, for a normalizer's `attend`: against its `from_scores` in float64, by autograd."""

    def define(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        dropout_p, scale = options.pop("dropout_p", 0.0), options.pop("scale", None)
        scores = attention_scores(query, key, scale, **options)
        masks = {name: mask for name, mask in options.items() if name != "attn_bias"}
        coupling = normalizer.from_scores(scores, **masks)
        if dropout_p > 0:
            keep = torch.empty(scores.shape, dtype=torch.bool).bernoulli_(1 - dropout_p)
            coupling = coupling * keep / (1 - dropout_p)
        if options.get("key_mask") is not None:
            value = value.masked_fill(~options["key_mask"].unsqueeze(-1), 0.0)
        return coupling @ value

    tolerance = tolerance or {torch.float64: 1e-10, torch.float32: 1e-5}[dtype]
    got, want = solve_by(normalizer.attend, problem, dtype), solve_by(define, problem, torch.float64)
    assert_same_outcome(got, want, problem, tolerance)


@pytest.fixture(scope="session")
def matches_reference() -> Callable[..., None]:
    return assert_matches_reference


@pytest.fixture(scope="session")
def matches_definition() -> Callable[..., None]:
    return assert_matches_definition


def build_problem(
    n: int = 7,
    m: int = 7,
    n_iters: int = 3,
    *,
    std: float = 1.0,
    lead: tuple[int, ...] = (2, 3),
    width: int = 8,
    value_width: int = 5,
    seed: int = 0,
    **options: object,
) -> Problem:
    """A problem with scores of the given standard deviation, from a seed."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*lead, *shape, generator=generator, dtype=torch.float64)

    # With the default scale width ** -0.5 the scores have standard deviation `std`. Rounded to float32 first, so that
    # both precisions start from the same numbers.
    tensors = [normal(n, width) * std, normal(m, width), normal(m, value_width), normal(n, value_width)]
    return Problem(*(tensor.float().double() for tensor in tensors), n_iters, options)


@pytest.fixture(scope="session")
def make_problem() -> Callable[..., Problem]:
    return build_problem
