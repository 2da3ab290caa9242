"""Fractions of a training split that lie within one another: 1 % within 10 % within 25 % within all."""

import numpy as np


def nested_order(labels: np.ndarray, seed: int) -> np.ndarray:
    """An order of samples of which every beginning has each class in its share, to within one sample of a class.

    Args:
        labels: (n,) integer classes.
        seed: of the order within each class.

    Returns:
        A permutation of 0 to n - 1; its first k entries are the subset of k samples.
    """
    rng = np.random.default_rng([seed, 1])
    place = np.empty(len(labels))
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        place[rows] = (np.arange(len(rows)) + 0.5) / len(rows)
    return np.lexsort((labels, place))


def subset_size(fraction: float, total: int) -> int:
    """Samples of a fraction of `total`.

    Raises:
        ValueError: for a fraction that is not above 0 and at most 1, or leaves no sample.
    """
    if not 0 < fraction <= 1:
        raise ValueError(f"data.fraction must be above 0 and at most 1; got {fraction}")
    size = round(fraction * total)
    if size < 1:
        raise ValueError(f"data.fraction={fraction} of {total} training images is none")
    return size
