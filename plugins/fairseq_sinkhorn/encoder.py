"""fairseq's Transformer encoder with the suite's attention in the layers that are asked for."""

from collections.abc import Collection
from typing import Any

from fairseq.distributed import fsdp_wrap
from fairseq.models.transformer import TransformerConfig, TransformerEncoderBase
from fairseq.modules import MultiheadAttention
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from sinkhorn_attention.normalizers import NormalizerChoice
from torch import nn

from .attention import SinkhornMultiheadAttention


class SinkformerEncoderLayer(TransformerEncoderLayerBase):
    """fairseq's encoder layer with `SinkhornMultiheadAttention`.

    Args:
        cfg: a TransformerConfig.
        normalizer: of the attention, with its options.
        return_fc: as for fairseq's class.
        **attention_kwargs: further arguments of the attention.
    """

    def __init__(
        self, cfg: TransformerConfig, normalizer: NormalizerChoice, return_fc: bool = False, **attention_kwargs: Any
    ) -> None:
        self._attention = (normalizer, attention_kwargs)  # the base constructor builds the attention
        super().__init__(cfg, return_fc=return_fc)

    def build_self_attention(self, embed_dim: int, cfg: TransformerConfig) -> MultiheadAttention:
        normalizer, attention_kwargs = self._attention
        return SinkhornMultiheadAttention(
            embed_dim,
            cfg.encoder.attention_heads,
            dropout=cfg.attention_dropout,
            self_attention=True,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
            xformers_att_config=cfg.encoder.xformers_att_config,
            normalizer=normalizer,
            **attention_kwargs,
        )


class SinkformerEncoder(TransformerEncoderBase):
    """fairseq's encoder, of which the layers numbered in `layers` have `SinkhornMultiheadAttention`.

    The other layers, the embedding, layerdrop, checkpointing of activations and FSDP wrapping are fairseq's.

    Args:
        cfg: a TransformerConfig.
        dictionary: of the source.
        embed_tokens: the embedding.
        normalizer: of their attention, with its options.
        layers: numbers of the layers.
        return_fc: as for fairseq's class.
    """

    def __init__(
        self,
        cfg: TransformerConfig,
        dictionary: Any,
        embed_tokens: nn.Embedding,
        normalizer: NormalizerChoice,
        layers: Collection[int],
        return_fc: bool = False,
    ) -> None:
        # The base constructor builds the layers, in order, and does not say which one it is at.
        self._normalizer, self._selected, self._built = normalizer, sorted(layers), 0
        super().__init__(cfg, dictionary, embed_tokens, return_fc=return_fc)

    def build_encoder_layer(self, cfg: TransformerConfig) -> nn.Module:
        number, self._built = self._built, self._built + 1
        if number not in self._selected:
            return super().build_encoder_layer(cfg)
        layer = SinkformerEncoderLayer(cfg, self._normalizer, return_fc=self.return_fc)
        # As in the base method, which makes its own layer and wraps it in one go.
        if cfg.checkpoint_activations:
            layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
        return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)
