"""The options of the attention, from fairseq's command line or Hydra configuration."""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sinkhorn_attention.conversion import select_layers
from sinkhorn_attention.normalizers import (
    Normalizer,
    NormalizerChoice,
    choose_normalizer,
    get_normalizer,
    list_normalizers,
    normalizer_class,
)

#: Half-steps where none are asked for.
HALF_STEPS = 3


@dataclass(frozen=True)
class AttentionOptions:
    """What the encoder's self-attention is normalised by, as fairseq's command line spells it.

    Attributes:
        sinkhorn_iters: number of HALF-steps, 1 is softmax; for normalizers that count any, None is 3 for these.
        sinkhorn_gradient: "unrolled", "detached" or "implicit", as in `sinkhorn_attention`.
        normalizer: a name, a mapping of "name" and options, or a Normalizer: see `sinkhorn_attention.get_normalizer`.
        normalizer_options: further options of that normalizer, such as {"rho": 5.0}.
    """

    sinkhorn_iters: int | None = None
    sinkhorn_gradient: str = "unrolled"
    normalizer: NormalizerChoice = "sinkhorn"
    normalizer_options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_args(cls, args: Any) -> "AttentionOptions":
        """Reads a model's options. None has a default here: one that got lost on the way must not go unseen.

        Raises:
            AttributeError: for an option that is not there.
            ValueError: for normalizer options that are no JSON object.
        """
        options = args.attention_normalizer_options
        if isinstance(options, str):
            try:
                options = json.loads(options)
            except json.JSONDecodeError as error:
                raise ValueError(f"--attention-normalizer-options must be JSON, got {options!r}: {error}") from None
        if not isinstance(options, Mapping):
            raise ValueError(f"--attention-normalizer-options must be a JSON object, got {options!r}")
        return cls(args.sinkhorn_iters, args.sinkhorn_gradient, args.attention_normalizer, dict(options))

    def choose(self) -> dict[str, Any]:
        """The normalizer with its options as one value. Half-steps and gradient are given to those that have them.

        Raises:
            ValueError: for an unknown normalizer, options given twice, half-steps for one that counts none, and a
                gradient other than "unrolled" for one that has a single gradient.
        """
        for name, option in (("n_iters", "--sinkhorn-iters"), ("gradient", "--sinkhorn-gradient")):
            if name in self.normalizer_options:
                raise ValueError(f"--attention-normalizer-options: {name} has an option of its own, {option}")
        chosen = choose_normalizer(self.normalizer, options=self.normalizer_options)
        known = normalizer_class(chosen).option_names()
        if self.sinkhorn_iters is not None and "n_iters" not in known:
            raise ValueError(_counts_none(chosen["name"], self.sinkhorn_iters))
        if self.sinkhorn_gradient != "unrolled":
            if "gradient" not in known:
                raise ValueError(
                    f"normalizer {chosen['name']!r} has one gradient only: sinkhorn_gradient="
                    f"{self.sinkhorn_gradient!r} is for those that iterate to a potential; leave it 'unrolled'"
                )
            chosen = choose_normalizer(chosen, options={"gradient": self.sinkhorn_gradient})
        default = {"name": chosen["name"], "n_iters": HALF_STEPS} if "n_iters" in known else None
        return choose_normalizer(chosen, self.sinkhorn_iters, default=default)

    def build(self, head_dim: int, num_heads: int) -> Normalizer:
        """The normalizer itself; errors as for `choose` and `get_normalizer`."""
        return get_normalizer(self.choose(), head_dim=head_dim, num_heads=num_heads)


def _counts_none(normalizer: Any, half_steps: int) -> str:
    return (
        f"normalizer {normalizer!r} has no half-steps: --sinkhorn-iters {half_steps} would change nothing; leave it "
        "out, or take another --attention-normalizer"
    )


def add_attention_args(parser: argparse.ArgumentParser) -> None:
    """Adds the options to a model's parser, without defaults: those belong to the architectures."""
    parser.add_argument(
        "--sinkhorn-iters",
        type=int,
        metavar="N",
        help="number of Sinkhorn half-steps, rows first; 1 is softmax, odd counts have rows that sum to 1",
    )
    parser.add_argument(
        "--sinkhorn-gradient",
        choices=["unrolled", "detached", "implicit"],
        help="exact derivative of the half-steps, column potential as a constant, or derivative at convergence",
    )
    parser.add_argument(
        "--attention-normalizer",
        choices=list_normalizers(),
        help="what makes the map of the encoder's self-attention from the scores",
    )
    parser.add_argument(
        "--attention-normalizer-options",
        metavar="JSON",
        help="further options of the normalizer, for example '{\"rho\": 5.0}'",
    )
    parser.add_argument(
        "--sinkhorn-layers",
        metavar="LAYERS",
        help="encoder layers with this attention; the others keep fairseq's. 'all', a number k for the last k, indices "
        "like 0,2 or [0] for the first alone, or a pattern of names like 'encoder.layers.[0-2].self_attn'",
    )


_NAMES = (
    "sinkhorn_iters",
    "sinkhorn_gradient",
    "attention_normalizer",
    "attention_normalizer_options",
    "sinkhorn_layers",
)


def set_attention_defaults(args: argparse.Namespace) -> None:
    """The defaults of every architecture: 3 half-steps in all layers, with their exact derivative.

    Raises:
        ValueError: for half-steps of a normalizer that counts none.
    """
    # A command line holds what was given; a checkpoint holds all, and one of earlier versions 3 half-steps anywhere.
    stored = all(hasattr(args, name) for name in _NAMES) and args.sinkhorn_iters == HALF_STEPS
    normalizer, half_steps = getattr(args, "attention_normalizer", "sinkhorn"), getattr(args, "sinkhorn_iters", None)
    if "n_iters" in normalizer_class({"name": normalizer}).option_names():
        args.sinkhorn_iters = HALF_STEPS if half_steps is None else half_steps
    elif half_steps is None or stored:
        args.sinkhorn_iters = None
    else:
        raise ValueError(_counts_none(normalizer, half_steps))
    args.sinkhorn_gradient = getattr(args, "sinkhorn_gradient", "unrolled")
    args.attention_normalizer = getattr(args, "attention_normalizer", "sinkhorn")
    args.attention_normalizer_options = getattr(args, "attention_normalizer_options", "{}")
    args.sinkhorn_layers = getattr(args, "sinkhorn_layers", "all")


def parse_layers(layers: int | Sequence[int] | str | None) -> int | list[int] | str | None:
    """The selection that `--sinkhorn-layers` writes as text: None for all, the last k, indices, or a pattern."""
    if layers is None or layers == "all":
        return None
    if isinstance(layers, int):
        return layers
    if not isinstance(layers, str):
        return list(layers)
    text = layers.strip()
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    parts = [part.strip() for part in inner.split(",") if part.strip()]
    try:
        numbers = [int(part) for part in parts]
    except ValueError:
        return text
    return numbers[0] if inner == text and "," not in text and numbers else numbers


def selected_layers(args: argparse.Namespace) -> list[int]:
    """The numbers, among the encoder layers that will be built, of those with the normalizer's attention.

    `--sinkhorn-layers` counts the layers of the whole encoder. Where a model trained with layerdrop is pruned
    (`encoder_layers_to_keep`), the kept layers keep their attention under their new numbers.

    Raises:
        ValueError: for a selection that is empty or that the encoder does not have.
    """
    kept = layers_to_keep(args)
    total = max(args.encoder_layers, *(layer + 1 for layer in kept)) if kept else args.encoder_layers
    names = [f"encoder.layers.{layer}.self_attn" for layer in range(total)]
    try:
        chosen = set(select_layers(names, parse_layers(args.sinkhorn_layers)))
    except ValueError as error:
        raise ValueError(f"--sinkhorn-layers {args.sinkhorn_layers}: {error}") from None
    return [number for number, layer in enumerate(kept or range(total)) if names[layer] in chosen]


def layers_to_keep(args: argparse.Namespace) -> list[int]:
    """The sorted numbers in `encoder_layers_to_keep`, which fairseq gives as "0,2" or as a list; empty if unset."""
    keep = getattr(args, "encoder_layers_to_keep", None)
    if not keep:
        return []
    return sorted(int(layer) for layer in (keep.split(",") if isinstance(keep, str) else keep))
