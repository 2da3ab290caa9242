"""Models as the configuration names them: `model._target_` is one of these functions."""

from collections.abc import Mapping
from typing import Any

from torch import nn


def timm_model(name: str, attention: Mapping[str, Any], num_classes: int, **options: Any) -> nn.Module:
    """A model of timm's registry that takes a normalizer, as those of `timm_sinkhorn` do.

    Args:
        name: registered name.
        attention: `name` of the normalizer and its options.
        num_classes: number of logits.
        **options: passed to `timm.create_model` (img_size, patch_size, in_chans, drop_rate, ...).

    Returns:
        A module from images (B, in_chans, img_size, img_size) to logits (B, num_classes).

    Raises:
        ValueError: for an unknown model, normalizer or option.
    """
    # Imported here: the entry point reads this module before it is known whether anything is left to train.
    import timm
    import timm_sinkhorn  # noqa: F401  registers the models

    if not timm.is_model(name):
        known = ", ".join(timm.list_models("sinkformer*"))
        raise ValueError(f"model.name={name} is not registered with timm; the suite's own are {known}")
    return timm.create_model(name, num_classes=num_classes, **_as_arguments(attention), **options)


def cloud_model(name: str, attention: Mapping[str, Any], num_classes: int, **options: Any) -> nn.Module:
    """A point-cloud model of `pyg_sinkhorn`'s registry.

    Args:
        name: registered name.
        attention: `name` of the normalizer and its options.
        num_classes: number of logits.
        **options: of the model's class (hidden, num_heads, row_mass, num_samples, ...).

    Returns:
        A module from points (B, n, 3), and a mask (B, n) where clouds are padded, to logits (B, num_classes).

    Raises:
        ValueError: for an unknown model or normalizer, or a setting that it refuses.
        TypeError: for an unknown option.
    """
    import pyg_sinkhorn

    if name not in pyg_sinkhorn.list_models():
        known = ", ".join(pyg_sinkhorn.list_models())
        raise ValueError(f"model.name={name} is not registered with pyg_sinkhorn, which has {known}")
    return pyg_sinkhorn.create_model(name, num_classes=num_classes, **_as_arguments(attention), **options)


def _as_arguments(attention: Mapping[str, Any]) -> dict[str, Any]:
    options = dict(attention)
    name, n_iters = options.pop("name"), options.pop("n_iters", None)
    return {"normalizer": name, "n_iters": n_iters, "normalizer_options": options}
