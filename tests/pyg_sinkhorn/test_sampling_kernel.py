"""The kernel for farthest-point sampling chooses what the loop chooses, and is taken once it has been seen to.

Triton's own kernel runs in its interpreter, which tests/sinkhorn_attention/test_triton.py starts.
"""

import os
import warnings

import pytest
import torch
from pyg_sinkhorn import farthest_point_sample, neighbors

sampling_kernel = pytest.importorskip("pyg_sinkhorn.sampling_kernel", reason="Triton is on Linux alone")
IN_INTERPRETER = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="run by test_triton.py in Triton's interpreter"
)


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch):
    """CPU tensors stand for a device's."""
    monkeypatch.setattr(neighbors, "KERNEL_DEVICES", ("cpu",))
    monkeypatch.setattr(sampling_kernel, "_known", {})


def clouds(n: int = 40) -> torch.Tensor:
    return torch.randn(3, n, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def calls(monkeypatch):
    """The loop in the kernel's place."""
    made = []

    def stand_in(points, first, distance, k):
        made.append(k)
        return neighbors._choose_by_loop(points, first, distance.clone(), k)

    monkeypatch.setattr(sampling_kernel, "farthest_points", stand_in)
    return made


def test_it_is_tried_once_for_a_size_and_then_taken(calls):
    want = farthest_point_sample(clouds(), 9)
    assert calls == [9]
    assert torch.equal(farthest_point_sample(clouds(), 9), want)
    assert calls == [9, 9]
    farthest_point_sample(clouds(100), 9)
    assert calls == [9, 9, 9]
    assert len(sampling_kernel._known) == 2


@pytest.mark.parametrize("broken", ["other points", "no compiler"])
def test_a_kernel_that_fails_leaves_it_to_the_loop(monkeypatch, broken):
    def wrong(points, first, distance, k):
        if broken == "no compiler":
            raise RuntimeError("no ptxas")
        return first.new_zeros(len(points), k)

    want = farthest_point_sample(clouds().double(), 9)
    monkeypatch.setattr(sampling_kernel, "farthest_points", wrong)
    said = "it chose other points" if broken == "other points" else "RuntimeError: no ptxas"
    with pytest.warns(UserWarning, match=f"point by point, its kernel failed: {said}"):
        assert torch.equal(farthest_point_sample(clouds(), 9), want)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(farthest_point_sample(clouds(), 9), want)


def test_other_dtypes_dimensions_and_sizes_are_the_loops(calls):
    farthest_point_sample(clouds().double(), 9)
    farthest_point_sample(torch.randn(2, 30, 2), 9)
    farthest_point_sample(torch.randn(1, neighbors.KERNEL_POINTS + 1, 3), 2)
    assert calls == []


@IN_INTERPRETER
@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 3), (40, 9), (130, 130)])
def test_triton_chooses_what_the_loop_chooses(monkeypatch, n, k):
    """Clouds, padded ones, and lattices with many equal distances, of which the first point is chosen."""
    lattice = torch.cartesian_prod(*[torch.arange(6.0)] * 3)[:n].expand(2, -1, -1)
    mask = torch.arange(n) < torch.tensor([[n], [max(1, n // 2)], [1]])
    for points, of_clouds in ((clouds(n), None), (clouds(n) + 100, mask), (lattice, None)):
        monkeypatch.setattr(neighbors, "KERNEL_DEVICES", ())
        want = farthest_point_sample(points, k, of_clouds)
        monkeypatch.setattr(neighbors, "KERNEL_DEVICES", ("cpu",))
        for _ in range(2):  # proven, then taken
            assert torch.equal(farthest_point_sample(points, k, of_clouds), want)
        assert list(sampling_kernel._known.values()) == [True]
