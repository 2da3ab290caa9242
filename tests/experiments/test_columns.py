"""Column sums over training: their values, and that recording leaves a run as it is."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from sinkhorn_attention import get_normalizer, record_attention
from sinkhorn_attention.reference import sinkhorn_reference
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments.data.base import SampleKey
from experiments.errors import RunError
from experiments.evaluate import load_run
from experiments.runners import classifier
from experiments.runners.column_rows import column_rows, due
from experiments.runners.columns import ColumnLog, read_rows
from experiments.runners.run_dir import run_hash

DROPOUT = ("attention=sinkhorn", "attention.n_iters=3", "+model.drop_rate=0.2", "data.max_shift=2")
RECORDING = ("columns.every=2", "columns.samples=20")
# Of another seed than the runs without recording, which are the same runs to the session's `finished`.
RECORDED = (*DROPOUT, *RECORDING, "seed=1")


class Attention(torch.nn.Module):
    """One normalizer over given queries and keys."""

    def __init__(self, name, **options):
        super().__init__()
        self.normalizer = get_normalizer(name, head_dim=8, num_heads=2, **options)

    def forward(self, query, key, **masks):
        return self.normalizer.attend(query, key, key, **masks)


def expected(query, key, n_iters, lengths=None):
    """What `summarize` should find, from the definition, each map alone and without its padding."""
    curves, deviations, errors = [], [], []
    for sample in range(len(query)):
        n, m = (query.shape[-2], key.shape[-2]) if lengths is None else (lengths[sample],) * 2
        for head in range(query.shape[1]):
            scores = query[sample, head, :n].double() @ key[sample, head, :m].double().T / math.sqrt(query.shape[-1])
            sums = sinkhorn_reference(scores, n_iters).sum(-2).numpy() * m / n
            curves.append(np.quantile(sums, np.linspace(0, 1, min(64, key.shape[-2]))))
            deviations.append(np.abs(sums - 1).mean())
            errors.append(np.abs(sums - 1).max())
    return np.mean(curves, 0), np.mean(deviations), np.mean(errors)


@pytest.mark.parametrize(("n", "m"), [(10, 10), (4, 10), (80, 80)])
@pytest.mark.parametrize("n_iters", [1, 3])
def test_values_are_those_of_the_definition(n, m, n_iters):
    torch.manual_seed(0)
    query, key = 3 * torch.randn(3, 2, n, 8), torch.randn(3, 2, m, 8)
    model = torch.nn.ModuleDict({"attention": Attention("sinkhorn", n_iters=n_iters)})
    (row,) = column_rows(model, lambda: model["attention"](query, key), 4, 17)
    curve, deviation, error = expected(query, key, n_iters)
    assert {name: row[name] for name in ("epoch", "step", "layer", "n_tokens")} == {
        "epoch": 4,
        "step": 17,
        "layer": "attention",
        "n_tokens": m,
    }
    assert len(row["column_sums"]) == min(64, m)
    np.testing.assert_allclose(row["column_sums"], curve, rtol=1e-5, atol=1e-6)
    assert row["deviation"] == pytest.approx(deviation, rel=1e-5)
    assert row["column_error"] == pytest.approx(error, rel=1e-5)
    assert row["row_error"] < 1e-6


def test_padding_takes_no_part():
    torch.manual_seed(1)
    query, key = 3 * torch.randn(3, 2, 9, 8), torch.randn(3, 2, 9, 8)
    lengths = [9, 5, 2]
    mask = (torch.arange(9) < torch.tensor(lengths)[:, None])[:, None]
    model = Attention("softmax")
    (row,) = column_rows(model, lambda: model(query, key, query_mask=mask, key_mask=mask), 0, 0)
    curve, deviation, error = expected(query, key, 1, lengths)
    assert row["n_tokens"] == pytest.approx(16 / 3)
    np.testing.assert_allclose(row["column_sums"], curve, rtol=1e-5, atol=1e-6)
    assert row["deviation"] == pytest.approx(deviation, rel=1e-5)
    assert row["column_error"] == pytest.approx(error, rel=1e-5)
    empty = torch.zeros(3, 1, 9, dtype=torch.bool)
    (row,) = column_rows(model, lambda: model(query, key, query_mask=empty, key_mask=empty), 0, 0)
    assert row["column_sums"] == []


def test_a_doubly_stochastic_map_has_ones():
    model = Attention("sinkhorn", n_iters=501)
    query, key = torch.randn(2, 1, 2, 7, 8)
    (row,) = column_rows(model, lambda: model(query, key), 0, 0)
    np.testing.assert_allclose(row["column_sums"], np.ones(7), atol=1e-5)


def test_the_model_and_the_random_numbers_are_left_alone():
    model = torch.nn.Sequential(Attention("softmax"), torch.nn.Dropout(0.5))
    model[1].eval()
    before = torch.get_rng_state()

    def forward():
        assert not model.training
        torch.randn(3)
        model[0](torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8))

    column_rows(model, forward, 0, 0)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert not model[1].training
    with pytest.raises(ValueError, match="no attention that can be recorded"):
        column_rows(torch.nn.Linear(2, 2), forward, 0, 0)


@pytest.mark.parametrize(("every", "epochs"), [(1, [0, 1, 2, 3]), (2, [0, 2, 3]), (5, [0, 3])])
def test_due(every, epochs):
    assert [epoch for epoch in range(4) if due(epoch, every, 3)] == epochs


def test_recording_changes_nothing_in_a_run(runs, finished):
    folder, plain = runs.start(*DROPOUT, *RECORDING).folder, finished(*DROPOUT)
    assert folder.name == plain.name
    for name in ("metrics.jsonl", "result.json"):
        assert (folder / name).read_bytes() == (plain / name).read_bytes()
    last = json.loads((folder / "result.json").read_text())["last"]["checkpoint"]
    ours, theirs = (torch.load(path / last, weights_only=True) for path in (folder, plain))
    assert ours["callbacks"].keys() == theirs["callbacks"].keys()
    assert all(torch.equal(ours["state_dict"][name], value) for name, value in theirs["state_dict"].items())
    assert not (plain / "column_sums.jsonl").exists()
    recorded = read_rows(folder)
    assert [(row["epoch"], row["step"], row["layer"]) for row in recorded] == [
        (0, 0, "blocks.0.attn"),
        (2, 8, "blocks.0.attn"),
        (3, 12, "blocks.0.attn"),
    ]


def test_the_lines_are_of_the_weights_at_that_epoch(finished):
    folder = finished(*RECORDED)
    run = load_run(folder, at="last")
    keys = [(sample, 0, 0) for sample in np.linspace(0, 199, 20).round().astype(int).tolist()]
    images, _ = run.data.dataset(["val"])[[SampleKey(*key) for key in keys]]
    with torch.no_grad(), record_attention(run.model) as log:
        run.model(images)
    sums = log["blocks.0.attn"][0].column_sums.sort(-1).values.flatten(0, -2).mean(0)
    np.testing.assert_allclose(read_rows(folder)[-1]["column_sums"], sums, rtol=1e-5)


def kill_at(step):
    def patch():
        original = classifier.Classifier.training_step

        def training_step(self, batch, batch_idx):
            if self.global_step == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, batch, batch_idx)

        classifier.Classifier.training_step = training_step

    return patch


@pytest.mark.parametrize("step", [1, 6, 9])
def test_a_killed_run_ends_with_the_same_file(runs, finished, step):
    assert runs.in_child(kill_at(step), *RECORDED) == -signal.SIGKILL
    (folder,) = runs.folders()
    with open(folder / "column_sums.jsonl", "a") as file:
        # What a process leaves that is killed after an epoch's lines, before its checkpoint, in the middle of a line.
        file.write('{"epoch": 2, "step": 99, "layer": "blocks.0.attn"}\n{"epoch": 3, "st')
    runs.start(*RECORDED)
    assert (folder / "column_sums.jsonl").read_bytes() == (finished(*RECORDED) / "column_sums.jsonl").read_bytes()
    assert (folder / "metrics.jsonl").read_bytes() == (finished(*RECORDED) / "metrics.jsonl").read_bytes()


def test_no_epoch_stands_there_twice(tmp_path):
    row = {"epoch": 1, "step": 4, "layer": "a", "column_sums": [1.0]}
    log = ColumnLog(tmp_path)
    log.begin(0)
    assert not (tmp_path / "column_sums.jsonl").exists()
    log.add([row, {**row, "layer": "b"}])
    log.add([row])
    again = ColumnLog(tmp_path)
    again.begin(4)
    assert again.has(1)
    assert [row["layer"] for row in read_rows(tmp_path)] == ["a", "b"]
    again.begin(3)
    assert read_rows(tmp_path) == []


def test_tensorboard_and_wandb_have_them_as_histograms(runs):
    folder = runs.start(*RECORDED, "logger=all").folder
    events = EventAccumulator(str(folder / "tensorboard"), {"histograms": 0}).Reload()
    row = read_rows(folder)[1]
    assert [event.step for event in events.Histograms("column_sums/blocks.0.attn")] == [0, 8, 12]
    histogram = events.Histograms("column_sums/blocks.0.attn")[1].histogram_value
    assert histogram.num == len(row["column_sums"])
    assert histogram.sum == pytest.approx(sum(row["column_sums"]), rel=1e-5)
    assert events.Scalars("deviation/blocks.0.attn")[1].value == pytest.approx(row["deviation"])
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    tool = Path(sys.executable).with_name("wandb")
    lines = subprocess.run([tool, "leet", "inspect", "--json", file], check=True, capture_output=True, text=True).stdout
    items = [record["history"]["item"] for record in map(json.loads, lines.splitlines()) if record["type"] == "history"]
    title = "column_sums/blocks.0.attn"
    histograms = [item for item in items if item.get(f"{title}._type") == "histogram"]
    assert [item["trainer/global_step"] for item in histograms] == [0, 8, 12]
    assert sum(histograms[1][f"{title}.values"]) == len(row["column_sums"])
    assert histograms[1][f"{title}.bins"][0] == pytest.approx(row["column_sums"][0])


def test_bad_settings_and_identity(run_dir):
    assert run_hash(run_dir("columns.every=2").config) == run_hash(run_dir().config)
    for key in ("columns.every", "columns.samples"):
        with pytest.raises(RunError, match=f"{key} must be at least 1; got 0"):
            run_dir(f"{key}=0")
