"""fairseq's `sentence_prediction` over a new split of all sentences, as the published IMDb code makes one."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fairseq.data import BaseWrapperDataset, ConcatDataset
from fairseq.tasks import register_task
from fairseq.tasks.sentence_prediction import SentencePredictionConfig, SentencePredictionTask

TRAIN_SHARE = 0.8


@dataclass
class ResplitConfig(SentencePredictionConfig):
    """Options of the task."""

    resplit_seed: int = field(default=0, metadata={"help": "of the permutation that splits all sentences"})


class Rows(BaseWrapperDataset):
    """Some rows of a dataset, in a given order.

    Args:
        dataset: with `sizes`.
        rows: their numbers.
    """

    def __init__(self, dataset: Any, rows: np.ndarray) -> None:
        super().__init__(dataset)
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[self.rows[index]]

    @property
    def sizes(self) -> np.ndarray:
        return self.dataset.sizes[self.rows]

    def num_tokens(self, index: int) -> int:
        return self.dataset.num_tokens(self.rows[index])

    def size(self, index: int) -> int:
        return self.dataset.size(self.rows[index])

    def ordered_indices(self) -> np.ndarray:
        return np.arange(len(self))

    @property
    def supports_prefetch(self) -> bool:
        return False


@register_task("sentence_prediction_resplit", dataclass=ResplitConfig)
class ResplitTask(SentencePredictionTask):
    """The splits "train", "valid" and "test" are put together and split anew: 80 % train, the rest is tested on.

    The published code does so without a seed, so that every run has another split; here the seed tells it. "valid" and
    "test" are the same sentences: there is no third part to choose an epoch on.
    """

    datasets: dict[str, Any]

    def load_dataset(self, split: str, combine: bool = False, **kwargs: Any) -> Any:
        """Loads "train", or for any other name the tested part."""
        load = super().load_dataset
        loaded = dict(self.datasets)  # of this task; the splits as they were are not kept
        whole = ConcatDataset([load(part, combine, **kwargs) for part in ("train", "valid", "test")])
        self.datasets = loaded
        order = np.random.RandomState(self.cfg.resplit_seed).permutation(len(whole))
        bound = int(TRAIN_SHARE * len(whole))
        self.datasets[split] = Rows(whole, order[:bound] if split == "train" else order[bound:])
        return self.datasets[split]
