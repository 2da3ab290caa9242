"""A loss or a gradient that is no longer finite ends the run as diverged; nothing of it is taken for a result."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
import wandb
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from experiments import select_lr
from experiments.data.base import BatchSampler
from experiments.errors import Diverged, RunError
from experiments.report.cells import Measure, analyse
from experiments.report.collect import collect
from experiments.report.curves import read_curves
from experiments.report.page import verdict_lines
from experiments.report.tables import run_table
from experiments.runners import classifier
from experiments.runners.classifier import Classifier
from experiments.runners.finite import FiniteNumbers

ROOT = Path(__file__).parents[2]


def strictly(text):
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def left_by(folder):
    """Run card of a run that left no result, all of whose files are JSON."""
    assert not (folder / "result.json").exists()
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        strictly(line)
    return strictly((folder / "run.json").read_text())


def poisoned(monkeypatch, value, when):
    """Has the losses of a batch be `value` where `when(module)`."""
    whole = Classifier._losses

    def losses(self, batch):
        logits, labels, found = whole(self, batch)
        return logits, labels, found + (value if when(self) else 0.0)

    monkeypatch.setattr(classifier.Classifier, "_losses", losses)


def test_a_rate_that_is_far_too_large(runs):
    with pytest.raises(Diverged, match=r"^the loss became NaN at step 1, epoch 0; learning rate 1e\+30: the run has"):
        runs.start("attention=sinkhorn", "optimizer.lr=1e30")
    (folder,) = runs.folders()
    card = left_by(folder)
    assert card["state"] == card["attempts"][0]["state"] == "diverged"
    assert card["attempts"][0]["message"].startswith("the loss became NaN at step 1")
    assert not list((folder / "checkpoints").glob("*.ckpt"))


@pytest.mark.parametrize(
    ("optimizer", "rate", "message"),
    [
        # 1e30 is a whole number, which is no reason to hand it to torch as one.
        ("sgd", "1e30", r"^the loss became (NaN|infinite) at step 1, epoch 0; learning rate 1e\+30"),
        ("sgd", "1e40", r"^the optimizer's step became infinite at step 0, epoch 0; learning rate 1e\+40"),
        ("adam", "1e40", r"^the optimizer's step became infinite at step 0, epoch 0; learning rate 1e\+40"),
    ],
)
def test_a_rate_that_no_weight_can_hold(runs, optimizer, rate, message):
    with pytest.raises(Diverged, match=message):
        runs.start(f"optimizer={optimizer}", f"optimizer.lr={rate}")
    assert left_by(runs.folders()[0])["state"] == "diverged"


def test_the_implicit_gradient_before_convergence_is_said_in_a_sentence(runs):
    words = ["attention=sinkhorn", "attention.n_iters=1", "attention.gradient=implicit"]
    with pytest.raises(RunError, match=r"^attention: step 0: gradient='implicit' is .* raise n_iters"):
        runs.start(*words)
    assert left_by(runs.folders()[0])["state"] == "failed"


def test_it_is_marked_as_failed_where_it_is_shown(runs, monkeypatch):
    """In a sweep the process goes on, and wandb would end the run as if all were well."""
    ended = []
    finish = wandb.sdk.wandb_run.Run.finish
    monkeypatch.setattr(
        wandb.sdk.wandb_run.Run,
        "finish",
        lambda run, exit_code=None, **more: (ended.append(exit_code), finish(run, exit_code, **more))[1],
    )
    with pytest.raises(Diverged):
        runs.start("optimizer.lr=1e30", "logger=wandb", "wandb.mode=offline")
    assert ended == [1]
    runs.start("trainer.max_epochs=1", "logger=wandb", "wandb.mode=offline")
    assert ended[1:] == [None]


@pytest.mark.slow
def test_the_command_exits_with_1_and_one_sentence(runs):
    words = [*runs.overrides("optimizer.lr=1e30", "trainer.max_epochs=1"), "attention=sinkhorn"]
    done = subprocess.run(
        [sys.executable, "-m", "experiments.train", *words], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: the loss became NaN at step 1, epoch 0; learning rate 1e+30")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("value", "kind"), [(math.nan, "NaN"), (math.inf, "infinite")])
def test_in_the_middle_of_a_run(runs, monkeypatch, value, kind):
    poisoned(monkeypatch, value, lambda module: module.training and module.global_step == 6)
    with pytest.raises(Diverged, match=rf"^the loss became {kind} at step 6, epoch 1; learning rate 0.0005"):
        runs.start("attention=sinkhorn", "trainer.checkpoint_every_n_steps=1")
    (folder,) = runs.folders()
    card = left_by(folder)
    assert card["state"] == "diverged"
    steps = sorted(path.name for path in (folder / "checkpoints").glob("*.ckpt"))
    assert steps[-1] == "step00000006.ckpt"  # of before the step
    weights = torch.load(folder / "checkpoints" / steps[-1], weights_only=True)["state_dict"]
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_a_gradient_alone(runs, monkeypatch):
    """A finite loss whose derivative is infinite: the square root at 0."""
    whole = Classifier._losses

    def losses(self, batch):
        logits, labels, found = whole(self, batch)
        edge = (logits - logits.detach()).sum().abs().sqrt() if self.training and self.global_step == 2 else 0.0
        return logits, labels, found + edge

    monkeypatch.setattr(classifier.Classifier, "_losses", losses)
    with pytest.raises(Diverged, match=r"^the norm of the gradient became (NaN|infinite) at step 2, epoch 0"):
        runs.start("attention=softmax")


@pytest.mark.parametrize(("split", "words"), [("val", "validation"), ("test", "test")])
def test_in_an_evaluation_alone(runs, monkeypatch, split, words):
    poisoned(monkeypatch, math.nan, lambda module: not module.training and (split == "val" or module.trainer.testing))
    with pytest.raises(Diverged, match=rf"^the {words} loss became NaN at step 4, epoch 1"):
        runs.start("attention=softmax", "trainer.max_epochs=1")
    (folder,) = runs.folders()
    assert left_by(folder)["state"] == "diverged"


@pytest.mark.parametrize("mean_over", ["samples", "batches"])
def test_a_nan_is_not_left_out_of_a_mean(mean_over):
    metrics = classifier.RunningMetrics(2, mean_over)
    logits, labels = torch.zeros(2, 2), torch.zeros(2, dtype=torch.int64)
    metrics.update(logits, labels, torch.tensor([1.0, math.nan]), 2)
    metrics.update(logits, labels, torch.tensor([1.0, 1.0]), 2)
    assert math.isnan(metrics.values()["loss"])


def fp16_trainer(numbers, scale):
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return L.Trainer(
        accelerator="cpu",
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
        callbacks=[numbers],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


class Overflowing(torch.autograd.Function):
    """The identity, with a gradient of float16."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.half().to(gradient.dtype)


class Half(nn.Module):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(3, 2), factor

    def forward(self, inputs):
        return Overflowing.apply(self.layer(inputs).float()) * self.factor


class Ones(torch.utils.data.Dataset):
    def __getitem__(self, keys):
        return torch.ones(len(keys), 3), torch.tensor([key.sample % 2 for key in keys])


def fit(trainer, model, steps):
    module = Classifier(model, 2, 0, lambda parameters: torch.optim.SGD(parameters, lr=0.1), None)
    sampler = BatchSampler(2 * steps, 2)
    trainer.fit(module, torch.utils.data.DataLoader(Ones(), batch_size=None, sampler=sampler))


def test_steps_that_fp16_leaves_out_are_counted():
    numbers = FiniteNumbers()
    trainer = fp16_trainer(numbers, 2.0**20)
    fit(trainer, Half(), 8)
    # A gradient of about a quarter, times the scale, is above 65,504 at 2**20, 2**19 and 2**18.
    assert numbers.skipped == 3
    assert trainer.precision_plugin.scaler.get_scale() == 2.0**17


def test_fp16_whose_every_step_is_left_out_has_diverged():
    numbers = FiniteNumbers()
    with pytest.raises(Diverged, match=r"^the norm of the gradient, at every scale of the loss, became"):
        fit(fp16_trainer(numbers, 2.0**-10), Half(1e12), 60)
    assert numbers.skipped < 60


def test_the_report_counts_it_and_ranks_it_last(runs, monkeypatch):
    for attention in ("softmax", "sinkhorn"):
        runs.start(f"attention={attention}", "seed=0", "trainer.max_epochs=1")
    runs.start("attention=softmax", "seed=1", "trainer.max_epochs=1")
    poisoned(monkeypatch, math.nan, lambda module: module.training and module.global_step == 3)
    with pytest.raises(Diverged):
        runs.start("attention=sinkhorn", "seed=1", "trainer.max_epochs=1")
    found, problems = collect([runs.folder])
    assert problems == []
    results = analyse("mnist_patches", found)
    softmax, sinkhorn = (cell.summary(Measure.CHOSEN) for cell in results.cells)
    assert (softmax.n, softmax.diverged, sinkhorn.n, sinkhorn.diverged) == (2, 0, 2, 1)
    assert math.isnan(sinkhorn.mean)
    assert math.isnan(sinkhorn.worst)
    assert any("seed 1 diverged" in line for line in verdict_lines(results))
    assert len([row for row in run_table(results).rows if "diverged" in row]) == 1
    curves = [curve for group in read_curves(results) for curve in group.curves if curve.cell.attention.n_iters == 5]
    assert curves[0].errors[1].tolist() == [1.0]


def test_a_rate_that_diverges_loses_the_choice(runs, capsys):
    runs.start("experiment=mnist_patches_lr", "optimizer.lr=1e-3")
    with pytest.raises(Diverged):
        runs.start("experiment=mnist_patches_lr", "optimizer.lr=1e30")
    assert select_lr.main([str(runs.folder / "mnist_patches_lr")]) == 0
    out = capsys.readouterr().out
    assert "1e+30: diverged" in out
    assert "patch14: 0.001" in out


@pytest.mark.slow
def test_on_one_process_of_several(runs):
    """The processes agree: both end, the first tells, nobody waits for the other."""
    words = runs.overrides("attention=sinkhorn", "trainer.devices=2", "trainer.strategy=ddp", "trainer.max_epochs=1")
    code = (
        "import os, sys\n"
        "from experiments.runners.classifier import Classifier\n"
        "whole = Classifier._losses\n"
        "def losses(self, batch):\n"
        "    logits, labels, found = whole(self, batch)\n"
        "    bad = self.training and self.global_rank == 1 and self.global_step == 2\n"
        "    return logits, labels, found + (float('nan') if bad else 0.0)\n"
        "Classifier._losses = losses\n"
        "from experiments import train\n"
        "train.main()\n"
    )
    (runs.folder.parent / "patched.py").write_text(code)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, str(runs.folder.parent / "patched.py"), *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 1, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("error")] == [
        line for line in done.stderr.splitlines() if line.startswith("error: the loss became NaN at step 2, epoch 0")
    ], done.stderr
    (folder,) = runs.folders()
    assert left_by(folder)["state"] == "diverged"
