"""Meshes and point clouds of one's own in class folders, sampled once: `data=cloud_folder data.root=FOLDER`.

Prepared is one HDF5 file in `cloud_folder/` of the folder of all data, as ModelNet40's, with a single part, "all"; its
name tells the files (names, sizes, times) and settings that decide its content. Beside it lies a table of the files
that could not be read.
"""

import functools
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ..errors import RunError
from ..files import explain_full_disk, write_atomic
from .base import data_folder
from .class_folders import ClassFile, apply_split_file, divide, left_out, list_files
from .cloud_files import SUFFIXES, sample_file
from .clouds import CloudData
from .meshes import CloudReport, MeshFile, sample_files

#: Changes whenever the points of the same files would.
FORMAT = 1
STORED = 2048


def prepare(
    folder: Path,
    root: str | Path | None,
    *,
    stored: int = STORED,
    normals: bool = False,
    seed: int = 0,
    jobs: int | None = None,
    quiet: bool = False,
) -> tuple[CloudReport, list[ClassFile]]:
    """Samples every file of a folder, where that is not done already; goes on where it was stopped.

    Args:
        folder: the folder of all data.
        root: the folder with the class folders; it is only read.
        stored: points of each file.
        normals: keeps a unit normal with each point.
        seed: of the sampling.
        jobs: processes, None for one per core.
        quiet: shows no progress.

    Returns:
        What became of the files, and these, sorted by name.

    Raises:
        RunError: for a folder that cannot be used, or without a file that can be read.
    """
    files = list_files(root, SUFFIXES, "meshes or point clouds")
    assert root is not None
    facts = [FORMAT, str(Path(root).resolve()), stored, normals, seed, [[file.name, file.stamp] for file in files]]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    target = data_folder(folder) / "cloud_folder" / f"clouds-{key[:16]}.h5"
    with explain_full_disk("cloud_folder is not complete"):
        report = sample_files(
            Path(root),
            target,
            [MeshFile("all", file.label, file.name, file.name, file.stamp) for file in files],
            key,
            functools.partial(sample_file, normals=normals),
            stored,
            seed,
            splits=("all",),
            features=6 if normals else 3,
            jobs=jobs,
            quiet=quiet,
        )
        report.errors = {name: reason.removeprefix(f"{name}: ") for name, reason in report.errors.items()}
        write_atomic(table_of(report), "".join(f"{name}\t{reason}\n" for name, reason in report.errors.items()))
    if not report.counts["all"]:
        name, reason = next(iter(report.errors.items()))
        raise RunError(
            f"data.root={root}: none of its {len(files):,} files can be used ({name}: {reason}); all reasons are in "
            f"{table_of(report)}"
        )
    return report, files


def table_of(report: CloudReport) -> Path:
    """The table of the files that were left out, and why."""
    return Path(report.path).with_suffix(".errors.tsv")


def in_words(report: CloudReport) -> str:
    """What became of a folder's files."""
    words = (
        f"{report.counts['all']:,} clouds in {report.path}, {len(report.classes)} classes, {report.num_points:,} "
        f"points each; content {report.content_hash[:16]}"
    )
    if report.remarks:
        name, remark = next(iter(report.remarks.items()))
        words += f"\n{len(report.remarks)} are unusual ({name}: {remark})"
    if report.errors:
        words += f"\n{left_out(report.errors, report.counts['all'] + len(report.errors), table_of(report))}"
    return words


class CloudFolder(CloudData):
    """Clouds in class folders; the classes are numbered in the order of their names. Splits as in `ImageFolder`.

    Args:
        folder: the folder of all data.
        root: the folder with the class folders.
        splits: a CSV file with columns path,split: see `read_split_file`; None for none.
        val_share: share of each class to validate on, where it is drawn.
        test_share: share of each class to test on, where it is drawn.
        split_seed: of that choice; not the run's seed.
        points: points of a cloud in a batch.
        stored: points of each file that are sampled in preparation.
        sample_seed: of that sampling; not the run's seed.
        normals: gives each point's unit normal as three more numbers.
        **options: the others of `CloudData`.

    Raises:
        RunError: for a folder that cannot be used.
        ValueError: for a setting that makes no sense.
    """

    name = "cloud_folder"

    def __init__(
        self,
        folder: str,
        root: str | None,
        splits: str | None,
        val_share: float,
        test_share: float,
        split_seed: int,
        points: int,
        stored: int,
        sample_seed: int,
        normals: bool,
        **options: Any,
    ) -> None:
        if not 1 <= points <= stored:
            raise ValueError(f"data.points must lie between 1 and data.stored={stored}; got {points}")
        if sample_seed < 0:
            raise ValueError(f"data.sample_seed must be at least 0; got {sample_seed}")
        report, files = prepare(Path(folder), root, stored=stored, normals=normals, seed=sample_seed)
        if report.errors:
            total = report.counts["all"] + len(report.errors)
            print(f"{self.name}: {left_out(report.errors, total, table_of(report))}", file=sys.stderr)
        self.root, self.splits, self.shares = root, splits, {"val": val_share, "test": test_share}
        self.split_of = {file.name: file.split for file in files}
        path = Path(report.path)
        super().__init__(
            path, "give the same command again", val_size=0, split_seed=split_seed, num_points=points, **options
        )

    def _divided(self, val_size: int, split_seed: int) -> dict[str, tuple[str, np.ndarray]]:
        with h5py.File(self.path) as file:
            labels, names = file["all/label"][()], [name.decode() for name in file["all/name"][()]]
        by_folder = [self.split_of[name] for name in names]
        used, given = apply_split_file(self.splits, names, by_folder, self.report.errors)
        parts = divide(self.root, self.report.classes, labels[used], given, self.shares, split_seed)
        return {split: ("all", used[places]) for split, places in parts.items()}
