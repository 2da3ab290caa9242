"""Checkpoints that survive a kill or a full disk at any instant, and the choice of the one to go on from."""

import io
import re
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.utilities.exceptions import SIGTERMException

from ..errors import RunError
from ..files import check_sums, write_atomic
from .finite import FiniteNumbers
from .recorder import Recorder
from .stopping import StopRequest

NAME = re.compile(r"step(\d+)\.ckpt")


def checkpoint_name(step: int) -> str:
    """File name of the checkpoint after `step` optimizer steps; it needs no quoting in a shell or in Hydra."""
    return f"step{step:08d}.ckpt"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's way to the disk, with the bytes forced to it before the rename; loads only tensors and values."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        # Serialised in memory first: torch reports a full disk as a RuntimeError without errno.
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        write_atomic(Path(path), buffer.getbuffer())

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = True) -> dict[str, Any]:
        return read_checkpoint(Path(path))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint on the CPU; never executes what a file might hold (weights_only).

    Raises:
        RunError: where it is damaged or missing.
    """
    try:
        return _read(path)
    except ValueError as error:
        raise RunError(
            f"checkpoint {path} cannot be read: {error}. Remove that run's folder and give its command again"
        ) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        check_sums(path)
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever unpickling damaged bytes may raise
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise ValueError(reason) from error
    if not isinstance(content, dict) or "global_step" not in content:
        raise ValueError("it is no checkpoint of a training")
    return content


def newest_valid(folder: Path, quiet: bool = False) -> tuple[Path, dict[str, Any]] | None:
    """The readable checkpoint with the most steps, whatever the files' times; tells of unreadable ones.

    Args:
        folder: of the checkpoints.
        quiet: tells nothing.

    Returns:
        Its path and content, or None where there is none.
    """
    numbered = [(int(match[1]), path) for path in folder.glob("*.ckpt") if (match := NAME.fullmatch(path.name))]
    for _, path in sorted(numbered, reverse=True):
        try:
            return path, _read(path)
        except ValueError as error:
            if not quiet:
                print(f"warning: checkpoint {path} cannot be read and is passed over: {error}", file=sys.stderr)
    if numbered and not quiet:
        print(f"warning: no checkpoint in {folder} can be read: the run begins anew", file=sys.stderr)
    return None


class RunCheckpoints(Checkpoint):
    """Saves at the end of every epoch, every so many steps and before a stop; keeps the two newest and the best.

    A stop that a signal asks for while an epoch is evaluated comes after that: only then is there something to save.

    Args:
        folder: of the checkpoints.
        recorder: has the metrics that choose the best epoch.
        numbers: looked at before a save, so that no checkpoint holds weights that are NaN.
        metric: "accuracy" (highest is best) or "loss" (lowest).
        split: the split that it is taken from.
        every_n_steps: also save within epochs, or None.
        data: facts of the data, which every checkpoint holds: its weights mean nothing on others.
    """

    def __init__(
        self,
        folder: Path,
        recorder: Recorder,
        numbers: FiniteNumbers,
        metric: str,
        split: str,
        every_n_steps: int | None,
        data: dict[str, Any],
    ) -> None:
        self.data = data
        self.folder, self.recorder, self.numbers = folder, recorder, numbers
        self.metric, self.split, self.every_n_steps = metric, split, every_n_steps
        self.best: dict[str, Any] | None = None
        self.position = {"epoch": 0, "batch": 0}
        self.processes = 1
        self.stop = StopRequest()

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "position": self.position, "processes": self.processes, "data": self.data}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.position = state_dict["best"], state_dict["position"]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.processes = trainer.world_size
        self.stop.listen()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        done = batch_idx + 1
        # Gradients that wait for their step are in no checkpoint; the end of the epoch saves by itself.
        if done == trainer.num_training_batches or done % trainer.accumulate_grad_batches:
            return
        due = self.every_n_steps is not None and trainer.global_step % self.every_n_steps == 0
        stopping = self.stop.agreed(trainer)
        if due or stopping:
            self._save(trainer, trainer.current_epoch, done)
        if stopping:
            raise SIGTERMException

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        epoch = trainer.current_epoch + 1
        value = self.recorder.value(epoch, self.split, self.metric)
        sign = -1 if self.metric == "loss" else 1
        before = self.best
        if before is None or sign * value > sign * before["value"]:
            name = checkpoint_name(trainer.global_step)
            self.best = {"epoch": epoch, "step": trainer.global_step, "value": value, "checkpoint": name}
        self._save(trainer, epoch, 0, also=before)
        if self.stop.agreed(trainer):
            raise SIGTERMException

    def _save(self, trainer: L.Trainer, epoch: int, batch: int, also: dict[str, Any] | None = None) -> None:
        self.numbers.look(trainer)
        self.position = {"epoch": epoch, "batch": batch}
        trainer.save_checkpoint(self.folder / checkpoint_name(trainer.global_step))
        if trainer.is_global_zero:
            newest = sorted(path.name for path in self.folder.glob("step*.ckpt"))[-2:]
            self.keep({*newest, *(best["checkpoint"] for best in (self.best, also) if best is not None)})

    def keep(self, names: set[str]) -> None:
        """Removes all checkpoints but these, and what a killed process left half-written."""
        for path in [*self.folder.glob("step*.ckpt"), *self.folder.glob(".step*.tmp")]:
            if path.name not in names:
                path.unlink(missing_ok=True)
