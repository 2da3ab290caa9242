"""The run that another one begins with (`init_from`): found, or trained first."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from ..config import origin
from ..errors import RunError
from .run_dir import RunDir, train_command


class Origin(NamedTuple):
    """What a run takes from the one that it begins with: the checkpoint of its weights, the first rate, its data."""

    checkpoint: Path
    rate: float
    data: dict[str, Any]


Train = Callable[[dict[str, Any], RunDir, list[str]], object]


def finished_origin(config: dict[str, Any], train: Train) -> Origin:
    """The last checkpoint of the run that `init_from` names, which is trained now where it is not finished.

    All runs that begin with it share it: one trains it, the others wait.

    Args:
        config: resolved, of the run that begins with it.
        train: trains a run, by its resolved configuration, its folder and its overrides.

    Raises:
        RunError: where several processes train the run, and the other run is not finished.
    """
    before, words = origin(config)
    run = RunDir.of(before)
    if not run.finished:
        if config["trainer"]["devices"] * config["trainer"]["num_nodes"] > 1:
            raise RunError(f"init_from: first train the run that this one begins with: {train_command(words)}")
        run.path.mkdir(parents=True, exist_ok=True)
        with FileLock(run.path / ".wanted.lock"):
            with FileLock(run.path / ".lock"):  # where it is trained for itself
                pass
            if not run.finished:
                print(f"first the run that this one begins with: {run.path}", file=sys.stderr)
                train(before, run, words)
    lines = (run.path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    last = [row["lr"] for row in map(json.loads, lines) if "lr" in row][-1]
    result = run.result()
    return Origin(run.path / result["last"]["checkpoint"], last * config["init_from"]["rate"], result["data"])
