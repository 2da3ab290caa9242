import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from experiments import demo

ROOT = Path(__file__).parents[2]
TINY = ["data.val_size=200", "data.test_size=4400", "trainer.max_epochs=2", "trainer.accelerator=cpu"]


@pytest.fixture
def overrides(runs):
    return [*TINY, f"paths.runs={runs.folder}", f"paths.data={runs.data}"]


def test_the_runs_are_those_of_the_paper(overrides):
    jobs = demo.jobs(overrides)
    assert len(jobs) == len({job.folder.path for job in jobs}) == 20
    settings = {
        (job.folder.config["model"]["patch_size"], job.folder.config["attention"]["name"], job.folder.config["seed"])
        for job in jobs
    }
    assert settings == {
        (patch, name, seed) for patch in (7, 14) for name in ("softmax", "sinkhorn") for seed in range(5)
    }
    assert {job.folder.config["attention"].get("n_iters") for job in jobs} == {None, 5}


def test_the_second_part_is_softmax_against_three_half_steps_on_shapes(runs):
    jobs = demo.jobs([f"paths.runs={runs.folder}"], "shapes_set")
    assert len(jobs) == len({job.folder.path for job in jobs}) == 10
    configs = [job.folder.config for job in jobs]
    assert {
        (config["attention"]["name"], config["attention"].get("n_iters"), config["seed"]) for config in configs
    } == {(*attention, seed) for attention in (("softmax", None), ("sinkhorn", 3)) for seed in range(5)}
    for config in configs:
        del config["attention"], config["seed"], config["label"], config["optimizer"]["lr"]
        assert config == configs[0]
    assert (configs[0]["model"]["hidden"], configs[0]["data"]["num_points"]) == (64, 256)


def test_parts_are_run_alone_or_all_together(monkeypatch, runs, capfd):
    started = []
    monkeypatch.setattr(demo, "train_all", lambda waiting, *_: started.extend(waiting) or ["not now"])
    for words, experiments in (([], set(demo.PARTS)), (["shapes_set"], {"shapes_set"})):
        started.clear()
        assert demo.main([*words, f"paths.runs={runs.folder}"]) == 1
        assert {job.folder.config["experiment"] for job in started} == experiments
    assert "error: not now" in capfd.readouterr().err


@pytest.mark.slow
def test_runs_in_parallel_then_the_report_and_nothing_the_second_time(overrides, runs, monkeypatch, capfd):
    monkeypatch.setitem(demo.SEEDS, "mnist_patches", range(1))
    monkeypatch.setattr(demo, "PATCH_SIZES", (14,))
    reported = []
    monkeypatch.setattr(demo, "report", lambda folders: reported.append(list(folders)) or 0)
    assert demo.main(["--workers", "2", "mnist_patches", *overrides]) == 0
    assert len(runs.folders()) == 2
    for folder in runs.folders():
        card = json.loads((folder / "run.json").read_text())
        assert (card["state"], card["attempts"][0]["threads"]) == ("finished", 1)
    words = capfd.readouterr().err
    assert "2 runs, 0 of them finished; 2 at a time" in words
    assert "2/2" in words
    monkeypatch.setattr(demo, "train_all", lambda *_: pytest.fail("nothing is left to train"))
    assert demo.main(["mnist_patches", *overrides]) == 0
    assert set(reported[0]) == set(reported[1]) == set(runs.folders())


@pytest.mark.slow
def test_a_failed_run_is_named_and_the_others_go_on(overrides, runs):
    console = Console(stderr=True)
    jobs = demo.jobs(overrides)[:2]
    jobs[0].overrides.append("+model.nonsense=1")
    (failure,) = demo.train_all(jobs, 1, console)
    assert "nonsense" in failure
    assert jobs[1].folder.finished


def test_epochs_are_counted_from_the_metrics(overrides, runs):
    job = demo.jobs(overrides)[0]
    assert job.epochs_done() == 0
    job.folder.path.mkdir(parents=True)
    (job.folder.path / "metrics.jsonl").write_text('{"epoch": 1, "split": "train"}\n{"epoch": 1, "split": "val"}\n')
    assert job.epochs_done() == 1
    (job.folder.path / "result.json").write_text("{}")
    assert job.epochs_done() == 2


def test_bad_arguments(capfd):
    assert demo.main(["--workers", "0"]) == 1
    assert demo.main(["nonsense.key=1"]) == 1
    words = capfd.readouterr().err
    assert "--workers must be at least 1; got 0" in words
    assert "nonsense" in words


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_stopped_with_its_workers(runs, overrides, signum):
    """The workers end too, each with a checkpoint, and the demo goes on from there the next time."""
    arguments = [sys.executable, "-m", "experiments.demo", "--workers", "1", "mnist_patches", *overrides]
    arguments.append("trainer.max_epochs=5000")
    process = subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        deadline = time.monotonic() + 200
        while not list(runs.folder.glob("*/*/checkpoints/*.ckpt")) and time.monotonic() < deadline:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.2)
        process.send_signal(signum)
        _, words = process.communicate(timeout=100)
    finally:
        if process.poll() is None:  # it would train for hours
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert "stopped; the same command goes on from the last checkpoints" in words
    (folder,) = runs.folders()
    card = json.loads((folder / "run.json").read_text())
    assert card["state"] == "interrupted"
    with pytest.raises(ProcessLookupError):
        os.kill(card["attempts"][0]["pid"], 0)
