"""Square maps with a bias: relative positions, and the masks of shifted windows, are added to the scores.

They reach the normalizer as `attn_bias`. A bias that depends on the row alone changes no coupling with an odd number of
half-steps (Sander et al. 2022, Proposition 1); one of relative positions depends on both. Swin's mask of -100 is a
finite bias, and keeps the regions of a shifted window apart as it does under softmax.
"""

import math

import torch
import torch.nn.functional as F
from timm.models import beit, maxxvit, swin_transformer, swin_transformer_v2, tiny_vit, vision_transformer_relpos
from torch import Tensor

from .base import ConvertedAttention


class BeitAttention(ConvertedAttention, beit.Attention):
    """Over all tokens, with the layer's own bias, a shared one, or both; x (B, N, C)."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x)
        if self.q_bias is not None:
            qkv = qkv + torch.cat((self.q_bias, self.k_bias, self.v_bias))  # type: ignore[arg-type]
        query, key, value = qkv.reshape(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        bias = shared_rel_pos_bias
        if self.relative_position_bias_table is not None:
            own = self._get_rel_pos_bias()
            bias = own if bias is None else own + bias
        out = self.normalizer.attend(
            query,
            key,
            value,
            scale=self.scale,
            attn_bias=bias,
            dropout_p=self.attn_drop.p if self.training else 0.0,
        )
        return self.proj_drop(self.proj(out.transpose(1, 2).reshape(batch, tokens, -1)))


def window_bias(bias: Tensor, mask: Tensor | None) -> Tensor:
    """Position bias (1, heads, N, N) and mask (windows, N, N) of shifted windows to (windows or 1, heads, N, N)."""
    return bias if mask is None else bias + mask.unsqueeze(1)


class SwinWindowAttention(ConvertedAttention, swin_transformer.WindowAttention):
    """Within windows, x (B * windows, N, C); mask (windows, N, N) where the windows are shifted."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, tokens, _ = x.shape
        windows = 1 if mask is None else mask.shape[0]
        qkv = self.qkv(x).reshape(batch // windows, windows, tokens, 3, self.num_heads, -1)
        query, key, value = qkv.permute(3, 0, 1, 4, 2, 5).unbind(0)
        out = self.normalizer.attend(
            query,
            key,
            value,
            scale=self.scale,
            attn_bias=window_bias(self._get_rel_pos_bias(), mask),
            dropout_p=self.attn_drop.p if self.training else 0.0,
        )
        return self.proj_drop(self.proj(out.transpose(2, 3).reshape(batch, tokens, -1)))


class SwinV2WindowAttention(ConvertedAttention, swin_transformer_v2.WindowAttention):
    """Within windows, with cosine scores at a learned temperature per head; shapes as for Swin."""

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


class TinyVitAttention(ConvertedAttention, tiny_vit.Attention):
    """Within windows, x (B, N, C); values may be wider than keys.

    The bias is gathered anew in each forward. timm keeps it between calls in eval mode, where it outlives a change of
    the weights' device or a graph that has been freed, and hinders copying.
    """

    @torch.jit.unused
    def prepare(self) -> None:
        self.attention_bias_cache = {}

    @torch.jit.unused
    def heads(self) -> tuple[int, int]:
        return self.num_heads, self.key_dim

    def train(self, mode: bool = True) -> "TinyVitAttention":
        super().train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, tokens, self.num_heads, -1).transpose(1, 2)
        query, key, value = qkv.split([self.key_dim, self.key_dim, self.val_dim], dim=3)
        index: Tensor = self.attention_bias_idxs  # type: ignore[assignment]
        bias = self.attention_biases[:, index]
        out = self.normalizer.attend(query, key, value, scale=self.scale, attn_bias=bias)
        return self.proj(out.transpose(1, 2).reshape(batch, tokens, self.out_dim))


class MaxxvitAttention2d(ConvertedAttention, maxxvit.Attention2d):
    """Over all positions of a feature map, x (B, C, H, W), with the layer's bias or a shared one."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        batch, _, height, width = x.shape
        if self.head_first:
            query, key, value = self.qkv(x).reshape(batch, self.num_heads, self.dim_head * 3, -1).chunk(3, dim=2)
        else:
            query, key, value = self.qkv(x).reshape(batch, 3, self.num_heads, self.dim_head, -1).unbind(1)
        bias = shared_rel_pos
        if self.rel_pos is not None:
            bias = self.rel_pos.get_bias()
        out = self.normalizer.attend(
            query.transpose(-2, -1),
            key.transpose(-2, -1),
            value.transpose(-2, -1),
            scale=self.scale,
            attn_bias=bias,
            dropout_p=self.attn_drop.p if self.training else 0.0,
        )
        out = out.transpose(-2, -1).reshape(batch, -1, height, width)
        return self.proj_drop(self.proj(out))


class MaxxvitAttentionCl(ConvertedAttention, maxxvit.AttentionCl):
    """Within windows or grids, channels last, x (B, ..., C), with the layer's bias or a shared one."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        batch = x.shape[0]
        qkv = self.qkv(x)
        if self.head_first:
            query, key, value = (
                qkv.reshape(batch, -1, self.num_heads, self.dim_head * 3).transpose(1, 2).chunk(3, dim=3)
            )
        else:
            query, key, value = qkv.reshape(batch, -1, 3, self.num_heads, self.dim_head).transpose(1, 3).unbind(2)
        bias = shared_rel_pos
        if self.rel_pos is not None:
            bias = self.rel_pos.get_bias()
        out = self.normalizer.attend(
            query,
            key,
            value,
            scale=self.scale,
            attn_bias=bias,
            dropout_p=self.attn_drop.p if self.training else 0.0,
        )
        out = self.proj(out.transpose(1, 2).reshape(batch, -1, self.num_heads * self.dim_head))
        return self.proj_drop(out.reshape(x.shape[:-1] + out.shape[-1:]))


class RelPosAttention(ConvertedAttention, vision_transformer_relpos.RelPosAttention):
    """Over all tokens, x (B, N, C), with the layer's bias or a shared one."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        batch, tokens, channels = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)
        bias = shared_rel_pos
        if self.rel_pos is not None:
            bias = self.rel_pos.get_bias()  # type: ignore[operator]
        out = self.normalizer.attend(
            self.q_norm(query),
            self.k_norm(key),
            value,
            scale=self.scale,
            attn_bias=bias,
            dropout_p=self.attn_drop.p if self.training else 0.0,
        )
        return self.proj_drop(self.proj(out.transpose(1, 2).reshape(batch, tokens, channels)))
