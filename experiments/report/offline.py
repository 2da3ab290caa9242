"""Reads wandb's offline runs, by wandb's own tool: for runs of which nothing else was brought back from a machine."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..runners.run_dir import identity, run_hash
from .collect import Problem, Run, Unreadable, run_of


def read_offline(folder: Path) -> Run | Problem:
    """A finished run from its offline folder, or why that holds none.

    The folder has the configuration, the rows of metrics.jsonl and, written last, result.json; not the run card.
    """
    experiment = ""
    try:
        records = _records(folder)
        start = _last(records, "run")
        config = {key: value for key, value in start.get("config", {}).get("update", {}).items() if key != "_wandb"}
        experiment = str(start.get("run_group", ""))
        summary: dict[str, Any] = {}
        for record in records:
            if record.get("type") == "summary":
                summary |= record["summary"].get("update", {})
        if not isinstance(summary.get("result"), dict):
            reason = "it was not finished when its wandb run ended; go on with it where it was trained"
            return Problem(folder, experiment, "interrupted", reason)
        result = summary["result"]
        return run_of(folder, _card(start, config, result, records), result, config, _rows(records))
    except Unreadable as error:
        return Problem(folder, experiment, "unreadable", str(error))
    except (LookupError, TypeError, AttributeError, ValueError) as error:
        reason = f"its wandb file is none of a run of this suite ({type(error).__name__}: {error})"
        return Problem(folder, experiment, "unreadable", reason)


def _records(folder: Path) -> list[dict[str, Any]]:
    """Everything in the folder's .wandb file, in its order."""
    (file,) = sorted(folder.glob("run-*.wandb"))[:1]
    tool = Path(sys.executable).with_name("wandb")
    command = [str(tool), "leet", "inspect", "--json", str(file)]
    try:
        done = subprocess.run(command, check=True, capture_output=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        reason = said.decode(errors="replace").strip().splitlines()[-1:] or [str(error)]
        raise Unreadable(f"{file.name} cannot be read: {reason[0]}") from None
    return [json.loads(line) for line in done.stdout.decode().splitlines()]


def _last(records: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = [record[kind] for record in records if record.get("type") == kind]
    if not found:
        raise Unreadable(f"the wandb file has no record of the {kind}: it was cut")
    return found[-1]


def _card(
    start: Mapping[str, Any], config: dict[str, Any], result: Mapping[str, Any], records: list[dict[str, Any]]
) -> dict[str, Any]:
    """What can be told of the run card."""
    environment: dict[str, Any] = {}
    for record in records:
        if record.get("type") == "environment":
            environment = record["environment"] | environment
    attempt = {
        "started": start.get("start_time"),
        "ended": None,
        "state": "finished",
        "host": start.get("host"),
        "platform": environment.get("os"),
        "devices": None,
        "threads": None,
    }
    return {
        "hash": run_hash(config),
        "experiment": config["experiment"],
        "label": config["label"],
        "seed": config["seed"],
        "state": "finished",
        "identity": identity(config),
        "data": result.get("data"),
        "attempts": [attempt],
    }


def _rows(records: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """The rows of metrics.jsonl, from the keys `split/metric` under which they were logged."""
    rows = []
    for record in records:
        if record.get("type") != "history":
            continue
        item = record["history"].get("item", {})
        splits = {name.split("/", 1)[0] for name in item if "/" in name} & {"train", "val", "test"}
        for split in sorted(splits):
            metrics = {name.split("/", 1)[1]: value for name, value in item.items() if name.startswith(f"{split}/")}
            rows.append({"epoch": item["epoch"], "step": item.get("trainer/global_step"), "split": split, **metrics})
    return tuple(rows)
