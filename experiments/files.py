"""Files that are either the old one or the new one, whole, whenever the process dies."""

import errno
import json
import math
import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from .errors import RunError


def write_atomic(path: Path, content: bytes | bytearray | memoryview | str) -> None:
    """Writes beside `path`, forces the bytes to the disk, then renames; a failed write leaves nothing behind.

    The name of the temporary file is fixed, so that one left by a killed process is overwritten by the next write.

    Raises:
        OSError: as the system raises it, ENOSPC among others.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    data = content.encode() if isinstance(content, str) else content
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Forces a folder's entries to the disk: a rename is safe only after that."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any) -> None:
    """`write_atomic` of an object as indented JSON; numbers as in `json_line`."""
    write_atomic(path, json.dumps(_finite(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def append_line(path: Path, content: Any) -> None:
    """Appends one object as a line of JSON and forces it to the disk."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json_line(content))
        file.flush()
        os.fsync(file.fileno())


def json_line(content: Any) -> str:
    """One object as a line of JSON; the same object always gives the same bytes.

    JSON has no NaN and no infinity: they become null.
    """
    return json.dumps(_finite(content), ensure_ascii=False, allow_nan=False) + "\n"


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


@contextmanager
def explain_full_disk(what: str) -> Iterator[None]:
    """Turns "no space left" and "quota exceeded" into one sentence; other errors pass."""
    try:
        yield
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise RunError(full_disk(error, what)) from error


def is_full_disk(error: BaseException) -> bool:
    """Whether an error is "no space left" or "quota exceeded"."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def full_disk(error: OSError, what: str) -> str:
    """The sentence for such an error."""
    where = f" ({error.filename})" if error.filename else ""
    return f"the disk is full, or its quota used up{where}: {what}. Free some space and give the same command again"


def check_sums(path: Path) -> None:
    """Looks at the checksums of a file that torch.save has written; torch.load does not: a flipped bit is a weight.

    A file of another kind, as old versions of torch write, has none.

    Raises:
        ValueError: names the part that is damaged.
    """
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"its part {damaged} is damaged")


class TextLoader(yaml.SafeLoader):
    """Reads every plain value of a YAML file as the text that is written; null is null, and anchors are merged."""


TextLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] in ("merge", "null")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
