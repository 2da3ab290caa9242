"""Sinkhorn (doubly stochastic) attention: one operator, exact in value and gradient, with exact masks."""

from .conversion import convert
from .diagnostics import (
    AttentionRecord,
    MarginalError,
    attention_entropy,
    column_sums,
    marginal_error,
    record_attention,
)
from .functional import sinkhorn, sinkhorn_attention
from .modules import MultiheadAttention
from .normalizers import Normalizer, get_normalizer, list_normalizers, register_normalizer

__version__ = "0.1.0"
__all__ = [
    "AttentionRecord",
    "MarginalError",
    "MultiheadAttention",
    "Normalizer",
    "attention_entropy",
    "column_sums",
    "convert",
    "get_normalizer",
    "list_normalizers",
    "marginal_error",
    "record_attention",
    "register_normalizer",
    "sinkhorn",
    "sinkhorn_attention",
]
