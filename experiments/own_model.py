"""A model of one's own by `model.target`: found, called with what it takes, and its attention converted."""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from sinkhorn_attention import convert
from torch import Tensor, nn

from .models import give_attention


def torch_model(
    target: str, kwargs: Mapping[str, Any], attention: Mapping[str, Any], num_classes: int, example: Sequence[Tensor]
) -> nn.Module:
    """The module that a callable returns, its attention converted by `sinkhorn_attention.convert`.

    Args:
        target: `package.module.name` of the callable.
        kwargs: its keyword arguments.
        attention: as for `models.give_attention`. A callable with an argument of this name is given it, and what it
            returns is not converted.
        num_classes: number of logits; given to a callable with an argument of this name, or that takes any.
        example: inputs of the data. Of images (B, channels, height, width) the callable is given `in_chans` and
            `img_size` (an integer, or (height, width)) where it has arguments of these names.

    Returns:
        A module from the data's inputs to logits (B, num_classes).

    Raises:
        ValueError: for a target that cannot be found or called so, that returns something else, and for attention that
            cannot be converted.
    """
    make = locate(target)
    offered: dict[str, Any] = {"num_classes": num_classes, "attention": dict(attention)}
    if example[0].dim() == 4:
        _, channels, height, width = example[0].shape
        offered |= {"in_chans": channels, "img_size": height if height == width else (height, width)}
    parameters = _parameters(make)
    open_ended = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    taken = {name: value for name, value in offered.items() if name in parameters}
    if open_ended:
        taken["num_classes"] = num_classes
    given = {**taken, **kwargs}
    _check_arguments(target, make, given)
    model = make(**given)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model.target={target} returns {type(model).__name__}, and not a torch.nn.Module")
    if "attention" not in parameters:
        give_attention(model, attention, convert, f"model.target={target}")
    return model


def locate(target: str) -> Callable[..., Any]:
    """What `package.module.name` names; of a class `package.module.Class.method` too.

    Raises:
        ValueError: where there is no such module or attribute, an import fails, or it cannot be called.
    """
    parts = str(target).split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ValueError(f"model.target={target} must name a callable as package.module.name")
    for length in range(len(parts) - 1, 0, -1):
        module = ".".join(parts[:length])
        try:
            found: Any = importlib.import_module(module)
        except Exception as error:  # whatever a module does at its import
            # A name that is part of the target may be a class's; one that the module itself misses is a fault.
            missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
            if missing and length > 1:
                continue
            raise ValueError(
                f"model.target: {module} cannot be imported ({type(error).__name__}: {error}): it has to be installed, "
                "or to lie in a folder of PYTHONPATH or in the one where the command is given"
            ) from error
        for name in parts[length:]:
            if not hasattr(found, name):
                near = get_close_matches(name, [known for known in dir(found) if not known.startswith("_")], 3)
                hint = f"; near it are {', '.join(near)}" if near else ""
                raise ValueError(f"model.target: {module} has no {name}{hint}")
            found = getattr(found, name)
        break
    if not callable(found):
        raise ValueError(f"model.target={target} cannot be called: it is of the type {type(found).__name__}")
    return found


def _parameters(make: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(make).parameters
    except (TypeError, ValueError):  # some of C's have none
        return {}


def _check_arguments(target: str, make: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuses arguments that a callable does not take, before it is called.

    Raises:
        ValueError: says which, and what it takes.
    """
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(**given)
    except TypeError as error:
        raise ValueError(f"model.kwargs: {target} {error}; it takes {signature}") from error
