"""Images of one's own in class folders, packed once: `data=image_folder data.root=FOLDER`.

Prepared are, in `image_folder/` of the folder of all data, a folder named by the hash of the content with
`photos-<hash>.bin`, all files that can be decoded, byte for byte, each content once; `index.json`, their names, classes
and places; `errors.tsv`, the files that were left out, each with its reason. `sources/` knows which listing of a folder
(names, sizes, times) has which content, so that nothing is read again where nothing has changed.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock
from joblib import Parallel, cpu_count, delayed
from rich.console import Console

from ..errors import RunError
from ..files import explain_full_disk, write_atomic, write_json
from ..progress import tracked
from .base import data_folder
from .class_folders import ClassFile, apply_split_file, divide, left_out, list_files
from .photos import PackedPhotos, PhotoBatches, check_settings, copies, examine

#: Changes whenever the prepared files of the same folder would, or the pixels that are read from them.
FORMAT = 1
#: As torchvision's ImageFolder takes them, and GIF.
SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
#: Files for which further processes are worth their start.
FILES_PER_JOB = 500


@dataclass(frozen=True)
class Index:
    """index.json: the images, sorted by name, and where they lie."""

    content_hash: str
    file: str
    classes: list[str]
    names: list[str]
    splits: list[str | None]
    labels: list[int]
    offsets: list[int]
    lengths: list[int]
    errors: dict[str, str]
    format: int = FORMAT


def prepare(folder: Path, root: str | Path | None, *, jobs: int | None = None, quiet: bool = False) -> Index:
    """Checks every image of a folder and packs those that can be decoded, where that is not done already.

    Args:
        folder: the folder of all data.
        root: the folder with the class folders; it is only read.
        jobs: processes that decode, None for as many as there are cores and work for.
        quiet: shows no progress.

    Raises:
        RunError: for a folder that cannot be used: see `list_files`.
    """
    files = list_files(root, SUFFIXES, "images")
    assert root is not None
    store = data_folder(folder) / "image_folder"
    facts = [FORMAT, str(Path(root).resolve()), files]
    source = store / "sources" / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}.json"
    source.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(store / ".lock"), explain_full_disk("image_folder is not complete"):
        index = _known(store, source)
        if index is None:
            index = _pack(store, Path(root), files, jobs or _jobs(len(files)), quiet)
            write_json(source, {"content": index.content_hash, "root": str(root)})
    return index


def _jobs(count: int) -> int:
    return max(1, min(int(cpu_count()), count // FILES_PER_JOB))


def _known(store: Path, source: Path) -> Index | None:
    """The index of a listing's content; None where it is not prepared, or not wholly, or by an earlier version."""
    try:
        content = json.loads(source.read_text(encoding="utf-8"))["content"]
        place = store / content[:16]
        index = Index(**json.loads((place / "index.json").read_text(encoding="utf-8")))
        size = (place / index.file).stat().st_size
    except (OSError, ValueError, TypeError, KeyError):
        return None
    end = max(map(sum, zip(index.offsets, index.lengths, strict=True)), default=0)
    return index if index.format == FORMAT and size >= end else None


def _read(root: Path, files: Sequence[ClassFile]) -> Iterator[tuple[str, bytes | OSError]]:
    for file in files:
        try:
            yield file.name, (root / file.name).read_bytes()
        except OSError as error:
            yield file.name, error


def _examine(name: str, content: bytes | OSError) -> tuple[str, bytes, str | None]:
    if isinstance(content, OSError):
        return name, b"", f"cannot be read: {content.strerror or content}"
    return examine(name, content)


def _pack(store: Path, root: Path, files: Sequence[ClassFile], jobs: int, quiet: bool) -> Index:
    classes = sorted({file.label for file in files})
    known = {file.name: file for file in files}
    errors: dict[str, str] = {}
    labels: dict[str, int] = {}
    digests: dict[str, str] = {}
    places: dict[str, tuple[int, int]] = {}
    temporary = store / ".photos.tmp"
    try:
        with open(temporary, "wb") as packed:
            work = Parallel(n_jobs=jobs, return_as="generator")(
                delayed(_examine)(name, content) for name, content in _read(root, files)
            )
            console = Console(stderr=True, quiet=quiet)
            for name, content, reason in tracked(work, "decoding images", len(files), console=console):
                if reason is not None:
                    errors[name] = reason
                    continue
                digest = hashlib.sha256(content).hexdigest()
                labels[name], digests[name] = classes.index(known[name].label), digest
                if digest not in places:
                    places[digest] = packed.tell(), len(content)
                    packed.write(content)
            packed.flush()
            os.fsync(packed.fileno())
        for names, reason in copies(labels, digests, "the same image has several classes"):
            for name in names:
                del labels[name]
                errors[name] = reason
        if not labels:
            name, reason = next(iter(errors.items()))
            raise RunError(
                f"data.root={root}: none of its {len(files):,} images can be used ({name}: {reason}): look at one of "
                "them with another program"
            )
        names = sorted(labels)
        listed = [[name, known[name].split, known[name].label, digests[name]] for name in names]
        summary = json.dumps([FORMAT, classes, listed, sorted(errors.items())])
        content_hash = hashlib.sha256(summary.encode()).hexdigest()
        place = store / content_hash[:16]
        place.mkdir(exist_ok=True)
        index = Index(
            content_hash,
            f"photos-{content_hash[:16]}.bin",
            classes,
            names,
            splits=[known[name].split for name in names],
            labels=[labels[name] for name in names],
            offsets=[places[digests[name]][0] for name in names],
            lengths=[places[digests[name]][1] for name in names],
            errors=dict(sorted(errors.items())),
        )
        os.replace(temporary, place / index.file)
    finally:
        temporary.unlink(missing_ok=True)
    write_atomic(place / "errors.tsv", "".join(f"{name}\t{reason}\n" for name, reason in index.errors.items()))
    write_json(place / "index.json", asdict(index))
    return index


def report(folder: Path, index: Index) -> str:
    """What became of a folder's files, in words."""
    place = data_folder(folder) / "image_folder" / index.content_hash[:16]
    counts = ", ".join(f"{index.labels.count(label):,} {name}" for label, name in enumerate(index.classes))
    words = f"{len(index.names):,} images in {place} ({counts}); content {index.content_hash[:16]}"
    if index.errors:
        words += f"\n{left_out(index.errors, len(index.names) + len(index.errors), place / 'errors.tsv')}"
    return words


class ImageFolder(PackedPhotos):
    """Images in class folders; the classes are numbered in the order of their names.

    Splits are the folder's own (`train`, `val`, `test`), or a table's, or drawn; one that is missing is drawn from
    those to train on.

    Args:
        folder: the folder of all data.
        root: the folder with the class folders.
        splits: a CSV file with columns path,split: see `read_split_file`; None for none.
        val_share: share of each class to validate on, where it is drawn.
        test_share: share of each class to test on, where it is drawn.
        split_seed: of that choice; not the run's seed.
        img_size: height and width that images are squeezed to.
        crop_scale: augmentation: share of the area of random crops, least and most; None for neither crops nor flips.
        mean: of each channel, subtracted from pixels scaled to 0..1.
        std: of each channel, divided by.
        cache: "arrays", "none" or "auto": see `PhotoStore.pixels`; changes nothing but speed.
        batch_size: see `DataModule`.
        eval_batch_size: see `DataModule`.
        num_workers: see `DataModule`.
        train_on: see `DataModule`.

    Raises:
        RunError: for a folder that cannot be used.
        ValueError: for a setting that makes no sense.
    """

    name = "image_folder"
    index: Index

    def __init__(
        self,
        folder: str,
        root: str | None,
        splits: str | None,
        val_share: float,
        test_share: float,
        split_seed: int,
        img_size: int,
        crop_scale: Sequence[float] | None,
        mean: Sequence[float],
        std: Sequence[float],
        cache: str,
        batch_size: int,
        eval_batch_size: int,
        num_workers: int,
        train_on: Sequence[str],
    ) -> None:
        super().__init__(batch_size, eval_batch_size, num_workers, train_on)
        check_settings(img_size, crop_scale, False, mean, std, cache)
        self.index = index = prepare(Path(folder), root)
        self.place = data_folder(folder) / "image_folder" / index.content_hash[:16]
        if index.errors:
            total = len(index.names) + len(index.errors)
            print(f"{self.name}: {left_out(index.errors, total, self.place / 'errors.tsv')}", file=sys.stderr)
        self.num_classes = len(index.classes)
        self.img_size, self.crop_scale, self.mean, self.std, self.cache = img_size, crop_scale, mean, std, cache
        self.labels = np.asarray(index.labels)
        used, given = apply_split_file(splits, index.names, index.splits, index.errors)
        shares = {"val": val_share, "test": test_share}
        parts = divide(root, index.classes, self.labels[used], given, shares, split_seed)
        self.rows = {split: used[places] for split, places in parts.items()}

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.index.classes)

    def dataset(self, splits: Sequence[str], augment: bool = False) -> PhotoBatches:
        rows = np.concatenate([self.rows[split] for split in splits])
        crops = self.crop_scale if augment else None
        return PhotoBatches(self.pixels(), rows, self.labels[rows], self.mean, self.std, crops)
