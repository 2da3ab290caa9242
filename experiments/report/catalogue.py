"""The experiments that there are, as configs/experiment describes them: what each asks and how it is run."""

import re
from dataclasses import dataclass
from pathlib import Path

from ..config import files_of


@dataclass(frozen=True)
class Entry:
    """An experiment: its name, the first sentence of its file, and the commands that the file gives."""

    name: str
    words: str
    commands: tuple[str, ...]


def catalogue(folder: Path | None = None) -> list[Entry]:
    """Every experiment by name, of a folder or else of all that are searched.

    What a file says of itself stands in the comment lines at its top.
    """
    found = []
    for path in files_of("experiment") if folder is None else sorted(folder.glob("*.yaml")):
        lines: list[str] = []
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                break
            words = line.lstrip("#").strip()
            if lines and lines[-1].endswith("\\"):  # a command that goes on
                lines[-1] = f"{lines[-1][:-1].rstrip()} {words}"
            else:
                lines.append(words)
        commands = tuple(line for line in lines if line.startswith("python -m "))
        words = " ".join(line for line in lines if line not in commands and not line.startswith("@package"))
        found.append(Entry(path.stem, re.split(r"(?<=[.:])(?<!et al\.)\s", words, maxsplit=1)[0].rstrip(":"), commands))
    return found
