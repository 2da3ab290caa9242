import numpy as np
import pytest
import torch

from experiments.data.base import SampleKey
from experiments.data.clouds import CloudArrays, normalize_cloud
from experiments.data.modelnet40 import ModelNet40
from experiments.data.shapes import Shapes

OPTIONS = {
    "train_per_class": 4,
    "test_per_class": 2,
    "shape_seed": 0,
    "val_size": 14,
    "split_seed": 0,
    "num_points": 64,
    "draw": "fresh",
    "normalize": "standard",
    "rotate": 0.0,
    "stretch": 1.0,
    "jitter": 0.0,
    "batch_size": 8,
    "eval_batch_size": 16,
    "num_workers": 0,
    "train_on": ["train"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def shapes(folder, **options):
    return Shapes(str(folder), **{**OPTIONS, **options})


def arrays(training=True, clouds=3, stored=200, **options):
    rng = np.random.default_rng(0)
    return CloudArrays(
        rng.normal(size=(clouds, stored, 3)).astype(np.float32),
        rng.normal(size=(clouds, 3)) * 5,
        rng.uniform(1, 9, clouds),
        np.arange(clouds),
        **{"num_points": 50, "normalize": "none", "training": training, **options},
    )


def cloud(dataset, sample=0, seed=0, epoch=0):
    return dataset[[SampleKey(sample, seed, epoch)]][0][0]


def chosen(dataset, *key):
    """Which of the stored points a cloud without normalisation consists of."""
    points, stored = cloud(dataset, *key), dataset.points[key[0]]
    return [int((stored == point).all(1).nonzero().item()) for point in points]


def test_standard_normalisation_is_the_published_one():
    rng = np.random.default_rng(0)
    points = rng.normal(size=(500, 3)) * [1, 2, 3] + [5, 0, -1]
    points[7] = [3e5, 0, 0]
    limit = 100 * np.abs(points).mean()
    clipped = np.clip(points, -limit, limit)
    expected = (clipped - clipped.mean()) / clipped.std()
    got = normalize_cloud(torch.from_numpy(points), "standard").numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-12)
    assert np.abs(got[7, 0]) > 10
    assert abs(got[:, 0].mean()) > 0.01  # one mean for all axes together


def test_unit_sphere_normalisation():
    points = normalize_cloud(torch.randn(100, 3, dtype=torch.float64) * 7 + 3, "unit_sphere")
    assert points.mean(0).abs().max() < 1e-12
    assert points.norm(dim=1).max() == pytest.approx(1)


@pytest.mark.parametrize("how", ["standard", "unit_sphere", "none"])
def test_a_cloud_of_a_single_place_stays_finite(how):
    assert normalize_cloud(torch.full((10, 3), 4.0, dtype=torch.float64), how).isfinite().all()


def test_normalisation_starts_from_the_meshes_coordinates():
    dataset = arrays(normalize="standard", training=False)
    raw = dataset.points[1][:50].double() * dataset.scale[1] + dataset.center[1]
    torch.testing.assert_close(cloud(dataset, 1), normalize_cloud(raw, "standard").float())
    off_center = cloud(dataset, 1).mean(0)
    assert off_center.abs().max() > 0.05  # as published, a mesh's place is not wholly removed


def test_fixed_points_are_the_runs_and_fresh_ones_the_epochs():
    fixed, fresh = arrays(draw="fixed"), arrays(draw="fresh")
    assert chosen(fixed, 0, 3, 0) == chosen(fixed, 1, 3, 0) == chosen(fixed, 2, 3, 9)
    assert chosen(fixed, 0, 3, 0) != chosen(fixed, 0, 4, 0)
    assert chosen(fresh, 0, 3, 1) == chosen(fresh, 0, 3, 1)
    assert len({tuple(chosen(fresh, *key)) for key in [(0, 3, 1), (0, 3, 2), (1, 3, 1), (0, 4, 1)]}) == 4
    for dataset in (fixed, fresh):
        assert len(set(chosen(dataset, 0, 0, 0))) == 50


def test_evaluation_takes_the_first_points_and_augments_nothing():
    dataset = arrays(training=False, rotate=0.5, stretch=2.0, jitter=0.1, draw="fresh")
    assert chosen(dataset, 0, 0, 0) == chosen(dataset, 0, 5, 9) == list(range(50))


def test_rotation_is_about_z_and_within_its_range():
    plain, turned = arrays(), arrays(rotate=0.1)
    angles = []
    for epoch in range(200):
        before, after = cloud(plain, 0, 0, epoch).double(), cloud(turned, 0, 0, epoch).double()
        torch.testing.assert_close(after[:, 2], before[:, 2])
        torch.testing.assert_close(after[:, :2].norm(dim=1), before[:, :2].norm(dim=1), rtol=1e-5, atol=1e-5)
        turn = torch.view_as_complex(after[:, :2].contiguous()) / torch.view_as_complex(before[:, :2].contiguous())
        angles.append(turn[0].angle().item() / np.pi)
    assert np.abs(angles).max() <= 0.1 + 1e-5
    assert min(angles) < -0.08
    assert max(angles) > 0.08


def test_stretch_is_by_axis_and_within_its_range():
    plain, stretched = arrays(), arrays(stretch=1.25)
    factors = []
    for epoch in range(200):
        ratio = cloud(stretched, 0, 0, epoch) / cloud(plain, 0, 0, epoch)
        torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-4, atol=1e-4)
        factors.append(ratio[0])
    factors = torch.stack(factors)
    assert factors.min() >= 0.8 - 1e-4
    assert factors.max() <= 1.25 + 1e-4
    assert (factors.min(0).values < 0.83).all()
    assert (factors.max(0).values > 1.22).all()
    assert np.abs(np.corrcoef(factors.T.numpy())[np.triu_indices(3, 1)]).max() < 0.3


def test_jitter_has_its_standard_deviation():
    noise = cloud(arrays(jitter=0.02, num_points=200)) - cloud(arrays(num_points=200))
    assert noise.std().item() == pytest.approx(0.02, rel=0.15)


def test_augmentation_is_decided_by_seed_epoch_and_sample():
    dataset = arrays(rotate=0.1, stretch=1.25, jitter=0.01)
    assert torch.equal(cloud(dataset, 1, 2, 3), cloud(dataset, 1, 2, 3))
    others = [cloud(dataset, *key) for key in [(1, 2, 4), (1, 3, 3)]]
    assert all(not torch.allclose(cloud(dataset, 1, 2, 3), other) for other in others)


def test_batches_of_shapes(folder):
    data = shapes(folder, rotate=0.1, jitter=0.01)
    assert data.num_classes == 14
    assert data.sizes == {"train": 42, "val": 14, "test": 28}
    points, labels = next(iter(data.train_loader(seed=0)))
    assert points.shape == (8, 64, 3)
    assert points.dtype == torch.float32
    assert labels.shape == (8,)
    for split, per_class in (("val", 1), ("test", 2)):
        counts = torch.cat([labels for _, labels in data.eval_loader(split)]).bincount(minlength=14)
        assert counts.tolist() == [per_class] * 14


def test_splits_do_not_overlap_and_are_hashed(folder):
    data = shapes(folder)
    names = {split: set(data._names[split].tolist()) for split in ("train", "val", "test")}
    assert len(set.union(*names.values())) == 14 * 6
    assert shapes(folder, num_points=32, normalize="none").split_hash == data.split_hash
    others = [shapes(folder, split_seed=1), shapes(folder, val_size=28), shapes(folder, shape_seed=1)]
    assert len({data.split_hash, *(other.split_hash for other in others)}) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_points": 4096}, r"data\.num_points must lie between 1 and the 2,048 points prepared in .* got 4096"),
        ({"num_points": 0}, r"data\.num_points"),
        ({"draw": "none"}, r"data\.draw must be one of fixed, fresh; got 'none'"),
        ({"normalize": "sphere"}, r"data\.normalize must be one of standard, unit_sphere, none"),
        ({"stretch": 0.8}, r"data\.stretch at least 1; got 0\.0, 0\.0 and 0\.8"),
        ({"val_size": 56}, "nothing is left to train on"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, message, folder):
    with pytest.raises(ValueError, match=message):
        shapes(folder, **options)


def test_modelnet40_says_how_to_prepare_it(tmp_path):
    options = {name: value for name, value in OPTIONS.items() if not name.endswith("_class") and name != "shape_seed"}
    with pytest.raises(FileNotFoundError, match=r"clouds\.h5 is not there.*experiments\.data\.prepare modelnet40"):
        ModelNet40(str(tmp_path), **options)
