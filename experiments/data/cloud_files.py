"""Points of one file: meshes (OFF, OBJ, PLY, STL) sampled by area, points (PLY, XYZ, NPY) chosen at random.

trimesh reads PLY and STL, behind checks of what it lets pass: files that are cut off.
"""

import io
import re

import numpy as np
import trimesh
from trimesh.util import decode_text

from .furniture import read_obj
from .off import OffError, Samples, read_off, sample_surface, unit_sphere

SUFFIXES = (".npy", ".obj", ".off", ".ply", ".stl", ".xyz")


def sample_file(content: bytes, name: str, count: int, seed: int, *, normals: bool = False) -> Samples:
    """Points of a file, by the ending of its name.

    Args:
        content: the file.
        name: its path, for messages too.
        count: number of points.
        seed: the same seed gives the same points.
        normals: gives a unit normal with each point: the face's, or, of points, the file's own (nx, ny, nz in PLY,
            columns 4 to 6 in XYZ and NPY).

    Raises:
        OffError: for a file that is cut off, is none of its kind, has numbers that are not finite, or lacks normals
            that are wanted.
    """
    kind = name.rpartition(".")[2].lower()
    if kind == "xyz":
        return _of_table(_read_xyz(content), count, seed, normals)
    if kind == "npy":
        return _of_table(_read_npy(content), count, seed, normals)
    if kind == "ply":
        found = _read_ply(content)
        if isinstance(found, np.ndarray):
            return _of_table(found, count, seed, normals)
        return sample_surface(found, count, seed, normals)
    mesh = {"off": read_off, "obj": read_obj, "stl": _read_stl}[kind](content, name)
    if not len(mesh.faces) and not normals:
        return _of_table(np.asarray(mesh.vertices), count, seed, False)
    return sample_surface(mesh, count, seed, normals)


def _of_table(rows: np.ndarray, count: int, seed: int, normals: bool) -> Samples:
    """Points, and normals where they are wanted, of the rows (n, 3 or more) of a file."""
    if not len(rows):
        raise OffError("it holds no points")
    if normals and rows.shape[1] < 6:
        raise OffError("it has no normals: take data.normals=false")
    if not np.isfinite(rows[:, : 6 if normals else 3]).all():
        raise OffError("a point has a coordinate that is not finite")
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(rows))[:count]
    remark = ""
    if len(order) < count:
        remark = f"it has {len(order)} points, fewer than {count}: some are repeated"
        order = np.concatenate([order, rng.integers(len(rows), size=count - len(order))])
    center, scale = unit_sphere(rows[:, :3])
    points = (rows[order, :3] - center) / scale
    if normals:
        lengths = np.linalg.norm(rows[order, 3:6], axis=1, keepdims=True)
        points = np.concatenate([points, rows[order, 3:6] / np.where(lengths > 0, lengths, 1)], axis=1)
    return Samples(points.astype(np.float32), center, scale, remark)


def _read_xyz(content: bytes) -> np.ndarray:
    text = re.sub(r"[,;\t]", " ", re.sub(r"#.*", "", decode_text(content)))
    lines = [line.split() for line in text.splitlines() if line.strip()]
    widths = {len(line) for line in lines}
    if not lines or len(widths) > 1 or min(widths) < 3:
        raise OffError("no table of points: each line needs the same columns, x y z and perhaps more; or it is cut off")
    try:
        return np.array([line[:6] for line in lines], dtype=np.float64)
    except ValueError as error:
        raise OffError(f"a line holds what is no number: {error}") from None


def _read_npy(content: bytes) -> np.ndarray:
    try:
        rows = np.load(io.BytesIO(content), allow_pickle=False)
        if not isinstance(rows, np.ndarray):
            raise ValueError("an archive of arrays")
    except (ValueError, EOFError, OSError) as error:
        raise OffError(f"no NPY file, or cut off: {' '.join(str(error).split())}") from None
    if rows.ndim != 2 or rows.shape[1] < 3 or rows.dtype.kind not in "fiu":
        raise OffError(f"an array of points has the shape (n, 3) or (n, 6) and numbers; got {rows.shape} {rows.dtype}")
    return rows.astype(np.float64)


def _read_ply(content: bytes) -> trimesh.Trimesh | np.ndarray:
    """A mesh, or the rows of a file of points: x, y, z, and nx, ny, nz where it has them."""
    header, end, body = content.partition(b"end_header")
    if not end or not header.startswith(b"ply"):
        raise OffError("no PLY file, or cut off within its header")
    counts = {name.decode(): int(count) for name, count in re.findall(rb"element\s+(\w+)\s+(\d+)", header)}
    if re.search(rb"format\s+ascii", header):
        lines = sum(bool(line.strip()) for line in body.splitlines())
        if lines < sum(counts.values()):
            raise OffError(f"cut off: {sum(counts.values())} lines are announced, {lines} follow")
    found = _by_trimesh(content, "ply")
    if len(found.vertices) < counts.get("vertex", 0):
        raise OffError(f"cut off: {counts['vertex']} vertices are announced, {len(found.vertices)} follow")
    if isinstance(found, trimesh.Trimesh) and len(found.faces):
        return found
    if counts.get("face"):
        raise OffError(f"none of its {counts['face']} faces can be read")
    stored = found.metadata.get("_ply_raw", {}).get("vertex", {}).get("data")
    columns = [np.asarray(found.vertices, dtype=np.float64)]
    names = () if stored is None else stored.keys() if isinstance(stored, dict) else stored.dtype.names or ()
    if stored is not None and {"nx", "ny", "nz"} <= set(names):
        columns += [np.asarray(stored[name], dtype=np.float64).reshape(-1, 1) for name in ("nx", "ny", "nz")]
    return np.concatenate(columns, axis=1)


def _read_stl(content: bytes, name: str) -> trimesh.Trimesh:
    announced = int.from_bytes(content[80:84], "little")
    binary = len(content) >= 84 and len(content) == 84 + 50 * announced
    if not binary and not (content.lstrip().lower().startswith(b"solid") and b"endsolid" in content.lower()):
        raise OffError(f"{name}: no STL file, or cut off")
    mesh = _by_trimesh(content, "stl")
    if not isinstance(mesh, trimesh.Trimesh) or not np.isfinite(mesh.vertices).all():
        raise OffError(f"{name}: it holds no triangles, or numbers that are not finite")
    return mesh


def _by_trimesh(content: bytes, kind: str) -> trimesh.Trimesh | trimesh.PointCloud:
    try:
        # A file of several STL solids is one mesh.
        force = "mesh" if kind == "stl" else None
        found = trimesh.load(io.BytesIO(content), file_type=kind, process=False, force=force)
    except Exception as error:  # whatever trimesh's readers raise on damaged bytes
        raise OffError(f"cannot be read: {' '.join(str(error).split()) or type(error).__name__}") from error
    if not isinstance(found, trimesh.Trimesh | trimesh.PointCloud) or not len(found.vertices):
        raise OffError("it holds neither a mesh nor points")
    if not np.isfinite(found.vertices).all():
        raise OffError("a vertex has a coordinate that is not finite")
    return found
