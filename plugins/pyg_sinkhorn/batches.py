"""Clouds as torch_geometric has them, one after the other, as the batch that the models compute with."""

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import to_dense_batch


def dense_clouds(points: Tensor | Data, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """A batch of clouds as a tensor, whatever form it comes in.

    Args:
        points: (B, n, 3 + c), which is left as it is; or a torch_geometric Data (one cloud) or Batch with `pos` (N, 3)
            and, where the points have features, `x` (N, c).
        mask: (B, n), boolean, True = a real point; for tensors alone.

    Returns:
        Points (B, n, 3 + c) with n the size of the largest cloud, and the mask (B, n), None where all are of one size.

    Raises:
        ValueError: for a Data without positions, and for a mask beside one, which tells the sizes itself.
    """
    if not isinstance(points, Data):
        return points, mask
    if mask is not None:
        raise ValueError("a mask goes with points as a tensor: torch_geometric's Data and Batch tell their sizes")
    if not isinstance(points.pos, Tensor):
        raise ValueError("the Data has no pos, the coordinates (points, 3)")
    columns = points.pos if points.x is None else torch.cat([points.pos, points.x.to(points.pos.dtype)], dim=-1)
    clouds = points.num_graphs if "ptr" in points or points.batch is not None else 1
    padded, real = to_dense_batch(columns, points.batch, batch_size=clouds)
    # By the shapes: to look at the mask would make a GPU wait.
    return padded, None if padded.shape[0] * padded.shape[1] == len(columns) else real
