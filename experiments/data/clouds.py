"""Point clouds of a prepared file, as batches: points drawn, normalised and augmented by (seed, epoch, sample) alone.

torch_geometric's transforms (RandomRotate, RandomJitter, ...) draw from global random state, so a resumed run would see
other clouds than an uninterrupted one; these do not.
"""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..seeding import generator
from .base import SPLITS, Batch, DataModule, SampleKey, hash_arrays, stratified_split
from .meshes import CloudReport, read_report

DRAWS = ("fixed", "fresh")
NORMALIZATIONS = ("standard", "unit_sphere", "none")


def normalize_cloud(points: Tensor, how: str) -> Tensor:
    """Normalises one cloud (n, 3).

    Args:
        points: float64.
        how: "standard" as the published code: clipped to ±100 times the mean absolute coordinate, then minus the mean
            and over the standard deviation of all coordinates together, not by axis; "unit_sphere": minus the mean
            point, over the largest distance; "none".
    """
    if how == "none":
        return points
    if how == "unit_sphere":
        points = points - points.mean(0)
        return points / points.norm(dim=1).max().clamp(min=torch.finfo(points.dtype).tiny)
    limit = 100 * points.abs().mean()
    points = points.clamp(-limit, limit)
    points = points - points.mean()
    return points / points.std(correction=0).clamp(min=torch.finfo(points.dtype).tiny)


class CloudArrays(Dataset[Batch]):
    """Clouds as batches (points (B, num_points, 3) float32, labels (B,)); (B, num_points, 6) with normals.

    Args:
        points: (n, stored, 3), float32, in a frame of each cloud's own; (n, stored, 6) with unit normals, which turn
            and stretch with the points.
        center: (n, 3), and
        scale: (n,), which lead back to the meshes' coordinates: points * scale + center.
        labels: (n,), integer classes.
        num_points: points of a cloud, at most those stored.
        draw: of training points. "fixed": the same random subset for all clouds and epochs of a run, from its seed, as
            published; "fresh": one of its own for every cloud and epoch. Evaluation takes the first points.
        normalize: see `normalize_cloud`; "none" keeps the frame of the stored points, all others start from the meshes'
            coordinates.
        rotate: largest angle of a random rotation about z, in units of pi, in training.
        stretch: largest factor s of a random scaling of each axis, even in [1 / s, s], in training; 1 for none.
        jitter: standard deviation of noise on every coordinate, in training.
        training: whether the above are drawn.
    """

    def __init__(
        self,
        points: np.ndarray,
        center: np.ndarray,
        scale: np.ndarray,
        labels: np.ndarray,
        *,
        num_points: int,
        draw: str = "fixed",
        normalize: str = "standard",
        rotate: float = 0.0,
        stretch: float = 1.0,
        jitter: float = 0.0,
        training: bool = False,
    ) -> None:
        self.points, self.labels = torch.from_numpy(points), torch.from_numpy(labels.astype(np.int64))
        self.center, self.scale = torch.from_numpy(center), torch.from_numpy(scale)
        self.num_points, self.draw, self.normalize = num_points, draw, normalize
        self.rotate, self.stretch, self.jitter, self.training = rotate, stretch, jitter, training

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, keys: Sequence[SampleKey]) -> Batch:
        labels = self.labels[torch.tensor([key.sample for key in keys], dtype=torch.int64)]
        return torch.stack([self._cloud(key) for key in keys]), labels

    def _cloud(self, key: SampleKey) -> Tensor:
        chosen = self.points[key.sample][self._chosen(key)].double()
        points, normals = chosen[:, :3], chosen[:, 3:]
        if self.normalize != "none":
            points = points * self.scale[key.sample] + self.center[key.sample]
        points = normalize_cloud(points, self.normalize)
        if self.training:
            points, normals = self._augmented(points, normals, key)
        return torch.cat([points, normals], dim=1).float()

    def _chosen(self, key: SampleKey) -> Tensor:
        if not self.training:
            return torch.arange(self.num_points)
        about = (key.seed,) if self.draw == "fixed" else (key.seed, key.epoch, key.sample)
        order = torch.randperm(self.points.shape[1], generator=generator(f"{self.draw} points", *about))
        return order[: self.num_points]

    def _augmented(self, points: Tensor, normals: Tensor, key: SampleKey) -> tuple[Tensor, Tensor]:
        random = generator("augment", key.seed, key.epoch, key.sample)
        angle, *factors = torch.rand(4, generator=random, dtype=torch.float64)
        if self.rotate:
            angle = (2 * angle - 1) * self.rotate * torch.pi
            points, normals = _turned(points, angle), _turned(normals, angle)
        if self.stretch != 1:
            stretch = 1 / self.stretch + torch.stack(factors) * (self.stretch - 1 / self.stretch)
            points = points * stretch
            if normals.shape[1]:
                normals = torch.nn.functional.normalize(normals / stretch, dim=1)
        if self.jitter:
            points = points + self.jitter * torch.randn(points.shape, generator=random, dtype=torch.float64)
        return points, normals


def _turned(vectors: Tensor, angle: Tensor) -> Tensor:
    """Vectors (n, 3) turned about z; (n, 0) as they are."""
    if not vectors.shape[1]:
        return vectors
    cosine, sine = angle.cos(), angle.sin()
    x, y, z = vectors.unbind(1)
    return torch.stack([cosine * x - sine * y, sine * x + cosine * y, z], dim=1)


class CloudData(DataModule):
    """Splits of a prepared file of clouds, held in memory.

    The file's test part is the test split; the validation split comes out of its training part, stratified.

    Args:
        path: the prepared file.
        missing: what to do where it is not there; the end of the error message.
        val_size: clouds to validate on.
        split_seed: of their choice; not the run's seed.
        num_points: points of a cloud.
        draw: "fixed" or "fresh": see `CloudArrays`.
        normalize: "standard", "unit_sphere" or "none": see `normalize_cloud`.
        rotate: augmentation: see `CloudArrays`.
        stretch: augmentation.
        jitter: augmentation.
        batch_size: see `DataModule`.
        eval_batch_size: see `DataModule`.
        num_workers: see `DataModule`.
        train_on: see `DataModule`.
        drop_trailing: see `DataModule`.

    Raises:
        FileNotFoundError: where the file is not there or cannot be read.
        ValueError: for a setting that makes no sense.
    """

    def __init__(
        self,
        path: Path,
        missing: str,
        *,
        val_size: int,
        split_seed: int,
        num_points: int,
        draw: str,
        normalize: str,
        rotate: float,
        stretch: float,
        jitter: float,
        batch_size: int,
        eval_batch_size: int,
        num_workers: int,
        train_on: Sequence[str],
        drop_trailing: bool = False,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, num_workers, train_on, drop_trailing)
        stored = read_report(path)
        if stored is None:
            raise FileNotFoundError(f"data={self.name}: {path} is not there or damaged: {missing}")
        self.report: CloudReport = stored[1]
        for name, value, choices in (("draw", draw, DRAWS), ("normalize", normalize, NORMALIZATIONS)):
            if value not in choices:
                raise ValueError(f"data.{name} must be one of {', '.join(choices)}; got {value!r}")
        if not 1 <= num_points <= self.report.num_points:
            raise ValueError(
                f"data.num_points must lie between 1 and the {self.report.num_points:,} points prepared in {path}; "
                f"got {num_points}"
            )
        if rotate < 0 or stretch < 1 or jitter < 0:
            raise ValueError(
                "data.rotate and data.jitter must be at least 0 and data.stretch at least 1; "
                f"got {rotate}, {jitter} and {stretch}"
            )
        self.path = path
        self.num_classes = len(self.report.classes)
        self.options: dict[str, Any] = {
            "num_points": num_points,
            "draw": draw,
            "normalize": normalize,
            "rotate": rotate,
            "stretch": stretch,
            "jitter": jitter,
        }
        self.places = self._divided(val_size, split_seed)
        with h5py.File(path) as file:
            self._names = {split: file[f"{part}/name"][()][rows] for split, (part, rows) in self.places.items()}
        if drop_trailing and min(self.sizes.values()) <= max(batch_size, eval_batch_size):
            sizes = ", ".join(f"{size} {split}" for split, size in self.sizes.items())
            raise ValueError(
                f"data.drop_trailing leaves nothing of a split in batches of "
                f"{batch_size} and {eval_batch_size} ({sizes})"
            )

    def _divided(self, val_size: int, split_seed: int) -> dict[str, tuple[str, np.ndarray]]:
        """The part of the file in which each split lies, and its rows there."""
        with h5py.File(self.path) as file:
            labels, tested = file["train/label"][()], len(file["test/label"])
        parts = stratified_split(labels, {"val": val_size}, split_seed)
        return {split: ("train", rows) for split, rows in parts.items()} | {"test": ("test", np.arange(tested))}

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Clouds of each split."""
        return {split: len(self.places[split][1]) for split in SPLITS}

    @cached_property
    def split_hash(self) -> str:
        """Hash of the prepared clouds and of which of them lie in which split."""
        names = {split: np.asarray([name.decode() for name in self._names[split]]) for split in SPLITS}
        return hash_arrays({**names, "content": np.array(self.report.content_hash)})

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.report.classes)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "meshes_not_read": sorted(self.report.errors)}

    @cached_property
    def _parts(self) -> dict[str, dict[str, np.ndarray]]:
        with h5py.File(self.path) as file:
            return {
                part: {name: file[part][name][()] for name in ("points", "center", "scale", "label")}
                for part in {part for part, _ in self.places.values()}
            }

    def dataset(self, splits: Sequence[str], augment: bool = False) -> Dataset[Batch]:
        arrays = {
            name: np.concatenate([self._parts[part][name][rows] for part, rows in (self.places[s] for s in splits)])
            for name in ("points", "center", "scale", "label")
        }
        points, center, scale, labels = (arrays[name] for name in ("points", "center", "scale", "label"))
        return CloudArrays(points, center, scale, labels, **self.options, training=augment)
