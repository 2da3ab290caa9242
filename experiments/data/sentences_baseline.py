"""Logistic regression on words for `movie_sentences`: what a model has to beat.

`python -m experiments.data.sentences_baseline` prints its test accuracy. It knows which words and pairs of neighbours a
sentence has, and nothing else of their order. Its regularisation is chosen on validation; the test split is read once.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline

from ..command import finish
from ..errors import RunError

STRENGTHS = (0.1, 0.3, 1.0, 3.0, 10.0)
LENGTHS = (1, 2)


@dataclass(frozen=True)
class Baseline:
    """The chosen classifier.

    Attributes:
        words: the longest run of neighbouring words that is a feature.
        strength: inverse strength of the L2 penalty.
        val: accuracy on the validation split, a fraction of 1.
        test: accuracy on the test split.
    """

    words: int
    strength: float
    val: float
    test: float

    def __str__(self) -> str:
        features = "words" if self.words == 1 else f"words and runs of up to {self.words}"
        return (
            f"logistic regression on {features} (C={self.strength:g}, chosen on validation): "
            f"test accuracy {self.test:.4f}"
        )


def measure(folder: Path) -> Baseline:
    """Chooses on the validation split of a prepared `movie_sentences` and tests once.

    Args:
        folder: the folder of all data.

    Raises:
        RunError: where the data are not prepared.
    """
    splits = {split: _read(folder / "movie_sentences" / "split", split) for split in ("train", "valid", "test")}
    fitted: list[tuple[float, int, float, Pipeline]] = []
    for words in LENGTHS:
        for strength in STRENGTHS:
            vectorizer = CountVectorizer(ngram_range=(1, words), binary=True)
            classifier = make_pipeline(vectorizer, LogisticRegression(C=strength, max_iter=2000))
            classifier.fit(*splits["train"])
            fitted.append((float(classifier.score(*splits["valid"])), words, strength, classifier))
    val, words, strength, best = max(fitted, key=lambda entry: entry[0])  # the first of equals
    return Baseline(words, strength, val, float(best.score(*splits["test"])))


def _read(folder: Path, split: str) -> tuple[list[str], list[str]]:
    try:
        text, label = (
            (folder / f"{split}.{column}").read_bytes().decode("utf-8").removesuffix("\n").split("\n")
            for column in ("text", "label")
        )
    except OSError as error:
        raise RunError(f"{error.filename} is not there: python -m experiments.data.prepare movie_sentences") from None
    return text, label


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.data.sentences_baseline", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--folder", type=Path, default=Path("data"), help="folder of all data (default: data)")
    try:
        print(measure(parser.parse_args(arguments).folder))
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    finish(main)
