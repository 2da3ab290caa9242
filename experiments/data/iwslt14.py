"""IWSLT'14 German-English (Cettolo et al., 2014) by the recipe of fairseq's prepare-iwslt14.sh, without Perl."""

import hashlib
import html
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from ..errors import RunError
from .archives import fetch_url, read_members
from .base import data_folder
from .binarize import binarize_translation
from .segmentation import joint_bpe, lower_tokens, tools
from .text import (
    Columns,
    Dropped,
    Made,
    Stages,
    TextReport,
    common,
    empty_side,
    finish,
    keep,
    locked,
    odd_lengths,
    one_line,
    split_lines,
)

NOTICE = (
    "iwslt14: Cettolo et al., Report on the 11th IWSLT evaluation campaign, 2014; TED talks, CC BY-NC-ND; for research"
)
URLS = (
    "https://wit3.fbk.eu/archive/2014-01/texts/de/en/de-en.tgz",
    "https://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz",
)
LANGUAGES = ("de", "en")
#: The test set, in this order.
TEST_PARTS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
METADATA = ("<url>", "<talkid>", "<keywords>")
MERGES = 10_000
VALID_EVERY = 23
MIN_TOKENS, MAX_TOKENS, MAX_RATIO, MAX_TOKEN = 1, 175, 1.5, 1_000
#: Pairs that the Perl recipe gives of the whole archive.
USUAL = {"train": 160_239, "valid": 7_283, "test": 6_750}

_TAGS = re.compile("</?(?:title|description)>")
_SEGMENT = re.compile(r'<seg id="([0-9]*)">(.*?)</seg>', re.DOTALL)
_DOCUMENT = re.compile(r'<doc\b[^>]*\bdocid="([^"]*)"')


def prepare(
    folder: Path,
    archive: Path | None = None,
    *,
    merges: int = MERGES,
    jobs: int | None = None,
    quiet: bool = False,
) -> TextReport:
    """Makes `folder`/iwslt14/bpe/{train,valid,test}.{de,en} and data-bin of the archive; goes on where it was stopped.

    Args:
        folder: the folder of all data.
        archive: de-en.tgz, or a folder with its content; None takes the one in `folder`/iwslt14/raw, or fetches it.
        merges: of the joint byte-pair encoding.
        jobs: processes, None for one per core.
        quiet: shows no progress.

    Raises:
        RunError: for an archive out of reach or damaged, and for files of it that do not fit one another.
    """
    target = data_folder(folder) / "iwslt14"
    with locked(target):
        source = archive or fetch_url(URLS, target / "raw")
        files = _read(source)
        options = {
            "merges": merges,
            "length": [MIN_TOKENS, MAX_TOKENS],
            "ratio": MAX_RATIO,
            "valid_every": VALID_EVERY,
            **tools("sacremoses", "subword-nmt"),
        }
        origin = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())}
        stages = Stages(target, [origin, options], quiet)
        extracted = stages.run("extract", lambda: _extract(files))
        tokens = stages.run("tokens", lambda: lower_tokens(extracted, LANGUAGES, stages, jobs, _unfit, ["train"]))
        split = stages.run("split", lambda: _split(tokens))
        stages.run("bpe", lambda: joint_bpe(split, LANGUAGES, merges, stages))
        skipped = binarize_translation(stages, *LANGUAGES)
        sizes = {part: len(columns["de"]) for part, columns in split.items()}
        remarks = [remark for record in stages.records for remark in record["facts"].get("odd_lengths", [])]
        remarks += [
            f"{count:,} pairs of the split {part} have a side that is trained on as well (case, punctuation and "
            "Unicode form aside): the recipe keeps them"
            for part, count in common(split, LANGUAGES).items()
            if count
        ]
        remarks += [skipped] if skipped else []
        if any(abs(sizes[part] - usual) > usual // 100 for part, usual in USUAL.items()):
            listed = ", ".join(f"{count:,} {part}" for part, count in USUAL.items())
            remarks.append(f"the whole archive gives about {listed} pairs: this is another, or a part of it")
        return finish(
            stages,
            split,
            name="iwslt14",
            notice=NOTICE,
            unit="sentence pairs",
            source=origin,
            options=options,
            remarks=remarks,
        )


def _wanted() -> list[str]:
    return [
        *(f"train.tags.de-en.{language}" for language in LANGUAGES),
        *(f"IWSLT14.{part}.de-en.{language}.xml" for part in TEST_PARTS for language in LANGUAGES),
    ]


def _read(source: Path) -> dict[str, bytes]:
    """The files of the recipe, by their bare names."""
    wanted = _wanted()
    # An archive of a Mac carries "._name" beside each file; only the exact names are taken.
    files: dict[str, bytes] = {}
    for member, content in read_members(source, lambda path: path.name in wanted):
        name = PurePosixPath(member).name
        if name in files:
            raise RunError(f"{source} holds {name} more than once")
        files[name] = content
    missing = [name for name in wanted if name not in files]
    if missing:
        raise RunError(f"{source} does not hold {', '.join(missing)}: it is not IWSLT'14's de-en, or not all of it")
    return files


def _extract(files: dict[str, bytes]) -> Made:
    dropped = Dropped()
    sides = {language: files[f"train.tags.de-en.{language}"] for language in LANGUAGES}
    train = train_pairs(sides["de"], sides["en"], dropped)
    parts = [
        paired_segments(files[f"IWSLT14.{part}.de-en.de.xml"], files[f"IWSLT14.{part}.de-en.en.xml"], part)
        for part in TEST_PARTS
    ]
    test: Columns = {language: [line for part in parts for line in part[language]] for language in LANGUAGES}
    places = [f"IWSLT14.{name}" for name, part in zip(TEST_PARTS, parts, strict=True) for _ in part["de"]]
    odd = odd_lengths(test, LANGUAGES, places) + odd_lengths(train, LANGUAGES, ["train.tags"] * len(train["de"]))
    test = keep(test, empty_side, dropped, "test")
    return Made({"train": train, "test": test}, {"dropped": dropped.facts(), "odd_lengths": odd})


def train_pairs(de: bytes, en: bytes, dropped: Dropped) -> Columns:
    """The pairs of the training files: without the lines of metadata, titles and descriptions without their tags.

    Raises:
        RunError: where the files do not have the same lines, naming the first that shows it.
    """
    lines = {"de": split_lines(de, "train.tags.de-en.de"), "en": split_lines(en, "train.tags.de-en.en")}
    if len(lines["de"]) != len(lines["en"]):
        pairs = enumerate(zip(lines["de"], lines["en"], strict=False), 1)
        shortest = min(len(side) for side in lines.values())
        first = next((number for number, (a, b) in pairs if _kind(a) != _kind(b)), shortest + 1)
        raise RunError(
            f"train.tags.de-en.de has {len(lines['de']):,} lines and train.tags.de-en.en {len(lines['en']):,}: they do "
            f"not belong together; line {first} is the first that shows it"
        )
    columns: Columns = {"de": [], "en": []}
    for number, pair in enumerate(zip(lines["de"], lines["en"], strict=True), 1):
        texts = [one_line(_TAGS.sub("", line)) if line is not None else None for line in pair]
        kinds = [_kind(line) for line in pair]
        reason = None
        if None in pair:
            reason = "not UTF-8"
        elif kinds[0] in METADATA or kinds[1] in METADATA:
            reason = "metadata (url, talkid, keywords)" if kinds[0] == kinds[1] else "metadata on one side alone"
        elif not texts[0] or not texts[1]:
            reason = f"empty {'de' if not texts[0] else 'en'}"
        if reason:
            dropped.add(reason, f"train:{number}")
            continue
        columns["de"].append(texts[0] or "")
        columns["en"].append(texts[1] or "")
    return columns


def _kind(line: str | None) -> str | None:
    """The tag of a line, where it has one that both sides share."""
    tags = (*METADATA, "<title>", "<description>")
    return next((tag for tag in tags if line is not None and tag in line), None)


def paired_segments(de: bytes, en: bytes, name: str) -> Columns:
    """The segments of a test file's two sides, paired by document and number.

    Raises:
        RunError: where the sides do not have the same segments, or are not UTF-8.
    """
    sides = {"de": _segments(de, f"{name}.de"), "en": _segments(en, f"{name}.en")}
    places = {language: [place for place, _ in side] for language, side in sides.items()}
    if places["de"] != places["en"]:
        pairs = zip(places["de"], places["en"], strict=False)
        shorter = min(places.values(), key=len)
        first = next((f"{a} and {b}" for a, b in pairs if a != b), f"what follows {shorter[-1] if shorter else 'none'}")
        raise RunError(
            f"IWSLT14.{name}: the German side has {len(places['de'])} segments and the English {len(places['en'])}; "
            f"they differ first at {first}"
        )
    return {language: [text for _, text in side] for language, side in sides.items()}


def _segments(content: bytes, name: str) -> list[tuple[tuple[str, str], str]]:
    """((document, number), text) of the segments of one side."""
    lines = split_lines(content, name)
    if None in lines:
        raise RunError(f"IWSLT14.{name}:{lines.index(None) + 1} is not UTF-8: fetch the archive again")
    text = "\n".join(line or "" for line in lines)
    documents = [(match.start(), match[1]) for match in _DOCUMENT.finditer(text)]
    found = []
    for match in _SEGMENT.finditer(text):
        document = next((doc for start, doc in reversed(documents) if start < match.start()), "")
        # The recipe makes the typographic apostrophe plain in the test set alone, whose files are XML: "&amp;" is "&".
        found.append(((document, match[1]), one_line(html.unescape(match[2]).replace("’", "'"))))
    opened = text.count("<seg id")
    if opened != len(found):
        raise RunError(f"IWSLT14.{name}: {opened - len(found)} of {opened} segments do not end with </seg>")
    return found


def _unfit(row: dict[str, str]) -> str | None:
    """Why Moses' clean-corpus-n leaves a pair out."""
    words = [line.split() for line in row.values()]
    counts = [len(side) for side in words]
    if min(counts) < MIN_TOKENS:
        return empty_side(row)
    if max(counts) > MAX_TOKENS:
        return f"more than {MAX_TOKENS} tokens"
    if max(counts) > MAX_RATIO * min(counts):
        return f"lengths differ by more than {MAX_RATIO}"
    if any(len(word) > MAX_TOKEN for side in words for word in side):
        return f"a token of more than {MAX_TOKEN:,} characters"
    return None


def _split(parts: dict[str, Columns]) -> Made:
    """Every 23rd pair of the training files validates."""
    made: dict[str, Columns] = {"train": {}, "valid": {}, "test": parts["test"]}
    for language, lines in parts["train"].items():
        made["valid"][language] = _every(lines, True)
        made["train"][language] = _every(lines, False)
    for part, columns in made.items():
        if not columns["de"]:
            raise RunError(f"iwslt14: no pair is left for the split {part}")
    return Made(made)


def _every(lines: Sequence[str], taken: bool) -> list[str]:
    return [line for number, line in enumerate(lines, 1) if (number % VALID_EVERY == 0) == taken]
