"""The command itself: one run, sweeps, and what it says when something is wrong."""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hydra.core.plugins import Plugins

from experiments import train
from experiments.config import compose, resolve
from experiments.errors import RunError
from experiments.report.collect import read_run
from experiments.runners import lightning
from experiments.runners.checkpoints import newest_valid
from experiments.runners.run_dir import run_hash
from tests.experiments import searching

ROOT = Path(__file__).parents[2]


@pytest.fixture
def command(runs, capfd):
    """Calls `python -m experiments.train` in this process; exit code and what it printed."""

    def call(*more, small=True, options=()):
        before = sys.argv
        sys.argv = ["experiments/train.py", *options, *(runs.overrides(*more) if small else more)]
        try:
            train.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        finally:
            sys.argv = before
        printed = capfd.readouterr()
        return code, printed.out + printed.err

    return call


@pytest.mark.parametrize("where", ["prepare", "training_step"])
def test_ctrl_c(command, monkeypatch, where):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(lightning if where == "prepare" else lightning.Classifier, where, interrupt)
    code, words = command()
    assert code == 130
    assert words.splitlines()[-1] == "stopped by Ctrl-C; the same command goes on from the last checkpoint"
    assert "Traceback" not in words


def test_help(command):
    code, words = command("--help", small=False)
    assert code == 0
    assert words.startswith("usage: python -m experiments.train ")
    assert "  mnist_patches " in words
    assert "Traceback" not in words
    code, words = command("experiment=mnist_patches", "--help", small=False)
    assert code == 0
    assert "max_epochs: 45" in words


def test_a_run_and_its_repetition(command, runs):
    code, words = command()
    assert code == 0
    (folder,) = runs.folders()
    assert f"finished: {folder}: test accuracy" in words
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    code, words = command()
    assert code == 0
    result = train.in_words(json.loads((folder / "result.json").read_text()))
    assert words.strip() == (
        f"finished already, nothing to do: {folder}: {result}; to train longer give more than trainer.max_epochs=3, "
        "which is a run of its own, from the start"
    )
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


BAD = [
    (["attention=sinkhorn", "attention.n_iters=0"], "n_iters must be an integer >= 1"),
    (["attention=sinkhorn", "+attention.foo=1"], "normalizer 'sinkhorn' has no option foo"),
    (["attention=custom", "attention.name=bar"], "unknown normalizer 'bar'"),
    (["model.patch_size=5"], "patch_size must divide img_size 28"),
    (["model.name=foo"], "model.name=foo is not registered"),
    (["+model.foo=1"], "foo"),
    (["paths.data=/nowhere/at/all"], "the data folder paths.data=/nowhere/at/all is not there"),
    (["trainer.precision=foo"], "trainer.precision must be one of"),
    (["trainer.precision=fp16"], "fp16 needs a GPU"),
    (["trainer.accelerator=quantum"], "trainer: "),
    (["optimizer.lr=-1"], "optimizer: Invalid learning rate"),
    (["optimizer._target_=torch.optim.Foo"], "torch.optim.Foo"),
    (["+scheduler.foo=1"], "scheduler: "),
    (["data.batch_size=0"], "batch_size must be an integer of at least 1; got 0"),
    (["data.val_size=4000"], "nothing is left to train on"),
    (["data.train_on=[dev]"], "train_on must list splits"),
    (["data._target_=builtins.dict"], "must name a DataModule"),
    (["+data.foo=1"], "foo"),
    (["+trainer.foo=1"], "there is no trainer.foo"),
    (["experiment=foo"], "Could not find 'experiment/foo'; there are cats_dogs_finetune, "),
    (["experiment=mnist_patch"], "Could not find 'experiment/mnist_patch', did you mean mnist_patches? there are "),
    (["data="], "Could not find 'data/'"),
    (["data=null"], "Config group override must be a string or a list"),
    (["hydra/launcher=slurm"], "hydra/launcher=slurm acts on sweeps alone, and without -m there is none"),
    (["hydra/launcher=joblib"], "hydra/launcher=joblib acts on sweeps alone"),
    (["seed=0,1"], "-m"),
    (["seed=x"], "seed"),
    (["attention.foo=1"], "Could not override 'attention.foo'"),
    (["attention=softmax", "attention.n_iters=5"], "'attention.n_iters': it is a key of attention=sinkhorn, "),
]


@pytest.mark.parametrize(("more", "words"), BAD, ids=lambda case: str(case)[:40])
def test_one_clear_message_and_no_folder(command, runs, more, words):
    code, printed = command(*more)
    assert code == 1
    assert words in printed
    assert "Traceback" not in printed
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1
    assert not runs.folder.exists()


def test_text_in_an_experiment_on_images(command):
    code, printed = command("experiment=mnist_patches", "data=imdb", small=False)
    assert code == 1
    assert "data._target_ is missing: text has none, which engine=fairseq trains" in printed


def test_missing_mnist_files(command, runs, tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    small = ["experiment=mnist_patches", "data=mnist", f"paths.data={folder}", f"paths.runs={runs.folder}"]
    code, printed = command(*small, small=False)
    assert code == 1
    command_line = f"python -m experiments.data.prepare mnist --folder {folder}"
    assert f"not found in {folder}/MNIST/raw: run `{command_line}`" in printed
    assert not runs.folder.exists()


def test_no_experiment(command):
    code, printed = command(small=False)
    assert code == 1
    assert "You must specify 'experiment'" in printed
    assert "mnist_patches" in printed


def test_a_model_that_does_not_fit_its_data(runs):
    with pytest.raises(RunError, match="model: "):
        runs.start("model.in_chans=3")
    assert not runs.folder.exists()


def test_a_sweep_its_repetition_and_hydras_folders(command, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sweep = ["attention=sinkhorn", "attention.n_iters=1,3", "seed=0,1", "trainer.max_epochs=1"]
    code, words = command(*sweep, options=["-m"])
    assert code == 0
    assert len(runs.folders()) == 4
    assert words.count("finished: ") == 4
    code, words = command(*sweep, options=["-m"])
    assert code == 0
    assert words.count("finished already, nothing to do") == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]
    commands = {json.loads((folder / "run.json").read_text())["command"] for folder in runs.folders()}
    assert len(commands) == 4
    assert not any("-m attention" in line or "1,3" in line for line in commands)


@pytest.mark.parametrize(("metric", "worst"), [("accuracy", 0.0), ("loss", math.inf)])
def test_a_search_is_told_the_metric_of_the_chosen_epoch(command, runs, rows, tmp_path, monkeypatch, metric, worst):
    monkeypatch.setenv("SEARCHED", str(tmp_path / "searched.json"))
    name = "hydra_plugins.searching.Searching"  # Hydra takes plugins from there alone
    monkeypatch.setitem(Plugins.instance().class_name_to_class, name, searching.Searching)
    sweep = [f"hydra.sweeper._target_={name}", f"protocol.metric={metric}"]
    sweep += ["trainer.max_epochs=2", "attention=sinkhorn", "attention.n_iters=1,3", "optimizer.lr=1e-3,1e30"]
    for _ in range(2):  # the second time all are finished, or diverge again
        code, words = command(*sweep, options=["-m"])
        assert code == 0, words
        found = json.loads((tmp_path / "searched.json").read_text())
        assert len(found) == 4
        values = {}
        for folder in runs.folders():
            card = json.loads((folder / "run.json").read_text())
            place = card["identity"]["attention"]["n_iters"], card["identity"]["optimizer"]["lr"]
            of_epochs = [row[metric] for row in rows(folder) if row["split"] == "val"]
            best = max(of_epochs, default=0.0) if metric == "accuracy" else min(of_epochs, default=0.0)
            values[place] = worst if card["state"] == "diverged" else best
        told = {
            (int(words.split("n_iters=")[1].split()[0]), float(words.split("lr=")[1].split()[0])): value
            for words, value in found.items()
        }
        assert told == values
        assert told[3, 1e30] == worst


def test_a_sweep_that_does_not_search_fails_where_a_run_diverges(command, runs):
    code, words = command("optimizer.lr=1e30,1e-3", "attention=sinkhorn", "trainer.max_epochs=1", options=["-m"])
    assert code == 1
    assert "the loss became NaN at step 1" in words
    assert words.count("finished: ") == 1


def test_one_bad_run_does_not_lose_the_others(command, runs):
    code, words = command("attention=sinkhorn", "attention.n_iters=1,0,3", "trainer.max_epochs=1", options=["-m"])
    assert code == 1
    assert "Traceback" not in words
    assert re.search(r"error in python -m .*attention\.n_iters=0.*: model: n_iters must be an integer >= 1", words)
    assert len(runs.folders()) == 2
    assert all((folder / "result.json").exists() for folder in runs.folders())


def test_a_crashed_run_does_not_lose_the_others(command, runs, monkeypatch):
    original = lightning.train

    def crash(plan, run):
        if plan.config["seed"] == 0:
            raise ArithmeticError("lost a sign")
        return original(plan, run)

    monkeypatch.setattr(lightning, "train", crash)
    code, words = command("seed=0,1", "trainer.max_epochs=1", options=["-m"])
    assert code == 1
    assert "lost a sign" in words
    assert sorted((folder / "result.json").exists() for folder in runs.folders()) == [False, True]


@pytest.mark.slow
def test_joblib_runs_give_the_same_numbers(runs, other_runs):
    for seed in (0, 1):
        runs.start(f"seed={seed}", "trainer.max_epochs=1")
    sweep = ["seed=0,1", "trainer.max_epochs=1", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    arguments = [sys.executable, "-m", "experiments.train", "-m", *other_runs.overrides(*sweep)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(arguments, check=True, cwd=ROOT, env=environment, capture_output=True)
    assert len(other_runs.folders()) == 2
    for ours, theirs in zip(runs.folders(), other_runs.folders(), strict=True):
        assert ours.name == theirs.name
        assert (ours / "metrics.jsonl").read_bytes() == (theirs / "metrics.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_joblib_sweep_that_is_ended_leaves_no_worker_behind(runs, signum):
    """Each run saves a checkpoint and ends, and none begins after it."""
    sweep = ["seed=0,1,2,3", "trainer.max_epochs=100000", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    arguments = [sys.executable, "-m", "experiments.train", "-m", *runs.overrides(*sweep)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(arguments, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, **quiet) as process:
        until(lambda: sum((folder / "timing.jsonl").exists() for folder in runs.folders()) == 2)
        process.send_signal(signum)
        process.wait(60)
    cards = [json.loads((folder / "run.json").read_text()) for folder in runs.folders()]
    workers = {card["attempts"][-1]["pid"] for card in cards}
    assert process.pid not in workers
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    cards = [json.loads((folder / "run.json").read_text()) for folder in runs.folders()]
    # Where the sweep itself was killed, a worker may be taken along before it has written its card. Its run has lost
    # nothing by that: its last epoch has a whole checkpoint, and nobody takes it for one that runs.
    ended = {"interrupted"} if signum == signal.SIGTERM else {"interrupted", "running"}
    assert {card["state"] for card in cards} <= ended
    for folder in runs.folders():
        epochs = len((folder / "timing.jsonl").read_text().splitlines())
        start = newest_valid(folder / "checkpoints")
        assert start is not None
        assert start[1]["global_step"] >= 4 * (epochs - 1)  # of the epoch that is just over it may not be there yet
        assert read_run(folder).state == "interrupted"


def until(condition, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_the_stored_command_is_the_run(runs):
    outcome = runs.start("label='a=b, c'", "trainer.max_epochs=1")
    words = shlex.split(json.loads((outcome.folder / "run.json").read_text())["command"])
    assert words[:3] == ["python", "-m", "experiments.train"]
    assert run_hash(resolve(compose(words[3:]))) == outcome.result["hash"]
