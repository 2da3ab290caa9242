"""The estimate of a training step on a GPU: counted work, whose parts are held here."""

import pytest

from experiments.benchmarks import estimate
from experiments.benchmarks.estimate import Call, Gpu, Work, by_passes, by_triton, softmax

pytest.importorskip("triton", reason="the triton package is not installed; it comes with torch on Linux")
LONG, SHORT = Call(8, 512, 512, 64, 64, False), Call(8, 50, 197, 64, 64, True)


@pytest.mark.parametrize("n_iters", [1, 3, 5, 21])
def test_launches_of_triton(n_iters: int) -> None:
    """Tiles: T forward and T in reverse, then two gradients; whole heads: one, one and the same two."""
    assert by_triton(LONG, n_iters).launches == pytest.approx((2 * n_iters + 2) * estimate.TRITON_LAUNCH_S)
    assert by_triton(SHORT, n_iters).launches == pytest.approx(4 * estimate.TRITON_LAUNCH_S)


def test_an_even_count_also_sums_columns_up() -> None:
    assert by_triton(LONG, 4).launches == pytest.approx((2 * 4 + 2 + 4) * estimate.TRITON_LAUNCH_S)


def test_work_is_proportional_to_the_map() -> None:
    twice = Call(16, 512, 512, 64, 64, False)
    for way in (softmax, lambda call: by_triton(call, 5), lambda call: by_passes(call, 60, 31)):
        one, two = way(LONG), way(twice)
        assert two.operations == 2 * one.operations > 0
        assert (two.exponentials, two.bytes) == (2 * one.exponentials, 2 * one.bytes)


def test_a_step_takes_its_launches_or_what_the_device_does() -> None:
    gpu = Gpu("one of everything", 1.0, 1.0, 1.0)
    assert Work(operations=1.0, launches=1.0).seconds(gpu) == 1 / estimate.OF_PRODUCTS
    assert Work(operations=1.0, launches=9.0).seconds(gpu) == 9.0
    assert Work(bytes=1.0).seconds(gpu) == 1 / estimate.OF_BYTES


def test_a_model_is_counted() -> None:
    rest, calls = estimate.count_model("set_sinkformer_modelnet40", quick=True)
    assert len(calls) == 5  # two blocks of two halves, and the pooling
    assert {call.heads for call in calls} == {4 * estimate.BATCH}
    assert min(rest.operations, rest.bytes, rest.launches) > 0
