"""Folders of one's own, a folder for each class as torchvision's ImageFolder has them, and their splits.

`root/class/.../file`, or `root/train/class/.../file` beside `val` and `test`. What cannot be used is refused with a
sentence: what, where, what to do.
"""

import csv
import os
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..errors import RunError
from ..seeding import stream_seed
from .base import SPLITS, stratified_split

#: What the folders of splits may be called.
SPLIT_FOLDERS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
LAYOUT = "FOLDER/class/file, or FOLDER/train/class/file beside FOLDER/val and FOLDER/test"
#: Names that a message lists at most.
SHOWN = 3


class ClassFile(NamedTuple):
    """A file below a class folder."""

    split: str | None
    """Its split, None where the folder has no split folders."""
    label: str
    name: str
    """Its path below the root, with "/"."""
    stamp: str
    """Changes with its content: size and time."""


def list_files(root: str | Path | None, suffixes: Collection[str], kind: str) -> list[ClassFile]:
    """The files of all classes, sorted by name; hidden files and those with other suffixes play no part.

    Args:
        root: the folder.
        suffixes: in small letters, with the dot.
        kind: what messages call such files: "images".

    Raises:
        RunError: for a folder that is missing, a file, empty, without class folders or such files; with a single class,
            an empty one, or split folders of different classes; with links in a circle or names that are no text.
    """
    path = _folder(root, kind)
    entries = _entries(path, path)
    if not entries:
        raise RunError(f"data.root={root} is empty: put {kind} into it as {LAYOUT}")
    folders = [entry.name for entry in entries if entry.is_dir()]
    if not folders:
        raise RunError(f"data.root={root} has no class folders, only files: put {kind} into it as {LAYOUT}")
    tops = _split_folders(path, folders)
    classes = {top: [each.name for each in _entries(path / top, path) if each.is_dir()] for top in tops}
    files = []
    for top, labels in classes.items():
        for label in labels:
            place = path / top / label
            for file in _walk(place, path, (_identity(path), _identity(path / top))):
                name = file.relative_to(path).as_posix()
                if file.suffix.lower() in suffixes:
                    files.append(ClassFile(tops[top], label, name, _stamp(file)))
    _check_classes(path, classes, files, suffixes, kind)
    return sorted(files, key=lambda file: file.name)


def _folder(root: str | Path | None, kind: str) -> Path:
    if root is None:
        raise RunError(
            f"data.root is missing: give data.root=FOLDER, the folder with a folder of {kind} for each class"
        )
    path = Path(root)
    if path.is_file():
        raise RunError(f"data.root={root} is a file: give the folder with the class folders; an archive unpacked")
    if not path.is_dir():
        raise RunError(f"data.root={root} is not there: correct the path, or make the folder as {LAYOUT}")
    return path


def _entries(folder: Path, root: Path) -> list[os.DirEntry[str]]:
    """The entries of a folder, sorted, without hidden ones and what macOS puts into archives."""
    with os.scandir(folder) as found:
        entries = sorted((each for each in found if not each.name.startswith((".", "__"))), key=lambda each: each.name)
    for entry in entries:
        # Bytes that are no UTF-8 are surrogates here; tables of names have a line each.
        if any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in entry.name):
            raise RunError(
                f"data.root={_shown(root)}: the name {entry.name!r} in {_shown(folder)} is no UTF-8, or has line "
                "breaks or control characters: rename it"
            )
    return entries


def _shown(path: Path) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _identity(folder: Path) -> tuple[int, int]:
    found = folder.stat()
    return found.st_dev, found.st_ino


def _walk(folder: Path, root: Path, above: tuple[tuple[int, int], ...]) -> Iterator[Path]:
    identity = _identity(folder)
    if identity in above:
        raise RunError(f"data.root={root}: {folder} is a link to a folder that it lies in, a circle: remove the link")
    for entry in _entries(folder, root):
        if entry.is_dir():
            yield from _walk(folder / entry.name, root, (*above, identity))
        else:
            yield folder / entry.name


def _stamp(file: Path) -> str:
    try:
        found = file.stat()
    except OSError:  # a link that leads nowhere: reading it says so
        return "gone"
    return f"{found.st_size} {found.st_mtime_ns}"


def _split_folders(root: Path, folders: Sequence[str]) -> dict[str, str | None]:
    """The folders that hold class folders, and the split of each: the root alone, "", where there are no splits."""
    named = [name for name in folders if name in SPLIT_FOLDERS]
    others = [name for name in folders if name not in SPLIT_FOLDERS]
    if "train" not in named or (others and len(named) == 1):  # "train" may be a class, beside "bus"
        return {"": None}
    if others:
        raise RunError(
            f"data.root={root} has the split folders {_listed(named)} beside {_listed(others)}: move the others away, "
            f"or all into class folders ({LAYOUT})"
        )
    if len({SPLIT_FOLDERS[name] for name in named}) < len(named):
        raise RunError(f"data.root={root} has two folders of one split ({_listed(named)}): put them into one")
    return {name: SPLIT_FOLDERS[name] for name in named}


def _check_classes(
    root: Path,
    classes: Mapping[str, Sequence[str]],
    files: Sequence[ClassFile],
    suffixes: Collection[str],
    kind: str,
) -> None:
    train = classes.get("train", classes.get("", []))
    for top, labels in classes.items():
        differing = sorted(set(labels) ^ set(train))
        if differing:
            raise RunError(
                f"data.root={root}: the split folders train and {top} have different classes ({_listed(differing)} "
                f"{'is' if len(differing) == 1 else 'are'} in one alone): each class needs a folder in each of them"
            )
    if not files:
        raise RunError(
            f"data.root={root} holds no {kind} in its class folders ({_listed(train) or 'there are none'}): those "
            f"named {', '.join(sorted(suffixes))} are read"
        )
    if len(train) < 2:
        raise RunError(
            f"data.root={root} has one class only ({train[0]}): two are needed, a folder for each ({LAYOUT}); is the "
            "folder above or below it meant?"
        )
    filled = {(file.split, file.label) for file in files}
    for top in classes:
        for label in train:
            if (SPLIT_FOLDERS.get(top), label) not in filled:
                raise RunError(
                    f"data.root={root}: the class folder {Path(top) / label} holds no {kind}: put some into it, or "
                    f"remove it; those named {', '.join(sorted(suffixes))} are read"
                )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def left_out(errors: Mapping[str, str], total: int, table: Path) -> str:
    """One line on files that are in no split, with the first of them; `table` lists all."""
    first = "; ".join(f"{name}: {reason}" for name, reason in list(errors.items())[:SHOWN])
    return f"{len(errors)} of {total:,} files left out ({first}{'; ...' if len(errors) > SHOWN else ''}): {table}"


def read_split_file(path: str | Path, names: Collection[str]) -> dict[str, str]:
    """The split of each file that a table lists.

    Args:
        path: CSV in UTF-8 with the columns `path`, below the root, and `split` (train, val or test); further columns
            play no part.
        names: of the files that there are.

    Raises:
        RunError: for a table that is not there or no such table, and for a row of a file that is not there, of an
            unknown split or a second one.
    """
    where = f"data.splits={path}"
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise RunError(f"{where} cannot be read ({error}): give a CSV file in UTF-8 with columns path,split") from error
    if not rows or not {"path", "split"} <= rows[0].keys():
        raise RunError(f"{where} has no rows, or no columns path and split: its first line must be path,split")
    splits: dict[str, str] = {}
    for line, row in enumerate(rows, 2):
        name, split = (row["path"] or "").removeprefix("./"), SPLIT_FOLDERS.get((row["split"] or "").strip().lower())
        if split is None:
            raise RunError(f"{where}, row {line}: the split must be train, val or test; got {row['split']!r}")
        if name not in names:
            raise RunError(f"{where}, row {line}: {name!r} is no file of data.root: give paths below it")
        if splits.setdefault(name, split) != split:
            raise RunError(f"{where}, row {line}: {name} is in {splits[name]} already: give it one split")
    return splits


def divide(
    root: str | Path | None,
    classes: Sequence[str],
    labels: np.ndarray,
    splits: Sequence[str | None],
    shares: Mapping[str, float],
    seed: int,
) -> dict[str, np.ndarray]:
    """Sorted indices of each split; a split that the samples do not have is drawn from those to train on, by class.

    A share of every class is drawn, rounded, and at least one sample: how a class is divided depends on it alone.

    Args:
        root: what messages call the folder.
        classes: their names.
        labels: (n,) integer classes.
        splits: (n,) of each sample; None is one to train on.
        shares: of "val" and "test", where they are drawn.
        seed: of the choice; not the run's seed.

    Raises:
        ValueError: for shares that leave nothing.
        RunError: for a class with too few samples.
    """
    given = np.array([split or "train" for split in splits])
    drawn = [split for split in SPLITS if split != "train" and split not in set(given)]
    if any(not shares[split] > 0 for split in drawn) or sum(shares[split] for split in drawn) >= 1:
        raise ValueError(
            "data.val_share and data.test_share must be above 0 and leave something to train on; "
            f"got {shares['val']} and {shares['test']}"
        )
    parts: dict[str, list[np.ndarray]] = {split: [] for split in SPLITS}
    for number, name in enumerate(classes):
        for split in set(SPLITS) - set(drawn) - {"train"}:
            parts[split].append(np.flatnonzero((labels == number) & (given == split)))
        rows = np.flatnonzero((labels == number) & (given == "train"))
        sizes = {split: max(1, round(shares[split] * len(rows))) for split in drawn}
        counts = {split: len(parts[split][-1]) for split in SPLITS if split not in (*drawn, "train")}
        if sum(sizes.values()) >= len(rows) or 0 in counts.values():
            counts["train"] = len(rows)
            raise RunError(
                f"data.root={root}: the class {name} has too few samples that can be read "
                f"({', '.join(f'{count} {split}' for split, count in counts.items())}"
                f"{'; ' + ' and '.join(drawn) + ' are drawn from train' if drawn else ''}): each split needs one at "
                "least; add some, or remove the class"
            )
        chosen = stratified_split(np.zeros(len(rows), np.int64), sizes, stream_seed(f"split {name}", seed))
        for split, places in chosen.items():
            parts[split].append(rows[places])
    return {split: np.sort(np.concatenate(found)) for split, found in parts.items()}


def apply_split_file(
    path: str | Path | None, names: Sequence[str], splits: Sequence[str | None], errors: Collection[str]
) -> tuple[np.ndarray, list[str | None]]:
    """Which samples are used and the split of each; files that a table does not list are in no split.

    Args:
        path: of the table (`read_split_file`); None keeps what the folders say.
        names: of the samples.
        splits: of each by its folder.
        errors: files that are known but could not be read, which the table may list.
    """
    if path is None:
        return np.arange(len(names)), list(splits)
    table = read_split_file(path, {*names, *errors})
    rows = np.array([row for row, name in enumerate(names) if name in table], dtype=np.int64)
    if "train" not in Counter(table[names[row]] for row in rows):
        raise RunError(f"data.splits={path} has no file to train on that can be read: name some with split train")
    return rows, [table[names[row]] for row in rows]
