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
    normalizer = dict(attention)
    normalizer_name = normalizer.pop("name")
    n_iters = normalizer.pop("n_iters", None)
    return timm.create_model(
        name,
        num_classes=num_classes,
        normalizer=normalizer_name,
        n_iters=n_iters,
        normalizer_options=normalizer,
        **options,
    )
