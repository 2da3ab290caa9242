"""fairseq-preprocess, the last stage: pieces become the binary files that fairseq trains on."""

import importlib.util
import os
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import RunError
from .text import SPLITS, Stages

FOLDER = "data-bin"
_MAGIC = b"MMIDIDX\x00\x00"


def binarize_translation(stages: Stages, source: str, target: str) -> str | None:
    """`data-bin/{train,valid,test}.<source>-<target>.*` for fairseq's task `translation`, out of the stage `bpe`.

    Returns:
        None, or the sentence that says why it was left out.
    """
    text = stages.folder / "bpe"

    def make(folder: Path) -> dict[str, Any]:
        arguments = ["--source-lang", source, "--target-lang", target]
        _preprocess(folder, [*arguments, *_prefixes(text)])
        counts = {}
        for split in SPLITS:
            for language in (source, target):
                built = folder / f"{split}.{source}-{target}.{language}.idx"
                counts[f"{split}.{language}"] = _agree(built, text / f"{split}.{language}")
        unknown = {
            f"{split}.{language}": _unknown(text / f"{split}.{language}", folder / f"dict.{language}.txt")
            for split in SPLITS
            for language in (source, target)
        }
        return {"lines": counts, "unknown": unknown}

    return _run(stages, make)


def binarize_classification(stages: Stages) -> str | None:
    """`data-bin/{input0,label}` for fairseq's task `sentence_prediction`, out of the stage `pieces`.

    The manifest gets the class index of each label: fairseq sorts them by how often they occur.

    Returns:
        None, or the sentence that says why it was left out.
    """
    text = stages.folder / "pieces"

    def make(folder: Path) -> dict[str, Any]:
        counts = {}
        for column in ("input0", "label"):
            given = ["--srcdict", str(text / "dict.input0.txt")] if column == "input0" else []
            _preprocess(folder / column, ["--only-source", *given, *_prefixes(text, f".{column}")])
            for split in SPLITS:
                counts[f"{split}.{column}"] = _agree(folder / column / f"{split}.idx", text / f"{split}.{column}")
        lines = (folder / "label" / "dict.txt").read_text(encoding="utf-8").splitlines()
        labels = [line.split(" ")[0] for line in lines if not line.startswith("madeupword")]
        unknown = {f"{split}.{column}": _unknown(text / f"{split}.{column}", folder / column / "dict.txt")
                   for split in SPLITS for column in ("input0", "label")}  # fmt: skip
        if any(unknown[f"{split}.label"]["unknown"] for split in SPLITS):
            raise RunError(f"{text}: a label stands in valid or test that the training split does not have")
        unknown = {part: counts for part, counts in unknown.items() if part.endswith("input0")}
        return {"lines": counts, "labels": {label: index for index, label in enumerate(labels)}, "unknown": unknown}

    return _run(stages, make)


def _prefixes(text: Path, suffix: str = "") -> list[str]:
    names = {"train": "--trainpref", "valid": "--validpref", "test": "--testpref"}
    return [word for split in SPLITS for word in (names[split], str(text / f"{split}{suffix}"))]


class _NotThereError(Exception):
    """fairseq cannot be imported."""


def _run(stages: Stages, make: Callable[[Path], dict[str, Any]]) -> str | None:
    try:
        stages.run_files(FOLDER, make)
    except _NotThereError as error:
        return f"{FOLDER} was left out, because fairseq cannot be used ({error}): install it, give this command again"
    return None


def _preprocess(folder: Path, arguments: Sequence[str]) -> None:
    if importlib.util.find_spec("fairseq_cli") is None:
        raise _NotThereError("it is not installed")
    command = [sys.executable, "-m", "fairseq_cli.preprocess", *arguments, "--destdir", str(folder)]
    # A process of its own: fairseq changes global state of Hydra and of logging. Its files are UTF-8 in any locale.
    environment = {**os.environ, "PYTHONUTF8": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", env=environment)
    if done.returncode:
        last = ((done.stderr or done.stdout).strip().splitlines() or ["no reason given"])[-1]
        if last.startswith(("ModuleNotFoundError", "ImportError")):
            raise _NotThereError(last)
        raise RunError(f"fairseq-preprocess failed ({done.returncode}): {last}")


def _unknown(text: Path, dictionary: Path) -> dict[str, int]:
    """How many tokens a file has, and how many of them fairseq reads as unknown."""
    known = {line.rsplit(" ", 1)[0] for line in dictionary.read_text(encoding="utf-8").split("\n")}
    tokens = unknown = 0
    with open(text, encoding="utf-8", newline="\n") as lines:
        for line in lines:
            words = line.split()
            tokens += len(words)
            unknown += sum(word not in known for word in words)
    return {"tokens": tokens, "unknown": unknown}


def _agree(index: Path, text: Path) -> int:
    """The number of lines of a binary file, which is that of its text."""
    built, lines = count_sequences(index), text.read_bytes().count(b"\n")
    if built != lines:
        raise RunError(f"{text} has {lines:,} lines, and fairseq-preprocess made {built:,} of them")
    return built


def count_sequences(index: Path) -> int:
    """The number of sequences that fairseq's index file tells in its head.

    Raises:
        RunError: for a file that is no such index.
    """
    with open(index, "rb") as file:
        head = file.read(len(_MAGIC) + 17)
    if len(head) < len(_MAGIC) + 17 or not head.startswith(_MAGIC):
        raise RunError(f"{index} is damaged or no index of fairseq's memory-mapped data sets")
    return int(struct.unpack("<QBQ", head[len(_MAGIC) :])[2])
