import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import trimesh

from experiments.data import meshes
from experiments.data.meshes import list_meshes, prepare_clouds, read_report
from experiments.errors import RunError

CLASSES = ("lamp", "chair", "bed")
POINTS = 40


def off(size):
    """A box, with the header glued to the counts in every second one."""
    text = trimesh.exchange.off.export_off(trimesh.creation.box((1.0, 1.0, size)))
    return text.replace("OFF\n", "OFF", 1) if int(size * 2) % 2 else text


def entries(files=4):
    """Names and contents as ModelNet40's archive has them: files / 4 meshes of each class are test meshes."""
    found = {}
    for label in CLASSES:
        for number in range(1, files + 1):
            split = "train" if number <= files - files // 4 else "test"
            found[f"ModelNet40/{label}/{split}/{label}_{number:04d}.off"] = off(number / 2 + len(label))
    return found


def pack(path, contents):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return path


@pytest.fixture
def archive(tmp_path):
    return pack(tmp_path / "ModelNet40.zip", entries())


def prepare(source, target, **options):
    return prepare_clouds(source, target, **{"num_points": POINTS, "jobs": 1, "quiet": True, **options})


def arrays(path):
    with h5py.File(path) as file:
        return {f"{split}/{name}": file[split][name][()] for split in file for name in file[split]}


def assert_equal(one, other):
    assert one.keys() == other.keys()
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_every_mesh_becomes_a_cloud_of_its_surface(archive, tmp_path):
    report = prepare(archive, tmp_path / "out.h5")
    assert report.counts == {"train": 9, "test": 3}
    assert report.classes == ["bed", "chair", "lamp"]
    assert not report.errors
    found = arrays(tmp_path / "out.h5")
    names = [name.decode() for name in found["train/name"]]
    assert names == sorted(names)
    assert names[0] == "bed/train/bed_0001.off"
    for i, name in enumerate(names):
        label, _, file = name.split("/")
        assert found["train/label"][i] == report.classes.index(label)
        size = int(file[-8:-4]) / 2 + len(label)
        points = found["train/points"][i] * found["train/scale"][i] + found["train/center"][i]
        assert points.shape == (POINTS, 3)
        distance = np.abs(points) / (np.array([1, 1, size]) / 2)
        np.testing.assert_allclose(distance.max(1), 1, rtol=1e-5)  # every point lies on the box


def test_the_result_depends_on_neither_processes_nor_shards_nor_packing(archive, tmp_path):
    first = prepare(archive, tmp_path / "a.h5")
    second = prepare(archive, tmp_path / "b.h5", jobs=2, shard_size=5)
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(tmp_path / "raw")
    third = prepare(tmp_path / "raw", tmp_path / "c.h5", shard_size=1)
    assert first.content_hash == second.content_hash == third.content_hash
    for name in ("b.h5", "c.h5"):
        assert_equal(arrays(tmp_path / name), arrays(tmp_path / "a.h5"))
    assert not list(tmp_path.glob("*parts")) + list(tmp_path.glob(".*parts")) + list(tmp_path.glob(".*tmp"))


def test_a_mesh_keeps_its_points_when_others_come_and_go(tmp_path):
    few, many = entries(), {**entries(), **{"ModelNet40/zebra/train/zebra_0001.off": off(1.0)}}
    prepare(pack(tmp_path / "few.zip", few), tmp_path / "few.h5")
    prepare(pack(tmp_path / "many.zip", many), tmp_path / "many.h5")
    one, other = arrays(tmp_path / "few.h5"), arrays(tmp_path / "many.h5")
    assert np.array_equal(one["train/points"], other["train/points"][: len(one["train/points"])])


def test_broken_files_are_named_and_counted(tmp_path):
    contents = entries()
    contents["ModelNet40/bed/train/bed_0002.off"] = "OFF\n8 12 0\n0 0 0\n"
    contents["ModelNet40/lamp/test/lamp_0004.off"] = "no mesh"
    contents["ModelNet40/chair/train/chair_0001.off"] = "OFF\n3 1 0\n0 0 0\n1 1 1\n2 2 2\n3 0 1 2\n"
    contents["ModelNet40/chair/train/chair_0002.off"] = "OFF\n0 0 0\n"
    report = prepare(pack(tmp_path / "a.zip", contents), tmp_path / "out.h5")
    assert report.counts == {"train": 7, "test": 2}
    assert list(report.errors) == ["bed/train/bed_0002.off", "chair/train/chair_0002.off", "lamp/test/lamp_0004.off"]
    assert all(reason.startswith(f"{name}: ") and reason.count(name) == 1 for name, reason in report.errors.items())
    assert report.remarks == {"chair/train/chair_0001.off": "no face has an area: vertices were drawn instead"}
    names = [name.decode() for name in arrays(tmp_path / "out.h5")["train/name"]]
    assert "bed/train/bed_0002.off" not in names
    assert "bed/train/bed_0003.off" in names
    text = str(report)
    assert "9 of 12 meshes" in text
    assert "3 could not be read:\n  bed/train/bed_0002.off: cut off" in text
    labels = arrays(tmp_path / "out.h5")["train/label"]
    assert [report.classes[label] for label in labels] == [name.split("/")[0] for name in names]


def test_a_damaged_member_is_a_broken_file(archive, tmp_path):
    with zipfile.ZipFile(archive) as packed:
        info = packed.getinfo("ModelNet40/bed/train/bed_0002.off")
    content = bytearray(archive.read_bytes())
    content[info.header_offset + 30 + len(info.filename) + 20] ^= 0xFF
    archive.write_bytes(content)
    report = prepare(archive, tmp_path / "out.h5")
    assert list(report.errors) == ["bed/train/bed_0002.off"]
    assert "damaged in ModelNet40.zip" in report.errors["bed/train/bed_0002.off"]


def test_a_second_call_does_nothing_and_other_options_build_anew(archive, tmp_path):
    target = tmp_path / "out.h5"
    report = prepare(archive, target)
    before = target.stat().st_mtime_ns
    assert prepare(archive, target) == report
    assert target.stat().st_mtime_ns == before
    assert prepare(archive, target, num_points=2 * POINTS).num_points == 2 * POINTS
    assert arrays(target)["train/points"].shape == (9, 2 * POINTS, 3)
    assert prepare(archive, target, seed=1).content_hash != report.content_hash
    changed = entries()
    changed["ModelNet40/bed/train/bed_0001.off"] = off(9.0)
    pack(archive, changed)
    assert prepare(archive, target).content_hash != report.content_hash
    assert prepare(pack(archive, entries()), target) == report


def test_a_file_cut_short_is_not_taken_for_done(archive, tmp_path):
    target = tmp_path / "out.h5"
    report = prepare(archive, target)
    target.write_bytes(target.read_bytes()[:2000])
    assert read_report(target) is None
    assert prepare(archive, target) == report


def test_shards_that_are_done_are_not_done_again(archive, tmp_path, monkeypatch):
    target = tmp_path / "out.h5"
    expected = prepare(archive, tmp_path / "whole.h5").content_hash
    sampled = []
    sample_shard = meshes._sample_shard

    def stop_after(limit):
        def sample(source, shard, path, *options):
            if len(sampled) == limit:
                raise KeyboardInterrupt
            sampled.append(path.name)
            sample_shard(source, shard, path, *options)

        return sample

    monkeypatch.setattr(meshes, "_sample_shard", stop_after(3))
    with pytest.raises(KeyboardInterrupt):
        prepare(archive, target, shard_size=2)
    assert not target.exists()
    (parts,) = tmp_path.glob(".out.h5.*.parts")
    whole = sorted(parts.glob("*.npz"))
    assert len(whole) == 3
    whole[1].write_bytes(whole[1].read_bytes()[:-30])  # a shard that a dying disk cut short
    sampled.clear()
    monkeypatch.setattr(meshes, "_sample_shard", stop_after(99))
    assert prepare(archive, target, shard_size=2).content_hash == expected
    assert len(sampled) == 6 - 2
    assert not parts.exists()


def run_command(archive, target, num_points):
    code = (
        "import sys; from pathlib import Path; from experiments.data.meshes import prepare_clouds; "
        "prepare_clouds(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), jobs=1, shard_size=1, quiet=True)"
    )
    root = Path(__file__).parents[3]
    return subprocess.Popen([sys.executable, "-c", code, str(archive), str(target), str(num_points)], cwd=root)


@pytest.mark.slow
def test_killed_half_way_and_started_again_gives_the_same_content(archive, tmp_path):
    target = tmp_path / "out.h5"
    process = run_command(archive, target, 300_000)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob(".out.h5.*.parts/*.npz"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not target.exists()
    assert 2 <= len(list(tmp_path.glob(".out.h5.*.parts/*.npz"))) < 12
    resumed = prepare_clouds(archive, target, 300_000, jobs=1, shard_size=1, quiet=True)
    whole = prepare_clouds(archive, tmp_path / "whole.h5", 300_000, jobs=1, shard_size=1, quiet=True)
    assert resumed.content_hash == whole.content_hash
    assert_equal(arrays(target), arrays(tmp_path / "whole.h5"))


@pytest.mark.slow
def test_several_processes_at_once_build_it_once(archive, tmp_path):
    target = tmp_path / "out.h5"
    processes = [run_command(archive, target, 20_000) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    assert read_report(target)[1] == prepare(archive, target, num_points=20_000)
    assert arrays(target)["train/points"].shape == (9, 20_000, 3)


def test_the_number_of_meshes_is_checked_before_any_work(archive, tmp_path):
    message = "9 train meshes and 3 test meshes instead of 9,843 train meshes and 2,468 test meshes: it is not complete"
    with pytest.raises(RunError, match=message):
        prepare(archive, tmp_path / "out.h5", expected={"train": 9843, "test": 2468})
    assert not (tmp_path / "out.h5").exists()
    prepare(archive, tmp_path / "out.h5", expected={"train": 9, "test": 3})


def test_what_is_no_mesh_is_passed_over(tmp_path):
    junk = {
        "__MACOSX/ModelNet40/bed/train/._bed_0001.off": "junk",
        "ModelNet40/bed/train/.hidden.off": "junk",
        "ModelNet40/README.txt": "hello",
        "ModelNet40/bed/readme.off": "junk",
        "ModelNet40/bed/train/": "",
    }
    found = list_meshes(pack(tmp_path / "a.zip", {**entries(), **junk}))
    assert [mesh.member for mesh in found] == sorted(entries(), key=lambda name: ("/test/" in name, name))


@pytest.mark.parametrize("name", ["../../evil/train/x.off", "/etc/train/x.off", "a/../../train/x.off", "a\\..\\b.off"])
def test_an_archive_that_points_outside_is_refused(name, tmp_path):
    with pytest.raises(RunError, match="a path outside of the archive"):
        list_meshes(pack(tmp_path / "a.zip", {**entries(), name: off(1.0)}))


def test_sources_that_cannot_be_used_say_why(archive, tmp_path):
    with pytest.raises(RunError, match="is not there"):
        list_meshes(tmp_path / "no.zip")
    (tmp_path / "cut.zip").write_bytes(archive.read_bytes()[:500])
    with pytest.raises(RunError, match="no zip archive, or a damaged one"):
        list_meshes(tmp_path / "cut.zip")
    with pytest.raises(RunError, match="holds no mesh of the layout"):
        list_meshes(pack(tmp_path / "empty.zip", {"a.txt": "b"}))
    twice = {"a/bed/train/x.off": off(1.0), "b/bed/train/x.off": off(1.0)}
    with pytest.raises(RunError, match=r"bed/train/x\.off more than once"):
        list_meshes(pack(tmp_path / "twice.zip", twice))


def test_the_report_is_kept_in_the_file(archive, tmp_path):
    report = prepare(archive, tmp_path / "out.h5")
    with h5py.File(tmp_path / "out.h5") as file:
        stored = json.loads(file.attrs["report"])
    assert stored["content_hash"] == report.content_hash
    assert read_report(tmp_path / "out.h5")[1] == report
