"""Sinkhorn attention for timm: importing this package registers its models."""

from .attention import NormalizedAttention, attn_layer, sinkhorn_attn_layer
from .conversion import convert
from .models import (
    sinkformer_vit_base_patch16_224,
    sinkformer_vit_catsdogs,
    sinkformer_vit_mnist,
    sinkformer_vit_small_patch16_224,
    sinkformer_vit_tiny_patch16_224,
)
from .published import load_published_state_dict, to_published_state_dict

__all__ = [
    "NormalizedAttention",
    "attn_layer",
    "convert",
    "load_published_state_dict",
    "sinkformer_vit_base_patch16_224",
    "sinkformer_vit_catsdogs",
    "sinkformer_vit_mnist",
    "sinkformer_vit_small_patch16_224",
    "sinkformer_vit_tiny_patch16_224",
    "sinkhorn_attn_layer",
    "to_published_state_dict",
]
