"""What fairseq 0.12.3 needs on current libraries, each with the reason. Nothing here switches `weights_only` off."""

import argparse
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from fairseq import checkpoint_utils
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, register_model_architecture
from fairseq.trainer import Trainer
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


def explain_checkpoints() -> None:
    """Has a file that is no checkpoint of fairseq, or one of another model, named in a sentence.

    fairseq meets a bare state dict with KeyError 'best_loss', a text file with KeyError 101, and weights of another
    dictionary with a request to "ensure that the architectures match". What it can load, it loads as before.
    """
    read, load = checkpoint_utils.load_checkpoint_to_cpu, Trainer.load_checkpoint
    if hasattr(read, "__wrapped__"):  # the plugin is imported once more
        return

    @functools.wraps(read)
    def read_or_explain(path: str, *words: Any, **more: Any) -> Any:
        try:
            return read(path, *words, **more)
        except FileNotFoundError:
            raise
        except Exception as error:  # whatever a file of another kind makes of it
            reason = no_checkpoint(Path(path))
            if reason is None:
                raise
            raise ValueError(reason) from error

    @functools.wraps(load)
    def load_or_explain(self: Trainer, filename: str, *words: Any, **more: Any) -> Any:
        try:
            return load(self, filename, *words, **more)
        except Exception as error:  # fairseq's own is an Exception
            if "ensure that the architectures match" not in str(error):
                raise
            raise ValueError(
                f"the weights in {filename} are not of this model: {differences(self, filename)}"
            ) from error

    checkpoint_utils.load_checkpoint_to_cpu, Trainer.load_checkpoint = read_or_explain, load_or_explain


def no_checkpoint(path: Path) -> str | None:
    """Why a file is no checkpoint of fairseq; None where it looks like one."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a file of another kind makes of it
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return f"{path} is no checkpoint of fairseq, or is damaged: torch.load cannot read it ({reason})"
    if not isinstance(content, Mapping):
        return f"{path} is no checkpoint of fairseq: it holds a {type(content).__name__}"
    if content and all(isinstance(value, torch.Tensor) for value in content.values()):
        return (
            f"{path} holds a bare state dict ({len(content)} tensors), no checkpoint of fairseq, which has one under "
            "'model' beside 'cfg', 'extra_state' and 'optimizer_history': give the checkpoint that it was taken from"
        )
    needed = {"model", "extra_state", "optimizer_history"} - content.keys()
    if "best_loss" in content or not needed:  # of an old fairseq, or of today's
        return None
    known = ", ".join(map(repr, list(content)[:5]))
    return f"{path} is no checkpoint of fairseq: it has {known}, and lacks {', '.join(map(repr, sorted(needed)))}"


def differences(trainer: Trainer, filename: str) -> str:
    """How the weights of a checkpoint differ from a model's in names and shapes."""
    model = trainer.get_model()
    there: dict[str, Any] = dict(torch.load(filename, map_location="cpu", weights_only=True)["model"])
    model.upgrade_state_dict(there)
    here = model.state_dict()
    shapes = [
        f"{name} is {_shape(there[name])} there and {_shape(here[name])} here"
        + (" (another dictionary)" if "embed_tokens" in name and there[name].shape[1:] == here[name].shape[1:] else "")
        for name in here
        if name in there and there[name].shape != here[name].shape
    ]
    found = [
        *_some("", shapes),
        *_some("it lacks ", [name for name in here if name not in there]),
        *_some("it has also ", [name for name in there if name not in here]),
    ]
    return "; ".join(found) or "see the log above"


def _shape(tensor: torch.Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a number"


def _some(words: str, names: list[str]) -> list[str]:
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return [f"{words}{', '.join(names[:2])}{more}"] if names else []
