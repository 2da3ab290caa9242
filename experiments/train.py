"""Trains one run, or a sweep with -m: `python -m experiments.train experiment=mnist_patches attention=sinkhorn seed=0`.

A run that is finished is left alone; one that was stopped goes on from its last checkpoint. Exit codes: 0 finished, 1
something is wrong (one message says what; in a sweep after all other runs), 130 stopped by Ctrl-C, 143 stopped by
SIGTERM, with a checkpoint.
"""

import functools
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import hydra
import hydra._internal.utils as hydra_utils
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import run_job
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .command import end_with_the_sweep, is_orphan
from .config import CONFIGS, in_one_sentence, refuse_ignored, register, resolve
from .errors import Diverged, RunError
from .runners.run_dir import (
    RUN_FOLDER,
    RunDir,
    process_rank,
    read_config,
    refuse_left_over_rank,
    train_command,
)

INTERRUPTED = 128 + signal.SIGINT
# The metrics of a result that are told, the first that it has, and their digits.
SHOWN = {"accuracy": 4, "bleu": 2, "loss": 4}
# Hydra's own sweeper runs what it is told; every other one searches by what the runs return.
BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
# What a search is told of a run that diverged, by the metric that it goes by; 0 for those of which more is better.
WORST = {"loss": math.inf}


@dataclass(frozen=True)
class Outcome:
    """What became of a run: its folder, its result, and whether it had been finished before."""

    folder: Path
    result: dict[str, Any]
    was_finished: bool

    @property
    def objective(self) -> float | None:
        """What a sweeper that searches is told: the metric of the chosen epoch on the split that chose it.

        That is validation, but for `*_official` experiments. None in a further process of a run, which has no result.
        """
        if not self.result:
            return None
        return float(self.result["best"][self.result["selected_on"]][self.result["metric"]])


def execute(config: DictConfig, overrides: Sequence[str]) -> Outcome:
    """Trains the run of a composed configuration to its end.

    Args:
        config: composed, unresolved.
        overrides: the words after `python -m experiments.train` that make it.

    Raises:
        RunError: for what the user can put right; no folder has been made where the configuration was at fault.
    """
    refuse_ignored(config, overrides)
    resolved = resolve(config)
    return _train(resolved, RunDir.of(resolved), overrides)


def _train(resolved: dict[str, Any], run: RunDir, overrides: Sequence[str]) -> Outcome:
    """Trains a run, unless it is finished."""
    refuse_left_over_rank(resolved["trainer"])
    if run.finished:
        result = run.result()
        say(f"finished already, nothing to do: {run.path}: {_in_words_if_whole(result, run)}; {_longer(resolved)}")
        return Outcome(run.path, result, True)
    if resolved["engine"] == "fairseq":
        return _with_fairseq(resolved, run, overrides)
    # Imported only where there is something to train: it takes seconds.
    import torch

    from .runners import lightning
    from .runners.origin import finished_origin

    begin = finished_origin(resolved, _train) if resolved["init_from"] is not None else None
    plan = lightning.prepare(resolved, run, begin)
    if process_rank() > 0:
        lightning.train(plan, run)
        return Outcome(run.path, {}, False)
    facts = {"data": plan.data.facts(), "n_params": lightning.count_parameters(plan.module)}
    say(f"run: {run.path}")
    devices = lightning.device_names(plan.trainer)
    with run.attempt(train_command(overrides), facts, devices, torch.get_num_threads()):
        result = lightning.train(plan, run)
        run.finish(result)
    say(f"finished: {run.path}: {in_words(result)}")
    return Outcome(run.path, result, False)


def _with_fairseq(resolved: dict[str, Any], run: RunDir, overrides: Sequence[str]) -> Outcome:
    from .runners import fairseq

    result = fairseq.train(resolved, run, train_command(overrides))
    if result:
        say(f"finished: {run.path}: {in_words(result)}")
    return Outcome(run.path, result, False)


def _in_words_if_whole(result: dict[str, Any], run: RunDir) -> str:
    try:
        return in_words(result)
    except (LookupError, TypeError, StopIteration):
        file = run.path / "result.json"
        raise RunError(f"{file} is no result of a run: remove it and give the run's command again") from None


def _longer(config: dict[str, Any]) -> str:
    """How to train for longer than a run that is finished."""
    epochs = config["trainer"]["max_epochs"]
    return f"to train longer give more than trainer.max_epochs={epochs}, which is a run of its own, from the start"


def in_words(result: dict[str, Any]) -> str:
    """A result in half a line."""
    best, last = result["best"], result["last"]
    split = "test" if "test" in best else result["selected_on"]
    metric, digits = next((name, digits) for name, digits in SHOWN.items() if name in best[split])
    return (
        f"{split} {metric} {best[split][metric]:.{digits}f} at the epoch chosen on {result['selected_on']} "
        f"({best['epoch']}), {last[split][metric]:.{digits}f} at the last ({last['epoch']})"
    )


def say(words: str) -> None:
    """Prints to the error stream, which progress uses too."""
    print(words, file=sys.stderr, flush=True)


def main() -> None:
    """The command, or one of the further processes that Lightning starts with it for further devices.

    Those take the configuration that the first process resolved and stored, whatever the command line says: it may be
    that of a whole sweep.
    """
    try:
        if RUN_FOLDER in os.environ and process_rank() > 0:
            config = read_config(Path(os.environ[RUN_FOLDER]))
            execute(OmegaConf.create(config), [])
        else:
            register()
            if {"-h", "--help"} & set(sys.argv[1:]) and not any(word.startswith("experiment=") for word in sys.argv):
                print(_help())
                return
            with _hydra_in_one_sentence():
                _command()
    except KeyboardInterrupt:  # elsewhere than in training and evaluation, which end by themselves
        say("stopped by Ctrl-C; the same command goes on from the last checkpoint")
        raise SystemExit(INTERRUPTED) from None


def _help() -> str:
    """What there is to name first; Hydra's own help shows one experiment's settings, and needs its name."""
    from .report.catalogue import catalogue

    experiments = "\n".join(f"  {entry.name:30} {entry.words}" for entry in catalogue())
    return (
        f"usage: python -m experiments.train [-m] experiment=NAME [key=value ...]\n\n{__doc__}\n"
        f"experiments, whose settings `python -m experiments.train experiment=NAME --help` shows:\n{experiments}"
    )


@contextmanager
def _hydra_in_one_sentence() -> Iterator[None]:
    """What Hydra objects to is shown as everything else is; HYDRA_FULL_ERROR=1 shows all of it."""
    report = hydra_utils.run_and_report

    def shortened(work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            hydras = isinstance(error, HydraException | OmegaConfBaseException | ValueError) and not _ours(error)
            if os.environ.get("HYDRA_FULL_ERROR") == "1" or not (isinstance(error, HydraException) or hydras):
                return report(functools.partial(_raise, error))
            say(f"error: {in_one_sentence(error)}")
            raise SystemExit(1) from None

    hydra_utils.run_and_report = shortened  # type: ignore[assignment]
    try:
        yield
    finally:
        hydra_utils.run_and_report = report


def _ours(error: BaseException) -> bool:
    """Whether an error comes out of a run, and not of Hydra's reading of the command line."""
    places = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_name == run_job.__name__ for frame, _ in places)


def _raise(error: Exception) -> NoReturn:
    raise error


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")
def _command(config: DictConfig) -> float | None:
    hydra_config = HydraConfig.get()
    overrides = list(hydra_config.overrides.task)
    if hydra_config.mode != RunMode.MULTIRUN:
        try:
            _refuse_what_only_sweeps_take(hydra_config.overrides.hydra)
            return execute(config, overrides).objective
        except RunError as error:
            say(f"error: {error}")
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                raise
            raise SystemExit(1) from None
    end_with_the_sweep()
    try:
        return execute(config, overrides).objective
    except SystemExit as stop:
        if is_orphan():  # nobody is left to be told, and the next run of the sweep would begin here
            os._exit(stop.code if isinstance(stop.code, int) else 1)
        raise
    except RunError as error:
        # Hydra shows the first failure of a sweep when all runs are over; each is shown here where it happens.
        say(f"error in {train_command(overrides)}: {error}")
        searching = hydra_config.sweeper.get("_target_") != BASIC_SWEEPER
        if searching and isinstance(error, Diverged):  # an answer, on which a search goes on
            return WORST.get(config.protocol.metric, 0.0)
        raise


def _refuse_what_only_sweeps_take(overrides: Sequence[str]) -> None:
    for word in overrides:
        if word.lstrip("+").startswith(("hydra/launcher=", "hydra/sweeper=")):
            raise RunError(
                f"{word} acts on sweeps alone, and without -m there is none: this run would be trained here. Give "
                "`python -m experiments.train -m …`, or leave the word out"
            )


if __name__ == "__main__":
    try:
        main()
    except SystemExit as stop:
        if stop.code == INTERRUPTED:  # once more while Python ends would show what it is just putting away
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise
