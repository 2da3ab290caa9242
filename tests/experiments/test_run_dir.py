import copy
import errno
import json
import multiprocessing
import os
import pathlib
import pickle
import shlex
import signal
import time

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from experiments import files
from experiments.config import compose, resolve
from experiments.data import base
from experiments.errors import Diverged, RunError
from experiments.runners import checkpoints, classifier, run_dir
from experiments.train import execute


@pytest.fixture
def config(runs):
    return resolve(compose(runs.overrides("attention=sinkhorn")))


def test_hash_leaves_out_what_cannot_change_the_numbers(config):
    other = copy.deepcopy(config)
    other["paths"] = {"data": "/elsewhere", "runs": "/there"}
    other["data"] |= {"folder": "/elsewhere", "num_workers": 7}
    other["logger"]["wandb"] = True
    other["wandb"]["project"] = "mine"
    other["label"] = "my words"
    other["learning_rates"] = {"otherwise": 7}
    other["report"]["leave_out_below"] = 0.5
    other["trainer"] |= {"devices": 2, "accelerator": "gpu", "strategy": "ddp", "progress_bar": False, "threads": 3}
    assert run_dir.run_hash(other) == run_dir.run_hash(config)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("trainer", "max_epochs", 4),
        ("trainer", "precision", "bf16"),
        ("attention", "n_iters", 7),
        ("optimizer", "lr", 2e-3),
        ("model", "patch_size", 7),
        ("data", "split_seed", 1),
        ("data", "batch_size", 50),
        ("protocol", "select_on", "test"),
    ],
)
def test_hash_covers_what_changes_the_numbers(config, section, key, value):
    other = copy.deepcopy(config)
    assert other[section][key] != value
    other[section][key] = value
    assert run_dir.run_hash(other) != run_dir.run_hash(config)
    assert run_dir.run_hash(config | {"seed": 1}) != run_dir.run_hash(config)


def test_hash_ignores_order_and_spelling(config):
    backwards = {key: config[key] for key in reversed(config)}
    backwards["optimizer"] = dict(reversed(config["optimizer"].items()))
    backwards["optimizer"]["weight_decay"] = 0
    assert run_dir.run_hash(backwards) == run_dir.run_hash(config)
    assert len(run_dir.run_hash(config)) == 64


def test_folder_name_is_plain_and_found_again_under_another_label(config):
    run = run_dir.RunDir.of(config | {"label": "a=b, c #(1)/../ü"})
    assert run.path.parent.name == "mnist_patches"
    assert run.path.name == f"a-b-c-1-{run.hash[:8]}"
    run.path.mkdir(parents=True)
    assert run_dir.RunDir.of(config | {"label": "other"}).path == run.path


def test_folder_of_another_configuration_is_not_touched(config):
    run = run_dir.RunDir.of(config)
    run.path.mkdir(parents=True)
    (run.path / "run.json").write_text(json.dumps({"hash": "0" * 64}))
    with pytest.raises(RunError, match="belongs to another configuration"), run.attempt("", {}, [], 1):
        pass
    assert json.loads((run.path / "run.json").read_text()) == {"hash": "0" * 64}


def test_a_folder_of_runs_that_cannot_be_written_is_named(config, tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", pathlib.Path("/proc/nothing")):
        run = run_dir.RunDir.of({**config, "paths": {**config["paths"], "runs": str(place)}})
        message = r"cannot be written \(.+\): give another .*paths\.runs="
        with pytest.raises(RunError, match=message) as raised, run.attempt("", {}, [], 1):
            pass
        assert str(run.path) in str(raised.value)


def test_a_damaged_record_is_named(config):
    run = run_dir.RunDir.of(config)
    run.path.mkdir(parents=True)
    for content in ("{", "[]"):
        (run.path / "run.json").write_text(content)
        with (
            pytest.raises(RunError, match=r"run\.json cannot be read \(.*remove it and give"),
            run.attempt("", {}, [], 1),
        ):
            pass
        assert (run.path / "run.json").read_text() == content
        (run.path / "result.json").write_text(content)
        with pytest.raises(RunError, match=r"result\.json cannot be read"):
            run.result()
    assert run.finished
    (run.path / "result.json").write_text("")
    assert not run.finished


@pytest.mark.parametrize(("value", "kind"), [(float("nan"), "NaN"), (float("-inf"), "infinite")])
def test_a_run_that_diverges_says_so_in_its_card(config, value, kind):
    run = run_dir.RunDir.of(config)
    with pytest.raises(RunError) as raised, run.attempt("", {}, [], 1):
        raise Diverged.at("the loss", value, 37, 0, 1e-3)
    again = pickle.loads(pickle.dumps(raised.value))  # as a launcher brings it from another process
    assert isinstance(again, Diverged)
    assert str(again).startswith(f"the loss became {kind} at step 37, epoch 0; learning rate 0.001: the run has ")
    card = json.loads((run.path / "run.json").read_text())
    assert card["state"] == card["attempts"][0]["state"] == "diverged"
    assert card["attempts"][0]["message"] == str(raised.value)


def test_json_has_no_nan(tmp_path):
    content = {"a": [1.5, float("nan")], "b": {"c": float("inf"), "d": (float("-inf"), 2)}, "e": "NaN"}
    right = {"a": [1.5, None], "b": {"c": None, "d": [None, 2]}, "e": "NaN"}
    files.write_json(tmp_path / "object.json", content)
    files.append_line(tmp_path / "lines.jsonl", content)
    for name in ("object.json", "lines.jsonl"):
        text = (tmp_path / name).read_text()
        assert json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON")) == right


def test_run_card(finished):
    card = json.loads((finished() / "run.json").read_text())
    (attempt,) = card["attempts"]
    assert card["state"] == attempt["state"] == "finished"
    assert card["experiment"] == "mnist_patches"
    assert card["command"].startswith("python -m experiments.train experiment=mnist_patches model.patch_size=14")
    assert card["identity"]["trainer"] == {
        "max_epochs": 3,
        "precision": "32",
        "accumulate_grad_batches": 1,
        "gradient_clip_norm": None,
        "deterministic": True,
    }
    assert card["seeds"] == {"run": 0, "split": 0}
    assert card["data"]["sizes"] == {"train": 400, "val": 200, "test": 4400}
    assert card["versions"]["torch"]
    assert len(card["git"]["commit"]) == 40
    assert attempt["started"] <= attempt["ended"]
    assert attempt["pid"] == os.getpid()
    assert attempt["devices"] == ["cpu"]


def test_going_on_with_another_engine_is_said_and_kept(config, tmp_path, monkeypatch, capsys):
    run = run_dir.RunDir.of(config)
    for engine in ("native x86-64-v4 0a1b2c3d", "native x86-64-v4 0a1b2c3d", "portable (it was not built)"):
        monkeypatch.setattr(run_dir, "describe_cpu_engine", lambda engine=engine: engine)
        with run.attempt("train", {}, ["cpu"], 1):
            run.note_resumed(3)
    said = [line for line in capsys.readouterr().err.splitlines() if "computed by" in line]
    assert len(said) == 1
    assert "computed by portable (it was not built), before by native x86-64-v4 0a1b2c3d" in said[0]
    assert [each["cpu_engine"][:8] for each in run_dir.read_record(run.path / "run.json")["attempts"]] == [
        "native x",
        "native x",
        "portable",
    ]


def test_the_engine_of_a_gpu_is_kept_and_another_one_is_said(config, tmp_path, monkeypatch, capsys):
    run = run_dir.RunDir.of(config)
    for engine in (None, "triton, proven at its first use", "portable (no ptxas)"):
        monkeypatch.setattr(run_dir, "describe_device_engine", lambda engine=engine: engine)
        with run.attempt("train", {}, ["cuda:0"], 1):
            run.note_device_engine(engine)
    said = [line for line in capsys.readouterr().err.splitlines() if "computed by" in line]
    assert said == [
        "warning: attention on CUDA devices is now computed by portable (no ptxas), before by triton, proven at its "
        "first use: numbers may differ in their last bits"
    ]
    attempts = run_dir.read_record(run.path / "run.json")["attempts"]
    assert [each.get("device_engine", "")[:8] for each in attempts] == ["", "triton, ", "portable"]


def test_result_comes_last_and_times_stay_out_of_metrics(finished, rows):
    folder = finished()
    result = json.loads((folder / "result.json").read_text())
    assert [(row["epoch"], row["step"], row["split"]) for row in rows(folder)][:6] == [
        (1, 4, "train"),
        (1, 4, "val"),
        (2, 8, "train"),
        (2, 8, "val"),
        (3, 12, "train"),
        (3, 12, "val"),
    ]
    assert {key for row in rows(folder) for key in row} == {"epoch", "step", "split", "loss", "accuracy", "lr"}
    val = [row["accuracy"] for row in rows(folder) if row["split"] == "val"]
    assert result["best"]["epoch"] == val.index(max(val)) + 1
    tests = {row["epoch"]: row for row in rows(folder) if row["split"] == "test"}
    assert set(tests) == {result["best"]["epoch"], 3}
    assert result["last"]["test"]["accuracy"] == tests[3]["accuracy"]
    assert result["best"]["test"]["loss"] == tests[result["best"]["epoch"]]["loss"]
    timing = [json.loads(line) for line in (folder / "timing.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in timing] == [1, 2, 3]
    assert all(row["seconds"] > 0 and row["samples_per_second"] > 0 for row in timing)
    assert all(0 < row["waited_for_data"] < 1 for row in timing)
    kept = {path.name for path in (folder / "checkpoints").iterdir()}
    assert kept == {result[place]["checkpoint"].removeprefix("checkpoints/") for place in ("best", "last")}


def _hold(folder, ready, leave):
    from filelock import FileLock

    with FileLock(folder / ".lock"):
        ready.set()
        leave.wait(60)


def test_two_processes_never_train_the_same_run(runs, run_dir):
    run = run_dir()
    run.path.mkdir(parents=True)
    (run.path / "run.json").write_text(
        json.dumps({"hash": run.hash, "attempts": [{"pid": 4711, "host": "elsewhere", "started": "then"}]})
    )
    context = multiprocessing.get_context("fork")
    ready, leave = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(run.path, ready, leave))
    holder.start()
    assert ready.wait(60)
    with pytest.raises(
        RunError, match=r"another process is at this run already \(process 4711 on elsewhere, since then"
    ):
        runs.start()
    assert not (run.path / "metrics.jsonl").exists()
    # A lock falls with its process: nothing has to be removed by hand.
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert (run.path / ".lock").exists()
    assert not runs.start().was_finished


def test_full_disk_while_a_checkpoint_is_written(runs, monkeypatch, finished):
    def full(path, content):
        if path.name == "step00000008.ckpt":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        files.write_atomic(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_atomic", full)
        with pytest.raises(RunError, match=r"the disk is full.*step00000008.*Free some space"):
            runs.start()
    (folder,) = runs.folders()
    card = json.loads((folder / "run.json").read_text())
    assert card["state"] == "failed"
    assert "disk is full" in card["attempts"][0]["message"]
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step00000004.ckpt"]
    runs.start()
    assert (folder / "result.json").read_bytes() == (finished() / "result.json").read_bytes()


def test_full_disk_while_data_are_kept(runs, monkeypatch):
    def full(path, content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(base, "write_atomic", full)
    runs.data = runs.folder.parent / "data"
    runs.data.mkdir()
    with pytest.raises(RunError, match=r"^data: the disk is full.*digits.*: nothing has been trained"):
        runs.start()
    assert not runs.folder.exists()


@pytest.mark.parametrize("name", ["run.json", "result.json"])
def test_full_disk_while_a_record_is_written(runs, monkeypatch, finished, name):
    def full(path, content):
        if path.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        files.write_json(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(run_dir, "write_json", full)
        with pytest.raises(
            RunError, match=rf"the disk is full.*{name}.*stands at its last checkpoint. Free some space"
        ):
            runs.start()
    outcome = runs.start()
    assert not outcome.was_finished
    for file in ("metrics.jsonl", "result.json"):
        assert (outcome.folder / file).read_bytes() == (finished() / file).read_bytes()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, number):
    path = tmp_path / "file"
    files.write_atomic(path, "old")

    def full(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(RunError, match="quota"), files.explain_full_disk("x"):
        files.write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_other_system_errors_keep_their_name():
    with pytest.raises(PermissionError), files.explain_full_disk("x"):
        raise PermissionError(errno.EACCES, "no")


def test_a_crash_is_recorded(runs, monkeypatch):
    def broken(self, batch, batch_idx):
        raise ArithmeticError("lost a sign")

    monkeypatch.setattr(classifier.Classifier, "training_step", broken)
    with pytest.raises(ArithmeticError):
        runs.start()
    (folder,) = runs.folders()
    card = json.loads((folder / "run.json").read_text())
    assert (card["state"], card["attempts"][0]["message"]) == ("failed", "lost a sign")


AWKWARD = ["epoch=9-step=10.ckpt", "/d/my dir (1)/x", "a,b", "#5", "it's", 'say "so"', "back\\slash\\", "\\'", "ü", ""]


@pytest.mark.parametrize("value", AWKWARD)
def test_commands_carry_awkward_values(runs, value):
    """What Hydra's grammar and the shell would both take apart comes out as it went in."""
    (word,) = shlex.split(run_dir.train_command([run_dir.override("label", value)]))[3:]
    assert OverridesParser.create().parse_override(word).value() == value
    assert resolve(compose(runs.overrides(word)))["label"] == value


def test_checkpoint_names_need_no_quoting():
    name = checkpoints.checkpoint_name(123)
    assert run_dir.override("label", name) == f"label={name}"
    assert shlex.quote(name) == name


def test_the_share_of_an_epoch_that_waits_for_data_is_in_its_timing(runs, monkeypatch):
    """Data that take 0.1 s a batch, which the training does not."""
    monkeypatch.setattr(base, "Shares", SlowShares)
    folder = execute(compose(runs.overrides("attention=sinkhorn")), []).folder
    timing = [json.loads(line) for line in (folder / "timing.jsonl").read_text().splitlines()]
    assert all(row["waited_for_data"] * row["seconds"] > 4 * 0.1 for row in timing)


class SlowShares(base.Shares):
    """Batches that come late."""

    def __getitem__(self, index):
        time.sleep(0.1)
        return super().__getitem__(index)
