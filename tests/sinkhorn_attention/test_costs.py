"""What the engines cost, in counts that no clock disturbs: products, exponentials, maps alive, bytes kept."""

import math
import threading
from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from sinkhorn_attention import sinkhorn_attention
from sinkhorn_attention.engines import (
    domains,
    exponential,
    exponential_backward,
    portable,
    scratch,
)
from sinkhorn_attention.engines.portable import Portable
from sinkhorn_attention.engines.problem import Problem
from torch.utils._python_dispatch import TorchDispatchMode

HEADS, N, M, WIDTH = 3, 64, 48, 8
MAP = N * M
KEEPING, RECOMPUTING = Portable("keeping"), Portable("recomputing", recompute=True)


class Counts(TorchDispatchMode):
    """Counts, per head, the entries that products and exponentials write, and the largest result of all."""

    def __init__(self) -> None:
        super().__init__()
        self.exponentials = self.products = self.vectors = 0.0
        self.largest_new = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in ("exp2", "exp2_", "exp", "exp_"):
            self.exponentials += args[0].numel() / (HEADS * MAP)
        elif name in ("bmm", "baddbmm", "baddbmm_"):
            left, right = args[-2:]
            size = left.shape[0] * left.shape[1] * left.shape[2] * right.shape[2] / (HEADS * MAP)
            if left.shape[1] == 1:
                self.vectors += size
            else:
                self.products += size / WIDTH
        fresh = isinstance(result, torch.Tensor) and "out" not in kwargs and not func.is_view
        if fresh and name[-1] != "_" and name != "empty":  # scratch is counted where it is borrowed
            self.largest_new = max(self.largest_new, result.numel())
        return result


def cost(engine: Portable, n_iters: int, scale: float = 0.1) -> tuple[Counts, Counts]:
    """Counts of a forward and of a backward call of (HEADS, N, WIDTH) queries."""
    torch.manual_seed(0)
    query, key, value = torch.randn(HEADS, N, WIDTH), torch.randn(HEADS, M, WIDTH), torch.randn(HEADS, M, WIDTH)
    problem = Problem(query, key, value, n_iters=n_iters, scale=scale)
    with torch.no_grad():
        with Counts() as forward:
            output, *state = engine.forward(problem)
        with Counts() as backward:
            engine.backward(problem, (output, torch.ones_like(output)), tuple(state), False)
    return forward, backward


@pytest.mark.parametrize("n_iters", [1, 3, 4, 5, 21])
def test_the_map_is_made_twice_whatever_the_number_of_half_steps(n_iters: int) -> None:
    """Forward two products and T of vectors, backward five and T - 1, as softmax attention; one exponential each."""
    forward, backward = cost(KEEPING, n_iters)
    assert forward.exponentials == pytest.approx(1, abs=0.1)  # but for the vectors of the guard
    assert backward.exponentials == pytest.approx(1)
    assert forward.products == pytest.approx(2)
    # The potentials and the derivative of the half-steps widen two products by 2 and T columns.
    assert backward.products == pytest.approx(5 + (2 + n_iters) / WIDTH)
    assert forward.vectors == pytest.approx(n_iters)
    assert backward.vectors == pytest.approx(n_iters - 1)


@pytest.mark.parametrize("n_iters", [1, 2, 3, 5, 21])
def test_recomputing_makes_the_map_once_per_pair_of_half_steps(monkeypatch, n_iters: int) -> None:
    monkeypatch.setattr(portable, "BLOCK_BYTES", 1)
    forward, backward = cost(RECOMPUTING, n_iters)
    assert forward.exponentials == pytest.approx(n_iters // 2 + 1, abs=0.1)
    reverse = (n_iters - 1) // 2 + (n_iters > 1)  # a row step alone, then pairs; or pairs
    assert backward.exponentials == pytest.approx(reverse + 2, abs=0.1)
    assert forward.vectors == pytest.approx(n_iters)


@contextmanager
def peak_of_scratch():
    """The largest number of entries borrowed at any one time."""
    borrowed, peak, honest = [0], [0], scratch.borrow

    @contextmanager
    def counting(*shapes, dtype, device):
        size = sum(torch.Size(shape).numel() for shape in shapes)
        borrowed[0] += size
        peak[0] = max(peak[0], borrowed[0])
        with honest(*shapes, dtype=dtype, device=device) as tensors:
            yield tensors
        borrowed[0] -= size

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exponential, "borrow", counting)
        patch.setattr(exponential_backward, "borrow", counting)
        yield peak


@pytest.mark.parametrize("n_iters", [1, 21])
def test_maps_alive(monkeypatch, n_iters: int) -> None:
    """Two maps of a chunk at once, three where the coupling is peaked or shifted; nothing else is as large."""
    monkeypatch.setattr(portable, "CHUNK_BYTES", 1)  # one head
    largest = max(N, M) * (WIDTH + 2 + n_iters) * HEADS
    for scale, maps in ((0.1, 2), (100.0, 3)):
        with peak_of_scratch() as peak:
            counts = cost(KEEPING, n_iters, scale)
        assert peak[0] <= maps * N * (M + 8) + (N + M) * (WIDTH + 2 + n_iters), "maps, and vectors of the tokens"
        if scale == 0.1:
            assert max(count.largest_new for count in counts) <= largest


@pytest.mark.parametrize("n_iters", [1, 4, 21])
def test_recomputing_holds_no_map(monkeypatch, n_iters: int) -> None:
    monkeypatch.setattr(portable, "BLOCK_BYTES", 1)
    for scale in (0.1, 10.0):
        with peak_of_scratch() as peak:
            counts = cost(RECOMPUTING, n_iters, scale)
        heads = min(HEADS, torch.get_num_threads())
        assert peak[0] <= 2 * heads * 16 * M + heads * max(N, M) * WIDTH, "two blocks of 16 rows, and the tokens"
        assert max(count.largest_new for count in counts) <= max(N, M) * (WIDTH + 2 + n_iters) * HEADS


@pytest.mark.parametrize("n_iters", [1, 4, 21])
def test_large_maps_are_not_held_in_the_log_domain_either(monkeypatch, n_iters: int) -> None:
    monkeypatch.setattr(portable, "BLOCK_BYTES", 1)
    monkeypatch.setattr(portable, "LARGE_MAP_BYTES", 8 * MAP - 1)
    for dtype in domains.TRUSTED_LOG2:
        monkeypatch.setitem(domains.TRUSTED_LOG2, dtype, -math.inf)
    for engine in (RECOMPUTING, KEEPING):
        assert max(count.largest_new for count in cost(engine, n_iters, 100.0)) <= HEADS * 16 * M, "blocks"


def test_scratch_is_bounded_released_and_not_shared() -> None:
    scratch.release()
    shape = (scratch.MIN_BYTES // 4,)
    with scratch.borrow(shape, shape, dtype=torch.float32) as (first, second):
        assert first.data_ptr() != second.data_ptr()
        with scratch.borrow(shape, dtype=torch.float32) as (third,):
            assert third.data_ptr() not in (first.data_ptr(), second.data_ptr())
        kept = {tensor.data_ptr() for tensor in (first, second, third)}
    assert scratch.idle_bytes() == 3 * scratch.MIN_BYTES
    with scratch.borrow((4, shape[0] // 4), dtype=torch.float32) as (again,):
        assert again.data_ptr() in kept
    with scratch.borrow(shape, dtype=torch.float64) as (other,):
        assert other.data_ptr() not in kept
    with scratch.borrow((scratch.MAX_IDLE // 4 + 1,), dtype=torch.float32):
        pass
    assert scratch.idle_bytes() <= scratch.MAX_IDLE
    with pytest.raises(ZeroDivisionError), scratch.borrow(shape, dtype=torch.float32):
        raise ZeroDivisionError
    scratch.release()
    assert scratch.idle_bytes() == 0


def test_one_map_above_the_bound_serves_all_heads_of_a_call(monkeypatch) -> None:
    """And goes back to the system when the call ends, also by an error."""
    for module, name in ((portable, "BLOCK_BYTES"), (portable, "CHUNK_BYTES"), (scratch, "MIN_BYTES")):
        monkeypatch.setattr(module, name, 1)
    monkeypatch.setattr(portable, "LARGE_MAP_BYTES", 0)
    monkeypatch.setattr(scratch, "MAX_IDLE", MAP)  # a quarter of a map
    take, maps = scratch._take, []

    def recorded(size: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = take(size, dtype)
        maps.extend([buffer] if size in (MAP, N * (M + 8)) else [])
        return buffer

    monkeypatch.setattr(scratch, "_take", recorded)
    scratch.release()
    cost(KEEPING, 3)
    assert len(maps) == 2 * HEADS
    assert len({buffer.data_ptr() for buffer in maps}) == 2, "one forward, one backward"
    assert scratch.idle_bytes() <= scratch.MAX_IDLE
    scratch.release()
    with scratch.hold():
        with scratch.hold(), scratch.borrow((MAP,), dtype=torch.float32):
            pass
        assert scratch.idle_bytes() == 4 * MAP
    assert scratch.idle_bytes() == 0
    with pytest.raises(ZeroDivisionError), scratch.hold(), scratch.borrow((MAP,), dtype=torch.float32):
        raise ZeroDivisionError
    assert scratch.idle_bytes() == 0


def test_scratch_outlives_inference_mode_and_serves_threads(monkeypatch) -> None:
    scratch.release()
    monkeypatch.setattr(scratch, "MIN_BYTES", 1)
    torch.manual_seed(0)
    inputs = [torch.randn(2, 3, 20, 8) for _ in range(3)]
    with torch.inference_mode():
        want = sinkhorn_attention(*inputs, 5).clone()
    torch.testing.assert_close(sinkhorn_attention(*inputs, 5), want)
    wrong: Counter[str] = Counter()

    def attend() -> None:
        for _ in range(20):
            tokens = [tensor.clone().requires_grad_() for tensor in inputs]
            output = sinkhorn_attention(*tokens, 5)
            output.sum().backward()
            if not torch.equal(output, want):
                wrong["output"] += 1

    threads = [threading.Thread(target=attend) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
