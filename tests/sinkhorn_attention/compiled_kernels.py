"""Triton's kernels compiled for GPUs that need not be there: shared memory, registers and spills of each combination.

`python tests/sinkhorn_attention/compiled_kernels.py` compiles every combination, for half an hour; `test_triton.py` the
hardest ones.
"""

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import triton
from sinkhorn_attention.engines import triton as engine
from sinkhorn_attention.engines import triton_tiles, triton_whole_heads
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

#: Shared memory that a program can have (CUDA programming guide): 163 KB on an A100, 227 KB on an H100, H200 and B200.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
#: Where registers are left over, the assembler may still put aside some bytes of predicates, which costs nothing.
SMALL_SPILL = 64
ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
WIDTHS = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Combination:
    """What a kernel is compiled for."""

    capability: int
    dtype: str
    width: int
    even: bool = False
    bias: bool = False
    dropout: bool = False
    keys: int = 256


@dataclass(frozen=True)
class Compiled:
    """What came of it."""

    kernel: str
    layout: engine.Layout
    shared: int
    spilled: int
    registers: int

    def fits(self, capability: int) -> bool:
        """Whether it runs on the GPU, with no registers in memory."""
        left_over = self.registers < 240 and self.spilled <= SMALL_SPILL
        return self.shared <= SHARED_BYTES[capability] and (self.spilled == 0 or left_over)


def kernels_of(given: Combination) -> Iterator[tuple[ModuleType, str, engine.Layout]]:
    """The kernels that the engine would launch, with their layouts: of both families where whole heads are taken."""
    widths, reads_map = (given.width, given.width, ITEM_BYTES[given.dtype]), given.bias or given.dropout
    whole = engine.whole_heads(given.keys, *widths, reads_map)
    if whole is not None:
        yield triton_whole_heads, "forward_kernel", whole[0]
        yield triton_whole_heads, "potential_gradient_kernel", whole[1]
    tiles = engine.choose_tiles(*widths, reads_map)
    for name in ("half_step", "output", "reverse"):
        yield triton_tiles, f"{name}_kernel", tiles.half_step
    yield triton_tiles, "query_gradient_kernel", tiles.query
    yield triton_tiles, "key_gradient_kernel", tiles.key


def compile_kernel(module: ModuleType, name: str, layout: engine.Layout, given: Combination) -> Compiled:
    """Compiles and assembles one kernel, with masks, and with strides and addresses as torch usually has them."""
    kernel = getattr(module, name)
    flags = {"EVEN": given.even, "HAS_BIAS": given.bias, "BIAS_GRADIENT": given.bias, "HAS_KEEP": given.dropout}
    flags |= dict.fromkeys(("HAS_QUERY_MASK", "HAS_KEY_MASK", "HAS_X_MASK", "HAS_Y_MASK"), True)
    flags |= {"FROM_OUTPUT": True, "WEIGHTED": True, "ADDED": False, "BY_ROWS": False, "DETACHED": False}
    options = {**layout.options(), **flags, "PRECISION": "ieee", "UPCAST": False}
    options = {option: value for option, value in options.items() if option in kernel.arg_names}
    tokens = ("Q", "K", "V", "OUT", "D_OUT", "D_Q", "D_K", "D_V", "X", "Y", "X_OUT", "Y_OUT")
    types = dict.fromkeys(tokens, f"*{given.dtype}")
    types |= dict.fromkeys(("QUERY_MASK", "KEY_MASK", "KEEP", "X_MASK", "Y_MASK"), "*u8") | {"BIAS_HEAD": "*i64"}
    floats = ("F", "G", "D_F", "D_G", "COLUMN_SUMS", "BIAS", "D_BIAS", "OWN", "OTHER", "WEIGHTS", "RESULT")
    numbers = ("scale", "damping", "power", "factor", "own_factor", "other_factor", "query_factor", "keep_factor")
    types |= dict.fromkeys(floats, "*fp32") | dict.fromkeys(numbers, "fp32") | dict.fromkeys(options, "constexpr")
    signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, argument in enumerate(kernel.arg_names)
        if signature[argument].startswith("*") or argument.endswith(("_token", "_head", "_batch", "width"))
    }
    source = ASTSource(kernel, signature=signature, constexprs=options, attrs=aligned)
    target = GPUTarget("cuda", given.capability, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": layout.warps})
    assembler = "ptxas-blackwell" if given.capability >= 100 else "ptxas"
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / assembler
    architecture = f"--gpu-name=sm_{given.capability}" + ("a" if given.capability >= 90 else "")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kernel.ptx").write_text(compiled.asm["ptx"])
        command = [str(path), "-v", architecture, "kernel.ptx", "-o", "kernel.cubin"]
        report = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stderr
    (spilled,) = re.findall(r"(\d+) bytes spill stores", report)
    (registers,) = re.findall(r"Used (\d+) registers", report)
    return Compiled(name, layout, compiled.metadata.shared, int(spilled), int(registers))


def compile_all(given: Combination) -> Iterator[Compiled]:
    """Every kernel of a combination."""
    for module, name, layout in kernels_of(given):
        yield compile_kernel(module, name, layout, given)


def main() -> int:
    """Prints the combinations that do not fit, and how many there were."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--capabilities", type=int, nargs="+", default=list(SHARED_BYTES))
    parser.add_argument("--dtypes", nargs="+", default=list(ITEM_BYTES))
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    options = parser.parse_args()
    bad = total = 0
    grid = itertools.product(options.capabilities, options.dtypes, options.widths, *[(False, True)] * 3)
    combinations = [Combination(*each) for each in grid]
    # Whole heads have other layouts for fewer keys.
    for capability, dtype, width, keys in itertools.product(
        options.capabilities, options.dtypes, options.widths, (16, 32, 64, 128)
    ):
        combinations += [Combination(capability, dtype, width, even, keys=keys) for even in (False, True)]
    for given in combinations:
        for compiled in compile_all(given):
            if given.keys < 256 and not compiled.kernel.startswith(("forward", "potential")):
                break  # tiles do not depend on the keys
            total += 1
            if not compiled.fits(given.capability):
                bad += 1
                print(given, compiled, flush=True)
    print(f"{total} kernels were compiled; {bad} do not fit")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
