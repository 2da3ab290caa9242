"""Couplings of one cost matrix by the optimal transport libraries POT and GeomLoss, against ours."""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from sinkhorn_attention import sinkhorn

from .timing import interleaved


def time_libraries(size: int, counts: list[int], repeats: int) -> dict[str, Any]:
    """Seconds of a coupling of size x size for each count of half-steps.

    A library's iteration is a row and a column step: it does (T + 1) / 2 of them where we do T half-steps. Stopping
    rules are off. POT's `sinkhorn` works in the exponential domain, as our engines do, `sinkhorn_log` in the log
    domain; GeomLoss is in the log domain.

    Returns:
        {count: {library: samples}}; a string, why not, for a library that is not installed.
    """
    scores = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    mass = torch.full((size,), 1.0 / size)
    result: dict[str, Any] = {}
    for count in counts:
        functions: dict[str, Callable[[], object]] = {"ours": lambda count=count: sinkhorn(scores, count)}  # type: ignore[misc]
        missing = {}
        pairs = (count + 1) // 2
        if importlib.util.find_spec("ot"):
            import ot

            for name, method in (("POT sinkhorn", ot.bregman.sinkhorn_knopp), ("POT log", ot.bregman.sinkhorn_log)):
                functions[name] = lambda method=method, pairs=pairs: method(  # type: ignore[misc]
                    mass, mass, -scores, 1.0, numItermax=pairs, stopThr=0.0, warn=False
                )
        else:
            missing["POT"] = "not installed (pip install pot)"
        if importlib.util.find_spec("geomloss"):
            import geomloss.ot  # type: ignore[import-untyped]

            functions["GeomLoss"] = lambda pairs=pairs: geomloss.ot.solve(-scores, reg=1.0, max_iter=pairs).plan  # type: ignore[misc]
        else:
            missing["GeomLoss"] = "not installed (pip install geomloss)"
        result[str(count)] = interleaved(functions, repeats) | missing
    return result
