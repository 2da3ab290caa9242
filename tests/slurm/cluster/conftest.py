"""A SLURM that is up (slurm/dev_cluster/up), and sweeps on it."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.experiments.fairseq_runs.conftest import text_data  # noqa: F401  a fixture
from tests.slurm.cluster.sweeps import Sweep


@pytest.fixture(scope="session", autouse=True)
def _cluster() -> None:
    if "SLURM_CONF" not in os.environ or shutil.which("sbatch") is None:
        pytest.skip("needs the cluster that `make test-slurm` brings up")


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def sweep(tmp_path: Path, data_folder: Path) -> Iterator[Sweep]:
    one = Sweep(tmp_path, data_folder)
    yield one
    for file in (tmp_path / "runs" / ".submissions").glob("*/submission.json"):
        subprocess.run(["scancel", json.loads(file.read_text())["array_job_id"]], capture_output=True, check=False)
