"""The Triton engine where there is no GPU: its tests in the interpreter, and its kernels compiled for two GPUs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sinkhorn_attention import sinkhorn_attention

pytest.importorskip("triton", reason="the triton package is not installed; it comes with torch on Linux")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="test_triton_kernels.py runs on the GPU itself")
@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (("test_triton_kernels", "test_proof", "test_properties", "../pyg_sinkhorn/test_sampling_kernel"), "triton"),
        (("test_engines",), "triton and not tiles"),
        # The rest by tiles is in test_triton_kernels.py, on smaller problems.
        (("test_engines",), "triton and tiles and (matches or padding or support or nothing or nan)"),
    ],
)
def test_kernels_in_the_interpreter(names: tuple[str, ...], chosen: str) -> None:
    """In a process of its own: Triton decides at import whether it compiles, for the whole process."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    folder = Path(__file__).parent
    tests = [str(folder / f"{name}.py") for name in names]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([*command, "-k", chosen, *tests], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-20000:] + run.stderr[-5000:]
    assert re.search(r"\b\d\d+ passed", run.stdout), run.stdout[-2000:]


#: The hardest: everything that takes registers and shared memory, and the widest heads.
HARDEST = [(64, {}), (64, {"bias": True, "dropout": True}), (256, {"bias": True, "dropout": True, "even": True})]


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton compiles nothing in this process")
@pytest.mark.parametrize(("width", "options"), HARDEST)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_fit_the_gpu(capability: int, dtype: str, width: int, options: dict[str, bool]) -> None:
    """All kernels in the layouts that the engine would launch; `compiled_kernels.py` compiles every combination."""
    from tests.sinkhorn_attention.compiled_kernels import Combination, compile_all

    found = list(compile_all(Combination(capability, dtype, width, **options)))
    assert len(found) == (7 if width == 64 and not options else 5)
    assert [compiled for compiled in found if not compiled.fits(capability)] == []


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="CPU tensors are taken by the interpreter")
def test_cpu_tensors_are_refused() -> None:
    tokens = torch.randn(3, 2, 5, 8)
    with pytest.raises(NotImplementedError, match=r"needs tensors on a CUDA device \(they are on cpu"):
        sinkhorn_attention(*tokens, backend="triton")
