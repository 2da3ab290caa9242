"""State dicts of the published vision transformers (michaelsdr/sinkformers, vit_pytorch) to ours and back.

Only names and one layout differ: the published patch embedding is a linear layer on pixels in the order (row, column,
channel), ours is a convolution.
"""

import re
from collections.abc import Mapping

from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

_PATCH = "patch_embed.proj.weight"
_NAMES = {
    "pos_embedding": "pos_embed",
    "cls_token": "cls_token",
    "to_patch_embedding.1.weight": _PATCH,
    "to_patch_embedding.1.bias": "patch_embed.proj.bias",
    "mlp_head.0.weight": "norm.weight",
    "mlp_head.0.bias": "norm.bias",
    "mlp_head.1.weight": "head.weight",
    "mlp_head.1.bias": "head.bias",
}
_LAYER_NAMES = {
    "0.norm": "norm1",
    "0.fn.to_qkv": "attn.qkv",
    "0.fn.to_out.0": "attn.proj",
    "1.norm": "norm2",
    "1.fn.net.0": "mlp.fc1",
    "1.fn.net.3": "mlp.fc2",
}
_LAYER_NAMES_BACK = {ours: published for published, ours in _LAYER_NAMES.items()}
_NAMES_BACK = {ours: published for published, ours in _NAMES.items()}


def load_published_state_dict(model: VisionTransformer, state_dict: Mapping[str, Tensor]) -> None:
    """Loads a published checkpoint into `sinkformer_vit_catsdogs` or `sinkformer_vit_mnist`.

    The published digits model holds a feed-forward that it never applies; such entries are left out where the model
    has no feed-forward.

    Args:
        model: of the same size as the published one.
        state_dict: the published model's, by its own names.

    Raises:
        ValueError: for a name that no published vision transformer has.
        RuntimeError: torch's own, for missing entries or other shapes.
    """
    translated = {}
    patch_shape = model.patch_embed.proj.weight.shape  # (dim, channels, rows, columns)
    for name, tensor in state_dict.items():
        ours = _translate(name, r"transformer\.layers\.(\d+)\.(.+)\.(weight|bias)", "blocks", _NAMES, _LAYER_NAMES)
        if ours is None:
            raise ValueError(f"{name!r} is no entry of a published vision transformer")
        if re.search(r"\.(norm2|mlp)\.", ours) and not hasattr(model.blocks[0], "mlp"):
            continue
        if ours == _PATCH:
            dim, channels, rows, columns = patch_shape
            if tensor.numel() != patch_shape.numel():
                raise ValueError(f"{name} {tuple(tensor.shape)} does not fit patches {tuple(patch_shape[1:])} to {dim}")
            tensor = tensor.reshape(dim, rows, columns, channels).permute(0, 3, 1, 2)
        translated[ours] = tensor
    model.load_state_dict(translated)


def to_published_state_dict(model: VisionTransformer) -> dict[str, Tensor]:
    """The model's state dict by the published names, in the published order.

    An attention-only model gives no entries for the feed-forward that its published counterpart holds unused.

    Raises:
        ValueError: for a model with parameters that the published ones do not have.
    """
    translated = {}
    for name, tensor in model.state_dict().items():
        published = _translate(
            name, r"blocks\.(\d+)\.(.+)\.(weight|bias)", "transformer.layers", _NAMES_BACK, _LAYER_NAMES_BACK
        )
        if published is None:
            raise ValueError(f"{name!r} has no counterpart in the published vision transformers")
        translated[published] = tensor.permute(0, 2, 3, 1).flatten(1) if name == _PATCH else tensor
    order = {name: position for position, name in enumerate(["pos_embedding", *_NAMES])}
    head = {name: tensor for name, tensor in translated.items() if name.startswith("mlp_head.")}
    stem = {name: tensor for name, tensor in translated.items() if name in order and name not in head}
    layers = {name: tensor for name, tensor in translated.items() if name not in order}
    return {**dict(sorted(stem.items(), key=lambda item: order[item[0]])), **layers, **head}


def _translate(
    name: str, layer_pattern: str, layers: str, names: Mapping[str, str], layer_names: Mapping[str, str]
) -> str | None:
    if name in names:
        return names[name]
    match = re.fullmatch(layer_pattern, name)
    if match is None or match[2] not in layer_names or match[0].endswith("qkv.bias"):  # the published qkv has no bias
        return None
    return f"{layers}.{match[1]}.{layer_names[match[2]]}.{match[3]}"
