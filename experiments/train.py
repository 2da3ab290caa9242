"""Trains one run, or a sweep with -m: `python -m experiments.train experiment=mnist_patches attention=sinkhorn seed=0`.

A run that is finished is left alone; one that was stopped goes on from its last checkpoint. Exit codes: 0 finished, 1
something is wrong (one message says what; in a sweep after all other runs), 130 stopped by Ctrl-C, 143 stopped by
SIGTERM, with a checkpoint.
"""

import math
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from .config import CONFIGS, register, resolve
from .errors import Diverged, RunError
from .runners.run_dir import RUN_FOLDER, RunDir, process_rank, read_config, train_command

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
    resolved = resolve(config)
    return _train(resolved, RunDir.of(resolved), overrides)


def _train(resolved: dict[str, Any], run: RunDir, overrides: Sequence[str]) -> Outcome:
    """Trains a run, unless it is finished."""
    if run.finished:
        say(f"finished already, nothing to do: {run.path}")
        return Outcome(run.path, run.result(), True)
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


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="train")
def _command(config: DictConfig) -> float | None:
    hydra_config = HydraConfig.get()
    overrides = list(hydra_config.overrides.task)
    if hydra_config.mode != RunMode.MULTIRUN:
        try:
            return execute(config, overrides).objective
        except RunError as error:
            say(f"error: {error}")
            if os.environ.get("HYDRA_FULL_ERROR") == "1":
                raise
            raise SystemExit(1) from None
    try:
        return execute(config, overrides).objective
    except RunError as error:
        # Hydra shows the first failure of a sweep when all runs are over; each is shown here where it happens.
        say(f"error in {train_command(overrides)}: {error}")
        searching = hydra_config.sweeper.get("_target_") != BASIC_SWEEPER
        if searching and isinstance(error, Diverged):  # an answer, on which a search goes on
            return WORST.get(config.protocol.metric, 0.0)
        raise


if __name__ == "__main__":
    try:
        main()
    except SystemExit as stop:
        if stop.code == INTERRUPTED:  # once more while Python ends would show what it is just putting away
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise
