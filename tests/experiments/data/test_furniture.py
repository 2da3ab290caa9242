"""A miniature of the package: three libraries with catalogues, translations, odd and broken models."""

import multiprocessing
import os
import re
import zipfile
from dataclasses import replace

import h5py
import numpy as np
import pytest
from joblib import parallel_config

from experiments.data import furniture, prepare
from experiments.data.clouds import CloudData
from experiments.data.furniture import (
    CLASSES,
    Furniture,
    Model,
    class_of,
    families,
    hold_out,
    read_obj,
    read_properties,
)
from experiments.data.meshes import read_report
from experiments.data.off import OffError
from experiments.errors import RunError

SQUARE = "v 0 0 0\nv 2 0 0\nv 2 3 0\nv 0 3 0\n"


def box(height):
    """A box 1 wide, `height` high (y) and 2 deep, of quads, standing at the origin."""
    corners = [(x, y, z) for x in (0, 1) for y in (0, height) for z in (0, 2)]
    sides = ((1, 2, 4, 3), (5, 7, 8, 6), (1, 5, 6, 2), (3, 4, 8, 7), (1, 3, 7, 5), (2, 6, 8, 4))
    lines = ["# a box", "mtllib box.mtl", *(f"v {x} {y} {z}" for x, y, z in corners), "vt 0 0", "usemtl wood"]
    return "\n".join(lines + ["f " + " ".join(f"{corner}/1" for corner in side) for side in sides]) + "\n"


def library(path, name, entries, rotations=None):
    """Writes an .sh3f archive; entries are pairs of a model's name and its OBJ file."""
    folder = name.lower()
    lines = [
        f"# {name}",
        f"id={name}",
        f"name={name}",
        "license=Creative Commons  \\\n    Attribution 3.0 \xa9 Someone",
    ]
    translated = []
    with zipfile.ZipFile(path, "w") as archive:
        for number, (title, content) in enumerate(entries, 1):
            member = (
                f"{folder}/model{number * 11}x/{re.split(r'[^A-Za-z]', title)[0].lower()}{'abcdefghijklm'[number]}.obj"
            )
            lines += [f"name#{number}={title}", f"model#{number}=/{member}", f"creator#{number} : J\\u00f8rn"]
            lines += [f"modelRotation#{number}={rotations[number]}"] if rotations and number in rotations else []
            translated += [f"name#{number}=Stuhl"]
            if content is not None:
                archive.writestr(member, content)
        archive.writestr("PluginFurnitureCatalog.properties", "\n".join(lines).encode("latin-1"))
        archive.writestr("PluginFurnitureCatalog_de.properties", "\n".join(translated))


def write_package(folder):
    folder.mkdir()
    names = ("Chair", "Oak chair", "Bar chair", "Chair", "Deck chair", "Child chair")
    library(folder / "A.sh3f", "A", [(name, box(3 + i)) for i, name in enumerate(names)])
    tables = ("Table", "Round table", "Black table", "Desk", "Pool table", "Caf\\u00e9 table")
    others = (("Rock", box(1)), ("Rock", box(2)), ("Tablet", box(1)), ("Wheelchair", box(1)))
    library(folder / "B.sh3f", "B", [*((name, box(2 + i)) for i, name in enumerate(tables)), *others])
    broken = (("Lamp", SQUARE + "f 1 2 9\n"), ("Desk lamp", "no mesh"), ("Wall lamp", None), ("Street lamp", box(9)))
    library(folder / "C.sh3f", "C", broken, rotations={4: "1 0 0 0 0 1 0 -1 0"})
    return folder


@pytest.fixture
def package(tmp_path):
    return write_package(tmp_path / "package")


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    return folder


def make(data, package, **options):
    return furniture.prepare(data, package, **{"jobs": 1, "num_points": 64, "quiet": True, **options})


def clouds(data):
    with h5py.File(data / "furniture" / "clouds.h5") as file:
        return {f"{split}/{name}": file[split][name][()] for split in file for name in file[split]}


# Catalogues


def test_properties_are_read_as_java_reads_them():
    content = (
        b"# note\n! note\n\n a = b \nname#1=Caf\xe9 10\\u20ac\r\nkey with:blank\nlong=one, \\\n   two\\\\\n"
        b"odd\\=key\\ here=x\\ty\nempty=\nbare\nline\\u0041\x85=1\nlast:a=b#c"
    )
    assert read_properties(content) == {
        "a": "b ",
        "name#1": "Caf\xe9 10\u20ac",
        "key": "with:blank",
        "long": "one, two\\",
        "odd=key here": "x\ty",
        "empty": "",
        "bare": "",
        "lineA\x85": "1",
        "last": "a=b#c",
    }


def test_classes_are_told_by_the_english_name():
    expected = {
        "Chair": "chair",
        "Winchester armchair": "chair",
        "Chair with cushion": "chair",
        "Wheelchair": None,
        "Armchair ottoman": "bench",
        "Desk lamp": "lamp",
        "Wooden desk": "table",
        "Bedside table": "cabinet",
        "Table fan": None,
        "Tablet": None,
        "Table tennis bat": None,
        "Sofa 2 seats": "sofa",
        "Opened convertible sofa BZ": "sofa",
        "Glass door cabinet": "cabinet",
        "Double French window 3 panes": "window",
        "Window blind": None,
        "Female": "person",
        "Cup cake": None,
        "Cupboard": "cabinet",
        "TV 16:9": None,
        "": None,
    }
    assert {name: class_of(name) for name in expected} == expected
    assert len(CLASSES) == 15


# Meshes


@pytest.mark.parametrize(
    "text",
    [
        SQUARE + "f 1 2 3 4\n",
        SQUARE + "f 1/1 2/2 3/3 4/4",
        SQUARE.replace(" ", "\t") + "f\t1//1\t2//1\t3//1\t4//1\n",
        (SQUARE + "vn 0 0 1\nf 1/1/1 2/2/1 3/3/1 4/4/1\n").replace("\n", "\r\n"),
        SQUARE + "f 1 2 \\\n3 4 # side\nl 1 2\nf 1 2\nf 1\n",
        "# caf\xe9\nmtllib none.mtl\n"
        + SQUARE.replace("\n", " 0.5 0.5 0.5\n")
        + "usemtl a\nf 1 2 3\ng x\nusemtl b\nf 1 3 4\n",
        "v 0 0 0\nv 2 0 0\nv 2 3 0\nf 1 2 3\nv 0 3 0\nf 1 3 4\n",
        "v 9 9 9\n" + SQUARE + "f 2 3 4 5\n",
        "v 1 0 0\n" + SQUARE + "f 2 1 3 4 5\n",
    ],
    ids=["quad", "glued", "tabs", "crlf", "continued", "groups", "between", "unused", "pentagon"],
)
def test_odd_files_give_the_same_surface(text):
    mesh = read_obj(text.encode("latin-1"), "odd.obj")
    assert mesh.area == pytest.approx(6)
    assert mesh.vertices[np.unique(mesh.faces)].max(0).tolist() == [2, 3, 0]
    np.testing.assert_allclose(np.average(mesh.triangles_center, axis=0, weights=mesh.area_faces), [1, 1.5, 0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no OBJ file: it has no vertices"),
        (SQUARE, "it has no faces"),
        (SQUARE + "f 1 2\n", "it has no faces"),
        (SQUARE + "f 0 1 2\n", "corner 0, but vertices are numbered 1 to 4"),
        (SQUARE + "f 1 2 9\n", "corner 9, but vertices are numbered 1 to 4"),
        (SQUARE + "f -1 -2 -3\n", "corner -1, but"),
        (SQUARE + "f 1 2 x\n", "holds what is no number"),
        (SQUARE + "v 1 2\nf 1 2 3\n", "1 of 5 vertices have less than three coordinates"),
        (SQUARE.replace("v 2 0 0", "v nan 0 0") + "f 1 2 3\n", "not finite"),
        (SQUARE.replace("v 2 0 0", "v 2 x 0") + "f 1 2 3\n", "holds what is no number"),
    ],
)
def test_broken_files_are_named(text, message):
    with pytest.raises(OffError, match=message) as error:
        read_obj(text.encode(), "odd.obj")
    assert str(error.value).startswith("odd.obj: ")


# Splits


def model(archive, name, file):
    return Model(archive, f"x/{file}.obj", name, class_of(name), "", "", "", "")


def test_variants_of_one_design_are_a_family():
    models = [
        model("A", "Sofa 2 seats", "beige_2"),
        model("A", "Sofa 3 seats", "white"),
        model("A", "Corner sofa", "white_opened"),  # joined by its file's name to one, by that to the other
        model("B", "Sofa 2 seats", "beige_2"),  # another archive
        model("A", "Couch", "leftSofa1"),
        model("A", "Futon couch", "sofaRight"),
        model("A", "Chair", "white"),  # another class
    ]
    found = families(models)
    assert found[0] == found[1] == found[2]
    assert found[4] == found[5]
    assert len({found[0], found[3], found[4], found[6]}) == 4


def test_held_out_parts_are_stratified_and_leave_families_whole():
    rng = np.random.default_rng(0)
    labels = rng.choice(list("abc"), 300, p=[0.6, 0.3, 0.1]).tolist()
    family = [f"{label}{rng.integers(40)}" for label in labels]
    held = hold_out(labels, family, 0.2, 3)
    inside = {family[i] for i in held}
    outside = {family[i] for i in range(300)} - inside
    assert {i for i in range(300) if family[i] in inside} == set(held.tolist())
    assert outside
    for label in "abc":
        assert sum(labels[i] == label for i in held) / labels.count(label) == pytest.approx(0.2, abs=0.05)
    assert np.array_equal(held, hold_out(labels, family, 0.2, 3))
    assert not np.array_equal(held, hold_out(labels, family, 0.2, 4))


def test_classes_that_cannot_be_divided_evenly():
    assert hold_out(list("aaaa"), [0, 0, 0, 0], 0.2, 0).tolist() == []  # one family
    assert hold_out(list("aaaaa"), [0, 0, 0, 1, 1], 0.2, 0).tolist() == [3, 4]  # none fits: the smallest
    assert hold_out(list("aaaa"), [0, 1, 2, 3], 0.0, 0).tolist() == []


# The whole way


def test_a_miniature_becomes_clouds_and_nothing_is_dropped_in_silence(package, data):
    report = make(data, package)
    assert report.classes == {"chair": 6, "lamp": 4, "table": 6}
    assert report.unmapped == {"Rock": 2, "Tablet": 1, "Wheelchair": 1}
    assert sum(report.clouds.counts.values()) == 13
    assert report.clouds.classes == ["chair", "lamp", "table"]
    assert len(report.clouds.errors) == 3
    reasons = " ".join(report.clouds.errors.values())
    assert "C.sh3f/c/model11x/lampb.obj: a face has the corner 9" in reasons
    assert "C.sh3f/c/model22x/deskc.obj: no OBJ file" in reasons
    assert "C.sh3f/c/model33x/walld.obj: the catalogue lists it, the archive does not have it" in reasons
    text = str(report)
    assert "  A: Creative Commons Attribution 3.0 \xa9 Someone\n" in text
    assert "13 of 16 meshes in " in text
    assert "4 of 20 models belong to none of these classes: Rock (2), " in text
    assert read_report(data / "furniture" / "clouds.h5")[1] == report.clouds
    assert {path.name for path in (data / "furniture").iterdir()} == {".clouds.h5.lock", "clouds.h5", "credits.txt"}
    credits = (data / "furniture" / "credits.txt").read_text(encoding="utf-8").splitlines()
    assert len(credits) == 16
    assert "Caf\xe9 table, by J\xf8rn; Creative Commons Attribution 3.0 \xa9 Someone" in credits[11]


def test_clouds_stand_upright(package, data):
    make(data, package)
    found = clouds(data)
    sizes = {}
    for split in ("train", "test"):
        for points, scale, center, name in zip(
            *(found[f"{split}/{key}"] for key in ("points", "scale", "center", "name")), strict=True
        ):
            sizes[name.decode().split("/")[-1]] = 2 * center  # boxes stand at the origin
            assert np.abs(points * scale + center - center).max(0) == pytest.approx(np.abs(center), rel=0.2)
    assert sizes["a-model11x-chairb.off"].tolist() == [1, -2, 3]  # width, depth backwards, height
    assert sizes["c-model44x-streete.off"].tolist() == [1, 9, 2]  # turned by the catalogue: what was deep is high


def test_variants_lie_on_one_side_of_every_split(package, data):
    make(data, package)
    split = Furniture(str(data), val_size=3, split_seed=0, **OPTIONS)
    found = clouds(data)
    sides = {}
    for part, (stored, rows) in split.places.items():
        for number in found[f"{stored}/family"][rows]:
            sides.setdefault(number, set()).add(part)
    assert all(len(each) == 1 for each in sides.values())
    assert split.sizes["test"] == 3  # a fifth of six chairs, of six tables, and of four lamps: one of each
    assert sum(split.sizes.values()) == 13
    assert 2 <= split.sizes["val"] <= 4
    assert split.num_classes == 3
    assert len(split.facts()["meshes_not_read"]) == 3


OPTIONS = {
    "num_points": 16,
    "draw": "fresh",
    "normalize": "standard",
    "rotate": 0.0,
    "stretch": 1.0,
    "jitter": 0.0,
    "batch_size": 4,
    "eval_batch_size": 4,
    "num_workers": 0,
    "train_on": ["train"],
}


def test_batches_and_split_hash(package, data):
    make(data, package)
    split = Furniture(str(data), val_size=3, split_seed=0, **OPTIONS)
    points, labels = next(iter(split.train_loader(0)))
    assert points.shape == (4, 16, 3)
    assert labels.max() < 3
    assert split.split_hash == Furniture(str(data), val_size=3, split_seed=0, **OPTIONS).split_hash
    others = {Furniture(str(data), val_size=3, split_seed=seed, **OPTIONS).split_hash for seed in range(1, 6)}
    assert others - {split.split_hash}
    assert isinstance(split, CloudData)


def test_a_second_call_does_nothing_and_changes_build_anew(package, data):
    report = make(data, package)
    path = data / "furniture" / "clouds.h5"
    before = path.stat().st_mtime_ns
    assert make(data, package) == report
    assert path.stat().st_mtime_ns == before
    assert make(data, package, num_points=32).clouds.num_points == 32
    library(package / "C.sh3f", "C", [("Lamp", box(4))])
    changed = make(data, package)
    assert not changed.clouds.errors
    assert changed.clouds.content_hash != report.clouds.content_hash


def test_processes_do_not_change_the_clouds(package, data, tmp_path):
    (tmp_path / "other").mkdir()
    with parallel_config(backend="threading"):  # for the test's speed
        report = make(data, package, jobs=3)
    assert report.clouds == replace(make(tmp_path / "other", package).clouds, path=report.clouds.path)


def _killed_after(data, package, meshes):
    write, count = furniture.write_atomic, []

    def counted(*arguments):
        if len(count) == meshes:
            os._exit(9)
        count.append(write(*arguments))

    furniture.write_atomic = counted
    make(data, package)


@pytest.mark.parametrize("meshes", [0, 7, 13])
def test_a_killed_preparation_goes_on_to_the_same_clouds(package, data, tmp_path, monkeypatch, meshes):
    process = multiprocessing.get_context("fork").Process(target=_killed_after, args=(data, package, meshes))
    process.start()
    process.join(60)
    assert process.exitcode == 9
    assert not (data / "furniture" / "credits.txt").exists()
    kept = list((data / "furniture").rglob("*.off"))
    assert len(kept) == (meshes if meshes < 13 else 0)  # after the 13th, clouds are made and meshes removed
    (tmp_path / "whole").mkdir()
    whole = make(tmp_path / "whole", package)
    written, write = [], furniture.write_atomic
    monkeypatch.setattr(furniture, "write_atomic", lambda path, text: (written.append(path.suffix), write(path, text)))
    resumed = make(data, package)
    assert written.count(".off") == 13 - meshes  # what was there is not made again
    assert resumed.clouds.content_hash == whole.clouds.content_hash
    assert resumed.clouds.errors == whole.clouds.errors
    one, other = clouds(data), clouds(tmp_path / "whole")
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_what_cannot_be_used_is_said_in_a_sentence(package, data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(furniture, "PACKAGE", tmp_path / "nowhere")
    assert prepare.main(["furniture", "--folder", str(data)]) == 1
    message = capsys.readouterr().err
    assert "nowhere is not there: install Debian's package with `apt-get install sweethome3d-furniture`" in message
    with pytest.raises(
        FileNotFoundError, match=r"install Debian's package .*then run `python -m experiments.data.prepare"
    ):
        Furniture(str(data), val_size=3, split_seed=0, **OPTIONS)
    with pytest.raises(RunError, match=r"holds no \.sh3f archive"):
        make(data, data)
    (package / "D.sh3f").write_bytes(b"PK nothing")
    with pytest.raises(RunError, match=r"D\.sh3f is damaged"):
        make(data, package)
    with zipfile.ZipFile(package / "D.sh3f", "w") as archive:
        archive.writestr("a.txt", "")
    with pytest.raises(RunError, match=r"D\.sh3f has no PluginFurnitureCatalog\.properties"):
        make(data, package)
    library(package / "D.sh3f", "D", [("Rock", box(1))])
    for name in "ABC":
        (package / f"{name}.sh3f").unlink()
    with pytest.raises(RunError, match="none of its 1 models belongs to a class"):
        make(data, package)
    library(package / "E.sh3f", "D", [("Rock", box(1))])
    with pytest.raises(RunError, match="more than once"):
        make(data, package)


def test_the_command_shows_source_and_licences(package, data, capsys):
    assert prepare.main(["furniture", "--folder", str(data), "--archive", str(package), "--jobs", "1"]) == 0
    text = capsys.readouterr().out
    assert "sweethome3d-furniture" in text
    assert "Creative Commons Attribution 3.0" in text
    assert "credits.txt" in text


@pytest.mark.skipif(not furniture.PACKAGE.is_dir(), reason="Debian's package sweethome3d-furniture is not installed")
def test_the_real_package_has_its_models_in_fifteen_classes():
    """Catalogues of version 1.8-1, and one model of every class read; all are read by the command."""
    models, licences = furniture.list_models(furniture.PACKAGE)
    assert len(models) == len({entry.file for entry in models}) == 820
    assert len(licences) == 5
    assert all(entry.stamp and entry.name and entry.creator for entry in models)
    mapped = [entry for entry in models if entry.label]
    assert len(mapped) == 459
    assert min(sum(entry.label == label for entry in mapped) for label in CLASSES) == 15
    assert {entry.name for entry in models if "Bill" in entry.name} == {
        "Bill 10\u20ac",
        "Bill 20\u20ac",
        "Bill 50\u20ac",
    }
    numbers = families(mapped)
    assert max(numbers.count(number) for number in numbers) == 11  # the windows of one maker
    smallest = {entry.label: entry for entry in sorted(mapped, key=lambda each: -int(each.stamp.split()[0]))}
    for entry in smallest.values():
        with zipfile.ZipFile(furniture.PACKAGE / entry.archive) as archive:
            assert read_obj(archive.read(entry.member), entry.member).area > 0
