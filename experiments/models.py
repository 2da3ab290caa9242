"""Models as the configuration names them: `model._target_` is one of these functions."""

import fnmatch
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


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
    import timm_sinkhorn

    if not timm.is_model(name):
        known = ", ".join(timm.list_models("sinkformer*"))
        raise ValueError(f"model.name={name} is not registered with timm; the suite's own are {known}")
    normalizer, layers = _split(attention)
    if layers is None:
        return timm.create_model(name, num_classes=num_classes, normalizer=normalizer, **options)
    model = timm.create_model(name, num_classes=num_classes, normalizer="softmax", **options)
    timm_sinkhorn.convert(model, normalizer, layers=layers)
    return model


def pretrained_timm_model(
    name: str,
    attention: Mapping[str, Any],
    num_classes: int,
    weights: str | None,
    head: str,
    train: Sequence[str] | None,
    **options: Any,
) -> nn.Module:
    """A pretrained model of timm's registry with its attention converted, all of it or some layers.

    Args:
        name: registered name with or without its tag, or `local-dir:FOLDER` or `hf-hub:NAME` as timm reads them.
        attention: `name` of the normalizer, its options, and `layers`: None for all, an int k for the last k, a list of
            indices or an fnmatch pattern of module names; the others keep softmax.
        num_classes: number of logits.
        weights: a file of weights (.safetensors, .pth, .npz); None fetches those of the name.
        head: "new" for an untrained linear head, or "imagenet" for the pretrained head of 1,000 classes, of which those
            of cats and those of dogs are taken together.
        train: fnmatch patterns of the parameters that are trained; None trains all.
        **options: passed to `timm.create_model` (img_size, drop_path_rate, ...).

    Returns:
        A module from images (B, 3, height, width) to logits (B, num_classes).

    Raises:
        ValueError: for weights that are not there, out of reach or of another model, and for bad settings.
    """
    import timm
    import timm_sinkhorn

    if head not in ("new", "imagenet"):
        raise ValueError(f"model.head must be new or imagenet; got {head!r}")
    if head == "imagenet" and num_classes != 2:
        raise ValueError(f"model.head=imagenet tells cats from dogs, and these data have {num_classes} classes")
    if weights is not None and not Path(weights).is_file():
        raise ValueError(f"model.weights: there is no file {weights}")
    given: dict[str, Any] = dict(options)
    if weights is not None:
        given["pretrained_cfg_overlay"] = {"file": weights}
    if head == "new":
        given["num_classes"] = num_classes
    try:
        model = timm.create_model(name, pretrained=True, **given)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"the pretrained weights of {name} ({weights or 'fetched by timm'}) cannot be loaded: {reason}. Without a "
            "network, fetch them elsewhere and give model.weights=FILE or model.name=local-dir:FOLDER"
        ) from error
    # All layers first, so that those which keep softmax can be recorded too.
    timm_sinkhorn.convert(model, "softmax")
    normalizer, layers = _split(attention)
    timm_sinkhorn.convert(model, normalizer, layers=layers)
    whole: nn.Module = ImageNetCatsDogs(model) if head == "imagenet" else model
    if train is not None:
        _train_only(whole, train)
    return whole


class ImageNetCatsDogs(nn.Module):
    """A classifier of ImageNet's 1,000 classes as one of cats (0) and dogs (1).

    A logit is the log of the summed exponentials of the animal's classes: 281 to 285 are cats, 151 to 268 dogs.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        if getattr(model, "num_classes", None) != 1000:
            raise ValueError("model.head=imagenet needs a model with the 1,000 classes of ImageNet")
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, height, width) to logits (B, 2)."""
        logits = self.model(images)
        return torch.stack([logits[:, 281:286].logsumexp(-1), logits[:, 151:269].logsumexp(-1)], dim=-1)


def _train_only(model: nn.Module, patterns: Sequence[str]) -> None:
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"model.train: no parameter is named like {pattern!r}; there are {', '.join(names)}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))


def cloud_model(name: str, attention: Mapping[str, Any], num_classes: int, **options: Any) -> nn.Module:
    """A point-cloud model of `pyg_sinkhorn`'s registry.

    Args:
        name: registered name.
        attention: `name` of the normalizer, its options, and `layers` as for `pretrained_timm_model`: the others keep
            softmax, and in the Point Cloud Transformer its own normalisation.
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
    normalizer, layers = _split(attention)
    if layers is None:
        return pyg_sinkhorn.create_model(name, num_classes=num_classes, normalizer=normalizer, **options)
    own = "pct" if name.startswith("pct") else "softmax"
    model = pyg_sinkhorn.create_model(name, num_classes=num_classes, normalizer=own, **options)
    pyg_sinkhorn.convert(model, normalizer, layers=layers)
    return model


def _split(attention: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """The normalizer with its options, and the layers that have it."""
    normalizer = {option: value for option, value in attention.items() if option != "layers"}
    return normalizer, attention.get("layers")
