"""Images of classes that a file names, one a line: data that can be prepared anew in another order, named by tests."""

from pathlib import Path

import numpy as np

from experiments.data.images import ImageData

BRIGHTNESS = {"cat": 40, "dog": 120, "eel": 200}


class Animals(ImageData):
    """Bright or dark squares; `folder`/classes.txt has the names of the classes, `folder`/seed.txt the pixels' seed."""

    name = "animals"

    def __init__(self, folder: str) -> None:
        self.names = tuple((Path(folder) / "classes.txt").read_text().split())
        self.num_classes = len(self.names)
        rng = np.random.default_rng(int((Path(folder) / "seed.txt").read_text()))
        labels = {split: np.arange(12) % len(self.names) for split in ("train", "val", "test")}
        images = {
            split: np.stack([rng.integers(0, BRIGHTNESS[self.names[label]], (28, 28)) for label in found])
            for split, found in labels.items()
        }
        super().__init__(
            {split: image.astype(np.uint8) for split, image in images.items()},
            labels,
            mean=0.0,
            std=1.0,
            max_shift=0,
            batch_size=6,
            eval_batch_size=6,
            num_workers=0,
            train_on=["train"],
        )

    @property
    def classes(self) -> tuple[str, ...]:
        """As the file has them."""
        return self.names
