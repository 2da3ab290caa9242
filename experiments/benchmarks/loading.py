"""`python -m experiments.benchmarks loading`: photographs a second that the loaders hand to a training.

Random JPEG files of 500 x 375 pixels, as cats and dogs have about, cropped and flipped to 224: decoded each time, or
once into an array. A GPU that trains faster than this waits for its data: `waited_for_data` in timing.jsonl says so.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console

from ..data.base import BatchSampler
from ..data.image_folder import ImageFolder
from .results import show_table

HEADER = ("decoded", "loading processes", "photographs a second")
#: Names of `data.cache` in the table.
CACHES = {"none": "each time", "arrays": "once"}
BATCH = 32


def photographs(folder: Path, count: int, width: int, height: int) -> None:
    """Two classes of JPEG files of smooth noise, which compress about as photographs do."""
    generator = np.random.default_rng(0)
    for number in range(count):
        coarse = generator.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
        place = folder / ("cat", "dog")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        image.save(place / f"{number}.jpg", quality=90)


def measure(root: Path, cache: str, workers: int, size: int, epochs: int) -> float:
    """Photographs a second of the training split over some epochs, after one that starts the processes."""
    settings: dict[str, Any] = {
        **{"folder": str(root.parent / "data"), "root": str(root), "splits": None, "split_seed": 0},
        **{"val_share": 0.1, "test_share": 0.1, "train_on": ["train"], "img_size": size, "crop_scale": (0.5, 1.0)},
        **{"mean": (0.5,) * 3, "std": (0.5,) * 3, "batch_size": BATCH, "eval_batch_size": BATCH},
    }
    data = ImageFolder(**settings, cache=cache, num_workers=workers)
    loader, counted, begin = data.train_loader(0), 0, 0.0
    assert isinstance(loader.sampler, BatchSampler)
    for epoch in range(epochs + 1):
        if epoch == 1:
            begin = time.perf_counter()
        loader.sampler.set_epoch(epoch)
        counted += sum(len(labels) for *_, labels in loader) * (epoch > 0)
    return counted / (time.perf_counter() - begin)


def table(quick: bool) -> list[tuple[Any, ...]]:
    """The rows, as `HEADER` names them: in this process, and with a process for each core, eight at most."""
    count, width, height, size, epochs = (24, 60, 45, 32, 1) if quick else (640, 500, 375, 224, 3)
    workers = sorted({0, min(8, os.cpu_count() or 1)})
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "photographs"
        (Path(folder) / "data").mkdir()
        photographs(root, count, width, height)
        for cache, words in CACHES.items():
            for number in workers:
                rows.append((words, number, round(measure(root, cache, number, size, epochs))))
    return rows


def run(options: argparse.Namespace, console: Console) -> None:
    """Prints the table and writes loading.csv."""
    show_table(options, console, "loading", "photographs of 500 x 375, cropped to 224", HEADER, table(options.quick))
