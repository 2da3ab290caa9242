"""timm's self-attention with its softmax replaced by a normalizer of the suite, and classes for `attn_layer=`."""

import copyreg
from collections.abc import Mapping
from typing import Any

from sinkhorn_attention.interception import Intercepted, Kind
from sinkhorn_attention.normalizers import NormalizerChoice, choose_normalizer, get_normalizer
from timm.layers import Attention
from torch import Tensor


def _heads(module: Attention) -> tuple[int, int]:
    return module.num_heads, module.head_dim


class NormalizedAttention(Intercepted, Attention):  # type: ignore[misc]  # fused_attn is Final for TorchScript
    """timm.layers.Attention whose map comes from a normalizer: `sinkhorn`, `softmax`, or any other of the registry.

    Every option of timm's class is honoured (`qk_norm`, `scale_norm`, `gated`, `attn_head_dim`, `dim_out`, dropout),
    and the parameters keep timm's names, so weights move between the two classes in both directions. The normalizer
    is the submodule `normalizer`; it adds entries to the state dict only where it owns parameters.

    The forward is timm's own, whose softmax is caught; `fused_attn` has no effect.

    Args:
        *args: as for timm.layers.Attention.
        normalizer: a name, a mapping of "name" and options, or a Normalizer: see `sinkhorn_attention.get_normalizer`.
        normalizer_options: the normalizer's options, such as `n_iters`.
        **kwargs: as for timm.layers.Attention.

    Raises:
        ValueError: for an unknown normalizer or an option that it does not have or does not take.
    """

    kind = Kind(_heads, self_attention=True)

    def __init__(
        self,
        *args: Any,
        normalizer: NormalizerChoice = "sinkhorn",
        normalizer_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        chosen = choose_normalizer(normalizer, options=normalizer_options)
        self.normalizer = get_normalizer(chosen, head_dim=self.head_dim, num_heads=self.num_heads)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attends over the tokens of `x`.

        Args:
            x: (B, N, C).
            attn_mask: broadcastable to (B, heads, N, N); boolean, True keeps, or floating, added to the scores, where
                -1e4 and less hides. One of shape (B, 1, 1, N) is a key-padding mask, and the padded tokens are left
                out as queries too: the attention gives 0 there, which leaves the bias of `proj`.
            is_causal: must be False.

        Returns:
            (B, N, dim_out).

        Raises:
            ValueError: for `is_causal=True` or a triangular mask, neither of which a doubly stochastic map can have, or
                for an `x` that is no sequence of tokens.
        """
        if x.dim() != 3:
            raise ValueError(
                "x must be tokens, (batch, tokens, channels). Models such as timm's ByobNet (mobilevit, halonet) take "
                "attn_layer= for a gate on feature maps and keep their softmax: use timm_sinkhorn.convert(model, ...) "
                "for those"
            )
        return super().forward(x, attn_mask, is_causal)


class _ConfiguredClass(type):
    """Metaclass of what `attn_layer` returns. timm keeps the class in a model's arguments, so it must pickle."""


def attn_layer(
    normalizer: NormalizerChoice = "sinkhorn", *, attn_head_dim: int | None = None, **options: Any
) -> type[NormalizedAttention]:
    """A class for timm's `attn_layer=`, which takes classes only, with the normalizer already chosen.

    Calling the class gives a `NormalizedAttention`, so that models and their copies pickle.

    Args:
        normalizer: a name, a mapping of "name" and options, or a Normalizer: see `sinkhorn_attention.get_normalizer`.
        attn_head_dim: width of a head where it is not dim / num_heads; timm's models have no argument for it.
        **options: the normalizer's options. They are checked when the model is built.

    Example:
        >>> timm.create_model("vit_small_patch16_224", attn_layer=attn_layer("sinkhorn", n_iters=3))
    """
    chosen = choose_normalizer(normalizer, options=options)
    fixed: dict[str, Any] = {"normalizer": chosen}
    if attn_head_dim is not None:
        fixed["attn_head_dim"] = attn_head_dim

    def build(cls: type, *args: Any, **kwargs: Any) -> NormalizedAttention:
        return NormalizedAttention(*args, **fixed, **kwargs)

    namespace = {
        "__new__": build,
        "__module__": __name__,
        "__doc__": f"Attention by {chosen} for timm's attn_layer=.",
        "arguments": (chosen, attn_head_dim),
    }
    configured: Any = _ConfiguredClass("ConfiguredAttention", (NormalizedAttention,), namespace)
    return configured


def sinkhorn_attn_layer(n_iters: int = 3, **options: Any) -> type[NormalizedAttention]:
    """`attn_layer("sinkhorn", n_iters=n_iters, **options)`; `n_iters` counts half-steps, 1 is softmax."""
    return attn_layer("sinkhorn", n_iters=n_iters, **options)


def _rebuild(
    normalizer: NormalizerChoice, attn_head_dim: int | None, options: Mapping[str, Any] | None = None
) -> type[NormalizedAttention]:
    # Models pickled by earlier versions hold a name and its options apart.
    return attn_layer(normalizer, attn_head_dim=attn_head_dim, **(options or {}))


def _reduce(cls: Any) -> tuple[Any, ...]:
    return _rebuild, cls.arguments


copyreg.pickle(_ConfiguredClass, _reduce)
