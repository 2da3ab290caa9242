"""The benchmarks measure what they say they do. No test here depends on how fast anything is."""

import csv
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from sinkhorn_attention.engines.native import LIBRARY
from sinkhorn_attention.reference import sinkhorn_attention_reference

from experiments.benchmarks import __main__ as benchmarks
from experiments.benchmarks import attention, worker
from experiments.benchmarks.cases import CASES, Case
from experiments.benchmarks.cases import attention as variant_function
from experiments.benchmarks.published import published_attention
from experiments.benchmarks.results import Row, exponents, rows_of
from experiments.benchmarks.timing import fitted_exponent, interleaved, peak_megabytes, quartiles
from experiments.errors import RunError

CASE = Case(1, 2, 9, 7, 4)


@pytest.mark.parametrize("n_iters", [1, 3, 7])
def test_the_published_arithmetic_is_the_definition(n_iters: int) -> None:
    """In value and gradient, or the comparison would be with something else."""
    tokens = [token.detach().double().requires_grad_() for token in CASE.tokens()]
    out, want = published_attention(*tokens, n_iters), sinkhorn_attention_reference(*tokens, n_iters, 0.5)
    torch.testing.assert_close(out, want)
    gradients = [torch.autograd.grad(result.square().sum(), tokens) for result in (out, want)]
    for got, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(got, expected)


def test_the_published_arithmetic_keeps_its_maps_and_ours_does_not() -> None:
    """Bytes that autograd keeps for backward at T = 21: a map for each half-step and more, against none."""
    tokens = Case(1, 1, 64, 64, 8).tokens()
    LIBRARY.load()  # whose check at its first use keeps maps of its own
    kept: dict[str, int] = {}
    for variant in ("published T=21", "native T=21"):
        storages: dict[int, int] = {}

        def note(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            out = variant_function(variant)(*tokens)
        kept[variant] = sum(storages.values())
        out.sum().backward()
    one_map = 64 * 64 * 4
    assert kept["published T=21"] > 21 * one_map
    inputs_and_output, vectors = 4 * 64 * 8 * 4, 2 * 24 * 72 * 4
    assert kept["native T=21"] <= inputs_and_output + vectors + 4096


def test_even_counts_are_refused_by_the_published_arithmetic() -> None:
    with pytest.raises(ValueError, match="odd, got 4"):
        published_attention(*CASE.tokens(), 4)


@pytest.mark.parametrize("variant", ["sdpa", "softmax", "native T=1", "published T=1", "normalizer softmax"])
def test_variants_at_one_half_step_are_softmax(variant: str) -> None:
    tokens = Case(2, 2, 6, 6, 4).tokens()
    want = torch.nn.functional.scaled_dot_product_attention(*tokens)
    torch.testing.assert_close(variant_function(variant)(*tokens), want)


@pytest.mark.parametrize("variant", ["native", "native T=", "sink T=3", ""])
def test_unknown_variants(variant: str) -> None:
    with pytest.raises(ValueError, match=r"unknown variant|invalid literal"):
        variant_function(variant)


def test_samples_are_taken_in_turn() -> None:
    order: list[str] = []
    functions = {name: lambda name=name: (order.append(name), time.sleep(0.011)) for name in "ab"}
    samples = interleaved(functions, 3)
    assert order[4:] == ["a", "b"] * 3  # after one call to warm up and one to see how long it takes, each
    assert all(len(found) == 3 and min(found) >= 0.011 for found in samples.values())


def test_ratios_are_those_within_a_round() -> None:
    """The machine was three times as slow in the second round: the ratio does not know."""
    (_, row) = rows_of("t", "c", "both", {"sdpa": [1.0, 3.0, 1.0], "ours": [2.0, 6.0, 2.2]}, "sdpa")
    assert row.ratio == 2.0
    assert (row.seconds, row.low, row.high) == (2.2, 2.1, 4.1)
    assert quartiles([5.0]) == (5.0, 5.0, 5.0)
    (_, refused) = rows_of("t", "c", "both", {"sdpa": [1.0], "ours": "not on this device\nat all"}, "sdpa")
    assert (refused.seconds, refused.note) == (None, "not on this device")


def test_exponents() -> None:
    assert math.isclose(fitted_exponent([1, 2, 4], [3, 12, 48]), 2.0)
    rows = [Row("growth in n", str(n), "ours", "both", seconds=0.1 * n**1.5) for n in (64, 128, 512)]
    assert math.isclose(exponents([*rows, Row("growth in n", "64", "other", "both", seconds=1.0)])["ours"], 1.5)


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_peak_memory_sees_what_is_freed_again() -> None:
    def work() -> None:
        torch.ones(50 << 18).sum()  # 50 MB: above 32 no memory that was freed before is used again

    assert 49 <= peak_megabytes(work) < 65


def test_the_published_arithmetic_is_left_out_where_its_maps_would_not_fit() -> None:
    assert attention.keeps(CASES[0], 21)
    assert not attention.keeps(CASES[-1], 21)


def test_workers_do_not_wait_passively(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    seen = {}

    def run(command: list[str], env: dict[str, str], **_: object) -> subprocess.CompletedProcess:
        seen.update(env)
        return subprocess.CompletedProcess(command, 0, stdout='a warning\n{"x": 1}\n', stderr="")

    monkeypatch.setattr(worker.subprocess, "run", run)
    assert worker.in_new_process({}) == {"x": 1}
    assert "OMP_WAIT_POLICY" not in seen
    assert seen["PATH"] == os.environ["PATH"]


def test_a_failing_worker_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess:
        return subprocess.CompletedProcess(command, 1, stdout="", stderr="ValueError: no such thing")

    monkeypatch.setattr(worker.subprocess, "run", run)
    with pytest.raises(RunError, match="no such thing"):
        worker.in_new_process({"kind": "time"})


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers' tasks done here: a process for each would take longer than all of them. JSON both ways, as there."""

    def here(task: dict) -> dict:
        return json.loads(json.dumps(worker.measure(json.loads(json.dumps(task)))))

    monkeypatch.setattr(attention, "in_new_process", here)
    monkeypatch.setattr(benchmarks, "in_new_process", here)


@pytest.mark.usefixtures("in_this_process")
def test_tables_csv_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tables = ["attention", "growth", "libraries", "comparators"]
    assert benchmarks.main([*tables, "--quick", "--output", str(tmp_path)]) == 0
    with open(tmp_path / "cpu/attention.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    variants = {row["variant"] for row in rows if row["seconds"]}
    assert {"sdpa", "softmax", "portable T=3", "published T=3"} <= variants
    assert {row["which"] for row in rows} >= {"forward", "both", "error"}
    errors = [row["note"] for row in rows if row["which"] == "error" and row["variant"].startswith("portable")]
    assert all(float(note) < 1e-5 for note in errors)
    with open(tmp_path / "cpu/comparators.csv", newline="", encoding="utf-8") as file:
        assert {f"normalizer {name}" for name in ("esp", "lot", "l2")} <= {
            row["variant"] for row in csv.DictReader(file)
        }
    assert (tmp_path / "cpu/benchmarks.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "fitted exponents, growth in n" in printed
    assert "POT log" in printed


@pytest.mark.usefixtures("in_this_process")
def test_training_steps_of_the_models(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch) -> None:
    """Fairseq changes the process that imports it: its model is left to the test below."""
    monkeypatch.setattr(benchmarks, "MODELS", benchmarks.MODELS[:3])
    assert benchmarks.main(["steps", "--quick", "--output", str(tmp_path)]) == 0
    with open(tmp_path / "cpu/steps.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    seconds = {(row["case"], row["variant"], row["which"]): float(row["seconds"]) for row in rows}
    assert len(seconds) == 3 * 4 * 2
    assert capsys.readouterr().out.count("share of attention in a step of") == 3


def test_the_calls_of_attention_are_all_recorded() -> None:
    """Six layers of the vision transformer, with the arguments that they give; the classes are left as they were."""
    from sinkhorn_attention.normalizers import Sinkhorn

    from experiments.benchmarks.steps import recorded_calls, training_step

    before = Sinkhorn.attend
    step, _ = training_step("sinkformer_vit_catsdogs", 3, quick=True)
    with recorded_calls() as calls:
        step()
    assert Sinkhorn.attend is before
    assert len(calls) == 6
    assert all(call["tokens"][0].shape == (2, 8, 17, 64) for call in calls)
    assert not any(token.requires_grad for call in calls for token in call["tokens"])


@pytest.mark.slow
def test_a_step_of_the_sentence_classifier_in_a_process_of_its_own() -> None:
    pytest.importorskip("fairseq", reason="fairseq is not installed (Linux x86-64 alone)")
    task = {"kind": "steps", "model": "sinkformer_sentiment", "variants": ["softmax", "T=3"], "repeats": 2}
    found = worker.in_new_process({**task, "quick": True})
    assert {name: len(samples) for name, samples in found["step"].items()} == {"softmax": 2, "T=3": 2}
    assert min(found["attention"]["T=3"]) > 0


@pytest.mark.parametrize(
    "arguments", [["attentions"], ["steps", "--device", "cuda"], ["attention", "--device", "cuda"]]
)
def test_commands_that_cannot_be(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    if torch.cuda.is_available() and arguments[0] == "attention":
        pytest.skip("there is a GPU")
    assert benchmarks.main(arguments) == 1
    assert capsys.readouterr().err.startswith("error: ")
