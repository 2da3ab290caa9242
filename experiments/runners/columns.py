"""column_sums.jsonl: how far attention is from doubly stochastic while it is trained (Sander et al. 2022, figure 2).

One line for every recorded epoch and attention layer, measured on the same samples of the evaluated split each time:
`epoch` (finished epochs, 0 before training), `step`, `layer`, `n_tokens` (keys that take part, mean over the samples),
`column_sums` (sorted, then averaged over samples and heads; at most 64 quantiles), `deviation` (mean of
|column sum - 1| over keys, heads and samples), `row_error` and `column_error` (largest |sum - 1| of a map, mean over
heads and samples).

A column sum is given over what a doubly stochastic map would have there, n_valid / m_valid, which is 1 in
self-attention: so 1 is the mark in rectangular maps too. Padding takes no part. Only these numbers leave the device,
never a map.
Recording changes nothing in a run: neither random numbers nor metrics nor checkpoints.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from torch import Tensor

from ..data.base import Batch, DataModule, SampleKey
from ..files import append_line, json_line, write_atomic
from .classifier import Classifier
from .column_rows import Row, column_rows, due, evenly_spaced
from .dashboards import offline_wandb, tell

FILE = "column_sums.jsonl"


class ColumnLog:
    """The file of one run.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[Row] = []

    def begin(self, step: int, loggers: Sequence[Logger] = ()) -> None:
        """Keeps the lines up to the step that the run goes on from; later ones, or a cut-off one, are made again."""
        self.begin_with([row for row in read_rows(self.folder) if row["step"] <= step] if step else [], loggers)

    def begin_with(self, rows: Sequence[Row], loggers: Sequence[Logger] = ()) -> None:
        """Starts with these lines, whatever stood there, and tells them to offline wandb runs."""
        self.rows = list(rows)
        if self.rows or (self.folder / FILE).is_file():
            write_atomic(self.folder / FILE, "".join(map(json_line, self.rows)))
        # As for the metrics: each attempt's offline folder has to be complete.
        for row in self.rows:
            tell(offline_wandb(loggers), partial(log_columns, row=row))

    def has(self, epoch: int) -> bool:
        """Whether an epoch is recorded."""
        return any(row["epoch"] == epoch for row in self.rows)

    def add(self, rows: Sequence[Row], loggers: Sequence[Logger] = ()) -> None:
        """Writes the lines of one epoch, unless it stands there already."""
        if not rows or self.has(rows[0]["epoch"]):
            return
        self.rows += rows
        for row in rows:
            append_line(self.folder / FILE, row)
            tell(loggers, partial(log_columns, row=row))


def read_rows(folder: Path) -> list[Row]:
    """The whole lines of a run's column_sums.jsonl, none where it has no such file; a cut-off last line is left out."""
    path = folder / FILE
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows


def log_columns(logger: Logger, row: Mapping[str, Any]) -> None:
    """A line as a histogram and three numbers of TensorBoard or wandb."""
    names = ("deviation", "row_error", "column_error")
    logger.log_metrics({f"{name}/{row['layer']}": row[name] for name in names}, step=row["step"])
    title, values = f"column_sums/{row['layer']}", np.asarray(row["column_sums"])
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_histogram(title, values, row["step"])
    elif isinstance(logger, WandbLogger):
        import wandb

        logger.experiment.log({title: wandb.Histogram(values.tolist()), "trainer/global_step": row["step"]})


class ColumnSums(Callback):
    """Records a run that Lightning trains.

    It needs no part in checkpoints: what it writes depends on the weights alone. Lightning calls it before any
    checkpoint is saved, so that no epoch with a checkpoint lacks its lines.

    Args:
        folder: the run's folder.
        batch: the recorded samples, the labels last.
        every: epochs between recordings.
    """

    def __init__(self, folder: Path, batch: Batch, every: int) -> None:
        self.lines = ColumnLog(folder)
        self.inputs = batch[:-1]
        self.every = every

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step == 0:
            self._record(trainer, pl_module, 0)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        epoch = trainer.current_epoch + 1
        if due(epoch, self.every, trainer.max_epochs or epoch):
            self._record(trainer, pl_module, epoch)

    def _record(self, trainer: L.Trainer, module: L.LightningModule, epoch: int) -> None:
        if not trainer.is_global_zero or self.lines.has(epoch):
            return
        assert isinstance(module, Classifier)
        plugin = trainer.precision_plugin
        inputs: Sequence[Tensor] = plugin.convert_input(tuple(tensor.to(module.device) for tensor in self.inputs))

        def forward() -> None:
            with plugin.forward_context():
                module.model(*inputs)

        self.lines.add(column_rows(module.model, forward, epoch, trainer.global_step), trainer.loggers)


def recorded_batch(data: DataModule, split: str, samples: int) -> Batch:
    """So many samples of a split, evenly spaced, the same in every run on these data."""
    dataset = data.dataset([split])
    return dataset[[SampleKey(index, 0, 0) for index in evenly_spaced(samples, data.sizes[split])]]
