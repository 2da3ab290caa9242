"""Point Cloud Transformer (Guo et al., PCT, CVMJ 2021) with any normalizer of the registry."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from sinkhorn_attention.normalizers import NormalizerChoice, choose_normalizer, get_normalizer
from torch import Tensor, nn
from torch_geometric.data import Data

from .batches import dense_clouds
from .blocks import check_choice, check_points, hide
from .neighbors import farthest_point_sample, gather_points, knn

SCALES = ("none", "head")


class PointwiseLayer(nn.Module):
    """Linear, batch norm and (leaky) ReLU over the last dimension; statistics come from valid entries only.

    Args:
        in_dim: width of the input.
        out_dim: width of the output.
        bias: whether the linear map has a bias.
        negative_slope: 0 is ReLU.
    """

    def __init__(self, in_dim: int, out_dim: int, bias: bool = False, negative_slope: float = 0.0) -> None:
        super().__init__()
        self.linear = nn.Linear(in_dim, out_dim, bias=bias)
        self.norm = nn.BatchNorm1d(out_dim)
        self.activation = nn.LeakyReLU(negative_slope) if negative_slope else nn.ReLU()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(..., in_dim) and a mask (...), True = valid -> (..., out_dim), 0 where masked."""
        if mask is None:
            return self._flat(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
        valid = self._flat(x[mask])
        return valid.new_zeros(*mask.shape, valid.shape[-1]).index_put((mask,), valid)

    def _flat(self, x: Tensor) -> Tensor:
        """(entries, in_dim) -> (entries, out_dim)."""
        x = self.linear(x)
        if x.shape[0]:  # without entries the running statistics would become NaN
            x = self.norm(x)
        return self.activation(x)


class SampleAndGroup(nn.Module):
    """Neighbour embedding: farthest-point samples, each described by its k nearest neighbours.

    Every sample gets max over neighbours of MLP([x_neighbour − x_sample, x_sample]). Sampling starts at the point
    farthest from the centroid, so the result depends on neither the order of the points nor chance (public ports start
    at a random point). A cloud with fewer points than samples or neighbours uses all it has.

    Args:
        dim: width of the input; the output has twice that.
        num_samples: number of samples.
        num_neighbors: number of neighbours, the sample itself included.
    """

    def __init__(self, dim: int, num_samples: int, num_neighbors: int) -> None:
        super().__init__()
        self.num_samples = num_samples
        self.num_neighbors = num_neighbors
        self.local = nn.ModuleList([PointwiseLayer(2 * dim, 2 * dim), PointwiseLayer(2 * dim, 2 * dim)])

    def forward(self, points: Tensor, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Points (B, n, 3), features (B, n, dim), mask (B, n) -> the same three of the samples, width 2 · dim."""
        samples, k = min(self.num_samples, points.shape[1]), min(self.num_neighbors, points.shape[1])
        chosen = farthest_point_sample(points, samples, mask)
        centers, center_x = gather_points(points, chosen), gather_points(x, chosen).unsqueeze(2)
        neighbor_x = gather_points(x, knn(centers, points, k, mask))
        grouped = torch.cat([neighbor_x - center_x, center_x.expand_as(neighbor_x)], dim=-1)
        sample_mask, slot_mask = None, None
        if mask is not None:
            count = mask.sum(1, keepdim=True)
            sample_mask = torch.arange(samples, device=mask.device) < count
            slot_mask = sample_mask.unsqueeze(2) & (torch.arange(k, device=mask.device) < count).unsqueeze(1)
        for layer in self.local:
            grouped = layer(grouped, slot_mask)
        # After the ReLU no valid slot is below the 0 of a masked one, so these do not show in the maximum.
        return centers, grouped.amax(2), sample_mask


class OffsetAttention(nn.Module):
    """x + ReLU(BN(W (x − A V))), with one weight for query and key, so that the scores are symmetric (PCT, eq. 8).

    Args:
        dim: width.
        normalizer: a name, a mapping of "name" and options, or a Normalizer: see `sinkhorn_attention.get_normalizer`.
        n_iters: its number of half-steps, None leaves it to the normalizer.
        normalizer_options: its further options.
        scale: "none" (PCT's) or "head", (dim / 4) ** -0.5.
    """

    def __init__(
        self,
        dim: int,
        normalizer: NormalizerChoice = "pct",
        n_iters: int | None = None,
        normalizer_options: Mapping[str, object] | None = None,
        scale: str = "none",
    ) -> None:
        super().__init__()
        check_choice("scale", scale, SCALES)
        width = dim // 4
        self.scale = 1.0 if scale == "none" else width**-0.5
        self.query_key = nn.Linear(dim, width, bias=False)
        self.value = nn.Linear(dim, dim)
        chosen = choose_normalizer(normalizer, n_iters, normalizer_options)
        self.normalizer = get_normalizer(chosen, head_dim=width, num_heads=1)
        self.transform = PointwiseLayer(dim, dim, bias=True)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, n, dim) and a mask (B, n), True = valid -> (B, n, dim), 0 where masked if x is."""
        projected = self.query_key(x).unsqueeze(1)
        heads_mask = None if mask is None else mask.unsqueeze(1)
        attended = self.normalizer.attend(
            projected,
            projected,
            self.value(x).unsqueeze(1),
            scale=self.scale,
            query_mask=heads_mask,
            key_mask=heads_mask,
        ).squeeze(1)
        return x + self.transform(x - attended, mask)


class PointCloudTransformer(nn.Module):
    """Classifies point clouds by offset-attention over sampled neighbourhoods. 2,876,136 parameters with 40 classes.

    Two pointwise layers, two sample-and-group stages, two pointwise layers, four offset-attention layers, the
    concatenation of their outputs and their input fused to `fuse_dim` channels, max pooling, MLP. The Sinkformers paper
    published no code for this model; the architecture is that of the public PCT ports.

    Its original normalisation is the normalizer "pct", already two half-steps (columns, then rows): compare "pct",
    "softmax" and "sinkhorn" with n_iters.

    Args:
        num_classes: number of logits.
        normalizer: a name, a mapping of "name" and options, or a Normalizer: see `sinkhorn_attention.get_normalizer`.
        n_iters: its number of half-steps; None leaves it to the normalizer ("pct" and "softmax" take None only).
        normalizer_options: its further options.
        embed_dim: width of the first layers; attention works at four times that.
        num_samples: points kept by the two sample-and-group stages.
        num_neighbors: neighbours per sample.
        num_layers: offset-attention layers.
        fuse_dim: width before the pooling.
        head_dims: widths of the two hidden layers of the head.
        dropout: after each of them.
        scale: "none" (PCT's) or "head": see `OffsetAttention`.
        features: of each point, beside its three coordinates; neighbours and samples go by the coordinates alone.
    """

    def __init__(
        self,
        num_classes: int = 40,
        normalizer: NormalizerChoice = "sinkhorn",
        n_iters: int | None = None,
        normalizer_options: Mapping[str, object] | None = None,
        *,
        embed_dim: int = 64,
        num_samples: Sequence[int] = (512, 256),
        num_neighbors: int = 32,
        num_layers: int = 4,
        fuse_dim: int = 1024,
        head_dims: Sequence[int] = (512, 256),
        dropout: float = 0.5,
        scale: str = "none",
        features: int = 0,
    ) -> None:
        super().__init__()
        if features < 0:
            raise ValueError(f"features must be at least 0, got {features}")
        self.num_features = features
        if len(num_samples) != 2 or min(*num_samples, num_neighbors) < 1:
            raise ValueError(
                f"num_samples must be two positive numbers and num_neighbors positive, got {tuple(num_samples)} "
                f"and {num_neighbors}"
            )
        dim = 4 * embed_dim
        self.embed = nn.ModuleList([PointwiseLayer(3 + features, embed_dim), PointwiseLayer(embed_dim, embed_dim)])
        self.groups = nn.ModuleList(
            SampleAndGroup(width, samples, num_neighbors)
            for width, samples in zip((embed_dim, 2 * embed_dim), num_samples, strict=True)
        )
        self.mix = nn.ModuleList([PointwiseLayer(dim, dim), PointwiseLayer(dim, dim)])
        chosen = choose_normalizer(normalizer, n_iters, normalizer_options)
        self.layers = nn.ModuleList(OffsetAttention(dim, chosen, scale=scale) for _ in range(num_layers))
        self.fuse = PointwiseLayer((num_layers + 1) * dim, fuse_dim, negative_slope=0.2)
        # As in the public ports, only the first hidden layer of the head goes without a bias.
        self.head_layers = nn.ModuleList(
            PointwiseLayer(width_in, width_out, bias=i > 0, negative_slope=0.2)
            for i, (width_in, width_out) in enumerate(pairwise((fuse_dim, *head_dims)))
        )
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(head_dims[-1], num_classes)

    def forward(self, points: Tensor | Data, mask: Tensor | None = None) -> Tensor:
        """Logits (B, num_classes) of clouds.

        Args:
            points: (B, n, 3 + features), floating; or torch_geometric's Data or Batch, see `dense_clouds`.
            mask: (B, n), boolean, True = a real point. A padded cloud's logits are those of the cloud alone, in
                training mode too, where batch statistics leave the padding out. A cloud without any real point gives
                finite logits.

        Raises:
            ValueError: says which argument has the wrong shape or dtype; also for a single cloud in training mode.
        """
        points, mask = dense_clouds(points, mask)
        check_points(points, mask, self.num_features)
        if self.training and points.shape[0] == 1:
            raise ValueError("a training batch needs at least 2 clouds: the head has batch norm; or call .eval()")
        points = hide(points, mask)
        x, points = points, points[..., :3]
        for layer in self.embed:
            x = layer(x, mask)
        for group in self.groups:
            points, x, mask = group(points, x, mask)
        outputs = [x]
        for layer in self.mix:
            x = layer(x, mask)
        for layer in self.layers:
            x = layer(x, mask)
            outputs.append(x)
        x = self.fuse(torch.cat([*outputs[1:], outputs[0]], dim=-1), mask)
        x = pool_max(x, mask)
        for layer in self.head_layers:
            x = self.dropout(layer(x))
        return self.head(x)


def pool_max(x: Tensor, mask: Tensor | None) -> Tensor:
    """Maximum over the valid tokens of x (B, n, d): (B, d), 0 where there is none."""
    if mask is None:
        return x.amax(1)
    pooled = x.masked_fill(~mask.unsqueeze(-1), -torch.inf).amax(1)
    return torch.where(mask.any(1, keepdim=True), pooled, 0.0)
