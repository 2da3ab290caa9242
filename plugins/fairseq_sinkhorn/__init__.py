"""Sinkhorn attention for fairseq: a `--user-dir`, or an installed package whose import registers the same models.

fairseq-train ... --user-dir plugins/fairseq_sinkhorn --arch sinkformer_iwslt_de_en --sinkhorn-iters 3
"""

from . import compat
from .attention import SinkhornMultiheadAttention
from .encoder import SinkformerEncoder, SinkformerEncoderLayer
from .options import AttentionOptions
from .published import PublishedSentimentModel, load_published_state_dict
from .resplit import ResplitTask
from .sentiment import SinkformerSentimentModel
from .translation import SinkformerModel

compat.allow_checkpoint_types()
compat.explain_checkpoints()

__all__ = [
    "AttentionOptions",
    "PublishedSentimentModel",
    "ResplitTask",
    "SinkformerEncoder",
    "SinkformerEncoderLayer",
    "SinkformerModel",
    "SinkformerSentimentModel",
    "SinkhornMultiheadAttention",
    "load_published_state_dict",
]
