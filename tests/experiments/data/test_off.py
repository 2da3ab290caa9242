import numpy as np
import pytest
import trimesh

from experiments.data.off import OffError, read_off, sample_surface

VERTICES = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
FACES = [(0, 1, 2), (0, 1, 3), (0, 2, 3), (1, 2, 3)]
V = "".join(f"{x} {y} {z}\n" for x, y, z in VERTICES)
F = "".join(f"3 {a} {b} {c}\n" for a, b, c in FACES)

SAME_MESH = {
    "plain": f"OFF\n4 4 0\n{V}{F}",
    "glued header": f"OFF4 4 0\n{V}{F}",
    "counts on the first line": f"OFF 4 4 0\n{V}{F}",
    "blank lines": f"OFF\n\n4 4 0\n\n{V}\n{F}\n",
    "comments": f"# a\nOFF # b\n# c\n4 4 0 # d\n{V}# OFF 1 2 3\n{F}# end",
    "colours": "COFF\n4 4 0\n" + V.replace("\n", " 255 0 0 255\n") + F.replace("\n", " 0.1 0.2 0.3\n"),
    "normals": "NOFF\n4 4 0\n" + V.replace("\n", " 0 0 1\n") + F,
    "CRLF": f"OFF\n4 4 0\n{V}{F}".replace("\n", "\r\n"),
    "CR": f"OFF\n4 4 0\n{V}{F}".replace("\n", "\r"),
    "no final newline": f"OFF\n4 4 0\n{V}{F}".rstrip(),
    "trailing blanks": f"OFF\n4 4 0\n{V}{F}".replace("\n", " \t \n"),
    "byte order mark": f"\ufeffOFF\n4 4 0\n{V}{F}",
    "no number of edges": f"OFF\n4 4\n{V}{F}",
    "more after the end": f"OFF\n4 4 0\n{V}{F}3 0 1 2\n",
    "edges and points among the faces": f"OFF\n4 6 0\n{V}2 0 1\n{F}1 3\n",
}


@pytest.mark.parametrize("text", SAME_MESH.values(), ids=SAME_MESH)
def test_odd_files_give_the_same_mesh(text):
    mesh = read_off(text.encode(), "a.off")
    assert mesh.vertices.tolist() == [list(map(float, vertex)) for vertex in VERTICES]
    assert mesh.faces.tolist() == [list(face) for face in FACES]


def test_latin_comments_are_no_obstacle():
    assert len(read_off(f"# caf\xe9\nOFF\n4 4 0\n{V}{F}".encode("latin-1"), "a.off").faces) == 4


def test_polygons_of_all_sizes_become_fans():
    text = f"OFF\n6 4 0\n{V}2 2 2\n3 3 3\n6 0 1 2 3 4 5\n3 0 1 2\n4 0 1 2 3\n5 5 4 3 2 1\n"
    assert read_off(text.encode(), "a.off").faces.tolist() == [
        [0, 1, 2],
        [0, 2, 3],
        [0, 3, 4],
        [0, 4, 5],
        [0, 1, 2],
        [0, 1, 2],
        [0, 2, 3],
        [5, 4, 3],
        [5, 3, 2],
        [5, 2, 1],
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no OFF file"),
        ("ply\nformat ascii 1.0\n", "no OFF file: it begins with 'ply"),
        (f"4OFF\n4 4 0\n{V}{F}", "no OFF file"),
        ("OFF BINARY\n\0\0", "binary OFF"),
        ("OFF\n", "no counts"),
        ("OFF\nfour 4 0\n", "no counts"),
        (f"OFF\n4 4 0\n{V}3 0 1 2\n", "cut off: 4 vertices and 4 faces are announced, 5 lines follow"),
        ("OFF\n4 4 0\n0 0 0\n", "cut off"),
        (f"OFF\n4 4 0\n{V}{F}".rstrip()[:-2], "cut off: a face of 3 corners lists 2"),
        (f"OFF\n4 1 0\n{V}3 0 1 4\n", "face index outside"),
        (f"OFF\n4 1 0\n{V}3 0 1 -1\n", "face index outside"),
        (f"OFF\n4 1 0\n{V}3 0 1 x\n", "x"),
        (f"OFF\n4 1 0\n{V}a 0 1 2\n", "a face begins with 'a'"),
        (f"OFF\n4 4 0\n{V}{F}".replace("1 0 0", "nan 0 0"), "not finite"),
        (f"OFF\n4 4 0\n{V}{F}".replace("1 0 0", "1e999 0 0"), "not finite"),
        (f"OFF\n4 4 0\n{V}{F}".replace("1 0 0", "1 0", 1), "inhomogeneous"),
        (f"OFF\n-4 4 0\n{V}{F}", "-4 vertices and 4 faces are announced"),
        (f"OFF\n4 -1 0\n{V}{F}", "4 vertices and -1 faces are announced"),
        (f"OFF\n4 5 0\n{V}{F}-3 1 2 3\n", "a face begins with '-3' instead of its number of corners"),
        (f"OFF\n4 5 0\n{V}{F}3 1 2 {10**23}\n", "too large"),
    ],
)
def test_broken_files_are_refused_by_name(text, message):
    with pytest.raises(OffError, match=message) as raised:
        read_off(text.encode(), "chair/train/chair_0007.off")
    assert str(raised.value).startswith("chair/train/chair_0007.off: ")


def two_squares():
    """A square of area 1 at z=0 and one of area 3 at z=1, and a face without area between them."""
    side = 3**0.5
    vertices = [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0), (0, 0, 1), (side, 0, 1), (side, side, 1), (0, side, 1)]
    faces = [(0, 1, 4), (0, 1, 2), (0, 2, 3), (0, 0, 6), (4, 5, 6), (4, 6, 7)]
    return trimesh.Trimesh(vertices, faces[1:], process=False)


def restored(samples):
    return samples.points * samples.scale + samples.center


def test_points_are_drawn_evenly_by_area():
    points = restored(sample_surface(two_squares(), 20_000, 0))
    low, high = points[points[:, 2] < 0.5], points[points[:, 2] > 0.5]
    assert np.minimum(np.abs(points[:, 2]), np.abs(points[:, 2] - 1)).max() < 1e-6
    # Shares 1/4 and 3/4: four standard deviations of a binomial are 0.0122.
    assert len(low) / len(points) == pytest.approx(0.25, abs=0.0123)
    for square, side in ((low, 1.0), (high, 3**0.5)):
        assert square[:, :2].min() > -1e-6
        assert square[:, :2].max() < side + 1e-6
        quadrants = np.histogram2d(square[:, 0], square[:, 1], bins=2, range=[[0, side]] * 2)[0] / len(square)
        np.testing.assert_allclose(quadrants, 0.25, atol=0.025)


def test_points_lie_in_the_unit_sphere_and_reach_it():
    samples = sample_surface(trimesh.creation.box((3.0, 1.0, 2.0)), 5000, 0)
    assert samples.points.dtype == np.float32
    radius = np.linalg.norm(samples.points, axis=1)
    assert radius.max() <= 1 + 1e-6
    assert radius.max() > 0.9
    assert samples.scale == pytest.approx(14**0.5 / 2)


def test_the_seed_decides():
    mesh = two_squares()
    first, again, other = (sample_surface(mesh, 50, seed).points for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(("size", "offset"), [(2e11, 0.0), (1e-9, 0.0), (1.0, 1e11), (1e200, 0.0)])
def test_coordinates_of_any_size_keep_their_shape(size, offset):
    unit = sample_surface(two_squares(), 500, 0)
    mesh = two_squares()
    mesh.vertices = mesh.vertices * size + offset
    samples = sample_surface(mesh, 500, 0)
    assert np.isfinite(samples.points).all()
    np.testing.assert_allclose(samples.points, unit.points, atol=1e-4)
    np.testing.assert_allclose(samples.scale, unit.scale * size, rtol=1e-4)


def test_faces_without_area_are_never_drawn_from():
    vertices = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (5, 5, 5)]
    mesh = trimesh.Trimesh(vertices, [(3, 3, 3), (0, 1, 2), (0, 3, 3)], process=False)
    points = restored(sample_surface(mesh, 1000, 0))
    assert np.abs(points[:, 2]).max() < 1e-5
    assert points[:, :2].max() < 1 + 1e-5


@pytest.mark.parametrize("faces", [[(0, 1, 1), (2, 2, 2)], []])
def test_a_mesh_without_any_area_gives_its_vertices(faces):
    mesh = trimesh.Trimesh([(0, 0, 0), (1, 0, 0), (0, 1, 0)], np.reshape(faces, (-1, 3)).astype(int), process=False)
    samples = sample_surface(mesh, 100, 0)
    assert samples.remark == "no face has an area: vertices were drawn instead"
    assert samples.points.shape == (100, 3)
    assert {tuple(p) for p in restored(samples).round(6).tolist()} <= {(0, 0, 0), (1, 0, 0), (0, 1, 0)}


def test_one_point_alone_is_its_own_cloud():
    samples = sample_surface(trimesh.Trimesh([(7, 7, 7)], process=False), 10, 0)
    assert (samples.points == 0).all()
    assert samples.center.tolist() == [7, 7, 7]


def test_a_mesh_without_vertices_is_refused():
    with pytest.raises(OffError, match="no vertices"):
        sample_surface(read_off(b"OFF\n0 0 0\n", "a.off"), 10, 0)
