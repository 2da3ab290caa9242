"""Dogs vs Cats from archive to batches, on photographs of a few pixels."""

import errno
import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image, ImageCms
from torchvision.transforms import v2

from experiments.config import CONFIGS, compose, resolve
from experiments.data import cats_dogs, photos
from experiments.data.base import SampleKey
from experiments.data.cats_dogs import CatsDogs
from experiments.data.prepare import main as prepare
from experiments.errors import RunError
from experiments.evaluate import load_run
from experiments.runners.classifier import Classifier, RunningMetrics
from experiments.runners.run_dir import run_hash
from experiments.train import execute


def picture(number, kind="JPEG", size=(40, 30), **options):
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def exif_only(number):
    """A JPEG whose first segment is Exif's, without JFIF's, as cameras write them."""
    exif = Image.Exif()
    exif[0x0112] = 6
    whole = picture(number, exif=exif)
    start = whole.index(b"\xff\xe0")
    length = int.from_bytes(whole[start + 2 : start + 4], "big")
    found = whole[:start] + whole[start + 2 + length :]
    assert b"JFIF" not in found
    assert found[2:4] == b"\xff\xe1"
    return found


FAULTY = {
    "cat.900.jpg": picture(900)[:150],
    "cat.901.jpg": b"",
    "cat.902.jpg": picture(902)[:-300],
    "dog.903.jpg": b"<html>not found</html>",
    "Thumbs.db": b"\xd0\xcf\x11\xe0" + bytes(100),
}
ODD = {
    "cat.800.jpg": picture(800, "PNG"),
    "cat.801.jpg": picture(801) + b"junk after the end",
    "dog.802.jpg": exif_only(802),
    "dog.803.jpg": picture(803, "GIF"),
    "dog.804.jpg": picture(804, "BMP"),
}
GOOD = {f"cat.{number}.jpg": picture(number) for number in range(50)}
GOOD |= {f"dog.{number}.jpg": picture(50 + number) for number in range(50)}
FILES = {**GOOD, **ODD, **FAULTY}


@pytest.fixture(scope="module")
def kaggle(tmp_path_factory):
    """Kaggle's archive in small: train.zip and test1.zip within dogs-vs-cats.zip."""
    folder = tmp_path_factory.mktemp("kaggle")
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as zipped:
        for name, content in FILES.items():
            zipped.writestr(f"train/{name}", content)
    test = io.BytesIO()
    with zipfile.ZipFile(test, "w") as zipped:
        zipped.writestr("test1/1.jpg", picture(1))
    path = folder / "dogs-vs-cats.zip"
    with zipfile.ZipFile(path, "w") as zipped:
        zipped.writestr("train.zip", inner.getvalue())
        zipped.writestr("test1.zip", test.getvalue())
        zipped.writestr("sampleSubmission.csv", "id,label\n")
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory, kaggle):
    folder = tmp_path_factory.mktemp("store")
    cats_dogs.prepare(folder, kaggle, jobs=1, quiet=True)
    return folder


def settings(folder, **changes):
    stored = yaml.safe_load((CONFIGS / "data" / "cats_dogs.yaml").read_text())
    small = {"folder": str(folder), "img_size": 16, "test_size": 21, "val_size": 10, "num_workers": 0}
    return {key: value for key, value in stored.items() if key != "_target_"} | small | changes


def batch(data, split="test", keys=None, **options):
    keys = [SampleKey(index, 0, 0) for index in range(data.sizes[split])] if keys is None else keys
    return data.dataset([split], **options)[keys]


def test_faulty_files_are_named_and_left_out_and_odd_ones_kept(store, capsys):
    index = cats_dogs.read_index(store / "cats_dogs")
    assert index.errors == {
        "train/Thumbs.db": "no image, or cut off within its header",
        "train/cat.900.jpg": index.errors["train/cat.900.jpg"],
        "train/cat.901.jpg": "empty",
        "train/cat.902.jpg": index.errors["train/cat.902.jpg"],
        "train/dog.903.jpg": "no image, or cut off within its header",
    }
    assert "truncated" in index.errors["train/cat.902.jpg"]
    assert index.names == sorted({**GOOD, **ODD})
    assert [index.labels[index.names.index(name)] for name in ("cat.0.jpg", "dog.0.jpg", "dog.802.jpg")] == [0, 1, 1]
    lines = (store / "cats_dogs" / "errors.tsv").read_text().splitlines()
    assert lines == [f"{name}\t{reason}" for name, reason in index.errors.items()]
    assert prepare(["cats_dogs", "--folder", str(store)]) == 0
    printed = capsys.readouterr().out
    assert "105 photographs" in printed
    assert "5 files left out:\n  train/Thumbs.db: no image" in printed


def test_the_same_photograph_under_several_names_counts_once(tmp_path, capsys):
    """Otherwise one copy is trained on and another one tested on."""
    source = tmp_path / "source" / "train"
    source.mkdir(parents=True)
    for number in range(12):
        (source / f"cat.{number}.jpg").write_bytes(picture(number % 10))
        (source / f"dog.{number}.jpg").write_bytes(picture(50 + number))
    (source / "dog.3.jpg").write_bytes(picture(5))  # cat.5.jpg as well
    assert prepare(["cats_dogs", "--folder", str(tmp_path), "--archive", str(source.parent), "--jobs=1"]) == 0
    printed = capsys.readouterr().out
    assert "20 photographs in " in printed
    assert "  cat.10.jpg: the same photograph as cat.0.jpg, which counts once" in printed
    assert "  cat.5.jpg: the same photograph is a cat and a dog: cat.5.jpg, dog.3.jpg" in printed
    index = cats_dogs.read_index(tmp_path / "cats_dogs")
    assert sorted(index.errors) == ["cat.10.jpg", "cat.11.jpg", "cat.5.jpg", "dog.3.jpg"]
    assert (index.labels.count(0), index.labels.count(1)) == (9, 11)
    packed = (tmp_path / "cats_dogs" / index.file).read_bytes()
    places = zip(index.offsets, index.lengths, strict=True)
    assert len({packed[offset : offset + length] for offset, length in places}) == 20
    (tmp_path / "cats_dogs" / index.file).write_bytes(packed[:-400])
    assert cats_dogs.read_index(tmp_path / "cats_dogs") is None


GRID = np.add.outer(np.arange(12), 2 * np.arange(10)).astype(np.uint8) * 8
SHAPE = GRID.shape[::-1]


def of_mode(mode):
    """GRID as an image of a mode, by its meaning."""
    grey = Image.fromarray(GRID)
    if mode.startswith("I;16"):
        kind = ">u2" if mode.endswith("B") else "<u2"
        return Image.frombytes(mode, SHAPE, (GRID.astype(kind) * 257).astype(kind).tobytes())
    if mode in ("La", "RGBa", "PA"):
        return grey.convert({"RGBa": "RGBA"}.get(mode, "LA")).convert(mode)
    if mode == "HSV":
        return grey.convert("RGB").convert("HSV")
    if mode == "LAB":
        lab = ImageCms.createProfile("LAB")
        return ImageCms.profileToProfile(grey.convert("RGB"), ImageCms.createProfile("sRGB"), lab, outputMode="LAB")
    return grey.convert(mode)


MODES = ["1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV", "I", "F"]
MODES += ["I;16", "I;16L", "I;16B"]
# Those that lose a little; what a format cuts to a byte when it is written is gone.
LOSSY = {"JPEG": 12, "MPO": 12, "AVIF": 12, "GIF": 6}
LOSSLESS = {"WEBP": {"lossless": True}}
CUT = {"WEBP", "GIF", "AVIF", "SPIDER"}


def written():
    Image.init()
    for mode in MODES:
        for kind in sorted(Image.SAVE):
            file = io.BytesIO()
            try:
                of_mode(mode).save(file, kind, **LOSSLESS.get(kind, {}))
                Image.open(io.BytesIO(file.getvalue())).load()
            except (OSError, ValueError, KeyError, AttributeError, TypeError, NotImplementedError, ImportError):
                continue  # Pillow does not write it, or does not read what it has written
            if not (mode.startswith("I;16") and kind in CUT):
                yield pytest.param(mode, kind, file.getvalue(), id=f"{mode} {kind}")


WRITTEN = list(written())


def test_many_modes_and_formats_are_tried():
    assert {param.values[0] for param in WRITTEN} == {*MODES} - {"La"}  # in which no format can be written
    assert len(WRITTEN) > 100
    assert {("I;16", "PNG"), ("I;16B", "TIFF"), ("F", "TIFF"), ("CMYK", "JPEG")} <= {p.values[:2] for p in WRITTEN}


@pytest.mark.parametrize(("mode", "kind", "content"), WRITTEN)
def test_every_mode_that_pillow_writes_keeps_its_pattern(mode, kind, content):
    image = photos.decode(content)
    assert image.mode == "RGB"
    if image.size != SHAPE:  # ICO may choose another size
        pytest.skip(f"{kind} writes another size")
    expected = np.asarray(of_mode(mode).convert("L") if mode == "1" else Image.fromarray(GRID)).astype(int)
    difference = np.abs(np.asarray(image).astype(int) - expected[..., None]).max()
    assert difference <= (60 if mode == "1" and kind in LOSSY else LOSSY.get(kind, 3))


@pytest.mark.parametrize(
    ("values", "top"),
    [
        (GRID / 255.0, 1.0),
        (GRID * 1.0, 255.0),
        (GRID * 257.0, 65535.0),
        (GRID * 1000.0 - 7.0, None),
        (np.where(GRID == 0, np.nan, GRID * 1.0), 255.0),
    ],
)
def test_fractions_and_numbers_without_a_range(values, top):
    file = io.BytesIO()
    Image.fromarray(values.astype(np.float32)).save(file, "TIFF")
    found = np.asarray(photos.decode(file.getvalue()))[..., 0].astype(int)
    hidden = np.isnan(values)
    expected = values * 255 / top if top else (values - values.min()) * 255 / np.ptp(values)
    assert np.abs(found - np.where(hidden, 255, expected)).max() <= 1


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_turned_upright(kind, orientation):
    """As ImageOps does it by itself: the stored pixels are turned as Exif says."""
    grey = Image.fromarray(GRID)
    turns = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # Image.Transpose by the tag's value
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    grey.save(file, kind, exif=exif, **LOSSLESS.get(kind, {}))
    expected = grey.transpose(Image.Transpose(turns[orientation])) if orientation > 1 else grey
    found = photos.decode(file.getvalue())
    assert found.size == expected.size
    assert np.abs(np.asarray(found)[..., 0].astype(int) - np.asarray(expected)).max() <= LOSSY.get(kind, 0)


def hiding(kind):
    """White paper that hides red: the left half is transparent, or of the colour that is."""
    pixels = np.full((8, 10, 4), (0, 0, 255, 255), dtype=np.uint8)
    pixels[:, :5] = (255, 0, 0, 0)
    rgba = Image.fromarray(pixels)
    file = io.BytesIO()
    if kind == "RGBA":
        rgba.save(file, "PNG")
    elif kind == "premultiplied":
        rgba.convert("RGBa").convert("RGBA").save(file, "TIFF")
    elif kind == "colour key":
        rgba.convert("RGB").save(file, "PNG", transparency=(255, 0, 0))
    elif kind == "palette":
        rgba.convert("RGB").quantize(2).save(file, "PNG", transparency=rgba.convert("RGB").quantize(2).getpixel((0, 0)))
    elif kind == "GIF":
        rgba.convert("RGB").quantize(2).save(file, "GIF", transparency=rgba.convert("RGB").quantize(2).getpixel((0, 0)))
    return file.getvalue()


@pytest.mark.parametrize("kind", ["RGBA", "premultiplied", "colour key", "palette", "GIF"])
def test_hidden_colours_do_not_appear(kind):
    found = np.asarray(photos.decode(hiding(kind)))
    assert (found[:, :5] == (255, 255, 255)).all()
    assert (found[:, 5:] == (0, 0, 255)).all()


def test_half_transparent_pixels_are_mixed_with_white():
    file = io.BytesIO()
    Image.new("LA", (2, 2), (0, 127)).save(file, "PNG")
    assert (np.asarray(photos.decode(file.getvalue())) == 128).all()
    grey = Image.fromarray(GRID.astype(np.uint16) * 257)
    file = io.BytesIO()
    grey.save(file, "PNG", transparency=0)
    found = np.asarray(photos.decode(file.getvalue()))[..., 0]
    assert found[0, 0] == 255
    assert (found[1:] == GRID[1:]).all()


def test_kept_files_are_kept_byte_for_byte(store):
    index = cats_dogs.read_index(store / "cats_dogs")
    packed = (store / "cats_dogs" / index.file).read_bytes()
    for name, offset, length in zip(index.names, index.offsets, index.lengths, strict=True):
        assert packed[offset : offset + length] == FILES[name]


def test_all_layouts_give_the_same_data_and_the_source_stays(tmp_path, kaggle, store):
    expected = cats_dogs.read_index(store / "cats_dogs")
    with zipfile.ZipFile(kaggle) as outer:
        (tmp_path / "train.zip").write_bytes(outer.read("train.zip"))
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(tmp_path / "train.zip") as inner:
        inner.extractall(unpacked)
    before = {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in unpacked.rglob("*")}
    for source in (tmp_path / "train.zip", unpacked, unpacked / "train"):
        report = cats_dogs.prepare(tmp_path / "store", source, jobs=1, quiet=True)
        assert report.content_hash == expected.content_hash
        assert len(report.errors) == 5
    assert before == {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in unpacked.rglob("*")}


def test_microsofts_layout_and_several_processes(tmp_path):
    path = tmp_path / "kagglecatsanddogs.zip"
    with zipfile.ZipFile(path, "w") as zipped:
        for number in range(6):
            zipped.writestr(f"PetImages/Cat/{number}.jpg", picture(number))
            zipped.writestr(f"PetImages/Dog/{number}.jpg", picture(50 + number))
        zipped.writestr("PetImages/Cat/666.jpg", b"")
        zipped.writestr("PetImages/Dog/Thumbs.db", b"none")
        zipped.writestr("readme[1].txt", "read me")
    report = cats_dogs.prepare(tmp_path, path, jobs=2, quiet=True)
    assert report.counts == {"cat": 6, "dog": 6}
    assert report.errors == {
        "PetImages/Cat/666.jpg": "empty",
        "PetImages/Dog/Thumbs.db": "no image, or cut off within its header",
    }
    index = cats_dogs.read_index(tmp_path / "cats_dogs")
    assert index.names == [f"{name}/{number}.jpg" for name in ("Cat", "Dog") for number in range(6)]
    assert index.labels == [0] * 6 + [1] * 6


def test_another_source_takes_the_place_of_the_first(tmp_path):
    for start in (0, 100):
        source = tmp_path / f"source{start}"
        source.mkdir()
        for number in range(4):
            (source / f"cat.{number}.jpg").write_bytes(picture(start + number))
            (source / f"dog.{number}.jpg").write_bytes(picture(start + 50 + number))
        cats_dogs.prepare(tmp_path, source, jobs=1, quiet=True)
        data = CatsDogs(**settings(tmp_path, test_size=2, val_size=2, cache="arrays"))
        batch(data)
    root = tmp_path / "cats_dogs"
    assert [path.name for path in root.glob("photos-*")] == [data.index.file]
    assert [path.name for path in root.glob("pixels-*")] == [f"pixels-16-{data.index.content_hash[:16]}.npy"]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "nowhere.zip", "nowhere.zip is not there"),
        (lambda folder: write(folder / "a.zip", b"PK\x03\x04 broken"), "is damaged, or no folder, zip or tar"),
        (
            lambda folder: one_class(folder / "b.zip"),
            "no photograph of a dog that can be read; expected are train/cat",
        ),
        (lambda folder: with_header(folder / "d.zip", 6, 1), r"d\.zip cannot be read here .*password.* unpack it"),
        (
            lambda folder: with_header(folder / "e.zip", 8, 9),
            r"e\.zip cannot be read here .*compression.* unpack",
        ),
        (lambda folder: damaged_lzma(folder / "f.zip"), r"f\.zip is damaged, or no folder"),
        (lambda folder: nested_and_cut_off(folder / "g.zip"), r"g\.zip: train\.zip is damaged, or no folder"),
        (lambda folder: escaping(folder / "c.zip"), "a path outside of the archive: it is not to be trusted"),
        (lambda folder: None, "Dogs vs Cats needs an account of yours"),
    ],
)
def test_sources_that_are_refused(tmp_path, make, words):
    with pytest.raises(RunError, match=words):
        cats_dogs.prepare(tmp_path / "store", make(tmp_path), jobs=1, quiet=True)
    assert [path.name for path in (tmp_path / "store" / "cats_dogs").iterdir()] == [".lock"]
    assert cats_dogs.read_index(tmp_path / "store" / "cats_dogs") is None
    assert not list((tmp_path / "store" / "cats_dogs").glob("*.bin"))
    with pytest.raises(FileNotFoundError, match=r"prepare cats_dogs --archive FILE.*experiment=cats_dogs_standin"):
        CatsDogs(**settings(tmp_path / "store"))


def test_names_that_cannot_be_printed_are_escaped(tmp_path):
    folder = tmp_path / "train"
    folder.mkdir()
    for number, name in enumerate((b"cat.\xff\xfe.jpg", b"dog.1.jpg")):
        write(Path(os.fsdecode(os.fsencode(folder) + b"/" + name)), picture(number))
    (folder / "dog.\t\x1b[2J\n.jpg").write_bytes(b"")
    report = cats_dogs.prepare(tmp_path, folder, jobs=1, quiet=True)
    assert report.counts == {"cat": 1, "dog": 1}
    assert report.errors == {r"dog.\t\x1b[2J\n.jpg": "empty"}
    assert cats_dogs.read_index(tmp_path / "cats_dogs").names == [r"cat.\udcff\udcfe.jpg", "dog.1.jpg"]


def with_header(path, place, value):
    """An archive whose headers have a value of one byte: flags at 6 (1 says that there is a password), method at 8."""
    one_class(path)
    content = bytearray(path.read_bytes())
    for signature, at in ((b"PK\x03\x04", place), (b"PK\x01\x02", place + 2)):
        content[content.index(signature) + at] = value
    return write(path, content)


def damaged_lzma(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as zipped:
        zipped.writestr("train/cat.0.jpg", picture(0))
    content = bytearray(path.read_bytes())
    content[100:140] = bytes(40)
    return write(path, content)


def nested_and_cut_off(path):
    inner = one_class(path.with_name("inner.zip")).read_bytes()
    with zipfile.ZipFile(path, "w") as zipped:
        zipped.writestr("train.zip", inner[:-80])
    return path


def write(path, content):
    path.write_bytes(content)
    return path


def one_class(path):
    with zipfile.ZipFile(path, "w") as zipped:
        zipped.writestr("train/cat.0.jpg", picture(0))
    return path


def escaping(path):
    with zipfile.ZipFile(path, "w") as zipped:
        zipped.writestr("../train/cat.0.jpg", picture(0))
    return path


def test_a_half_written_file_is_not_taken(tmp_path, kaggle):
    cats_dogs.prepare(tmp_path, kaggle, jobs=1, quiet=True)
    root = tmp_path / "cats_dogs"
    (packed,) = root.glob("photos-*.bin")
    os.truncate(packed, 1000)
    assert cats_dogs.read_index(root) is None
    cats_dogs.prepare(tmp_path, kaggle, jobs=1, quiet=True)
    assert cats_dogs.read_index(root) is not None


def test_splits_are_stratified_and_fractions_nested(store):
    data = {share: CatsDogs(**settings(store, fraction=share)) for share in (0.1, 0.25, 1)}
    assert [each.sizes for each in data.values()] == [
        {"train": size, "val": 10, "test": 21} for size in (round(0.1 * 84), 21, 74)
    ]
    names = [{each.index.names[row] for row in each.rows["train"]} for each in data.values()]
    assert names[0] < names[1] < names[2]
    dogs = [sum(name.startswith("dog") for name in part) / len(part) for part in names]
    assert max(abs(share - 53 / 105) for share in dogs) < 0.08
    assert len({each.split_hash for each in data.values()}) == 3
    assert CatsDogs(**settings(store, fraction=0.25)).split_hash == data[0.25].split_hash
    assert CatsDogs(**settings(store, fraction=0.25, split_seed=1)).split_hash != data[0.25].split_hash
    (folder,) = (store / "cats_dogs").glob("splits-*-seed0-test21-val10")
    lists = {path.stem: path.read_text().split() for path in folder.iterdir()}
    assert set(lists) == {"test", "val", "train_0.01", "train_0.1", "train_0.25", "train_1"}
    assert set(lists["train_0.1"]) == names[0]
    assert lists["train_1"][:21] == lists["train_0.25"]
    assert lists["test"] == [data[1].index.names[row] for row in data[1].rows["test"]]
    assert not set(lists["test"]) & (set(lists["train_1"]) | set(lists["val"]))


def test_evaluation_is_resizing_alone(store):
    data = CatsDogs(**settings(store))
    images, labels = batch(data)
    transform = v2.Compose([v2.Resize((16, 16)), v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)])
    for image, label, row in zip(images, labels, data.rows["test"], strict=True):
        name = data.index.names[row]
        torch.testing.assert_close(image, transform(Image.open(io.BytesIO(FILES[name])).convert("RGB")))
        assert label == name.startswith("dog")
    shifted, _ = batch(CatsDogs(**settings(store, mean=[0.5, 0.4, 0.3], std=[0.5, 0.25, 1.0])))
    expected = (images - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)) / torch.tensor([0.5, 0.25, 1.0]).view(3, 1, 1)
    torch.testing.assert_close(shifted, expected)


def test_kept_arrays_and_decoding_each_time_are_the_same_pixels(store):
    arrays, decoded = (CatsDogs(**settings(store, cache=cache)) for cache in ("arrays", "none"))
    keys = [SampleKey(index, 3, 2) for index in range(5)]
    for options in ({}, {"augment": True}):
        assert torch.equal(batch(arrays, "train", keys, **options)[0], batch(decoded, "train", keys, **options)[0])


@pytest.mark.parametrize(("free", "kept"), [(10**12, True), (1000, False)])
def test_the_choice_of_auto(store, monkeypatch, free, kept):
    monkeypatch.setattr(photos.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free}))
    size = 17 if kept else 18
    pixels = CatsDogs(**settings(store, img_size=size, cache="auto")).dataset(["val"]).pixels
    assert (pixels.file is not None) == kept


def test_an_unreadable_array_is_made_anew(tmp_path, kaggle):
    cats_dogs.prepare(tmp_path, kaggle, jobs=1, quiet=True)
    first, _ = batch(CatsDogs(**settings(tmp_path, cache="arrays")))
    (path,) = (tmp_path / "cats_dogs").glob("pixels-16-*.npy")
    os.truncate(path, path.stat().st_size // 2)
    again, _ = batch(CatsDogs(**settings(tmp_path, cache="arrays")))
    assert torch.equal(first, again)


def test_pixels_on_a_full_disk_are_told_in_one_sentence(tmp_path, kaggle, monkeypatch):
    cats_dogs.prepare(tmp_path, kaggle, jobs=1, quiet=True)

    def full(descriptor, offset, length):
        assert (offset, length) == (0, 105 * 16 * 16 * 3)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(photos.os, "posix_fallocate", full)
    with pytest.raises(RunError, match=r"the disk is full.*data\.cache=none"):
        CatsDogs(**settings(tmp_path, cache="arrays")).dataset(["val"])
    assert not list((tmp_path / "cats_dogs").glob("*pixels*.tmp"))


def test_crops_follow_from_seed_epoch_and_sample_alone(store):
    data = CatsDogs(**settings(store))
    keys = [SampleKey(index, 5, 1) for index in range(8)]
    before = torch.get_rng_state()
    images, _ = batch(data, "train", keys, augment=True)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(batch(data, "train", keys[::-1], augment=True)[0], images.flip(0))
    for other in (SampleKey(0, 5, 2), SampleKey(0, 6, 1)):
        assert not torch.equal(batch(data, "train", [other], augment=True)[0][0], images[0])
    plain, _ = batch(data, "train", keys)
    assert not torch.equal(plain, images)
    whole = CatsDogs(**settings(store, crop_scale=[1.0, 1.0]))
    images, _ = batch(whole, "train", keys, augment=True)
    flips = [torch.equal(a, b.flip(-1)) for a, b in zip(images, plain, strict=True)]
    same = [torch.equal(a, b) for a, b in zip(images, plain, strict=True)]
    assert any(flips)
    assert any(same)
    off = CatsDogs(**settings(store, crop_scale=None))
    assert torch.equal(batch(off, "train", keys, augment=True)[0], plain)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fraction": 0}, r"data\.fraction must be above 0"),
        ({"cache": "ram"}, r"data\.cache must be one of auto, arrays, none; got 'ram'"),
        ({"crop_scale": [0.5, 0.2]}, r"data\.crop_scale must be two shares"),
        ({"crop_scale": None, "eval_crops": True}, r"eval_crops=true needs data\.crop_scale"),
        ({"std": [1, 0, 1]}, r"data\.mean and data\.std need three entries"),
        ({"img_size": 0}, r"data\.img_size must be at least 1"),
        ({"test_size": 200}, "nothing is left to train on"),
    ],
)
def test_bad_settings(store, changes, words):
    with pytest.raises(ValueError, match=words):
        CatsDogs(**settings(store, **changes))


def test_means_over_batches_count_the_last_one_as_much():
    by_sample, by_batch = RunningMetrics(2), RunningMetrics(2, "batches")
    for count, right in ((4, 4), (1, 0)):
        logits = torch.tensor([[1.0, 0.0]]).repeat(count, 1)
        labels = torch.zeros(count, dtype=torch.int64) if right else torch.ones(count, dtype=torch.int64)
        for metrics in (by_sample, by_batch):
            metrics.update(logits, labels, torch.full((count,), float(count)), count)
    assert by_sample.values() == {"loss": 3.4, "accuracy": 0.8}
    assert by_batch.values() == {"loss": 2.5, "accuracy": 0.5}


SMALL = (
    *("model.img_size=16", "model.patch_size=8", "+model.embed_dim=16", "+model.depth=1", "+model.num_heads=1"),
    *("data.test_size=21", "data.num_workers=0", "data.batch_size=32", "trainer.max_epochs=2"),
    *("trainer.accelerator=cpu", "trainer.threads=1", "logger=none"),
)


@pytest.fixture
def train(store, tmp_path):
    def start(experiment, *more, runs="runs"):
        words = [f"experiment={experiment}", *SMALL, f"paths.data={store}", f"paths.runs={tmp_path / runs}", *more]
        return execute(compose(words), words)

    return start


def test_the_experiment_trains_and_evaluates_again(train):
    outcome = train("cats_dogs_vit", "attention=sinkhorn", "data.val_size=10", "data.fraction=0.25")
    assert outcome.result["data"]["sizes"] == {"train": 21, "val": 10, "test": 21}
    assert outcome.result["data"]["fraction"] == 0.25
    assert len(outcome.result["data"]["files_left_out"]) == 5
    run = load_run(outcome.folder)
    assert run.metrics("test") == run.recorded("test")


def test_the_published_protocol_repeats_and_evaluates_again(train):
    first, second = (train("cats_dogs_vit_official", "attention=softmax", runs=name) for name in ("a", "b"))
    assert (first.folder / "metrics.jsonl").read_bytes() == (second.folder / "metrics.jsonl").read_bytes()
    assert first.result["selected_on"] == "test"
    assert first.result["data"]["sizes"] == {"train": 84, "val": 0, "test": 21}
    rows = [json.loads(line) for line in (first.folder / "metrics.jsonl").read_text().splitlines()]
    assert len({row["loss"] for row in rows if row["split"] == "test"}) == 2
    for at in ("best", "last"):
        run = load_run(first.folder, at=at)
        assert run.metrics("test") == run.recorded("test")


def test_the_published_protocol_goes_on_with_the_same_crops(train, monkeypatch):
    """Stopped in its second epoch: evaluation draws what it would have drawn."""
    whole = train("cats_dogs_vit_official", "attention=softmax", runs="whole")
    original = Classifier.training_step

    def stop(self, batch, batch_idx):
        if self.global_step == 4:
            raise KeyboardInterrupt
        return original(self, batch, batch_idx)

    monkeypatch.setattr(Classifier, "training_step", stop)
    with pytest.raises(SystemExit):
        train("cats_dogs_vit_official", "attention=softmax", runs="stopped")
    monkeypatch.undo()
    again = train("cats_dogs_vit_official", "attention=softmax", runs="stopped")
    assert (again.folder / "metrics.jsonl").read_bytes() == (whole.folder / "metrics.jsonl").read_bytes()


def test_settings_of_the_experiments(store):
    def config(experiment, *more):
        return resolve(compose([f"experiment={experiment}", f"paths.data={store}", *more]))

    vit, official, paper = (config(name) for name in ("cats_dogs_vit", "cats_dogs_vit_official", "cats_dogs_vit_paper"))
    assert (vit["optimizer"]["lr"], official["optimizer"]["lr"], paper["optimizer"]["lr"]) == (3e-5, 3e-5, 5e-5)
    assert vit["scheduler"]["milestones"] == [250]
    assert (vit["trainer"]["max_epochs"], vit["data"]["batch_size"]) == (300, 64)
    assert vit["data"]["mean"] == [0, 0, 0]
    assert (vit["protocol"]["select_on"], vit["data"]["eval_crops"], vit["protocol"]["mean_over"]) == (
        "val",
        False,
        "samples",
    )
    assert (official["protocol"]["select_on"], official["data"]["eval_crops"], official["protocol"]["mean_over"]) == (
        "test",
        True,
        "batches",
    )
    assert run_hash(config("cats_dogs_vit", "data.cache=none", "data.num_workers=9")) == run_hash(vit)
