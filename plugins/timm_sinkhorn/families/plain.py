"""Square maps of plain scaled dot products: all tokens, or all tokens of a window, attend to one another."""

import torch.nn.functional as F
from timm.models import davit, fastvit, metaformer, nest, twins, visformer, volo
from torch import Tensor

from .base import ConvertedAttention


class NestAttention(ConvertedAttention, nest.Attention):
    """Within each block of the image; x (B, blocks, N, C)."""

    def forward(self, x: Tensor) -> Tensor:
        batch, blocks, tokens, channels = x.shape
        qkv = self.qkv(x).reshape(batch, blocks, tokens, 3, self.num_heads, channels // self.num_heads)
        query, key, value = qkv.permute(3, 0, 4, 1, 2, 5).unbind(0)
        out = self.normalizer.attend(
            query, key, value, scale=self.scale, dropout_p=self.attn_drop.p if self.training else 0.0
        )
        # The weights of this family were trained with channels before heads.
        out = out.permute(0, 2, 3, 4, 1).reshape(batch, blocks, tokens, channels)
        return self.proj_drop(self.proj(out))


class VisformerAttention(ConvertedAttention, visformer.Attention):
    """Over all positions of a feature map; x (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        qkv = self.qkv(x).reshape(batch, 3, self.num_heads, self.head_dim, height * width)
        query, key, value = qkv.permute(1, 0, 2, 4, 3).unbind(0)
        out = self.normalizer.attend(
            query, key, value, scale=self.scale, dropout_p=self.attn_drop.p if self.training else 0.0
        )
        out = out.transpose(-2, -1).reshape(batch, -1, height, width)
        return self.proj_drop(self.proj(out))


class DavitWindowAttention(ConvertedAttention, davit.WindowAttention):
    """Within windows; x (windows * B, N, C). The channel attention of the same models stays as it is."""

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, channels = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, channels // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = self.normalizer.attend(query, key, value, scale=self.scale)
        return self.proj(out.transpose(1, 2).reshape(batch, tokens, channels))


class VoloAttention(ConvertedAttention, volo.Attention):
    """Over all positions; x (B, H, W, C)."""

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        qkv = self.qkv(x).reshape(batch, height * width, 3, self.num_heads, channels // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = self.normalizer.attend(
            query, key, value, scale=self.scale, dropout_p=self.attn_drop.p if self.training else 0.0
        )
        out = out.transpose(1, 2).reshape(batch, height, width, channels)
        return self.proj_drop(self.proj(out))


class MetaformerAttention(ConvertedAttention, metaformer.Attention):
    """Over all tokens; x (B, N, C)."""

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = self.normalizer.attend(
            query, key, value, scale=self.scale, dropout_p=self.attn_drop.p if self.training else 0.0
        )
        out = out.transpose(1, 2).reshape(batch, tokens, self.num_heads * self.head_dim)
        return self.proj_drop(self.proj(out))


class FastvitAttention(ConvertedAttention, fastvit.Attention):
    """Over all positions of a feature map; x (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        tokens = x.flatten(2).transpose(-2, -1)
        qkv = self.qkv(tokens).reshape(batch, height * width, 3, self.num_heads, self.head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        out = self.normalizer.attend(
            query, key, value, scale=self.scale, dropout_p=self.attn_drop.p if self.training else 0.0
        )
        out = self.proj_drop(self.proj(out.transpose(1, 2).reshape(batch, height * width, channels)))
        return out.transpose(-2, -1).reshape(batch, channels, height, width)


class TwinsLocalAttention(ConvertedAttention, twins.LocallyGroupedAttn):
    """Within windows of `ws` x `ws`; x (B, H * W, C), size (H, W).

    As in timm, a map that windows do not tile is padded with zeros, and padded positions count as tokens.
    """

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        batch, tokens, channels = x.shape
        height, width = size
        side = self.ws
        grid = F.pad(x.view(batch, height, width, channels), (0, 0, 0, -width % side, 0, -height % side))
        rows, columns = grid.shape[1] // side, grid.shape[2] // side
        windows = grid.reshape(batch, rows, side, columns, side, channels).transpose(2, 3)
        qkv = self.qkv(windows).reshape(
            batch, rows * columns, side * side, 3, self.num_heads, channels // self.num_heads
        )
        query, key, value = qkv.permute(3, 0, 1, 4, 2, 5).unbind(0)
        out = self.normalizer.attend(
            query, key, value, scale=self.scale, dropout_p=self.attn_drop.p if self.training else 0.0
        )
        out = out.transpose(2, 3).reshape(batch, rows, columns, side, side, channels).transpose(2, 3)
        out = out.reshape(batch, rows * side, columns * side, channels)[:, :height, :width]
        return self.proj_drop(self.proj(out.reshape(batch, tokens, channels)))
