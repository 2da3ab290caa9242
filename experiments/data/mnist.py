"""The whole of MNIST, from its four IDX files."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torchvision.datasets.mnist import read_image_file, read_label_file

from .base import data_folder, prepare_command, stratified_split
from .images import ImageData

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


class MNIST(ImageData):
    """The official test part is the test split; the validation split comes out of the training part, stratified.

    Args:
        folder: the folder of all data; the files lie in its MNIST/raw, as torchvision puts them.
        val_size: samples to validate on.
        split_seed: of the choice of the validation split.
        mean: of the pixels, subtracted.
        std: of the pixels, divided by.
        max_shift: augmentation, in pixels.
        batch_size: training samples of a step.
        eval_batch_size: samples of an evaluation step.
        num_workers: loading processes.
        train_on: splits that are trained on.
    """

    name = "mnist"

    def __init__(
        self,
        folder: str,
        val_size: int,
        split_seed: int,
        mean: float,
        std: float,
        max_shift: int,
        batch_size: int,
        eval_batch_size: int,
        num_workers: int,
        train_on: Sequence[str],
    ) -> None:
        raw = raw_folder(folder)
        missing = [name for name in FILES if not (raw / name).is_file()]
        if missing:
            raise FileNotFoundError(
                f"data=mnist: {', '.join(missing)} not found in {raw}: run `{prepare_command('mnist', folder)}`, "
                "or take data=mnist5k, which needs no download"
            )
        images, labels = read_part(raw, "train")
        test_images, test_labels = read_part(raw, "t10k")
        parts = stratified_split(labels, {"val": val_size}, split_seed)
        super().__init__(
            {split: images[part] for split, part in parts.items()} | {"test": test_images},
            {split: labels[part] for split, part in parts.items()} | {"test": test_labels},
            mean=mean,
            std=std,
            max_shift=max_shift,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            train_on=train_on,
        )


def raw_folder(folder: str | Path) -> Path:
    """Where the IDX files lie in a data folder."""
    return data_folder(folder) / "MNIST" / "raw"


def read_part(raw: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, 28, 28) and labels (n,) of "train" or "t10k".

    Raises:
        ValueError: for a file that is no IDX file, is cut off, or does not fit its fellow.
    """
    image_file, label_file = raw / f"{part}-images-idx3-ubyte", raw / f"{part}-labels-idx1-ubyte"
    try:
        images, labels = read_image_file(str(image_file)).numpy(), read_label_file(str(label_file)).numpy()
    except (AssertionError, KeyError, RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ValueError(f"{image_file} or {label_file} is damaged or no IDX file: fetch them again") from error
    if len(images) != len(labels) or images.shape[1:] != (28, 28) or labels.max() > 9:
        raise ValueError(f"{image_file} and {label_file} do not fit: images {images.shape}, labels {labels.shape}")
    return images, labels
