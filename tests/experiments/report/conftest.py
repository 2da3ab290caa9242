"""Run folders as the runner leaves them, with numbers of the test's choice."""

import json
import socket

import pytest
import yaml

from experiments.runners.run_dir import identity, run_hash, train_command


def _config(experiment, attention, n_iters, seed, patch_size, lr, extra):
    config = {
        "experiment": experiment,
        "label": f"{attention}-{n_iters}-patch{patch_size}-seed{seed}",
        "seed": seed,
        "attention": {"name": attention, "n_iters": n_iters} if attention != "softmax" else {"name": "softmax"},
        "model": {"name": "sinkformer_vit_mnist", "patch_size": patch_size},
        "data": {"name": "mnist5k", "split_seed": 0, "folder": "data", "batch_size": 100},
        "optimizer": {"name": "adam", "lr": lr},
        "trainer": {"max_epochs": 45, "devices": 1},
        "paths": {"runs": "runs"},
    }
    for key, value in extra.items():
        *groups, last = key.split(".")
        place = config
        for group in groups:
            place = place.setdefault(group, {})
        place[last] = value
    return config


def _maker(tmp_path):
    def make(
        attention="softmax",
        seed=0,
        chosen=0.9,
        last=None,
        *,
        n_iters=5,
        patch_size=7,
        lr=0.001,
        split="split-a",
        experiment="mnist_patches",
        state="finished",
        root=None,
        best_epoch=40,
        day=1,
        pid=1,
        message=None,
        suffix="",
        selected_on="val",
        config=None,
    ):
        config = _config(experiment, attention, n_iters, seed, patch_size, lr, config or {})
        digest = run_hash(config)
        folder = (root or tmp_path / "runs" / experiment) / f"{config['label']}{suffix}-{digest[:8]}"
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        attempt = {
            "started": f"2026-11-{day:02d}T10:00:00+00:00",
            "ended": f"2026-11-{day:02d}T10:05:00+00:00" if state != "running" else None,
            "state": state,
            "message": message,
            "from_step": 0,
            "host": socket.gethostname(),
            "pid": pid,
            "platform": "Linux",
            "devices": ["cpu"],
            "threads": 1,
        }
        card = {
            "hash": digest,
            "experiment": experiment,
            "label": config["label"],
            "seed": seed,
            "state": state,
            "identity": identity(config),
            "command": train_command([f"experiment={experiment}", f"attention={attention}", f"seed={seed}"]),
            "git": {"commit": "0123abcd", "dirty": False, "diff": ""},
            "versions": {"python": "3.11", "torch": "2.14.1"},
            "data": {"name": "mnist5k", "split_hash": split},
            "attempts": [attempt],
        }
        (folder / "run.json").write_text(json.dumps(card), encoding="utf-8")
        if state == "finished":
            result = {
                "hash": digest,
                "experiment": experiment,
                "label": config["label"],
                "seed": seed,
                "epochs": 45,
                "selected_on": selected_on,
                "metric": "accuracy",
                "best": {"epoch": best_epoch, "test": {"loss": 0.5, "accuracy": chosen}},
                "last": {"epoch": 45, "test": {"loss": 0.5, "accuracy": chosen if last is None else last}},
            }
            (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
        return folder

    return make


def _makers(make_run):
    def make(values, **options):
        folders = []
        for attention, numbers in values.items():
            for seed, value in enumerate(numbers):
                name, n_iters = ("softmax", 1) if attention == "softmax" else ("sinkhorn", attention)
                folders.append(make_run(name, seed, value, n_iters=n_iters, **options))
        return folders

    return make


@pytest.fixture
def make_run(tmp_path):
    """`make_run(attention, seed, chosen, ...)` -> the folder of a finished run; `state=` makes an unfinished one."""
    return _maker(tmp_path)


@pytest.fixture
def make_runs(make_run):
    """`make_runs(values_by_attention, ...)`: seeds 0, 1, ... for each of "softmax" or numbers of half-steps."""
    return _makers(make_run)


@pytest.fixture(scope="module")
def some_runs(tmp_path_factory):
    """A folder of runs for all tests of a module, which only read it: five seeds of softmax and of 5 half-steps."""
    folder = tmp_path_factory.mktemp("some")
    softmax, sinkhorn = [0.801, 0.812, 0.793, 0.804, 0.815], [0.871, 0.893, 0.864, 0.8755, 0.906]
    _makers(_maker(folder))({"softmax": softmax, 5: sinkhorn})
    return folder / "runs", softmax, sinkhorn
