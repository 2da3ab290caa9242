"""10,605 sentences of movie reviews with mean human ratings from -4 to 4, that the package vaderSentiment carries."""

import io
from collections import defaultdict
from pathlib import Path

import numpy as np

from ..errors import RunError
from .archives import Package, fetch_package, read_members, read_tar
from .base import data_folder, stratified_split
from .binarize import binarize_classification
from .segmentation import pieces, tools
from .text import Columns, Dropped, Made, Stages, TextReport, finish, locked, one_line, same_words, split_lines

NOTICE = (
    "movie_sentences: Hutto, Gilbert, VADER: a parsimonious rule-based model for sentiment analysis of social media "
    "text, ICWSM 2014; out of vaderSentiment 3.3.2 (MIT)"
)
PACKAGE = Package(
    "vaderSentiment",
    "3.3.2",
    "vaderSentiment-3.3.2.tar.gz",
    "5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
)
ARCHIVE = "hutto_ICWSM_2014.tar.gz"
FILE = "movieReviewSnippets_GroundTruth.txt"
#: Ratings of at least this are positive, of at most its negative are negative; those between are left out.
THRESHOLD = 0.5
#: Of the strata that every split has its share of.
BOUNDS = (-2.5, -1.5, 0.0, 1.5, 2.5)
VALID_SIZE, TEST_SIZE = 1_000, 2_000
VOCABULARY = 4_000


def prepare(
    folder: Path,
    archive: Path | None = None,
    *,
    package: Package = PACKAGE,
    valid_size: int = VALID_SIZE,
    test_size: int = TEST_SIZE,
    vocabulary: int = VOCABULARY,
    seed: int = 0,
    quiet: bool = False,
) -> TextReport:
    """Makes `folder`/movie_sentences/pieces/{train,valid,test}.{input0,label,id} and data-bin.

    Args:
        folder: the folder of all data.
        archive: the package's source archive; None takes the one in `folder`/movie_sentences/raw or fetches it.
        package: where the sentences come from.
        valid_size: sentences to validate on.
        test_size: sentences to test on.
        vocabulary: entries of the dictionary, made of the training split alone.
        seed: of the split.
        quiet: shows no progress.

    Raises:
        RunError: for an archive out of reach, or another one.
    """
    target = data_folder(folder) / "movie_sentences"
    with locked(target):
        source = fetch_package(package, target / "raw", archive)
        origin = package._asdict()
        options = {
            "threshold": THRESHOLD,
            "valid_size": valid_size,
            "test_size": test_size,
            "vocabulary": vocabulary,
            "seed": seed,
            **tools("sentencepiece"),
        }
        stages = Stages(target, [origin, options], quiet)
        extracted = stages.run("extract", lambda: _extract(source))
        split = stages.run("split", lambda: _split(extracted["all"], valid_size, test_size, seed))
        stages.run("pieces", lambda: pieces(split, vocabulary, True, stages))
        skipped = binarize_classification(stages)
        return finish(
            stages,
            split,
            name="movie_sentences",
            notice=NOTICE,
            unit="sentences",
            source=origin,
            options=options,
            remarks=[skipped] if skipped else [],
        )


def _read(source: Path) -> bytes:
    """The file of ratings: a member of an archive within the package."""
    for name, outer in read_members(source, lambda path: path.name == ARCHIVE):
        for _, content in read_tar(io.BytesIO(outer), f"{source}: {name}", lambda path: path.name == FILE):
            return content
    raise RunError(f"{source} does not carry {ARCHIVE} with {FILE}: take the source archive, not the wheel")


def _extract(source: Path) -> Made:
    return read_ratings(_read(source))


def read_ratings(content: bytes) -> Made:
    """Sentences that are clearly positive or negative, each once, of lines `id <tab> rating <tab> text`."""
    dropped = Dropped()
    kept: dict[str, list[tuple[str, float, str]]] = defaultdict(list)
    lines = split_lines(content, FILE)
    for number, line in enumerate(lines, 1):
        place = f"{FILE}:{number}"
        fields = line.split("\t") if line is not None else []
        rating = _rating(fields[1]) if len(fields) == 3 else None
        if line is None:
            dropped.add("not UTF-8", place)
        elif rating is None:
            dropped.add("no line of id, rating from -4 to 4, and text", place)
        elif not (text := one_line(fields[2])):
            dropped.add("empty text", place)
        elif abs(rating) < THRESHOLD:
            dropped.add(f"neutral: between -{THRESHOLD} and {THRESHOLD}", place)
        else:
            kept[same_words(text)].append((one_line(fields[0]) or str(number), rating, text))
    columns: Columns = {"text": [], "label": [], "id": [], "rating": []}
    for same in kept.values():
        contrary = len({rating > 0 for _, rating, _ in same}) > 1
        for identity, _, _ in same if contrary else same[1:]:
            dropped.add("repeated, with contrary ratings" if contrary else "repeated", f"id {identity}")
        if not contrary:
            identity, rating, text = same[0]
            columns["text"].append(text)
            columns["label"].append("positive" if rating > 0 else "negative")
            columns["id"].append(identity)
            columns["rating"].append(repr(rating))
    return Made({"all": columns}, {"read": len(lines), "dropped": dropped.facts()})


def _rating(field: str) -> float | None:
    try:
        rating = float(field)
    except ValueError:
        return None
    return rating if -4 <= rating <= 4 else None


def _split(columns: Columns, valid_size: int, test_size: int, seed: int) -> Made:
    """Every split has its share of strong, medium and weak ratings of either sign."""
    strata = np.digitize(np.array([float(rating) for rating in columns["rating"]]), BOUNDS)
    try:
        parts = stratified_split(strata, {"test": test_size, "valid": valid_size}, seed)
    except ValueError as error:
        raise RunError(f"movie_sentences: {error}") from error
    made: dict[str, Columns] = {
        part: {column: [lines[i] for i in parts[part]] for column, lines in columns.items()}
        for part in ("train", "valid", "test")
    }
    labels = {
        part: {label: rows["label"].count(label) for label in sorted(set(rows["label"]))} for part, rows in made.items()
    }
    return Made(made, {"labels": labels})
