"""Images of one's own: class folders of every kind, good ones to batches, wrong ones to a sentence."""

import io
import os
import shutil

import numpy as np
import pytest
import yaml
from PIL import Image

from experiments.config import CONFIGS, compose
from experiments.data import image_folder
from experiments.data.base import SampleKey
from experiments.data.image_folder import ImageFolder
from experiments.data.prepare import main as prepare
from experiments.errors import RunError
from experiments.evaluate import load_run
from experiments.train import execute

CLASSES = ("ant", "bee", "cat fish")


def picture(number, kind="PNG"):
    pixels = np.random.default_rng(number).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def fill(folder, classes=CLASSES, count=10, first=0):
    """Class folders of different images; the last of each lies in a folder within its class's."""
    for row, label in enumerate(classes):
        for number in range(count):
            path = folder / label / ("inner" if number == count - 1 else "") / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(first + 1000 * row + number))
    return folder


@pytest.fixture
def root(tmp_path):
    return fill(tmp_path / "own")


@pytest.fixture
def store(tmp_path):
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def data_of(own, store, **changes):
    options = yaml.safe_load((CONFIGS / "data" / "image_folder.yaml").read_text())
    del options["_target_"]
    options |= {"folder": str(store), "root": str(own), "img_size": 8, "num_workers": 0}
    return ImageFolder(**options | changes)


def names_in(data, split):
    return [data.index.names[row] for row in data.rows[split]]


def test_flat_class_folders(root, store):
    data = data_of(root, store)
    assert data.classes == CLASSES
    assert data.num_classes == 3
    assert data.sizes == {"train": 21, "val": 3, "test": 6}
    assert sorted(name for split in data.rows for name in names_in(data, split)) == sorted(
        path.relative_to(root).as_posix() for path in root.rglob("*.png")
    )
    for split, per_class in (("train", 7), ("val", 1), ("test", 2)):
        assert np.bincount(data.labels[data.rows[split]]).tolist() == [per_class] * 3


def test_batches_hold_the_pixels_of_the_files(root, store):
    data = data_of(root, store, mean=[0.5, 0.25, 0.0], std=[0.5, 1.0, 2.0])
    images, labels = data.dataset(["test"])[[SampleKey(0, 0, 0), SampleKey(5, 0, 0)]]
    assert images.shape == (2, 3, 8, 8)
    assert labels.tolist() == [0, 2]
    with Image.open(root / names_in(data, "test")[5]) as image:
        expected = np.asarray(image.resize((8, 8), Image.Resampling.BILINEAR)) / 255
    shown = images[1].permute(1, 2, 0).numpy() * [0.5, 1.0, 2.0] + [0.5, 0.25, 0.0]
    np.testing.assert_allclose(shown, expected, atol=1.5 / 255)
    training = data.dataset(["test"], augment=True)
    assert not training[[SampleKey(5, 0, 0)]][0].equal(images[1:])
    assert training[[SampleKey(5, 0, 0)]][0].equal(training[[SampleKey(5, 0, 0)]][0])


def test_the_split_follows_its_seed_and_a_class_does_not_change_anothers(root, store):
    first, again, other = (data_of(root, store, split_seed=seed) for seed in (0, 0, 1))
    assert first.split_hash == again.split_hash != other.split_hash
    fill(root, ("dog",), first=9000)
    more = data_of(root, store)
    assert [name for name in names_in(more, "test") if not name.startswith("dog")] == names_in(first, "test")


def test_split_folders_and_what_is_missing_of_them(tmp_path, store):
    root = tmp_path / "own"
    fill(root / "train")
    fill(root / "valid", count=3, first=100)
    data = data_of(root, store)
    assert data.sizes == {"train": 24, "val": 9, "test": 6}  # a fifth of those to train on
    assert all(name.startswith("valid/") for name in names_in(data, "val"))
    assert all(name.startswith("train/") for name in names_in(data, "test"))
    fill(root / "test", count=4, first=200)
    assert data_of(root, store).sizes == {"train": 30, "val": 9, "test": 12}


def test_a_class_called_train_is_a_class(tmp_path, store):
    assert data_of(fill(tmp_path / "own", ("bus", "train")), store).classes == ("bus", "train")


def table(path, rows):
    path.write_text("path,split\n" + "".join(f"{name},{split}\n" for name, split in rows), encoding="utf-8")
    return str(path)


def test_a_table_of_splits(root, store, tmp_path):
    places = {0: "train", 1: "train", 2: "val", 3: "test"}
    rows = [(f"{label}/{number}.png", split) for label in CLASSES for number, split in places.items()]
    data = data_of(root, store, splits=table(tmp_path / "splits.csv", rows))
    assert {(name, split) for split in data.rows for name in names_in(data, split)} == set(rows)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], "has no rows"),
        ([("ant/0.png", "dev")], "row 2: the split must be train, val or test; got 'dev'"),
        ([("ant/x.png", "train")], "row 2: 'ant/x.png' is no file of data.root"),
        ([("ant/0.png", "train"), ("ant/0.png", "test")], "row 3: ant/0.png is in train already"),
        ([("ant/0.png", "test")], "has no file to train on"),
    ],
)
def test_wrong_tables(root, store, tmp_path, rows, words):
    with pytest.raises(RunError, match=words):
        data_of(root, store, splits=table(tmp_path / "splits.csv", rows))


def test_a_table_that_is_not_there(root, store):
    with pytest.raises(RunError, match=r"data\.splits=nowhere\.csv cannot be read"):
        data_of(root, store, splits="nowhere.csv")


def test_broken_files_are_named_and_left_out(root, store, capsys):
    (root / "ant" / "cut.jpg").write_bytes(picture(1, "JPEG")[:-200])
    (root / "bee" / "empty.png").write_bytes(b"")
    (root / "bee" / "gone.png").symlink_to("nowhere.png")
    (root / "bee" / "copy.png").write_bytes(picture(1000))
    (root / "ant" / ".hidden.png").write_bytes(b"no image")
    (root / "ant" / "notes.txt").write_text("no image")
    data = data_of(root, store)
    said = capsys.readouterr().err
    assert "4 of 34 files left out (ant/cut.jpg: " in said
    assert said.count("\n") == 1
    table = dict(line.split("\t") for line in (data.place / "errors.tsv").read_text().splitlines())
    assert table["bee/empty.png"] == "empty"
    assert table["bee/gone.png"].startswith("cannot be read: No such file")
    # By name "0.png" comes before "copy.png".
    assert table["bee/copy.png"] == "the same photograph as bee/0.png, which counts once"
    assert (
        data.facts()["files_left_out"]
        == sorted(table)
        == ["ant/cut.jpg", "bee/copy.png", "bee/empty.png", "bee/gone.png"]
    )
    assert sum(data.sizes.values()) == 30


def test_one_image_of_two_classes_is_in_neither(root, store):
    (root / "bee" / "0.png").write_bytes((root / "ant" / "0.png").read_bytes())
    data = data_of(root, store)
    assert set(data.index.errors) == {"ant/0.png", "bee/0.png"}


def test_nothing_is_decoded_again(root, store, tmp_path, monkeypatch):
    first = data_of(root, store)
    monkeypatch.setattr(image_folder, "_examine", lambda *_: pytest.fail("decoded again"))
    assert data_of(root, store).split_hash == first.split_hash
    monkeypatch.undo()
    shutil.copytree(root, tmp_path / "copy")  # other times, the same content: read again, kept once
    assert data_of(tmp_path / "copy", store).split_hash == first.split_hash
    assert len(list((store / "image_folder").glob("*/photos-*.bin"))) == 1
    (root / "ant" / "0.png").write_bytes(picture(77))
    assert data_of(root, store).split_hash != first.split_hash


def test_a_stopped_preparation_leaves_nothing_that_counts(root, store, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(image_folder, "write_json", stop)
    with pytest.raises(KeyboardInterrupt):
        data_of(root, store)
    monkeypatch.undo()
    data = data_of(root, store)
    (data.place / data.index.file).write_bytes(b"half")  # as a damaged disk leaves it
    assert data_of(root, store).dataset(["test"])[[SampleKey(0, 0, 0)]][0].shape == (1, 3, 8, 8)


def _loop(root):
    fill(root)
    (root / "ant" / "again").symlink_to(root)


def _odd(root):
    fill(root)
    (root / "ant" / os.fsdecode(b"caf\xe9.png")).write_bytes(picture(1))


def _differing(root):
    fill(root / "train")
    fill(root / "test", CLASSES[:2])


def _unreadable(root):
    for label in CLASSES:
        (root / label).mkdir(parents=True)
        (root / label / "0.png").write_bytes(b"no image")


def _beside(root):
    fill(root / "train")
    fill(root / "val")
    (root / "extra").mkdir()


def _empty_class(root):
    fill(root)
    (root / "wasp").mkdir()


def _only_files(root):
    root.mkdir()
    (root / "0.png").write_bytes(picture(0))


def _other_files(root):
    for label in CLASSES:
        (root / label).mkdir(parents=True)
        (root / label / "notes.txt").write_text("no image")


def _line_break(root):
    fill(root)
    (root / "a\nb").mkdir()


WRONG = {
    "missing": (lambda root: None, "is not there: correct the path"),
    "file": (lambda root: root.write_text("x"), "is a file: give the folder with the class folders"),
    "empty": (lambda root: root.mkdir(), "is empty: put images into it as FOLDER/class/file"),
    "no class folders": (_only_files, "has no class folders, only files"),
    "other files": (_other_files, "holds no images in its class folders (ant, bee, cat fish): those named .bmp"),
    "one class": (lambda root: fill(root, CLASSES[:1]), "has one class only (ant): two are needed"),
    "empty class": (_empty_class, "the class folder wasp holds no images"),
    "too few": (lambda root: fill(root, count=2), "the class ant has too few samples that can be read (2 train; val"),
    "differing": (_differing, "the split folders train and test have different classes (cat fish is in one alone)"),
    "beside": (_beside, "has the split folders train, val beside extra"),
    "unreadable": (_unreadable, "none of its 3 images can be used (ant/0.png: no image"),
    "no UTF-8": (_odd, "the name 'caf\\udce9.png' in "),
    "line break": (_line_break, "has line breaks or control characters: rename it"),
    "loop": (_loop, "ant/again is a link to a folder that it lies in, a circle: remove the link"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_folders_end_with_one_sentence(tmp_path, store, kind):
    make, words = WRONG[kind]
    make(tmp_path / "own")
    with pytest.raises(RunError) as raised:
        data_of(tmp_path / "own", store)
    assert words in str(raised.value)
    assert f"data.root={tmp_path / 'own'}" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_no_folder_named(store):
    with pytest.raises(RunError, match=r"data\.root is missing: give data\.root=FOLDER"):
        data_of("", store, root=None)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"val_share": 0.0}, "data.val_share and data.test_share must be above 0"),
        ({"val_share": 0.5, "test_share": 0.5}, "leave something to train on"),
        ({"std": [1.0, 0.0, 1.0]}, "std positive"),
        ({"img_size": 0}, "data.img_size must be at least 1"),
        ({"cache": "all"}, "data.cache must be one of"),
    ],
)
def test_wrong_settings(root, store, option, words):
    with pytest.raises(ValueError, match=words):
        data_of(root, store, **option)


def test_the_command_prepares(root, store, capsys):
    assert prepare(["image_folder", "--folder", str(store), "--archive", str(root), "--jobs=1"]) == 0
    assert "30 images in " in capsys.readouterr().out
    assert prepare(["image_folder", "--folder", str(store)]) == 1
    assert "give the folder with the class folders as --archive FOLDER" in capsys.readouterr().err
    assert prepare(["image_folder", "--folder", str(store), "--archive", str(root / "nowhere")]) == 1
    assert "is not there" in capsys.readouterr().err


@pytest.mark.parametrize("attention", [("attention=softmax",), ("attention=sinkhorn", "attention.n_iters=5")])
def test_training_by_the_command(root, store, tmp_path, attention):
    words = [
        *("experiment=image_folder", f"data.root={root}", *attention, "data.img_size=16", "data.num_workers=0"),
        *("+model.embed_dim=16", "+model.depth=1", "+model.num_heads=1", "trainer.max_epochs=2", "logger=none"),
        *("trainer.accelerator=cpu", f"paths.data={store}", f"paths.runs={tmp_path / 'runs'}"),
    ]
    run = execute(compose(words), words)
    assert run.result["data"]["classes"] == list(CLASSES)
    assert run.result["data"]["sizes"] == {"train": 21, "val": 3, "test": 6}
    again = load_run(run.folder)
    assert again.model(next(iter(again.data.eval_loader("test")))[0]).shape == (6, 3)
    assert again.metrics() == pytest.approx(again.recorded())


def test_the_command_without_a_folder_says_so(store, tmp_path):
    words = ["experiment=image_folder", f"paths.data={store}", f"paths.runs={tmp_path / 'runs'}"]
    with pytest.raises(RunError, match=r"data\.root is missing"):
        execute(compose(words), words)
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").glob("*/*/result.json"))
