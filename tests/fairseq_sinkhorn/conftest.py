import copy
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from sinkhorn_attention.reference import sinkhorn_attention_reference, sinkhorn_reference


@pytest.fixture(scope="session")
def plugin() -> ModuleType:
    """The plugin, imported only where one of its tests runs: fairseq sets up logging and Hydra when it is imported."""
    if importlib.util.find_spec("fairseq") is None:
        pytest.skip("fairseq is not installed: pip install --require-hashes --no-deps -r requirements-fairseq.txt")
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module("fairseq_sinkhorn")
    root.handlers[:], root.level = handlers, level
    return module


@pytest.fixture(autouse=True)
def fairseq_leaves_no_trace(plugin: ModuleType) -> Iterator[None]:
    """The programs of fairseq reconfigure logging and clear Hydra's global state."""
    from hydra.core.singleton import Singleton

    root = logging.getLogger()
    handlers, level, state = root.handlers[:], root.level, copy.copy(Singleton.get_state())
    torch.manual_seed(0)
    yield
    root.handlers[:], root.level = handlers, level
    Singleton.set_state(state)


@pytest.fixture(scope="session")
def definition() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Output (T, B, C) and map (B, H, T, S) of an attention module by the definition, from its own parameters.

    `hide` (B, S) is True at padding; the caller brings everything in float64.
    """

    def compute(
        module: Any, x: torch.Tensor, hide: torch.Tensor | None, n_iters: int, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.unflatten(-1, (module.num_heads, -1)).permute(1, 2, 0, 3)

        q, k, v = (heads(project(x)) for project in (module.q_proj, module.k_proj, module.v_proj))
        keep = None if hide is None else ~hide.unsqueeze(1)
        scale = module.head_dim**-0.5
        out = sinkhorn_attention_reference(q, k, v, n_iters, scale, bias, keep, keep)
        scores = scale * q @ k.transpose(-1, -2)
        scores = scores if bias is None else scores + bias
        return module.out_proj(out.permute(2, 0, 1, 3).flatten(2)), sinkhorn_reference(scores, n_iters, keep, keep)

    return compute
