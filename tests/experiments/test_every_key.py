"""A walk over every key of every configuration: to change it changes the numbers, a file or how the run is made.

Or it is refused with a sentence; none is taken and ignored. `pytest -s` prints the keys and what each of them does.
"""

import contextlib
import copy
import functools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
import wandb
from omegaconf import OmegaConf, open_dict

from experiments import train
from experiments.config import CONFIGS, compose, resolve
from experiments.data import furniture
from experiments.data.base import DataModule
from experiments.data.cats_dogs import prepare as prepare_photos
from experiments.data.photos import PhotoStore
from experiments.data.prepare import main as prepare_data
from experiments.errors import RunError
from experiments.report.collect import Run, read_run
from experiments.runners import fairseq, lightning
from experiments.runners.checkpoints import AtomicCheckpointIO
from experiments.runners.recorder import RunLog
from experiments.runners.run_dir import RunDir
from tests.experiments.data.test_cats_dogs import kaggle  # noqa: F401  a fixture
from tests.experiments.data.test_cloud_folder import fill as fill_clouds
from tests.experiments.data.test_furniture import write_package
from tests.experiments.data.test_image_folder import fill as fill_images
from tests.experiments.data.test_mnist import write_idx
from tests.experiments.test_point_clouds import archive  # noqa: F401

pytestmark = pytest.mark.slow

CPU = ("trainer.accelerator=cpu", "trainer.threads=1", "logger=none", "trainer.max_epochs=2")
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2}
SMALL_VIT = tuple(f"+model.{name}={size}" for name, size in VIT.items() if name != "img_size")
FAIRSEQ = ("trainer.accelerator=cpu", "trainer.max_epochs=2", "logger=none")
#: Runs of which each key is changed in turn: experiment and what makes it small.
BASES: dict[str, tuple[str, ...]] = {
    "mnist_patches": (
        *CPU,
        *("attention=sinkhorn", "model.patch_size=14", "data.val_size=200", "data.test_size=4400"),
        *("data.eval_batch_size=1500", "scheduler.milestones=[1]"),
    ),
    "mnist_patches_official": (*CPU, "attention=sinkhorn", "model.patch_size=14", "data.test_size=4400"),
    "cats_dogs_standin": (*CPU, "attention=sinkhorn", "data.size=200", "data.eval_batch_size=20", "data.max_shift=1"),
    "cats_dogs_standin_finetune": (
        *CPU,
        *("attention=sinkhorn", "data.size=200", "data.eval_batch_size=20"),
        "init_from.overrides=['experiment=cats_dogs_standin','attention=softmax','data.size=200',"
        "'data.eval_batch_size=20','trainer.max_epochs=1']",
    ),
    "shapes_set": (
        *CPU,
        *("attention=sinkhorn", "model.hidden=8", "model.num_heads=2", "model.num_inducing=4", "data.num_points=16"),
        *("data.train_per_class=4", "data.test_per_class=2", "data.val_size=14", "data.eval_batch_size=10"),
    ),
    "modelnet40_pct": (
        *CPU,
        *("attention=sinkhorn", "model.embed_dim=4", "model.num_samples=[12,8]", "model.num_neighbors=4"),
        *("model.fuse_dim=16", "model.head_dims=[16,8]", "model.num_layers=2", "data.num_points=24"),
        *("data.val_size=4", "data.batch_size=5", "data.eval_batch_size=3", "data.num_workers=0"),
    ),
    "cats_dogs_vit": (
        *CPU,
        *("attention=sinkhorn", "data.test_size=21", "data.val_size=10", "data.batch_size=8", "data.num_workers=0"),
        *(
            "scheduler.milestones=[1]",
            "model.img_size=16",
            "model.patch_size=8",
            "+model.embed_dim=16",
            "+model.depth=2",
            "+model.num_heads=2",
        ),
        *("data.eval_batch_size=8", "data.fraction=0.5", "data.cache=none"),
    ),
    "cats_dogs_finetune": (
        *CPU,
        *("attention=sinkhorn", "data.test_size=21", "data.val_size=10", "data.batch_size=8", "data.num_workers=0"),
        *("model.name=vit_tiny_patch16_224", "model.img_size=32", "model.head=new", *SMALL_VIT),
        *("data.eval_batch_size=8", "data.fraction=0.5", "data.cache=none"),
    ),
    "imdb_sentiment": (*FAIRSEQ, "attention=sinkhorn", "scheduler.milestones=[1]"),
    "imdb_sentiment_official": (*FAIRSEQ, "attention=sinkhorn"),
    "movie_sentences_sentiment": (*FAIRSEQ, "attention=sinkhorn"),
    "ha_de_en_finetune": (
        *FAIRSEQ,
        "attention=sinkhorn",
        "init_from.overrides=['experiment=ha_de_en_scratch','attention=softmax','trainer.max_epochs=1']",
    ),
    "ha_de_en_scratch": (*FAIRSEQ, "attention=sinkhorn"),
    "mnist_patches on mnist": (
        *CPU,
        *("data=mnist", "attention=sinkhorn", "model.patch_size=14", "data.val_size=20", "data.batch_size=20"),
        "data.eval_batch_size=8",
    ),
    "own_model": (
        *CPU,
        *("attention=sinkhorn", "data.val_size=200", "data.test_size=4700", "data.eval_batch_size=1500"),
        *("model.name=test_vit", "+model.patch_size=14", "model.train=[head.*]"),
    ),
    "own_model on torch": (
        *CPU,
        *("model=torch", "attention=softmax", "data.val_size=200", "data.test_size=4700", "data.eval_batch_size=1500"),
        *("model.target=tests.experiments.linear.make", "+model.kwargs.bias=true"),
    ),
    "shapes_set on furniture": (
        *CPU,
        *("data=furniture", "attention=sinkhorn", "model.hidden=8", "model.num_heads=2", "model.num_inducing=4"),
        *("data.num_points=16", "data.val_size=3", "data.batch_size=3", "data.eval_batch_size=2"),
    ),
    "image_folder": (
        *CPU,
        *("attention=sinkhorn", "data.img_size=16", "data.batch_size=8", "data.eval_batch_size=2"),
        *("data.num_workers=0", "data.cache=none", "data.val_share=0.2", "data.test_share=0.3"),
        *("+model.embed_dim=16", "+model.depth=1", "+model.num_heads=2"),
    ),
    "cloud_folder": (
        *CPU,
        *("attention=sinkhorn", "model.hidden=8", "model.num_heads=2", "model.num_inducing=4", "data.points=16"),
        *("data.stored=24", "data.batch_size=8", "data.eval_batch_size=2", "data.val_share=0.2"),
        "data.test_share=0.3",
    ),
}
#: What a key is changed to, where that does not follow from its type; with a base in front, for that base.
CHANGES: dict[str, Any] = {
    "shapes_set on furniture data.val_size": 6,  # about: designs stay together
    "attention.backend": "reference",
    "attention.gradient": "detached",
    "attention.layers": 1,
    "attention.name": "sigmoid",
    "columns.every": 1,
    "columns.samples": 2,
    "data._target_": "experiments.data.mnist.MNIST",
    "data.cache": "auto",
    "data.crop_scale": [0.3, 0.6],
    "data.draw": "fixed",
    "data.name": "another",
    "data.normalize": "none",
    "data.root": "FOLDER/elsewhere",
    "data.splits": "FOLDER/splits.csv",
    "data.mean": [0.25, 0.25, 0.25],
    "data.shorten_method": "random_crop",
    "data.source": "fashion_mnist",
    "data.source_lang": "fr",
    "data.std": [0.25, 0.25, 0.25],
    "data.stretch": 2.0,
    "data.target_lang": "fr",
    "data.task": "another",
    "data.train_on": ["train", "val"],
    "experiment": "another",
    "init_from.overrides": ["experiment=cats_dogs_standin", "attention=softmax", "data.size=300"],
    "label": "another",
    "model._target_": "experiments.models.another",
    "model.arch": "another",
    "model.criterion": "another",
    "model.head": "imagenet",
    "model.head_dims": [8, 8],
    "model.name": "another",
    "model.norm": "pre",
    "model.num_heads": 4,
    "model.num_samples": [10, 8],
    "model.patch_size": 4,
    "model.pool_normalizer": "sigmoid",
    "model.pooling": "mean",
    "model.published_output": "logits",
    "model.published_padding": "none",
    "model.published_pooling": "valid",
    "model.published_positions": "learned",
    "model.residual": "input",
    "model.row_mass": "uniform",
    "model.scale": "head",
    "model.train": ["head.*"],
    "model.weights": "nothing.pth",
    "model.target": "nothing.make",
    "own_model model.train": ["head.weight"],
    "own_model model.pretrained": True,
    "optimizer._target_": "torch.optim.NAdam",
    "plugins": ["no_such_module"],
    "optimizer.adam_betas": "(0.8, 0.98)",
    "optimizer.betas": [0.8, 0.999],
    "optimizer.eps": 1e-2,
    "optimizer.name": "sgd",
    "protocol.mean_over": "batches",
    "protocol.metric": "loss",
    "protocol.select_on": "test",
    "report.leave_out_below": 0.99,
    "scheduler": {"_target_": "torch.optim.lr_scheduler.ExponentialLR", "gamma": 0.5},
    "scheduler._target_": "torch.optim.lr_scheduler.LinearLR",
    "scheduler.milestones": [2],
    "scheduler.name": "polynomial_decay",
    "trainer.accelerator": "gpu",
    "trainer.checkpoint_every_n_steps": 2,
    "trainer.gradient_clip_norm": 1e-3,
    "trainer.compile": True,
    "trainer.matmul_precision": "highest",
    "trainer.precision": "64",
    "trainer.strategy": "ddp",
    "trainer.threads": 2,
    "wandb.entity": "another",
    "wandb.mode": "online",
    "wandb.project": "another",
    "shapes_set model.norm": "post",
    "shapes_set model.residual": "projected",
    "shapes_set model.scale": "width",
    "cats_dogs_standin data.mean": 0.5,
    "cats_dogs_standin data.std": 0.5,
    "mnist_patches on mnist data._target_": "experiments.data.mnist5k.MNIST5k",
    "mnist_patches data.mean": 0.5,
    "mnist_patches data.std": 0.5,
    "mnist_patches_official data.mean": 0.5,
    "mnist_patches_official data.std": 0.5,
    "mnist_patches_official data.train_on": ["train"],
    "mnist_patches_official protocol.select_on": "val",
    "imdb_sentiment_official protocol.select_on": "val",
    "imdb_sentiment_official attention.gradient": "unrolled",
    "ha_de_en_finetune init_from.overrides": ["experiment=ha_de_en_scratch", "attention=softmax", "model.dropout=0.5"],
    "ha_de_en_finetune scheduler": {"name": "inverse_sqrt", "warmup_updates": 10},
    "ha_de_en_finetune protocol.metric": "bleu",
    "ha_de_en_scratch protocol.metric": "bleu",
    "mnist_patches_official protocol.mean_over": "samples",
    "imdb_sentiment_official protocol.mean_over": "samples",
}
#: Keys that say something only where others do: what is set besides, in both runs that are compared.
WITH: dict[str, dict[str, Any]] = {
    "columns.samples": {"columns.every": 1},
    "data.eval_crops": {"data.crop_scale": [0.3, 0.6]},
    "report.overwrite_last_point": {},
    "trainer.progress_bar": {"trainer.progress_bar": True},
    "wandb.entity": {"logger.wandb": True},
    "wandb.mode": {"logger.wandb": True},
    "wandb.project": {"logger.wandb": True},
}
#: Keys that no configuration of the base has, but the code knows.
ADDED = {
    "cats_dogs_standin": ["attention.layers"],
    "shapes_set": ["attention.layers"],
    "modelnet40_pct": ["attention.layers"],
    "cats_dogs_vit": ["attention.layers"],
    "movie_sentences_sentiment": ["attention.layers"],
}
#: Several processes are not started here: how the trainer is made tells enough.
ONLY_PREPARED = ("trainer.devices", "trainer.strategy")


def keys_of(section: Any, prefix: str = "") -> list[str]:
    """The dotted keys of a resolved configuration. An empty table has none."""
    if not isinstance(section, dict):
        return [prefix]
    return [name for key, value in section.items() for name in keys_of(value, f"{prefix}.{key}" if prefix else key)]


@functools.cache
def _composed(experiment: str, words: tuple[str, ...]) -> Any:
    return compose([f"experiment={experiment.partition(' on ')[0]}", *words])


def composed(experiment: str, words: tuple[str, ...] = ()) -> Any:
    """A configuration that may be changed. Hydra takes longer for it than many a run here for its training."""
    return copy.deepcopy(_composed(experiment, words))


def owners(config: Any) -> dict[str, str]:
    """Who takes each key: the class or function that its section names, or else the engine."""
    plain = OmegaConf.to_container(config, resolve=True)
    taken = {}
    for key in keys_of(plain):
        section = plain[key.split(".")[0]]
        named = section.get("_target_") if isinstance(section, dict) else None
        taken[key] = str(named or plain["engine"]).rpartition(".")[2]
    return taken


@pytest.fixture(scope="module")
def data(tmp_path_factory, kaggle, archive):  # noqa: F811
    """All data that the bases need, in small."""
    folder = tmp_path_factory.mktemp("data")
    prepare_photos(folder, kaggle, jobs=1, quiet=True)
    assert (
        prepare_data(["modelnet40", "--folder", str(folder), "--archive", str(archive), "--jobs=1", "--partial"]) == 0
    )
    for name in ("imdb", "movie_sentences", "ha_de_en", "iwslt14"):
        (folder / name / "data-bin").mkdir(parents=True)
        manifest = {"name": name, "split_hash": name * 8, "sizes": {"train": 60, "valid": 20, "test": 20}}
        (folder / name / "manifest.json").write_text(json.dumps(manifest))
    write_idx(folder / "MNIST" / "raw")
    furniture.prepare(folder, write_package(folder / "package"), jobs=1, num_points=64, quiet=True)
    fill_images(folder / "own" / "image_folder")
    fill_clouds(folder / "own" / "cloud_folder")
    torch.manual_seed(0)
    torch.save(timm.create_model("vit_tiny_patch16_224", num_classes=7, **VIT).state_dict(), folder / "vit.pth")
    return folder


class Watched:
    """What a run did besides its files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[Any] = []
        save, loader = AtomicCheckpointIO.save_checkpoint, DataModule._loader
        pixels, begin = PhotoStore.pixels, wandb.init

        def save_checkpoint(plugin: Any, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            self.seen += [Path(path).name, torch.are_deterministic_algorithms_enabled()]
            save(plugin, checkpoint, path, storage_options)

        def make_loader(module: Any, dataset: Any, sampler: Any) -> Any:
            made = loader(module, dataset, sampler)
            self.seen.append((made.num_workers, [len(batch) for batch in sampler]))
            return made

        def make_pixels(store: Any, *options: Any) -> Any:
            found = pixels(store, *options)
            self.seen.append(found.file is None)
            return found

        def init(**settings: Any) -> Any:
            self.seen.append({name: settings[name] for name in ("mode", "project", "entity")})
            return begin(**settings | {"mode": "disabled"})

        def prepare(*arguments: Any) -> Any:
            plan = lightning_prepare(*arguments)
            self.seen.append(plan.trainer.progress_bar_callback is not None)
            return plan

        lightning_prepare, add_timing = lightning.prepare, RunLog.add_timing

        def timing(log: Any, *numbers: Any) -> None:
            self.seen.append(log.lines)
            add_timing(log, *numbers)

        # A CPU's products stay as they are, and compiling takes a minute: test_products.py has both.
        monkeypatch.setattr(lightning, "set_matmul_precision", lambda device, precision: self.seen.append(precision))
        monkeypatch.setattr(torch.nn.Module, "compile", lambda module: self.seen.append("compiled"))
        monkeypatch.setattr(RunLog, "add_timing", timing)
        monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", save_checkpoint)
        monkeypatch.setattr(DataModule, "_loader", make_loader)
        monkeypatch.setattr(PhotoStore, "pixels", make_pixels)
        monkeypatch.setattr(wandb, "init", init)
        monkeypatch.setattr(lightning, "prepare", prepare)
        monkeypatch.setattr(fairseq.Child, "start", self.start)

    def start(self, module: str, words: Any, config: Any) -> Any:
        """Stands for fairseq's process: what it is told is noted, and it answers as if it had trained or scored."""
        self.seen += [module, *words]
        metrics = {"loss": 0.5, "accuracy": 0.5, "bleu": 1.0}
        rows = [
            {"event": "epoch", "epoch": epoch, "step": 3 * epoch, "train": {"loss": 0.5, "lr": 0.1}, "valid": metrics}
            | {"columns": [], "seconds": 1.0, "samples": 60}
            for epoch in range(1, config["trainer"]["max_epochs"] + 1)
        ]
        initial = [{"epoch": 0, "step": 0, "valid": metrics}] if config["init_from"] is not None else []
        steps = {row["epoch"]: row["step"] for row in [*initial, *rows]}
        scores = {str(epoch): {"step": step, "metrics": metrics} for epoch, step in steps.items()}
        if module == "fairseq_score":
            events: list[Any] = [{"event": "scores", "metrics": scores}]
        else:
            begun = {"event": "started", "step": 0, "epoch": 1, "history": initial, "columns": []}
            events = [
                {"event": "ready", "n_params": 7, "devices": ["cpu"], "left_out": {"count": 0}},
                begun,
                *rows,
                {"event": "finished"},
            ]
        return FakeChild(events)


class FakeChild:
    """The events of a process."""

    signal = 0

    def __init__(self, events: list[Any]) -> None:
        self._events = iter(events)

    def events(self) -> Any:
        """Goes on where it was left."""
        return self._events

    def forwarding(self) -> Any:
        """No signals come."""
        return contextlib.nullcontext()

    def say(self, word: str) -> None:
        """It needs no word."""

    def keep_log(self, path: Path) -> None:
        """It has no log."""

    def end(self) -> None:
        """It has ended."""


class Walk:
    """Runs with changed keys, each in a folder of its own."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder, self.data, self.number = folder, data, 0

    def outcome(self, experiment: str, settings: dict[str, Any], prepared: bool = False) -> dict[str, Any]:
        """What a run leaves, without what only repeats its configuration; or the sentence that refuses it."""
        self.number += 1
        besides = dict(settings)
        folder = self.folder / str(self.number)
        words = [word for word in BASES[experiment] if not _replaced(word, settings)]
        more = tuple(str(word) for word in settings.pop("words", ()))
        config = composed(experiment, (*words, *more))
        config.paths.runs, config.paths.data = f"{folder}/runs", str(self.data)
        if experiment == "cats_dogs_finetune":
            config.model.weights = str(self.data / "vit.pth")
        if experiment in ("image_folder", "cloud_folder"):
            config.data.root = str(self.data / "own" / experiment)
        for key, value in settings.items():
            value = value.replace("FOLDER", str(folder)) if isinstance(value, str) else value
            with open_dict(config):
                if "." in key:
                    OmegaConf.update(config, key, value, merge=False, force_add=True)
                else:
                    config[key] = value
        with pytest.MonkeyPatch.context() as monkeypatch:
            watched = Watched(monkeypatch)
            if "trainer.progress_bar" in besides:
                monkeypatch.setattr("sys.stderr", SimpleNamespace(**_like_a_terminal()))
            torch.use_deterministic_algorithms(False)
            torch.set_num_threads(1)
            try:
                if prepared:
                    resolved = resolve(config)
                    plan = lightning.prepare(resolved, RunDir.of(resolved))
                    return {"how": (plan.trainer.world_size, type(plan.trainer.strategy).__name__)}
                run = train.execute(config, []).folder
            except RunError as error:
                return {"refused": str(error)}
        return _left(run, folder, watched.seen)


def _like_a_terminal() -> dict[str, Any]:
    return {"isatty": lambda: True, "write": lambda text: len(text), "flush": lambda: None, "encoding": "utf-8"}


def _replaced(word: str, settings: dict[str, Any]) -> bool:
    return any(word.startswith(f"{str(more).partition('=')[0]}=") for more in settings.get("words", ()))


def _left(run: Path, folder: Path, seen: list[Any]) -> dict[str, Any]:
    rows = (run / "metrics.jsonl").read_text()
    result = json.loads((run / "result.json").read_text())
    for repeated in ("hash", "experiment", "label", "seed", "metric", "selected_on", "epochs"):
        del result[repeated]
    card = json.loads((run / "run.json").read_text())
    files = sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and "wandb" not in path.parts
    )
    columns = run / "column_sums.jsonl"
    reported = read_run(run)
    state = [torch.load(path, weights_only=True) for path in sorted((run / "checkpoints").glob("*.ckpt"))[-1:]]
    best = [
        {name: tensor.double().sum().item() for name, tensor in content["state_dict"].items()}
        | {"best": [callback.get("best") for callback in content["callbacks"].values()]}
        for content in state
    ]
    hidden = re.compile(r"-[0-9a-f]{8}(?=/)|events\.out\S*|" + re.escape(str(folder)))
    return {
        "numbers": (rows, json.dumps(best), json.dumps(result)),
        "file": ([hidden.sub("", name) for name in files], columns.read_text() if columns.is_file() else ""),
        "how": (
            hidden.sub("", json.dumps(seen, default=str)),
            card["attempts"][-1]["threads"],
            card["attempts"][-1]["devices"],
            str(reported.protocol) if isinstance(reported, Run) else reported.state,
        ),
    }


def changed(experiment: str, key: str, value: Any) -> Any:
    """Another value for a key."""
    for name in (f"{experiment} {key}", f"{experiment.partition(' on ')[0]} {key}", key):
        if name in CHANGES:
            return CHANGES[name]
    if key == "init_from":
        return {
            "overrides": [f"experiment={experiment.partition(' on ')[0]}", *BASES[experiment]],
            "seed": 1,
            "rate": 0.5,
        }
    if key in ("paths.runs", "paths.data", "data.folder"):
        return "FOLDER/elsewhere"
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2 if value else 0.1
    if key == "engine":
        return {"lightning": "fairseq", "fairseq": "lightning"}[value]
    raise AssertionError(f"{experiment}: it is not said in CHANGES what {key}={value!r} is changed to")


def context(key: str) -> dict[str, Any]:
    """What has to be set for a key to say anything."""
    if key.startswith("learning_rates."):
        _, attention, *patch = key.split(".")
        words = (
            [f"attention={attention}"] if attention != "otherwise" else ["attention=custom", "attention.name=sigmoid"]
        )
        return {"words": [*words, *(f"model.patch_size={part.removeprefix('patch')}" for part in patch)]}
    return dict(WITH.get(key, {}))


@pytest.fixture(scope="module")
def walk(tmp_path_factory, data):
    return Walk(tmp_path_factory.mktemp("walk"), data)


def done_by(base: dict[str, Any], other: dict[str, Any]) -> str:
    """What tells two runs apart, in a word; "" where nothing does."""
    if "refused" in other:
        return f"refused: {other['refused'][:90]}"
    return ", ".join(part for part in base if base[part] != other[part])


@functools.cache
def keys_to_try() -> dict[str, dict[str, str]]:
    """The keys of each experiment, by who takes them, that no experiment before it has."""
    seen: set[tuple[str, str]] = set()
    to_try: dict[str, dict[str, str]] = {}
    for experiment, words in BASES.items():
        taken = {**owners(composed(experiment, words)), **dict.fromkeys(ADDED.get(experiment, []), "added")}
        official = experiment.endswith("_official")
        to_try[experiment] = {
            key: owner
            for key, owner in taken.items()
            if (owner, key) not in seen or (official and key.startswith("report."))
        }
        seen |= {(owner, key) for key, owner in taken.items()}
    return to_try


def idle_keys(walk: Walk, experiment: str) -> list[str]:
    """The keys of an experiment that do nothing."""
    plain = OmegaConf.to_container(composed(experiment, BASES[experiment]), resolve=True)
    bases: dict[str, dict[str, Any]] = {}
    idle = []
    for key, owner in keys_to_try()[experiment].items():
        value = OmegaConf.select(OmegaConf.create(plain), key)
        besides, prepared = context(key), key in ONLY_PREPARED and plain["engine"] == "lightning"
        name = json.dumps([besides, prepared])
        if name not in bases:
            bases[name] = walk.outcome(experiment, dict(besides), prepared)
            assert "refused" not in bases[name], bases[name]
        new = changed(experiment, key, value)
        assert new != value, f"{experiment}: CHANGES has {key} as it is"
        said = done_by(bases[name], walk.outcome(experiment, {**besides, key: new}, prepared))
        print(f"{experiment:28} {owner:22} {key:36} {said}")
        if not said:
            idle.append(key)
    return [f"{experiment}: {key} is taken and ignored" for key in idle]


@pytest.mark.parametrize("experiment", BASES)
def test_every_key_does_something(walk, monkeypatch, experiment):
    """A key that an experiment further up shows to work is not tried again."""
    monkeypatch.chdir(walk.folder)
    idle = idle_keys(walk, experiment)
    assert not idle, "\n".join(idle)


def test_every_key_of_every_experiment_is_tried():
    """By who takes it."""
    tried = {(owner, key) for keys in keys_to_try().values() for key, owner in keys.items()}
    missing = set()
    for path in sorted((CONFIGS / "experiment").glob("*.yaml")):
        for key, owner in owners(composed(path.stem)).items():
            if (owner, key) not in tried:
                missing.add(f"{path.stem}: {owner} {key}")
    # Data that no experiment names, but `data=NAME` takes.
    for path in sorted((CONFIGS / "data").glob("*.yaml")):
        section = OmegaConf.load(path)
        if target := section.get("_target_"):
            owner = target.rpartition(".")[2]
            missing |= {f"{path.stem}: {owner} data.{key}" for key in section if (owner, f"data.{key}") not in tried}
    print(f"{len(tried)} keys: " + ", ".join(sorted(f"{owner}:{key}" for owner, key in tried)))
    assert not missing, "\n".join(sorted(missing))
