import urllib.error
import zipfile

import pytest
import trimesh
from trimesh.exchange.off import export_off

from experiments.data import modelnet40
from experiments.errors import RunError


@pytest.fixture
def archive(tmp_path):
    """A miniature of ModelNet40.zip: four classes, glued headers, one broken file."""
    path = tmp_path / "ModelNet40.zip"
    with zipfile.ZipFile(path, "w") as packed:
        for label in ("airplane", "night_stand", "tv_stand", "xbox"):
            for number in range(1, 6):
                split = "train" if number < 5 else "test"
                text = export_off(trimesh.creation.box((1, 2, number)))
                text = text.replace("OFF\n", "OFF", 1) if number % 2 else text
                if (label, number) == ("xbox", 2):
                    text = text[: len(text) // 2]
                packed.writestr(f"ModelNet40/{label}/{split}/{label}_{number:04d}.off", text)
    return path


def prepare(folder, archive=None, **options):
    return modelnet40.prepare(folder, archive, **{"jobs": 1, "num_points": 20, "quiet": True, **options})


def test_a_miniature_becomes_clouds(archive, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    report = prepare(folder, archive, partial=True)
    assert report.path == str(folder / "modelnet40" / "clouds.h5")
    assert report.counts == {"train": 15, "test": 4}
    assert report.classes == ["airplane", "night_stand", "tv_stand", "xbox"]
    assert list(report.errors) == ["xbox/train/xbox_0002.off"]
    assert "19 of 20 meshes" in str(report)


def test_an_incomplete_archive_is_refused_with_the_way_out(archive, tmp_path):
    message = r"16 train meshes and 4 test meshes instead of 9,843 .*not complete\. Fetch it again, .* with --partial"
    with pytest.raises(RunError, match=message):
        prepare(tmp_path, archive)


def test_an_archive_or_folder_in_place_is_taken(archive, tmp_path):
    place = tmp_path / "data" / "modelnet40"
    place.mkdir(parents=True)
    archive.rename(place / "ModelNet40.zip")
    packed = prepare(tmp_path / "data", partial=True)
    with zipfile.ZipFile(place / "ModelNet40.zip") as zipped:
        zipped.extractall(place)
    (place / "ModelNet40.zip").unlink()
    assert prepare(tmp_path / "data", partial=True).content_hash == packed.content_hash


def test_without_a_network_the_message_says_what_to_do(tmp_path, monkeypatch):
    def unreachable(url, *_):
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(modelnet40, "download_url", unreachable)
    with pytest.raises(RunError, match=r"ModelNet40\.zip could not be fetched .*give it as --archive, or put it into"):
        prepare(tmp_path)
    assert not list((tmp_path / "modelnet40").iterdir())


def test_what_was_fetched_is_kept_whole(archive, tmp_path, monkeypatch):
    def fetch(url, root, name):
        if url.startswith("https:"):  # a mirror that breaks off half way
            (tmp_path / root / name).write_bytes(archive.read_bytes()[:100])
            raise RuntimeError("broke off")
        (tmp_path / root / name).write_bytes(archive.read_bytes())

    monkeypatch.setattr(modelnet40, "download_url", fetch)
    prepare(tmp_path, partial=True)
    assert (tmp_path / "modelnet40" / "ModelNet40.zip").read_bytes() == archive.read_bytes()
    monkeypatch.setattr(modelnet40, "download_url", lambda *_: pytest.fail("fetched twice"))
    prepare(tmp_path, partial=True)
