"""Small grey images that fit into memory."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch.utils.data import Dataset

from ..seeding import generator
from .base import SPLITS, Batch, DataModule, SampleKey, hash_arrays


class ImageArrays(Dataset[Batch]):
    """Images (n, height, width) of bytes, given as normalised float batches (B, 1, height, width) with labels (B,).

    Args:
        images: (n, height, width), uint8.
        labels: (n,), integer classes.
        mean: subtracted from pixels scaled to 0..1.
        std: divided by.
        max_shift: each image is moved by up to so many pixels each way, filled with background (0): drawn from (seed,
            epoch, sample).
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, mean: float, std: float, max_shift: int = 0) -> None:
        self.images, self.labels = torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64))
        self.mean, self.std, self.max_shift = mean, std, max_shift

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, keys: Sequence[SampleKey]) -> Batch:
        indices = torch.tensor([key.sample for key in keys], dtype=torch.int64)
        images = self.images[indices]
        if self.max_shift:
            images = torch.stack([self._shifted(image, key) for image, key in zip(images, keys, strict=True)])
        return (images.float().div(255).sub(self.mean).div(self.std).unsqueeze(1), self.labels[indices])

    def _shifted(self, image: torch.Tensor, key: SampleKey) -> torch.Tensor:
        drawn = torch.randint(
            0, 2 * self.max_shift + 1, (2,), generator=generator("augment", key.seed, key.epoch, key.sample)
        )
        top, left = drawn.tolist()
        height, width = image.shape
        return torch.nn.functional.pad(image, [self.max_shift] * 4)[top : top + height, left : left + width]


class ImageData(DataModule):
    """Splits of images held in memory.

    Args:
        images: of each split, (n, height, width), uint8.
        labels: of each split, (n,).
        mean: see `ImageArrays`.
        std: see `ImageArrays`.
        max_shift: see `ImageArrays`; training only.
        batch_size: see `DataModule`.
        eval_batch_size: see `DataModule`.
        num_workers: see `DataModule`.
        train_on: see `DataModule`.
    """

    num_classes = 10

    def __init__(
        self,
        images: Mapping[str, np.ndarray],
        labels: Mapping[str, np.ndarray],
        *,
        mean: float,
        std: float,
        max_shift: int,
        batch_size: int,
        eval_batch_size: int,
        num_workers: int,
        train_on: Sequence[str],
    ) -> None:
        super().__init__(batch_size, eval_batch_size, num_workers, train_on)
        if max_shift < 0:
            raise ValueError(f"max_shift must be 0 or more pixels; got {max_shift}")
        if std <= 0:
            raise ValueError(f"std must be positive; got {std}")
        self.images, self.labels, self.mean, self.std, self.max_shift = images, labels, mean, std, max_shift

    def dataset(self, splits: Sequence[str], augment: bool = False) -> ImageArrays:
        images = np.concatenate([self.images[split] for split in splits])
        labels = np.concatenate([self.labels[split] for split in splits])
        return ImageArrays(images, labels, self.mean, self.std, self.max_shift if augment else 0)

    @cached_property
    def sizes(self) -> dict[str, int]:
        return {split: len(self.labels[split]) for split in SPLITS}

    @cached_property
    def split_hash(self) -> str:
        arrays = {f"{split} images": self.images[split] for split in SPLITS}
        return hash_arrays(arrays | {f"{split} labels": self.labels[split] for split in SPLITS})
