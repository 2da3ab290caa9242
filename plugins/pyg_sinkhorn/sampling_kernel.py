# mypy: disable-error-code="no-untyped-def, import-untyped"
"""Farthest-point sampling on a GPU in one launch, in place of seven for each point that is chosen.

One program has a cloud and keeps its points and distances on the chip. The arithmetic is that of the loop in
`neighbors.py`, step by step, without fused multiply-adds: the choices are the same ones.
"""

import warnings

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def farthest_points_kernel(POINTS, DISTANCE, CHOSEN, n, k, POINTS_BLOCK: tl.constexpr):
    """CHOSEN (B, k) of POINTS (B, n, 3) from CHOSEN[:, 0] on; DISTANCE (B, n) is where distances begin."""
    cloud = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, POINTS_BLOCK)
    inside = index < n
    begin = POINTS + cloud * n * 3
    x = tl.load(begin + index * 3, mask=inside, other=0.0)
    y = tl.load(begin + index * 3 + 1, mask=inside, other=0.0)
    z = tl.load(begin + index * 3 + 2, mask=inside, other=0.0)
    distance = tl.load(DISTANCE + cloud * n + index, mask=inside, other=-1.0)
    chosen = tl.load(CHOSEN + cloud * k).to(tl.int32)
    for step in range(1, k):
        newest = index == chosen
        # One term is not 0: these are the newest point's own numbers.
        to_x = x - tl.sum(tl.where(newest, x, 0.0), 0)
        to_y = y - tl.sum(tl.where(newest, y, 0.0), 0)
        to_z = z - tl.sum(tl.where(newest, z, 0.0), 0)
        distance = tl.minimum(distance, to_x * to_x + to_y * to_y + to_z * to_z)
        distance = tl.where(newest, -1.0, distance)
        chosen = tl.argmax(distance, 0, tie_break_left=True)
        tl.store(CHOSEN + cloud * k + step, chosen.to(tl.int64))


def farthest_points(points: Tensor, first: Tensor, distance: Tensor, k: int) -> Tensor:
    """Indices (B, k) of the points chosen, in order.

    Args:
        points: (B, n, 3), float32.
        first: (B,), the points to begin with.
        distance: (B, n), where distances begin: infinite, or -1 for what may not be chosen.
        k: number of points.
    """
    batch, n = points.shape[:2]
    chosen = first.new_empty(batch, k)
    chosen[:, 0] = first
    size = triton.next_power_of_2(n)
    with torch.cuda.device(points.device if points.is_cuda else -1):
        farthest_points_kernel[(batch,)](
            points.contiguous(), distance.contiguous(), chosen, n, k,
            POINTS_BLOCK=size, num_warps=max(1, min(size // 256, 8)), enable_fp_fusion=False,
        )  # fmt: skip
    return chosen


#: Whether the kernel chose as the loop did at its first use, by device and number of points.
_known: dict[tuple[torch.device, int], bool] = {}


def prove(points: Tensor, first: Tensor, distance: Tensor, chosen_by_loop: Tensor) -> None:
    """Finds out whether the kernel chooses the same points as the loop; warns where it does not."""
    key = points.device, triton.next_power_of_2(points.shape[1])
    try:
        found = farthest_points(points, first, distance, chosen_by_loop.shape[1])
        reason = None if torch.equal(found, chosen_by_loop) else "it chose other points"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a compiler or driver ends in, sampling goes on
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    if reason is not None:
        warnings.warn(
            f"farthest-point sampling on {points.device} is done point by point, its kernel failed: {reason}",
            stacklevel=2,
        )
    _known[key] = reason is None


def is_known(points: Tensor) -> bool | None:
    """What the proof said; None before it."""
    return _known.get((points.device, triton.next_power_of_2(points.shape[1])))
