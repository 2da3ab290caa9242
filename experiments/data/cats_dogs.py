"""Kaggle's Dogs vs Cats: 25,000 photographs, as the archive of the competition or Microsoft's PetImages has them.

Prepared are, in `cats_dogs/` of the folder of all data: `photos-<hash>.bin`, all files that can be decoded, byte for
byte, each content once, whatever names it has (or its copies would lie in several splits); `index.json`, their names,
labels and places, and the files that were left out, each with its reason; `errors.tsv`, these once more, to read. The
source is only read.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock
from joblib import Parallel, cpu_count, delayed
from rich.console import Console

from ..errors import RunError
from ..files import write_atomic, write_json
from ..progress import tracked
from .archives import read_members
from .base import data_folder, prepare_command, stratified_split
from .fractions import nested_order, subset_size
from .photos import PackedPhotos, PhotoBatches, check_settings, copies, examine, no_photos

#: Changes whenever the prepared files of the same source would, or the pixels that are read from them.
FORMAT = 2
CLASSES = ("cat", "dog")
FRACTIONS = (0.01, 0.1, 0.25, 1.0)
NOTICE = (
    "cats_dogs: Dogs vs Cats (Kaggle, 2013), a part of Asirra (Elson, Douceur, Howell, Saul, CCS 2007); "
    "the competition's rules apply"
)
EXPECTED = "train/cat.0.jpg, train/dog.0.jpg, ... (Kaggle) or PetImages/Cat/0.jpg, PetImages/Dog/0.jpg, ... (Microsoft)"
#: What the user may have put into `cats_dogs/`, in this order.
SOURCES = ("dogs-vs-cats.zip", "train.zip", "train", "PetImages")
#: Archives within the archive that are read, and folders whose files have no labels.
NESTED, UNLABELLED = ("train.zip",), ("test", "test1", "__MACOSX")
#: What the archives hold beside photographs: further archives, tables, read-me files.
BESIDE = (".zip", ".csv", ".txt", ".docx")


@dataclass
class Report:
    """What became of the files of a source."""

    path: str
    content_hash: str
    counts: dict[str, int]
    errors: dict[str, str] = field(default_factory=dict)
    """Files that are no photograph, or not one that can be decoded, and why. They are in no split."""

    def __str__(self) -> str:
        counts = ", ".join(f"{count:,} {name}s" for name, count in self.counts.items())
        total = sum(self.counts.values())
        lines = [f"{total:,} photographs in {self.path} ({counts}); content {self.content_hash[:16]}"]
        if self.errors:
            lines.append(f"{len(self.errors)} files left out:")
            lines += [f"  {name}: {reason}" for name, reason in self.errors.items()]
        return "\n".join(lines)


class _Entry(NamedTuple):
    label: int
    offset: int
    length: int
    digest: str


@dataclass(frozen=True)
class Index:
    """index.json: the photographs, sorted by name, and where they lie."""

    content_hash: str
    file: str
    names: list[str]
    labels: list[int]
    offsets: list[int]
    lengths: list[int]
    errors: dict[str, str]
    format: int = FORMAT


def prepare(folder: Path, archive: Path | None = None, *, jobs: int | None = None, quiet: bool = False) -> Report:
    """Checks every photograph of a source and packs those that can be decoded.

    Args:
        folder: the folder of all data.
        archive: Kaggle's dogs-vs-cats.zip or train.zip, Microsoft's zip, or a folder with either's content; None takes
            what has been prepared, or what lies in `folder`/cats_dogs under one of the names `SOURCES`.
        jobs: processes that decode, None for one per core.
        quiet: shows no progress.

    Raises:
        RunError: for a source that is not there, is damaged as a whole, or holds no photograph of a class.
    """
    root = folder / "cats_dogs"
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / ".lock"):
        index = read_index(root)
        if archive is None and index is not None:
            return _report(root, index)
        source = archive or next((root / name for name in SOURCES if (root / name).exists()), None)
        if source is None:
            raise RunError(
                "Dogs vs Cats needs an account of yours: get dogs-vs-cats.zip from "
                "https://www.kaggle.com/c/dogs-vs-cats, or Microsoft's copy, and give it, or a folder with its "
                f"content, as --archive, or put it into {root}"
            )
        return _report(root, _pack(root, source, jobs or cpu_count(), quiet))


def _pack(root: Path, source: Path, jobs: int, quiet: bool) -> Index:
    errors: dict[str, str] = {}
    entries: dict[str, _Entry] = {}
    places: dict[str, int] = {}
    temporary = root / ".photos.tmp"
    try:
        with open(temporary, "wb") as file:
            work = Parallel(n_jobs=jobs, return_as="generator")(
                delayed(examine)(name, content) for name, content in _members(root, source)
            )
            console = Console(stderr=True, quiet=quiet)
            for name, content, reason in tracked(work, "decoding photographs", console=console):
                digest, label = hashlib.sha256(content).hexdigest(), label_of(PurePosixPath(name))
                if reason is not None or label is None:
                    errors[name] = reason or "neither a cat nor a dog by its name or folder"
                    continue
                short = short_name(PurePosixPath(name))
                if short in entries:
                    if entries[short].digest != digest:
                        errors[name] = f"another photograph has the name {short}"
                    continue
                if digest not in places:
                    places[digest] = file.tell()
                    file.write(content)
                entries[short] = _Entry(label, places[digest], len(content), digest)
            file.flush()
            os.fsync(file.fileno())
        known = {name: entry.label for name, entry in entries.items()}
        digests = {name: entry.digest for name, entry in entries.items()}
        for names, reason in copies(known, digests, "the same photograph is a cat and a dog"):
            for name in names:
                del entries[name]
                errors[name] = reason
        labels = {entry.label for entry in entries.values()}
        if labels != {0, 1}:
            raise no_photos(source, [name for label, name in enumerate(CLASSES) if label not in labels], EXPECTED)
        names = sorted(entries)
        ordered = [entries[name] for name in names]
        summary = "".join(f"{name}\t{entries[name].label}\t{entries[name].digest}\n" for name in names)
        content_hash = hashlib.sha256(f"format {FORMAT}\n{summary}".encode()).hexdigest()
        file_name = f"photos-{content_hash[:16]}.bin"
        os.replace(temporary, root / file_name)
    finally:
        temporary.unlink(missing_ok=True)
    index = Index(
        content_hash,
        file_name,
        names,
        labels=[entry.label for entry in ordered],
        offsets=[entry.offset for entry in ordered],
        lengths=[entry.length for entry in ordered],
        errors=dict(sorted(errors.items())),
    )
    write_atomic(root / "errors.tsv", "".join(f"{name}\t{reason}\n" for name, reason in index.errors.items()))
    write_json(root / "index.json", asdict(index))
    for path in [*root.glob("photos-*.bin"), *root.glob("pixels-*.npy")]:
        if content_hash[:16] not in path.name:
            path.unlink()
    return index


def _members(root: Path, source: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of a source's files, those of an archive within it too, but for the unlabelled ones."""

    def wanted(path: PurePosixPath) -> bool:
        return not set(path.parts[:-1]) & set(UNLABELLED) and path.suffix.lower() not in BESIDE

    def nested(path: PurePosixPath) -> bool:
        return path.name in NESTED

    yield from read_members(source, wanted)
    for name, content in read_members(source, nested):
        inner = root / ".nested.tmp"
        try:
            inner.write_bytes(content)
            del content
            yield from read_members(inner, wanted, f"{source}: {name}")
        finally:
            inner.unlink(missing_ok=True)


def label_of(path: PurePosixPath) -> int | None:
    """0 for a cat, 1 for a dog: by its folder (Cat, Dog), or by the first word of its name (cat.0.jpg); else None."""
    folder, word = path.parent.name.lower().removesuffix("s"), path.name.split(".")[0].lower()
    for name in (folder, word):
        if name in CLASSES:
            return CLASSES.index(name)
    return None


def short_name(path: PurePosixPath) -> str:
    """The name by which splits know a photograph, whatever folders the source puts around it: cat.0.jpg, Cat/0.jpg."""
    in_class_folder = path.parent.name.lower().removesuffix("s") in CLASSES
    return f"{path.parent.name}/{path.name}" if in_class_folder else path.name


def read_index(root: Path) -> Index | None:
    """The index of what is prepared in a folder; None where nothing is, or not wholly, or by an earlier version."""
    try:
        stored = json.loads((root / "index.json").read_text(encoding="utf-8"))
        index = Index(**stored)
        size = (root / index.file).stat().st_size
    except (OSError, ValueError, TypeError):
        return None
    end = max(map(sum, zip(index.offsets, index.lengths, strict=True)), default=0)
    return index if index.format == FORMAT and size >= end else None


def _report(root: Path, index: Index) -> Report:
    counts = {name: index.labels.count(label) for label, name in enumerate(CLASSES)}
    return Report(str(root / index.file), index.content_hash, counts, index.errors)


class CatsDogs(PackedPhotos):
    """Cats (0) and dogs (1) in stratified splits; `python -m experiments.data.prepare cats_dogs --archive ...` first.

    The names in each split, and in the fractions 1 %, 10 %, 25 % and 100 %, are written beside the photographs, in
    `splits-...`, for use elsewhere.

    Args:
        folder: the folder of all data.
        img_size: height and width that photographs are squeezed to.
        test_size: photographs to test on.
        val_size: photographs to validate on.
        fraction: of all others and those to validate on, to train on; smaller fractions lie within larger ones; 1 is
            all that validation leaves.
        split_seed: of all these choices; not the run's seed.
        crop_scale: augmentation: share of the area of random crops, least and most; null for neither crops nor flips.
        eval_crops: whether evaluation crops and flips at random too, anew each epoch.
        mean: of each channel, subtracted from pixels scaled to 0..1.
        std: of each channel, divided by.
        cache: "arrays", "none" or "auto": see `PhotoStore.pixels`; changes nothing but speed.
        batch_size: see `DataModule`.
        eval_batch_size: see `DataModule`.
        num_workers: see `DataModule`.
        train_on: see `DataModule`.

    Raises:
        FileNotFoundError: where nothing is prepared.
        ValueError: for a setting that makes no sense.
    """

    name = "cats_dogs"
    num_classes = 2

    def __init__(
        self,
        folder: str,
        img_size: int,
        test_size: int,
        val_size: int,
        fraction: float,
        split_seed: int,
        crop_scale: Sequence[float] | None,
        eval_crops: bool,
        mean: Sequence[float],
        std: Sequence[float],
        cache: str,
        batch_size: int,
        eval_batch_size: int,
        num_workers: int,
        train_on: Sequence[str],
    ) -> None:
        super().__init__(batch_size, eval_batch_size, num_workers, train_on)
        check_settings(img_size, crop_scale, eval_crops, mean, std, cache)
        self.place = data_folder(folder) / "cats_dogs"
        index = read_index(self.place)
        if index is None:
            raise FileNotFoundError(
                f"data=cats_dogs: {self.place} holds no prepared photographs: run "
                f"`{prepare_command('cats_dogs', folder, ' --archive FILE')}`, or take experiment=cats_dogs_standin, "
                "which needs no download"
            )
        self.index, self.fraction = index, fraction
        self.img_size, self.cache = img_size, cache
        self.crop_scale, self.eval_crops, self.mean, self.std = crop_scale, eval_crops, mean, std
        labels = np.asarray(index.labels)
        parts = stratified_split(labels, {"test": test_size, "val": val_size}, split_seed)
        order = parts["train"][nested_order(labels[parts["train"]], split_seed)]
        total = len(order) + val_size
        shares = {*(share for share in FRACTIONS if round(share * total)), fraction}
        sizes = {share: min(subset_size(share, total), len(order)) for share in shares}
        self._write_splits(f"seed{split_seed}-test{test_size}-val{val_size}", parts, order, sizes)
        self.rows = {**parts, "train": np.sort(order[: sizes[fraction]])}
        self.labels = labels

    def _write_splits(self, key: str, parts: dict[str, np.ndarray], order: np.ndarray, sizes: dict[float, int]) -> None:
        folder = self.place / f"splits-{self.index.content_hash[:8]}-{key}"
        folder.mkdir(exist_ok=True)
        lists = {"test": parts["test"], "val": parts["val"]}
        lists |= {f"train_{share:g}": order[:size] for share, size in sizes.items()}
        for name, rows in lists.items():
            path = folder / f"{name}.txt"
            if not path.is_file():
                write_atomic(path, "".join(f"{self.index.names[row]}\n" for row in rows))

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(CLASSES)

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "fraction": self.fraction}

    def dataset(self, splits: Sequence[str], augment: bool = False) -> PhotoBatches:
        rows = np.concatenate([self.rows[split] for split in splits])
        crops = self.crop_scale if augment or self.eval_crops else None
        offset = 0 if augment else self.evaluation_epoch
        return PhotoBatches(self.pixels(), rows, self.labels[rows], self.mean, self.std, crops, offset)
