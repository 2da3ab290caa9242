"""What all converted attention modules share."""

from typing import TYPE_CHECKING, Any

import torch
from sinkhorn_attention.normalizers import Normalizer
from torch import nn


class ConvertedAttention(nn.Module):
    """Mixin of the classes that `convert` gives to timm's attention modules; the first base, before timm's class.

    A converted module keeps its attributes, parameters and names; only its forward is another, and it has the submodule
    `normalizer`. `fused_attn` stays where it was and has no effect.
    """

    if TYPE_CHECKING:  # at run time an annotation here would hide those of timm's class from TorchScript
        normalizer: Normalizer

    #: The map is computed from queries and keys by `attend`; False where it comes `from_scores`.
    has_queries_and_keys = True

    @torch.jit.unused
    def prepare(self) -> None:
        """Brings the module's own state in order once, when its class has just been changed."""

    @torch.jit.unused
    def heads(self) -> tuple[int, int]:
        """Number of heads and width of one head."""
        width: Any = getattr(self, "head_dim", None) or getattr(self, "dim_head", None)
        if width is None:
            projection: Any = self.proj
            width = getattr(projection, "in_features", None) or projection.in_channels
            width //= self.num_heads
        return self.num_heads, width  # type: ignore[return-value]

    @torch.jit.unused
    def single_query(self) -> bool:
        """Whether there is one query: two half-steps or more then give every key the same weight."""
        return False
