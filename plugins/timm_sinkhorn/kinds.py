"""What `convert` must know of timm's attention classes, which cannot be seen from outside.

A class that is not here is converted all the same where its forward calls scaled_dot_product_attention. Three forwards
are written out: timm makes their maps by hand, and a normalizer that needs queries and keys is given them here.

The only coupling of one query with m keys under uniform column sums is the uniform one. From the second half-step on
Sinkhorn attention with a single query is therefore exact mean pooling: neither query nor keys matter, and their
projections get no gradient. `convert` warns of it; leave such modules out by `layers=` to keep them a softmax.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from sinkhorn_attention.interception import Intercepted, Kind, intercepted, single_query
from timm.layers import Attention, AttentionPoolLatent, AttentionRope
from timm.layers.global_context import GlobalContext
from timm.layers.lambda_layer import LambdaLayer
from timm.layers.selective_kernel import SelectiveKernelAttn
from timm.layers.split_attn import RadixSoftmax, SplitAttn
from timm.models import (
    beit,
    cait,
    coat,
    convit,
    crossvit,
    davit,
    edgenext,
    efficientformer,
    efficientvim,
    eva,
    fastvit,
    gcvit,
    levit,
    maxxvit,
    metaformer,
    mobilevit,
    nest,
    pvt_v2,
    swin_transformer,
    swin_transformer_v2,
    swin_transformer_v2_cr,
    tiny_vit,
    twins,
    visformer,
    vision_transformer_relpos,
    volo,
    xcit,
)
from torch import Tensor, nn

from .attention import NormalizedAttention


def width_by_projection(module: Any) -> tuple[int, int]:
    """Number and width of the heads of timm's attention modules."""
    width = getattr(module, "head_dim", None) or getattr(module, "dim_head", None)
    if width is None:
        projection = module.proj
        width = (getattr(projection, "in_features", None) or projection.in_channels) // module.num_heads
    return module.num_heads, width


def window_bias(bias: Tensor, mask: Tensor | None) -> Tensor:
    """Position bias (1, heads, N, N) and mask (windows, N, N) of shifted windows to (windows or 1, heads, N, N)."""
    return bias if mask is None else bias + mask.unsqueeze(1)


class SwinV2WindowAttention(Intercepted, swin_transformer_v2.WindowAttention):
    """Within windows, with cosine scores at a learned temperature; x (B * windows, N, C), mask (windows, N, N)."""

    kind = Kind(width_by_projection)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, tokens, _ = x.shape
        windows = 1 if mask is None else mask.shape[0]
        qkv = self.qkv(x)
        if self.q_bias is not None:
            qkv = qkv + torch.cat((self.q_bias, self.k_bias, self.v_bias))  # type: ignore[arg-type]
        qkv = qkv.reshape(batch // windows, windows, tokens, 3, self.num_heads, -1)
        query, key, value = qkv.permute(3, 0, 1, 4, 2, 5).unbind(0)
        temperature = self.logit_scale.clamp(max=math.log(100.0)).exp()

        table = self.cpb_mlp(self.relative_coords_table).view(-1, self.num_heads)
        index: Tensor = self.relative_position_index  # type: ignore[assignment]
        bias = table[index.flatten()].view(tokens, tokens, self.num_heads).permute(2, 0, 1)
        out = self.normalizer.attend(
            F.normalize(query, dim=-1) * temperature,
            F.normalize(key, dim=-1),
            value,
            scale=1.0,
            attn_bias=window_bias(16.0 * bias.sigmoid().unsqueeze(0), mask),
            dropout_p=self.attn_drop.p if self.training else 0.0,
        )
        return self.proj_drop(self.proj(out.transpose(2, 3).reshape(batch, tokens, -1)))


class CrossvitCrossAttention(Intercepted, crossvit.CrossAttention):
    """x (B, N, C), one branch's class token before the other's patches, to (B, 1, C)."""

    kind = Kind(width_by_projection, single_query=single_query)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, channels = x.shape
        width = channels // self.num_heads
        query = self.wq(x[:, 0]).reshape(batch, self.num_heads, 1, width)
        key = self.wk(x).reshape(batch, tokens, self.num_heads, width).transpose(1, 2)
        value = self.wv(x).reshape(batch, tokens, self.num_heads, width).transpose(1, 2)
        out = self.normalizer.attend(
            query, key, value, scale=self.scale, dropout_p=self.attn_drop.p if self.training else 0.0
        )
        return self.proj_drop(self.proj(out.reshape(batch, 1, channels)))


class VoloClassAttention(Intercepted, volo.ClassAttention):
    """x (B, N, C), the class token first, to (B, 1, C)."""

    kind = Kind(width_by_projection, single_query=single_query)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        query = self.q(x[:, 0]).reshape(batch, self.num_heads, 1, self.head_dim)
        kv = self.kv(x).reshape(batch, tokens, 2, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        key, value = kv.unbind(0)
        out = self.normalizer.attend(
            query, key, value, scale=self.scale, dropout_p=self.attn_drop.p if self.training else 0.0
        )
        return self.proj_drop(self.proj(out.reshape(batch, 1, self.num_heads * self.head_dim)))


def _width_of_keys(module: tiny_vit.Attention) -> tuple[int, int]:
    return module.num_heads, module.key_dim


def _forget_bias(module: Any) -> None:
    module.attention_bias_cache = {}


class TinyVitAttention(Intercepted, tiny_vit.Attention):  # type: ignore[misc]
    """TinyViT's, whose bias is gathered anew in each forward.

    timm keeps it between calls in eval mode, where it outlives a change of the weights or their device, or a graph that
    has been freed, and hinders copying.
    """

    kind = Kind(_width_of_keys, prepare=_forget_bias)

    def get_attention_biases(self, device: torch.device) -> Tensor:
        index: Any = self.attention_bias_idxs
        return self.attention_biases[:, index]

    def train(self, mode: bool = True) -> "TinyVitAttention":
        super().train(mode)
        return self


def _one_latent(module: AttentionPoolLatent) -> bool:
    return module.latent_len == 1


PLAIN = Kind(width_by_projection, self_attention=True)
SCORES = Kind(given_scores=True)
SCORES_AND_KEPT_BIAS = Kind(given_scores=True, prepare=_forget_bias)
#: timm's class, exactly, to what must be known of it, or to the class that a converted module of it has.
KINDS: dict[type[nn.Module], Kind | type[nn.Module]] = {
    Attention: NormalizedAttention,
    AttentionPoolLatent: Kind(width_by_projection, single_query=_one_latent, self_attention=False),
    AttentionRope: PLAIN,
    beit.Attention: PLAIN,
    cait.ClassAttn: Kind(width_by_projection, single_query=single_query),
    cait.TalkingHeadAttn: Kind(width_by_projection, given_scores=True),
    convit.MHSA: SCORES,
    crossvit.CrossAttention: CrossvitCrossAttention,
    davit.WindowAttention: PLAIN,
    efficientformer.Attention: SCORES_AND_KEPT_BIAS,
    eva.EvaAttention: PLAIN,
    fastvit.Attention: PLAIN,
    gcvit.WindowAttentionGlobal: SCORES,
    levit.Attention: SCORES_AND_KEPT_BIAS,
    levit.AttentionDownsample: SCORES_AND_KEPT_BIAS,
    maxxvit.Attention2d: PLAIN,
    maxxvit.AttentionCl: PLAIN,
    metaformer.Attention: PLAIN,
    nest.Attention: PLAIN,
    pvt_v2.Attention: Kind(width_by_projection),
    swin_transformer.WindowAttention: PLAIN,
    swin_transformer_v2.WindowAttention: SwinV2WindowAttention,
    swin_transformer_v2_cr.WindowMultiHeadAttention: SCORES,
    tiny_vit.Attention: TinyVitAttention,
    twins.GlobalSubSampleAttn: Kind(width_by_projection),
    twins.LocallyGroupedAttn: PLAIN,
    vision_transformer_relpos.RelPosAttention: PLAIN,
    visformer.Attention: PLAIN,
    volo.Attention: PLAIN,
    volo.ClassAttention: VoloClassAttention,
    volo.OutlookAttention: Kind(width_by_projection, given_scores=True),
}


def converted(cls: type[nn.Module]) -> type[nn.Module]:
    """The class that a converted module of one of timm's classes has."""
    known = KINDS.get(cls, Kind())
    return intercepted(cls, known) if isinstance(known, Kind) else known


#: Modules with a softmax that is no map between tokens, and stays, with the reason; `convert` warns of them.
LEFT_BY_DESIGN: dict[type[nn.Module], str] = {
    coat.FactorAttnConvRelPosEnc: "factorised: keys are normalised over tokens on their own, there is no map",
    davit.ChannelAttention: "attends over channels",
    davit.ChannelAttentionV2: "attends over channels",
    edgenext.CrossCovarianceAttn: "attends over channels",
    efficientvim.HSMSSD: "a state-space mixer",
    LambdaLayer: "keys are normalised over tokens on their own, there is no map",
    mobilevit.LinearSelfAttention: "linear: one score per token, there is no map",
    xcit.XCA: "attends over channels",
}

#: Modules with a softmax that is no attention between anything: gates and weighted means.
NOT_ATTENTION: tuple[type[nn.Module], ...] = (
    GlobalContext,
    RadixSoftmax,
    SelectiveKernelAttn,
    SplitAttn,
    efficientvim.EfficientViM,
    efficientvim.EfficientViMDistilled,
)
