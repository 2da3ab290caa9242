"""Weights of the published ModelNet40 code (michaelsdr/sinkformers, ModelNetSink) in and out of SetTransformer."""

import re
from collections.abc import Mapping

from torch import Tensor

from .set_transformer import SetTransformer

_LAYERS = {
    "query": "fc_q",
    "key": "fc_k",
    "value": "fc_v",
    "norm_attention": "ln0",
    "norm_output": "ln1",
    "feedforward": "fc_o",
}
_LAYER = rf"\.(?P<layer>{'|'.join(_LAYERS)})\.(?P<kind>weight|bias)"

#: Patterns of our names, and the published names for their groups.
_RENAMES = (
    (r"encoder\.(?P<block>\d+)\.inducing", "enc.{block}.I"),
    (rf"encoder\.(?P<block>\d+)\.gather{_LAYER}", "enc.{block}.mab0.{layer}.{kind}"),
    (rf"encoder\.(?P<block>\d+)\.scatter{_LAYER}", "enc.{block}.mab1.{layer}.{kind}"),
    (r"pool\.seeds", "dec.1.S"),
    (rf"pool\.attention{_LAYER}", "dec.1.mab.{layer}.{kind}"),
    (r"head\.(?P<kind>weight|bias)", "dec.3.{kind}"),
)


def published_name(name: str) -> str:
    """The published code's name of one of SetTransformer's parameters.

    Raises:
        ValueError: for a parameter that the published model does not have (SABs, pre-norm, learned normalizers).
    """
    for pattern, published in _RENAMES:
        match = re.fullmatch(pattern, name)
        if match is not None:
            groups = match.groupdict()
            return published.format(**{**groups, "layer": _LAYERS.get(groups.get("layer", ""), "")})
    raise ValueError(f"the published model has no counterpart of the parameter {name!r}")


def to_published_state_dict(model: SetTransformer) -> dict[str, Tensor]:
    """The model's state dict under the published code's names.

    Raises:
        ValueError: if the model has a parameter that the published one lacks.
    """
    return {published_name(name): tensor for name, tensor in model.state_dict().items()}


def load_published_state_dict(model: SetTransformer, state_dict: Mapping[str, Tensor]) -> None:
    """Loads weights of the published code, in place. A prefix "module." (nn.DataParallel) is taken off.

    Raises:
        ValueError: names what is missing, unexpected or of another shape.
    """
    given = {name.removeprefix("module."): tensor for name, tensor in state_dict.items()}
    own = model.state_dict()
    names = {published_name(name): name for name in own}
    problems = {
        "missing": sorted(names.keys() - given.keys()),
        "unexpected": sorted(given.keys() - names.keys()),
        "wrong shape": [
            f"{published} {tuple(given[published].shape)} instead of {tuple(own[name].shape)}"
            for published, name in names.items()
            if published in given and given[published].shape != own[name].shape
        ],
    }
    if any(problems.values()):
        listed = "; ".join(f"{what}: {', '.join(which)}" for what, which in problems.items() if which)
        raise ValueError(f"this state dict does not fit the model: {listed}")
    model.load_state_dict({names[published]: tensor for published, tensor in given.items()})
