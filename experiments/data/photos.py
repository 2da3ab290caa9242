"""Photographs of a source in one file, and batches of them: decoded once or each time, cropped by the sample's key.

A photograph is resized to a square first, as the published code does, whatever its shape; training crops are drawn from
that square. So its pixels can be kept: 25,000 of 224 by 224 take 3.8 GB, which are mapped from the disk, not loaded.
"""

import io
import math
import os
import shutil
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from filelock import FileLock
from PIL import Image, ImageOps, UnidentifiedImageError
from rich.console import Console
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional as transforms

from ..errors import RunError
from ..files import explain_full_disk, sync_folder
from ..progress import tracked
from ..seeding import stream_seed
from .base import SPLITS, Batch, DataModule, SampleKey, hash_arrays

CACHES = ("auto", "arrays", "none")
#: What shows where a picture is transparent: white, as on paper.
BACKGROUND = (255, 255, 255, 255)
_NOT_MULTIPLIED = {"La": "LA", "RGBa": "RGBA"}


class PhotoError(ValueError):
    """What is wrong with a file that should be a photograph."""


def decode(content: bytes) -> Image.Image:
    """The whole image as it is meant to be seen, in 8-bit RGB, whatever its name says: see `to_rgb`.

    Bytes after the end of the image are no fault, nor is a JPEG without a JFIF header.

    Raises:
        PhotoError: for what is empty, no image, or cut off.
    """
    if not content:
        raise PhotoError("empty")
    with warnings.catch_warnings():
        # Damaged Exif data and the like, of which the pixels know nothing.
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            with Image.open(io.BytesIO(content)) as image:
                return to_rgb(image)
        except UnidentifiedImageError as error:
            raise PhotoError("no image, or cut off within its header") from error
        except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
            raise PhotoError(f"too large to be a photograph: {error}") from error
        except Exception as error:  # whatever Pillow's decoders raise on damaged bytes
            raise PhotoError(f"cannot be decoded: {' '.join(str(error).split()) or type(error).__name__}") from error


def to_rgb(image: Image.Image) -> Image.Image:
    """An image of any of Pillow's modes in 8-bit RGB with the same pattern, turned upright, its first frame.

    Transparent pixels show `BACKGROUND`, not the colours that may be hidden there. Of 16-bit images the whole range
    becomes that of a byte; of 32-bit ones, which have no range of their own, the smallest of 0..1 (of fractions),
    0..255 and 0..65535 that holds the values, or else from the least to the largest.
    """
    image.load()
    with suppress(Exception):  # whatever Pillow raises of damaged Exif data, of which the pixels know nothing
        image = ImageOps.exif_transpose(image)
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        return _grey(image).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    colours = image.convert(_NOT_MULTIPLIED.get(image.mode, image.mode)).convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", colours.size, BACKGROUND), colours).convert("RGB")


def _grey(image: Image.Image) -> Image.Image:
    """An image of one channel of more than a byte in bytes."""
    values = np.asarray(image).astype(np.float64)
    hidden = ~np.isfinite(values)
    if isinstance(transparent := image.info.get("transparency"), int):
        hidden |= values == transparent
    shown = values[~hidden] if not hidden.all() else np.zeros(1)
    low, high = float(shown.min()), float(shown.max())
    if image.mode not in ("I", "F"):
        low, high = 0.0, 65535.0
    elif low >= 0 and high <= 65535:
        tops = (1.0, 255.0, 65535.0) if image.mode == "F" else (255.0, 65535.0)
        low, high = 0.0, next(top for top in tops if high <= top)
    scaled = np.round((np.where(hidden, low, values) - low) * (255 / ((high - low) or 1.0)))
    return Image.fromarray(np.where(hidden, BACKGROUND[0], scaled).astype(np.uint8))


def resized(image: Image.Image, size: int) -> np.ndarray:
    """The image squeezed to (size, size, 3) bytes, bilinear and antialiased, as torchvision's Resize((size, size))."""
    return np.array(transforms.resize(image, [size, size]))


@dataclass(frozen=True)
class PhotoStore:
    """Encoded photographs one after the other in a file.

    Attributes:
        path: of the file.
        content_hash: of all of them.
        offsets: (n,), where each begins.
        lengths: (n,), in bytes.
    """

    path: Path
    content_hash: str
    offsets: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets)

    def image(self, index: int) -> Image.Image:
        """One photograph, decoded."""
        with open(self.path, "rb") as file:
            file.seek(int(self.offsets[index]))
            return decode(file.read(int(self.lengths[index])))

    def pixels(self, size: int, cache: str, quiet: bool = False) -> "Pixels":
        """All of them at (size, size, 3), kept as an array beside the file or decoded each time.

        Args:
            size: height and width.
            cache: "arrays" keeps them, "none" decodes each time, "auto" keeps them where they fit into half of the
                machine's memory and into what the disk has left. The pixels are the same.
            quiet: shows no progress.
        """
        target = self.path.with_name(f"pixels-{size}-{self.content_hash[:16]}.npy")
        if cache == "none" or (cache == "auto" and not target.is_file() and not self._fits(size)):
            return Pixels(self, size, None)
        with FileLock(target.with_name(f".{target.name}.lock")):
            if not self._whole(target, size):
                self._fill(target, size, quiet)
        return Pixels(self, size, target)

    def _fits(self, size: int) -> bool:
        needed = len(self) * size * size * 3
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return needed <= memory / 2 and needed <= shutil.disk_usage(self.path.parent).free / 2

    def _whole(self, target: Path, size: int) -> bool:
        with suppress(OSError, ValueError, EOFError):
            return np.load(target, mmap_mode="r").shape == (len(self), size, size, 3)
        return False

    def _fill(self, target: Path, size: int, quiet: bool) -> None:
        temporary = target.with_name(f".{target.name}.tmp")
        shape = (len(self), size, size, 3)
        # A mapped file on a full disk would end the process by a signal, so its space is taken first.
        with explain_full_disk("data.cache=none keeps no pixels"), open(temporary, "wb") as file:
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, math.prod(shape))
            except OSError:
                temporary.unlink()
                raise
        array = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.uint8, shape=shape)
        console = Console(stderr=True, quiet=quiet)
        rows: Iterable[int] = range(len(self))
        for row in tracked(rows, f"decoding {len(self):,} photographs", len(self), console=console):
            array[row] = resized(self.image(row), size)
        array.flush()
        os.replace(temporary, target)
        sync_folder(target.parent)


@dataclass
class Pixels:
    """Photographs by index as (size, size, 3) bytes."""

    store: PhotoStore
    size: int
    file: Path | None

    def __post_init__(self) -> None:
        self._array: np.ndarray | None = None

    def __getitem__(self, index: int) -> np.ndarray:
        if self.file is None:
            return resized(self.store.image(index), self.size)
        if self._array is None:
            # Mapped by each process for itself, so that the dataset travels to workers without its pixels.
            self._array = np.load(self.file, mmap_mode="r")
        return np.array(self._array[index])

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_array": None}


class PhotoBatches(Dataset[Batch]):
    """Photographs as normalised float batches (B, 3, size, size) with labels (B,).

    Args:
        pixels: of all photographs.
        rows: (n,), which of them are the samples.
        labels: (n,), integer classes.
        mean: of each channel, subtracted from pixels scaled to 0..1.
        std: of each channel, divided by.
        crop_scale: share of the square's area that a random crop has, least and most; None for no crops and flips.
        epoch_offset: added to the epoch of every key.
    """

    def __init__(
        self,
        pixels: Pixels,
        rows: np.ndarray,
        labels: np.ndarray,
        mean: Sequence[float],
        std: Sequence[float],
        crop_scale: Sequence[float] | None = None,
        epoch_offset: int = 0,
    ) -> None:
        self.pixels, self.rows, self.labels = pixels, rows, torch.from_numpy(labels.astype(np.int64))
        self.mean, self.std = list(mean), list(std)
        self.crop_scale, self.epoch_offset = crop_scale, epoch_offset

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, keys: Sequence[SampleKey]) -> Batch:
        images = torch.stack([self._image(key) for key in keys]).float().div(255)
        labels = self.labels[torch.tensor([key.sample for key in keys], dtype=torch.int64)]
        return transforms.normalize(images, self.mean, self.std), labels

    def _image(self, key: SampleKey) -> Tensor:
        pixels = self.pixels[int(self.rows[key.sample])]
        if self.crop_scale is not None:
            pixels = self._cropped(Image.fromarray(pixels), key)
        return torch.from_numpy(pixels).permute(2, 0, 1)

    def _cropped(self, image: Image.Image, key: SampleKey) -> np.ndarray:
        size = self.pixels.size
        # torchvision draws from torch's own CPU generator, which is given back as it was.
        with torch.random.fork_rng(devices=[]):
            seed = stream_seed("augment", key.seed, key.epoch + self.epoch_offset, key.sample)
            torch.default_generator.manual_seed(seed)
            box = RandomResizedCrop.get_params(image, list(self.crop_scale or ()), [3 / 4, 4 / 3])
            flip = bool(torch.rand(1) < 0.5)
        image = transforms.resized_crop(image, *box, [size, size])
        return np.array(transforms.horizontal_flip(image) if flip else image)


class PhotoIndex(Protocol):
    """What is known of packed photographs, sorted by name."""

    @property
    def content_hash(self) -> str:
        """Of all photographs."""

    @property
    def file(self) -> str:
        """The name of the file that holds them."""

    @property
    def names(self) -> list[str]:
        """Of each."""

    @property
    def offsets(self) -> list[int]:
        """Where each begins in the file."""

    @property
    def lengths(self) -> list[int]:
        """In bytes."""

    @property
    def errors(self) -> dict[str, str]:
        """Files that were left out, and why."""


class PackedPhotos(DataModule):
    """A data set of packed photographs. Subclasses set the attributes, beside those of `DataModule`.

    Attributes:
        place: the folder that the photographs are packed in.
        index: of them.
        rows: which of them each split has.
        img_size: height and width that they are squeezed to.
        cache: see `PhotoStore.pixels`.
    """

    place: Path
    index: PhotoIndex
    rows: dict[str, np.ndarray]
    img_size: int
    cache: str

    @cached_property
    def sizes(self) -> dict[str, int]:
        return {split: len(self.rows[split]) for split in SPLITS}

    @cached_property
    def split_hash(self) -> str:
        """Hash of the photographs and of which of them lie in which split."""
        names = {split: np.asarray([self.index.names[row] for row in self.rows[split]]) for split in SPLITS}
        return hash_arrays({**names, "content": np.array(self.index.content_hash)})

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "files_left_out": sorted(self.index.errors)}

    def pixels(self) -> Pixels:
        """Those of all photographs."""
        index = self.index
        offsets, lengths = np.asarray(index.offsets), np.asarray(index.lengths)
        return PhotoStore(self.place / index.file, index.content_hash, offsets, lengths).pixels(
            self.img_size, self.cache
        )


def check_settings(
    img_size: int,
    crop_scale: Sequence[float] | None,
    eval_crops: bool,
    mean: Sequence[float],
    std: Sequence[float],
    cache: str,
) -> None:
    """Raises ValueError for settings of `PhotoBatches` and `PhotoStore.pixels` that make no sense."""
    if cache not in CACHES:
        raise ValueError(f"data.cache must be one of {', '.join(CACHES)}; got {cache!r}")
    if img_size < 1:
        raise ValueError(f"data.img_size must be at least 1; got {img_size}")
    if crop_scale is not None and not (len(crop_scale) == 2 and 0 < crop_scale[0] <= crop_scale[1] <= 1):
        raise ValueError(f"data.crop_scale must be two shares, least and most, or null; got {crop_scale}")
    if eval_crops and crop_scale is None:
        raise ValueError("data.eval_crops=true needs data.crop_scale")
    if len(mean) != 3 or len(std) != 3 or min(std) <= 0:
        raise ValueError(f"data.mean and data.std need three entries, std positive ones; got {mean} and {std}")


def examine(name: str, content: bytes) -> tuple[str, bytes, str | None]:
    """A file with the reason why it is no photograph that can be decoded; None where it is one."""
    try:
        decode(content)
    except PhotoError as error:
        return name, content, str(error)
    return name, content, None


def copies(labels: Mapping[str, int], digests: Mapping[str, str], conflict: str) -> list[tuple[list[str], str]]:
    """Of photographs that are the same byte for byte the names that are left out, and why: all but the first by name.

    Where they have different labels, nobody knows what it is, and none of them stays.

    Args:
        labels: of each name.
        digests: of each name's content.
        conflict: the reason in that case.
    """
    same: dict[str, list[str]] = {}
    for name in sorted(labels):
        same.setdefault(digests[name], []).append(name)
    left_out = []
    for names in same.values():
        first, *others = names
        if len({labels[name] for name in names}) > 1:
            left_out.append((names, f"{conflict}: {', '.join(names)}"))
        elif others:
            left_out.append((others, f"the same photograph as {first}, which counts once"))
    return left_out


def no_photos(source: Path, classes: Sequence[str], expected: str) -> RunError:
    """The error for a source without a photograph of these classes."""
    kinds = " and none of a ".join(classes)
    return RunError(f"{source} holds no photograph of a {kinds} that can be read; expected are {expected}")
