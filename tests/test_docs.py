"""README and the pages of docs/ are true: their Python runs, their commands exist, their links lead somewhere, and the
tables that have a file are that file."""

import csv
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sinkhorn_attention.normalizers import base

from experiments.report.cells import analyse_all
from experiments.report.collect import collect
from experiments.report.document import BLOCK, rewritten

ROOT = Path(__file__).parent.parent
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "slurm/README.md",
        *(ROOT / "docs").glob("*.md"),
        *ROOT.glob("examples/*/README.md"),
    )
}
BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page, text in sorted(PAGES.items())
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL))
]
every_page = pytest.mark.parametrize("page", sorted(PAGES))


def test_there_is_something_to_run() -> None:
    assert len(BLOCKS) >= 8
    assert "docs/operator.md" in PAGES


def test_the_readme_is_read_at_one_sitting() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 150


@pytest.mark.parametrize("code", BLOCKS)
def test_python_runs(code: str, monkeypatch) -> None:
    monkeypatch.setattr(base, "_REGISTRY", dict(base._REGISTRY))  # what a page registers is its own
    exec(compile(code, "a page", "exec"), {})


@every_page
def test_commands_name_modules_that_exist(page: str) -> None:
    modules = set(re.findall(r"python -m ([\w.]+)", PAGES[page]))
    assert not [module for module in sorted(modules) if importlib.util.find_spec(module) is None]


def test_the_readme_names_the_entry_points() -> None:
    for module in ("experiments.train", "experiments.report", "slurm.submit", "experiments.data.prepare"):
        assert f"python -m {module}" in PAGES["README.md"]


@every_page
def test_make_targets_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(re.findall(r"(?:^ +|`)make ([a-z-]+)\b", PAGES[page], flags=re.MULTILINE)) <= targets


@every_page
def test_experiments_and_files_named_exist(page: str) -> None:
    for experiment in set(re.findall(r"experiment=(\w+)", PAGES[page])):
        folders = [ROOT / "configs", *ROOT.glob("examples/*/*/configs")]
        assert any((folder / "experiment" / f"{experiment}.yaml").is_file() for folder in folders), experiment
    for path in set(re.findall(r"`((?:plugins|configs|experiments|slurm|tests|docs|examples)/[\w./-]*)`", PAGES[page])):
        if not path.startswith("configs/local"):  # which is the user's
            assert (ROOT / path).exists(), path


@every_page
def test_links_lead_to_pages_and_their_headings(page: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", PAGES[page]):
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in anchors, target


def test_the_tables_of_results_are_those_of_the_committed_runs() -> None:
    """Byte for byte, from files that a changed digit makes unreadable."""
    runs, problems = collect([ROOT / "results"])
    assert problems == []
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert len(BLOCK.findall(text)) >= 2
    assert rewritten(text, analyse_all(runs)) == text


def test_the_table_of_families_is_the_file() -> None:
    with open(ROOT / "tests/timm_sinkhorn/families.csv", newline="", encoding="utf-8") as file:
        for row in csv.reader(file):
            assert f"| {' | '.join(row)} |" in PAGES["docs/models.md"]


def test_the_readmes_results_and_times_are_those_of_the_pages() -> None:
    """The front page repeats a few numbers: each cell of its tables stands in docs/ as well."""
    pages = PAGES["docs/results.md"] + PAGES["docs/speed.md"]
    tables = re.findall(r"^\|.*\|$", PAGES["README.md"], flags=re.MULTILINE)
    numbers = {number for row in tables for number in re.findall(r"[+−]?\d+\.\d+", row)}
    assert len(numbers) > 20
    assert not [number for number in sorted(numbers) if number not in pages]


def test_the_reference_is_made_of_the_docstrings(tmp_path) -> None:
    """What `make api` runs, for the operator alone."""
    command = [sys.executable, "-m", "pdoc", "-d", "google", "-o", str(tmp_path), "sinkhorn_attention"]
    subprocess.run(command, check=True, capture_output=True)
    page = (tmp_path / "sinkhorn_attention.html").read_text(encoding="utf-8")
    for name in ("sinkhorn_attention", "convert", "MultiheadAttention", "record_attention"):
        assert f'id="{name}"' in page
