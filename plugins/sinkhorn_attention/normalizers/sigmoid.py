"""Sigmoid attention: entries that know nothing of each other."""

import math
from functools import partial
from typing import Unpack

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..checks import CallOptions
from ..engines.exponential import Passes
from ..engines.heads import Heads, hide, row_spans
from ..engines.operator import is_eager, without_autocast
from ..engines.portable import choose_passes
from ..engines.problem import Problem
from ..functional import empty_attention, prepare
from ..masks import support_of
from .base import Normalizer, register_normalizer


@register_normalizer("sigmoid")
class Sigmoid(Normalizer):
    """sigmoid(scores - log m), m the number of valid keys (Ramapuram et al., Sigmoid Self-Attention, 2024).

    Neither rows nor columns sum to a given number. The bias makes them start near softmax: at scores of 0 every valid
    row sums to m / (m + 1) and every valid column to n / (m + 1).

    `from_scores` is that definition; `attend` computes it chunk by chunk and keeps no map for backward.

    Args:
        bias: added to the scores in place of -log m.
        head_dim: width of a head; not used.
        num_heads: number of heads; not used.
    """

    row_wise = True

    def __init__(self, bias: float | None = None, head_dim: int | None = None, num_heads: int | None = None) -> None:
        super().__init__(head_dim, num_heads)
        if bias is not None and (not isinstance(bias, int | float) or not math.isfinite(bias)):
            raise ValueError(f"bias must be a finite number, or None for -log m, got {bias!r}")
        self.bias = None if bias is None else float(bias)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Unpack[CallOptions]) -> Tensor:
        problem = prepare(query, key, value, may_be_causal=True, **options)
        if problem.is_empty:
            return empty_attention(problem)
        return attend_in_chunks(problem, self.bias).to(problem.like.dtype)

    def from_scores(self, scores: Tensor, query_mask: Tensor | None = None, key_mask: Tensor | None = None) -> Tensor:
        support = support_of(scores, query_mask, key_mask)
        bias = -_log_count(support) if self.bias is None else self.bias
        return _map(scores.to(torch.promote_types(scores.dtype, torch.float32)), support, bias).to(scores.dtype)


def _log_count(support: Tensor) -> Tensor:
    """Log of the number of keys that some query may see, (..., 1, 1), from the support (..., n or 1, m)."""
    keys = support.any(-2, keepdim=True).sum(-1, keepdim=True).clamp(min=1)
    return keys.to(torch.get_default_dtype() if keys.is_meta else torch.float64).log()


def _map(scores: Tensor, support: Tensor, bias: Tensor | float) -> Tensor:
    """sigmoid(scores + bias) within the support, 0 elsewhere; the derivative there is 0, too."""
    logits = torch.where(support, scores, 0.0)
    logits = logits + (bias.to(logits.dtype) if isinstance(bias, Tensor) else bias)
    return torch.where(support, logits.sigmoid(), 0.0)


def attend_in_chunks(problem: Problem, bias: float | None) -> Tensor:
    """The definition, for a chunk of heads and rows after the other; backward makes each chunk's map again.

    A chunk's maps stay in the cache, and none is kept for backward. What is being traced is traced in one piece: its
    compiler decides what is kept.
    """
    heads, like = Heads(problem.in_dtype(problem.dtype)), problem.like
    assert heads.query is not None and heads.key is not None and heads.value is not None  # noqa: PT018
    whole = not is_eager(like) or torch._C._are_functorch_transforms_active()
    passes = Passes(heads.count, heads.n, True) if whole else choose_passes(heads, recompute=False)
    rows = [span.stop - span.start for span in row_spans(heads.n, passes.rows)]
    parts = []
    tokens = (tensor.split(passes.heads) for tensor in (heads.query, heads.key, heads.value))
    for number, (query, key, value) in enumerate(zip(*tokens, strict=True)):
        group = slice(number * passes.heads, number * passes.heads + len(query))
        of_head = -_log_count(_support(heads, group, slice(None))) if bias is None else bias
        start, blocks = 0, []
        for block in query.split(rows, 1):
            span = slice(start, start := start + block.shape[1])
            call = partial(_attend_block, heads, group, span, of_head)
            several = passes.heads < heads.count or len(rows) > 1
            if several and torch.is_grad_enabled():
                call = partial(checkpoint, call, use_reentrant=False, preserve_rng_state=False)
            blocks.append(call(block, key, value))
        parts.append(torch.cat(blocks, 1) if len(blocks) > 1 else blocks[0])
    output = torch.cat(parts) if len(parts) > 1 else parts[0]
    return output.view(problem.output_shape)


def _support(heads: Heads, group: slice, rows: slice) -> Tensor:
    """Where the map of some heads and rows may be positive, broadcastable to (heads, rows, m)."""
    support = torch.ones(1, 1, heads.m, dtype=torch.bool, device=heads.device)
    bias = heads.bias(group, rows)
    if bias is not None:
        support = support & (bias != -math.inf)
    if heads.query_mask is not None:
        support = support & heads.query_mask[group][:, rows].unsqueeze(2)
    return support if heads.key_mask is None else support & heads.key_mask[group].unsqueeze(1)


def _attend_block(heads: Heads, group: slice, rows: slice, bias: Tensor | float, *tokens: Tensor) -> Tensor:
    """Attention of a block of queries (heads, rows, d) to keys and values (heads, m, ...)."""
    query, key, value = tokens
    key, value = (hide(tensor, heads.key_mask, group) for tensor in (key, value))
    if heads.query_mask is not None:
        query = query.masked_fill(~heads.query_mask[group][:, rows].unsqueeze(2), 0.0)
    with without_autocast(query):
        scores, attn_bias = heads.scale * query @ key.transpose(1, 2), heads.bias(group, rows)
        coupling = _map(scores if attn_bias is None else scores + attn_bias, _support(heads, group, rows), bias)
        dropout = heads.dropout(group, rows)
        output = (coupling if dropout is None else coupling * dropout) @ value
    if heads.query_mask is None:
        return output
    # What arrives at a padded query, NaN included, then reaches no gradient.
    return output.masked_fill(~heads.query_mask[group][:, rows].unsqueeze(2), 0.0)
