"""The LightningModule for classification: any model from inputs to logits."""

from collections.abc import Callable, Iterable
from typing import Any

import lightning.pytorch as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from ..data.base import Batch, BatchSampler
from ..seeding import stream_seed

OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]
METRICS = ("training_metrics", "evaluation_metrics")
SchedulerFactory = Callable[[Optimizer], torch.optim.lr_scheduler.LRScheduler]


class WeightedMean(Metric):
    """Mean of numbers with weights, over all devices, NaN included.

    torchmetrics' MeanMetric leaves NaN out, or, told to let it be (nan_strategy="disable"), forgets the weights.
    """

    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0, dtype=torch.get_default_dtype()), dist_reduce_fx="sum")
        self.add_state("weight", torch.tensor(0.0, dtype=torch.get_default_dtype()), dist_reduce_fx="sum")

    def update(self, numbers: Tensor, weight: float = 1.0) -> None:
        """Adds numbers of one weight each."""
        self.total = self.total + numbers.to(self.total.dtype).sum() * weight
        self.weight = self.weight + numbers.numel() * weight

    def compute(self) -> Tensor:
        """The mean so far."""
        return self.total / self.weight


class RunningMetrics(nn.Module):
    """Mean loss and accuracy of the samples seen so far, over all devices; a checkpoint holds the sums.

    Args:
        num_classes: number of logits.
        mean_over: "samples", or "batches": the mean of the batches' means, in which a smaller last batch counts as
            much as the others. A batch is that of all devices together.
    """

    def __init__(self, num_classes: int, mean_over: str = "samples") -> None:
        super().__init__()
        self.by_batch = mean_over == "batches"
        self.loss = WeightedMean()
        self.accuracy: Metric = (
            WeightedMean() if self.by_batch else MulticlassAccuracy(num_classes, average="micro", validate_args=False)
        )
        for metric in (self.loss, self.accuracy):
            metric.persistent(True)

    def update(self, logits: Tensor, labels: Tensor, losses: Tensor, batch_size: int) -> None:
        """Adds a batch, or this device's share of it.

        Args:
            logits: (B, C).
            labels: (B,).
            losses: (B,).
            batch_size: samples of the batch over all devices.
        """
        if len(labels) == 0:
            return
        if self.by_batch:
            self.loss.update(losses, 1 / batch_size)
            self.accuracy.update((logits.argmax(-1) == labels).float(), 1 / batch_size)
        else:
            self.loss.update(losses)
            self.accuracy.update(logits, labels)

    def values(self) -> dict[str, float]:
        """The metrics so far, as the shortest decimals that name their float32."""
        found = {"loss": self.loss.compute(), "accuracy": self.accuracy.compute()}
        return {name: float(str(np.float32(value.item()))) for name, value in found.items()}

    def reset(self) -> None:
        """Forgets all samples."""
        self.loss.reset()
        self.accuracy.reset()

    def shared_state(self) -> dict[str, Tensor]:
        """The sums over all devices, under the names of `state_dict`; called by all processes together."""
        state: dict[str, Tensor] = {}
        for name, metric in (("loss", self.loss), ("accuracy", self.accuracy)):
            with metric.sync_context():
                state |= metric.state_dict(prefix=f"{name}.")
        return state

    def take(self) -> dict[str, float]:
        """`values`, then `reset`."""
        values = self.values()
        self.reset()
        return values


class Classifier(L.LightningModule):
    """Cross entropy on a model's logits.

    A batch is (inputs, labels), or (input, further inputs such as a mask, ..., labels).

    Args:
        model: from the inputs of a batch to logits (B, num_classes).
        num_classes: number of logits.
        seed: the run's seed; dropout follows from it, the step and the rank.
        optimizer: makes the optimizer from the parameters.
        scheduler: makes the schedule from the optimizer, stepped after each epoch; None keeps the rate.
        mean_over: of the metrics: see `RunningMetrics`.
    """

    def __init__(
        self,
        model: nn.Module,
        num_classes: int,
        seed: int,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None,
        mean_over: str = "samples",
    ) -> None:
        super().__init__()
        self.model = model
        self.seed = seed
        self.training_metrics = RunningMetrics(num_classes, mean_over)
        self.evaluation_metrics = RunningMetrics(num_classes, mean_over)
        self.last_rate = float("nan")
        self._optimizer, self._scheduler = optimizer, scheduler

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(*inputs)

    def configure_optimizers(self) -> Any:
        optimizer = self._optimizer(self.model.parameters())
        if self._scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self._scheduler(optimizer), "interval": "epoch"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.world_size == 1:
            return
        # The first process alone writes, and has only its own share of the samples of an epoch that is not over.
        for name in METRICS:
            sums = getattr(self, name).shared_state()
            checkpoint["state_dict"] |= {f"{name}.{key}": value for key, value in sums.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.global_rank == 0:
            return
        for key, value in checkpoint["state_dict"].items():
            if key.partition(".")[0] in METRICS:
                checkpoint["state_dict"][key] = torch.zeros_like(value)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self._reseed("dropout", self.global_step, batch_idx)
        # Read here because the schedule has moved on when the epoch is recorded.
        self.last_rate = self.trainer.optimizers[0].param_groups[0]["lr"]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits, labels, losses = self._losses(batch)
        sampler = _sampler(self.trainer.train_dataloader)
        self.training_metrics.update(logits.detach(), labels, losses.detach(), sampler.samples(batch_idx))
        # A step's loss is the mean over its samples, whatever the devices and batches that it is computed in. The
        # gradients are averaged over devices, and the loss is divided by the number of batches of a whole step.
        batches = self.trainer.accumulate_grad_batches
        total = sampler.samples_of_step(batch_idx, batches)
        return losses.sum() / (total / (self.trainer.world_size * batches))

    def on_validation_epoch_start(self) -> None:
        self.evaluation_metrics.reset()

    def on_validation_batch_start(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._reseed("evaluation", 0, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, _sampler(self.trainer.val_dataloaders).samples(batch_idx))

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.evaluation_metrics.values(), prog_bar=True, logger=False, rank_zero_only=True)

    def on_test_epoch_start(self) -> None:
        self.evaluation_metrics.reset()

    def on_test_batch_start(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._reseed("evaluation", 0, batch_idx)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, _sampler(self.trainer.test_dataloaders).samples(batch_idx))

    def on_predict_batch_start(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._reseed("evaluation", 0, batch_idx)

    def predict_step(self, batch: Batch, batch_idx: int) -> tuple[Tensor, Tensor]:
        logits, labels, _ = self._losses(batch)
        return logits, labels

    def _evaluate(self, batch: Batch, batch_size: int) -> None:
        self.evaluation_metrics.update(*self._losses(batch), batch_size)

    def _losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        *inputs, labels = batch
        logits = self.model(*inputs)[: len(labels)]  # a borrowed sample has no label
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return logits, labels, F.cross_entropy(logits, labels, reduction="none")

    def _reseed(self, purpose: str, *numbers: int) -> None:
        torch.manual_seed(stream_seed(purpose, self.seed, *numbers, self.global_rank))


def _sampler(loader: Any) -> BatchSampler:
    assert isinstance(loader.sampler, BatchSampler)
    return loader.sampler
