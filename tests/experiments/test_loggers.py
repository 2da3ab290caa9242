import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import wandb
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from experiments.config import compose, resolve
from experiments.report.collect import collect
from experiments.report.curves import read_errors
from experiments.runners import classifier, recorder


def kill_at(step):
    def patch():
        original = classifier.Classifier.training_step

        def training_step(self, batch, batch_idx):
            if self.global_step == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, batch, batch_idx)

        classifier.Classifier.training_step = training_step

    return patch


def records(file: Path, kind: str) -> list[dict]:
    """The records of a kind of an offline wandb run, as wandb itself reads them."""
    tool = Path(sys.executable).with_name("wandb")
    lines = subprocess.run([tool, "leet", "inspect", "--json", file], check=True, capture_output=True, text=True).stdout
    return [record[kind] for record in map(json.loads, lines.splitlines()) if record["type"] == kind]


def history(file: Path) -> list[dict]:
    """The rows of an offline wandb run."""
    return [record["item"] for record in records(file, "history")]


def summary(file: Path) -> dict:
    """What stands in the summary of an offline wandb run in the end."""
    return {name: value for record in records(file, "summary") for name, value in record["update"].items()}


def as_wandb(row: dict) -> dict:
    metrics = {f"{row['split']}/{name}": row[name] for name in ("loss", "accuracy", "lr") if name in row}
    return {**metrics, "epoch": row["epoch"], "trainer/global_step": row["step"]}


def test_none_writes_metrics_jsonl_alone(finished):
    names = {path.name for path in finished().iterdir()}
    assert names == {
        ".lock",
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
        "result.json",
        "run.json",
        "timing.jsonl",
    }


@pytest.mark.slow
def test_loggers_do_not_change_the_numbers(runs, finished, rows):
    folder = runs.start("logger=all").folder
    assert folder.name == finished().name
    assert (folder / "metrics.jsonl").read_bytes() == (finished() / "metrics.jsonl").read_bytes()
    with open(folder / "metrics.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(rows(folder))
    for line, row in zip(table, rows(folder), strict=True):
        assert {name: value for name, value in line.items() if value} == {
            name: str(value) for name, value in row.items()
        }
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    assert file.name == f"run-{folder.name[-8:]}.wandb"
    shown = [{name: value for name, value in row.items() if name[0] != "_"} for row in history(file)]
    assert shown == [as_wandb(row) for row in rows(folder)]
    result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    told = summary(file)
    assert told["result"] == result
    for place in ("best", "last"):
        assert told[f"{place}/test/accuracy"] == result[place]["test"]["accuracy"]
        assert told[f"{place}/epoch"] == result[place]["epoch"]
    (start,) = records(file, "run")
    assert start["run_group"] == "mnist_patches"
    assert sorted(start["tags"]) == ["MNIST5k", "sinkformer_vit_mnist", "softmax"]
    config = resolve(compose(["experiment=mnist_patches", "attention=sinkhorn", "attention.n_iters=3"]))
    assert recorder.tags(config)[:2] == ["sinkhorn", "n_iters=3"]
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("val/loss")] == [4, 8, 12]
    assert events.Scalars("best/test/accuracy")[0].value == pytest.approx(result["best"]["test"]["accuracy"])
    assert b"model/patch_size" in b"".join(events.PluginTagToContent("hparams").values())


def test_the_report_reads_an_offline_run(runs, finished, tmp_path):
    """Of a run of which only the wandb folder was brought back: the same numbers, settings, split and curves."""
    folder = runs.start("logger=wandb").folder
    (wandb_folder,) = folder.glob("wandb/offline-run-*")
    elsewhere = tmp_path / "collected" / wandb_folder.name
    shutil.copytree(wandb_folder, elsewhere)
    (here,), problems = collect([finished()])
    assert problems == []
    (there,), problems = collect([tmp_path / "collected"])
    assert problems == []
    assert there.folder == elsewhere
    for name in ("experiment", "attention", "seed", "settings", "split", "chosen", "last", "best_epoch", "quantity"):
        assert getattr(there, name) == getattr(here, name), name
    assert read_errors(there, "val") == read_errors(here, "val") != {}
    assert collect([folder])[0][0].folder == folder  # the copy within a run's folder is no second run
    file = next(elsewhere.glob("*.wandb"))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    runs_found, (problem,) = collect([elsewhere])
    assert runs_found == []
    assert problem.state in ("interrupted", "unreadable")
    file.write_bytes(b"no wandb file")
    assert collect([elsewhere])[1][0].state == "unreadable"


def test_wandb_offline_after_two_kills(runs, finished, rows):
    """Each attempt leaves a folder under the same id; the newest holds the whole history, each row once, in order."""
    more = ["logger=all", "trainer.checkpoint_every_n_steps=3"]
    wandb.teardown()  # a forked child would use this process's service, which does not die with it
    for step in (7, 10):
        assert runs.in_child(kill_at(step), *more) == -signal.SIGKILL
    folder = runs.start(*more).folder
    assert (folder / "metrics.jsonl").read_bytes() == (finished() / "metrics.jsonl").read_bytes()
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime)
    assert len(files) == 3
    assert {file.name for file in files} == {f"run-{folder.name[-8:]}.wandb"}
    shown = history(files[-1])
    steps = [row["_step"] for row in shown]
    assert steps == list(range(len(steps)))
    plain = [{name: value for name, value in row.items() if name[0] != "_"} for row in shown]
    assert plain == [as_wandb(row) for row in rows(folder)]
    # Each attempt has an event file of its own. Two that began in the same second have no order that means anything, so
    # they are read one by one.
    steps = set()
    for file in folder.glob("tensorboard/**/events.out.tfevents.*"):
        events = EventAccumulator(str(file)).Reload()
        if "val/loss" in events.Tags()["scalars"]:
            steps |= {event.step for event in events.Scalars("val/loss")}
    assert steps == {4, 8, 12}


@pytest.mark.parametrize("error", [wandb.errors.CommError("no route to host"), OSError("unreachable")])
def test_no_network_for_wandb(runs, monkeypatch, capsys, error):
    """The run is logged offline, and says so in one line."""
    start, modes = wandb.init, []

    def init(**settings):
        modes.append(settings["mode"])
        assert (settings["group"], settings["resume"]) == ("mnist_patches", "allow")
        if settings["mode"] == "online":
            raise error
        return start(**settings)

    monkeypatch.setattr(wandb, "init", init)
    folder = runs.start("logger=wandb", "wandb=online", "trainer.max_epochs=1").folder
    assert modes == ["online", "offline"]
    assert f"warning: wandb is out of reach ({error}); this run is logged offline" in capsys.readouterr().err
    assert len(list(folder.glob("wandb/offline-run-*"))) == 1


def refuse(*_, **__):
    raise RuntimeError("no more of this\nand a second line")


def kill_the_service(*_, **__):
    """Ends the process of wandb's that is a child of this one, as a machine does that runs out of memory."""
    found = subprocess.run(["ps", "-ww", "-eo", "pid,ppid,args"], check=True, capture_output=True, text=True).stdout
    for pid, parent, words in (line.split(None, 2) for line in found.splitlines()[1:]):
        if int(parent) == os.getpid() and "wandb-core" in words:
            os.kill(int(pid), signal.SIGKILL)


FAULTS = {
    "wandb.init": ("wandb", lambda patch: patch.setattr(wandb, "init", refuse)),
    "wandb.log": ("wandb", lambda patch: patch.setattr(wandb.Run, "log", refuse)),
    "wandb.finish": ("wandb", lambda patch: patch.setattr(wandb.Run, "finish", refuse)),
    "wandb's service": ("wandb", lambda patch: before_the_second_epoch(patch, kill_the_service)),
    "TensorBoard's start": ("TensorBoard", lambda patch: patch.setattr(recorder, "_tensorboard_logger", refuse)),
    "TensorBoard's scalars": ("TensorBoard", lambda patch: patch.setattr(TensorBoardLogger, "log_metrics", refuse)),
    "TensorBoard's end": ("TensorBoard", lambda patch: patch.setattr(TensorBoardLogger, "finalize", refuse)),
    "TensorBoard's table": ("TensorBoard", lambda patch: patch.setattr(TensorBoardLogger, "log_hyperparams", refuse)),
}


def before_the_second_epoch(patch, act):
    step = classifier.Classifier.training_step

    def training_step(self, batch, batch_idx):
        if self.global_step == 4:
            act()
        return step(self, batch, batch_idx)

    patch.setattr(classifier.Classifier, "training_step", training_step)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_dashboard_that_fails_costs_its_log_alone(runs, finished, monkeypatch, capsys, fault):
    title, break_it = FAULTS[fault]
    wandb.teardown()  # so that the service is of this run
    break_it(monkeypatch)
    folder = runs.start("logger=all", "columns.every=1").folder
    assert (folder / "metrics.jsonl").read_bytes() == (finished() / "metrics.jsonl").read_bytes()
    assert (folder / "result.json").read_bytes() == (finished() / "result.json").read_bytes()
    assert json.loads((folder / "run.json").read_text())["state"] == "finished"
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"warning: {title} has failed (")
    # The other one has all of it, and the next run's dashboards are whole.
    if title == "wandb":
        events = EventAccumulator(str(folder / "tensorboard")).Reload()
        assert [event.step for event in events.Scalars("val/loss")] == [4, 8, 12]
    monkeypatch.undo()
    again = runs.start("logger=all", "seed=1", "trainer.max_epochs=1").folder
    (file,) = again.glob("wandb/offline-run-*/*.wandb")
    assert summary(file)["result"] == json.loads((again / "result.json").read_text(encoding="utf-8"))
    assert "warning" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_without_a_home(runs, tmp_path):
    """A user whom the machine does not know, as containers have them."""
    code = (
        "import pwd, sys\n"
        "def nobody(*_): raise KeyError('getpwuid(): uid not found')\n"
        "pwd.getpwuid = nobody\n"
        "from experiments import train\n"
        "train.main()"
    )
    environment = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    words = [sys.executable, "-c", code, *runs.overrides("logger=all", "trainer.max_epochs=1")]
    root = Path(__file__).parents[2]
    done = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    (folder,) = runs.folders()
    assert (folder / "result.json").is_file()
    assert "Traceback" not in done.stderr


def test_progress_is_a_line_per_epoch_outside_of_a_terminal(runs, capsys):
    runs.start("trainer.max_epochs=2")
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("epoch")]
    assert [line.split()[1] for line in lines] == ["1/2", "2/2"]
    assert "val: loss" in lines[0]


def test_progress_bar_in_a_terminal(runs, monkeypatch):
    from lightning.pytorch.callbacks import RichProgressBar

    from experiments.config import compose, resolve
    from experiments.runners import lightning
    from experiments.runners.run_dir import RunDir

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    config = resolve(compose(runs.overrides()))
    plan = lightning.prepare(config, RunDir.of(config))
    assert any(isinstance(callback, RichProgressBar) for callback in plan.trainer.callbacks)
    assert not plan.recorder.lines
    config["trainer"]["progress_bar"] = False
    assert lightning.prepare(config, RunDir.of(config)).recorder.lines


def test_a_metric_is_the_shortest_decimal_of_its_float32():
    metrics = classifier.RunningMetrics(2)
    logits = torch.tensor([[2.0, 0.0]] * 10)
    metrics.update(logits, torch.tensor([0] * 7 + [1] * 3), torch.full((10,), 0.5), 10)
    assert metrics.values() == {"loss": 0.5, "accuracy": 0.7}
    assert recorder.json_line(metrics.take()) == '{"loss": 0.5, "accuracy": 0.7}\n'
