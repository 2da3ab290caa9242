"""Vision transformers with Sinkhorn attention, registered with timm under names that begin with `sinkformer_`.

All take, beside timm's own arguments (num_classes, img_size, patch_size, drop_rate, attn_drop_rate, ...):

- `normalizer`, as for `sinkhorn_attention.get_normalizer`: a name ("sinkhorn" by default), a mapping of "name" and
  options, or a Normalizer;
- `n_iters`, the number of half-steps. None is the model's own count for "sinkhorn" (3, and 5 for
  `sinkformer_vit_mnist`, as in the paper) and the normalizer's own default for any other;
- `normalizer_options`, a dict of further options of the normalizer.
"""

from typing import Any

import torch
from sinkhorn_attention.normalizers import choose_normalizer
from timm.layers import DropPath, PatchEmbed, to_2tuple
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import Tensor, nn

from .attention import attn_layer

Size = int | tuple[int, int]


def _cfg(**kwargs: Any) -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        **kwargs,
    }


default_cfgs = generate_default_cfgs(
    {
        "sinkformer_vit_tiny_patch16_224.untrained": _cfg(),
        "sinkformer_vit_small_patch16_224.untrained": _cfg(),
        "sinkformer_vit_base_patch16_224.untrained": _cfg(),
        # Sander et al. 2022 feed the cats and dogs without normalising colours.
        "sinkformer_vit_catsdogs.untrained": _cfg(num_classes=2, crop_pct=1.0, mean=(0.0,) * 3, std=(1.0,) * 3),
        "sinkformer_vit_mnist.untrained": _cfg(
            num_classes=10, input_size=(1, 28, 28), crop_pct=1.0, mean=(0.1307,), std=(0.3081,)
        ),
    }
)


class TilingPatchEmbed(PatchEmbed):
    """timm's PatchEmbed that refuses patches which do not tile the image; timm drops the remainder without a word."""

    def __init__(self, img_size: Any = 224, patch_size: Any = 16, **kwargs: Any) -> None:
        # timm pads at run time, and sizes positions by that, only where the image size is dynamic.
        padded = kwargs.get("dynamic_img_pad", False) and not kwargs.get("strict_img_size", True)
        check_tiling(img_size, patch_size, padded)
        super().__init__(img_size, patch_size, **kwargs)

    def set_input_size(self, img_size: Size | None = None, patch_size: Size | None = None) -> None:
        check_tiling(
            img_size or self.img_size, patch_size or self.patch_size, self.dynamic_img_pad and not self.strict_img_size
        )
        super().set_input_size(img_size, patch_size)


def check_tiling(img_size: Size, patch_size: Size, padded: bool = False) -> None:
    """Raises ValueError unless patches of `patch_size` tile an image of `img_size`, or it is `padded` until they do."""
    image, patch = (to_2tuple(size) for size in (img_size, patch_size))
    if min(patch) < 1 or (not padded and any(i % p for i, p in zip(image, patch, strict=True))):
        raise ValueError(
            f"patch_size must divide img_size {img_size}, so that patches tile the image; got {patch_size}"
        )


class PaperVisionTransformer(VisionTransformer):
    """The vision transformer of Sander et al. 2022: timm's, initialised as theirs.

    Positions and class token are drawn from N(0, 1), all else keeps torch's own initialisation of its layer.
    """

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """Draws positions and tokens; resets the layers too where `needs_reset`."""
        mode = mode or self.weight_init_mode
        if mode not in ("", "reset") or self.fix_init:
            raise ValueError(
                f"this model has one initialisation, the paper's; got weight_init={mode!r}, fix_init={self.fix_init}"
            )
        for parameter in (self.pos_embed, self.cls_token, self.reg_token):
            if parameter is not None:
                nn.init.normal_(parameter)
        if needs_reset:
            for module in self.modules():
                reset = getattr(module, "reset_parameters", None)
                if callable(reset):
                    reset()


class AttentionOnlyBlock(nn.Module):
    """x + attention(norm(x)): a pre-norm transformer block without its feed-forward half.

    The constructor takes what timm's VisionTransformer hands to a block; what concerns the feed-forward is unused.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qkv_bias: bool,
        qk_norm: bool,
        scale_attn_norm: bool,
        proj_bias: bool,
        proj_drop: float,
        attn_drop: float,
        drop_path: float,
        norm_layer: type[nn.Module],
        attn_layer: type[nn.Module],
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.norm1 = norm_layer(dim, device=device, dtype=dtype)
        self.attn = attn_layer(
            dim,
            num_heads=num_heads,
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            scale_norm=scale_attn_norm,
            proj_bias=proj_bias,
            attn_drop=attn_drop,
            proj_drop=proj_drop,
            norm_layer=norm_layer,
            device=device,
            dtype=dtype,
        )
        self.drop_path1 = DropPath(drop_path) if drop_path > 0.0 else nn.Identity()

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """`x` (B, N, dim) to the same shape; masks as for `NormalizedAttention`."""
        return x + self.drop_path1(self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal))


def _create(variant: str, pretrained: bool, given: dict[str, Any], n_iters: int = 3, **defaults: Any) -> nn.Module:
    """Builds one registered model of `defaults` with `n_iters` half-steps; what the user has `given` goes before."""
    if "attn_layer" in given:
        raise ValueError(f"{variant} has its attention already: choose it by normalizer= and normalizer_options=")
    chosen = choose_normalizer(
        given.pop("normalizer", "sinkhorn"),
        given.pop("n_iters", None),
        given.pop("normalizer_options", None),
        default={"name": "sinkhorn", "n_iters": n_iters},
    )
    model: nn.Module = build_model_with_cfg(
        defaults.pop("model_class", VisionTransformer),
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": given.pop("out_indices", 3), "feature_cls": "getter"},
        attn_layer=attn_layer(chosen, attn_head_dim=defaults.pop("attn_head_dim", None)),
        **{"embed_layer": TilingPatchEmbed, **defaults, **given},
    )
    return model


#: What both models of Sander et al. 2022 have.
_PAPER: dict[str, Any] = {
    "model_class": PaperVisionTransformer,
    "attn_head_dim": 64,
    "embed_dim": 128,
    "qkv_bias": False,
    "norm_layer": nn.LayerNorm,
}


@register_model
def sinkformer_vit_tiny_patch16_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Sinkhorn attention (3 half-steps) in timm's vit_tiny_patch16_224, whose weights it takes."""
    sizes = {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3}
    return _create("sinkformer_vit_tiny_patch16_224", pretrained, kwargs, **sizes)


@register_model
def sinkformer_vit_small_patch16_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Sinkhorn attention (3 half-steps) in timm's vit_small_patch16_224, whose weights it takes."""
    sizes = {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6}
    return _create("sinkformer_vit_small_patch16_224", pretrained, kwargs, **sizes)


@register_model
def sinkformer_vit_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Sinkhorn attention (3 half-steps) in timm's vit_base_patch16_224, whose weights it takes."""
    sizes = {"patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12}
    return _create("sinkformer_vit_base_patch16_224", pretrained, kwargs, **sizes)


@register_model
def sinkformer_vit_catsdogs(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """The cats-and-dogs transformer of Sander et al. 2022 (3 half-steps): 1,899,138 parameters.

    Width 128, 6 layers, 8 heads of 64 without qkv bias, feed-forward 128 with exact GELU, LayerNorm eps 1e-5, patches
    of 16 in images of 224, class token, N(0, 1) positions, 2 classes.
    """
    sizes: dict[str, Any] = {"patch_size": 16, "depth": 6, "num_heads": 8, "mlp_ratio": 1.0}
    return _create("sinkformer_vit_catsdogs", pretrained, kwargs, **_PAPER, **sizes)


@register_model
def sinkformer_vit_mnist(pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """The one-layer transformer of Sander et al. 2022 for digits (5 half-steps): attention only, one head of 64.

    Width 128, images (1, 28, 28), class token, N(0, 1) positions, LayerNorm eps 1e-5, no qkv bias, 10 classes.
    `patch_size` (7 by default) must divide 28; the paper sweeps 1, 2, 4, 7, 14 and 28.
    """
    sizes: dict[str, Any] = {"patch_size": 7, "depth": 1, "num_heads": 1, "block_fn": AttentionOnlyBlock}
    return _create("sinkformer_vit_mnist", pretrained, kwargs, n_iters=5, **_PAPER, **sizes)
