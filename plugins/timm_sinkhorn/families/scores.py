"""Maps whose scores are not the plain product of a query and a key: they go through `Normalizer.from_scores`."""

import math

import torch.nn.functional as F
from timm.models import cait, volo
from torch import Tensor

from .base import ConvertedAttention


class CaitTalkingHeadAttention(ConvertedAttention, cait.TalkingHeadAttn):
    """Over all tokens, x (B, N, C), with scores mixed over heads before, and weights after, they are normalised.

    The second mixing acts on the finished coupling, so what reaches the values is no longer doubly stochastic, as with
    softmax it is no longer stochastic.
    """

    has_queries_and_keys = False

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, channels = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, channels // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = self.proj_l(((query * self.scale) @ key.transpose(-2, -1)).permute(0, 2, 3, 1))
        coupling = self.normalizer.from_scores(scores.permute(0, 3, 1, 2))
        weights = self.attn_drop(self.proj_w(coupling.permute(0, 2, 3, 1)).permute(0, 3, 1, 2))
        out = (weights @ value).transpose(1, 2).reshape(batch, tokens, channels)
        return self.proj_drop(self.proj(out))


class VoloOutlookAttention(ConvertedAttention, volo.OutlookAttention):
    """x (B, H, W, C): each position predicts, without keys, how the k * k positions around it mix.

    The coupling of one neighbourhood is (k * k, k * k), square; positions outside the image count, as zeros, as in
    timm.
    """

    has_queries_and_keys = False

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        rows, columns = math.ceil(height / self.stride), math.ceil(width / self.stride)
        area = self.kernel_size * self.kernel_size
        value = self.unfold(self.v(x).permute(0, 3, 1, 2))
        value = value.reshape(batch, self.num_heads, channels // self.num_heads, area, rows * columns)
        value = value.permute(0, 1, 4, 3, 2)
        scores = self.attn(self.pool(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        scores = scores.reshape(batch, rows * columns, self.num_heads, area, area).transpose(1, 2) * self.scale
        weights = self.attn_drop(self.normalizer.from_scores(scores))
        out = (weights @ value).permute(0, 1, 4, 3, 2).reshape(batch, channels * area, rows * columns)
        out = F.fold(
            out,
            output_size=(height, width),
            kernel_size=self.kernel_size,
            padding=self.padding,
            stride=self.stride,
        )
        return self.proj_drop(self.proj(out.permute(0, 2, 3, 1)))
