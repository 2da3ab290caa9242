"""Column sums of runs that fairseq trains."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

SINKHORN = ("attention=sinkhorn", "attention.n_iters=3")
RECORDING = ("columns.every=2", "columns.samples=7")


@pytest.mark.slow
def test_recording_changes_nothing_and_goes_on_after_a_stop(
    whole: Path, text_runs: Any, sentiment: tuple[str, ...]
) -> None:
    overrides = (*sentiment, *SINKHORN, *RECORDING)
    folder = text_runs.start(*overrides).folder
    assert folder.name == whole.name
    assert (folder / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert json.loads((folder / "result.json").read_text()) == json.loads((whole / "result.json").read_text())
    assert not (whole / "column_sums.jsonl").exists()
    lines = [json.loads(line) for line in (folder / "column_sums.jsonl").read_text().splitlines()]
    layers = list(dict.fromkeys(line["layer"] for line in lines))
    assert len(layers) == 2
    assert [(line["epoch"], line["step"], line["layer"]) for line in lines] == [
        (epoch, 8 * epoch, layer) for epoch in (0, 2, 3) for layer in layers
    ]
    # Sentences of 3 to 12 tokens: padding takes no part, and rows of three half-steps sum to one.
    assert all(3 <= line["n_tokens"] <= 12 and line["row_error"] < 1e-5 for line in lines)
    assert all(0 < line["deviation"] <= line["column_error"] for line in lines)
    assert lines[0]["column_sums"] != lines[-2]["column_sums"]

    text_runs.folder = text_runs.folder.parent / "stopped"
    run = text_runs.run_dir(*overrides)
    process = text_runs.process(*overrides, "trainer.checkpoint_every_n_steps=3")
    end = time.monotonic() + 100
    while not (run.checkpoints / "checkpoint_last.pt").exists():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    with open(run.path / "column_sums.jsonl", "a") as file:
        file.write('{"epoch": 3, "st')
    text_runs.start(*overrides)
    assert (run.path / "column_sums.jsonl").read_bytes() == (folder / "column_sums.jsonl").read_bytes()
    assert (run.path / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
