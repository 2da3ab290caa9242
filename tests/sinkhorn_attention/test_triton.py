"""The Triton engine where there is no GPU: its tests in the interpreter, and its kernels compiled for two GPUs."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from sinkhorn_attention import sinkhorn_attention

pytest.importorskip("triton", reason="the triton package is not installed; it comes with torch on Linux")

#: Shared memory that a program can have (CUDA programming guide): 163 KB on an A100, 227 KB on an H100 or H200.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="test_triton_kernels.py runs on the GPU itself")
@pytest.mark.parametrize("names", [("triton_kernels", "properties"), ("engines",)], ids="-".join)
def test_kernels_in_the_interpreter(names: tuple[str, ...]) -> None:
    """In a process of its own: Triton decides at import whether it compiles, for the whole process."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    folder = Path(__file__).parent
    tests = [str(folder / f"test_{name}.py") for name in names]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([*command, "-k", "triton", *tests], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-20000:] + run.stderr[-5000:]
    assert re.search(r"\b\d\d+ passed", run.stdout), run.stdout[-2000:]


def compile_kernel(
    name: str, dtype: str, options: dict[str, bool | int], capability: int, directory: Path
) -> tuple[int, int]:
    """Shared memory and bytes of spilled registers of a kernel compiled for a GPU that need not be there."""
    import triton
    from sinkhorn_attention.engines import triton_kernels
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(triton_kernels, name)
    warps = options.pop("num_warps")
    tokens = ["Q", "K", "V", "OUT", "D_OUT", "D_Q", "D_K", "D_V"]
    types = dict.fromkeys(tokens, f"*{dtype}") | dict.fromkeys(["QUERY_MASK", "KEY_MASK", "KEEP"], "*u8")
    types |= {"BIAS_HEAD": "*i64", "scale": "fp32", "query_factor": "fp32", "keep_factor": "fp32"}
    floats = ["F", "G", "D_F", "D_G", "LOG_RATIO", "BIAS", "D_BIAS"]
    types |= dict.fromkeys(floats, "*fp32") | dict.fromkeys(options, "constexpr")
    signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names}
    source = ASTSource(kernel, signature=signature, constexprs=options)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    (directory / "kernel.ptx").write_text(compiled.asm["ptx"])
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    target = f"--gpu-name=sm_{capability}" + ("a" if capability == 90 else "")
    command = [str(assembler), "-v", target, "kernel.ptx", "-o", "kernel.cubin"]
    report = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True).stderr
    (spilled,) = re.findall(r"(\d+) bytes spill stores", report)
    return compiled.metadata.shared, int(spilled)


@pytest.fixture(scope="module")
def engine() -> ModuleType:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET=1 is set: Triton compiles nothing in this process")
    from sinkhorn_attention.engines import triton

    return triton


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["forward", "potential_gradient", "query_gradient", "key_gradient"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_without_spills(
    engine: ModuleType, tmp_path: Path, capability: int, dtype: str, kernel: str
) -> None:
    """At the largest problem, 256 keys of width 64, with masks, in the layout that the engine would launch."""
    layout = engine.choose_layout(256, 64, 64, 2 if dtype == "bf16" else 4)
    options: dict[str, bool | int] = {"EVEN": False, "HAS_BIAS": False, "HAS_KEEP": False}
    options |= {"HAS_QUERY_MASK": True, "HAS_KEY_MASK": True, "WIDTH": layout.width, "VALUE_WIDTH": layout.value_width}
    if kernel in ("forward", "potential_gradient"):
        warps = layout.forward_warps if kernel == "forward" else layout.backward_warps
        options |= {"ROWS": layout.rows, "COLUMNS": layout.columns, "num_warps": warps}
    else:
        options |= engine.QUERY_TILE if kernel == "query_gradient" else engine.KEY_TILE
    if kernel != "forward":
        options["DETACHED"] = False
    if kernel == "query_gradient":
        options["BIAS_GRADIENT"] = False
    shared, spilled = compile_kernel(f"{kernel}_kernel", dtype, options, capability, tmp_path)
    assert shared <= SHARED_BYTES[capability]
    assert spilled == 0


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="CPU tensors are taken by the interpreter")
def test_cpu_tensors_are_refused() -> None:
    tokens = torch.randn(3, 2, 5, 8)
    with pytest.raises(NotImplementedError, match=r"needs tensors on a CUDA device \(they are on cpu"):
        sinkhorn_attention(*tokens, backend="triton")
