"""Meshes in ModelNet's layout, `<class>/{train,test}/<name>.off`, turned into one file of point clouds.

Work is done in shards by several processes. A finished shard is a file that is complete or not there, so a run that was
stopped goes on where it was; the result is the same to the last bit however often that happened.
"""

import hashlib
import io
import json
import os
import shutil
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import h5py
import numpy as np
from filelock import FileLock
from joblib import Parallel, cpu_count, delayed
from rich.console import Console

from ..errors import RunError
from ..files import sync_folder, write_atomic
from ..progress import tracked
from ..seeding import stream_seed
from .archives import UNREADABLE
from .off import OffError, Samples, read_off, sample_surface

#: Changes whenever the points of the same meshes would.
FORMAT = 1
SPLITS = ("train", "test")
#: Points of a file: from its content, its name for messages, their number and a seed.
Sampler = Callable[[bytes, str, int, int], Samples]


class MeshFile(NamedTuple):
    """A mesh of a source."""

    split: str
    label: str
    name: str
    """`<class>/<split>/<file>`, whatever folder the archive puts around it."""
    member: str
    """Its name within the source."""
    stamp: str
    """Changes with its content: size and checksum, or size and time."""


@dataclass
class CloudReport:
    """What became of the meshes of a source."""

    path: str
    counts: dict[str, int]
    """Clouds of each split."""
    classes: list[str]
    num_points: int
    seed: int
    content_hash: str
    errors: dict[str, str] = field(default_factory=dict)
    """Meshes that could not be read, and why. They are in no split."""
    remarks: dict[str, str] = field(default_factory=dict)
    """Meshes that were read but are unusual."""

    def __str__(self) -> str:
        total = sum(self.counts.values()) + len(self.errors)
        parts = ", ".join(f"{count:,} {split}" for split, count in self.counts.items())
        lines = [
            f"{total - len(self.errors):,} of {total:,} meshes in {self.path} ({parts}), {len(self.classes)} classes, "
            f"{self.num_points:,} points each; content {self.content_hash[:16]}"
        ]
        if self.errors:
            lines.append(f"{len(self.errors)} could not be read:")
            lines += [f"  {reason}" for reason in self.errors.values()]
        lines += [f"  {name}: {remark}" for name, remark in self.remarks.items()]
        return "\n".join(lines)


def list_meshes(source: Path) -> list[MeshFile]:
    """The meshes of a zip archive or folder, sorted by split, class and name.

    Archives are read in place; nothing of theirs is ever written to a path of their choice.

    Raises:
        RunError: for what is no archive or folder, is damaged, holds no mesh, or names a path outside of itself.
    """
    with _opened(source) as archive:
        if archive is None:
            entries = [
                (path.relative_to(source).as_posix(), f"{path.stat().st_size} {path.stat().st_mtime_ns}")
                for path in source.rglob("*")
                if path.is_file()
            ]
        else:
            entries = [(info.filename, f"{info.file_size} {info.CRC:08x}") for info in archive.infolist()]
    meshes = []
    for member, stamp in entries:
        path = PurePosixPath(member)
        if path.is_absolute() or ".." in path.parts or "\\" in member:
            raise RunError(f"{source} holds {member!r}, a path outside of the archive: it is not to be trusted")
        junk = any(part.startswith(".") or part == "__MACOSX" for part in path.parts)
        if path.suffix.lower() != ".off" or junk or len(path.parts) < 3 or path.parts[-2] not in SPLITS:
            continue
        label, split, file = path.parts[-3:]
        meshes.append(MeshFile(split, label, f"{label}/{split}/{file}", member, stamp))
    if not meshes:
        raise RunError(f"{source} holds no mesh of the layout <class>/train/<name>.off and <class>/test/<name>.off")
    repeated = [name for name, count in Counter(mesh.name for mesh in meshes).items() if count > 1]
    if repeated:
        raise RunError(f"{source} holds {repeated[0]} more than once ({len(repeated)} such names)")
    return sorted(meshes, key=lambda mesh: (SPLITS.index(mesh.split), mesh.label, mesh.name))


def prepare_clouds(
    source: Path,
    target: Path,
    num_points: int = 10_000,
    seed: int = 0,
    *,
    jobs: int | None = None,
    expected: Mapping[str, int] | None = None,
    shard_size: int = 64,
    quiet: bool = False,
) -> CloudReport:
    """Samples every mesh of a source into one HDF5 file; does nothing where that is done already.

    The file has, for each split, `points` (n, num_points, 3) float32 in the unit sphere of each mesh, `center` and
    `scale` that lead back to the mesh's coordinates (points * scale + center), `label` and `name`; and the report as an
    attribute. Each mesh has a seed of its own, from `seed` and its name: neither the other meshes nor the number of
    processes change its points.

    Args:
        source: zip archive or folder.
        target: the HDF5 file. Another source, number of points or seed builds it anew.
        num_points: points per mesh.
        seed: of the sampling.
        jobs: processes, None for one per core.
        expected: meshes of each split; another number is an error.
        shard_size: meshes per shard.
        quiet: shows no progress.

    Raises:
        RunError: for a source that cannot be used, or has another number of meshes than expected.
    """
    meshes = list_meshes(source)
    found = {split: sum(mesh.split == split for mesh in meshes) for split in SPLITS}
    if expected is not None and found != dict(expected):
        raise RunError(f"{source} holds {_counted(found)} instead of {_counted(expected)}: it is not complete")
    key = _key(meshes, num_points, seed)
    return sample_files(
        source, target, meshes, key, sample_off, num_points, seed, jobs=jobs, shard_size=shard_size, quiet=quiet
    )


def sample_off(content: bytes, name: str, num_points: int, seed: int) -> Samples:
    """Points of an OFF file."""
    return sample_surface(read_off(content, name), num_points, seed)


def sample_files(
    source: Path,
    target: Path,
    meshes: Sequence[MeshFile],
    key: str,
    sampler: Sampler,
    num_points: int,
    seed: int,
    *,
    splits: Sequence[str] = SPLITS,
    features: int = 3,
    jobs: int | None = None,
    shard_size: int = 64,
    quiet: bool = False,
) -> CloudReport:
    """`prepare_clouds` of listed files of any format.

    Args:
        source: zip archive or folder.
        target: the HDF5 file.
        meshes: the files, sorted by split.
        key: hash of all that decides the file's content; a file with the same key is taken as it is.
        sampler: raises OffError for a file that cannot be read.
        num_points: points per file.
        seed: of the sampling.
        splits: those of the meshes.
        features: numbers of each point.
        jobs: processes, None for one per core.
        shard_size: meshes per shard.
        quiet: shows no progress.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_name(f".{target.name}.lock")):
        done = read_report(target)
        if done is not None and done[0] == key:
            return done[1]
        parts = target.with_name(f".{target.name}.{key[:16]}.parts")
        for stale in target.parent.glob(f".{target.name}.*.parts"):
            if stale != parts:
                shutil.rmtree(stale)
        parts.mkdir(exist_ok=True)
        shards = [meshes[start : start + shard_size] for start in range(0, len(meshes), shard_size)]
        paths = [parts / f"{number:05d}-{shard_size}.npz" for number in range(len(shards))]
        missing = [(shard, path) for shard, path in zip(shards, paths, strict=True) if not _readable(path)]
        work = Parallel(n_jobs=min(jobs or cpu_count(), max(1, len(missing))), return_as="generator_unordered")(
            delayed(_sample_shard)(source, shard, path, sampler, num_points, features, seed) for shard, path in missing
        )
        console = Console(stderr=True, quiet=quiet)
        for _ in tracked(
            work, f"sampling {len(meshes):,} meshes", len(shards), len(shards) - len(missing), console=console
        ):
            pass
        report = _assemble(target, meshes, paths, num_points, features, seed, key, splits)
        shutil.rmtree(parts)
    return report


def read_report(target: Path) -> tuple[str, CloudReport] | None:
    """The key and report of a prepared file; None where there is none, or one that cannot be read."""
    try:
        with h5py.File(target) as file:
            return str(file.attrs["key"]), CloudReport(**json.loads(str(file.attrs["report"])))
    except (OSError, KeyError, TypeError, ValueError):
        return None


def _key(meshes: Sequence[MeshFile], num_points: int, seed: int) -> str:
    """Hash of all that decides the file's content."""
    facts = [FORMAT, num_points, seed, [[mesh.name, mesh.stamp] for mesh in meshes]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _counted(counts: Mapping[str, int]) -> str:
    return " and ".join(f"{count:,} {split} meshes" for split, count in counts.items())


@contextmanager
def _opened(source: Path) -> Iterator[zipfile.ZipFile | None]:
    """The archive, or None for a folder."""
    if source.is_dir():
        yield None
        return
    if not source.is_file():
        raise RunError(f"{source} is not there")
    try:
        archive = zipfile.ZipFile(source)
    except UNREADABLE as error:
        raise RunError(f"{source} is no zip archive, or a damaged one: {error}") from error
    with archive:
        yield archive


def _sample_shard(
    source: Path,
    meshes: Sequence[MeshFile],
    path: Path,
    sampler: Sampler,
    num_points: int,
    features: int,
    seed: int,
) -> None:
    """Samples some meshes and writes them to one file."""
    points = np.zeros((len(meshes), num_points, features), np.float32)
    center, scale = np.zeros((len(meshes), 3)), np.zeros(len(meshes))
    errors, remarks = {}, {}
    with _opened(source) as archive:
        for i, mesh in enumerate(meshes):
            try:
                content = (source / mesh.member).read_bytes() if archive is None else archive.read(mesh.member)
                points[i], center[i], scale[i], remark = sampler(
                    content, mesh.name, num_points, stream_seed(f"mesh {mesh.name}", seed)
                )
            except OffError as error:
                errors[mesh.name] = str(error) if str(error).startswith(mesh.name) else f"{mesh.name}: {error}"
            except UNREADABLE as error:
                errors[mesh.name] = f"{mesh.name}: damaged in {source.name}: {error}"
            else:
                if remark:
                    remarks[mesh.name] = remark
    notes = json.dumps({"errors": errors, "remarks": remarks})
    buffer = io.BytesIO()
    np.savez(buffer, points=points, center=center, scale=scale, notes=np.array(notes))
    write_atomic(path, buffer.getbuffer())


def _readable(path: Path) -> bool:
    """Whether a shard is there and whole."""
    try:
        with zipfile.ZipFile(path) as shard:
            return shard.testzip() is None
    except UNREADABLE:
        return False


def _assemble(
    target: Path,
    meshes: Sequence[MeshFile],
    paths: Sequence[Path],
    num_points: int,
    features: int,
    seed: int,
    key: str,
    splits: Sequence[str],
) -> CloudReport:
    """Puts the shards together, in the meshes' order, without those that could not be read."""
    classes = sorted({mesh.label for mesh in meshes})
    errors: dict[str, str] = {}
    remarks: dict[str, str] = {}
    for path in paths:
        with np.load(path) as shard:
            notes = json.loads(str(shard["notes"]))
        errors |= notes["errors"]
        remarks |= notes["remarks"]
    kept = {split: [mesh for mesh in meshes if mesh.split == split and mesh.name not in errors] for split in splits}
    digest = hashlib.sha256(json.dumps([FORMAT, num_points, classes]).encode())
    temporary = target.with_name(f".{target.name}.tmp")
    with h5py.File(temporary, "w") as file:
        for split, files in kept.items():
            group = file.create_group(split)
            group["label"] = np.array([classes.index(mesh.label) for mesh in files], np.int64)
            group.create_dataset("name", data=[mesh.name for mesh in files], dtype=h5py.string_dtype())
            for name, shape, kind in (
                ("points", (num_points, features), "f4"),
                ("center", (3,), "f8"),
                ("scale", (), "f8"),
            ):
                chunks = (1, *shape) if files and shape else None
                group.create_dataset(name, (len(files), *shape), kind, chunks=chunks)
        place = dict.fromkeys(splits, 0)
        remaining = iter(meshes)
        for path in paths:
            with np.load(path) as shard:
                arrays = {name: shard[name] for name in ("points", "center", "scale")}
            for i, mesh in zip(range(len(arrays["scale"])), remaining, strict=False):
                if mesh.name in errors:
                    continue
                digest.update(mesh.name.encode())
                for name, array in arrays.items():
                    file[mesh.split][name][place[mesh.split]] = array[i]
                    digest.update(np.ascontiguousarray(array[i]).tobytes())
                place[mesh.split] += 1
        report = CloudReport(
            path=str(target),
            counts={split: len(files) for split, files in kept.items()},
            classes=classes,
            num_points=num_points,
            seed=seed,
            content_hash=digest.hexdigest(),
            errors=errors,
            remarks=remarks,
        )
        file.attrs["key"] = key
        file.attrs["report"] = json.dumps(asdict(report))
    with open(temporary, "rb+") as written:
        os.fsync(written.fileno())
    temporary.replace(target)
    sync_folder(target.parent)
    return report
