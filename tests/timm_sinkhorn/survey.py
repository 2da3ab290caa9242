"""The table of families: what `convert` does to one small model of each, and what still works afterwards.

`python -m tests.timm_sinkhorn.survey` writes `families.csv` beside this module; `--output` chooses another place and
names on the command line some families only.
"""

import argparse
import copy
import csv
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import fastvit, metaformer, nest, twins, visformer, volo
from timm_sinkhorn import convert
from torch import Tensor, nn

TABLE = Path(__file__).with_name("families.csv")
COLUMNS = ("family", "model", "attention", "converted", "left", "difference", "checkpointing", "compile")
NUM_CLASSES = 5
VIT = {"depth": 2, "embed_dim": 32, "num_heads": 2}


@dataclass(frozen=True)
class Family:
    """One small model of a family.

    Attributes:
        model: timm's name of a model, or of the class where no named model takes the sizes.
        image: side of the images that it takes.
        build: makes the model.
    """

    model: str
    image: int
    build: Callable[..., nn.Module]

    def create(self, **kwargs: Any) -> nn.Module:
        """The model in eval mode, with weights large enough that its attention maps are far from uniform."""
        torch.manual_seed(0)
        model = self.build(num_classes=NUM_CLASSES, **kwargs).eval()
        spread(model)
        return model

    def images(self, batch: int = 2) -> Tensor:
        """Random images, (batch, 3, image, image)."""
        return torch.randn(batch, 3, self.image, self.image, generator=torch.Generator().manual_seed(1))


def named(model: str, image: int, **sizes: Any) -> Family:
    """A family by a registered model and arguments that make it small."""
    return Family(model, image, lambda **kwargs: timm.create_model(model, **{**sizes, **kwargs}))


def classed(cls: Callable[..., nn.Module], image: int, **sizes: Any) -> Family:
    """A family by its model class, where the registered models fix their sizes."""
    return Family(cls.__name__, image, lambda **kwargs: cls(**{**sizes, **kwargs}))


FAMILIES: dict[str, Family] = {
    "vit": named("vit_tiny_patch16_224", 32, img_size=32, **VIT),
    "deit": named("deit_tiny_distilled_patch16_224", 32, img_size=32, **VIT),
    "deit3": named("deit3_small_patch16_224", 32, img_size=32, **VIT),
    "dinov2": named("vit_small_patch14_reg4_dinov2", 28, img_size=28, **VIT),
    "siglip": named("vit_base_patch16_siglip_224", 32, img_size=32, **VIT),
    "flexivit": named("flexivit_small", 32, img_size=32, **VIT),
    "naflexvit": named("naflexvit_base_patch16_gap", 32, **VIT),
    "beit": named("beit_base_patch16_224", 32, img_size=32, **VIT),
    "eva02": named("eva02_tiny_patch14_224", 28, img_size=28, **VIT),
    "vit rope": named("vit_small_patch16_rope_224", 32, img_size=32, **VIT),
    "vit relpos": named("vit_relpos_small_patch16_224", 32, img_size=32, **VIT),
    "cait": named("cait_xxs24_224", 32, img_size=32, **VIT),
    "swin": named(
        "swin_tiny_patch4_window7_224", 32, img_size=32, window_size=4, embed_dim=8, depths=(2, 2), num_heads=(2, 2)
    ),
    "swinv2": named(
        "swinv2_tiny_window8_256", 32, img_size=32, window_size=4, embed_dim=8, depths=(2, 2), num_heads=(2, 2)
    ),
    "mobilevit": named("mobilevit_xxs", 64),
    "crossvit": named(
        "crossvit_tiny_240",
        48,
        img_size=48,
        img_scale=(1.0, 2 / 3),
        patch_size=[12, 16],
        embed_dim=[16, 32],
        num_heads=[2, 2],
        depth=[[1, 1, 0]],
    ),
    "volo": classed(
        volo.VOLO,
        32,
        img_size=32,
        layers=(1, 1),
        embed_dims=(16, 16),
        num_heads=(2, 2),
        downsamples=(True, False),
        outlook_attention=(True, False),
        stem_hidden_dim=8,
    ),
    "tiny_vit": named("tiny_vit_5m_224", 32, embed_dims=(8, 16), depths=(1, 2), num_heads=(1, 2), window_sizes=(4, 4)),
    "nest": classed(nest.Nest, 32, img_size=32, num_levels=2, embed_dims=(8, 16), num_heads=(2, 2), depths=(1, 1)),
    "visformer": classed(
        visformer.Visformer,
        32,
        img_size=32,
        init_channels=8,
        embed_dim=32,
        depth=(0, 1, 1),
        num_heads=2,
        attn_stage="011",
        spatial_conv="100",
    ),
    "davit": named("davit_tiny", 32, depths=(1, 1), embed_dims=(8, 16), num_heads=(1, 2), window_size=4),
    "maxxvit": named("test_maxvit", 64, img_size=64),
    "coatnet": named("test_coatnet", 32, img_size=32),
    "pvt_v2": named(
        "pvt_v2_b0", 64, depths=(1, 1), embed_dims=(8, 16), num_heads=(1, 2), sr_ratios=(8, 4), mlp_ratios=(2, 2)
    ),
    "pvt_v2 linear": named(
        "pvt_v2_b2_li", 64, depths=(1, 1), embed_dims=(8, 16), num_heads=(1, 2), sr_ratios=(8, 4), mlp_ratios=(2, 2)
    ),
    "twins": classed(
        twins.Twins,
        64,
        img_size=64,
        embed_dims=(8, 16),
        num_heads=(1, 2),
        mlp_ratios=(2, 2),
        depths=(2, 2),
        sr_ratios=(4, 2),
        wss=(4, 4),
    ),
    "metaformer": classed(
        metaformer.MetaFormer,
        32,
        depths=(1, 1),
        dims=(8, 32),
        token_mixers=[metaformer.SepConv, metaformer.Attention],
        norm_layers=[metaformer.LayerNorm2dNoBias, metaformer.LayerNormNoBias],
    ),
    "fastvit": classed(
        fastvit.FastVit,
        64,
        layers=(1, 1, 1, 1),
        embed_dims=(8, 8, 16, 32),
        mlp_ratios=(2, 2, 2, 2),
        token_mixers=("repmixer", "repmixer", "repmixer", "attention"),
    ),
}


@torch.no_grad()
def spread(model: nn.Module) -> None:
    """Draws all parameters anew: many initialisations hide attention behind zero heads or tiny layer scales."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            fan_in = parameter[0].numel() if "pos" not in name and "token" not in name else 1
            parameter.normal_(std=fan_in**-0.5)
        elif name.endswith(("bias", "bias_table")):
            parameter.normal_(std=0.2)
        else:
            parameter.normal_(mean=1.0, std=0.2)


def relative_difference(got: Tensor, wanted: Tensor) -> float:
    """Largest absolute difference over the largest absolute value of `wanted`."""
    return ((got - wanted).abs().max() / wanted.abs().max()).item()


def survey(family: Family, checks: Sequence[str] = ("checkpointing", "compile")) -> dict[str, str]:
    """One row of the table, without its first column.

    The columns of `checks` say "yes" where the converted model (5 half-steps) gives the same output and gradient with
    it as without, "not in timm" where the stock model cannot do it either, and "no" otherwise.
    """
    stock, images = family.create(), family.images()
    attention = {name: type(module).__name__ for name, module in stock.named_modules()}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one = family.create()
        names = convert(one, "sinkhorn", n_iters=1)
    left = [str(warning.message) for warning in caught if "by design" in str(warning.message)]
    with torch.no_grad():
        difference = relative_difference(one(images), stock(images))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = family.create()
        convert(model, "sinkhorn", n_iters=5)
        stock = family.create()
        return {
            "model": family.model,
            "attention": " ".join(sorted({attention[name] for name in names})),
            "converted": str(len(names)),
            "left": str(left[0].split(": ", 1)[1].rpartition(" (")[0].count(",") + 1) if left else "0",
            "difference": f"{difference:.1e}",
            **{check: _verdict(CHECKS[check], model, stock, images) for check in checks},
        }


def checkpointed(model: nn.Module) -> nn.Module:
    """A copy of the model that recomputes its blocks in the backward pass."""
    model = copy.deepcopy(model)
    model.set_grad_checkpointing()  # type: ignore[operator]
    return model


def compiled(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The model compiled without a graph break."""
    torch.compiler.reset()
    return torch.compile(model, backend="aot_eager", fullgraph=True)


CHECKS: dict[str, Callable[[nn.Module], Callable[[Tensor], Tensor]]] = {
    "checkpointing": checkpointed,
    "compile": compiled,
}


def output_and_gradient(model: Callable[[Tensor], Tensor], images: Tensor) -> tuple[Tensor, Tensor]:
    """The model's output, and the gradient of a fixed combination of it with respect to the images."""
    images = images.clone().requires_grad_()
    out = model(images)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return out.detach(), torch.autograd.grad((out * weight).sum(), images)[0]


def _verdict(
    check: Callable[[nn.Module], Callable[[Tensor], Tensor]], model: nn.Module, stock: nn.Module, images: Tensor
) -> str:
    if _same(check, model, images):
        return "yes"
    return "no" if _same(check, stock, images) else "not in timm"


def _same(check: Callable[[nn.Module], Callable[[Tensor], Tensor]], model: nn.Module, images: Tensor) -> bool:
    wanted = output_and_gradient(model, images)
    try:
        got = output_and_gradient(check(model), images)
    except Exception:  # whatever stops it, timm's assertion or a compiler's error, the answer is no
        return False
    errors = [relative_difference(a, b) for a, b in zip(got, wanted, strict=True)]
    return all(math.isfinite(error) and error < 1e-4 for error in errors)


def main() -> None:
    """Writes the table; see the module's text."""
    parser = argparse.ArgumentParser(prog="python -m tests.timm_sinkhorn.survey", description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES), metavar="family", help="all by default")
    parser.add_argument("--output", type=Path, default=TABLE)
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.families) - set(FAMILIES))
    if unknown:
        parser.error(f"unknown {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    rows = []
    for family in arguments.families:
        rows.append({"family": family, **survey(FAMILIES[family])})
        print(*rows[-1].values(), sep=" | ", flush=True)
    with arguments.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
