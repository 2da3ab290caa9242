"""OFF meshes: trimesh's reader behind checks of what it lets pass, and points drawn evenly from a mesh's surface."""

import io
from typing import NamedTuple

import numpy as np
import trimesh
from trimesh.exchange.off import load_off
from trimesh.util import comment_strip, decode_text


class OffError(ValueError):
    """A mesh file that cannot be read; its message names the file."""


class Samples(NamedTuple):
    """Points of a surface in a frame of their own: points * scale + center are the mesh's coordinates."""

    points: np.ndarray
    """(n, 3) float32, within the unit sphere; with normals (n, 6)."""
    center: np.ndarray
    """(3,) float64."""
    scale: float
    remark: str
    """What was unusual about the mesh, or ""."""


def read_off(content: bytes, name: str) -> trimesh.Trimesh:
    """Reads an OFF file; vertices and faces stay in the file's order.

    Headers glued to the counts ("OFF490 518 0"), comments, blank lines, colours, any line ends and polygons of any size
    are taken; polygons become fans of triangles.

    Args:
        content: the file.
        name: what messages call it, its path.

    Raises:
        OffError: for a file that is cut off, is no OFF file, holds numbers that are not finite, or faces whose corners
            do not exist.
    """
    lines = _lines(content, name)
    try:
        vertex_count, face_count = (int(word) for word in lines[0].split()[:2])
    except (IndexError, ValueError):
        raise OffError(f"{name}: no counts of vertices and faces after the word OFF") from None
    if vertex_count < 0 or face_count < 0:
        raise OffError(f"{name}: {vertex_count} vertices and {face_count} faces are announced")
    if len(lines) < 1 + vertex_count + face_count:
        raise OffError(
            f"{name}: cut off: {vertex_count} vertices and {face_count} faces are announced, "
            f"{len(lines) - 1} lines follow"
        )
    # trimesh drops faces that are cut off and fails on a mixture of polygons: it gets whole triangles only.
    faces = lines[1 + vertex_count : 1 + vertex_count + face_count]
    triangles = [triangle for face in faces for triangle in _fan(face, name)]
    text = "\n".join(["OFF", f"{vertex_count} {len(triangles)} 0", *lines[1 : 1 + vertex_count], *triangles])
    try:
        parsed = load_off(io.StringIO(text))
    except (ValueError, IndexError, TypeError, OverflowError) as error:
        raise OffError(f"{name}: {error}") from error
    if not np.isfinite(parsed["vertices"]).all():
        raise OffError(f"{name}: a vertex has a coordinate that is not finite")
    return trimesh.Trimesh(
        vertices=parsed["vertices"], faces=np.reshape(parsed["faces"], (-1, 3)).astype(np.int64), process=False
    )


def _lines(content: bytes, name: str) -> list[str]:
    """The lines after the word OFF, without comments and blank ones; the first holds the counts."""
    text = comment_strip(decode_text(content).replace("\r\n", "\n").replace("\r", "\n")).strip().lstrip("\ufeff")
    prefix, word, rest = text.partition("OFF")
    if not word or prefix not in ("", "C", "N", "CN", "ST", "STC", "STN", "STCN"):
        raise OffError(f"{name}: no OFF file: it begins with {text[:20]!r}")
    if rest.lstrip().upper().startswith("BINARY"):
        raise OffError(f"{name}: a binary OFF file; only text is read")
    return [line for line in (raw.strip() for raw in rest.split("\n")) if line]


def _fan(face: str, name: str) -> list[str]:
    """The triangles "3 a b c" of a face line; none for points and edges."""
    words = face.split()
    if words[0] == "3" and len(words) > 3:
        return [face]
    try:
        corners = words[1 : 1 + int(words[0])]
    except ValueError:
        raise OffError(f"{name}: a face begins with {words[0]!r} instead of its number of corners") from None
    if int(words[0]) < 0:
        raise OffError(f"{name}: a face begins with {words[0]!r} instead of its number of corners")
    if len(corners) < int(words[0]):
        raise OffError(f"{name}: cut off: a face of {words[0]} corners lists {len(corners)}")
    return [f"3 {corners[0]} {corners[i]} {corners[i + 1]}" for i in range(1, len(corners) - 1)]


def sample_surface(
    mesh: trimesh.Trimesh, count: int, seed: int | np.random.Generator, normals: bool = False
) -> Samples:
    """Draws points from a mesh, evenly by area.

    The mesh is first moved into the unit sphere (centre of its bounding box, farthest corner at distance 1), in
    float64: coordinates of 1e11, which ModelNet40 has, keep their shape. Faces without area are never drawn from; a
    mesh of such faces only gives its vertices, drawn with replacement, and a remark.

    Args:
        mesh: with at least one vertex.
        count: number of points.
        seed: the same seed gives the same points.
        normals: gives the unit normal of its face with every point.

    Raises:
        OffError: for a mesh without vertices, or without faces that have a normal where normals are wanted.
    """
    if len(mesh.vertices) == 0:
        raise OffError("the mesh has no vertices")
    rng = np.random.default_rng(seed)
    vertices = np.asarray(mesh.vertices, dtype=np.float64)
    used = vertices[np.unique(mesh.faces)] if len(mesh.faces) else vertices
    center, scale = unit_sphere(used)
    normalised = trimesh.Trimesh(vertices=(vertices - center) / scale, faces=mesh.faces, process=False)
    areas = normalised.area_faces
    # Smaller areas are rounding of the corners, or have a share of the samples of less than one in 1e12.
    solid = areas > max(1e-15, 1e-12 * areas.sum())
    if not solid.any():
        if normals:
            raise OffError("no face has an area, so none has a normal")
        drawn = ((used - center) / scale)[rng.integers(len(used), size=count)]
        return Samples(drawn.astype(np.float32), center, scale, "no face has an area: vertices were drawn instead")
    surface = trimesh.Trimesh(vertices=normalised.vertices, faces=mesh.faces[solid], process=False)
    points, faces = trimesh.sample.sample_surface(surface, count, face_weight=areas[solid], seed=rng)
    if normals:
        first, second, third = np.moveaxis(surface.vertices[surface.faces[faces]], 1, 0)
        across = np.cross(second - first, third - first)
        points = np.concatenate([points, across / np.linalg.norm(across, axis=1, keepdims=True)], axis=1)
    return Samples(np.asarray(points, dtype=np.float32), center, scale, "")


def unit_sphere(points: np.ndarray) -> tuple[np.ndarray, float]:
    """Centre (3,) of the bounding box of points (n, 3), and the distance of the farthest from it; 1 where that is 0."""
    center = points.min(0) / 2 + points.max(0) / 2
    scale = float(np.abs(points - center).max())
    if scale > 0:  # in two steps, so that no square can overflow
        scale *= float(np.linalg.norm((points - center) / scale, axis=1).max())
    return center, scale or 1.0
