"""The batches of a run that several processes train: those of one process, in the same order, each divided among them.

fairseq gives each process whole batches in turn, so that the number of processes decides how many sentences a step
has, and which. Here `data.batch_size` and `data.max_tokens` are those of the whole batch. Losses are summed over
sentences or tokens, and divided by their number in all processes: what remains is the rounding of the sums.
"""

from collections.abc import Callable, Sequence
from typing import Any

from fairseq.data import iterators

Batches = Sequence[Sequence[int]]


class DividedBatches(iterators.EpochBatchIterator):
    """fairseq's iterator, in which a process has its part of every batch, the n-th of each `num_shards` sentences.

    A batch has sentences of like lengths side by side, so the parts have about equally many tokens. A part may be
    empty; fairseq then runs a batch that counts nothing.

    Args:
        dataset: of sentences.
        collate_fn: makes a batch of them.
        batch_sampler: the batches, as numbers of sentences, or what makes them of the data set and the epoch.
        num_shards: processes.
        shard_id: number of this one.
        **more: as for fairseq's class.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any],
        batch_sampler: Batches | Callable[[Any, int], Batches],
        num_shards: int = 1,
        shard_id: int = 0,
        **more: Any,
    ) -> None:
        def own(batches: Batches) -> list[list[int]]:
            self._filler = [batch[0] for batch in batches[:1]]
            return [list(batch[shard_id::num_shards]) for batch in batches]

        def make(dataset: Any, epoch: int) -> list[list[int]]:
            assert callable(batch_sampler)
            return own(batch_sampler(dataset, epoch))

        made = make if callable(batch_sampler) else own(list(batch_sampler))
        super().__init__(dataset, collate_fn, made, **more)

    @property
    def first_batch(self) -> Any:
        """What fairseq runs where a part is empty: one sentence."""
        if not self.frozen_batches:
            return super().first_batch  # refuses
        return self.collate_fn([self.dataset[index] for index in self._filler])


def filled(samples: list[Any]) -> list[Any]:
    """The parts of one step without the empty ones, or one of those where there is no other.

    fairseq leaves out the count of a whole step where its last part is empty, and counts an empty one before it.
    """
    return [sample for sample in samples if sample] or samples[:1]
