"""Models as the configuration names them: `model._target_` is one of these functions."""

import fnmatch
import warnings
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from sinkhorn_attention.normalizers import get_normalizer
from torch import Tensor, nn


def timm_model(name: str, attention: Mapping[str, Any], num_classes: int, **options: Any) -> nn.Module:
    """A model of timm's registry, untrained: those of `timm_sinkhorn` take the normalizer, others are converted.

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

    _refuse_unknown(name)
    if not _takes_normalizer(name):
        model = timm.create_model(name, num_classes=num_classes, **options)
        give_attention(model, attention, timm_sinkhorn.convert, f"model.name={name}")
        return model
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
    import timm_sinkhorn

    if head not in ("new", "imagenet"):
        raise ValueError(f"model.head must be new or imagenet; got {head!r}")
    if head == "imagenet" and num_classes != 2:
        raise ValueError(f"model.head=imagenet tells cats from dogs, and these data have {num_classes} classes")
    given: dict[str, Any] = dict(options)
    if head == "new":
        given["num_classes"] = num_classes
    model = _with_weights(name, weights, given)
    # All layers first, so that those which keep softmax can be recorded too.
    timm_sinkhorn.convert(model, "softmax")
    normalizer, layers = _split(attention)
    timm_sinkhorn.convert(model, normalizer, layers=layers)
    whole: nn.Module = ImageNetCatsDogs(model) if head == "imagenet" else model
    if train is not None:
        _train_only(whole, train)
    return whole


def any_timm_model(
    name: str,
    attention: Mapping[str, Any],
    num_classes: int,
    example: Sequence[Tensor],
    pretrained: bool,
    weights: str | None,
    train: Sequence[str] | None,
    **options: Any,
) -> nn.Module:
    """Any image model of timm's, made for the images at hand: their size and channels are the data's.

    Args:
        name: registered name with or without its tag, or `local-dir:FOLDER` or `hf-hub:NAME` as timm reads them.
        attention: as for `pretrained_timm_model`; a model without attention takes softmax alone, which changes nothing.
        num_classes: number of logits.
        example: inputs of the data, whose first are images (B, channels, height, width).
        pretrained: begins with the weights of the name, fetched by timm or out of its cache.
        weights: a file of weights, or None.
        train: fnmatch patterns of the parameters that are trained; None trains all.
        **options: passed to `timm.create_model` (patch_size, drop_rate, ...); `img_size` and `in_chans` in place of the
            data's.

    Returns:
        A module from images (B, channels, height, width) to logits (B, num_classes).

    Raises:
        ValueError: for an unknown name, data that are no images, patches that do not fit into them, weights that cannot
            be loaded and attention that cannot be converted.
    """
    import timm
    import timm_sinkhorn

    _refuse_unknown(name)
    shape = tuple(example[0].shape[1:])
    if len(shape) != 3:
        raise ValueError(f"model.name={name} takes images (channels, height, width), and these data have {shape}")
    channels, *size = shape
    given: dict[str, Any] = {"in_chans": channels, "num_classes": num_classes, **options}
    # Models of any size have no such argument.
    config = timm.models.get_pretrained_cfg(name.rpartition("/")[2], allow_unregistered=True)
    if config is not None and config.fixed_input_size:
        given.setdefault("img_size", size[0] if size[0] == size[1] else tuple(size))
    if pretrained or weights is not None:
        model = _with_weights(name, weights, given)
    else:
        model = timm.create_model(name, **given)
    _refuse_cut_images(model, size)
    give_attention(model, attention, timm_sinkhorn.convert, f"model.name={name}")
    if train is not None:
        _train_only(model, train)
    return model


def give_attention(
    model: nn.Module, attention: Mapping[str, Any], convert: Callable[..., list[str]], what: str
) -> None:
    """Converts the attention of a model, in place; softmax leaves what cannot be converted as it is.

    Args:
        model: any module.
        attention: `name` of the normalizer, its options, and `layers` as for `pretrained_timm_model`.
        convert: `timm_sinkhorn.convert` or one that takes the same arguments.
        what: the key and value that name the model, for messages.

    Raises:
        ValueError: for attention that cannot be converted, and for an unknown normalizer, option or layer.
    """
    normalizer, layers = _split(attention)
    softmax = normalizer["name"] == "softmax"
    get_normalizer(normalizer, head_dim=1, num_heads=1)  # bad options are refused where nothing is converted, too
    try:
        # All layers first, so that those which keep softmax can be recorded too.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            convert(model, "softmax", strict=softmax or layers is not None)
        if not softmax:
            convert(model, normalizer, layers=layers)
    except ValueError as error:
        if not softmax:
            raise ValueError(f"{what}: {error}; attention=softmax trains it as it is") from error


def _refuse_unknown(name: str) -> None:
    """Refuses names that timm does not know; those of folders and of the hub it reads itself.

    Raises:
        ValueError: lists near names.
    """
    import timm
    import timm_sinkhorn  # noqa: F401  registers its own

    if name.startswith(("local-dir:", "hf-hub:", "hf_hub:")):
        return
    plain, _, tag = name.partition(".")
    if not timm.is_model(plain):
        near = get_close_matches(plain, timm.list_models(), 5, 0.5)
        own = ", ".join(timm.list_models("sinkformer*"))
        hint = f"near it are {', '.join(near)}" if near else "timm.list_models() names those that are"
        raise ValueError(f"model.name={name} is not registered with timm; {hint}; the suite's own are {own}")
    tags = [known.partition(".")[2] for known in timm.list_models(f"{plain}.*", pretrained=True)]
    if tag and tag not in tags:
        there_are = f"those of {plain} are {', '.join(tags)}" if tags else f"{plain} has none"
        raise ValueError(f"model.name={name}: timm knows no weights {tag}; {there_are}")


def _takes_normalizer(name: str) -> bool:
    """Whether a registered model is one of `timm_sinkhorn`'s, which take a normalizer when they are made."""
    import timm

    return timm.is_model(name) and timm.model_entrypoint(name).__module__.startswith("timm_sinkhorn")


def _refuse_cut_images(model: nn.Module, size: Sequence[int]) -> None:
    """Refuses patches that leave a margin of the images out, which timm does in silence.

    Raises:
        ValueError: names both sizes.
    """
    embed = getattr(model, "patch_embed", None)
    patch = getattr(embed, "patch_size", None)
    if not isinstance(patch, tuple) or getattr(embed, "dynamic_img_pad", False):
        return
    if any(side % part for side, part in zip(size, patch, strict=True)):
        raise ValueError(
            f"its patches of {patch[0]} × {patch[1]} pixels do not fill images of {size[0]} × {size[1]}: give "
            "+model.patch_size=… that divides them, or data of another size"
        )


def _with_weights(name: str, weights: str | None, given: Mapping[str, Any]) -> nn.Module:
    """A pretrained model of timm's; `weights` is a file, or None for those of the name.

    Raises:
        ValueError: for weights that are not there, out of reach or of another model.
    """
    import timm

    if weights is not None and not Path(weights).is_file():
        raise ValueError(f"model.weights: there is no file {weights}")
    if weights is not None:
        given = {**given, "pretrained_cfg_overlay": {"file": weights}}
    try:
        return timm.create_model(name, pretrained=True, **given)
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"the pretrained weights of {name} ({weights or 'fetched by timm'}) cannot be loaded: {reason}. Without a "
            "network, fetch them elsewhere and give model.weights=FILE or model.name=local-dir:FOLDER"
        ) from error


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


def cloud_model(
    name: str, attention: Mapping[str, Any], num_classes: int, example: Sequence[Tensor] | None = None, **options: Any
) -> nn.Module:
    """A point-cloud model of `pyg_sinkhorn`'s registry.

    Args:
        name: registered name.
        attention: `name` of the normalizer, its options, and `layers` as for `pretrained_timm_model`: the others keep
            softmax, and in the Point Cloud Transformer its own normalisation.
        num_classes: number of logits.
        example: inputs of the data; what their points have beyond three coordinates makes `features`.
        **options: of the model's class (hidden, num_heads, row_mass, num_samples, ...).

    Returns:
        A module from points (B, n, 3 + features), and a mask (B, n) where clouds are padded, to logits
        (B, num_classes).

    Raises:
        ValueError: for an unknown model or normalizer, or a setting that it refuses.
        TypeError: for an unknown option.
    """
    import pyg_sinkhorn

    if name not in pyg_sinkhorn.list_models():
        known = ", ".join(pyg_sinkhorn.list_models())
        raise ValueError(f"model.name={name} is not registered with pyg_sinkhorn, which has {known}")
    if example is not None and example[0].dim() == 3 and example[0].shape[-1] > 3:
        options.setdefault("features", example[0].shape[-1] - 3)
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
