"""Meshes and point clouds of one's own: every format, normals, splits, and what is refused."""

import io
import shutil

import h5py
import numpy as np
import pytest
import torch
import trimesh
import yaml

from experiments.config import CONFIGS, compose, resolve
from experiments.data import cloud_files, meshes
from experiments.data.base import SampleKey
from experiments.data.cloud_files import sample_file
from experiments.data.cloud_folder import CloudFolder
from experiments.data.clouds import CloudArrays
from experiments.data.off import OffError
from experiments.data.prepare import main as prepare
from experiments.errors import RunError
from experiments.evaluate import load_run
from experiments.runners import lightning
from experiments.train import execute

CLASSES = ("ball", "box", "rod")
BOX = trimesh.creation.box((1, 2, 3))


def exported(mesh, kind):
    content = trimesh.exchange.ply.export_ply(mesh, encoding="ascii") if kind == "ply" else mesh.export(file_type=kind)
    return content.encode() if isinstance(content, str) else content


def npy(rows):
    file = io.BytesIO()
    np.save(file, rows)
    return file.getvalue()


def xyz(rows):
    return "".join(" ".join(f"{number:.9g}" for number in row) + "\n" for row in rows).encode()


def ply_points(rows, names="x y z nx ny nz"):
    header = "".join(f"property float {name}\n" for name in names.split()[: rows.shape[1]])
    return f"ply\nformat ascii 1.0\nelement vertex {len(rows)}\n{header}end_header\n".encode() + xyz(rows)


def fill(folder, classes=CLASSES, count=10):
    """Class folders of meshes in four formats."""
    for row, label in enumerate(classes):
        (folder / label).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            kind = ("off", "obj", "ply", "stl")[number % 4]
            mesh = trimesh.creation.box((1 + row, 2, 1 + 0.1 * number))
            (folder / label / f"{number}.{kind}").write_bytes(exported(mesh, kind))
    return folder


@pytest.fixture
def root(tmp_path):
    return fill(tmp_path / "own")


@pytest.fixture
def store(tmp_path):
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def data_of(own, store, **changes):
    options = yaml.safe_load((CONFIGS / "data" / "cloud_folder.yaml").read_text())
    del options["_target_"]
    options |= {"folder": str(store), "root": str(own), "points": 16, "stored": 32, "normalize": "none"}
    return CloudFolder(**options | changes)


def on_box(points):
    """Whether points (n, 3) lie on the surface of BOX."""
    share = np.abs(points) / (BOX.extents / 2)
    return np.allclose(share.max(1), 1, atol=1e-5)


@pytest.mark.parametrize("kind", ["off", "obj", "ply", "stl"])
@pytest.mark.parametrize("normals", [False, True])
def test_meshes_are_sampled_on_their_surface(kind, normals):
    points, center, scale, remark = sample_file(exported(BOX, kind), f"a.{kind.upper()}", 50, 3, normals=normals)
    assert points.shape == (50, 6 if normals else 3)
    assert remark == ""
    place = points[:, :3] * scale + center
    assert on_box(place)
    assert np.array_equal(points, sample_file(exported(BOX, kind), f"a.{kind}", 50, 3, normals=normals).points)
    if normals:  # outward, of the side on which the point lies
        side = np.abs(place) / (BOX.extents / 2)
        rows, axis = np.arange(50), side.argmax(1)
        assert np.allclose(points[rows, 3 + axis], np.sign(place[rows, axis]), atol=1e-5)


def test_binary_ply_is_read():
    points, center, scale, _ = sample_file(trimesh.exchange.ply.export_ply(BOX), "a.ply", 50, 0)
    assert on_box(points * scale + center)


POINTS = np.random.default_rng(0).normal(size=(40, 3)) * [1, 2, 3] + 5
NORMALS = np.tile([[0.0, 0.0, 2.0], [0.0, 3.0, 0.0]], (20, 1))
ROWS = np.concatenate([POINTS, NORMALS], axis=1)


@pytest.mark.parametrize("write", [npy, xyz, ply_points])
def test_points_are_chosen_from_those_of_the_file(write):
    name = {npy: "a.npy", xyz: "a.xyz", ply_points: "a.ply"}[write]
    points, center, scale, remark = sample_file(write(ROWS), name, 30, 0, normals=True)
    place = points[:, :3] * scale + center
    rows = np.abs(place[:, None] - POINTS).max(-1).argmin(1)
    assert np.allclose(place, POINTS[rows], atol=1e-4)
    assert len(set(rows)) == 30
    assert remark == ""
    assert np.allclose(points[:, 3:], NORMALS[rows] / np.linalg.norm(NORMALS[rows], axis=1, keepdims=True))
    few = sample_file(write(POINTS), name, 60, 0)
    assert few.points.shape == (60, 3)
    assert "it has 40 points, fewer than 60" in few.remark
    assert np.abs(np.linalg.norm(few.points, axis=1).max() - 1) < 1e-5
    with pytest.raises(OffError, match="it has no normals"):
        sample_file(write(POINTS), name, 30, 0, normals=True)


def test_xyz_takes_comments_commas_and_further_columns():
    content = b"# x, y, z, red\n0,0,0,9\n\n1;2;3;9\r\n"
    points, center, scale, _ = sample_file(content, "a.xyz", 2, 0)
    assert sorted((points * scale + center).round(5).tolist()) == [[0, 0, 0], [1, 2, 3]]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.off", exported(BOX, "off")[:200], "cut off"),
        ("a.ply", exported(BOX, "ply")[:330], "cut off: 20 lines are announced"),
        ("a.ply", trimesh.exchange.ply.export_ply(BOX)[:-20], "cannot be read"),
        ("a.ply", ply_points(ROWS)[:-80], "cut off: 40 lines are announced"),
        ("a.ply", b"ply\nformat", "cut off within its header"),
        ("a.stl", exported(BOX, "stl")[:-20], "no STL file, or cut off"),
        ("a.stl", trimesh.exchange.stl.export_stl_ascii(BOX).encode()[:-30], "no STL file, or cut off"),
        ("a.stl", b"", "no STL file"),
        ("a.obj", b"v 0 0 0\nv 1 0 0\n", "it has no faces"),
        ("a.xyz", xyz(POINTS) + b"1 2\n", "each line needs the same columns"),
        ("a.xyz", b"", "no table of points"),
        ("a.xyz", b"C 0 0 0\n", "a line holds what is no number"),
        ("a.xyz", b"0 0 nan\n", "not finite"),
        ("a.npy", npy(POINTS)[:-9], "no NPY file, or cut off"),
        ("a.npy", npy(POINTS[:, :2]), r"got \(40, 2\)"),
        ("a.npy", npy(POINTS[:0]), "it holds no points"),
        ("a.npy", npy(np.array(["a"])), r"the shape \(n, 3\)"),
    ],
)
def test_broken_files(name, content, words):
    with pytest.raises(OffError, match=words):
        sample_file(content, name, 8, 0)


def test_class_folders_to_batches(root, store):
    data = data_of(root, store)
    assert data.classes == CLASSES
    assert data.sizes == {"train": 21, "val": 3, "test": 6}
    clouds, labels = data.dataset(["test"])[[SampleKey(number, 0, 0) for number in range(6)]]
    assert clouds.shape == (6, 16, 3)
    assert labels.tolist() == [0, 0, 1, 1, 2, 2]
    # The cloud is that of the file of its name: two sides of each box are known by its class.
    sides = data_of(root, store, points=32, normalize="standard")
    with h5py.File(sides.path) as file:
        places = {name.decode(): row for row, name in enumerate(file["all/name"][()])}
        for name, row in places.items():
            mesh = file["all/points"][row] * file["all/scale"][row] + file["all/center"][row]
            width = 1 + CLASSES.index(name.split("/")[0])
            assert np.abs(mesh[:, 0]).max() == pytest.approx(width / 2, rel=0.3)


def test_splits_by_folder_and_by_table(tmp_path, store):
    root = tmp_path / "own"
    fill(root / "train")
    fill(root / "test", count=4)
    data = data_of(root, store)
    assert data.sizes == {"train": 27, "val": 3, "test": 12}
    assert all(name.startswith(b"test/") for name in data._names["test"])
    table = tmp_path / "splits.csv"
    rows = [
        f"train/{label}/{number}.{kind},{split}"
        for label in CLASSES
        for number, kind, split in ((0, "off", "train"), (1, "obj", "train"), (2, "ply", "val"), (3, "stl", "test"))
    ]
    table.write_text("\n".join(["path,split", *rows]))
    named = data_of(root, store, splits=str(table))
    assert named.sizes == {"train": 6, "val": 3, "test": 3}
    assert named.split_hash != data.split_hash
    assert {name.decode() for name in named._names["val"]} == {f"train/{label}/2.ply" for label in CLASSES}


def test_settings_of_the_sampling_have_files_of_their_own(root, store):
    hashes = {
        data_of(root, store, **more).split_hash
        for more in ({}, {"stored": 33}, {"sample_seed": 1}, {"normals": True}, {"split_seed": 1})
    }
    assert len(hashes) == 5
    assert len(list((store / "cloud_folder").glob("*.h5"))) == 4
    assert data_of(root, store).split_hash in hashes


def test_nothing_is_sampled_again_and_a_stop_goes_on(root, store, monkeypatch):
    whole = data_of(root, store).split_hash
    monkeypatch.setattr(meshes, "_sample_shard", lambda *_: pytest.fail("sampled again"))
    assert data_of(root, store).split_hash == whole
    monkeypatch.undo()
    shutil.rmtree(store / "cloud_folder")

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(meshes, "_assemble", stop)
    with pytest.raises(KeyboardInterrupt):
        data_of(root, store)
    monkeypatch.undo()
    monkeypatch.setattr(meshes, "_sample_shard", lambda *_: pytest.fail("sampled again"))
    assert data_of(root, store).split_hash == whole


def test_broken_files_are_named_and_left_out(root, store, capsys):
    (root / "ball" / "cut.stl").write_bytes(b"solid")
    (root / "rod" / "gone.off").symlink_to("nowhere.off")
    data = data_of(root, store)
    said = capsys.readouterr().err
    assert "2 of 32 files left out (ball/cut.stl: no STL file, or cut off; rod/gone.off: " in said
    assert data.facts()["meshes_not_read"] == ["ball/cut.stl", "rod/gone.off"]
    (listed,) = (store / "cloud_folder").glob("*.errors.tsv")
    assert [line.split("\t")[0] for line in listed.read_text().splitlines()] == ["ball/cut.stl", "rod/gone.off"]
    assert sum(data.sizes.values()) == 30


def _unreadable(root):
    for label in CLASSES:
        (root / label).mkdir(parents=True)
        (root / label / "0.off").write_bytes(b"no mesh")


WRONG = {
    "missing": (lambda root: None, "is not there: correct the path"),
    "one class": (lambda root: fill(root, CLASSES[:1]), "has one class only (ball)"),
    "too few": (lambda root: fill(root, count=2), "the class ball has too few samples that can be read"),
    "unreadable": (_unreadable, "none of its 3 files can be used (ball/0.off: no OFF file"),
    "others": (
        lambda root: (root / "ball").mkdir(parents=True),
        "holds no meshes or point clouds in its class folders",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_folders_end_with_one_sentence(tmp_path, store, kind):
    make, words = WRONG[kind]
    make(tmp_path / "own")
    with pytest.raises(RunError) as raised:
        data_of(tmp_path / "own", store)
    assert words in str(raised.value)
    assert f"data.root={tmp_path / 'own'}" in str(raised.value)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"points": 33}, "data.points must lie between 1 and data.stored=32; got 33"),
        ({"sample_seed": -1}, "data.sample_seed must be at least 0"),
        ({"test_share": 0.0}, "data.val_share and data.test_share must be above 0"),
    ],
)
def test_wrong_settings(root, store, option, words):
    with pytest.raises(ValueError, match=words):
        data_of(root, store, **option)


def test_normals_stay_normals_of_the_turned_and_stretched_cloud():
    """Of points of a plane and two directions within it, the cross product tells the normal after any such map."""
    plane = torch.tensor([[0.0, 0, 0], [1, 0, 0.5], [0, 1, -0.25]], dtype=torch.float64)
    normal = torch.linalg.cross(plane[1], plane[2])
    stored = torch.cat([plane, (normal / normal.norm()).expand(3, 3)], dim=1).float().numpy()[None]
    arrays = CloudArrays(
        *(stored, np.zeros((1, 3)), np.ones(1), np.zeros(1)),
        **{"num_points": 3, "draw": "fixed", "normalize": "none", "rotate": 1.0, "stretch": 2.0, "training": True},
    )
    cloud = arrays[[SampleKey(0, 1, 2)]][0][0].double()
    points, normals = cloud[:, :3], cloud[:, 3:]
    assert not torch.allclose(normals[0], torch.from_numpy(stored[0, 0, 3:]).double(), atol=0.05)
    assert torch.allclose(normals.norm(dim=1), torch.ones(3, dtype=torch.float64), atol=1e-6)
    assert (normals @ (points[1:] - points[0]).T).abs().max() < 1e-6


@pytest.mark.parametrize("normals", [False, True])
def test_the_models_width_follows_the_normals(root, tmp_path, normals):
    words = [f"data.root={root}", f"data.normals={str(normals).lower()}", "data.points=16", f"paths.data={tmp_path}"]
    _, module = lightning.build(resolve(compose(["experiment=cloud_folder", *words])))
    assert module.model.num_features == (3 if normals else 0)


def test_the_command_prepares(root, store, capsys):
    assert prepare(["cloud_folder", "--folder", str(store), "--archive", str(root), "--jobs=1"]) == 0
    assert "30 clouds in " in capsys.readouterr().out
    assert prepare(["cloud_folder", "--folder", str(store), "--archive", str(root / "ball")]) == 1
    assert "has no class folders" in capsys.readouterr().err


SMALL = {
    "cloud_folder": ("model.hidden=8", "model.num_heads=2", "model.num_inducing=4"),
    "cloud_folder_pct": (
        *("model.embed_dim=4", "model.num_samples=[12,8]", "model.num_neighbors=4", "model.fuse_dim=16"),
        *("model.head_dims=[16,8]", "model.num_layers=2"),
    ),
}


@pytest.mark.parametrize("experiment", SMALL)
@pytest.mark.parametrize(
    "words",
    [("attention=softmax",), ("attention=sinkhorn", "attention.n_iters=5", "data.normals=true")],
    ids=["softmax", "sinkhorn and normals"],
)
def test_training_by_the_command(root, store, tmp_path, experiment, words):
    words = [
        *(f"experiment={experiment}", f"data.root={root}", *words, *SMALL[experiment], "data.points=16"),
        *("data.stored=32", "trainer.max_epochs=2", "trainer.accelerator=cpu", "logger=none"),
        *(f"paths.data={store}", f"paths.runs={tmp_path / 'runs'}"),
    ]
    run = execute(compose(words), words)
    assert run.result["data"]["classes"] == list(CLASSES)
    again = load_run(run.folder)
    assert again.metrics() == pytest.approx(again.recorded())


def test_every_ending_has_a_reader():
    for suffix in cloud_files.SUFFIXES:
        with pytest.raises(OffError):
            sample_file(b"nothing of that kind", f"a{suffix}", 4, 0)
