"""metrics.jsonl, timing.jsonl and the loggers: one row per evaluation, the same rows for all of them."""

import csv
import io
import json
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from ..data.base import BatchSampler
from ..errors import check_finite
from ..files import append_line, json_line, write_atomic
from ..progress import Lines
from .classifier import Classifier
from .dashboards import Dashboard, forget_wandb, offline_wandb, tell
from .run_dir import identity

Row = dict[str, Any]
PLACES = ("initial", "best", "last")


class RunLog:
    """Writes what each epoch gave.

    The rows are part of every checkpoint: a run that goes on from one starts with exactly the rows that preceded it,
    whatever was in metrics.jsonl when the process was killed.

    Args:
        folder: the run's folder.
        split: what is evaluated after each epoch, "val" or "test".
        table: also write metrics.csv.
        lines: print one line per epoch.
    """

    def __init__(self, folder: Path, split: str, table: bool, lines: bool) -> None:
        self.folder, self.split, self.table, self.lines = folder, split, table, lines
        self.rows: list[Row] = []

    def begin(self, rows: list[Row], loggers: list[Logger]) -> None:
        """Starts with the rows that a checkpoint holds (none in a fresh run), and tells them to offline wandb runs."""
        self.rows = list(rows)
        write_atomic(self.folder / "metrics.jsonl", "".join(map(json_line, self.rows)))
        self._write_table()
        # Each attempt makes a wandb folder of its own under the same id, and on the server the latest replaces the
        # earlier ones: so it has to be complete.
        for row in self.rows:
            tell(offline_wandb(loggers), partial(_log, row))

    def value(self, epoch: int, split: str, metric: str) -> float:
        """A recorded metric."""
        return self.metrics(epoch, split)[metric]

    def metrics(self, epoch: int, split: str) -> dict[str, float]:
        """The recorded metrics of an epoch and split, empty where it was not evaluated."""
        for row in self.rows:
            if (row["epoch"], row["split"]) == (epoch, split):
                return {name: value for name, value in row.items() if name not in ("epoch", "step", "split", "lr")}
        return {}

    def add(self, row: Row, loggers: list[Logger]) -> None:
        """Records one evaluation."""
        self.rows.append(row)
        append_line(self.folder / "metrics.jsonl", row)
        self._write_table()
        tell(loggers, partial(_log, row))

    def add_timing(
        self, epoch: int, step: int, epochs: int, seconds: float, samples: int, waited: float | None = None
    ) -> None:
        """Writes how long an epoch of `samples` took, after its rows were added, and its line where lines are asked.

        Args:
            epoch: that has ended.
            step: of the optimizer.
            epochs: of the whole training.
            seconds: of the epoch.
            samples: trained on in it.
            waited: seconds of them in which the training waited for data, where that is known.
        """
        timing: dict[str, Any] = {
            "epoch": epoch,
            "step": step,
            "seconds": round(seconds, 4),
            "samples_per_second": round(samples / seconds, 1),
            **({} if waited is None else {"waited_for_data": round(waited / seconds, 4)}),
            "ended": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }
        append_line(self.folder / "timing.jsonl", timing)
        if self.lines:
            words = "  ".join(f"{name} {value:.4f}" for name, value in self.metrics(epoch, self.split).items())
            print(f"epoch {epoch}/{epochs}  {self.split}: {words}  ({seconds:.1f} s)", file=sys.stderr)

    def _write_table(self) -> None:
        if not self.table:
            return
        columns = list(dict.fromkeys(name for row in self.rows for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_atomic(self.folder / "metrics.csv", text.getvalue())


class Recorder(RunLog, Callback):
    """The log of a run that Lightning trains."""

    def __init__(self, folder: Path, split: str, table: bool, lines: bool) -> None:
        super().__init__(folder, split, table, lines)
        self._epoch_start = self._waits_since = self._waited = 0.0
        self._samples = 0
        self._log = Lines()

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = list(state_dict["rows"])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin_epoch()

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._epoch_start = self._waits_since = time.perf_counter()
        self._samples, self._waited = 0, 0.0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._waited += time.perf_counter() - self._waits_since

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        sampler = trainer.train_dataloader.sampler  # type: ignore[union-attr]
        assert isinstance(sampler, BatchSampler)
        self._samples += sampler.samples(batch_idx)
        self._waits_since = time.perf_counter()
        self._tell(trainer, "batch", batch_idx, trainer.num_training_batches)

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._tell(trainer, f"{self.split} batch", batch_idx, trainer.num_val_batches[dataloader_idx])

    def _tell(self, trainer: L.Trainer, what: str, batch: int, batches: float) -> None:
        """A line a minute, so that a log shows where an epoch of hours is."""
        if self.lines and trainer.is_global_zero:
            epoch = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}"
            self._log.tell(f"{epoch}: {what} {batch + 1:,} of {batches:,}")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, Classifier)
        train, evaluated = pl_module.training_metrics.take(), pl_module.evaluation_metrics.take()
        epoch, step = trainer.current_epoch + 1, trainer.global_step
        seconds = time.perf_counter() - self._epoch_start
        for split, metrics in (("train", {**train, "lr": pl_module.last_rate}), (self.split, evaluated)):
            check_finite(metrics, split, step, epoch, pl_module.last_rate)
            row = {"epoch": epoch, "step": step, "split": split, **metrics}
            if trainer.is_global_zero:
                self.add(row, trainer.loggers)
            else:  # every process knows the rows, by which the best epoch is chosen; the first one writes them
                self.rows.append(row)
        if trainer.is_global_zero:
            self.add_timing(epoch, step, trainer.max_epochs or epoch, seconds, self._samples, self._waited)


def make_loggers(config: dict[str, Any], folder: Path, digest: str, step: int) -> list[Logger]:
    """The loggers that the configuration asks for, besides metrics.jsonl.

    Args:
        config: resolved.
        folder: the run's folder.
        digest: the run's hash; its first eight digits are the wandb id.
        step: the optimizer step that the run goes on from, 0 at the start.
    """
    loggers: list[Logger] = []
    if config["logger"]["wandb"]:
        loggers.append(Dashboard("wandb", lambda: _wandb_logger(config, folder, digest)))
    if config["logger"]["tensorboard"]:
        loggers.append(Dashboard("TensorBoard", lambda: _tensorboard_logger(config, folder, step)))
    return loggers


def close_loggers(loggers: list[Logger], result: Mapping[str, Any]) -> None:
    """Tells the loggers what came out, and writes out what they still hold, after the last row.

    The numbers of each place of the result are a run's summary in wandb, together with the result itself under `result`
    (by which the report can read an offline run), and its metrics beside its settings in TensorBoard's table.

    Args:
        loggers: from `make_loggers`.
        result: what result.json is to hold.
    """
    numbers = {
        f"{place}/{split}/{name}": value
        for place in PLACES
        for split, metrics in result.get(place, {}).items()
        if isinstance(metrics, dict)
        for name, value in metrics.items()
    }

    def close(logger: Logger) -> None:
        if isinstance(logger, WandbLogger):
            epochs = {f"{place}/epoch": result[place]["epoch"] for place in PLACES if place in result}
            logger.experiment.summary.update({**numbers, **epochs, "result": json.loads(json.dumps(result))})
        elif isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(logger.hparams, numbers)
        logger.finalize("success")
        if isinstance(logger, WandbLogger):
            logger.experiment.finish()

    tell(loggers, close)


def close_failed(loggers: list[Logger]) -> None:
    """Marks a run as failed where it is shown: in a sweep its process goes on, and would end it as if all were well."""

    def close(logger: Logger) -> None:
        logger.finalize("failed")
        if isinstance(logger, WandbLogger):
            logger.experiment.finish(exit_code=1)

    tell(loggers, close)


def tags(config: dict[str, Any]) -> list[str]:
    """A run's tags on the dashboard: normalizer, number of half-steps, and what data and model are called."""
    attention = config["attention"]
    found = [attention["name"], *([f"n_iters={attention['n_iters']}"] if "n_iters" in attention else [])]
    for section in (config["data"], config["model"]):
        name = section.get("name") or str(section.get("_target_", "")).rsplit(".", 1)[-1]
        found += [name] if name else []
    return [tag[:64] for tag in dict.fromkeys(found)]  # the server takes no longer ones


def _tensorboard_logger(config: dict[str, Any], folder: Path, step: int) -> TensorBoardLogger:
    # What an earlier attempt wrote after that step is repeated, so TensorBoard is told to forget it.
    logger = TensorBoardLogger(
        folder, name="", version="tensorboard", default_hp_metric=False, purge_step=step + 1 if step else None
    )
    logger.hparams.update(identity(config))
    return logger


def _wandb_logger(config: dict[str, Any], folder: Path, digest: str) -> WandbLogger:
    import wandb

    def start(mode: str) -> WandbLogger:
        # Offline folders of one id lie side by side; the newest is complete (see Recorder.begin).
        run = wandb.init(
            id=digest[:8],
            name=folder.name,
            group=config["experiment"],
            tags=tags(config),
            project=config["wandb"]["project"],
            entity=config["wandb"]["entity"],
            config=config,
            dir=folder,
            mode=mode,  # type: ignore[arg-type]
            resume="allow",
            reinit="finish_previous",
            settings=wandb.Settings(init_timeout=30, silent=True, console="off"),
        )
        run.define_metric("trainer/global_step")
        run.define_metric("*", step_metric="trainer/global_step")
        return WandbLogger(experiment=run, offline=mode == "offline")

    mode = config["wandb"]["mode"]
    if mode == "online":
        try:
            return start("online")
        except (wandb.errors.Error, OSError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            print(
                f"warning: wandb is out of reach ({reason}); this run is logged offline, in {folder / 'wandb'}, "
                "for `wandb sync`",
                file=sys.stderr,
            )
            forget_wandb()  # its service still holds the id for the attempt that failed
    return start("offline")


def _log(row: Row, logger: Logger) -> None:
    metrics = {f"{row['split']}/{name}": value for name, value in row.items() if name not in ("epoch", "step", "split")}
    logger.log_metrics(metrics | {"epoch": row["epoch"]}, step=row["step"])
