"""The registry of attention normalizers that the experiments sweep over. Adding one is adding one class.

A normalizer turns queries and keys into a coupling (`coupling`), applies it to values (`attend`) and, where it works on
given scores, normalises those (`from_scores`). Names and options are the same in Python, in Hydra and on fairseq's
command line.
"""

from .base import (
    Normalizer,
    NormalizerChoice,
    choose_normalizer,
    get_normalizer,
    list_normalizers,
    normalizer_class,
    normalizer_for,
    register_normalizer,
)
from .esp import ESP
from .l2 import L2, SinkhornL2
from .lot import LOT
from .scores import attention_scores, hide_padding
from .sigmoid import Sigmoid
from .sinkhorn import Sinkhorn
from .softmax import Softmax
from .unbalanced import UnbalancedSinkhorn

__all__ = [
    "ESP",
    "L2",
    "LOT",
    "Normalizer",
    "NormalizerChoice",
    "Sigmoid",
    "Sinkhorn",
    "SinkhornL2",
    "Softmax",
    "UnbalancedSinkhorn",
    "attention_scores",
    "choose_normalizer",
    "get_normalizer",
    "hide_padding",
    "list_normalizers",
    "normalizer_class",
    "normalizer_for",
    "register_normalizer",
]
