"""fairseq-train in a process of its own, with the checkpoints, the stop and the events that a run needs.

    python -m experiments.runners.fairseq_child '{"every_n_steps": null, ...}' ARGUMENTS OF fairseq-train

It is `fairseq_cli.train` itself; these parts of it are replaced, because fairseq 0.12.3

- copies `checkpoint_best.pt` byte by byte over `checkpoint_last.pt`, so that a kill leaves a broken one,
- has no handler for signals: here a signal is noted, and after the update a checkpoint is saved and the training ends,
- validates whenever it saves within an epoch,
- passes over a batch that does not fit into the GPU's memory, and with it an update,
- gives each of several processes batches of its own, so that their number decides what a step is (`fairseq_batches`),
- stops with a bare StopIteration at a gradient that is NaN, and goes on where a loss is.
"""

import io
import json
import math
import os
import shutil
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils, options, tasks
from fairseq.data import iterators
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed_utils
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from fairseq_cli import train as program  # type: ignore[import-untyped]
from sinkhorn_attention.engines.native import describe_device_engine

from ..errors import Diverged, check_finite
from ..files import check_sums, sync_folder, write_atomic
from .column_rows import Row, due
from .fairseq_batches import DividedBatches, filled
from .fairseq_checks import check_generation, check_lengths, check_options
from .fairseq_columns import record_columns
from .fairseq_events import (
    FairseqError,
    emit,
    end_with_parent,
    explained,
    improves,
    keep_digits,
    numbers,
    parse_plainly,
    write_log,
)
from .products import set_matmul_precision

INITIAL, BEST, LAST, PREVIOUS, NEW = (
    f"checkpoint_{name}.pt" for name in ("initial", "best", "last", "previous", "new")
)
#: What decides which batches an epoch has, as (section, key) of fairseq's configuration.
BATCHING = (
    ("dataset", "max_tokens"),
    ("dataset", "batch_size"),
    ("optimization", "update_freq"),
)
#: The exit code after a signal; the event `stopped` says which.
STOPPED = 3


@dataclass
class Settings:
    """What is not fairseq's.

    Attributes:
        every_n_steps: also save within epochs, every so many updates.
        deterministic: deterministic algorithms only.
        matmul_precision: of float32 products on a GPU.
        threads: of torch, None leaves them to torch.
        keep_initial: evaluate and keep the weights that the training begins with, as epoch 0.
        restart_epoch: begin the epoch of the checkpoint anew.
        columns: `every` so many of `epochs` epochs the column sums of `samples` sentences are recorded; None records
            nothing.
        test: the split "test" will be evaluated.
        eval_max_tokens: to a batch of an evaluation.
        generation: settings of the translation.
        given: the configuration's keys of the options that it gives by fairseq's own names.
    """

    every_n_steps: int | None = None
    deterministic: bool = False
    matmul_precision: str = "high"
    threads: int | None = None
    keep_initial: bool = False
    restart_epoch: bool = False
    columns: dict[str, int] | None = None
    test: bool = False
    eval_max_tokens: int | None = None
    generation: dict[str, Any] | None = None
    given: dict[str, str] = field(default_factory=dict)


class Stopped(BaseException):
    """The training ends early, with a checkpoint."""


class Saver:
    """Stands for `checkpoint_utils.save_checkpoint`; fairseq keeps the best value in its attribute `best`.

    Of equal epochs the earlier is the best. The last checkpoint is replaced by a rename, the one before is kept.
    """

    best: float
    #: Steps that the scaler of fp16 has left out.
    skipped: int = 0

    def __init__(self, history: list[dict[str, Any]], columns: list[Row]) -> None:
        self.history, self.columns = history, columns

    def __call__(self, cfg: Any, trainer: Trainer, epoch_itr: Any, value: float | None) -> str | None:
        before = getattr(self, "best", None)
        improved = value is not None and improves(value, before, cfg.maximize_best_checkpoint_metric)
        if improved and value is not None:
            self.best = value
        trainer.consolidate_optimizer()
        if not trainer.should_save_checkpoint_on_current_rank:
            return None
        folder = Path(cfg.save_dir)
        extra = {"train_iterator": epoch_itr.state_dict(), "val_loss": value, "history": self.history}
        if self.columns:
            extra["columns"] = self.columns
        if self.skipped:
            extra["skipped"] = self.skipped
        if hasattr(self, "best"):
            extra["best"] = self.best
        trainer.save_checkpoint(str(folder / NEW), extra)
        if improved:
            _same_file(folder / NEW, folder / BEST)
        if (folder / LAST).exists():
            _same_file(folder / LAST, folder / PREVIOUS)
        os.replace(folder / NEW, folder / LAST)
        sync_folder(folder)
        return str(folder / LAST)


def _same_file(source: Path, target: Path) -> None:
    """Gives a file a second name, at once; no file here is ever written to again."""
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:  # a file system without links
        shutil.copyfile(source, temporary)
    os.replace(temporary, target)


def _write(content: Any, path: str, async_write: bool = False) -> None:
    if Path(path).name == "crash.pt":  # fairseq's own, of an update that failed; the last checkpoint is whole
        return
    buffer = io.BytesIO()
    torch.save(content, buffer)  # in memory first: torch reports a full disk as a RuntimeError without errno
    write_atomic(Path(path), buffer.getbuffer())


class Training:
    """The parts of the training program that are replaced, and what they share."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.history: list[dict[str, Any]] = []
        self.columns: list[Row] = []
        self.saver = Saver(self.history, self.columns)
        self.signal = 0
        self.saved_step = 0
        self.samples = 0
        self.start = 0.0
        self.epoch = 0  # finished
        self.losses: list[torch.Tensor] = []  # of the step at hand
        self.norm = 0.0  # of its gradient

    def run(self, cfg: Any) -> None:
        """Trains to the end, or until a signal.

        Raises:
            Stopped: after a signal; a checkpoint has been saved.
        """
        self._validate_and_save, self._train_step = program.validate_and_save, Trainer.train_step
        self._valid_stats, self._load = program.get_valid_stats, checkpoint_utils.load_checkpoint
        self._begin_epoch = Trainer.begin_epoch
        program.validate_and_save, program.get_valid_stats = self.validate_and_save, self.valid_stats
        checkpoint_utils.load_checkpoint, checkpoint_utils.save_checkpoint = self.load, self.saver
        checkpoint_utils.torch_persistent_save = _write
        self._train_iterator = Trainer.get_train_iterator
        training = self

        def train_step(trainer: Trainer, samples: list[Any], raise_oom: bool = False) -> Any:
            return training.train_step(trainer, samples)

        def begin_epoch(trainer: Trainer, epoch: int) -> None:
            training.samples, training.start, training.epoch = 0, time.perf_counter(), epoch - 1
            training._begin_epoch(trainer, epoch)

        def get_train_iterator(trainer: Trainer, *words: Any, **more: Any) -> Any:
            # In validation each process keeps whole batches: how long a translation may be depends on its batch.
            whole = iterators.EpochBatchIterator
            iterators.EpochBatchIterator = DividedBatches
            try:
                return training._train_iterator(trainer, *words, **more)
            finally:
                iterators.EpochBatchIterator = whole

        Trainer.train_step, Trainer.begin_epoch = train_step, begin_epoch
        Trainer.get_train_iterator = get_train_iterator
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self.note)
        program.main(cfg)

    def note(self, signum: int, frame: object) -> None:
        """Notes a signal. Processes that load data inherit this handler, and so go on until they are told."""
        self.signal = self.signal or signum

    def _any(self, trainer: Trainer, number: int) -> int:
        """The largest of the numbers that the processes of the run have."""
        return int(self._reduced(trainer, number, torch.distributed.ReduceOp.MAX))

    def _reduced(self, trainer: Trainer, number: float, how: Any) -> float:
        """A number of all processes of the run."""
        if trainer.data_parallel_world_size == 1:
            return number
        noted = torch.tensor([number], device=trainer.device)
        torch.distributed.all_reduce(noted, how)
        return noted.item()

    def watch(self, trainer: Trainer) -> None:
        """Has every loss and every norm of a gradient noted."""
        step, clip = trainer.task.train_step, trainer.clip_grad_norm

        def train_step(*words: Any, **more: Any) -> Any:
            loss, size, output = step(*words, **more)
            self.losses.append(loss.detach())
            return loss, size, output

        def clip_grad_norm(*words: Any, **more: Any) -> Any:
            norm = clip(*words, **more)
            self.norm = float(norm)
            if trainer.cfg.common.amp and not math.isfinite(self.norm):
                self.saver.skipped += 1
            return norm

        trainer.task.train_step, trainer.clip_grad_norm = train_step, clip_grad_norm

    def train_step(self, trainer: Trainer, samples: list[Any]) -> Any:
        """One update.

        Raises:
            Diverged: where the loss of a process, or the gradient, is not finite. That the scaler of fp16 leaves out a
                step is no fault, unless no scale is small enough.
            RuntimeError: where it does not fit into the memory of the GPU.
        """
        if self.losses:  # fairseq tries the same step again, with a smaller scale of fp16
            self._check_finite(trainer, trainer.get_num_updates())
            return self._train_step(trainer, samples, raise_oom=True)
        step = trainer.get_num_updates()
        try:
            output = self._train_step(trainer, filled(samples), raise_oom=True)
            self._check_finite(trainer, step)
        except (StopIteration, FloatingPointError):  # of a norm that is not finite, in all processes
            self._check_finite(trainer, step)
            raise  # it was something else
        self.losses.clear()
        self.samples += sum(int(sample["nsentences"]) for sample in samples if sample)
        return output

    def _check_finite(self, trainer: Trainer, step: int) -> None:
        local = float(torch.stack(self.losses).sum()) if self.losses else 0.0
        loss = self._reduced(trainer, local, torch.distributed.ReduceOp.SUM)  # finite where all its parts are
        rate = trainer.get_lr()
        if not math.isfinite(loss):
            raise Diverged.at("the loss", loss, step, self.epoch, rate)
        if math.isfinite(self.norm):
            return
        if not trainer.cfg.common.amp:
            raise Diverged.at("the norm of the gradient", self.norm, step, self.epoch, rate)
        if trainer.optimizer.scaler.get_scale() < trainer.cfg.common.min_loss_scale:
            what = "the norm of the gradient, at every scale of the loss,"
            raise Diverged.at(what, self.norm, step, self.epoch, rate)

    def valid_stats(self, cfg: Any, trainer: Trainer, stats: dict[str, Any], tracking_best: bool) -> dict[str, Any]:
        """The validation's metrics, which are kept for the history.

        Raises:
            Diverged: where one of them is not finite.
        """
        if self.history and self.history[-1]["step"] == trainer.get_num_updates():
            valid = numbers(stats)
            check_finite(valid, "val", self.history[-1]["step"], self.history[-1]["epoch"], trainer.get_lr())
            self.history[-1]["valid"] = valid
        return self._valid_stats(cfg, trainer, stats, tracking_best)

    def validate_and_save(
        self, cfg: Any, trainer: Trainer, task: Any, epoch_itr: Any, subsets: list[str], end_of_epoch: bool
    ) -> tuple[list[float | None], bool]:
        """What fairseq does after each update, and the checkpoints within an epoch and at a signal."""
        if end_of_epoch:
            return self._end_epoch(cfg, trainer, task, epoch_itr, subsets)
        outcome = self._validate_and_save(cfg, trainer, task, epoch_itr, subsets, end_of_epoch)
        step, every = trainer.get_num_updates(), self.settings.every_n_steps
        stopping = self._any(trainer, self.signal)
        if stopping or (every is not None and step % every == 0 and step != self.saved_step):
            self.saver(cfg.checkpoint, trainer, epoch_itr, None)
            self.saved_step = step
        if stopping:
            raise Stopped(stopping)
        return outcome

    def _end_epoch(self, cfg: Any, trainer: Trainer, task: Any, epoch_itr: Any, subsets: list[str]) -> Any:
        train = numbers(metrics.get_smoothed_values("train"))
        row = {"epoch": epoch_itr.epoch, "step": trainer.get_num_updates(), "train": {**train, "lr": trainer.get_lr()}}
        self.history.append(row)  # now, because the checkpoint holds it; `valid_stats` completes it
        columns = self._record_columns(trainer, epoch_itr.epoch)
        outcome = self._validate_and_save(cfg, trainer, task, epoch_itr, subsets, True)
        seconds = time.perf_counter() - self.start
        samples = int(self._reduced(trainer, self.samples, torch.distributed.ReduceOp.SUM))
        if distributed_utils.is_master(cfg.distributed_training):
            measured = {"seconds": seconds, "samples": samples, "skipped": self.saver.skipped}
            emit("epoch", **row, **measured, columns=columns, device_engine=describe_device_engine())
        if stopping := self._any(trainer, self.signal):
            raise Stopped(stopping)
        return outcome

    def load(self, cfg: Any, trainer: Trainer, **more: Any) -> tuple[Any, Any]:
        """The last checkpoint, or the weights to begin with; the history of the run goes on from it."""
        resumes = (Path(cfg.save_dir) / LAST).exists()
        restart = resumes and self._any(trainer, int(self.settings.restart_epoch)) > 0
        cfg.reset_dataloader = restart
        if resumes:
            cfg.finetune_from_model = None
        elif cfg.finetune_from_model:
            try:
                check_sums(Path(cfg.finetune_from_model))
            except ValueError as error:
                raise FairseqError(
                    f"init_from: checkpoint {cfg.finetune_from_model} cannot be read: {error}. Remove that run's "
                    "folder, so that it is trained again"
                ) from error
        extra, epoch_itr = self._load(cfg, trainer, **more)
        if resumes:
            self.history[:] = extra["history"]
            self.columns[:] = extra.get("columns", [])
            self.saver.skipped = extra.get("skipped", 0)
        else:
            self._record_columns(trainer, 0)
        self.watch(trainer)
        if restart:
            epoch_itr = trainer.get_train_iterator(extra["train_iterator"]["epoch"], load_dataset=False, **more)
            trainer.lr_step(epoch_itr.epoch)
            metrics.reset_meters("train")
        if self.settings.keep_initial and not resumes:
            self.history.append({"epoch": 0, "step": 0})
            program.validate(trainer.cfg, trainer, trainer.task, epoch_itr, trainer.cfg.dataset.valid_subset.split(","))
            begin = {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}, "history": self.history}
            trainer.consolidate_optimizer()
            trainer.save_checkpoint(str(Path(cfg.save_dir) / INITIAL), begin)
        master = distributed_utils.is_master(trainer.cfg.distributed_training)
        if master:
            known = {"history": self.history, "columns": self.columns, "skipped": self.saver.skipped}
            emit("started", step=trainer.get_num_updates(), epoch=epoch_itr.next_epoch_idx, **known)
        return extra, epoch_itr

    def _record_columns(self, trainer: Trainer, epoch: int) -> list[Row]:
        """The lines of this epoch, on the first process, where they are asked for; they go into the checkpoint too."""
        asked = self.settings.columns
        master = distributed_utils.is_master(trainer.cfg.distributed_training)
        if asked is None or not master or not due(epoch, asked["every"], asked["epochs"]):
            return []
        rows = record_columns(trainer, trainer.cfg.dataset.valid_subset.split(",")[0], asked["samples"], epoch)
        self.columns += rows
        return rows


def train_process(cfg: Any, settings: dict[str, Any]) -> None:
    """Trains in this process, the only one or one of several."""
    own = Settings(**settings)
    write_log()
    keep_digits()
    if own.threads is not None:
        torch.set_num_threads(own.threads)
    # fairseq was not written for it: what has no deterministic kernel on a GPU is told in the log.
    torch.use_deterministic_algorithms(own.deterministic, warn_only=True)
    on_gpu = torch.cuda.is_available() and not cfg.common.cpu
    set_matmul_precision(torch.device("cuda" if on_gpu else "cpu"), own.matmul_precision)
    training = Training(own)
    try:
        with explained():
            training.run(cfg)
    except Stopped as stopped:
        emit("stopped", signal=int(stopped.args[0]))
        sys.stdout.flush()
        os._exit(STOPPED)  # without waiting for processes that load data


def choose_checkpoint(folder: Path, cfg: Any) -> bool:
    """Makes the newest whole checkpoint the last; returns whether its epoch has to be begun anew.

    That is so where the batches of the epoch are not those of the attempt that saved it within the epoch, which an
    earlier version divided among its processes in another way. The number of processes alone changes no batch.
    """
    state = _read(folder / LAST)
    if state is None:
        whole = [(_read(folder / name), name) for name in (PREVIOUS, BEST)]
        found = [(known["optimizer_history"][-1]["num_updates"], name, known) for known, name in whole if known]
        if not found:
            if any((folder / name).exists() for name in (LAST, PREVIOUS, BEST)):
                emit("warning", message=f"no checkpoint in {folder} can be read: the run begins anew")
            (folder / LAST).unlink(missing_ok=True)
            return False
        step, name, state = max(found, key=lambda entry: entry[0])
        emit("warning", message=f"{LAST} cannot be read and is passed over; {name}, of step {step}, is taken instead")
        _same_file(folder / name, folder / LAST)
    within = state["extra_state"]["train_iterator"].get("iterations_in_epoch", 0) > 0
    changed = [
        f"{key} {state['cfg'][section][key]} -> {cfg[section][key]}"
        for section, key in BATCHING
        if state["cfg"][section][key] != cfg[section][key]
    ]
    if within and changed:
        emit(
            "warning",
            message=f"the batches are not those of the checkpoint ({', '.join(changed)}): its epoch "
            f"{state['extra_state']['train_iterator']['epoch']} is begun anew (as with --reset-dataloader); updates "
            "are counted on",
        )
    processes = [known["distributed_training"]["distributed_world_size"] for known in (state["cfg"], cfg)]
    if processes[0] != processes[1]:
        emit(
            "warning",
            message=f"the run goes on with {processes[1]} processes, and had {processes[0]}: the batches and their "
            "order stay, sums are rounded otherwise, and dropout draws other masks",
        )
    return bool(within and changed)


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        check_sums(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # whatever unpickling damaged bytes may raise
        return None
    return state if isinstance(state, dict) and {"cfg", "extra_state", "optimizer_history"} <= state.keys() else None


def configure(arguments: list[str], given: dict[str, str]) -> Any:
    """Fairseq's configuration of these arguments.

    Args:
        arguments: of fairseq-train.
        given: see `Settings`.

    Raises:
        FairseqError: for what fairseq refuses, or would not heed.
    """
    parse_plainly()
    parser = options.get_training_parser()
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, input_args=arguments))
    check_options(parser, cfg, given)
    return cfg


def _devices(cfg: Any) -> list[str]:
    if not torch.cuda.is_available() or cfg.common.cpu:
        return ["cpu"]
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def main() -> None:
    """Checks, reports `ready`, waits for a line on its input, and trains."""
    settings, arguments = Settings(**json.loads(sys.argv[1])), sys.argv[2:]
    with explained("fairseq: "):
        cfg = configure(arguments, settings.given)
        task = tasks.setup_task(cfg.task)
        model = task.build_model(cfg.model)
        task.build_criterion(cfg.criterion)
        count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        if settings.generation is not None:
            check_generation(task, model, settings.generation)
        left_out = check_lengths(task, model, cfg, settings.test, settings.eval_max_tokens)
        del model, task
    emit("ready", n_params=count, devices=_devices(cfg), left_out=left_out)
    if not sys.stdin.readline():
        return
    end_with_parent()
    world = cfg.distributed_training
    if cfg.common.cpu or not torch.cuda.is_available():
        world.distributed_backend, world.ddp_backend = "gloo", "legacy_ddp"
    with explained():
        if distributed_utils.is_master(world):
            Path(cfg.checkpoint.save_dir).mkdir(parents=True, exist_ok=True)
            settings.restart_epoch = choose_checkpoint(Path(cfg.checkpoint.save_dir), cfg)
    if world.distributed_world_size == 1:
        train_process(cfg, asdict(settings))
    elif world.distributed_no_spawn:
        with explained("the processes of this run did not come together: "):
            distributed_utils.distributed_main(world.device_id, train_process, cfg, {"settings": asdict(settings)})
    else:
        _spawn(cfg, asdict(settings))
    emit("finished")


def _spawn(cfg: Any, settings: dict[str, Any]) -> None:
    """The processes of one machine; fairseq's own way to start them asks for as many GPUs, here the CPU will do."""

    def forward(signum: int, frame: object) -> None:
        for process in active_children():
            if process.pid is not None:
                os.kill(process.pid, signum)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, forward)
    world = cfg.distributed_training
    if not world.distributed_init_method:
        with socket.create_server(("localhost", 0)) as server:
            world.distributed_init_method = f"tcp://localhost:{server.getsockname()[1]}"
    world.distributed_rank = None  # counted by distributed_main
    try:
        torch.multiprocessing.spawn(
            distributed_utils.distributed_main,
            (train_process, cfg, {"start_rank": 0, "settings": settings}),
            nprocs=world.distributed_world_size,
        )
    except torch.multiprocessing.ProcessExitedException as error:
        raise SystemExit(error.exit_code if error.exit_code in (1, STOPPED) else 1) from None


if __name__ == "__main__":
    main()
