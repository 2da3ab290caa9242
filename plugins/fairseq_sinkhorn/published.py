"""The published sentiment model (michaelsdr/sinkformers, nlp-tutorial/text-classification-transformer), exactly.

It differs from `sinkformer_sentiment` in what a sound model would not do: padding takes part as queries and in the
pooling, the column potential counts as a constant in the gradient, the frozen positions are noise, and the loss, which
has a softmax of its own, is given probabilities. Each is an option here, set as published by default.
"""

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from fairseq.models import FairseqEncoder, register_model
from sinkhorn_attention.normalizers import NormalizerChoice
from torch import Tensor, nn

from .attention import SinkhornMultiheadAttention
from .compat import as_namespace, register_architecture
from .options import AttentionOptions, add_attention_args, parse_layers, set_attention_defaults
from .sentiment import SentimentModel, pool_tokens

CHOICES = {
    "published-padding": (
        ("queries", "hidden"),
        "whether padded tokens take part as queries (published) or not at all",
    ),
    "published-pooling": (("all", "tokens"), "maximum over all positions (published) or over the sentence's tokens"),
    "published-positions": (("noise", "sinusoidal"), "frozen position vectors, N(0, 1) (published) or sinusoidal"),
    "published-output": (
        ("probabilities", "logits"),
        "what the loss is given; probabilities (published) meet a softmax twice",
    ),
}
_LAYER_NAMES = {
    "mha.WQ": "self_attn.q_proj",
    "mha.WK": "self_attn.k_proj",
    "mha.WV": "self_attn.v_proj",
    "mha.linear": "self_attn.out_proj",
    "layernorm1": "self_attn_layer_norm",
    "ffn.linear1": "fc1",
    "ffn.linear2": "fc2",
    "layernorm2": "final_layer_norm",
}
_SPECIAL = {"[PAD]": "pad", "[UNK]": "unk", "[BOS]": "bos", "[EOS]": "eos"}


class PublishedEncoderLayer(nn.Module):
    """Attention and feed-forward, each followed by dropout, the residual and a layer norm (eps 1e-6).

    Args:
        args: the model's options.
        normalizer: of the attention, with its options.
    """

    def __init__(self, args: argparse.Namespace, normalizer: NormalizerChoice) -> None:
        super().__init__()
        width = args.encoder_embed_dim
        self.self_attn = SinkhornMultiheadAttention(
            width,
            args.encoder_attention_heads,
            self_attention=True,
            normalizer=normalizer,
            mask_queries=args.published_padding == "hidden",
        )
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            getattr(self.self_attn, projection).reset_parameters()  # torch's start, not fairseq's
        self.self_attn_layer_norm = nn.LayerNorm(width, eps=1e-6)
        self.fc1 = nn.Linear(width, args.encoder_ffn_embed_dim)
        self.fc2 = nn.Linear(args.encoder_ffn_embed_dim, width)
        self.final_layer_norm = nn.LayerNorm(width, eps=1e-6)
        self.dropout = nn.Dropout(args.dropout)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """(T, B, C), and (B, T) True at padding -> (T, B, C)."""
        attended, _ = self.self_attn(x, x, x, padding, need_weights=False)
        x = self.self_attn_layer_norm(x + self.dropout(attended))
        return self.final_layer_norm(x + self.dropout(self.fc2(F.relu(self.fc1(x)))))


class PublishedEncoder(FairseqEncoder):
    """Embedding, frozen positions, the layers, and the maximum over positions.

    Every sentence is padded on the right to `max_positions`. Positions count from 1, padding has position 0.

    Args:
        args: the model's options.
        dictionary: of the source.
        normalizer: of the attention, with its options.
    """

    def __init__(self, args: argparse.Namespace, dictionary: Any, normalizer: NormalizerChoice) -> None:
        super().__init__(dictionary)
        self.padding_idx, self.length, self.pooling = dictionary.pad(), args.max_positions, args.published_pooling
        width = args.encoder_embed_dim
        self.embed_tokens = nn.Embedding(len(dictionary), width)  # padding has a trained vector, too
        noise = args.published_positions == "noise"
        table = torch.randn(self.length + 1, width) if noise else sinusoidal_positions(self.length + 1, width)
        self.embed_positions = nn.Embedding.from_pretrained(table, freeze=True)
        self.layers = nn.ModuleList([PublishedEncoderLayer(args, normalizer) for _ in range(args.encoder_layers)])

    def forward(self, src_tokens: Tensor, src_lengths: Tensor | None = None, **_: Any) -> Tensor:
        """(B, T) tokens, padded on the right -> (B, C).

        Raises:
            ValueError: for sentences longer than `max_positions`.
        """
        missing = self.length - src_tokens.shape[1]
        if missing < 0:
            raise ValueError(
                f"sentences of {src_tokens.shape[1]} tokens, and the position table has {self.length}; "
                "train with --shorten-method truncate"
            )
        tokens = F.pad(src_tokens, [0, missing], value=self.padding_idx)
        padding = tokens.eq(self.padding_idx)
        positions = torch.arange(1, self.length + 1, device=tokens.device).masked_fill(padding, 0)
        x = (self.embed_tokens(tokens) + self.embed_positions(positions)).transpose(0, 1)
        for layer in self.layers:
            x = layer(x, padding)
        x = x.transpose(0, 1)
        return x.amax(1) if self.pooling == "all" else pool_tokens(x, ~padding, "max")

    def max_positions(self) -> int:
        return self.length


@register_model("sinkformer_sentiment_official")
class PublishedSentimentModel(SentimentModel):
    """The published sentiment model for fairseq's `sentence_prediction`, faults included.

    The criterion takes a log-softmax of what the model gives. With `--published-output probabilities` the model gives
    a softmax, so that the loss cannot fall below log(1 + 1/e) = 0.313 nats.
    """

    @staticmethod
    def add_args(parser: argparse.ArgumentParser) -> None:
        """Adds the model's options to the parser."""
        for name, what in (
            ("encoder-embed-dim", "width"),
            ("encoder-ffn-embed-dim", "width of the feed-forward"),
            ("encoder-layers", "number of layers"),
            ("encoder-attention-heads", "number of heads"),
            ("max-positions", "length that every sentence is padded to"),
        ):
            parser.add_argument(f"--{name}", type=int, metavar="N", help=what)
        parser.add_argument("--dropout", type=float, metavar="P", help="dropout probability of the sublayers' outputs")
        add_attention_args(parser)
        for name, (choices, what) in CHOICES.items():
            parser.add_argument(f"--{name}", choices=choices, help=what)

    @classmethod
    def build_model(cls, args: argparse.Namespace | Mapping[str, Any], task: Any) -> "PublishedSentimentModel":
        """Builds the model from fairseq's options.

        Raises:
            AttributeError: for an option that got lost.
            ValueError: for options that do not fit, and for what the published arithmetic is not reproduced for.
        """
        args = as_namespace(args)
        for name, (choices, _) in CHOICES.items():
            value = getattr(args, name.replace("-", "_"))
            if value not in choices:
                raise ValueError(f"--{name} must be one of {', '.join(choices)}, got {value!r}")
        options = AttentionOptions.from_args(args)
        even = options.sinkhorn_iters is not None and options.sinkhorn_iters % 2 == 0
        if args.published_padding == "queries" and options.normalizer == "sinkhorn" and even:
            raise ValueError(
                f"--sinkhorn-iters {options.sinkhorn_iters}: with padding as queries the published arithmetic is "
                "reproduced for odd counts only; use --published-padding hidden or an odd count"
            )
        if parse_layers(args.sinkhorn_layers) is not None:
            raise ValueError("--sinkhorn-layers: the published model has the same attention in all layers")
        return cls(args, PublishedEncoder(args, task.source_dictionary, options.choose()))

    def classify(self, features: Tensor, head: str) -> Tensor:
        """The logits, or with `--published-output probabilities` their softmax."""
        logits = super().classify(features, head)
        return logits.softmax(-1) if self.args.published_output == "probabilities" else logits


@register_architecture("sinkformer_sentiment_official", "sinkformer_sentiment_imdb_official")
def sinkformer_sentiment_imdb_official(args: argparse.Namespace) -> None:
    """The published model as it was trained on IMDb: 256 wide, 6 layers, 8 heads, FFN 1024, length 512."""
    args.sinkhorn_gradient = getattr(args, "sinkhorn_gradient", "detached")
    set_attention_defaults(args)
    args.encoder_embed_dim = getattr(args, "encoder_embed_dim", 256)
    args.encoder_ffn_embed_dim = getattr(args, "encoder_ffn_embed_dim", 1024)
    args.encoder_layers = getattr(args, "encoder_layers", 6)
    args.encoder_attention_heads = getattr(args, "encoder_attention_heads", 8)
    args.dropout = getattr(args, "dropout", 0.1)
    args.max_positions = getattr(args, "max_positions", 512)
    for name, (choices, _) in CHOICES.items():
        attribute = name.replace("-", "_")
        setattr(args, attribute, getattr(args, attribute, choices[0]))


def sinusoidal_positions(positions: int, width: int) -> Tensor:
    """The table of Vaswani et al. 2017, (positions, width): sin at even and cos at odd columns; row 0 is zero."""
    frequency = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10000.0) / width))
    angle = torch.arange(positions, dtype=torch.float64).unsqueeze(1) * frequency
    table = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :width]
    table[0] = 0.0
    return table.float()


def load_published_state_dict(
    model: PublishedSentimentModel,
    state_dict: Mapping[str, Tensor],
    vocabulary: Sequence[str],
    head: str = "sentence_classification_head",
) -> None:
    """Loads a published checkpoint.

    Args:
        model: of the same sizes as the published one.
        state_dict: the published model's, by its own names.
        vocabulary: the symbols of the published vocabulary in the order of its numbers. Each embedding goes to the
            number that the model's dictionary has for the symbol ([PAD], [UNK], [BOS], [EOS] to fairseq's own); what
            the dictionary has beyond them keeps its embedding.
        head: name of the classification head, which is registered where it is not there.

    Raises:
        ValueError: for a name that the published model does not have, a vocabulary of another size, and symbols that
            the dictionary does not know.
        RuntimeError: torch's own, for missing entries or other shapes.
    """
    dictionary = model.encoder.dictionary
    embedding = state_dict["embedding.weight"]
    if len(vocabulary) != len(embedding):
        raise ValueError(f"vocabulary of {len(vocabulary)} symbols for a checkpoint with {len(embedding)}")
    numbers = [
        getattr(dictionary, _SPECIAL[symbol])() if symbol in _SPECIAL else dictionary.indices.get(symbol, -1)
        for symbol in vocabulary
    ]
    unknown = [symbol for symbol, number in zip(vocabulary, numbers, strict=True) if number < 0]
    if unknown:
        raise ValueError(
            f"the model's dictionary lacks {len(unknown)} symbols of the vocabulary, such as {unknown[0]!r}"
        )
    embed_tokens = model.encoder.embed_tokens.weight.detach().clone()
    embed_tokens[numbers] = embedding.to(embed_tokens)

    translated = {"encoder.embed_tokens.weight": embed_tokens}
    for name, tensor in state_dict.items():
        layer = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", name)
        if name == "embedding.weight":
            continue
        if name == "pos_embedding.weight":
            translated["encoder.embed_positions.weight"] = tensor
        elif name in ("linear.weight", "linear.bias"):
            translated[f"classification_heads.{head}.{name.split('.')[1]}"] = tensor
        elif layer is not None and layer[2] in _LAYER_NAMES:
            translated[f"encoder.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"] = tensor
        else:
            raise ValueError(f"{name!r} is no entry of the published sentiment model")
    if head not in model.classification_heads:
        model.register_classification_head(head, num_classes=len(state_dict["linear.weight"]))
    model.load_state_dict(translated)
