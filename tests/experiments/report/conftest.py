"""Run folders as the runner leaves them, with numbers of the test's choice."""

import contextlib
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


HOSTILE = "<img src=x onerror=\"document.title='broken in'\"></script><script>document.title='broken in'</script>"


@pytest.fixture(scope="module")
def all_kinds_of_runs(tmp_path_factory):
    """Runs of two experiments with everything a run can leave, a check of the theory, and runs that do not count.

    Returns:
        The folder of the runs, and result.json's test accuracies (chosen, last) of those that count by folder.
    """
    runs = tmp_path_factory.mktemp("kinds") / "runs"
    make = _maker(runs.parent)
    for name, n_iters, lead in (("softmax", 1, 0.0), ("sinkhorn", 3, 0.05), ("sinkhorn", 5, 0.07)):
        for patch_size in (7, 14):
            for seed in range(5):
                chosen = 0.8 + lead + 0.01 * ((seed * 7 + n_iters) % 5) + 0.001 * patch_size
                folder = make(name, seed, chosen, chosen - 0.004, n_iters=n_iters, patch_size=patch_size)
                _leave_everything(folder, seed, n_iters, chosen)
    for seed in range(2):
        make("softmax", seed, 0.5, experiment="shapes_set", config={"model.words": f"{HOSTILE}{seed}"})
    make("softmax", 7, state="failed", message=HOSTILE)
    make("softmax", 8, state="interrupted")
    for name, content in (("result.json", '{"hash"'), ("run.json", "")):
        (make("sinkhorn", 9 if name == "run.json" else 10) / name).write_text(content, encoding="utf-8")
    check = runs / "theory" / "invariance"
    check.mkdir(parents=True)
    statement = {"sentence": HOSTILE, "expected": "0", "measured": 0.0, "tolerance": 0.1, "holds": True}
    content = {"name": "invariance", "title": "T", "statements": [statement], "options": {}, "seconds": 1.0}
    (check / "results.json").write_text(json.dumps(content | {"figure": "figure.svg"}), encoding="utf-8")
    (check / "figure.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>', encoding="utf-8")
    expected = {}
    for path in runs.glob("*/*/result.json"):
        with contextlib.suppress(json.JSONDecodeError):
            result = json.loads(path.read_text(encoding="utf-8"))
            if (path.parent / "run.json").stat().st_size:
                places = (result[place]["test"]["accuracy"] for place in ("best", "last"))
                expected[str(path.parent)] = tuple(places)
    return runs, expected


def _leave_everything(folder, seed, n_iters, chosen):
    rows = [
        {"epoch": epoch, "step": epoch, "split": "val", "accuracy": chosen - 0.3 / epoch, "loss": 1 / epoch}
        for epoch in (1, 2, 5, 20, 45)
    ]
    timing = [{"epoch": epoch, "step": epoch, "seconds": 2.0 + n_iters, "samples_per_second": 9.0} for epoch in (1, 2)]
    sums = [
        {"epoch": epoch, "step": epoch, "layer": layer, "n_tokens": 4, "row_error": 0.0, "column_error": width}
        | {"column_sums": [1 - width, 1 - width / 2, 1 + width / 2, 1 + width]}
        for epoch, width in ((1, 0.8 + 0.01 * seed), (45, 0.2 / n_iters + 0.001 * seed))
        for layer in ("blocks.0", "blocks.1")
    ]
    for name, lines in (("metrics", rows), ("timing", timing), ("column_sums", sums)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
