"""A linear classifier on extents and moments of the clouds of `data=shapes`: what a model has to beat.

`python -m experiments.data.shapes_baseline` prints its test accuracy. It sees how far a cloud reaches and how it is
spread, but no relation between its parts. Splits, normalisation and number of points are those that the models get.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hydra.utils import instantiate
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from ..command import finish
from ..config import compose, resolve
from ..errors import RunError
from .base import DataModule, SampleKey

ORDERS = (2, 3, 4)


@dataclass(frozen=True)
class Baseline:
    """The classifier with moments up to an order.

    Attributes:
        order: the highest order of the moments.
        n_features: number of features.
        test: accuracy on the test split, a fraction of 1.
    """

    order: int
    n_features: int
    test: float

    def __str__(self) -> str:
        return (
            f"linear classifier on extents and moments up to order {self.order} ({self.n_features} features): "
            f"test accuracy {self.test:.4f}"
        )


def features(points: np.ndarray, order: int) -> np.ndarray:
    """Extents, centroids and central moments x^a y^b z^c with 2 <= a + b + c <= order.

    Args:
        points: (clouds, n, 3).
        order: at least 2.

    Returns:
        (clouds, number of features).
    """
    points = points.astype(np.float64)
    centroids = points.mean(1)
    x, y, z = np.moveaxis(points - centroids[:, None], 2, 0)
    moments = [
        (x**a * y**b * z**c).mean(1)
        for a, b, c in itertools.product(range(order + 1), repeat=3)
        if 2 <= a + b + c <= order
    ]
    return np.column_stack([np.ptp(points, axis=1), centroids, *moments])


def load(overrides: Sequence[str] = ()) -> DataModule:
    """The data of experiment=shapes_set under further overrides.

    Raises:
        RunError: for overrides that Hydra refuses.
    """
    config = resolve(compose(["experiment=shapes_set", *overrides]))
    return instantiate(config["data"], _convert_="all")


def measure(data: DataModule, order: int) -> Baseline:
    """Trains on the training split, as given to evaluation (no augmentation), and tests on the test split."""
    train, test = _clouds(data, "train"), _clouds(data, "test")
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    classifier.fit(features(train[0], order), train[1])
    found = features(test[0], order)
    return Baseline(order, found.shape[1], float(classifier.score(found, test[1])))


def _clouds(data: DataModule, split: str) -> tuple[np.ndarray, np.ndarray]:
    points, labels = data.dataset([split])[[SampleKey(sample, 0, 0) for sample in range(data.sizes[split])]]
    return points.numpy(), labels.numpy()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.data.shapes_baseline", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "overrides", nargs="*", help="overrides of experiment=shapes_set, such as paths.data=/elsewhere"
    )
    options = parser.parse_args(arguments)
    try:
        data = load(options.overrides)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for order in ORDERS:
        print(measure(data, order))
    return 0


if __name__ == "__main__":
    finish(main)
