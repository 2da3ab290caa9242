"""ModelNet40: 12,311 meshes of 40 classes (Wu et al., 3D ShapeNets, CVPR 2015), sampled to point clouds."""

import os
import tempfile
import urllib.error
from pathlib import Path
from typing import Any

from torchvision.datasets.utils import download_url

from ..errors import RunError
from ..progress import for_terminals
from .base import data_folder, prepare_command
from .clouds import CloudData
from .meshes import CloudReport, prepare_clouds

NOTICE = "modelnet40: Wu et al., 3D ShapeNets, CVPR 2015; for academic use, copyright of the models is their makers'"
ARCHIVE = "ModelNet40.zip"
MIRRORS = ("https://modelnet.cs.princeton.edu/", "http://modelnet.cs.princeton.edu/")
COUNTS = {"train": 9_843, "test": 2_468}
NUM_POINTS = 10_000


def clouds_path(folder: str | Path) -> Path:
    """The prepared file in a data folder."""
    return data_folder(folder) / "modelnet40" / "clouds.h5"


def prepare(
    folder: Path,
    archive: Path | None = None,
    *,
    jobs: int | None = None,
    partial: bool = False,
    num_points: int = NUM_POINTS,
    seed: int = 0,
    quiet: bool = False,
) -> CloudReport:
    """Samples ModelNet40's meshes to `folder`/modelnet40/clouds.h5; goes on where it was stopped.

    Args:
        folder: the folder of all data.
        archive: the zip archive, or a folder with its content; None takes ModelNet40.zip or the folder ModelNet40 in
            `folder`/modelnet40, or fetches the archive there.
        jobs: processes, None for one per core.
        partial: takes an archive that does not hold the 9,843 and 2,468 meshes of the whole data set.
        num_points: points per mesh.
        seed: of the sampling.
        quiet: shows no progress.

    Raises:
        RunError: for an archive out of reach, damaged, or incomplete.
    """
    target = clouds_path(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    source = archive or _local(target.parent) or _fetch(target.parent)
    expected = None if partial else COUNTS
    try:
        return prepare_clouds(source, target, num_points, seed, jobs=jobs, expected=expected, quiet=quiet)
    except RunError as error:
        if "it is not complete" not in str(error):
            raise
        raise RunError(
            f"{error}. Fetch it again, or take what is there as a data set of its own with --partial"
        ) from None


def _local(folder: Path) -> Path | None:
    for path in (folder / ARCHIVE, folder / "ModelNet40"):
        if path.exists():
            return path
    return None


def _fetch(folder: Path) -> Path:
    failures = []
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        for mirror in MIRRORS:
            try:
                with for_terminals():
                    download_url(f"{mirror}{ARCHIVE}", temporary, ARCHIVE)
            except (urllib.error.URLError, RuntimeError, OSError) as error:
                failures.append(f"{mirror}: {error}")
            else:
                os.replace(Path(temporary) / ARCHIVE, folder / ARCHIVE)
                return folder / ARCHIVE
    raise RunError(
        f"{ARCHIVE} could not be fetched ({'; '.join(failures)}). Get it from elsewhere and give it as --archive, or "
        f"put it into {folder}"
    )


class ModelNet40(CloudData):
    """ModelNet40's clouds; run `python -m experiments.data.prepare modelnet40` first.

    Args:
        folder: the folder of all data.
        **options: those of `CloudData`.
    """

    name = "modelnet40"

    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(clouds_path(folder), f"run `{prepare_command('modelnet40', folder)}`", **options)
