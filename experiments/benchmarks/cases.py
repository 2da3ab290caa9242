"""What is measured: shapes, and ways to compute attention on them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sinkhorn_attention import get_normalizer, sinkhorn_attention
from torch import Tensor

from .published import published_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
#: Counts of half-steps in the tables: softmax, the paper's usual counts, and its largest.
COUNTS = (1, 3, 5, 21)
ENGINES = ("auto", "native", "portable", "streaming", "triton")


@dataclass(frozen=True)
class Case:
    """One shape: batch, heads, queries, keys and width; standard normal tokens from a seed."""

    batch: int
    heads: int
    n: int
    m: int
    width: int

    def __str__(self) -> str:
        tokens = f"{self.n}" if self.n == self.m else f"{self.n}x{self.m}"
        return f"{self.batch}, {self.heads}, {tokens}, {self.width}"

    @property
    def entries(self) -> int:
        """Entries of all maps together, which time is about proportional to."""
        return self.batch * self.heads * self.n * self.m

    def tokens(self, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
        """Query, key and value with gradients, the same numbers on every device."""
        generator = torch.Generator().manual_seed(seed)
        shapes = [(self.n, self.width), (self.m, self.width), (self.m, self.width)]
        normal = [torch.randn(self.batch, self.heads, *shape, generator=generator) for shape in shapes]
        return [tensor.to(device, dtype).requires_grad_() for tensor in normal]


#: The table: a vision transformer, a text, a long text, both halves of an induced set attention block, a longer text.
CASES = (
    Case(16, 8, 197, 197, 64),
    Case(8, 8, 512, 512, 32),
    Case(4, 4, 1024, 1024, 64),
    Case(8, 4, 16, 1024, 64),
    Case(8, 4, 1024, 16, 64),
    Case(1, 4, 4096, 4096, 64),
)
QUICK_CASES = (Case(2, 2, 40, 40, 16),)


def attention(variant: str) -> Attention:
    """The function that a variant's name stands for.

    Args:
        variant: "sdpa" (torch's fused softmax attention), "softmax" (the same in four plain operations), an engine and
            its half-steps such as "native T=5", "published T=5", or "normalizer NAME" with that normalizer's defaults.

    Raises:
        ValueError: for anything else.
    """
    if variant == "sdpa":
        return F.scaled_dot_product_attention
    if variant == "softmax":
        return plain_softmax
    name, _, argument = variant.partition(" ")
    if name == "normalizer":
        return _normalizer(argument)
    n_iters = int(argument.removeprefix("T=")) if argument.startswith("T=") else 0
    if name == "published" and n_iters:
        return lambda query, key, value: published_attention(query, key, value, n_iters)
    if name in ENGINES and n_iters:
        return lambda query, key, value: sinkhorn_attention(query, key, value, n_iters, backend=name)
    raise ValueError(f"unknown variant {variant!r}: sdpa, softmax, an engine such as 'native T=5', or 'published T=5'")


def plain_softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax attention as its formula, the map in memory."""
    return (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).softmax(-1) @ value


def _normalizer(name: str) -> Attention:
    built: dict[int, Any] = {}

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if query.shape[1] not in built:
            module = get_normalizer(name, head_dim=query.shape[-1], num_heads=query.shape[1])
            built[query.shape[1]] = module.to(query.device)
        return built[query.shape[1]].attend(query, key, value)

    return attend
