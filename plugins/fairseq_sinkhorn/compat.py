"""What fairseq 0.12.3 needs on current libraries, each with the reason. Nothing here switches `weights_only` off."""

import argparse
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
import torch
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, register_model_architecture
from numpy._core import multiarray

Architecture = TypeVar("Architecture", bound=Callable[[argparse.Namespace], None])


def allow_checkpoint_types() -> None:
    """Names the harmless types in fairseq's checkpoints to torch.load, which since 2.6 loads no unnamed class.

    fairseq keeps the command line as a Namespace, and numbers of its meters and iterators as numpy scalars and arrays.
    """
    dtypes = [type(np.dtype(name)) for name in ("bool", "int32", "int64", "uint8", "float16", "float32", "float64")]
    torch.serialization.add_safe_globals(
        [argparse.Namespace, np.ndarray, np.dtype, multiarray._reconstruct, multiarray.scalar, *dtypes]
    )


def as_namespace(args: argparse.Namespace | Mapping[str, object]) -> argparse.Namespace:
    """A copy of a model's options as the Namespace that fairseq's argparse-style models want.

    fairseq-hydra-train gives a DictConfig, from which fairseq's TransformerConfig silently drops every option that it
    does not know, ours among them.
    """
    if isinstance(args, Mapping):
        return argparse.Namespace(**{name: args[name] for name in args})
    return argparse.Namespace(**vars(args))


def register_architecture(model_name: str, arch_name: str) -> Callable[[Architecture], Architecture]:
    """register_model_architecture that may be repeated: fairseq raises when a module is imported a second time.

    That happens where a plugin is reloaded, or reached both as an installed package and as a --user-dir.
    """
    if ARCH_MODEL_NAME_REGISTRY.get(arch_name) == model_name:
        return lambda function: function
    return register_model_architecture(model_name, arch_name)
