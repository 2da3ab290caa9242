"""Finished runs as small files for git: a CSV for each experiment, a line for each run, written by `--export FOLDER`.

A line has what a report needs of a run: its identity and test metrics, what it was trained on and by, its curve. The
first column is a checksum of the others, so that no number is changed by hand in silence. Reports read such files as
they read run folders, so results of several people merge: of the same run's lines the one that came first counts.
"""

import csv
import hashlib
import io
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import RunError
from ..files import write_atomic
from .collect import Problem, Run, Unreadable, diverged_run, run_of
from .cost import Pace, read_pace
from .curves import METRICS

COLUMNS = (
    *("checksum", "hash", "experiment", "label", "seed", "state", "selected_on", "metric", "best", "last", "initial"),
    *("finished", "seconds_per_epoch", "samples_per_second", "devices", "engines", "versions", "split", "command"),
    *("identity", "report", "curve"),
)
#: Columns that hold JSON.
STRUCTURED = ("best", "last", "initial", "devices", "engines", "versions", "identity", "report", "curve")


def export(runs: Iterable[Run], folder: Path) -> dict[Path, int]:
    """Adds runs to the files in a folder; a run that is there already stays as it is.

    Args:
        runs: that count.
        folder: of the files, made if it is missing.

    Returns:
        How many runs each file now has.

    Raises:
        RunError: for a file there that cannot be read.
    """
    by_experiment: dict[str, dict[str, dict[str, Any]]] = {}
    for run in runs:
        record = record_of(run)
        by_experiment.setdefault(run.experiment, {})[record["hash"]] = record
    written = {}
    for experiment, found in sorted(by_experiment.items()):
        path = folder / f"{experiment}.csv"
        known: dict[str, dict[str, Any]] = {}
        if path.exists():
            try:
                known = {record["hash"]: record for record in read_records(path)}
            except Unreadable as error:
                raise RunError(f"{path}: {error}; mend or remove it") from None
        merged = found | known
        ordered = sorted(merged.values(), key=lambda record: (record["label"], record["seed"], record["hash"]))
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, as_text(ordered))
        written[path] = len(ordered)
    return written


def record_of(run: Run) -> dict[str, Any]:
    """A run's line, without its checksum."""
    card, pace = run.card, read_pace(run)
    attempts = [each for each in card.get("attempts", []) if isinstance(each, dict)]
    engines = [attempt.get(key) for attempt in attempts for key in ("cpu_engine", "device_engine")]

    def metrics(epoch: int, value: float | None) -> dict[str, Any] | None:
        return None if value is None else {"epoch": epoch, run.quantity.name: value if math.isfinite(value) else None}

    return {
        "hash": card["hash"],
        "experiment": run.experiment,
        "label": str(card.get("label", "")),
        "seed": run.seed,
        "state": "diverged" if run.diverged else "finished",
        "selected_on": run.selected_on,
        "metric": run.selected_by,
        "best": metrics(run.best_epoch, run.chosen),
        "last": metrics(run.last_epoch, run.last),
        "initial": metrics(0, run.initial),
        "finished": run.finished,
        "seconds_per_epoch": None if pace is None else pace.seconds,
        "samples_per_second": None if pace is None or math.isnan(pace.samples_per_second) else pace.samples_per_second,
        "devices": sorted({str(name) for attempt in attempts for name in attempt.get("devices") or []}),
        "engines": list(dict.fromkeys(str(engine) for engine in engines if engine is not None)),
        "versions": {**card.get("versions", {}), "commit": str((card.get("git") or {}).get("commit", ""))},
        "split": run.split,
        "command": str(card.get("command", "")),
        "identity": card["identity"],
        "report": {} if run.protocol is None else vars(run.protocol),
        "curve": _curve(run),
    }


def _curve(run: Run) -> dict[str, list[Any]]:
    """What metrics.jsonl says of the split that chose the epoch, a list for each of its names."""
    rows: Iterable[Any] = run.rows or ()
    if run.rows is None:
        try:
            rows = [json.loads(line) for line in (run.folder / METRICS).read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError):
            return {}
    of_split = [row for row in rows if isinstance(row, dict) and row.get("split") == run.selected_on]
    return {name: [row.get(name) for row in of_split] for name in ("epoch", "step", "loss", run.quantity.name)}


def as_text(records: Sequence[dict[str, Any]]) -> str:
    """The file's text."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for record in records:
        cells = [_cell(record[name]) for name in COLUMNS[1:]]
        writer.writerow([checksum(cells), *cells])
    return text.getvalue()


def checksum(cells: Sequence[str]) -> str:
    """Twelve digits of the sha256 of a line's other cells."""
    return hashlib.sha256("\x1f".join(cells).encode()).hexdigest()[:12]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return (
        value
        if isinstance(value, str)
        else json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    )


def is_export(path: Path) -> bool:
    """Whether a file is one of these."""
    if path.suffix != ".csv":
        return False
    try:
        with path.open(encoding="utf-8") as file:
            return file.readline().rstrip("\n") == ",".join(COLUMNS)
    except (OSError, UnicodeDecodeError):
        return False


def read_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a file.

    Raises:
        Unreadable: says which line is not as it was written.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise Unreadable(f"it cannot be read: {error}") from None
    if not lines or tuple(lines[0]) != COLUMNS:
        raise Unreadable(f"its columns are not {', '.join(COLUMNS)}")
    records = []
    for number, (told, *cells) in enumerate(lines[1:], 2):
        if len(cells) != len(COLUMNS) - 1 or told != checksum(cells):
            raise Unreadable(f"line {number} is not as it was written: its checksum does not fit")
        record: dict[str, Any] = dict(zip(COLUMNS[1:], cells, strict=True))
        for name in (*STRUCTURED, "seed", "seconds_per_epoch", "samples_per_second"):
            record[name] = json.loads(record[name]) if record[name] else None
        records.append(record)
    return records


def read_export(path: Path) -> tuple[list[Run], list[Problem]]:
    """The runs of a file, or why it cannot be read."""
    try:
        records = read_records(path)
    except Unreadable as error:
        return [], [Problem(path, path.stem, "unreadable", str(error))]
    runs: list[Run] = []
    problems: list[Problem] = []
    for record in records:
        try:
            found = _run(path, record)
        except Unreadable as error:
            found = Problem(path, record["experiment"], "unreadable", f"{record['label']}: {error}")
        if isinstance(found, Run):
            runs.append(found)
        else:
            problems.append(found)
    return runs, problems


def _run(path: Path, record: dict[str, Any]) -> Run | Problem:
    """A line as the run that it was."""
    pace = None
    if record["seconds_per_epoch"] is not None:
        speed = record["samples_per_second"]
        pace = Pace(record["seconds_per_epoch"], math.nan if speed is None else speed)
    attempt = {"ended": record["finished"], "devices": record["devices"]}
    card = {
        **{name: record[name] for name in ("hash", "experiment", "label", "seed", "state", "versions", "command")},
        "identity": record["identity"],
        "data": {"split_hash": record["split"]},
        "attempts": [attempt],
        "pace": pace,
    }
    folder = path.with_suffix("") / f"{record['label']}-{record['hash'][:8]}"
    config, curve = {"report": record["report"]}, record["curve"]
    numbers = zip(*curve.values(), strict=True)
    rows = tuple({"split": record["selected_on"], **dict(zip(curve, row, strict=True))} for row in numbers)
    if record["state"] == "diverged":
        return diverged_run(folder, card, config, rows, record["best"]["epoch"])
    result = {"hash": record["hash"], "seed": record["seed"], "metric": record["metric"]}
    for which in ("best", "last", "initial"):
        if record[which] is not None:
            epoch = record[which].pop("epoch")
            result[which] = {"epoch": epoch, "test": record[which]}
    result["selected_on"] = record["selected_on"]
    return run_of(folder, card, result, config, rows)
