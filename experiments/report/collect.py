"""Finds run folders and reads those that count: finished ones, and those that diverged, which have no result.

What does not count is listed with its reason, and breaks nothing.
"""

import json
import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

RESULT, CARD, CONFIG = "result.json", "run.json", "config.yaml"
RUN_FILES = (RESULT, CARD, CONFIG, "metrics.jsonl", "timing.jsonl")
NOT_SEARCHED = {"checkpoints", "wandb", "tensorboard"}
OFFICIAL = "_official"

Setting = str | int | float | bool | None


@dataclass(frozen=True)
class Quantity:
    """What an experiment measures on its test split; more is better.

    Attributes:
        name: the metric's name in result.json and metrics.jsonl.
        words: its name in sentences.
        unit: what its numbers are in, after the name, or "".
        points: what differences of two are in.
        scale: what a recorded number is multiplied by where it is shown.
        top: the largest number there can be, as recorded.
    """

    name: str
    words: str
    unit: str
    points: str
    scale: float
    top: float

    def number(self, value: float) -> str:
        """A recorded number as it is shown, two decimals, without the unit."""
        return f"{self.scale * value:.2f}" if math.isfinite(value) else NOTHING

    def difference(self, value: float) -> str:
        """A difference of recorded numbers, with its sign."""
        return f"{self.scale * value:+.2f}" if math.isfinite(value) else NOTHING


NOTHING = "–"
ACCURACY = Quantity("accuracy", "accuracy", " in percent", "percentage points", 100.0, 1.0)
BLEU = Quantity("bleu", "BLEU", "", "BLEU", 1.0, 100.0)
#: Of the metrics that a run has, the first of these is reported.
QUANTITIES = (ACCURACY, BLEU)


@dataclass(frozen=True)
class Protocol:
    """How the published plot script treats the runs, faults included; only for `_official` experiments.

    Attributes:
        leave_out_below: runs whose best test accuracy is not above this fraction are discarded; None for none.
        overwrite_last_point: softmax's numbers at the largest value of the first axis are replaced by Sinkhorn's.
    """

    leave_out_below: float | None = None
    overwrite_last_point: bool = False

    def words(self) -> str:
        """What is done to the numbers, in sentences."""
        parts = []
        if self.leave_out_below is not None:
            parts.append(f"Runs at or below {100 * self.leave_out_below:g} % are left out of tables and pictures.")
        if self.overwrite_last_point:
            parts.append("Softmax's last point is overwritten by Sinkhorn's.")
        if parts:
            parts.append("Comparisons use all runs and their own numbers.")
        return " ".join(parts)


@dataclass(frozen=True)
class Run:
    """A run that counts: finished, or diverged.

    Attributes:
        folder: where it lies.
        experiment: the experiment's name.
        attention: the normalizer's name.
        seed: its seed.
        settings: the configuration that makes up its identity, flattened to dotted keys.
        split: hash of the data split, None where the run card has none.
        chosen: test metric at the chosen epoch as recorded (accuracy is a fraction of 1); NaN where the run diverged.
        last: test metric at the last epoch, likewise.
        best_epoch: the chosen epoch; of a run that stopped because it diverged the last that it finished.
        last_epoch: the last epoch, as it was planned.
        selected_on: the split that chose the epoch, "val" or "test".
        selected_by: the metric that chose it.
        finished: when it finished, ISO 8601, "" where the run card does not tell.
        card: the run card.
        protocol: the published treatment that the experiment asks for, None for a sound one.
        quantity: what `chosen` and `last` are.
        initial: the same of the weights that the run began with, None where it began with random ones.
        rows: what metrics.jsonl has, where the run is none of our folders; None for a folder, which has the file.
    """

    folder: Path
    experiment: str
    attention: str
    seed: int
    settings: Mapping[str, Setting]
    split: str | None
    chosen: float
    last: float
    best_epoch: int
    last_epoch: int
    selected_on: str
    selected_by: str
    finished: str
    card: Mapping[str, Any] = field(repr=False)
    protocol: Protocol | None = None
    quantity: Quantity = ACCURACY
    initial: float | None = None
    rows: tuple[Mapping[str, Any], ...] | None = field(default=None, repr=False)

    @property
    def diverged(self) -> bool:
        """Whether it has no number, so that it ranks below every other."""
        return not math.isfinite(self.chosen)


@dataclass(frozen=True)
class Problem:
    """A folder or path that does not count.

    Attributes:
        folder: where it lies.
        experiment: the experiment's name where a run card tells it, otherwise "".
        state: one word, for example "interrupted" or "unreadable".
        reason: why, in words.
    """

    folder: Path
    experiment: str
    state: str
    reason: str


def path_words(path: Path) -> str:
    """A path as text, also where its bytes are no UTF-8, or the locale is none."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


class Unreadable(ValueError):
    """What is wrong with a file, in words."""


def collect(paths: Sequence[Path]) -> tuple[list[Run], list[Problem]]:
    """Reads every run at or below some paths; a run that is reached twice is read once.

    Args:
        paths: run folders, folders of run folders at any depth, or files in a run folder; also wandb's offline runs, or
            folders of them (those within a run's folder are copies of it, and are not looked at); also the CSV files
            that `--export` writes.

    Returns:
        The runs that count, and everything that does not.
    """
    from .exported import read_export  # which need this module
    from .offline import read_offline

    runs: list[Run] = []
    problems: list[Problem] = []
    seen: set[Path] = set()
    for path in paths:
        folders, unreachable = find_runs(path)
        problems += unreachable
        for folder in folders:
            if (real := folder.resolve()) in seen:
                continue
            seen.add(real)
            if folder.is_file():
                exported, unreadable = read_export(folder)
                runs, problems = runs + exported, problems + unreadable
                continue
            found = read_offline(folder) if is_offline(folder) else read_run(folder)
            if isinstance(found, Run):
                runs.append(found)
            else:
                problems.append(found)
    return runs, problems


def is_offline(folder: Path) -> bool:
    """Whether a folder is an offline run of wandb, as it lies in a run's `wandb/` or is collected from there."""
    return folder.name.startswith("offline-run-") and any(folder.glob("run-*.wandb"))


def find_runs(path: Path) -> tuple[list[Path], list[Problem]]:
    """The run folders and files of exported runs at or below a path, sorted, and what could not be searched."""
    from .exported import is_export

    if not path.exists():
        return [], [Problem(path, "", "missing", "there is nothing at this path")]
    if path.is_file():
        if path.name in RUN_FILES:
            return [path.parent], []
        if is_export(path):
            return [path], []
        known = f"{', '.join(RUN_FILES)}, or a CSV file that --export wrote"
        return [], [Problem(path, "", "unreadable", f"a file of a run is one of {known}")]
    problems: list[Problem] = []

    def note(error: OSError) -> None:
        problems.append(Problem(Path(error.filename), "", "unreadable", _reason(error)))

    found = []
    visited: set[str] = set()
    for place, folders, files in os.walk(path, onerror=note, followlinks=True):
        real = os.path.realpath(place)
        if real in visited:
            folders.clear()
            continue
        visited.add(real)
        found += [Path(place, name) for name in files if is_export(Path(place, name))]
        if {RESULT, CARD, CONFIG} & set(files) or is_offline(Path(place)):
            found.append(Path(place))
            folders.clear()
        folders[:] = [name for name in folders if name not in NOT_SEARCHED]
    return sorted(found), problems


def read_run(folder: Path) -> Run | Problem:
    """A run that counts, or why the folder holds none."""
    experiment = ""
    try:
        card = _mapping(_json(folder / CARD), CARD)
        experiment = _text(card, "experiment", CARD)
        if not (folder / RESULT).exists():
            diverged = card.get("state") == "diverged"
            return diverged_run(folder, card) if diverged else _unfinished(folder, experiment, card)
        result = _mapping(_json(folder / RESULT), RESULT)
        return run_of(folder, card, result)
    except Unreadable as error:
        return Problem(folder, experiment, "unreadable", str(error))


def run_of(
    folder: Path,
    card: Mapping[str, Any],
    result: Mapping[str, Any],
    config: Mapping[str, Any] | None = None,
    rows: tuple[Mapping[str, Any], ...] | None = None,
) -> Run | Problem:
    """The run that a run card and a result tell of; a problem where it has no test metrics.

    Args:
        folder: where they were found.
        card: the run card.
        result: what came out.
        config: the resolved configuration, None for that of the folder's file.
        rows: what metrics.jsonl would have, None for that of the folder's file.

    Raises:
        Unreadable: for what is missing or makes no sense.
    """
    if _text(result, "hash", RESULT) != _text(card, "hash", CARD):
        raise Unreadable(f"{RESULT} and {CARD} belong to different runs: their hashes differ")
    experiment = _text(card, "experiment", CARD)
    settings, attention = _settings(card)
    if settings.get("protocol.test") is False:
        return Problem(folder, experiment, "untested", "finished, but protocol.test=false: no test metrics")
    quantity = _quantity(result)
    return Run(
        folder=folder,
        experiment=experiment,
        attention=attention,
        seed=_whole(result, "seed", RESULT),
        settings=settings,
        split=_split(card),
        chosen=_metric(result, "best", quantity),
        last=_metric(result, "last", quantity),
        best_epoch=_whole(_mapping(result["best"], "best"), "epoch", f"best in {RESULT}"),
        last_epoch=_whole(_mapping(result["last"], "last"), "epoch", f"last in {RESULT}"),
        selected_on=_text(result, "selected_on", RESULT),
        selected_by=_text(result, "metric", RESULT),
        finished=_finished(card),
        card=card,
        protocol=_protocol(folder, config) if experiment.endswith(OFFICIAL) else None,
        quantity=quantity,
        initial=_metric(result, "initial", quantity) if "initial" in result else None,
        rows=rows,
    )


def diverged_run(
    folder: Path,
    card: Mapping[str, Any],
    config: Mapping[str, Any] | None = None,
    rows: tuple[Mapping[str, Any], ...] | None = None,
    best_epoch: int | None = None,
) -> Run:
    """A run that stopped because it diverged: it counts, and ranks below every other; see `run_of`."""
    experiment = _text(card, "experiment", CARD)
    settings, attention = _settings(card)
    translates = any(key.startswith("data.generation.") for key in settings)
    return Run(
        folder=folder,
        experiment=experiment,
        attention=attention,
        seed=_whole(card, "seed", CARD),
        settings=settings,
        split=_split(card),
        chosen=math.nan,
        last=math.nan,
        best_epoch=_finished_epochs(folder) if best_epoch is None else best_epoch,
        last_epoch=_whole(settings, "trainer.max_epochs", f"identity in {CARD}"),
        selected_on=str(settings.get("protocol.select_on", "val")),
        selected_by=str(settings.get("protocol.metric", "accuracy")),
        finished=_finished(card),
        card=card,
        protocol=_protocol(folder, config) if experiment.endswith(OFFICIAL) else None,
        rows=rows,
        quantity=BLEU if translates else ACCURACY,
    )


def _settings(card: Mapping[str, Any]) -> tuple[dict[str, Setting], str]:
    """The flattened identity that a run card holds, and the name of the attention in it."""
    settings = _flat(_mapping(_need(card, "identity", CARD), f"identity in {CARD}"))
    attention = settings.get("attention.name")
    if not isinstance(attention, str):
        raise Unreadable(f"{CARD} has no attention.name")
    return settings, attention


def _unfinished(folder: Path, experiment: str, card: Mapping[str, Any]) -> Problem:
    attempts = card.get("attempts")
    last = attempts[-1] if isinstance(attempts, list) and attempts and isinstance(attempts[-1], dict) else {}
    state = str(card.get("state", "unfinished"))
    again = f"; go on with: {card.get('command', 'the command that started it')}"
    if state == "running" and _is_gone(last):
        state = "interrupted"
        reason = f"process {last.get('pid')} on {last.get('host')}, started {last.get('started')}, is gone{again}"
    elif state == "running":
        where = f"on {last.get('host')} (process {last.get('pid')})"
        reason = f"{_progress(folder, card)}since {last.get('started')} {where}"
    elif state == "finished":
        state, reason = "unreadable", f"the run card says finished, but {RESULT} is not there{again}"
    else:
        reason = f"{last.get('message') or 'without a message'}, {last.get('ended') or 'time unknown'}{again}"
    return Problem(folder, experiment, state, reason)


def _progress(folder: Path, card: Mapping[str, Any]) -> str:
    """Which epoch a run is at, "" where nothing tells."""
    identity = card.get("identity")
    epochs = _flat(identity).get("trainer.max_epochs", "?") if isinstance(identity, dict) else "?"
    done = _finished_epochs(folder)
    return f"epoch {done} of {epochs}, " if done else ""


def _finished_epochs(folder: Path) -> int:
    """Epochs that a run has finished, 0 where nothing tells."""
    try:
        return int(json.loads((folder / "timing.jsonl").read_bytes().splitlines()[-1])["epoch"])
    except (OSError, ValueError, LookupError, TypeError):
        return 0


def _is_gone(attempt: Mapping[str, Any]) -> bool:
    """Whether an attempt's process surely runs no more: only a process of this machine can be asked for."""
    pid = attempt.get("pid")
    if attempt.get("host") != socket.gethostname() or not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(f"{path.name}: {_reason(error)}") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise Unreadable(f"{path.name} is no valid JSON ({error}): it was cut or changed") from None


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else "it is not UTF-8 text"


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Unreadable(f"{where} holds {type(value).__name__} where an object belongs")
    return value


def _need(mapping: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in mapping:
        raise Unreadable(f"{where} has no {key!r}")
    return mapping[key]


def _text(mapping: Mapping[str, Any], key: str, where: str) -> str:
    value = _need(mapping, key, where)
    if not isinstance(value, str):
        raise Unreadable(f"{where}: {key!r} is {value!r}, not a text")
    return value


def _whole(mapping: Mapping[str, Any], key: str, where: str) -> int:
    value = _need(mapping, key, where)
    if not isinstance(value, int) or isinstance(value, bool):
        raise Unreadable(f"{where}: {key!r} is {value!r}, not a whole number")
    return value


def _quantity(result: Mapping[str, Any]) -> Quantity:
    """Which metric of the test split is reported; accuracy where there is none, which is then missed by name."""
    best = result.get("best")
    test = best.get("test") if isinstance(best, dict) else None
    return next((known for known in QUANTITIES if isinstance(test, dict) and known.name in test), ACCURACY)


def _metric(result: Mapping[str, Any], which: str, quantity: Quantity) -> float:
    """A test metric at an epoch; NaN for null, NaN and infinities: the run diverged."""
    where = f"{which} in {RESULT}"
    test = _mapping(_need(_mapping(_need(result, which, RESULT), where), "test", where), f"test of {where}")
    value = _need(test, quantity.name, f"test of {where}")
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise Unreadable(f"test of {where}: {quantity.name} is {value!r}, not a number")
    if not math.isfinite(value):
        return math.nan
    if not 0.0 <= value <= quantity.top:
        kind = "a fraction of 1" if quantity.top == 1 else f"between 0 and {quantity.top:g}"
        raise Unreadable(f"test of {where}: {quantity.name} is {value!r}, not {kind}")
    return float(value)


def _split(card: Mapping[str, Any]) -> str | None:
    data = card.get("data")
    split = data.get("split_hash") if isinstance(data, dict) else None
    return split if isinstance(split, str) and split else None


def _finished(card: Mapping[str, Any]) -> str:
    attempts = card.get("attempts")
    last = attempts[-1] if isinstance(attempts, list) and attempts else {}
    ended = last.get("ended") if isinstance(last, dict) else None
    return ended if isinstance(ended, str) else ""


def _protocol(folder: Path, config: Mapping[str, Any] | None) -> Protocol | None:
    """The `report` group of the configuration: it cannot change a run's numbers, so the identity leaves it out."""
    try:
        if config is None:
            config = _mapping(yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8")), CONFIG)
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(f"{CONFIG}: {_reason(error)}") from None
    except yaml.YAMLError as error:
        raise Unreadable(f"{CONFIG} is no valid YAML ({' '.join(str(error).split())})") from None
    asked = _mapping(config.get("report") or {}, f"report in {CONFIG}")
    below, overwrite = asked.get("leave_out_below"), asked.get("overwrite_last_point", False)
    if below is not None and (isinstance(below, bool) or not isinstance(below, int | float)):
        raise Unreadable(f"{CONFIG}: report.leave_out_below is {below!r}, not a number")
    if not isinstance(overwrite, bool):
        raise Unreadable(f"{CONFIG}: report.overwrite_last_point is {overwrite!r}, neither true nor false")
    return Protocol(None if below is None else float(below), overwrite)


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Setting]:
    flat: dict[str, Setting] = {}
    for key, value in mapping.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            flat[f"{prefix}{key}"] = json.dumps(value)
        else:
            flat[f"{prefix}{key}"] = value
    return flat
