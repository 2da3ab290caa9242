"""Translation: a Transformer whose encoder's self-attention is doubly stochastic (Sander et al. 2022, section 6)."""

import argparse
from collections.abc import Mapping
from typing import Any

from fairseq.models import register_model
from fairseq.models.transformer import TransformerConfig, TransformerModel, base_architecture
from fairseq.models.transformer.transformer_legacy import tiny_architecture, transformer_iwslt_de_en
from torch import nn

from .compat import as_namespace, register_architecture
from .encoder import SinkformerEncoder
from .options import AttentionOptions, add_attention_args, layers_to_keep, selected_layers, set_attention_defaults


@register_model("sinkformer")
class SinkformerModel(TransformerModel):
    """fairseq's `transformer` with `SinkhornMultiheadAttention` in the encoder.

    Decoder and cross-attention stay softmax: the column step would let an earlier target token depend on later ones.
    Parameter names are those of `transformer`, so `--finetune-from-model` goes in both directions. At
    `--sinkhorn-iters 1` the two are the same model.
    """

    @classmethod
    def hub_models(cls) -> dict[str, Any]:
        return {}

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        super().add_args(parser)
        add_attention_args(parser)

    @classmethod
    def build_model(cls, args: argparse.Namespace | Mapping[str, Any], task: Any) -> "SinkformerModel":
        """Builds the model from fairseq's options.

        Raises:
            AttributeError: for an option of the attention that got lost.
            ValueError: for options that do not fit.
        """
        args = as_namespace(args)
        args.selected_encoder_layers = selected_layers(args)
        args.encoder_layers_to_keep = ",".join(map(str, layers_to_keep(args))) or None
        return super().build_model(args, task)

    @classmethod
    def build_encoder(cls, cfg: TransformerConfig, src_dict: Any, embed_tokens: nn.Embedding) -> SinkformerEncoder:
        return SinkformerEncoder(
            cfg, src_dict, embed_tokens, AttentionOptions.from_args(cfg).choose(), cfg.selected_encoder_layers
        )


@register_architecture("sinkformer", "sinkformer")
def sinkformer(args: argparse.Namespace) -> None:
    """The sizes of fairseq's `transformer`: 512 wide, 6 + 6 layers, 8 heads."""
    set_attention_defaults(args)
    base_architecture(args)


@register_architecture("sinkformer", "sinkformer_iwslt_de_en")
def sinkformer_iwslt_de_en(args: argparse.Namespace) -> None:
    """The sizes of fairseq's `transformer_iwslt_de_en`: 512 wide, FFN 1024, 4 heads, 6 + 6 layers."""
    set_attention_defaults(args)
    transformer_iwslt_de_en(args)


@register_architecture("sinkformer", "sinkformer_tiny")
def sinkformer_tiny(args: argparse.Namespace) -> None:
    """The sizes of fairseq's `transformer_tiny`: 64 wide, 2 heads, 2 + 2 layers."""
    set_attention_defaults(args)
    tiny_architecture(args)
