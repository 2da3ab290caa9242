"""Trains and evaluates a run with Lightning: data, model, optimizer and schedule as the configuration names them."""

import copy
import functools
import inspect
import logging
import math
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Callback, RichProgressBar
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from sinkhorn_attention.diagnostics import record_attention
from sinkhorn_attention.engines.implicit import NotConvergedError

from ..config import PRECISIONS
from ..data.base import BatchSampler, DataModule, SampleKey, other_data
from ..errors import Diverged, RunError, check_finite
from ..files import explain_full_disk, full_disk, is_full_disk
from ..plugins import import_plugins
from ..progress import at_work
from ..seeding import stream_seed
from .checkpoints import AtomicCheckpointIO, RunCheckpoints, checkpoint_name, newest_valid, read_checkpoint
from .classifier import Classifier
from .columns import ColumnSums, recorded_batch
from .finite import FiniteNumbers
from .origin import Origin
from .products import set_matmul_precision
from .recorder import Recorder, close_failed, close_loggers, make_loggers
from .run_dir import RUN_FOLDER, RunDir, read_record
from .stopping import TERMINATED, exit_on_signals, left_to_the_main_process, processes

Config = dict[str, Any]
INTERRUPTED = 128 + signal.SIGINT


@dataclass
class Plan:
    """A run that has been checked and is ready to train; nothing has been written yet."""

    config: Config
    data: DataModule
    module: Classifier
    trainer: L.Trainer
    recorder: Recorder
    numbers: FiniteNumbers
    checkpoints: RunCheckpoints
    columns: ColumnSums | None


def prepare(config: Config, run: RunDir, begin: Origin | None = None) -> Plan:
    """Builds everything that a run needs, and tries the model on two samples.

    Args:
        config: resolved.
        run: its folder.
        begin: with `init_from`, what the run begins with.

    Raises:
        RunError: for anything in the configuration that does not work.
    """
    quieten()
    refuse_environment()
    split, settings = config["protocol"]["select_on"], config["trainer"]
    started_by = processes(settings["devices"], settings["num_nodes"])
    data, module = build(config, None if begin is None else begin.rate)
    if settings["precision"] == "64":
        # Lightning converts it after it has loaded a checkpoint, whose weights would be rounded to float32 on the way.
        module.double()
    facts = data.facts()
    _check_data(run, _data_before(run), facts)
    if begin is not None:
        difference = other_data(begin.data, facts) if begin.data["name"] == data.name else None
        if difference is not None:
            raise RunError(
                f"init_from: that run was trained with other splits of the same data, or other classes ({difference}); "
                "its samples to train on may be among those to test on: give its settings of data to "
                "init_from.overrides too, and prepare the data as they were"
            )
        with explained("init_from", {"checkpoint": begin.checkpoint}):
            module.load_state_dict(read_checkpoint(begin.checkpoint)["state_dict"])
    bar = settings["progress_bar"] and sys.stderr.isatty()
    recorder = Recorder(run.path, split, config["logger"]["csv"], lines=not bar)
    numbers = FiniteNumbers()
    metric, every = config["protocol"]["metric"], settings["checkpoint_every_n_steps"]
    checkpoints = RunCheckpoints(run.checkpoints, recorder, numbers, metric, split, every, facts)
    callbacks: list[Callback] = [numbers, recorder, checkpoints]
    columns = None
    if config["columns"]["every"] is not None:
        with explained("columns", config["columns"]):
            with record_attention(module.model):  # refuses a model without attention
                batch = recorded_batch(data, split, config["columns"]["samples"])
            columns = ColumnSums(run.path, batch, config["columns"]["every"])
        callbacks.append(columns)
    if bar:
        callbacks.append(RichProgressBar(refresh_rate=10, leave=False))
    with explained("trainer", settings):
        if settings["precision"] == "fp16" and not torch.cuda.is_available():
            raise ValueError("precision=fp16 needs a GPU; on a CPU take bf16")
        trainer = L.Trainer(
            accelerator=settings["accelerator"],
            devices=settings["devices"],
            num_nodes=settings["num_nodes"],
            strategy=settings["strategy"],
            precision=PRECISIONS[settings["precision"]],  # type: ignore[arg-type]
            max_epochs=settings["max_epochs"],
            accumulate_grad_batches=settings["accumulate_grad_batches"],
            gradient_clip_val=settings["gradient_clip_norm"],
            deterministic=settings["deterministic"],
            callbacks=callbacks,
            plugins=[AtomicCheckpointIO(), started_by],
            sync_batchnorm=settings["devices"] * settings["num_nodes"] > 1,
            default_root_dir=run.path,
            logger=False,
            enable_progress_bar=bar,
            enable_model_summary=False,
            log_every_n_steps=1,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,
        )
        set_matmul_precision(trainer.strategy.root_device, settings.get("matmul_precision", "high"))
        _check_shares(data, module, trainer)
    with explained("model", config["model"]):
        _try_out(module, data, trainer)
    if settings.get("compile", False):
        if columns is not None:
            raise RunError("trainer.compile=true: columns.every records inside attention, which a compiled model hides")
        module.model.compile()  # in place: its weights keep their names
    return Plan(config, data, module, trainer, recorder, numbers, checkpoints, columns)


def refuse_environment() -> None:
    """Refuses variables that Lightning takes for settings of every trainer that leaves them out.

    Raises:
        RunError: names them; the run's identity would not know of them.
    """
    given = sorted(name for name in os.environ if name.startswith("PL_TRAINER_"))
    if given:
        raise RunError(f"the environment sets {', '.join(given)}, which would change the numbers unseen: unset them")


def _data_before(run: RunDir) -> dict[str, Any] | None:
    """Facts of the data that a run was begun with: its checkpoint's, or else its card's; None where there is none."""
    start = newest_valid(run.checkpoints, quiet=True)
    if start is None:
        return None
    before = [state["data"] for state in start[1]["callbacks"].values() if "data" in state]
    card = run.path / "run.json"
    return before[0] if before else read_record(card).get("data") if card.is_file() else None


def _check_data(run: RunDir, before: dict[str, Any] | None, now: dict[str, Any]) -> None:
    """Refuses to go on with other data than those that a run was begun with, where that is known.

    Raises:
        RunError: says what differs.
    """
    difference = None if before is None else other_data(before, now)
    if difference is not None:
        raise RunError(
            f"the data are not those that {run.path} was begun with: {difference}. Prepare them as before, or move "
            "that folder away"
        )


def _check_shares(data: DataModule, module: Classifier, trainer: L.Trainer) -> None:
    """Refuses batches that are too small for the processes, or for batch normalisation.

    Raises:
        ValueError: says which.
    """
    world = trainer.world_size
    if data.batch_size < world:
        raise ValueError(
            f"data.batch_size={data.batch_size} is divided among {world} processes (trainer.devices × "
            "trainer.num_nodes), which leaves some without a sample at every step: take a larger batch, or fewer"
        )
    if not any(isinstance(layer, torch.nn.modules.batchnorm._BatchNorm) for layer in module.modules()):
        return
    if world > 1 and trainer.strategy.root_device.type == "cpu":
        raise ValueError(
            "the model has batch normalisation, whose statistics torch shares among GPUs but not among processes "
            "on CPUs: take trainer.devices=1 and trainer.num_nodes=1 there"
        )
    sampler = data.train_sampler(0)
    last = sampler.samples(len(sampler) - 1)
    where = f"an epoch's last batch holds {last} of {sampler.size} samples (data.batch_size={data.batch_size})"
    if last < world:
        raise ValueError(
            f"the model has batch normalisation, and {where}, fewer than the {world} processes: one that has none "
            "would change the statistics. Take another batch size, data.drop_trailing=true where the data have it, or "
            "fewer processes"
        )
    if last == 1:
        *inputs, _ = trainer.precision_plugin.convert_input(next(iter(data.eval_loader("train"))))
        device = trainer.strategy.root_device
        trial = copy.deepcopy(module.model).to(device).train()
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                trial(*(tensor[:1].to(device) for tensor in inputs))
        except ValueError as error:
            raise ValueError(
                f"the model has batch normalisation, and {where}, which has no variance: take another batch size, or "
                f"data.drop_trailing=true where the data have it ({' '.join(str(error).split())})"
            ) from error


def build(config: Config, rate: float | None = None) -> tuple[DataModule, Classifier]:
    """Data and untrained model of a resolved configuration; the initial weights follow from its seed.

    Args:
        config: resolved.
        rate: learning rate in place of the configuration's.

    Raises:
        RunError: for anything in these sections that does not work.
    """
    if config["trainer"]["threads"] is not None:
        torch.set_num_threads(config["trainer"]["threads"])
    import_plugins(config)
    if "_target_" not in config["data"]:
        raise RunError("data._target_ is missing: text has none, which engine=fairseq trains; take its experiments")
    with explained("data", config["data"]):
        data = instantiate(config["data"], _convert_="all")
    if not isinstance(data, DataModule):
        raise RunError(f"data._target_ must name a DataModule; {config['data'].get('_target_')} gives {type(data)}")
    L.seed_everything(stream_seed("weights", config["seed"]) % 2**32, verbose=False)
    if "_target_" not in config["model"]:
        raise RunError("model._target_ is missing: this model is fairseq's, for engine=fairseq; take another model=")
    with explained("model", config["model"]):
        make = instantiate(config["model"], _partial_=True, _convert_="all")
        model = make(attention=config["attention"], num_classes=data.num_classes, **_example(make, data))
        if not isinstance(model, torch.nn.Module):
            raise ValueError(f"{config['model']['_target_']} gives {type(model).__name__}, not a torch.nn.Module")
    settings = config["optimizer"] if rate is None else {**config["optimizer"], "lr": rate}
    with explained("optimizer", settings):
        optimizer = instantiate(settings, _partial_=True, _convert_="all")
        trial = optimizer(model.parameters())
    scheduler = None
    if config["scheduler"] is not None:
        with explained("scheduler", config["scheduler"]):
            scheduler = instantiate(config["scheduler"], _partial_=True, _convert_="all")
            if isinstance(scheduler(trial), torch.optim.lr_scheduler.ReduceLROnPlateau):
                raise ValueError(
                    "ReduceLROnPlateau goes by a metric; a run's rate follows from its epochs: take another"
                )
    mean_over = config["protocol"].get("mean_over", "samples")  # which older runs do not name
    return data, Classifier(model, data.num_classes, config["seed"], optimizer, scheduler, mean_over)


def _example(make: functools.partial[Any], data: DataModule) -> dict[str, Any]:
    """Inputs of two samples as `example`, where what makes the model asks for them by that name."""
    if "example" not in inspect.signature(make.func).parameters:
        return {}
    keys = [SampleKey(sample, 0, 0) for sample in range(min(2, data.sizes["train"]))]
    return {"example": data.dataset(["train"])[keys][:-1]}


def _try_out(module: Classifier, data: DataModule, trainer: L.Trainer) -> None:
    """Runs the model on two samples, on the run's own device and in its precision: an engine may be for that alone."""
    *inputs, labels = next(iter(data.eval_loader("train")))
    device, precision = trainer.strategy.root_device, trainer.precision_plugin
    model = module.model if device.type == "cpu" else copy.deepcopy(module.model).to(device)
    training = model.training
    with torch.no_grad(), precision.forward_context():
        logits = model.eval()(*(tensor[:2].to(device) for tensor in precision.convert_input(inputs)))
    model.train(training)
    if logits.shape != (len(labels[:2]), data.num_classes):
        raise ValueError(f"gives {tuple(logits.shape)} for two samples of {data.num_classes} classes")


@contextmanager
def explained(section: str, values: Config) -> Iterator[None]:
    """Turns what a section's classes object to into one sentence that names the section."""
    try:
        yield
    except Exception as error:  # whatever the classes that the configuration names may raise
        cause: BaseException = error
        while isinstance(cause, InstantiationException) and cause.__cause__ is not None:
            cause = cause.__cause__
        words = " ".join(str(cause).split())
        if isinstance(cause, OSError) and is_full_disk(cause):
            words = full_disk(cause, "nothing has been trained yet")
        if not isinstance(cause, RunError | ValueError | OSError | InstantiationException | MisconfigurationException):
            given = ", ".join(f"{key}={value}" for key, value in values.items())
            words = f"{type(cause).__name__}: {words} (given {given})"
        raise RunError(f"{section}: {words}") from error


def train(plan: Plan, run: RunDir) -> dict[str, Any]:
    """Trains from the newest valid checkpoint, or from the start, and evaluates; returns what result.json is to hold.

    Of several processes that train one run, the first alone writes and evaluates in the end; the others return {}.

    Raises:
        RunError: for a full disk.
        SystemExit: with `TERMINATED` after SIGTERM or SIGUSR2 (a checkpoint has been saved), `INTERRUPTED` after
            Ctrl-C; of further processes with 0, since the first one tells.
    """
    with explain_full_disk(f"{run.path} stands at its last checkpoint"), exit_on_signals(), _own_environment(run):
        first = plan.trainer.is_global_zero
        loader = plan.data.train_loader(plan.config["seed"], plan.trainer.global_rank, plan.trainer.world_size)
        start = newest_valid(run.checkpoints)
        rows: list[dict[str, Any]] = []
        step = 0
        if start is not None:
            states = start[1]["callbacks"]
            rows, step = states[plan.recorder.state_key]["rows"], start[1]["global_step"]
            position = states[plan.checkpoints.state_key]["position"]
            assert isinstance(loader.sampler, BatchSampler)
            loader.sampler.start_at(position["epoch"], position["batch"])
            if first:
                run.note_resumed(step)
                print(f"goes on from epoch {position['epoch']}, step {step}", file=sys.stderr)
                before, now = states[plan.checkpoints.state_key].get("processes"), plan.trainer.world_size
                if before not in (None, now):
                    print(
                        f"warning: {now} processes go on with what {before} began: batches, their order and the weight "
                        "of each sample stay; sums are rounded in another order, and dropout draws other masks",
                        file=sys.stderr,
                    )
        if first:
            loggers = make_loggers(plan.config, run.path, run.hash, step)
            plan.trainer.loggers = loggers
            plan.recorder.begin(rows, loggers)
            if plan.columns is not None:
                plan.columns.lines.begin(step, loggers)
        try:
            if first and start is None and plan.config["protocol"]["initial"]:
                _evaluate_initial(plan)
            _fit(plan, loader, None if start is None else start[0])
            return _evaluate_and_sum_up(plan, run) if first else {}
        except Exception:
            close_failed(plan.trainer.loggers)
            raise


def _evaluate_initial(plan: Plan) -> None:
    """Evaluates the weights that the run begins with, as epoch 0."""
    protocol = plan.config["protocol"]
    for split in [protocol["select_on"], *(["test"] if protocol["test"] and protocol["select_on"] != "test" else [])]:
        metrics = evaluate(plan.config, plan.module, plan.data, split, 0)
        check_finite(metrics, split, 0, 0)
        plan.recorder.add({"epoch": 0, "step": 0, "split": split, **metrics}, plan.trainer.loggers)


def _fit(plan: Plan, loader: Any, checkpoint: Path | None) -> None:
    trainer = plan.trainer
    evaluated = plan.data.eval_loader(plan.config["protocol"]["select_on"], trainer.global_rank, trainer.world_size)
    for loading in (loader, evaluated):
        loading.worker_init_fn = left_to_the_main_process
    try:
        trainer.fit(plan.module, loader, evaluated, ckpt_path=checkpoint, weights_only=True)
    except Diverged:
        _leave_the_others()
        if not trainer.is_global_zero:
            raise SystemExit(0) from None  # the first process tells
        raise
    except NotConvergedError as error:
        raise RunError(f"attention: step {trainer.global_step}: {error}") from error
    except (OverflowError, RuntimeError) as error:
        if "overflow" not in str(error):
            raise
        # torch's own words for a step that is larger than the weights' type can hold.
        epoch, rate = trainer.current_epoch, plan.module.last_rate
        raise Diverged.at("the optimizer's step", math.inf, trainer.global_step, epoch, rate) from error
    except SIGTERMException:
        if not trainer.is_global_zero:
            raise SystemExit(0) from None
        step = trainer.global_step
        print(f"stopped by a signal at step {step}; the same command goes on from there", file=sys.stderr)
        raise SystemExit(TERMINATED) from None
    except SystemExit:
        _told_of_ctrl_c(trainer)
        raise
    _leave_the_others()


def _leave_the_others() -> None:
    """Ends what joins the processes of a run, at a point that all of them reach: a sweep's next run joins anew."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _told_of_ctrl_c(trainer: L.Trainer) -> None:
    """Says what Lightning's exit with 1 was, where it was a Ctrl-C, and exits with `INTERRUPTED`."""
    if trainer.interrupted:
        if trainer.is_global_zero:
            print("stopped by Ctrl-C; the same command goes on from the last checkpoint", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


def _evaluate_and_sum_up(plan: Plan, run: RunDir) -> dict[str, Any]:
    config, protocol, recorder = plan.config, plan.config["protocol"], plan.recorder
    epochs, steps = config["trainer"]["max_epochs"], plan.trainer.global_step
    last = {"epoch": epochs, "step": steps, "checkpoint": checkpoint_name(steps)}
    best = plan.checkpoints.best
    assert best is not None
    chosen = {name: best[name] for name in ("epoch", "step", "checkpoint")}
    places: dict[str, dict[str, Any]] = {"best": chosen, "last": last}
    for place in places.values():
        if protocol["select_on"] == "val":
            place["val"] = recorder.metrics(place["epoch"], "val")
        if protocol["test"]:
            if not recorder.metrics(place["epoch"], "test"):
                weights = read_checkpoint(run.checkpoints / place["checkpoint"])["state_dict"]
                plan.module.load_state_dict(weights)
                metrics = evaluate(config, plan.module, plan.data, "test", place["epoch"])
                check_finite(metrics, "test", place["step"], place["epoch"])
                row = {"epoch": place["epoch"], "step": place["step"], "split": "test", **metrics}
                recorder.add(row, plan.trainer.loggers)
            place["test"] = recorder.metrics(place["epoch"], "test")
        place["checkpoint"] = f"checkpoints/{place['checkpoint']}"
    plan.checkpoints.keep({Path(place["checkpoint"]).name for place in places.values()})
    if protocol["initial"]:
        found = {split: recorder.metrics(0, split) for split in ("val", "test")}
        initial = {"epoch": 0, "step": 0, **{split: metrics for split, metrics in found.items() if metrics}}
        places = {"initial": initial, **places}
    result = {
        "hash": run.hash,
        "experiment": config["experiment"],
        "label": config["label"],
        "seed": config["seed"],
        "epochs": epochs,
        "steps": steps,
        "n_params": count_parameters(plan.module),
        "data": plan.data.facts(),
        "selected_on": protocol["select_on"],
        "metric": protocol["metric"],
        # Only fp16 has them.
        **({"skipped_steps": plan.numbers.skipped} if config["trainer"]["precision"] == "fp16" else {}),
        **places,
    }
    close_loggers(plan.trainer.loggers, result)
    return result


def evaluate(config: Config, module: Classifier, data: DataModule, split: str, epoch: int) -> dict[str, float]:
    """Metrics of a module on a split, on one device, every sample once, as after so many epochs."""
    data.evaluation_epoch = max(epoch - 1, 0)
    trainer = evaluator(config)
    try:
        with at_work(f"evaluating on {split}"):
            trainer.test(module, data.eval_loader(split), verbose=False)
    except SystemExit:
        _told_of_ctrl_c(trainer)
        raise
    return module.evaluation_metrics.take()


def evaluator(config: Config) -> L.Trainer:
    """A trainer that evaluates, on one device and with the run's precision.

    Raises:
        RunError: where the environment would change it.
    """
    refuse_environment()
    trainer = L.Trainer(
        accelerator=config["trainer"]["accelerator"],
        devices=1,
        precision=PRECISIONS[config["trainer"]["precision"]],  # type: ignore[arg-type]
        deterministic=config["trainer"]["deterministic"],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    precision = config["trainer"].get("matmul_precision", "high")  # which older runs do not name
    set_matmul_precision(trainer.strategy.root_device, precision)
    return trainer


def count_parameters(module: torch.nn.Module) -> int:
    """Number of trained parameters."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def device_names(trainer: L.Trainer) -> list[str]:
    """Names of the devices that a trainer works on; other machines are taken to be like this one."""
    device = trainer.strategy.root_device
    if device.type == "cuda":
        return [torch.cuda.get_device_name(index) for index in range(trainer.num_devices)] * trainer.num_nodes
    return [device.type] * trainer.num_devices * trainer.num_nodes


def quieten() -> None:
    """Silences what Lightning says of things that are meant here."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        ".*does not have many workers.*",
        ".*`srun` command is available.*",  # who starts the processes has been settled (stopping.processes)
        ".*when logging on epoch level in distributed setting.*",  # the metrics have been shared by then
        ".*your dataloader is not resumable.*",  # the sampler is put at the right batch (BatchSampler.start_at)
        ".*Checkpoint directory .* exists and is not empty.*",
        ".*`torch.jit.script` is deprecated.*",  # which torch_geometric uses
        ".*`isinstance.treespec, LeafSpec.` is deprecated.*",
        ".*You are using `torch.load` with `weights_only=.*",
    ):
        warnings.filterwarnings("ignore", message=message)


@contextmanager
def _own_environment(run: RunDir) -> Iterator[None]:
    """Tells the run's folder to the processes that Lightning starts for further devices, and forgets them afterwards.

    Lightning leaves LOCAL_RANK and the like behind, and would take them for those of the next run of a sweep.
    """
    before = dict(os.environ)
    os.environ[RUN_FOLDER] = str(run.path)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
