"""The README is true: its Python runs, its commands exist, its tables are the files that they show."""

import csv
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_there_is_something_to_run() -> None:
    assert len(BLOCKS) >= 6


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: re.sub(r"\W+", "-", code[:60]))
def test_python_runs(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


def test_commands_name_modules_that_exist() -> None:
    modules = set(re.findall(r"python -m ([\w.]+)", README))
    assert {"experiments.train", "experiments.report", "experiments.evaluate"} <= modules
    missing = [module for module in sorted(modules) if importlib.util.find_spec(module) is None]
    assert not missing


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)\b", README)) <= targets | {"it"}


def test_experiments_and_files_named_exist() -> None:
    for experiment in set(re.findall(r"experiment=(\w+)", README)):
        assert (ROOT / "configs/experiment" / f"{experiment}.yaml").is_file(), experiment
    for path in set(re.findall(r"`((?:plugins|configs|experiments|slurm|tests)/[\w./-]*)`", README)):
        assert (ROOT / path).exists(), path


def test_the_table_of_families_is_the_file() -> None:
    with open(ROOT / "tests/timm_sinkhorn/families.csv", newline="", encoding="utf-8") as file:
        for row in csv.reader(file):
            assert f"| {' | '.join(row)} |" in README
