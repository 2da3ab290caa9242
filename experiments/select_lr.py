"""Chooses learning rates on validation: `python -m experiments.select_lr runs/mnist_patches_lr`.

Reads the validation rows of finished runs and nothing else. For each attention (and patch size, where the model has
patches) the rate with the lowest validation loss is chosen: of each run the lowest of its epochs, then the mean over
the seeds, the same for every rate.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import track

from .command import finish
from .errors import RunError
from .runners.run_dir import identity, read_config, read_record

Cell = tuple[int | None, str]


@dataclass(frozen=True)
class Trial:
    """One run's best validation loss, and its best validation accuracy; `settings` are all others of its identity."""

    patch_size: int | None
    attention: str
    rate: float
    seed: int
    loss: float
    accuracy: float
    settings: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True)
class Candidate:
    """A rate's means over the seeds."""

    rate: float
    loss: float
    accuracy: float
    seeds: tuple[int, ...]


def read_trials(folder: Path) -> list[Trial]:
    """The runs of a folder that are finished, or have diverged: those have an infinite loss.

    Raises:
        RunError: names a run whose files are damaged.
    """
    trials = []
    console = Console(stderr=True)
    folders = sorted({file.parent for name in ("result.json", "run.json") for file in folder.glob(f"*/{name}")})
    for run in track(folders, "runs", console=console, transient=True, disable=not console.is_terminal):
        diverged = not (run / "result.json").is_file()
        if diverged and read_record(run / "run.json").get("state") != "diverged":
            continue
        config = read_config(run)
        try:
            lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            rows = [row for row in map(json.loads, lines) if row["split"] == "val"]
            losses = [math.inf] if diverged else [row["loss"] for row in rows]
            trials.append(
                Trial(
                    config["model"].get("patch_size"),
                    config["attention"]["name"],
                    config["optimizer"]["lr"],
                    config["seed"],
                    # Runs of before NaN stopped a run have it among their losses, as NaN or null.
                    min((loss for loss in losses if loss is not None and not math.isnan(loss)), default=math.inf),
                    math.nan if diverged else max(row["accuracy"] for row in rows),
                    frozenset(_settings(identity(config))),
                )
            )
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise RunError(
                f"{run} has no validation rows that can be read, or another configuration than a run of a "
                f"choice of rates ({type(error).__name__}: {error}): move it away or run it again"
            ) from error
    return trials


def _settings(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and values but for the rate and the seed."""
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _settings(value, f"{key}.")
        elif key not in ("optimizer.lr", "seed"):
            yield key, str(value)


def candidates(trials: Iterable[Trial]) -> dict[Cell, list[Candidate]]:
    """All rates of each (patch size or None, attention), the chosen one first.

    Raises:
        RunError: where a rate was tried on other seeds than its rivals, or in runs that differ in more than that, so
            that their means cannot be compared, or none is left that trains.
    """
    trials = list(trials)
    first: dict[Cell, Trial] = {}
    for trial in trials:
        other = first.setdefault((trial.patch_size, trial.attention), trial)
        if differing := sorted(dict(trial.settings ^ other.settings)):
            key = differing[0]
            values = sorted(str(dict(one.settings).get(key)) for one in (trial, other))
            raise RunError(
                f"{_words((trial.patch_size, trial.attention))}: its rates were tried with {key}={values[0]} and "
                f"{key}={values[1]}: move the runs of one of them away"
            )
    cells: dict[Cell, dict[float, dict[int, Trial]]] = defaultdict(lambda: defaultdict(dict))
    for trial in trials:
        if cells[trial.patch_size, trial.attention][trial.rate].setdefault(trial.seed, trial) != trial:
            raise RunError(
                f"{_words((trial.patch_size, trial.attention))}, rate {trial.rate:g}, seed {trial.seed} was run with "
                "two configurations: remove one of the folders"
            )
    found = {}
    for cell, rates in cells.items():
        seeds = {tuple(sorted(by_seed)) for by_seed in rates.values()}
        if len(seeds) > 1:
            raise RunError(f"{_words(cell)}: its rates were tried on different seeds; finish the sweep")
        found[cell] = sorted((_means(rate, list(by_seed.values())) for rate, by_seed in rates.items()), key=_loss)
        if not math.isfinite(found[cell][0].loss):
            raise RunError(f"{_words(cell)}: at every rate that was tried a run diverged; try lower ones")
    return dict(sorted(found.items(), key=lambda item: (item[0][0] or 0, item[0][1])))


def _words(cell: Cell) -> str:
    patch_size, attention = cell
    return attention if patch_size is None else f"patch {patch_size}, {attention}"


def _means(rate: float, trials: Sequence[Trial]) -> Candidate:
    mean_loss = sum(trial.loss for trial in trials) / len(trials)
    mean_accuracy = sum(trial.accuracy for trial in trials) / len(trials)
    return Candidate(rate, mean_loss, mean_accuracy, tuple(sorted(trial.seed for trial in trials)))


def _loss(candidate: Candidate) -> float:
    return candidate.loss


def as_yaml(cells: dict[Cell, list[Candidate]]) -> str:
    """The table `learning_rates` for an experiment's file, the numbers of the choice as comments."""
    table: dict[str, Any] = {}
    lines = []
    for (patch_size, attention), tried in cells.items():
        if patch_size is None:
            table[attention] = tried[0].rate
        else:
            table.setdefault(attention, {})[f"patch{patch_size}"] = tried[0].rate
        numbers = "; ".join(f"{c.rate:g}: {_outcome(c)}" for c in sorted(tried, key=_rate))
        lines.append(f"  # {_words((patch_size, attention))}, seeds {' '.join(map(str, tried[0].seeds))}: {numbers}")
    chosen = yaml.safe_dump(table, sort_keys=False)
    head = "learning_rates:\n  # rate: mean of the lowest validation loss (of the highest validation accuracy)\n"
    return head + "\n".join(lines) + "\n" + "".join(f"  {line}\n" for line in chosen.splitlines())


def _outcome(candidate: Candidate) -> str:
    return f"{candidate.loss:.4f} ({100 * candidate.accuracy:.1f} %)" if math.isfinite(candidate.loss) else "diverged"


def _rate(candidate: Candidate) -> float:
    return candidate.rate


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m experiments.select_lr", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the runs of the choice, runs/mnist_patches_lr")
    options = parser.parse_args(arguments)
    try:
        trials = read_trials(options.folder)
        if not trials:
            raise RunError(f"no finished run in {options.folder}")
        print(as_yaml(candidates(trials)), end="")
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    finish(main)
