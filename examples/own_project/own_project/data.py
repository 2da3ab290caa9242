"""Stripes: images of 16 by 16, striped upright, lying or not at all, in noise."""

import numpy as np

from experiments.data.images import ImageData


class Stripes(ImageData):
    """Three classes of images that are drawn here.

    Args:
        per_class: images of a class in each split.
        noise: standard deviation, in grey levels of 0 to 255.
        **options: those of `ImageData` (batch_size, train_on, ...).
    """

    name = "stripes"
    num_classes = 3

    def __init__(self, per_class: int, noise: float, **options: object) -> None:
        rng = np.random.default_rng(0)
        stripes = np.tile([0.0, 80.0], (16, 8))
        patterns = np.stack([stripes, stripes.T, np.full((16, 16), 40.0)]) + 80
        labels = np.repeat(np.arange(3), per_class)
        images = {
            split: (patterns[labels] + noise * rng.standard_normal((len(labels), 16, 16))).clip(0, 255).astype(np.uint8)
            for split in ("train", "val", "test")
        }
        super().__init__(images, dict.fromkeys(images, labels), **options)
