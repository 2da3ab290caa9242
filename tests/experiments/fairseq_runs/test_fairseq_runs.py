import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Read = Callable[[Path], dict[str, Any]]

SINKHORN = ("attention=sinkhorn", "attention.n_iters=3")


def wait_for(condition: Callable[[], bool], process: Any) -> None:
    end = time.monotonic() + 400
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.05)


def steps_logged(folder: Path) -> int:
    log = folder / "fairseq.log"
    return log.read_text().count("| train_inner |") if log.exists() else 0


def test_a_run_has_the_files_of_every_run(whole: Path, rows: Callable[[Path], list[dict]]) -> None:
    found = rows(whole)
    assert [(row["epoch"], row["step"], row["split"]) for row in found[:6]] == [
        (epoch, 8 * epoch, split) for epoch in (1, 2, 3) for split in ("train", "val")
    ]
    result = json.loads((whole / "result.json").read_text())
    card = json.loads((whole / "run.json").read_text())
    assert result["data"]["sizes"] == {"train": 60, "val": 21, "test": 19}
    assert (card["state"], card["n_params"], result["steps"]) == ("finished", result["n_params"], 24)
    values = [row for row in found if row["split"] == "val"]
    best = max(values, key=lambda row: row["accuracy"])  # the first of equals
    assert result["best"]["epoch"] == best["epoch"]
    assert result["best"]["val"] == {"loss": best["loss"], "accuracy": best["accuracy"]}
    assert result["last"]["epoch"] == 3
    assert (result["best"]["test"]["accuracy"] * 19) % 1 == pytest.approx(0, abs=1e-4)
    assert {path.name for path in (whole / "checkpoints").iterdir()} == {"checkpoint_best.pt", "checkpoint_last.pt"}


@pytest.mark.slow
def test_a_run_that_was_stopped_killed_and_damaged_ends_with_the_same_numbers(
    whole: Path, text_runs: Any, sentiment: tuple[str, ...], capsys: pytest.CaptureFixture[str], checkpoint: Read
) -> None:
    def step(path: Path) -> int:  # of a checkpoint, which is whole at any instant
        return checkpoint(path)["optimizer_history"][-1]["num_updates"]

    overrides = (*sentiment, *SINKHORN, "trainer.checkpoint_every_n_steps=3")
    run = text_runs.run_dir(*overrides)
    assert run.path.name == whole.name

    stopped = text_runs.process(*overrides)
    wait_for(lambda: (run.checkpoints / "checkpoint_last.pt").exists(), stopped)
    stopped.send_signal(signal.SIGTERM)
    assert stopped.wait(300) == 143, stopped.stdout.read()
    assert json.loads((run.path / "run.json").read_text())["state"] == "interrupted"
    at = step(run.checkpoints / "checkpoint_last.pt")
    assert 3 <= at < 24

    killed = text_runs.process(*overrides)
    wait_for(lambda: step(run.checkpoints / "checkpoint_last.pt") > at, killed)
    killed.kill()
    killed.wait()
    last = run.checkpoints / "checkpoint_last.pt"
    half = last.read_bytes()[:5000]
    last.unlink()
    others = [run.checkpoints / f"checkpoint_{name}.pt" for name in ("previous", "best")]
    before = max(step(path) for path in others if path.exists())
    last.write_bytes(half)

    assert text_runs.start(*overrides).folder == run.path
    words = capsys.readouterr().err
    assert "checkpoint_last.pt cannot be read and is passed over" in words
    assert f"of step {before}, is taken instead" in words, words
    assert (run.path / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert json.loads((run.path / "result.json").read_text()) == json.loads((whole / "result.json").read_text())
    attempts = json.loads((run.path / "run.json").read_text())["attempts"]
    assert [attempt["from_step"] for attempt in attempts] == [0, at, before]


@pytest.mark.slow
def test_another_number_of_processes_goes_on_within_the_epoch(
    text_runs: Any,
    sentiment: tuple[str, ...],
    rows: Callable[[Path], list[dict]],
    capsys: pytest.CaptureFixture[str],
    checkpoint: Read,
) -> None:
    overrides = (*sentiment, *SINKHORN, "model.dropout=0", "optimizer.adam_eps=1e-3", "protocol.test=false")
    often = "trainer.checkpoint_every_n_steps=3"
    run = text_runs.run_dir(*overrides)
    alone = text_runs.process(*overrides, often)
    wait_for(lambda: (run.checkpoints / "checkpoint_last.pt").exists(), alone)
    os.kill(alone.pid, signal.SIGUSR1)
    assert alone.wait(300) == 143
    at = checkpoint(run.checkpoints / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"]
    assert at % 8, "stopped between two epochs: the test shows nothing"

    text_runs.start(*overrides, "trainer.devices=3")
    words = " ".join(capsys.readouterr().err.split())
    assert "the run goes on with 3 processes, and had 1: the batches and their order stay" in words
    assert "begun anew" not in words
    unbroken = type(text_runs)(text_runs.folder / "unbroken", text_runs.data)
    whole_rows, found = rows(unbroken.start(*overrides).folder), rows(run.path)
    assert [(row["epoch"], row["step"], row["split"]) for row in found] == [
        (row["epoch"], row["step"], row["split"]) for row in whole_rows
    ]
    for ours, theirs in zip(found, whole_rows, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)


@pytest.mark.slow
def test_other_batches_begin_the_epoch_anew(
    text_runs: Any,
    sentiment: tuple[str, ...],
    rows: Callable[[Path], list[dict]],
    capsys: pytest.CaptureFixture[str],
    checkpoint: Read,
) -> None:
    """As of a checkpoint that an earlier version made, with batches for each process."""
    overrides = (*sentiment, *SINKHORN, "protocol.test=false")
    run = text_runs.run_dir(*overrides)
    stopped = text_runs.process(*overrides, "trainer.checkpoint_every_n_steps=3")
    last = run.checkpoints / "checkpoint_last.pt"
    wait_for(last.exists, stopped)
    os.kill(stopped.pid, signal.SIGUSR1)
    assert stopped.wait(300) == 143
    state = checkpoint(last)
    at = state["optimizer_history"][-1]["num_updates"]
    epoch, within = divmod(at, 8)
    assert within, "stopped between two epochs: the test shows nothing"
    state["cfg"]["dataset"]["batch_size"] = 4
    torch.save(state, last)

    text_runs.start(*overrides)
    words = " ".join(capsys.readouterr().err.split())
    assert "batch_size 4 -> 8" in words
    assert f"its epoch {epoch + 1} is begun anew" in words
    ends = {row["epoch"]: row["step"] for row in rows(run.path) if row["split"] == "val"}
    assert ends == {number: 8 * number + (within if number > epoch else 0) for number in (1, 2, 3)}
