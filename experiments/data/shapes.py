"""Procedural meshes: classes made of the same kinds of parts, told apart by how the parts stand to each other.

They are written as OFF files in ModelNet's layout and read and sampled by the same code, so that everything around the
models can be tried without a download. Proportions, taper, twist, a missing part and the heading are random.
"""

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import trimesh
from filelock import FileLock
from numpy.random import Generator
from trimesh import Trimesh
from trimesh.exchange.off import export_off
from trimesh.transformations import rotation_matrix, translation_matrix

from ..seeding import stream_seed
from .base import data_folder
from .clouds import CloudData
from .meshes import CloudReport, prepare_clouds

#: Changes whenever the same seed would give other meshes.
FORMAT = 1
NUM_POINTS = 2_048

#: How far the random deformations go: binary logarithm of the stretch along each axis, taper, radians of twist.
STRETCH, TAPER, TWIST = 0.7, 0.4, 0.5

X, Y = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0)


def _box(x: float, y: float, z: float, at: tuple[float, float, float] = (0, 0, 0)) -> Trimesh:
    return trimesh.creation.box((x, y, z), translation_matrix(at))


def _rod(radius: float, height: float, at: tuple[float, float, float] = (0, 0, 0), along: str = "z") -> Trimesh:
    turn = {"z": np.eye(4), "x": rotation_matrix(np.pi / 2, Y), "y": rotation_matrix(np.pi / 2, X)}[along]
    return trimesh.creation.cylinder(radius, height, sections=8, transform=translation_matrix(at) @ turn)


def _ring(
    radius: float, thickness: float, at: tuple[float, float, float] = (0, 0, 0), standing: bool = False
) -> Trimesh:
    turn = rotation_matrix(np.pi / 2, X) if standing else np.eye(4)
    return trimesh.creation.torus(radius, thickness, 16, 6, transform=translation_matrix(at) @ turn)


def _ball(radius: float, at: tuple[float, float, float] = (0, 0, 0)) -> Trimesh:
    return trimesh.creation.icosphere(1, radius).apply_translation(at)


def _legs(rng: Generator, width: float, depth: float, top: float) -> list[Trimesh]:
    """Four legs under (or, for a negative height, above) a plate at height 0; one may be missing."""
    inset, thickness = rng.uniform(0.8, 0.95), rng.uniform(0.04, 0.09)
    legs = [
        _box(thickness, thickness, abs(top), (x * inset * width / 2, y * inset * depth / 2, -top / 2))
        for x in (-1, 1)
        for y in (-1, 1)
    ]
    if rng.random() < 0.15:
        legs.pop(rng.integers(4))
    return legs


def _plate(rng: Generator) -> tuple[float, float, float]:
    return rng.uniform(0.7, 1.4), rng.uniform(0.6, 1.0), rng.uniform(0.4, 1.0)


def _table(rng: Generator) -> list[Trimesh]:
    width, depth, height = _plate(rng)
    return [_box(width, depth, 0.06), *_legs(rng, width, depth, height)]


def _table_upside_down(rng: Generator) -> list[Trimesh]:
    width, depth, height = _plate(rng)
    return [_box(width, depth, 0.06), *_legs(rng, width, depth, -height)]


def _chair(rng: Generator) -> list[Trimesh]:
    width, depth, height = _plate(rng)
    back = rng.uniform(0.4, 0.9)
    return [
        _box(width, depth, 0.06),
        *_legs(rng, width, depth, height),
        _box(width, 0.06, back, (0, depth / 2, back / 2)),
    ]


def _table_with_curtain(rng: Generator) -> list[Trimesh]:
    """A chair whose back hangs below the seat."""
    width, depth, height = _plate(rng)
    back = rng.uniform(0.6, 0.95) * height
    return [
        _box(width, depth, 0.06),
        *_legs(rng, width, depth, height),
        _box(width, 0.06, back, (0, depth / 2, -back / 2)),
    ]


def _bars(rng: Generator) -> tuple[float, float, float, float]:
    return rng.uniform(0.8, 1.4), rng.uniform(0.6, 1.2), rng.uniform(0.08, 0.16), rng.uniform(0.08, 0.16)


def _cross(rng: Generator) -> list[Trimesh]:
    height, width, a, b = _bars(rng)
    return [_box(a, a, height), _box(width, b, b, (0, 0, rng.uniform(-0.15, 0.15) * height))]


def _tee(rng: Generator) -> list[Trimesh]:
    height, width, a, b = _bars(rng)
    return [_box(a, a, height), _box(width, b, b, (0, 0, height / 2 * rng.choice([-1, 1])))]


def _ell(rng: Generator) -> list[Trimesh]:
    height, width, a, b = _bars(rng)
    return [_box(a, a, height), _box(width, b, b, (width / 2, 0, height / 2 * rng.choice([-1, 1])))]


def _ring_and_ball(rng: Generator) -> tuple[Trimesh, float, float]:
    radius, thickness = rng.uniform(0.4, 0.6), rng.uniform(0.05, 0.1)
    return _ring(radius, thickness), radius, rng.uniform(0.14, 0.26)


def _ball_in_ring(rng: Generator) -> list[Trimesh]:
    ring, _, size = _ring_and_ball(rng)
    return [ring, _ball(size)]


def _ball_beside_ring(rng: Generator) -> list[Trimesh]:
    ring, radius, size = _ring_and_ball(rng)
    return [ring, _ball(size, (radius + size + rng.uniform(0.1, 0.4), 0, 0))]


def _ball_above_ring(rng: Generator) -> list[Trimesh]:
    ring, _, size = _ring_and_ball(rng)
    return [ring, _ball(size, (0, 0, (size + rng.uniform(0.2, 0.5)) * rng.choice([-1, 1])))]


def _cup(rng: Generator) -> tuple[Trimesh, float, float]:
    radius, height = rng.uniform(0.3, 0.45), rng.uniform(0.6, 1.0)
    return trimesh.creation.annulus(0.9 * radius, radius, height, sections=16), radius, height


def _mug(rng: Generator) -> list[Trimesh]:
    cup, radius, height = _cup(rng)
    handle = rng.uniform(0.18, 0.26)
    return [cup, _ring(handle, 0.04, (radius, 0, rng.uniform(-0.1, 0.1) * height), standing=True)]


def _basket(rng: Generator) -> list[Trimesh]:
    """A mug whose handle stands on the rim."""
    cup, radius, height = _cup(rng)
    handle = rng.uniform(0.18, 0.26)
    return [cup, _ring(handle, 0.04, (rng.uniform(-0.1, 0.1) * radius, 0, height / 2), standing=True)]


def _rungs(rng: Generator, along: str) -> list[Trimesh]:
    """Two long rails and the rungs between them; the rails stand or lie."""
    length, width, count = rng.uniform(1.0, 1.6), rng.uniform(0.4, 0.7), int(rng.integers(4, 7))
    places = np.linspace(-0.42, 0.42, count) * length
    if rng.random() < 0.3:
        places = np.delete(places, rng.integers(1, count - 1))
    if along == "z":
        rails = [_rod(0.04, length, (side * width / 2, 0, 0)) for side in (-1, 1)]
        return rails + [_rod(0.03, width, (0, 0, place), along="x") for place in places]
    rails = [_rod(0.04, length, (0, 0, side * width / 2), along="x") for side in (-1, 1)]
    return rails + [_rod(0.03, width, (place, 0, 0)) for place in places]


def _ladder(rng: Generator) -> list[Trimesh]:
    return _rungs(rng, "z")


def _fence(rng: Generator) -> list[Trimesh]:
    return _rungs(rng, "x")


SHAPES: dict[str, Callable[[Generator], list[Trimesh]]] = {
    "ball_above_ring": _ball_above_ring,
    "ball_beside_ring": _ball_beside_ring,
    "ball_in_ring": _ball_in_ring,
    "basket": _basket,
    "chair": _chair,
    "cross": _cross,
    "ell": _ell,
    "fence": _fence,
    "ladder": _ladder,
    "mug": _mug,
    "table": _table,
    "table_upside_down": _table_upside_down,
    "table_with_curtain": _table_with_curtain,
    "tee": _tee,
}


def build(label: str, number: int, seed: int = 0) -> Trimesh:
    """The shape of that number of a class; the same arguments give the same mesh."""
    rng = np.random.default_rng(stream_seed(f"shape {label}", seed, number))
    parts = SHAPES[label](rng)
    vertices, faces = trimesh.util.append_faces([part.vertices for part in parts], [part.faces for part in parts])
    # Smaller faces, so that a twist bends them.
    vertices, faces = trimesh.remesh.subdivide(vertices, faces)
    vertices = vertices - (vertices.min(0) + vertices.max(0)) / 2
    vertices *= 2.0 ** rng.uniform(-STRETCH, STRETCH, size=3)
    height = vertices[:, 2] / np.abs(vertices[:, 2]).max()
    vertices[:, :2] *= (1 + rng.uniform(-TAPER, TAPER) * height)[:, None]
    angle = rng.uniform(-TWIST, TWIST) * height + rng.uniform(-np.pi, np.pi)
    x, y = vertices[:, 0].copy(), vertices[:, 1].copy()
    vertices[:, 0], vertices[:, 1] = np.cos(angle) * x - np.sin(angle) * y, np.sin(angle) * x + np.cos(angle) * y
    vertices = vertices * rng.uniform(0.5, 50.0) + rng.uniform(-10, 10, size=3)
    return Trimesh(vertices, faces, process=False)


def write_archive(path: Path, train: int, test: int, seed: int = 0) -> None:
    """Writes `train` and `test` meshes of every class into a zip archive in ModelNet's layout, atomically.

    The same arguments give the same bytes.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for label in SHAPES:
            for number in range(train + test):
                split = "train" if number < train else "test"
                entry = zipfile.ZipInfo(f"shapes/{label}/{split}/{label}_{number + 1:04d}.off")
                archive.writestr(entry, export_off(build(label, number, seed)), zipfile.ZIP_DEFLATED)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(buffer.getbuffer())
    os.replace(temporary, path)


def clouds_path(folder: str | Path, train: int, test: int, seed: int) -> Path:
    """The prepared file in a data folder; its name tells what decides its content."""
    return data_folder(folder) / "shapes" / f"shapes-v{FORMAT}-{train}-{test}-seed{seed}.h5"


def prepare(
    folder: Path,
    train: int = 100,
    test: int = 40,
    *,
    seed: int = 0,
    jobs: int | None = None,
    num_points: int = NUM_POINTS,
    quiet: bool = False,
) -> CloudReport:
    """Makes the meshes and samples them, where that is not done already.

    Args:
        folder: the folder of all data.
        train: training shapes per class.
        test: test shapes per class.
        seed: of shapes and sampling.
        jobs: processes that sample, None for one per core.
        num_points: points per shape.
        quiet: shows no progress.

    Raises:
        ValueError: for less than one shape per class and split.
    """
    if train < 1 or test < 1:
        raise ValueError(f"shapes needs at least 1 training and 1 test shape per class, got {train} and {test}")
    target = clouds_path(folder, train, test, seed)
    target.parent.mkdir(parents=True, exist_ok=True)
    archive = target.with_suffix(".zip")
    with FileLock(target.with_name(f".{archive.name}.lock")):
        if not archive.is_file():
            write_archive(archive, train, test, seed)
    counts = {"train": train * len(SHAPES), "test": test * len(SHAPES)}
    return prepare_clouds(archive, target, num_points, seed, jobs=jobs, expected=counts, quiet=quiet)


class Shapes(CloudData):
    """Clouds of procedural shapes, made where they are not there yet.

    Args:
        folder: the folder of all data.
        train_per_class: training shapes per class, those to validate on included.
        test_per_class: test shapes per class.
        shape_seed: of the shapes; not the run's seed.
        **options: those of `CloudData`.
    """

    name = "shapes"

    def __init__(self, folder: str, train_per_class: int, test_per_class: int, shape_seed: int, **options: Any) -> None:
        prepare(Path(folder), train_per_class, test_per_class, seed=shape_seed, quiet=True)
        path = clouds_path(folder, train_per_class, test_per_class, shape_seed)
        super().__init__(path, "it was just made; is the disk full?", **options)
