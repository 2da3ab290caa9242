"""Square maps whose queries and keys are rotated by their positions first."""

import torch
from sinkhorn_attention.masks import CAUSAL_REFUSAL, split_attention_mask
from timm.layers import AttentionRope, apply_rot_embed_cat
from timm.models import eva
from torch import Tensor

from ..attention import as_support
from .base import ConvertedAttention


def rotate_patches(x: Tensor, rope: Tensor, prefix_tokens: int, half: bool, like: Tensor) -> Tensor:
    """Rotates (B, heads, N, width) by `rope`, leaving the class and register tokens in front as they are."""
    patches = apply_rot_embed_cat(x[:, :, prefix_tokens:, :], rope, half=half)
    return torch.cat([x[:, :, :prefix_tokens, :], patches], dim=2).type_as(like)


class EvaAttention(ConvertedAttention, eva.EvaAttention):
    """Over all tokens, x (B, N, C); masks as for `NormalizedAttention`."""

    causal_refusal: torch.jit.Final[str] = CAUSAL_REFUSAL

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        if is_causal:
            raise ValueError(self.causal_refusal)
        bias, query_mask, key_mask = split_attention_mask(as_support(attn_mask))
        batch, tokens, _ = x.shape
        if self.qkv is not None:
            qkv = self.qkv(x)
            if self.q_bias is not None:
                qkv = qkv + torch.cat((self.q_bias, self.k_bias, self.v_bias))  # type: ignore[arg-type]
            query, key, value = qkv.reshape(batch, tokens, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        else:
            query = self.q_proj(x).reshape(batch, tokens, self.num_heads, -1).transpose(1, 2)
            key = self.k_proj(x).reshape(batch, tokens, self.num_heads, -1).transpose(1, 2)
            value = self.v_proj(x).reshape(batch, tokens, self.num_heads, -1).transpose(1, 2)
        query, key = self.q_norm(query), self.k_norm(key)
        if rope is not None:
            query = rotate_patches(query, rope, self.num_prefix_tokens, self.rotate_half, value)
            key = rotate_patches(key, rope, self.num_prefix_tokens, self.rotate_half, value)
        out = self.normalizer.attend(
            query,
            key,
            value,
            scale=self.scale,
            attn_bias=bias,
            query_mask=query_mask,
            key_mask=key_mask,
            dropout_p=self.attn_drop.p if self.training else 0.0,
        )
        out = self.norm(out.transpose(1, 2).reshape(batch, tokens, -1))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))


class RopeAttention(ConvertedAttention, AttentionRope):
    """Over all tokens, x (B, N, C), keys and values possibly shared by groups of heads; masks as above."""

    causal_refusal: torch.jit.Final[str] = CAUSAL_REFUSAL

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        if is_causal:
            raise ValueError(self.causal_refusal)
        bias, query_mask, key_mask = split_attention_mask(as_support(attn_mask))
        batch, tokens, _ = x.shape
        if self.qkv is not None:
            qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, self.head_dim)
            query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        else:
            query = self.q_proj(x).reshape(batch, tokens, self.num_heads, self.head_dim).transpose(1, 2)
            key = self.k_proj(x).reshape(batch, tokens, self.num_kv_heads, self.head_dim).transpose(1, 2)
            value = self.v_proj(x).reshape(batch, tokens, self.num_kv_heads, self.head_dim).transpose(1, 2)
        query, key = self.q_norm(query), self.k_norm(key)
        if rope is not None:
            query = rotate_patches(query, rope, self.num_prefix_tokens, self.rotate_half, value)
            key = rotate_patches(key, rope, self.num_prefix_tokens, self.rotate_half, value)
        if self.num_kv_groups > 1:
            key = key.repeat_interleave(self.num_kv_groups, dim=1)
            value = value.repeat_interleave(self.num_kv_groups, dim=1)
        out = self.normalizer.attend(
            query,
            key,
            value,
            scale=self.scale,
            attn_bias=bias,
            query_mask=query_mask,
            key_mask=key_mask,
            dropout_p=self.attn_drop.p if self.training else 0.0,
        )
        out = self.norm(out.transpose(1, 2).reshape(batch, tokens, self.attn_dim))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))
