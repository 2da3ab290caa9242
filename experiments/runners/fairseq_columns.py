"""Column sums of a model that fairseq trains, measured within its process: see `columns`."""

from typing import Any

from fairseq.trainer import Trainer

from .column_rows import Row, column_rows, evenly_spaced


def record_columns(trainer: Trainer, subset: str, samples: int, epoch: int) -> list[Row]:
    """The lines of column_sums.jsonl after so many epochs, of a subset's samples that are the same each time.

    Args:
        trainer: with the model and the task, whose subset is loaded.
        subset: "valid" or "test".
        samples: how many.
        epoch: finished epochs.
    """
    dataset = trainer.task.dataset(subset)
    chosen = [dataset[index] for index in evenly_spaced(samples, len(dataset))]
    sample, _ = trainer._prepare_sample(dataset.collater(chosen))
    model, criterion = trainer.get_model(), trainer.get_criterion()

    def forward() -> Any:
        return criterion(model, sample)

    return column_rows(model, forward, epoch, trainer.get_num_updates())
