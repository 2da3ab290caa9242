"""Nearest neighbours and farthest-point sampling of batched, possibly ragged point clouds.

In plain torch, but for a kernel of Triton's on GPUs (sampling_kernel.py); torch_geometric's own `knn` and `fps` need
the compiled pyg-lib. Indices carry no gradient.
"""

import torch
from torch import Tensor

#: Elements of the distance block held at a time: 2²² float32 are 16 MB.
BLOCK_ELEMENTS = 2**22
#: Where farthest points are chosen by a kernel of our own, and of how many at most: a program keeps a cloud.
KERNEL_DEVICES, KERNEL_POINTS = ("cuda",), 4096


@torch.no_grad()
def knn(
    query_points: Tensor,
    points: Tensor,
    k: int,
    mask: Tensor | None = None,
    *,
    block_elements: int = BLOCK_ELEMENTS,
) -> Tensor:
    """The k points nearest to each query, nearest first, by Euclidean distance.

    Rows of the distance matrix are computed in blocks, so that memory grows with the number of points and not with its
    square. Differences are taken before squaring, so that close points of a far-away cloud keep their order.

    Args:
        query_points: (B, n, d), floating. A query that is one of the points has itself as first neighbour, or an
            earlier double.
        points: (B, m, d).
        k: number of neighbours, 1 <= k <= m.
        mask: (B, m), boolean, True = a real point; only these are neighbours. Where a cloud has fewer than k, the
            surplus slots repeat the nearest one (slot j is surplus where j >= mask.sum(-1)).
        block_elements: size of the block of distances.

    Returns:
        Indices into `points`, (B, n, k), int64. Of equally near points the lower index comes first, so that a padded
        cloud has the neighbours of the cloud alone.

    Raises:
        ValueError: says which argument has the wrong shape or dtype, or that there are fewer points than k.
    """
    check_cloud("query_points", query_points)
    check_cloud("points", points, k, mask)
    if query_points.shape[0] != points.shape[0] or query_points.shape[2] != points.shape[2]:
        raise ValueError(
            "query_points (B, n, d) and points (B, m, d) must agree in B and d, "
            f"got {tuple(query_points.shape)} and {tuple(points.shape)}"
        )
    dtype = torch.promote_types(torch.promote_types(query_points.dtype, points.dtype), torch.float32)
    query_points, points = query_points.to(dtype), points.to(dtype)
    rows = max(1, block_elements // max(1, points.shape[0] * points.shape[1]))
    found = [_nearest(block, points, k, mask) for block in query_points.split(rows, dim=1)]
    return torch.cat(found, dim=1)


def _nearest(queries: Tensor, points: Tensor, k: int, mask: Tensor | None) -> Tensor:
    """One block of `knn`."""
    distances = torch.cdist(queries, points, compute_mode="donot_use_mm_for_euclid_dist")
    if distances.dtype == torch.float32:
        # The bits of a distance, read as an integer, with the index below them: topk decides no tie by chance, and
        # costs a quarter of a stable sort.
        index = torch.arange(points.shape[1], device=points.device)
        keys = (distances.view(torch.int32).to(torch.int64) << 32) | index
        if mask is not None:
            keys = keys.masked_fill(~mask.unsqueeze(1), torch.iinfo(torch.int64).max)
        nearest = keys.topk(k, largest=False).indices
    else:
        if mask is not None:
            distances = distances.masked_fill(~mask.unsqueeze(1), torch.inf)
        nearest = distances.sort(dim=-1, stable=True).indices[..., :k]
    if mask is None:
        return nearest
    surplus = torch.arange(k, device=mask.device) >= mask.sum(-1, keepdim=True)
    return torch.where(surplus.unsqueeze(1), nearest[..., :1], nearest)


@torch.no_grad()
def farthest_point_sample(
    points: Tensor, k: int, mask: Tensor | None = None, *, generator: torch.Generator | None = None
) -> Tensor:
    """Chooses k points, each the farthest from those chosen before it (Eldar et al. 1997; PointNet++).

    Args:
        points: (B, n, d), floating.
        k: number of points to choose, 1 <= k <= n.
        mask: (B, n), boolean, True = a real point; only these are chosen. Where a cloud has fewer than k, the surplus
            slots repeat the first choice (slot j is surplus where j >= mask.sum(-1)).
        generator: None starts at the point farthest from the cloud's centroid, which does not depend on the order of
            the points; a generator (on the CPU) starts at a random real point, the same for the same seed.

    Returns:
        Indices into `points`, (B, k), int64, in the order of choice; no index twice, but for surplus slots.

    Raises:
        ValueError: says which argument has the wrong shape or dtype, or that there are fewer points than k.
    """
    check_cloud("points", points, k, mask)
    points = points.to(torch.promote_types(points.dtype, torch.float32))
    batch, n = points.shape[:2]
    valid = mask if mask is not None else torch.ones(batch, n, dtype=torch.bool, device=points.device)
    points = points.masked_fill(~valid.unsqueeze(-1), 0.0)
    count = valid.sum(1, keepdim=True)
    if generator is None:
        # In float64, where padding does not change the sum's rounding: lattices have many equal distances.
        exact = points.double()
        centroid = exact.sum(1, keepdim=True) / count.clamp(min=1).unsqueeze(-1)
        chosen = (exact - centroid).square().sum(-1).masked_fill(~valid, -1.0).argmax(1)
    else:  # the rank among the real points is drawn, so that padding does not move the start
        rank = (torch.rand(batch, 1, generator=generator, dtype=torch.float64).to(points.device) * count).long()
        chosen = (valid & (valid.cumsum(1) == rank + 1)).int().argmax(1)

    # Squared distance to the nearest chosen point; -1 where a point is chosen already or is not real.
    distance = torch.full((batch, n), torch.inf, dtype=points.dtype, device=points.device).masked_fill(~valid, -1.0)
    indices = _choose(points, chosen, distance, k)
    surplus = torch.arange(k, device=points.device) >= count
    return torch.where(surplus, indices[:, :1], indices)


def _choose(points: Tensor, first: Tensor, distance: Tensor, k: int) -> Tensor:
    """The points chosen, (B, k): on a CUDA device in one launch, once that was seen to choose as the loop does."""
    suitable = points.dtype == torch.float32 and points.shape[2] == 3 and points.shape[1] <= KERNEL_POINTS
    if points.device.type not in KERNEL_DEVICES or not suitable or type(points) is not Tensor:
        return _choose_by_loop(points, first, distance, k)
    try:
        from . import sampling_kernel
    except ImportError:  # no triton: Linux alone has it
        return _choose_by_loop(points, first, distance, k)
    known = sampling_kernel.is_known(points)
    if known:
        return sampling_kernel.farthest_points(points, first, distance, k)
    chosen = _choose_by_loop(points, first, distance.clone(), k)
    if known is None and not (points.is_cuda and torch.cuda.is_current_stream_capturing()):
        sampling_kernel.prove(points, first, distance, chosen)
    return chosen


def _choose_by_loop(points: Tensor, first: Tensor, distance: Tensor, k: int) -> Tensor:
    """The same by torch's operations; the distances are overwritten."""
    picks = [first]
    for _ in range(k - 1):
        newest = points.gather(1, picks[-1].view(-1, 1, 1).expand(-1, -1, points.shape[-1]))
        distance = torch.minimum(distance, (points - newest).square().sum(-1))
        distance.scatter_(1, picks[-1].unsqueeze(1), -1.0)
        picks.append(distance.argmax(1))
    return torch.stack(picks, dim=1)


def gather_points(x: Tensor, indices: Tensor) -> Tensor:
    """Rows of x (B, n, d) at indices (B, ...): (B, ..., d)."""
    flat = indices.flatten(1).unsqueeze(-1).expand(-1, -1, x.shape[-1])
    return x.gather(1, flat).unflatten(1, indices.shape[1:])


def check_cloud(name: str, points: Tensor, k: int | None = None, mask: Tensor | None = None) -> None:
    """Raises ValueError unless points are floating (B, n, d), 1 <= k <= n, and the mask None or boolean (B, n)."""
    if points.dim() != 3 or not points.is_floating_point():
        raise ValueError(f"{name} must be floating, (batch, points, dim), got {tuple(points.shape)} {points.dtype}")
    if points.shape[1] == 0:
        raise ValueError(f"{name} holds clouds without a single point")
    if k is not None and not 1 <= k <= points.shape[1]:
        raise ValueError(f"k must lie between 1 and the number of {name}, {points.shape[1]}, got {k}")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != points.shape[:2]):
        raise ValueError(
            f"mask must be boolean, True = a real point, of shape {tuple(points.shape[:2])}, "
            f"got {tuple(mask.shape)} {mask.dtype}"
        )
