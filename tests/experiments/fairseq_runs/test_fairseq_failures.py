import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.errors import Diverged, RunError
from experiments.evaluate import main as evaluate


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_training_that_diverges_has_failed(text_runs: Any, sentiment: tuple[str, ...], devices: int) -> None:
    overrides = (*sentiment, "optimizer.lr=1e30", "trainer.max_epochs=2", f"trainer.devices={devices}")
    with pytest.raises(Diverged, match=r"^the (loss|norm of the gradient) became NaN at step 1, epoch 0; ") as stopped:
        text_runs.start(*overrides)
    run = text_runs.run_dir(*overrides)
    assert "learning rate 1e+30: the run has diverged. Lower optimizer.lr" in str(stopped.value)
    assert str(run.path / "fairseq.log") in str(stopped.value)
    assert "\n" not in str(stopped.value)
    card = json.loads((run.path / "run.json").read_text())
    assert (card["state"], card["attempts"][0]["message"]) == ("diverged", str(stopped.value))
    assert "Traceback" in (run.path / "fairseq.log").read_text()
    assert not run.finished
    assert not (run.checkpoints / "crash.pt").exists()


# fairseq looks at the gradient alone. These are of a loss: of the step, of one process of two, of validation alone.
SPOILED = """
from fairseq.criterions import sentence_prediction
Criterion = sentence_prediction.SentencePredictionCriterion
forward = Criterion.forward
def spoiled(self, model, sample, reduce=True):
    loss, size, output = forward(self, model, sample, reduce)
    if {when}:
        loss = loss + float({value!r})
        output["loss"] = loss.data
    return loss, size, output
Criterion.forward = spoiled
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "value", "devices", "said"),
    [
        ("model.training", "inf", 1, "the loss became infinite at step 0, epoch 0"),
        ("model.training and torch.distributed.get_rank() == 1", "nan", 2, "the loss became NaN at step 0, epoch 0"),
        ("not model.training", "nan", 1, "the validation loss became NaN at step 8, epoch 1"),
    ],
)
def test_a_loss_that_is_not_finite_ends_the_run(
    text_runs: Any, sentiment: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str,
    value: str, devices: int, said: str,
) -> None:  # fmt: skip
    late = (
        "import importlib.abc, sys, torch\n"
        "class Late(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'fairseq_sinkhorn.attention':\n"
        "            sys.meta_path.remove(self)\n"
        f"            exec({SPOILED.format(when=when, value=value)!r}, {{'torch': torch}})\n"
        "sys.meta_path.insert(0, Late())\n"
    )
    (tmp_path / "sitecustomize.py").write_text(late)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    overrides = (*sentiment, f"trainer.devices={devices}")
    with pytest.raises(Diverged, match=f"^{said}"):
        text_runs.start(*overrides)
    run = text_runs.run_dir(*overrides)
    assert json.loads((run.path / "run.json").read_text())["state"] == "diverged"
    for path in run.path.glob("*.json*"):
        for record in path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]:
            json.loads(record, parse_constant=pytest.fail)  # NaN and Infinity are no JSON


def test_an_option_that_fairseq_does_not_know_is_refused_before_a_folder_is_made(
    text_runs: Any, sentiment: tuple[str, ...]
) -> None:
    with pytest.raises(RunError, match=r"^fairseq: unrecognized arguments: --pooolings?=max$"):
        text_runs.start(*sentiment, "+model.pooolings=max")
    assert not text_runs.folder.exists()


def test_a_run_without_a_checkpoint_that_can_be_read_says_that_it_begins_anew(
    whole: Path, text_runs: Any, sentiment: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    overrides = (*sentiment, "attention=sinkhorn", "attention.n_iters=3")
    run = text_runs.run_dir(*overrides)
    run.checkpoints.mkdir(parents=True)
    for name, content in (("last", b""), ("best", b"garbage"), ("previous", b"PK\x03\x04")):
        (run.checkpoints / f"checkpoint_{name}.pt").write_bytes(content)
    text_runs.start(*overrides)
    said = capfd.readouterr().err
    assert f"warning: no checkpoint in {run.checkpoints} can be read: the run begins anew" in said
    assert (run.path / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_a_best_checkpoint_that_is_damaged_is_named(
    whole: Path, text_runs: Any, sentiment: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    run = text_runs.run_dir(*sentiment, "attention=sinkhorn", "attention.n_iters=3")
    shutil.copytree(whole, run.path)
    best = run.checkpoints / "checkpoint_best.pt"
    best.unlink()
    best.write_bytes(b"garbage")
    assert evaluate([str(run.path), "--split", "test"]) == 1
    said = capfd.readouterr().err
    assert f"checkpoint {best} cannot be read: " in said
    assert "Remove that run's folder and give its command again" in said


def test_other_data_than_those_that_a_run_was_begun_with_are_refused(
    whole: Path, text_data: Path, text_runs: Any, sentiment: tuple[str, ...], tmp_path: Path
) -> None:
    overrides = (*sentiment, "attention=sinkhorn", "attention.n_iters=3")
    run = text_runs.run_dir(*overrides)
    run.path.mkdir(parents=True)
    shutil.copy(whole / "run.json", run.path)
    other = tmp_path / "other"
    shutil.copytree(text_data / "sentiment", other / "sentiment")
    manifest = other / "sentiment" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"split_hash": "0" * 64}))
    with pytest.raises(RunError, match=r"the data are not those that .* was begun with \(splits 000000000000, not"):
        text_runs.start(*overrides, f"paths.data={other}")


TRANSLATION = (
    "experiment=ha_de_en_scratch",
    "data.name=translation",
    "data.generation.beam=2",
    "optimizer.lr=0.01",
    "trainer.max_epochs=1",
    "logger=none",
)


def test_training_sentences_that_are_too_long_are_counted_and_said(
    text_runs: Any, narrow: tuple[str, ...], text_data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = text_data / "text" / "translation"
    sides = [(text / f"train.{language}").read_text().splitlines() for language in ("de", "en")]
    lengths = [1 + max(len(side.split()) for side in pair) for pair in zip(*sides, strict=True)]  # and </s>
    too_long = sum(length > 8 for length in lengths)
    assert 0 < too_long < 60
    more = ("data.max_tokens=8", "data.eval_max_tokens=60")
    folder = text_runs.start(*TRANSLATION, *narrow, *more).folder
    said = " ".join(capfd.readouterr().err.split())
    assert (
        f"warning: {too_long} of 60 training sentences are left out: longer than data.max_tokens=8; the longest" in said
    )
    for file in ("result.json", "run.json"):
        assert json.loads((folder / file).read_text())["left_out"] == {"train": too_long}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("data.max_tokens=60", "+data.max_source_positions=5"),
            r"sentences of the split valid are longer than the 5 and 1024 tokens that the model reads \(the longest "
            r"has \d+\): raise data.max_source_positions and data.max_target_positions",
        ),
        (
            ("data.max_tokens=60", "data.eval_max_tokens=8"),
            "split valid do not fit into a batch of 8 tokens .* raise data",
        ),
        (
            ("data.max_tokens=2", "data.eval_max_tokens=60"),
            "all 60 training sentences are longer than data.max_tokens=2",
        ),
        (("data.max_tokens=60", "+data.generation.beem=2"), "data.generation.beem: fairseq knows no such setting"),
        (("data.max_tokens=60", "+model.max_update=3"), "model.max_update: --max-update is not for the suite's runs"),
        (("data.max_tokens=60", "+data.save_interval=3"), "data.save_interval: --save-interval is not for the suite's"),
        (("data.max_tokens=60", "+data.max_valid_steps=1"), "data.max_valid_steps: --max-valid-steps is not for the"),
        (
            ("data.max_tokens=60", "+optimizer.amp_init_scale=8"),
            "optimizer.amp_init_scale is for trainer.precision=fp16",
        ),
        (("data.max_tokens=60", "trainer.accelerator=auto", "trainer.precision=fp16"), "precision=fp16 needs a GPU"),
    ],
)
def test_what_does_not_fit_or_would_change_nothing_is_refused_before_a_folder_is_made(
    text_runs: Any, narrow: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], said: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RunError, match=said) as refused:
        text_runs.start(*TRANSLATION, *narrow, *overrides)
    assert "\n" not in str(refused.value)
    assert not text_runs.folder.exists()


@pytest.mark.slow
def test_a_gpu_that_is_not_there_is_missed_in_an_evaluation_too(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shutil.copytree(whole, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(config.read_text().replace("accelerator: cpu", "accelerator: gpu"))
    assert evaluate([str(tmp_path / "run"), "--split", "test"]) == 1
    assert "trainer.accelerator=gpu: there is no GPU here" in capfd.readouterr().err


def test_other_dictionaries_are_other_data(
    whole: Path, text_data: Path, text_runs: Any, sentiment: tuple[str, ...], tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The same sentences, with words that have other numbers."""
    overrides = (*sentiment, "attention=sinkhorn", "attention.n_iters=3")
    run = text_runs.run_dir(*overrides)
    run.path.mkdir(parents=True)
    shutil.copy(whole / "run.json", run.path)
    shutil.copytree(text_data / "sentiment", tmp_path / "other" / "sentiment")
    words = tmp_path / "other" / "sentiment" / "data-bin" / "input0" / "dict.txt"
    words.write_text("".join(reversed(words.read_text().splitlines(keepends=True))))
    with pytest.raises(
        RunError, match=r"the data are not those that .* was begun with \(dictionaries [0-9a-f]{12}, not"
    ):
        text_runs.start(*overrides, f"paths.data={tmp_path / 'other'}")
    assert evaluate([str(whole), "--data", str(tmp_path / "other")]) == 1
    assert "was trained with: dictionaries" in capfd.readouterr().err


def test_weights_of_other_data_are_not_taken_over(text_runs: Any, narrow: tuple[str, ...], tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(text_runs.data, data)
    small = ("data.name=translation", "data.max_tokens=60", "data.generation.beam=2", "logger=none", *narrow)
    settings = [f"paths.data={data}", "optimizer.lr=0.03", "trainer.max_epochs=1", "protocol.test=false", *small]
    quoted = ",".join(f"'{word}'" for word in ["experiment=ha_de_en_scratch", "attention=softmax", *settings])
    finetune = ("experiment=ha_de_en_finetune", *small, "trainer.max_epochs=1", f"init_from.overrides=[{quoted}]")
    with pytest.raises(RunError, match=r"optimizer.lr=0.1: .* init_from.rate says its rate"):
        text_runs.start(*finetune, f"paths.data={data}", "optimizer.lr=0.1")
    text_runs.start(*finetune, f"paths.data={data}", "protocol.test=false")
    manifest = data / "translation" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"split_hash": "0" * 64}))
    with pytest.raises(
        RunError, match=r"init_from: that run was trained with other data of the same name \(splits 0000"
    ):
        text_runs.start(*finetune, f"paths.data={data}", "protocol.test=false", "seed=0", "attention=sinkhorn")


def flip_a_bit(path: Path) -> None:
    """Of a weight, in the middle of the file, where neither torch nor fairseq looks."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        tensors = [part for part in archive.infolist() if "/data/" in part.filename]
        largest = max(tensors, key=lambda part: part.file_size)
    content[largest.header_offset + 200 + largest.file_size // 2] ^= 0x40
    path.unlink()  # the others of the run may be this very file
    path.write_bytes(content)


def test_a_flipped_bit_of_a_weight_is_no_checkpoint_of_fairseq_s(
    whole: Path, text_runs: Any, sentiment: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    run = text_runs.run_dir(*sentiment, "attention=sinkhorn", "attention.n_iters=3")
    shutil.copytree(whole, run.path)
    best = run.checkpoints / "checkpoint_best.pt"
    flip_a_bit(best)
    assert torch.load(best, weights_only=False)["cfg"]  # which torch takes
    assert evaluate([str(run.path), "--split", "test"]) == 1
    assert f"checkpoint {best} cannot be read: its part " in capfd.readouterr().err
    last = run.checkpoints / "checkpoint_last.pt"
    flip_a_bit(last)
    (run.path / "result.json").unlink()
    text_runs.start(*sentiment, "attention=sinkhorn", "attention.n_iters=3")
    assert "can be read: the run begins anew" in capfd.readouterr().err
    assert (run.path / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_a_backend_reaches_fairseqs_process(text_runs: Any, sentiment: tuple[str, ...]) -> None:
    """Where it is not for the device, it is named before the first step."""
    overrides = (*sentiment, "attention=sinkhorn", "attention.n_iters=3", "trainer.max_epochs=1")
    text_runs.start(*overrides, "attention.backend=streaming")
    with pytest.raises(RunError, match=r"backend='triton' needs tensors on a CUDA device .*; use backend='auto'"):
        text_runs.start(*overrides, "attention.backend=triton")
    run = text_runs.run_dir(*overrides, "attention.backend=triton")
    assert not (run.path / "metrics.jsonl").exists() or not (run.path / "metrics.jsonl").read_text()
