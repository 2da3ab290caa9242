"""Maps with one query: a class token, or a learned latent, gathers from all tokens.

The only coupling of one query with m keys under uniform column sums is the uniform one. From the second half-step on
Sinkhorn attention with a single query is therefore exact mean pooling: neither query nor keys matter, and their
projections get no gradient. `convert` warns of it; leave such modules out by `layers=` to keep them a softmax.
"""

import torch
from sinkhorn_attention.masks import split_attention_mask
from timm.layers import AttentionPoolLatent
from timm.models import cait, crossvit, volo
from torch import Tensor

from ..attention import as_support
from .base import ConvertedAttention


class CaitClassAttention(ConvertedAttention, cait.ClassAttn):
    """x (B, N, C), the class token first, to (B, 1, C)."""

    @torch.jit.unused
    def single_query(self) -> bool:
        return True

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, channels = x.shape
        width = channels // self.num_heads
        query = self.q(x[:, 0]).reshape(batch, self.num_heads, 1, width)
        key = self.k(x).reshape(batch, tokens, self.num_heads, width).transpose(1, 2)
        value = self.v(x).reshape(batch, tokens, self.num_heads, width).transpose(1, 2)
        out = self.normalizer.attend(
            query, key, value, scale=self.scale, dropout_p=self.attn_drop.p if self.training else 0.0
        )
        return self.proj_drop(self.proj(out.reshape(batch, 1, channels)))


class CrossvitCrossAttention(ConvertedAttention, crossvit.CrossAttention):
    """x (B, N, C), one branch's class token before the other's patches, to (B, 1, C)."""

    @torch.jit.unused
    def single_query(self) -> bool:
        return True

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


class VoloClassAttention(ConvertedAttention, volo.ClassAttention):
    """x (B, N, C), the class token first, to (B, 1, C)."""

    @torch.jit.unused
    def single_query(self) -> bool:
        return True

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        query = self.q(x[:, 0]).reshape(batch, self.num_heads, 1, self.head_dim)
        kv = self.kv(x).reshape(batch, tokens, 2, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        key, value = kv.unbind(0)
        out = self.normalizer.attend(
            query, key, value, scale=self.scale, dropout_p=self.attn_drop.p if self.training else 0.0
        )
        return self.proj_drop(self.proj(out.reshape(batch, 1, self.num_heads * self.head_dim)))


class LatentAttentionPool(ConvertedAttention, AttentionPoolLatent):
    """x (B, N, C) to (B, C): learned latent queries, one in SigLIP, over all tokens.

    A mask (B, 1, 1, N), True keeps, leaves padded tokens out.
    """

    @torch.jit.unused
    def single_query(self) -> bool:
        return self.latent_len == 1

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        bias, _, key_mask = split_attention_mask(as_support(attn_mask), self_attention=False)
        batch, tokens, _ = x.shape
        if self.pos_embed is not None:
            x = x + self.pos_embed.unsqueeze(0).to(x.dtype)
        latent = self.q(self.latent.expand(batch, -1, -1))
        query = latent.reshape(batch, self.latent_len, self.num_heads, self.head_dim).transpose(1, 2)
        kv = self.kv(x).reshape(batch, tokens, 2, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        key, value = kv.unbind(0)
        out = self.normalizer.attend(
            self.q_norm(query), self.k_norm(key), value, scale=self.scale, attn_bias=bias, key_mask=key_mask
        )
        out = self.proj_drop(self.proj(out.transpose(1, 2).reshape(batch, self.latent_len, -1)))
        if self.mlp is not None:
            out = out + self.mlp(self.norm(out))
        if self.pool == "token":
            return out[:, 0]
        return out.mean(1) if self.pool == "avg" else out
