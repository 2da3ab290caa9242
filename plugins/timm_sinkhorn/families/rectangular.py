"""Rectangular maps: n queries, the tokens, and m < n keys, their pooled summaries.

Rows still sum to 1 after an odd number of half-steps. The column step makes every column sum to n / m, so that each
summary is used as much as any other: with 49 keys for 3136 tokens every key gives away 64.
"""

from timm.models import pvt_v2, twins
from torch import Tensor

from .base import ConvertedAttention


class PvtAttention(ConvertedAttention, pvt_v2.Attention):
    """Keys are a strided convolution of the tokens, or a 7 x 7 pooling ("linear"); x (B, N, C), feat_size (H, W)."""

    def forward(self, x: Tensor, feat_size: list[int]) -> Tensor:
        batch, tokens, channels = x.shape
        query = self.q(x).reshape(batch, tokens, self.num_heads, self.head_dim).transpose(1, 2)
        if self.sr is not None:
            grid = x.transpose(1, 2).reshape(batch, channels, feat_size[0], feat_size[1])
            if self.pool is not None:
                grid = self.pool(grid)
            x = self.norm(self.sr(grid).flatten(2).transpose(1, 2))
            if self.act is not None:
                x = self.act(x)
        kv = self.kv(x).reshape(batch, -1, 2, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        key, value = kv.unbind(0)
        out = self.normalizer.attend(
            query, key, value, scale=self.scale, dropout_p=self.attn_drop.p if self.training else 0.0
        )
        return self.proj_drop(self.proj(out.transpose(1, 2).reshape(batch, tokens, channels)))


class TwinsGlobalAttention(ConvertedAttention, twins.GlobalSubSampleAttn):
    """Keys are a strided convolution of the tokens; x (B, N, C), size (H, W)."""

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        batch, tokens, channels = x.shape
        query = self.q(x).reshape(batch, tokens, self.num_heads, channels // self.num_heads).transpose(1, 2)
        if self.sr is not None:
            grid = x.transpose(1, 2).reshape(batch, channels, size[0], size[1])
            x = self.norm(self.sr(grid).flatten(2).transpose(1, 2))
        kv = self.kv(x).reshape(batch, -1, 2, self.num_heads, channels // self.num_heads).permute(2, 0, 3, 1, 4)
        key, value = kv.unbind(0)
        out = self.normalizer.attend(
            query, key, value, scale=self.scale, dropout_p=self.attn_drop.p if self.training else 0.0
        )
        return self.proj_drop(self.proj(out.transpose(1, 2).reshape(batch, tokens, channels)))
