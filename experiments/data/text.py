"""Text in lines: only \\n ends one, files that belong together have equally many, and what is left out is counted.

A data set is made in stages, each a folder of text files and a record of their line counts and hashes. A finished stage
is complete or not there, so a preparation that was stopped goes on where it was, with the same result.
"""

import functools
import hashlib
import json
import math
import re
import shutil
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from rich.console import Console

from ..errors import RunError
from ..files import write_atomic, write_json
from .archives import hash_file

#: Changes whenever the files made of the same source would.
FORMAT = 2
SPLITS = ("train", "valid", "test")

#: Lines of some parallel columns ("de" and "en", "text" and "label"): the i-th lines belong together.
Columns = dict[str, list[str]]

_CONTROL = re.compile("[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ufeff]")
_EXAMPLES = 5
_WORD = re.compile(r"[^\W_]+")
#: Of a block of pairs the lengths of both sides go together (correlation in real text above 0.8; shifted, near 0.2).
_BLOCK, _FEWEST, _TOGETHER = 100, 20, 0.5


def split_lines(content: bytes, name: str) -> list[str | None]:
    """The lines of a UTF-8 file, None for each that is not UTF-8; a mark of byte order at the start is dropped.

    Only \\n ends a line: U+2028, U+0085, a lone CR and their like stay within it.

    Raises:
        RunError: for UTF-16, which has no lines in this sense.
    """
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise RunError(f"{name} is UTF-16: convert it to UTF-8, e.g. with `iconv -f UTF-16 -t UTF-8`")
    content = content.removeprefix(b"\xef\xbb\xbf")
    lines = content.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return [_decode(line) for line in lines]


def _decode(content: bytes) -> str | None:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        return None


def one_line(text: str) -> str:
    """The text in one line: each run of white space and line separators, of whatever kind, becomes one space.

    Other control characters go: no tool that reads the line can then end it elsewhere or see other words in it.
    """
    return " ".join(_CONTROL.sub("", text).split())


@functools.cache
def _unseen() -> re.Pattern[str]:
    """Characters of Unicode's category Cf, which show nothing: soft hyphens, joiners, marks of direction."""
    found = (char for char in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(char) == "Cf")
    return re.compile(f"[{''.join(map(re.escape, found))}]")


def same_words(text: str) -> str:
    """What texts have in common that differ in case, punctuation and Unicode form alone: they are the same everywhere.

    A text without a word is known by its characters.
    """
    folded = unicodedata.normalize("NFKC", _unseen().sub("", text)).casefold()
    form = unicodedata.normalize("NFKC", folded)
    return " ".join(_WORD.findall(form)) or form


def common(columns: Mapping[str, Columns], names: Sequence[str]) -> dict[str, int]:
    """How many rows of each later split share the words of a column with a row of the first.

    Args:
        columns: the splits; the first is the one that is trained on.
        names: of the columns that are looked at, each for itself.
    """
    first, *later = columns
    trained = {name: {same_words(line) for line in columns[first][name]} for name in names}
    return {
        split: sum(
            any(same_words(line) in trained[name] for name, line in zip(names, row, strict=True))
            for row in zip(*(columns[split][name] for name in names), strict=True)
        )
        for split in later
    }


def odd_lengths(columns: Columns, languages: Sequence[str], places: Sequence[str]) -> list[str]:
    """Where two sides seem to have been shifted against each other, though they have equally many lines.

    A long sentence has a long translation: pairs of one place are looked at in blocks, and it is said where their
    lengths do not go together.

    Args:
        columns: with one for each language.
        languages: the two.
        places: where each pair comes from; pairs of one place stand together.

    Returns:
        one remark for each such block.
    """
    blocks: list[tuple[str, int, list[list[float]]]] = []
    for number, (place, *pair) in enumerate(zip(places, *(columns[name] for name in languages), strict=True), 1):
        if not blocks or blocks[-1][0] != place or len(blocks[-1][2]) == _BLOCK:
            blocks.append((place, number, []))
        blocks[-1][2].append([math.log(len(line) + 1) for line in pair])
    remarks = []
    for place, number, lengths in blocks:
        one, other = np.array(lengths).T
        if len(lengths) < _FEWEST or not one.std() or not other.std():
            continue
        found = float(np.corrcoef(one, other)[0, 1])
        if found < _TOGETHER:
            remarks.append(
                f"{place}: the lengths of the two sides do not go together in the {len(lengths)} pairs from "
                f"{number:,} on (correlation {found:.2f}): are the sides shifted against each other?"
            )
    return remarks


@dataclass
class Dropped:
    """What was left out, and why."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    """The first places of each reason."""

    def add(self, reason: str, place: str) -> None:
        """Counts one more."""
        self.counts[reason] += 1
        places = self.examples.setdefault(reason, [])
        if len(places) < _EXAMPLES:
            places.append(place)

    def facts(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            reason: {"count": self.counts[reason], "first": self.examples[reason]} for reason in sorted(self.counts)
        }


def keep(columns: Columns, reason: Callable[[dict[str, str]], str | None], dropped: Dropped, name: str) -> Columns:
    """Rows without a reason to drop them; a row goes as a whole, never one column alone.

    Args:
        columns: of equal lengths.
        reason: why a row goes, None where it stays.
        dropped: counts what goes.
        name: of the columns, to say where.
    """
    kept: Columns = {column: [] for column in columns}
    for number, row in enumerate(zip(*columns.values(), strict=True), 1):
        why = reason(dict(zip(columns, row, strict=True)))
        if why:
            dropped.add(why, f"{name}:{number}")
            continue
        for column, line in zip(columns, row, strict=True):
            kept[column].append(line)
    return kept


def empty_side(row: Mapping[str, str]) -> str | None:
    """The reason to drop a row that has an empty column."""
    return next((f"empty {column}" for column, line in row.items() if not line.strip()), None)


def check_lines(paths: Sequence[Path]) -> int:
    """The number of lines of files that belong together, where every tool sees the same lines in all of them.

    Raises:
        RunError: naming the first line that is not UTF-8, is empty, or holds what ends a line for some readers, and for
            files of unequal numbers of lines.
    """
    counts = {}
    for path in paths:
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            raise RunError(f"{path}: the last line does not end: the file is cut off")
        lines = split_lines(content, str(path))
        for number, line in enumerate(lines, 1):
            if line is None:
                raise RunError(f"{path}:{number}: not UTF-8")
            if not line.strip():
                raise RunError(f"{path}:{number}: an empty line")
            if len(line.splitlines()) > 1 or _CONTROL.search(line) or line.split() != line.split(" "):
                raise RunError(f"{path}:{number}: holds a line separator, a control character, or odd white space")
        counts[path] = len(lines)
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{path} {count:,}" for path, count in counts.items())
        shortest = min(counts.values())
        raise RunError(f"unequal numbers of lines: {listed}. Line {shortest + 1} has no counterpart")
    return next(iter(counts.values()), 0)


def hash_lines(columns: Mapping[str, Sequence[str]]) -> str:
    """sha256 of rows and the names of their columns, independent of how they are stored."""
    digest = hashlib.sha256()
    for column, lines in columns.items():
        digest.update(f"{column} {len(lines)}\n".encode())
        for line in lines:
            digest.update(f"{line}\n".encode())
    return digest.hexdigest()


@dataclass
class Made:
    """What a stage makes."""

    parts: dict[str, Columns]
    """`parts[name][column]` is written to the file `<name>.<column>`."""
    facts: dict[str, Any] = field(default_factory=dict)
    """For the manifest: counts, what was dropped."""
    extra: dict[str, bytes] = field(default_factory=dict)
    """Further files, of no lines (merges of a segmentation, say)."""


class Stages:
    """The stages of one data set in its folder, made by one process while others wait.

    Args:
        folder: of the data set.
        key: what decides the content of all stages: source, options, versions of tools. Another one makes all anew.
        quiet: shows no progress.
    """

    def __init__(self, folder: Path, key: Any, quiet: bool = False) -> None:
        self.folder, self.quiet = folder, quiet
        self.key = hashlib.sha256(json.dumps([FORMAT, key], sort_keys=True).encode()).hexdigest()
        self.records: list[dict[str, Any]] = []
        self.made: list[str] = []
        self.console = Console(stderr=True, quiet=quiet)

    def run(self, name: str, make: Callable[[], Made]) -> dict[str, Columns]:
        """The lines of a stage, made now or before; its files are checked in either case.

        Raises:
            RunError: where the lines that were written are not those that every tool would read.
        """
        folder = self.folder / name
        if not self._whole(name):
            self.console.print(f"{name} ...", highlight=False)
            made = make()
            self._write(name, made)
            self.made.append(name)
        record = self._record(name)
        assert record is not None
        self.records.append(record)
        parts: dict[str, Columns] = {}
        for file in record["parts"]:
            part, column = file.rsplit(".", 1)
            content = (folder / file).read_bytes().decode("utf-8")
            parts.setdefault(part, {})[column] = content.removesuffix("\n").split("\n") if content else []
        return parts

    def run_files(self, name: str, make: Callable[[Path], dict[str, Any]]) -> None:
        """A stage whose files a tool writes into a folder: `make` gets an empty folder and returns the facts."""
        if not self._whole(name):
            self.console.print(f"{name} ...", highlight=False)
            temporary = self.folder / f".{name}.tmp"
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            try:
                facts = make(temporary)
                self._clear(name)
                temporary.rename(self.folder / name)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
            files = {path: hash_file(path) for path in sorted((self.folder / name).rglob("*")) if path.is_file()}
            hashes = {
                path.relative_to(self.folder / name).as_posix(): {"sha256": digest}
                for path, digest in files.items()
                if path.suffix != ".log"
            }
            self._save(name, hashes, [], facts)
            self.made.append(name)
        record = self._record(name)
        assert record is not None
        self.records.append(record)

    def _write(self, name: str, made: Made) -> None:
        folder = self.folder / name
        self._clear(name)
        folder.mkdir(parents=True)
        files: dict[str, dict[str, Any]] = {}
        for part, columns in made.parts.items():
            paths = {column: folder / f"{part}.{column}" for column in columns}
            for column, lines in columns.items():
                write_atomic(paths[column], "".join(f"{line}\n" for line in lines).encode())
            found = check_lines(list(paths.values()))
            if any(len(lines) != found for lines in columns.values()):
                raise RunError(f"{folder}/{part}: {found:,} lines were written instead of what was made")
            files |= {path.name: {"lines": found, "sha256": hash_file(path)} for path in paths.values()}
        for file, content in made.extra.items():
            write_atomic(folder / file, content)
            files[file] = {"sha256": hashlib.sha256(content).hexdigest()}
        self._save(name, files, [file for file in files if file not in made.extra], made.facts)

    def _clear(self, name: str) -> None:
        # The manifest and the record go first: files without them are never taken for finished ones.
        (self.folder / "manifest.json").unlink(missing_ok=True)
        self._path(name).unlink(missing_ok=True)
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def _save(self, name: str, files: Mapping[str, Any], parts: list[str], facts: Mapping[str, Any]) -> None:
        self._path(name).parent.mkdir(parents=True, exist_ok=True)
        write_json(self._path(name), {"key": self.key, "stage": name, "files": files, "parts": parts, "facts": facts})

    def _path(self, name: str) -> Path:
        return self.folder / "stages" / f"{name}.json"

    def _record(self, name: str) -> dict[str, Any] | None:
        try:
            record = json.loads(self._path(name).read_text(encoding="utf-8"))
            return record if record["key"] == self.key else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _whole(self, name: str) -> bool:
        """Whether a stage is there, of this key, with the files that were written."""
        record = self._record(name)
        if record is None:
            return False
        folder = self.folder / name
        return all(
            (folder / file).is_file() and hash_file(folder / file) == facts["sha256"]
            for file, facts in record["files"].items()
        )


@dataclass
class TextReport:
    """What became of a text data set."""

    path: str
    manifest: dict[str, Any]
    made: list[str]
    """The stages that were made by this call; the others were there."""

    def __str__(self) -> str:
        manifest = self.manifest
        sizes = ", ".join(f"{count:,} {split}" for split, count in manifest["sizes"].items())
        lines = [manifest["notice"], f"{sum(manifest['sizes'].values()):,} {manifest['unit']} in {self.path} ({sizes})"]
        lines[-1] += f"; split {manifest['split_hash'][:16]}"
        for record in manifest["stages"]:
            for reason, facts in record["facts"].get("dropped", {}).items():
                lines.append(f"  {record['stage']}: {facts['count']:,} left out: {reason} (first: {facts['first'][0]})")
            for part, counts in record["facts"].get("unknown", {}).items():
                rate = counts["unknown"] / max(1, counts["tokens"])
                lines.append(f"  {part}: {rate:.2%} of {counts['tokens']:,} tokens are not in the dictionary")
        lines += [f"  {remark}" for remark in manifest["remarks"]]
        return "\n".join(lines)


def locked(folder: Path) -> FileLock:
    """The lock of a data set's folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / ".lock")


def finish(
    stages: Stages,
    final: Mapping[str, Columns],
    *,
    name: str,
    notice: str,
    unit: str,
    source: Mapping[str, Any],
    options: Mapping[str, Any],
    remarks: Iterable[str] = (),
) -> TextReport:
    """Writes the manifest: sizes, hashes, and what every stage made and left out; the same for the same data.

    Args:
        stages: all of them, run.
        final: the lines of each split.
        name: of the data set.
        notice: licence and citation.
        unit: what the lines are.
        source: what it was made of.
        options: that decided the content, versions of tools among them.
        remarks: for the user.
    """
    hashes = {split: hash_lines(columns) for split, columns in final.items()}
    manifest = {
        "name": name,
        "notice": notice,
        "unit": unit,
        "format": FORMAT,
        "key": stages.key,
        "source": dict(source),
        "options": dict(options),
        "sizes": {split: len(next(iter(columns.values()))) for split, columns in final.items()},
        "hashes": hashes,
        "split_hash": hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest(),
        "stages": [{key: value for key, value in record.items() if key != "key"} for record in stages.records],
        "remarks": list(remarks),
    }
    write_json(stages.folder / "manifest.json", manifest)
    return TextReport(str(stages.folder), manifest, list(stages.made))
