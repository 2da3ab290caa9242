"""Sentiment: an encoder with doubly stochastic attention under fairseq's `sentence_prediction`."""

import argparse
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from fairseq import utils
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import FairseqEncoder, FairseqEncoderModel, register_model
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer.transformer_config import DEFAULT_MIN_PARAMS_TO_WRAP, EncDecBaseConfig
from sinkhorn_attention.normalizers import NormalizerChoice
from torch import Tensor, nn

from .compat import as_namespace, register_architecture
from .encoder import SinkformerEncoder
from .options import AttentionOptions, add_attention_args, layers_to_keep, selected_layers, set_attention_defaults

POOLINGS = ("max", "mean", "first")


def pool_tokens(features: Tensor, keep: Tensor, pooling: str) -> Tensor:
    """One vector for each sentence from those of its tokens; padding takes no part.

    Args:
        features: (B, T, C).
        keep: (B, T), boolean, True at tokens; they may stand left or right.
        pooling: "max", "mean" or "first".

    Returns:
        (B, C); zeros for a sentence without tokens.

    Raises:
        ValueError: for another pooling.
    """
    if pooling not in POOLINGS:
        raise ValueError(f"--pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
    padding = ~keep.unsqueeze(-1)
    if pooling == "max":
        pooled = features.masked_fill(padding, torch.finfo(features.dtype).min).amax(1)
    elif pooling == "mean":
        pooled = features.masked_fill(padding, 0.0).sum(1) / keep.sum(1, keepdim=True).clamp(min=1)
    else:
        first = keep.to(torch.uint8).argmax(1)
        pooled = features[torch.arange(len(features), device=features.device), first]
    return pooled.masked_fill(~keep.any(1, keepdim=True), 0.0)


class SentimentModel(FairseqEncoderModel):
    """What fairseq's task and criterion `sentence_prediction` ask of a model: named classification heads.

    A subclass has an encoder whose forward(src_tokens) gives the vector of each sentence, (B, C).
    """

    def __init__(self, args: argparse.Namespace, encoder: FairseqEncoder) -> None:
        super().__init__(encoder)
        self.args = args
        self.classification_heads = nn.ModuleDict()

    def register_classification_head(self, name: str, num_classes: int, **_: Any) -> None:
        """Adds a linear layer to `num_classes` logits; a head of that name is replaced."""
        self.classification_heads[name] = nn.Linear(self.args.encoder_embed_dim, num_classes)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        features_only: bool = True,
        classification_head_name: str | None = None,
        **_: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """The logits of a head, (B, num_classes), or without a head's name the pooled features, (B, C).

        Args:
            src_tokens: (B, T), padded with the dictionary's padding index.
            src_lengths: not needed, the padding tells.
            features_only: fairseq passes it; there is nothing but features and heads.
            classification_head_name: a name given to `register_classification_head`.
        """
        features = self.encoder(src_tokens)
        if classification_head_name is None:
            return features, {}
        return self.classify(features, classification_head_name), {}

    def classify(self, features: Tensor, head: str) -> Tensor:
        """The logits of a head, (B, num_classes), from the features of sentences, (B, C)."""
        logits: Tensor = self.classification_heads[head](features)
        return logits

    def get_normalized_probs(
        self, net_output: tuple[Tensor, Any], log_probs: bool, sample: Mapping[str, Any] | None = None
    ) -> Tensor:
        logits = net_output[0].float()
        return F.log_softmax(logits, -1) if log_probs else F.softmax(logits, -1)

    @classmethod
    def hub_models(cls) -> dict[str, Any]:
        return {}


class PooledEncoder(FairseqEncoder):
    """`SinkformerEncoder` and the pooling over a sentence's tokens.

    Args:
        cfg: a TransformerConfig.
        dictionary: of the source.
        normalizer: of their attention, with its options.
        layers: numbers of the layers with that attention.
        pooling: "max", "mean" or "first".
    """

    def __init__(
        self, cfg: TransformerConfig, dictionary: Any, normalizer: NormalizerChoice, layers: list[int], pooling: str
    ) -> None:
        super().__init__(dictionary)
        if pooling not in POOLINGS:
            raise ValueError(f"--pooling must be one of {', '.join(POOLINGS)}, got {pooling!r}")
        # torch's N(0, 1), of the size of the positions: the factor sqrt(C) that fairseq has is left out, as published.
        embed_tokens = nn.Embedding(len(dictionary), cfg.encoder.embed_dim, dictionary.pad())
        if cfg.encoder.embed_path:
            embed_tokens = utils.load_embedding(utils.parse_embedding(cfg.encoder.embed_path), dictionary, embed_tokens)
        self.pooling = pooling
        self.sentence_encoder = SinkformerEncoder(cfg, dictionary, embed_tokens, normalizer, layers)

    def forward(self, src_tokens: Tensor, src_lengths: Tensor | None = None, **_: Any) -> Tensor:
        """(B, T) tokens -> (B, C)."""
        encoded = self.sentence_encoder(src_tokens)
        features = encoded["encoder_out"][0].transpose(0, 1)
        return pool_tokens(features, ~encoded["encoder_padding_mask"][0], self.pooling)

    def max_positions(self) -> int:
        return self.sentence_encoder.max_positions()


def add_encoder_args(parser: argparse.ArgumentParser) -> None:
    """Adds fairseq's options of an encoder, without defaults: those belong to the architectures."""
    gen_parser_from_dataclass(parser, EncDecBaseConfig(), delete_default=True, with_prefix="--encoder")
    parser.add_argument("--activation-fn", choices=utils.get_available_activation_fns(), help="of the feed-forward")
    for name, what in (
        ("dropout", "the outputs of sublayers and the embedding"),
        ("attention-dropout", "the map, without renormalising"),
        ("activation-dropout", "the inside of the feed-forward"),
    ):
        parser.add_argument(f"--{name}", type=float, metavar="P", help=f"dropout probability of {what}")
    parser.add_argument("--max-positions", type=int, metavar="N", help="greatest length of a sentence in tokens")
    for name, what in (
        ("layernorm-embedding", "add a layer norm to the embedding"),
        ("checkpoint-activations", "compute activations again in the backward pass"),
        ("offload-activations", "move checkpointed activations to the CPU"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=what)
    parser.add_argument("--min-params-to-wrap", type=int, metavar="N", help="of a layer, for fully sharded training")


@register_model("sinkformer_sentiment")
class SinkformerSentimentModel(SentimentModel):
    """Encoder, pooling over the tokens of the sentence, and one linear layer.

    For `--task sentence_prediction --criterion sentence_prediction`. The weights of all normalizers are
    interchangeable (`--finetune-from-model`) as far as those own no parameters.
    """

    @staticmethod
    def add_args(parser: argparse.ArgumentParser) -> None:
        """Adds the model's options to the parser."""
        add_encoder_args(parser)
        add_attention_args(parser)
        parser.add_argument("--pooling", choices=POOLINGS, help="over the tokens of a sentence, without its padding")

    @classmethod
    def build_model(cls, args: argparse.Namespace | Mapping[str, Any], task: Any) -> "SinkformerSentimentModel":
        """Builds the model from fairseq's options.

        Raises:
            AttributeError: for an option of the attention that got lost.
            ValueError: for options that do not fit.
        """
        args = as_namespace(args)
        layers = selected_layers(args)
        if keep := layers_to_keep(args):
            args.encoder_layers = len(keep)
        args.max_source_positions = args.max_positions
        if args.offload_activations:
            args.checkpoint_activations = True
        cfg = TransformerConfig.from_namespace(args)
        encoder = PooledEncoder(
            cfg, task.source_dictionary, AttentionOptions.from_args(args).choose(), layers, args.pooling
        )
        return cls(args, encoder)


@register_architecture("sinkformer_sentiment", "sinkformer_sentiment")
def sinkformer_sentiment(args: argparse.Namespace) -> None:
    """Sizes and dropout of the published model: 256 wide, 6 layers, 8 heads, FFN 1024, post-norm, length 512."""
    set_attention_defaults(args)
    args.pooling = getattr(args, "pooling", "max")
    args.max_positions = getattr(args, "max_positions", 512)
    args.encoder_embed_path = getattr(args, "encoder_embed_path", None)
    args.encoder_embed_dim = getattr(args, "encoder_embed_dim", 256)
    args.encoder_ffn_embed_dim = getattr(args, "encoder_ffn_embed_dim", 1024)
    args.encoder_layers = getattr(args, "encoder_layers", 6)
    args.encoder_attention_heads = getattr(args, "encoder_attention_heads", 8)
    args.encoder_normalize_before = getattr(args, "encoder_normalize_before", False)
    args.encoder_learned_pos = getattr(args, "encoder_learned_pos", False)
    args.encoder_layerdrop = getattr(args, "encoder_layerdrop", 0.0)
    args.encoder_layers_to_keep = getattr(args, "encoder_layers_to_keep", None)
    args.encoder_xformers_att_config = getattr(args, "encoder_xformers_att_config", None)
    args.activation_fn = getattr(args, "activation_fn", "relu")
    args.dropout = getattr(args, "dropout", 0.1)
    args.attention_dropout = getattr(args, "attention_dropout", 0.0)
    args.activation_dropout = getattr(args, "activation_dropout", 0.0)
    args.no_scale_embedding = True
    args.layernorm_embedding = getattr(args, "layernorm_embedding", False)
    args.checkpoint_activations = getattr(args, "checkpoint_activations", False)
    args.offload_activations = getattr(args, "offload_activations", False)
    args.min_params_to_wrap = getattr(args, "min_params_to_wrap", DEFAULT_MIN_PARAMS_TO_WRAP)


@register_architecture("sinkformer_sentiment", "sinkformer_sentiment_imdb")
def sinkformer_sentiment_imdb(args: argparse.Namespace) -> None:
    """The model of the paper's IMDb experiment, with padding left out of attention and pooling."""
    sinkformer_sentiment(args)


@register_architecture("sinkformer_sentiment", "sinkformer_sentiment_tiny")
def sinkformer_sentiment_tiny(args: argparse.Namespace) -> None:
    """64 wide, 2 layers, 4 heads, FFN 128; trains on one CPU core."""
    args.encoder_embed_dim = getattr(args, "encoder_embed_dim", 64)
    args.encoder_ffn_embed_dim = getattr(args, "encoder_ffn_embed_dim", 128)
    args.encoder_layers = getattr(args, "encoder_layers", 2)
    args.encoder_attention_heads = getattr(args, "encoder_attention_heads", 4)
    sinkformer_sentiment(args)
