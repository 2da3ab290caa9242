"""The house: what may import what, and that the operator needs torch alone."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLUGINS = sorted(path.name for path in (ROOT / "plugins").iterdir() if (path / "__init__.py").exists())
ENGINES = {"hydra", "omegaconf", "wandb", "lightning", "pytorch_lightning"}


def imported_packages(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name.split(".")[0]) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                yield path, node.module.split(".")[0]


def test_there_are_plugins_to_check() -> None:
    assert {"sinkhorn_attention", "timm_sinkhorn"} <= set(PLUGINS)


@pytest.mark.parametrize("plugin", PLUGINS)
def test_arrows_point_one_way(plugin: str) -> None:
    forbidden = (set(PLUGINS) - {plugin, "sinkhorn_attention"}) | ENGINES | {"experiments", "slurm"}
    if plugin == "sinkhorn_attention":
        forbidden |= {"timm", "torchvision", "torch_geometric", "fairseq", "numpy", "scipy"}
    wrong = [
        (path.name, package) for path, package in imported_packages(ROOT / "plugins" / plugin) if package in forbidden
    ]
    assert not wrong


def test_experiments_do_not_import_slurm() -> None:
    assert not [path for path, package in imported_packages(ROOT / "experiments") if package == "slurm"]


def test_the_operator_imports_with_torch_alone() -> None:
    """In a fresh interpreter that refuses every third-party package that torch itself does not load."""
    program = (
        "import sys, torch\n"
        "loaded = set(sys.modules)\n"
        "import sinkhorn_attention\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - loaded} - set(sys.stdlib_module_names)\n"
        "assert new <= {'sinkhorn_attention', 'torch', 'numpy', 'sympy', 'mpmath'}, new\n"
        "import torch\n"
        "x = torch.randn(2, 3, 4)\n"
        "assert sinkhorn_attention.sinkhorn_attention(x, x, x).shape == x.shape\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
