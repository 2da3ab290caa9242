import itertools
import shlex
from pathlib import Path

import pytest
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf, open_dict
from sinkhorn_attention import Normalizer, list_normalizers, register_normalizer

from experiments.config import CONFIGS, Config, compose, refuse_ignored, resolve
from experiments.errors import RunError
from experiments.report.catalogue import catalogue

EXPERIMENTS = sorted(path.stem for path in (CONFIGS / "experiment").glob("mnist_*.yaml"))
TRIED_ON_VALIDATION = {"mnist_patches_lr": ["optimizer.lr=1e-3"]}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_takes_an_epoch(runs, experiment):
    more = [f"experiment={experiment}", "trainer.max_epochs=1", *TRIED_ON_VALIDATION.get(experiment, [])]
    outcome = runs.start(*more, "attention=sinkhorn", "model.patch_size=28")
    assert outcome.folder.parent.name == experiment == outcome.result["experiment"]
    assert outcome.result["last"]["epoch"] == 1


def test_the_published_protocol_and_the_sound_one():
    sound = resolve(compose(["experiment=mnist_patches"]))
    published = resolve(compose(["experiment=mnist_patches_official", "attention=sinkhorn"]))
    assert sound["protocol"]["select_on"] == "val"
    assert sound["data"]["train_on"] == ["train"]
    assert sound["report"] == {"leave_out_below": None, "overwrite_last_point": False}
    assert published["protocol"]["select_on"] == "test"
    assert published["data"]["train_on"] == ["train", "val"]
    assert published["report"] == {"leave_out_below": 0.8, "overwrite_last_point": True}
    assert published["optimizer"]["lr"] == 2e-3
    assert resolve(compose(["experiment=mnist_patches_official"]))["optimizer"]["lr"] == 1e-3
    for config in (sound, published):
        assert config["trainer"]["max_epochs"] == 45
        assert config["data"]["batch_size"] == 100
        assert (config["data"]["mean"], config["data"]["std"]) == (0.1307, 0.3081)
        assert config["optimizer"]["_target_"] == "torch.optim.Adam"


def test_rate_falls_at_the_published_epochs(runs, rows):
    """To a tenth at epochs 35 and 41, counted from 1."""
    outcome = runs.start("trainer.max_epochs=42", "data.val_size=20", "data.test_size=4960", "optimizer.lr=1e-3")
    rates = {row["epoch"]: row["lr"] for row in rows(outcome.folder) if row["split"] == "train"}
    assert rates[1] == rates[34] == 1e-3
    assert rates[35] == rates[40] == pytest.approx(1e-4)
    assert rates[41] == rates[42] == pytest.approx(1e-5)


def test_rates_are_looked_up_by_attention_and_patch_size(tmp_path):
    table = "+learning_rates.sinkhorn={patch7: 0.5, patch14: 0.25}"
    rates = {
        (attention, patch): resolve(
            compose(["experiment=mnist_patches", f"attention={attention}", f"model.patch_size={patch}", table])
        )["optimizer"]["lr"]
        for attention in ("softmax", "sinkhorn")
        for patch in (7, 4)
    }
    assert rates["sinkhorn", 7] == 0.5
    assert rates["sinkhorn", 4] == 1e-3
    assert resolve(compose(["experiment=mnist_patches", "optimizer.lr=0.125", table]))["optimizer"]["lr"] == 0.125


@pytest.mark.parametrize("name", list_normalizers())
def test_every_normalizer_is_selectable(name):
    choice = [f"attention={name}"] if (CONFIGS / "attention" / f"{name}.yaml").exists() else None
    choice = choice or ["attention=custom", f"attention.name={name}"]
    assert resolve(compose(["experiment=mnist_patches", *choice]))["attention"]["name"] == name


def test_a_new_normalizer_needs_no_file(runs):
    @register_normalizer("test_of_selection")
    class Uniform(Normalizer):
        """Every key with the same weight, times a factor."""

        def __init__(self, factor=1.0, head_dim=None, num_heads=None):
            super().__init__(head_dim, num_heads)
            self.factor = factor

        def attend(self, query, key, value, **_):
            return self.factor * value.mean(-2, keepdim=True).expand(*query.shape[:-1], value.shape[-1])

    chosen = ["attention=custom", "attention.name=test_of_selection", "trainer.max_epochs=1"]
    plain, scaled = runs.start(*chosen), runs.start(*chosen, "+attention.factor=3.0")
    assert plain.folder != scaled.folder
    assert plain.result["last"]["val"] != scaled.result["last"]["val"]
    with pytest.raises(RunError, match="wrong_option"):
        runs.start(*chosen, "+attention.wrong_option=3.0")


def test_every_key_says_what_it_is():
    """Each key of each file of the groups has a comment beside it, or one above the file's first key."""
    for file in sorted(CONFIGS.glob("*/*.yaml")):
        # Those of a cluster set what configs/cluster/default.yaml explains.
        if file.parent.name in ("experiment", "local") or (file.parent.name == "cluster" and file.stem != "default"):
            continue
        for line in file.read_text().splitlines():
            plain = line.strip()
            if not plain or plain.startswith("#") or plain.startswith(("_target_:", "name:", "defaults:", "- ")):
                continue
            assert "#" in plain, f"{file}: {plain}"


def test_files_and_shape_agree():
    """The sections with types of their own have all their keys in their files, with the types' defaults."""
    shape = OmegaConf.structured(Config)
    for section, name in (("trainer", "default"), ("logger", "none"), ("wandb", "offline"), ("paths", "default")):
        stored = yaml.safe_load(Path(CONFIGS / section / f"{name}.yaml").read_text())
        assert set(stored) == set(shape[section])
        for key, value in stored.items():
            assert OmegaConf.is_missing(shape[section], key) or shape[section][key] == value, (section, key)


@pytest.mark.parametrize(
    ("logger", "on"), [("none", ""), ("csv", "csv"), ("wandb", "wandb"), ("all", "csv wandb tensorboard")]
)
def test_loggers_by_name(logger, on):
    chosen = resolve(compose(["experiment=mnist_patches", f"logger={logger}"]))["logger"]
    assert chosen == {name: name in on.split() for name in ("csv", "wandb", "tensorboard")}


def test_wandb_is_offline_by_default():
    assert resolve(compose(["experiment=mnist_patches"]))["wandb"]["mode"] == "offline"


def test_clocks_and_random_values_are_refused():
    OmegaConf.register_new_resolver("test_counter", itertools.count().__next__)
    with pytest.raises(RunError, match="label reads differently each time"):
        resolve(compose(["experiment=mnist_patches", "label=run-${test_counter:}"]))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("seed=-1", "seed must be at least 0; got -1"),
        ("trainer.max_epochs=0", "trainer.max_epochs must be at least 1; got 0"),
        ("trainer.max_epochs=two", "trainer.max_epochs"),
        ("trainer.precision=foo", "trainer.precision must be one of 32, 64, bf16, fp16; got foo"),
        ("+trainer.foo=1", "there is no trainer.foo"),
        ("+foo=1", "there is no foo"),
        ("trainer.foo=1", "trainer.foo"),
        ("attention=foo", "sinkhorn"),
        ("attention=custom", "attention.name"),
        ("protocol.select_on=train", "protocol.select_on must be one of val, test; got train"),
        ("trainer.gradient_clip_norm=0", "gradient_clip_norm must be positive"),
        ("label=${nothing.here}", "nothing.here"),
        ("~scheduler", "the configuration has no scheduler: ~scheduler has taken it out"),
        ("~protocol", "the configuration has no protocol: ~protocol has taken it out"),
    ],
)
def test_bad_values_are_named(override, words):
    with pytest.raises(RunError, match=words.replace(".", r"\.")):
        resolve(compose(["experiment=mnist_patches", override]))


def test_schemas_of_other_packages_do_not_meddle() -> None:
    """Fairseq stores an optimizer/adam, and Hydra would hold ours against it."""
    ConfigStore.instance().store(group="optimizer", name="adam", node={"lr": [1.0]})
    assert compose(["experiment=mnist_patches"]).optimizer["_target_"].endswith("Adam")


@pytest.mark.parametrize("entry", catalogue(), ids=lambda entry: entry.name)
def test_the_commands_in_the_files_are_in_hydra_s_grammar(entry):
    for command in entry.commands:
        _, _, module, *words = shlex.split(command, comments=True)
        if module == "experiments.train":
            OverridesParser.create().parse_overrides([word for word in words if word != "-m"])


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (["experiment=mnist_patches", "model.patch_size={}"], ("model", "patch_size")),
        (["experiment=mnist_patches", "attention=sinkhorn", "model.patch_size={}"], ("model", "patch_size")),
        (["experiment=shapes_set", "attention=sinkhorn", "attention.n_iters={}"], ("attention", "n_iters")),
    ],
)
def test_seven_is_seven_however_it_is_written(words, place):
    """One run: one learning rate, one label and one value."""
    ours, theirs = (resolve(compose([word.format(number) for word in words])) for number in ("7", "7.0"))
    assert theirs == ours
    assert isinstance(theirs[place[0]][place[1]], int)


def test_numbers_that_are_no_whole_ones_stay():
    config = resolve(compose(["experiment=mnist_patches", "optimizer.lr=1e3", "+model.drop_rate=0.5"]))
    assert config["optimizer"]["lr"] == 1000
    assert config["model"]["drop_rate"] == 0.5


def refused(*words):
    refuse_ignored(compose(list(words)), words)


@pytest.mark.parametrize("word", ["optimizer.lr=0.5", "++optimizer.lr=0.5", "optimizer={lr: 0.5}"])
def test_a_rate_beside_init_from_is_not_dropped(word):
    """What the user gives is taken or refused; what stands in the experiment's file is not the user's word."""
    finetune = "experiment=cats_dogs_standin_finetune"
    with pytest.raises(RunError, match=r"lr.*0\.5.*: this run begins with .* init_from\.rate says its rate"):
        refused(finetune, word)
    refused(finetune, "init_from.rate=0.5")
    refused(finetune, "optimizer.lr=null")
    refused("experiment=mnist_patches", word)
    config = compose(["experiment=mnist_patches", word])
    config.init_from = {"overrides": ["experiment=mnist_patches"], "seed": 0, "rate": 0.1}
    refuse_ignored(config, ["experiment=mnist_patches"])
    with pytest.raises(RunError, match=r"init_from\.rate says its rate"):
        refuse_ignored(config, ["experiment=mnist_patches", word])


def test_a_table_of_rates_that_nothing_looks_in():
    with pytest.raises(
        RunError, match=r"^\+learning_rates\.sinkhorn=0\.5: this run's rate is optimizer\.lr=0\.001, not"
    ):
        refused("experiment=cats_dogs_standin", "+learning_rates.sinkhorn=0.5")
    with pytest.raises(RunError, match=r"this run's rate is optimizer\.lr=0\.1, not of that table"):
        refused("experiment=shapes_set", "++learning_rates.softmax=0.5", "optimizer.lr=0.1")
    refused("experiment=shapes_set", "++learning_rates.softmax=0.5")


def test_commands_refuse_what_nothing_would_take(tmp_path):
    from experiments.train import execute
    from slurm.sweep import plan

    words = ["experiment=cats_dogs_standin_finetune", f"paths.runs={tmp_path}", "optimizer.lr=0.5"]
    with pytest.raises(RunError, match=r"init_from\.rate says its rate"):
        execute(compose(words), words)
    with pytest.raises(RunError, match=r"run 2 of 2 .*optimizer\.lr=0\.5: this run begins with"):
        plan([*words[:2], "optimizer.lr=null,0.5"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("word", "read"),
    [("paths.runs=2026_12", "202612"), ("++label=1e3", "1000.0"), ("wandb.entity=1_0", "10"), ("label=TRUE", "True")],
)
def test_a_name_that_hydra_reads_as_a_number_is_refused(word, read):
    """The runs would lie in another folder, without a word."""
    key, value = word.lstrip("+").split("=")
    with pytest.raises(RunError, match=rf"Hydra reads {value} as the number {read}; write \"{key}='{value}'\""):
        refused("experiment=mnist_patches", word)
    refused("experiment=mnist_patches", f"{key}='{value}'", "paths.runs=2026", "label=a_1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoint": "best"}, r"there is no init_from\.checkpoint; known here are overrides, rate, seed"),
        ({"overrides": ["experiment=cats_dogs_standin", "seed=5"]}, r"init_from\.overrides has seed=5, and .*seed=0"),
        ({"overrides": "experiment=cats_dogs_standin"}, r"init_from\.overrides must be a list of words"),
        ({"rate": float("nan")}, r"init_from\.rate must be a number above 0; got nan"),
        ({"rate": -1}, r"init_from\.rate must be a number above 0; got -1"),
        ({"rate": "fast"}, r"init_from\.rate must be a number above 0; got fast"),
    ],
)
def test_an_origin_that_nothing_would_take_as_it_is_written(change, message):
    config = compose(["experiment=cats_dogs_standin_finetune"])
    resolve(config)
    with open_dict(config):
        config.init_from.update(change)
    with pytest.raises(RunError, match=message):
        resolve(config)


def test_a_schedule_by_a_metric_is_refused(run_dir):
    from experiments.runners import lightning

    words = ["scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau", "~scheduler.milestones"]
    run = run_dir(*words, "~scheduler.gamma")
    with pytest.raises(RunError, match=r"^scheduler: ReduceLROnPlateau goes by a metric"):
        lightning.prepare(run.config, run)
