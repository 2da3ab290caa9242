"""The streaming engine: the dense engine's result in memory O(n d), by making blocks of rows of K again for each pass.

Costs about twice as much as softmax attention at five half-steps; see blockwise.py. A matrix that leaves the range of
the exponential domain is computed in the log domain, in float64, as by the dense engine; that one takes its memory.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import blockwise
from .dense import backward_with_guard, define_attention, empty_state, forward_with_guard
from .operators import AttentionOperator


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, n_iters: int, scale: float, detached: bool, *masks: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Forward of the streaming engine; as `dense.attention_forward`."""
    run = partial(blockwise.run_forward, keep=False)
    return forward_with_guard(run, torch.get_num_threads(), query, key, value, n_iters, scale, *masks)


def attention_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Backward of the streaming engine; as `dense.attention_backward`."""
    return backward_with_guard(partial(blockwise.run_backward, keep=False), torch.get_num_threads(), *arguments)


streaming_attention = AttentionOperator(
    "streaming", attention_forward, attention_backward, empty_state, define_attention
)
