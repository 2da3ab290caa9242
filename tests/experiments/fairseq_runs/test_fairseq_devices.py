"""One, two and three processes train one run: the same batches in the same order, and the same numbers.

Tests are scored by one process whatever the number of the others: they are left out.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Rows = Callable[[Path], list[dict]]
Checkpoint = Callable[[Path], dict[str, Any]]

SINKHORN = ("attention=sinkhorn", "attention.n_iters=3", "logger=none")
# The longest sentences come two to a batch, fewer than there are processes; an epoch's last step has fewer batches.
TRANSLATION = (
    "experiment=ha_de_en_scratch",
    "data.name=translation",
    "data.max_tokens=20",
    "data.eval_max_tokens=20",
    "data.generation.beam=2",
    "data.validate_bleu=true",
    "model.dropout=0",
    "trainer.accumulate_grad_batches=3",
    "trainer.gradient_clip_norm=1.0",
    "trainer.max_epochs=2",
    "scheduler.warmup_updates=20",
)


# fairseq has no option for float64, and asks for the norm of the gradient in float32, which torch refuses there.
DOUBLE = """
import torch
norm = torch.norm
torch.set_default_dtype(torch.float64)
torch.norm = lambda tensor, *words, dtype=None, **more: norm(tensor, *words, **more)
"""


@pytest.fixture
def double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(DOUBLE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def differences(
    runs: Any, overrides: tuple[str, ...], rows: Rows, checkpoint: Checkpoint, dtype: torch.dtype, counts: list[int]
) -> list[float]:
    """The largest of each of some numbers of processes from one, of all metrics and of all weights."""
    found: dict[int, tuple[list[dict], dict[str, torch.Tensor]]] = {}
    overrides = (*overrides, "protocol.test=false")
    for count in (1, *counts):
        apart = type(runs)(runs.folder / str(count), runs.data)  # all of them have the name of one run
        folder = apart.start(*overrides, f"trainer.devices={count}").folder
        assert folder.name == apart.run_dir(*overrides).path.name
        found[count] = rows(folder), checkpoint(folder / "checkpoints" / "checkpoint_last.pt")["model"]
        timing = [json.loads(line) for line in (folder / "timing.jsonl").read_text().splitlines()]
        counted = [line["samples_per_second"] * line["seconds"] for line in timing]
        assert counted == pytest.approx([60] * len(timing), abs=0.5)
    largest = []
    for count in counts:
        pairs = list(zip(found[1][0], found[count][0], strict=True))
        assert [sorted(one) for one, _ in pairs] == [sorted(other) for _, other in pairs]
        numbers = [(one[name], other[name]) for one, other in pairs for name in one if name != "split"]
        assert {tensor.dtype for tensor in found[count][1].values() if tensor.dim() > 1} == {dtype}
        matrices = [(tensor, found[count][1][name]) for name, tensor in found[1][1].items()]
        largest.append(max(abs(one - other) for one, other in numbers))
        largest.append(max(float((one - other).abs().max()) for one, other in matrices))
    return largest


@pytest.mark.slow
@pytest.mark.usefixtures("double")
def test_translation_in_float64(text_runs: Any, narrow: tuple[str, ...], rows: Rows, checkpoint: Checkpoint) -> None:
    found = differences(text_runs, (*TRANSLATION, *narrow, *SINKHORN), rows, checkpoint, torch.float64, [3])
    assert max(found) < 1e-6, found


@pytest.mark.slow
@pytest.mark.usefixtures("double")
def test_sentiment_in_float64(text_runs: Any, sentiment: tuple[str, ...], rows: Rows, checkpoint: Checkpoint) -> None:
    overrides = (*sentiment, *SINKHORN, "model.dropout=0", "trainer.accumulate_grad_batches=3")
    found = differences(text_runs, overrides, rows, checkpoint, torch.float64, [2])
    assert max(found) < 1e-6, found


@pytest.mark.slow
def test_sentiment_in_float32(text_runs: Any, sentiment: tuple[str, ...], rows: Rows, checkpoint: Checkpoint) -> None:
    # Adam divides by the size of a gradient: one that is 0 but for its rounding must not count as a whole one.
    overrides = (*sentiment, *SINKHORN, "model.dropout=0", "optimizer.adam_eps=1e-3")
    found = differences(text_runs, overrides, rows, checkpoint, torch.float32, [3])
    assert max(found) < 2e-5, found
