import zipfile

import h5py
import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from experiments.data import shapes
from experiments.data.meshes import list_meshes, read_report


@pytest.mark.parametrize("label", shapes.SHAPES)
def test_every_class_gives_proper_meshes_that_differ(label):
    meshes = [shapes.build(label, number) for number in range(12)]
    for mesh in meshes:
        assert np.isfinite(mesh.vertices).all()
        assert (mesh.area_faces > 0).all()
        assert mesh.faces.max() < len(mesh.vertices)
    extents = {tuple(np.ptp(mesh.vertices, axis=0).round(6)) for mesh in meshes}
    assert len(extents) == 12


def test_a_shape_is_decided_by_class_number_and_seed():
    first = shapes.build("chair", 3)
    assert np.array_equal(shapes.build("chair", 3).vertices, first.vertices)
    for other in (shapes.build("chair", 3, seed=1), shapes.build("chair", 4), shapes.build("table", 3)):
        assert other.vertices.shape != first.vertices.shape or not np.allclose(other.vertices, first.vertices)


def test_parts_stand_as_their_class_says():
    """The ball's centre against the ring's, in units of the ring's radius, before the deformations."""
    for label, inside in (("ball_in_ring", True), ("ball_beside_ring", False), ("ball_above_ring", False)):
        for number in range(10):
            ring, ball = shapes.SHAPES[label](np.random.default_rng(number))
            gap = np.linalg.norm(ball.bounds.mean(0) - ring.bounds.mean(0))
            assert (gap < 1e-6) == inside
    for number in range(10):
        rng = np.random.default_rng(number)
        assert shapes.SHAPES["table"](rng)[1].bounds[1, 2] <= 1e-9  # legs hang from the plate
        assert shapes.SHAPES["table_upside_down"](rng)[1].bounds[0, 2] >= -1e-9
        assert shapes.SHAPES["chair"](rng)[-1].bounds[0, 2] >= -1e-9
        assert shapes.SHAPES["table_with_curtain"](rng)[-1].bounds[1, 2] <= 1e-9


def test_the_archive_has_modelnets_layout_and_the_same_bytes_again(tmp_path):
    for name in ("a.zip", "b.zip"):
        shapes.write_archive(tmp_path / name, train=2, test=1, seed=5)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    found = list_meshes(tmp_path / "a.zip")
    assert len(found) == 3 * len(shapes.SHAPES)
    assert {mesh.label for mesh in found} == set(shapes.SHAPES)
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        text = archive.read("shapes/mug/test/mug_0003.off").decode()
    assert text.startswith("OFF")


def test_prepared_clouds_come_through_the_reader(tmp_path):
    report = shapes.prepare(tmp_path, train=3, test=2, jobs=1, num_points=50, quiet=True)
    assert report.counts == {"train": 3 * len(shapes.SHAPES), "test": 2 * len(shapes.SHAPES)}
    assert report.classes == sorted(shapes.SHAPES)
    assert not report.errors
    assert not report.remarks
    path = shapes.clouds_path(tmp_path, 3, 2, 0)
    assert read_report(path)[1] == report
    with h5py.File(path) as file:
        radius = np.linalg.norm(file["train/points"][()], axis=-1)
    assert radius.max() <= 1 + 1e-6
    assert shapes.prepare(tmp_path, train=3, test=2, jobs=1, num_points=50, quiet=True) == report
    assert shapes.prepare(tmp_path, train=3, test=2, seed=1, jobs=1, num_points=50, quiet=True) != report


def test_splits_need_a_shape_of_every_class(tmp_path):
    with pytest.raises(ValueError, match="at least 1 training and 1 test shape per class, got 3 and 0"):
        shapes.prepare(tmp_path, train=3, test=0)


def test_extents_and_moments_do_not_tell_the_classes_apart():
    """A linear classifier on extents, covariances and their eigenvalues stays well below perfect."""
    clouds, labels = [], []
    for label, name in enumerate(shapes.SHAPES):
        for number in range(60):
            vertices = shapes.build(name, number).triangles_center
            vertices = vertices - vertices.mean(0)
            clouds.append(vertices / np.abs(vertices).max())
            labels.append(label)
    covariance = np.stack([cloud.T @ cloud / len(cloud) for cloud in clouds])
    features = np.concatenate(
        [
            np.stack([np.ptp(cloud, axis=0) for cloud in clouds]),
            covariance[:, *np.triu_indices(3)],
            np.linalg.eigvalsh(covariance),
        ],
        axis=1,
    )
    labels, test = np.array(labels), np.arange(len(labels)) % 3 == 0
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000)).fit(features[~test], labels[~test])
    assert 0.2 < model.score(features[test], labels[test]) < 0.75
