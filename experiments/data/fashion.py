"""Whether Debian's package dataset-fashion-mnist is installed. Imports nothing heavy: configurations ask for it."""

from pathlib import Path

#: Where the package puts its four files.
FOLDER = Path("/usr/share/datasets/fashion-mnist")
FILES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)


def missing_files() -> list[str]:
    """Those of the four files that are not there."""
    return [name for name in FILES if not (FOLDER / name).is_file()]


def standin_source() -> str:
    """What this machine has for `experiments.data.standin`: "fashion_mnist" where it is installed, or "mnist5k"."""
    return "mnist5k" if missing_files() else "fashion_mnist"
