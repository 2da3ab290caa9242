"""Trains and evaluates a run with fairseq, in a process of its own (`fairseq_child`, `fairseq_score`).

In the run's folder there is also `fairseq.log`, everything that fairseq wrote, of all attempts. The checkpoints are
fairseq's: `checkpoint_best.pt`, `checkpoint_last.pt`, and with `init_from` or `protocol.initial`
`checkpoint_initial.pt`, the weights that the run began with, which are evaluated as epoch 0 and stand in result.json as
`initial`. Run card and result.json also have `left_out`, the number of training sentences that are too long for a batch
or for the model.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..errors import Diverged, RunError, check_finite
from ..files import explain_full_disk
from ..progress import at_work
from . import fairseq_command as command
from .columns import ColumnLog
from .fairseq_events import improves
from .fairseq_process import Child, exit_code
from .origin import finished_origin
from .recorder import Row, RunLog, close_failed, close_loggers, make_loggers
from .run_dir import RunDir, process_rank, read_record, train_command

Config = dict[str, Any]
LOG = "fairseq.log"


def train(config: Config, run: RunDir, shell_command: str) -> dict[str, Any]:
    """Trains a run to its end, from its last checkpoint or from the start; returns what result.json holds.

    Of several processes that train one run the first alone writes; the others return {}.

    Raises:
        RunError: for what the user can put right; no folder has been made where the configuration was at fault.
        SystemExit: with 130 after Ctrl-C, 143 after another signal; a checkpoint has been saved.
    """
    command.check_sections(config)
    facts = command.facts(command.read_manifest(config["data"]), config["data"])
    _same_data(run, facts)
    initial, rate = None, config["optimizer"]["lr"]
    if config["init_from"] is not None:
        if rate is not None:
            raise RunError(f"optimizer.lr={rate}: init_from.rate says the rate of this run; leave optimizer.lr null")
        begin = finished_origin(config, _train_origin)
        initial, rate = begin.checkpoint, begin.rate
        other = command.other_data(begin.data, facts)
        if other is not None and begin.data["name"] == facts["name"]:
            raise RunError(
                f"init_from: that run was trained with other data of the same name ({other}), which would mix "
                "sentences to train and to test on, or words: give its settings of data to init_from.overrides too"
            )
        if begin.data.get("vocabulary") not in (None, facts["vocabulary"]):
            raise RunError(f"init_from: that run's data, {begin.data['name']}, have other dictionaries than these")
    begun = {**config, "optimizer": {**config["optimizer"], "lr": rate}}
    words = command.arguments(begun, run.checkpoints, initial)
    child = Child.start("fairseq_child", [json.dumps(command.settings(config, initial)), *words], config)
    try:
        with child.forwarding():
            ready = _wait_until_ready(child)
            if config["trainer"]["accelerator"] in ("gpu", "cuda") and ready["devices"] == ["cpu"]:
                raise RunError(f"trainer.accelerator={config['trainer']['accelerator']}: there is no GPU here")
            if ready["devices"] != ["cpu"] and len(ready["devices"]) < config["trainer"]["devices"]:
                have = f"this machine has {len(ready['devices'])} GPUs"
                raise RunError(f"trainer.devices={config['trainer']['devices']}, and {have}")
            if ready["devices"] == ["cpu"] and config["trainer"]["precision"] == "fp16":
                raise RunError("trainer.precision=fp16 needs a GPU, and there is none here: take 32")
            if process_rank() > 0:
                child.say("go")
                try:
                    _follow(child, None, [], config, run)
                except Diverged:
                    raise SystemExit(0) from None  # the first process tells
                return {}
            left_out = ready["left_out"]
            if left_out["count"]:
                print(
                    f"warning: {left_out['count']:,} of {left_out['of']:,} training sentences are left out: "
                    f"{left_out['why']}",
                    file=sys.stderr,
                )
            known = {"data": facts, "n_params": ready["n_params"], "left_out": {"train": left_out["count"]}}
            threads = config["trainer"]["threads"] or os.cpu_count() or 1
            with (
                run.attempt(shell_command, known, _used(ready["devices"], config["trainer"]), threads),
                explain_full_disk(f"{run.path} stands at its last checkpoint"),
            ):
                print(f"run: {run.path}", file=sys.stderr)
                child.keep_log(run.path / LOG)
                child.say("go")
                log = RunLog(run.path, config["protocol"]["select_on"], config["logger"]["csv"], not _bar(config))
                loggers: list[Logger] = []
                try:
                    skipped = _follow(child, log, loggers, config, run)
                    if config["trainer"]["precision"] == "fp16":
                        known["skipped_steps"] = skipped
                    result = _sum_up(config, run, log, loggers, known)
                except Exception:
                    close_failed(loggers)
                    raise
                run.finish(result)
    finally:
        child.end()
    return result


def _train_origin(before: Config, run: RunDir, words: list[str]) -> None:
    train(before, run, train_command(words))


def _used(devices: list[str], trainer: Config) -> list[str]:
    """The devices of a run, of those that this machine has; other machines are taken to be like it."""
    used = ["cpu"] * trainer["devices"] if devices == ["cpu"] else devices[: trainer["devices"]]
    return used * trainer["num_nodes"]


def _bar(config: Config) -> bool:
    return bool(config["trainer"]["progress_bar"] and sys.stderr.isatty())


def _same_data(run: RunDir, facts: dict[str, Any]) -> None:
    card = run.path / "run.json"
    if not card.is_file():
        return
    other = command.other_data(read_record(card).get("data") or facts, facts)
    if other is not None:
        raise RunError(
            f"the data are not those that {run.path} was begun with ({other}): prepare them as before, or move that "
            "folder away"
        )


def _wait_until_ready(child: Child) -> dict[str, Any]:
    for event in child.events():
        if event["event"] == "ready":
            return event
    if child.signal:
        raise SystemExit(exit_code(child.signal))
    raise child.fate()


def _follow(child: Child, log: RunLog | None, loggers: list[Logger], config: Config, run: RunDir) -> int:
    """Writes what the training tells, until it has ended; returns how many steps the scaler of fp16 left out."""
    epochs, step, skipped = config["trainer"]["max_epochs"], 0, 0
    sums = ColumnLog(run.path)
    times = TimeElapsedColumn(), TimeRemainingColumn()
    columns = (TextColumn("epoch {task.completed:.1f}/{task.total}"), BarColumn(), *times)
    bar_or_lines = at_work("training", quiet=log is None or _bar(config))
    with (
        Progress(*columns, console=Console(stderr=True), transient=True, disable=not _bar(config)) as progress,
        bar_or_lines as work,
    ):
        bar = progress.add_task("", total=epochs)
        for event in child.events():
            skipped = event.get("skipped", skipped)
            if event["event"] == "finished":
                return skipped
            if event["event"] == "stopped":
                if log is not None:
                    words = signal.Signals(event["signal"]).name
                    print(f"stopped by {words} at step {step}; the same command goes on from there", file=sys.stderr)
                raise SystemExit(exit_code(event["signal"]))
            if event["event"] == "progress":
                progress.update(bar, completed=event["epochs"])
                work.now = f"epoch {event['epochs']:.2f}/{epochs}"
            elif event["event"] == "started" and log is not None:
                step = event["step"]
                if step:
                    run.note_resumed(step)
                    print(f"goes on from epoch {event['epoch']}, step {step}", file=sys.stderr)
                loggers += make_loggers(config, run.path, run.hash, step)
                log.begin([row for entry in event["history"] for row in _rows(entry, log.split)], loggers)
                if config["columns"]["every"] is not None:
                    sums.begin_with(event["columns"], loggers)
            elif event["event"] == "epoch" and log is not None:
                step = event["step"]
                run.note_device_engine(event.get("device_engine"))
                for row in _rows(event, log.split):
                    log.add(row, loggers)
                sums.add(event["columns"], loggers)
                log.add_timing(event["epoch"], step, epochs, event["seconds"], event["samples"])
                progress.update(bar, completed=event["epoch"])
                work.now = f"after epoch {event['epoch']}/{epochs}"
    if child.signal and child.process.wait() != 0:
        raise SystemExit(exit_code(child.signal))
    raise child.fate()


def _rows(entry: dict[str, Any], split: str) -> list[Row]:
    place = {"epoch": entry["epoch"], "step": entry["step"]}
    rows = [{**place, "split": "train", **entry["train"]}] if "train" in entry else []
    return [*rows, {**place, "split": split, **entry["valid"]}]


def _sum_up(config: Config, run: RunDir, log: RunLog, loggers: list[Logger], known: dict[str, Any]) -> dict[str, Any]:
    """Evaluates on the test split, and makes what result.json holds."""
    protocol, metric = config["protocol"], config["protocol"]["metric"]
    evaluated = [row for row in log.rows if row["split"] == log.split]
    best: Row | None = None
    for row in evaluated:
        if row["epoch"] > 0 and improves(row[metric], None if best is None else best[metric], metric != "loss"):
            best = row
    assert best is not None
    places = {"best": best, "last": evaluated[-1]}
    if evaluated[0]["epoch"] == 0:
        places = {"initial": evaluated[0], **places}
    found: dict[str, dict[str, Any]] = {}
    for name, row in places.items():
        place = {"epoch": row["epoch"], "step": row["step"], "checkpoint": f"checkpoints/checkpoint_{name}.pt"}
        found[name] = {**place, log.split: log.metrics(row["epoch"], log.split)}
    extra: dict[str, Any] = {}
    if protocol["test"] and log.split != "test":
        files = {row["epoch"]: run.path / found[name]["checkpoint"] for name, row in places.items()}
        scores = score(config, files, "test", run.path / LOG)
        extra = {"bleu_signature": scores["signature"]} if scores.get("signature") else {}
        for place in found.values():
            scored = scores["metrics"][str(place["epoch"])]
            if scored["step"] != place["step"]:
                raise RunError(f"{run.path / place['checkpoint']} is of step {scored['step']}, not {place['step']}")
            check_finite(scored["metrics"], "test", place["step"], place["epoch"])
            place["test"] = scored["metrics"]
            if not log.metrics(place["epoch"], "test"):
                row = {"epoch": place["epoch"], "step": place["step"], "split": "test", **place["test"]}
                log.add(row, loggers)
    for leftover in ("checkpoint_previous.pt", "checkpoint_new.pt"):
        (run.checkpoints / leftover).unlink(missing_ok=True)
    result = {
        "hash": run.hash,
        "experiment": config["experiment"],
        "label": config["label"],
        "seed": config["seed"],
        "epochs": config["trainer"]["max_epochs"],
        "steps": places["last"]["step"],
        "n_params": known["n_params"],
        "data": known["data"],
        "left_out": known["left_out"],
        "selected_on": protocol["select_on"],
        "metric": metric,
        **({"skipped_steps": known["skipped_steps"]} if "skipped_steps" in known else {}),
        **extra,
        **found,
    }
    close_loggers(loggers, result)
    return result


def score(config: Config, checkpoints: dict[int, Path], split: str, log: Path | None = None) -> dict[str, Any]:
    """Metrics of checkpoints on a split, on one device, every sentence once.

    Args:
        config: resolved.
        checkpoints: files by any numbers.
        split: "train", "val" or "test".
        log: where fairseq's lines go.

    Returns:
        `metrics`, by those numbers as words: `step` and `metrics` of each; `signature` of sacrebleu where it counted.

    Raises:
        RunError: for what went wrong.
    """
    request = command.score_request(config, checkpoints, split)
    child = Child.start("fairseq_score", [json.dumps(request)], config)
    try:
        if log is not None:
            child.keep_log(log)
        with child.forwarding(), at_work(f"evaluating on {split}", quiet=_bar(config)):
            for event in child.events():
                if event["event"] == "scores":
                    return event
            if child.signal:
                raise SystemExit(exit_code(child.signal))
            raise child.fate()
    finally:
        child.end()
