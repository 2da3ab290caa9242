"""Clocks and memory of one process."""

import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

#: A sample takes at least this long, so that the clock and one late wake-up do not matter.
SHORTEST_SAMPLE = 0.01


def interleaved(
    functions: dict[str, Callable[[], object]], repeats: int, device: str = "cpu"
) -> dict[str, list[float]]:
    """Seconds per call of every function, `repeats` samples each, taken in turn.

    Each function runs once before, which leaves compilation and first allocations out and says how many calls make a
    sample.
    """
    calls = {}
    for name, function in functions.items():
        function()
        calls[name] = max(1, math.ceil(SHORTEST_SAMPLE / max(seconds(function, 1, device), 1e-9)))
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            samples[name].append(seconds(function, calls[name], device))
    return samples


def seconds(function: Callable[[], object], calls: int, device: str) -> float:
    """Seconds per call, from `calls` calls in a row; on CUDA until the device has done them."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile."""
    if len(samples) == 1:
        return samples[0], samples[0], samples[0]
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, middle, high


def fitted_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The b of values ~ a * sizes^b, by least squares of the logarithms."""
    return statistics.linear_regression([math.log(x) for x in sizes], [math.log(y) for y in values]).slope


def peak_megabytes(function: Callable[[], object], device: str = "cpu") -> float:
    """By how much the memory of this process rises above where it was, while the function runs once.

    On Linux from the kernel's high-water mark, which is reset before. On CUDA what torch has allocated.

    Raises:
        NotImplementedError: on the CPU of another system.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    status = Path("/proc/self/status")
    if not status.exists():
        raise NotImplementedError("peak memory of the CPU is read from /proc, which Linux alone has")
    Path("/proc/self/clear_refs").write_text("5")
    before = _kilobytes(status, "VmRSS")
    function()
    return (_kilobytes(status, "VmHWM") - before) / 2**10


def _kilobytes(status: Path, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB", status.read_text(), re.MULTILINE)
    assert found is not None, f"/proc/self/status has no line {field}"
    return int(found[1])
