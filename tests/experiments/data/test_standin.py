"""The stand-in for Cats and Dogs, and nested fractions."""

import gzip
import struct

import numpy as np
import pytest

from experiments.config import compose, resolve
from experiments.data import fashion, standin
from experiments.data.base import SampleKey
from experiments.data.fractions import nested_order, subset_size
from experiments.data.standin import StandIn

OPTIONS = {
    "size": None,
    "val_share": 0.15,
    "test_share": 0.25,
    "fraction": 1.0,
    "split_seed": 0,
    "mean": 0.0,
    "std": 1.0,
    "max_shift": 0,
    "batch_size": 64,
    "eval_batch_size": 100,
    "num_workers": 0,
    "train_on": ["train"],
}


@pytest.fixture
def debian(tmp_path, monkeypatch):
    """The package's four files in small: 60 and 20 images, each of its index's grey, of classes 0, 1, ..., 9, 0, ..."""
    monkeypatch.setattr(fashion, "FOLDER", tmp_path / "package")
    monkeypatch.setattr(standin, "FASHION_PARTS", {"train": 60, "t10k": 20})
    fashion.FOLDER.mkdir()
    for part, count in (("train", 60), ("t10k", 20)):
        images = np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None], (count, 28, 28))
        labels = (np.arange(count) % 10).astype(np.uint8)
        header = struct.pack(">IIII", 2051, count, 28, 28)
        (fashion.FOLDER / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes()))
        header = struct.pack(">II", 2049, count)
        (fashion.FOLDER / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(header + labels.tobytes()))
    return fashion.FOLDER


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "store"
    path.mkdir()
    return str(path)


def test_every_beginning_of_the_order_is_stratified():
    labels = np.array([0] * 60 + [1] * 30 + [2] * 10)
    order = nested_order(labels, 3)
    assert sorted(order) == list(range(100))
    for size in (1, 7, 10, 33, 50, 100):
        counts = np.bincount(labels[order[:size]], minlength=3)
        assert np.abs(counts - size * np.array([0.6, 0.3, 0.1])).max() <= 1
    assert not np.array_equal(order, nested_order(labels, 4))
    assert np.array_equal(order, nested_order(labels, 3))


@pytest.mark.parametrize("fraction", [0, -0.1, 1.5, 1e-6])
def test_bad_fractions(fraction):
    with pytest.raises(ValueError, match=r"data\.fraction"):
        subset_size(fraction, 600)


def test_digits_4_and_9(folder):
    data = StandIn(folder, "mnist5k", **OPTIONS)
    assert data.num_classes == 2
    assert data.sizes == {"train": 600, "val": 150, "test": 250}
    assert {split: labels.tolist().count(0) for split, labels in data.labels.items()} == {
        "train": 300,
        "val": 75,
        "test": 125,
    }
    assert "stand-in, not cats and dogs" in data.facts()["content"]


def test_fractions_lie_within_one_another_and_leave_the_rest_alone(folder):
    parts = {fraction: StandIn(folder, "mnist5k", **{**OPTIONS, "fraction": fraction}) for fraction in (0.01, 0.1, 1)}
    assert [data.sizes["train"] for data in parts.values()] == [6, 60, 600]
    images = [{image.tobytes() for image in data.images["train"]} for data in parts.values()]
    assert images[0] < images[1] < images[2]
    assert len({data.images["test"].tobytes() for data in parts.values()}) == 1
    assert len({data.split_hash for data in parts.values()}) == 3


def test_tshirts_and_shirts(debian, folder):
    data = StandIn(folder, "fashion_mnist", **OPTIONS)
    # Classes 0 and 6 of both parts: 6 + 2 of each.
    assert sum(data.sizes.values()) == 16
    pair = standin.load_pair(folder, "fashion_mnist")
    assert pair["labels"].tolist() == [0, 1] * 8
    assert pair["images"][:, 5, 5].tolist() == [index for index in [*range(60), *range(20)] if index % 10 in (0, 6)]
    images, labels = data.dataset(["test"])[[SampleKey(0, 0, 0)]]
    assert images.shape == (1, 1, 28, 28)
    assert labels.tolist() == [data.labels["test"][0]]


def test_size_takes_a_stratified_choice(debian, folder):
    data = StandIn(folder, "fashion_mnist", **{**OPTIONS, "size": 8, "val_share": 0.25})
    assert data.sizes == {"train": 4, "val": 2, "test": 2}
    assert all(labels.mean() == 0.5 for labels in data.labels.values())


def test_the_source_follows_the_machine_and_stands_in_the_configuration(debian):
    overrides = ["experiment=cats_dogs_standin"]
    config = resolve(compose(overrides))
    assert config["data"]["source"] == "fashion_mnist"
    assert config["label"].startswith("fashion_mnist-softmax")
    (debian / fashion.FILES[2]).unlink()
    assert resolve(compose(overrides))["data"]["source"] == "mnist5k"


def test_a_missing_and_a_damaged_package(debian, folder):
    path = debian / fashion.FILES[0]
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz is damaged.*reinstall dataset-fashion-mnist"):
        StandIn(folder, "fashion_mnist", **OPTIONS)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"train-images.* not found in .*apt-get install dataset-fashion-mnist"):
        StandIn(folder, "fashion_mnist", **OPTIONS)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"source": "cifar"}, "data.source must be one of fashion_mnist, mnist5k; got 'cifar'"),
        ({"val_share": 0.8}, "leave nothing to train on"),
    ],
)
def test_bad_settings(folder, options, words):
    with pytest.raises(ValueError, match=words):
        StandIn(**{"folder": folder, "source": "mnist5k", **OPTIONS, **options})
