"""Stops a run whose loss or gradient is no longer finite, before a checkpoint or a row of its metrics can hold it."""

import math
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn.utils import get_total_norm

from ..errors import Diverged
from .classifier import Classifier

#: Steps after which a GPU is asked what its numbers were: to ask after every step would have it wait.
LOOK_EVERY = 16
#: fp16 scales the loss down at each gradient that overflows. Below this no gradient was finite for a long while:
#: fairseq stops there as well (--min-loss-scale).
SMALLEST_SCALE = 1e-4


class FiniteNumbers(Callback):
    """Looks at the loss and the norm of the gradient of every step, on all processes.

    Steps that the scaler of fp16 leaves out, because the gradient overflowed, are no fault: they are counted.

    Attributes:
        skipped: such steps so far.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self._step = 0
        self._waiting: list[tuple[int, float, Tensor]] = []  # step, rate, (loss, norm), on the device
        self._norm: Tensor | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.skipped = state_dict["skipped"]

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._step, self._norm = trainer.global_step, None

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        # What fp16 scaled up has been scaled down again by here.
        self._norm = get_total_norm([p.grad for p in pl_module.parameters() if p.grad is not None])

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Classifier)
        loss = outputs["loss"].float()
        norm = torch.zeros_like(loss) if self._norm is None else self._norm.to(loss)
        self._waiting.append((self._step, pl_module.last_rate, torch.stack([loss, norm])))
        every = 1 if loss.device.type == "cpu" else LOOK_EVERY
        if len(self._waiting) >= every or batch_idx + 1 == trainer.num_training_batches:
            self.look(trainer)

    def look(self, trainer: L.Trainer) -> None:
        """Asks for the numbers of the steps since the last look; called by all processes together.

        Raises:
            Diverged: names the first step, and on it the loss before the gradient.
        """
        if not self._waiting:
            return
        numbers = torch.stack([pair for _, _, pair in self._waiting])
        if trainer.world_size > 1:  # a sum is finite where all its parts are
            numbers = trainer.strategy.reduce(numbers, reduce_op="sum")
        waiting, self._waiting = self._waiting, []
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        for (step, rate, _), (loss, norm) in zip(waiting, numbers.tolist(), strict=True):
            if not math.isfinite(loss):
                raise Diverged.at("the loss", loss, step, trainer.current_epoch, rate)
            if math.isfinite(norm):
                continue
            if scaler is None:
                raise Diverged.at("the norm of the gradient", norm, step, trainer.current_epoch, rate)
            self.skipped += 1
            if scaler.get_scale() < SMALLEST_SCALE:
                raise Diverged.at(
                    "the norm of the gradient, at every scale of the loss,", norm, step, trainer.current_epoch, rate
                )
