"""IMDb: 25,000 reviews to train and 25,000 to test (Maas et al., ACL 2011), in pieces of a vocabulary of 16,000."""

import hashlib
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

import numpy as np

from ..errors import RunError
from .archives import fetch_url, hash_file, read_members
from .base import data_folder, stratified_split
from .binarize import binarize_classification
from .segmentation import pieces, tools
from .text import (
    Columns,
    Dropped,
    Made,
    Stages,
    TextReport,
    common,
    finish,
    locked,
    one_line,
    same_words,
    split_lines,
)

NOTICE = (
    "imdb: Maas et al., Learning word vectors for sentiment analysis, ACL 2011; the reviews' copyright is their "
    "authors', for research"
)
URLS = ("https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz",)
MD5 = "7c2ac02c03563afcf9b574c7e56c153a"
PER_CLASS = 12_500
LABELS = {"neg": "negative", "pos": "positive"}
VOCABULARY = 16_000
VALID_SIZE = 2_500

_BREAK = re.compile(r"<br\s*/?>", re.IGNORECASE)
_NAME = re.compile(r"(\d+)_(\d+)\.txt")


def prepare(
    folder: Path,
    archive: Path | None = None,
    *,
    partial: bool = False,
    valid_size: int = VALID_SIZE,
    vocabulary: int = VOCABULARY,
    seed: int = 0,
    quiet: bool = False,
) -> TextReport:
    """Makes `folder`/imdb/pieces/{train,valid,test}.{input0,label,id} and data-bin; goes on where it was stopped.

    The official test half is the test split; the validation split comes out of the training half, stratified.

    Args:
        folder: the folder of all data.
        archive: aclImdb_v1.tar.gz, or a folder with its content; None takes the one in `folder`/imdb/raw or fetches it.
        partial: takes an archive that is not the whole data set.
        valid_size: reviews to validate on.
        vocabulary: entries of the dictionary, made of the training split alone.
        seed: of the choice of the validation split.
        quiet: shows no progress.

    Raises:
        RunError: for an archive out of reach, damaged, or incomplete.
    """
    target = data_folder(folder) / "imdb"
    with locked(target):
        source = archive or fetch_url(URLS, target / "raw", MD5)
        origin = _origin(source, partial)
        options = {"vocabulary": vocabulary, "valid_size": valid_size, "seed": seed, **tools("sentencepiece")}
        stages = Stages(target, [origin, options], quiet)
        extracted = stages.run("extract", lambda: _extract(source, partial))
        split = stages.run("split", lambda: _split(extracted, valid_size, seed))
        stages.run("pieces", lambda: pieces(split, vocabulary, False, stages))
        skipped = binarize_classification(stages)
        return finish(
            stages,
            split,
            name="imdb",
            notice=NOTICE,
            unit="reviews",
            source=origin,
            options=options,
            remarks=[
                *[
                    f"{count:,} reviews of the split {part} are trained on as well (case, punctuation and Unicode form "
                    "aside): the official halves share them"
                    for part, count in common(split, ["text"]).items()
                    if count
                ],
                *([skipped] if skipped else []),
            ],
        )


def clean_review(text: str) -> str:
    """A review in one line: `<br />` and line separators of every kind are spaces."""
    return one_line(_BREAK.sub(" ", text))


def _origin(source: Path, partial: bool) -> dict[str, str]:
    if source.is_dir():
        # Known by names, sizes and times: the content of 50,000 files takes long to read.
        digest = hashlib.sha256()
        for path in sorted(source.rglob("*.txt")):
            name = path.relative_to(source).as_posix()
            if _wanted(PurePosixPath(name)):
                digest.update(f"{name} {path.stat().st_size} {path.stat().st_mtime_ns}\n".encode())
        return {"folder": digest.hexdigest()}
    if not source.is_file():
        raise RunError(f"{source} is not there")
    md5 = hash_file(source, "md5")
    if md5 != MD5 and not partial:
        raise RunError(
            f"{source} is damaged or another file than aclImdb_v1.tar.gz: its md5 is {md5}, not {MD5}. Fetch it again, "
            "or take what is there as a data set of its own with --partial"
        )
    return {"file": source.name, "md5": md5}


def _wanted(path: PurePosixPath) -> bool:
    return (
        path.suffix == ".txt"
        and not path.name.startswith(".")
        and len(path.parts) >= 3
        and path.parts[-3] in ("train", "test")
        and path.parts[-2] in LABELS
    )


def _extract(source: Path, partial: bool) -> Made:
    """The reviews of both halves, negative ones first, in the order of their numbers."""
    dropped = Dropped()
    rows: dict[str, list[tuple[str, int, str, str]]] = {"train": [], "test": []}
    seen: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for member, content in read_members(source, _wanted):
        half, label, file = PurePosixPath(member).parts[-3:]
        name = f"{half}/{label}/{file}"
        seen[name] += 1
        files[f"{half}/{label}"] += 1
        number = _NAME.fullmatch(file)
        lines = split_lines(content, name)
        if number is None:
            dropped.add("no name of the form <number>_<rating>.txt", name)
        elif None in lines:
            dropped.add("not UTF-8", name)
        elif not (text := clean_review("\n".join(line or "" for line in lines))):
            dropped.add("empty text", name)
        else:
            rows[half].append((label, int(number[1]), text, f"{label}/{file}"))
    _check_complete(source, seen, files, partial)
    parts: dict[str, Columns] = {}
    for half, reviews in rows.items():
        reviews.sort(key=lambda row: (row[0], row[1], row[3]))
        parts[half] = {
            "text": [text for _, _, text, _ in reviews],
            "label": [LABELS[label] for label, _, _, _ in reviews],
            "id": [name for _, _, _, name in reviews],
        }
    words = {half: [same_words(text) for text in columns["text"]] for half, columns in parts.items()}
    both = set(words["train"]) & set(words["test"])
    repeated = {half: len(texts) - len(set(texts)) for half, texts in words.items()}
    facts = {"files": dict(sorted(files.items())), "dropped": dropped.facts(), "repeated": repeated}
    return Made(parts, facts | {"texts_in_both_halves": len(both)})


def _check_complete(source: Path, seen: Mapping[str, int], files: Mapping[str, int], partial: bool) -> None:
    twice = [name for name, count in seen.items() if count > 1]
    if twice:
        raise RunError(f"{source} holds {twice[0]} more than once ({len(twice)} such names)")
    expected = [f"{half}/{label}" for half in ("train", "test") for label in LABELS]
    counted = ", ".join(f"{files.get(part, 0):,} in {part}" for part in expected)
    if not all(files.get(part) for part in expected):
        raise RunError(f"{source} holds no reviews of the layout {{train,test}}/{{neg,pos}}/<name>.txt ({counted})")
    if not partial and any(files[part] != PER_CLASS for part in expected):
        raise RunError(
            f"{source} is not complete: {counted} instead of {PER_CLASS:,} each. Fetch it again, or take what is there "
            "as a data set of its own with --partial"
        )


def _split(parts: dict[str, Columns], valid_size: int, seed: int) -> Made:
    """Validates on texts that occur once in both halves, so that none is trained or tested on as well."""
    train = parts["train"]
    words = [same_words(text) for text in train["text"]]
    times = Counter([*words, *map(same_words, parts["test"]["text"])])
    unique = np.array([i for i, text in enumerate(words) if times[text] == 1], np.int64)
    labels = np.array([list(LABELS.values()).index(train["label"][i]) for i in unique])
    try:
        valid = set(unique[stratified_split(labels, {"valid": valid_size}, seed)["valid"]].tolist())
    except ValueError as error:
        raise RunError(f"imdb: {error}") from error
    made: dict[str, Columns] = {"train": {}, "valid": {}, "test": parts["test"]}
    for column, lines in train.items():
        made["train"][column] = [line for i, line in enumerate(lines) if i not in valid]
        made["valid"][column] = [lines[i] for i in sorted(valid)]
    return Made(made, {"in_train_as_well": common(made, ["text"])})
