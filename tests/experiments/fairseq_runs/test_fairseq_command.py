import json
import math
from pathlib import Path
from typing import Any

import pytest

from experiments.config import compose, origin, resolve
from experiments.errors import RunError
from experiments.runners import fairseq_command
from experiments.runners.fairseq_events import FairseqError, improves, in_one_sentence, numbers, read_event
from experiments.runners.run_dir import RunDir, run_hash
from experiments.train import execute

SENTENCES = "experiment=movie_sentences_sentiment"


def words(*overrides: str, environment: dict[str, str] | None = None) -> dict[str, str]:
    config = resolve(compose(overrides))
    fairseq_command.check_sections(config)
    made = fairseq_command.arguments(config, Path("/run"), environment=environment or {})
    return dict(word.removeprefix("--").partition("=")[::2] for word in made[1:])


def test_the_attention_of_the_configuration_is_the_plugins() -> None:
    softmax = words(SENTENCES, "attention=softmax")
    assert softmax["attention-normalizer"] == "softmax"
    assert "sinkhorn-iters" not in softmax
    sinkhorn = words(SENTENCES, "attention=sinkhorn", "attention.n_iters=7", "attention.gradient=detached")
    assert {key: sinkhorn[key] for key in ("attention-normalizer", "sinkhorn-iters", "sinkhorn-gradient")} == {
        "attention-normalizer": "sinkhorn",
        "sinkhorn-iters": "7",
        "sinkhorn-gradient": "detached",
    }
    custom = words(SENTENCES, "attention=custom", "attention.name=unbalanced_sinkhorn", "+attention.rho=2.0")
    assert json.loads(custom["attention-normalizer-options"]) == {"rho": 2.0}
    layers = words(SENTENCES, "attention=sinkhorn", "+attention.layers=[0]")
    assert layers["sinkhorn-layers"] == "[0]"


def test_what_keeps_runs_whole_and_repeatable_is_always_there() -> None:
    made = words(SENTENCES)
    assert made["required-batch-size-multiple"] == "1"
    assert made["update-epoch-batch-itr"] == "1"
    assert made["log-format"] == "json"
    assert (Path(made["user-dir"]) / "translation.py").is_file()
    assert Path(made["user-dir"]).is_absolute()  # a worker may stand in another folder
    assert made["seed"] != words(SENTENCES, "seed=1")["seed"]


def test_rates_fall_after_their_epochs_as_torchs_milestones_do() -> None:
    made = words("experiment=imdb_sentiment")
    assert [float(rate) for rate in made["lr"].split(",")] == pytest.approx([1e-4] * 11 + [1e-5] * 4)
    assert words(SENTENCES, "scheduler=null", "optimizer.lr=0.25")["lr"] == "0.25"
    recipe = words("experiment=iwslt14_scratch")
    assert (recipe["lr-scheduler"], recipe["warmup-updates"], recipe["lr"]) == ("inverse_sqrt", "4000", "0.0005")
    assert (recipe["arch"], recipe["label-smoothing"], recipe["max-tokens"]) == (
        "sinkformer_iwslt_de_en",
        "0.1",
        "4096",
    )
    assert (recipe["best-checkpoint-metric"], recipe["clip-norm"]) == ("bleu", "0.0")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["+model.save_dir=x"], "model.save_dir: --save-dir is set by the suite itself"),
        (["+optimizer.max_epoch=3"], "--max-epoch is set by the suite"),
        (
            ["trainer.precision=bf16"],
            "precision=bf16 is not for fairseq 0.12.3, its --bf16 asks for a TPU: take 32 or fp16",
        ),
        (["trainer.precision=64"], "precision=64 is not for fairseq"),
        (["trainer.precision=fp16"], "fp16 needs a GPU"),
        (["trainer.strategy=fsdp"], "trainer.strategy=fsdp"),
        (["optimizer=adam"], "take a optimizer that is made for fairseq"),
        (["data=mnist5k"], "engine=fairseq needs data.name"),
        (["data.batch_size=null"], "data.batch_size (sentences) or data.max_tokens"),
        (["trainer.devices=33"], "data.batch_size=32 cannot be divided among 33 processes: take larger batches"),
        (["scheduler.name=inverse_sqrt"], "scheduler.milestones is for scheduler.name=fixed"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(overrides: list[str], said: str) -> None:
    with pytest.raises(RunError) as refused:
        words(SENTENCES, *overrides)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_tasks_of_a_job_are_the_processes_of_a_run() -> None:
    two = ("trainer.devices=2", "trainer.num_nodes=2")
    job = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
    job |= {"MASTER_PORT": "29501", "SLURM_NODELIST": "node[1-2]"}
    made = words(SENTENCES, *two, environment=job)
    assert made["batch-size"] == "32"  # of all four together
    assert (made["distributed-world-size"], made["distributed-rank"], made["device-id"]) == ("4", "3", "1")
    assert made["distributed-init-method"] == "tcp://node1:29501"
    assert "distributed-no-spawn" in made
    with pytest.raises(RunError, match=r"srun has started 2 processes, .* give SLURM --nodes=2 --ntasks-per-node=2"):
        words(SENTENCES, *two, environment=job | {"SLURM_STEP_NUM_TASKS": "2"})
    with pytest.raises(RunError, match="srun has started 4 processes, and the run has"):
        words(SENTENCES, environment=job)
    with pytest.raises(RunError, match="MASTER_PORT, where the processes of this run meet, is not set"):
        words(SENTENCES, *two, environment={key: job[key] for key in job if key != "MASTER_PORT"})
    with pytest.raises(RunError, match="needs srun to start a process for each device"):
        words(SENTENCES, *two)
    spawned = words(SENTENCES, "trainer.devices=2", environment={"SLURM_NTASKS": "1"})
    assert spawned["distributed-world-size"] == "2"
    assert "distributed-no-spawn" not in spawned
    in_a_shell_of_a_job = job | {"SLURM_PTY_PORT": "1"}
    assert words(SENTENCES, environment=in_a_shell_of_a_job)["distributed-world-size"] == "1"


def test_the_run_before_is_part_of_the_identity() -> None:
    def finetune(*more: str) -> dict[str, Any]:
        return resolve(compose(["experiment=ha_de_en_finetune", *more]))

    softmax, sinkhorn = finetune("attention=softmax"), finetune("attention=sinkhorn", "paths.runs=/elsewhere")
    assert softmax["init_from"]["run"] == sinkhorn["init_from"]["run"]
    before, command = origin(sinkhorn)
    assert run_hash(before) == sinkhorn["init_from"]["run"]
    assert before["attention"]["name"] == "softmax"
    assert str(RunDir.of(before).path).startswith("/elsewhere/ha_de_en_scratch/")
    assert RunDir.of(resolve(compose(command))).path == RunDir.of(before).path
    other = "['experiment=ha_de_en_scratch','attention=softmax','trainer.max_epochs=2']"
    longer = finetune("attention=softmax", f"init_from.overrides={other}")
    assert run_hash(longer) != run_hash(softmax)
    assert finetune("seed=1")["init_from"]["run"] != softmax["init_from"]["run"]


def test_runs_of_lightning_have_the_identity_that_they_had_without_the_new_keys() -> None:
    config = resolve(compose(["experiment=mnist_patches"]))
    without = {key: value for key, value in config.items() if key not in ("engine", "init_from")}
    assert run_hash(config) == run_hash(without)


def test_data_that_are_not_prepared_are_named_with_their_command(tmp_path: Path) -> None:
    config = resolve(compose([SENTENCES, f"paths.data={tmp_path}"]))
    with pytest.raises(RunError, match=r"is not prepared: python -m experiments.data.prepare movie_sentences --folder"):
        fairseq_command.read_manifest(config["data"])


def test_numbers_are_in_nats_and_fractions() -> None:
    found = numbers({"loss": 1.0, "nll_loss": 2.0, "bleu": 34.5, "wps": 1e4})
    assert found == {"loss": math.log(2), "nll_loss": 2 * math.log(2), "bleu": 34.5}
    assert numbers({"loss": 1.0, "nll_loss": 0.1, "accuracy": 58.20000076293945}) == {
        "loss": math.log(2),
        "accuracy": 0.582,
    }


def test_the_earlier_of_equal_epochs_is_the_best() -> None:
    def best(values: list[float], highest: bool) -> int:
        chosen = 0
        for number, value in enumerate(values):
            if improves(value, values[chosen] if number else None, highest):
                chosen = number
        return chosen

    assert best([0.5, 0.7, 0.7, 0.6], True) == 1
    assert best([0.5, 0.3, 0.3, 0.6], False) == 1
    assert best([math.nan, 0.3, math.nan], False) == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore"),
            "the GPU's memory is used up: take smaller",
        ),
        (FairseqError("unrecognized arguments: --foo=3"), "unrecognized arguments: --foo=3"),
        (KeyError("en"), "KeyError: 'en'"),
        (StopIteration(), "StopIteration: "),
    ],
)
def test_errors_become_one_sentence(error: Exception, said: str) -> None:
    assert in_one_sentence(error).startswith(said)
    assert "\n" not in in_one_sentence(error)


def test_events_are_told_from_other_lines() -> None:
    assert read_event('@run {"event": "finished"}\n') == {"event": "finished"}
    assert read_event('2026-01-01 | INFO | train | {"event": "finished"}\n') is None


def test_a_new_split_is_another_one() -> None:
    manifest: dict[str, Any] = {
        "name": "imdb",
        "split_hash": "ab",
        "vocabulary": "cd",
        "sizes": {"train": 60, "valid": 21, "test": 19},
    }

    def facts(seed: int) -> dict[str, Any]:
        return fairseq_command.facts(manifest, {"resplit_seed": seed})

    assert facts(0)["sizes"] == {"train": 80, "test": 20}
    assert len({facts(0)["split_hash"], facts(1)["split_hash"], "ab"}) == 3


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_damaged_run_card_is_named(tmp_path: Path, content: str) -> None:
    overrides = [SENTENCES, f"paths.data={tmp_path}", f"paths.runs={tmp_path / 'runs'}"]
    folder = tmp_path / "movie_sentences"
    (folder / "data-bin").mkdir(parents=True)
    (folder / "manifest.json").write_text('{"name": "movie_sentences", "split_hash": "00", "sizes": {"train": 1}}')
    run = RunDir.of(resolve(compose(overrides)))
    run.path.mkdir(parents=True)
    (run.path / "run.json").write_text(content)
    with pytest.raises(RunError, match=r"run\.json cannot be read \(.*\): remove it and give the run's command again"):
        execute(compose(overrides), overrides)


@pytest.mark.parametrize("content", ["[]", "{}", '{"name": "x", "split_hash": "00", "sizes": 3}'])
def test_a_damaged_manifest_is_no_preparation(tmp_path: Path, content: str) -> None:
    (tmp_path / "movie_sentences" / "data-bin").mkdir(parents=True)
    (tmp_path / "movie_sentences" / "manifest.json").write_text(content)
    with pytest.raises(RunError, match=r"movie_sentences is not prepared: python -m experiments\.data\.prepare"):
        fairseq_command.read_manifest({"name": "movie_sentences", "folder": str(tmp_path)})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimizer.lr=abc"], "optimizer.lr must be a number above 0; got abc"),
        (["optimizer.lr=-1"], "optimizer.lr must be a number above 0; got -1"),
        (["optimizer.lr=nan"], "optimizer.lr must be a number above 0; got nan"),
        (["data.batch_size=abc"], "data.batch_size must be a whole number above 0; got abc"),
        (["data.batch_size=0"], "data.batch_size must be a whole number above 0; got 0"),
        (["data.batch_size=true"], "data.batch_size must be a whole number above 0; got True"),
        (["+data.max_tokens=2.5"], "data.max_tokens must be a whole number above 0; got 2.5"),
        (["data.eval_batch_size=0"], "data.eval_batch_size must be a whole number above 0; got 0"),
        (["scheduler.milestones=4"], "scheduler.milestones must be a list of epochs; got 4"),
        (["scheduler.milestones=[a]"], r"scheduler.milestones must be a list of epochs; got \['a'\]"),
        (["scheduler.gamma=x"], "scheduler.gamma must be a number above 0; got x"),
        (["~scheduler.gamma"], "scheduler.gamma must be a number above 0; got None"),
        (["data.name=null"], "engine=fairseq needs data.name"),
        (["data.folder=null"], "engine=fairseq needs data.folder"),
        (["+data.validate_bleu=true"], "data.validate_bleu=true needs data.generation"),
        (["protocol.metric=bleu"], "protocol.metric=bleu needs data.validate_bleu=true"),
        (
            ["experiment=ha_de_en_scratch", "protocol.metric=accuracy"],
            "protocol.metric=accuracy is for model.criterion=sentence_prediction",
        ),
    ],
)
def test_values_that_make_no_sense_are_named_before_anything_starts(overrides: list[str], message: str) -> None:
    first = [] if overrides[0].startswith("experiment=") else [SENTENCES]
    with pytest.raises(RunError, match=message):
        words(*first, *overrides)


# Where a run's work is done and how it is shown, and what `resolve` or Hydra looks at alone. `label` names the folder.
# Plugins reach its processes through the environment: tests/experiments/test_plugins.py.
ELSEWHERE = {"engine", "experiment", "label", "learning_rates", "logger", "paths", "plugins", "report", "wandb"}
ELSEWHERE |= {"init_from"}
# Read in the process that starts fairseq: the processes' threads, the bar, the table of the columns.
READ_BY_THE_RUNNER = {"trainer.progress_bar"}


def asked_of_fairseq(config: dict[str, Any]) -> str:
    """All that fairseq's processes are told of a configuration."""
    fairseq_command.check_sections(config)
    initial = Path("/initial.pt") if config["init_from"] is not None else None
    told = [
        fairseq_command.arguments(
            {**config, "optimizer": {"lr": 1e-3, **config["optimizer"]}}, Path("/run"), initial, {}
        ),
        fairseq_command.settings(config, initial),
        fairseq_command.score_request(config, {1: Path("/run/best.pt")}, "test"),
    ]
    return json.dumps(told)


def leaves(section: Any, above: str = "") -> list[tuple[str, Any]]:
    if isinstance(section, dict):
        return [leaf for key, value in section.items() for leaf in leaves(value, f"{above}{key}.")]
    return [(above.removesuffix("."), section)]


def another(key: str, value: Any) -> Any:
    known: dict[str, Any] = {
        "trainer.precision": "64",
        "trainer.accelerator": "gpu",
        "trainer.strategy": "ddp",
        "columns.every": 1,
    }
    known["scheduler"] = {"name": "cosine"}
    known["protocol.select_on"] = "val" if value == "test" else "test"
    if key in known:
        return known[key]
    if value is None:
        return 3
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return [*value, 1] if isinstance(value, list) else f"{value}x"


@pytest.mark.parametrize(
    "experiment",
    ["movie_sentences_sentiment", "imdb_sentiment", "imdb_sentiment_official", "ha_de_en_scratch", "iwslt14_finetune"],
)
def test_every_key_of_a_configuration_reaches_fairseq_or_is_refused(experiment: str) -> None:
    overrides = [f"experiment={experiment}", "attention=sinkhorn", "columns.every=2"]
    config = resolve(compose(overrides))
    if config["init_from"] is not None:
        config["optimizer"]["lr"] = 1e-3  # found by init_from
    told, silent, walked = asked_of_fairseq(config), [], 0
    for key, value in leaves({name: part for name, part in config.items() if name not in ELSEWHERE}):
        changed = json.loads(json.dumps(config))
        *groups, last = key.split(".")
        place = changed
        for group in groups:
            place = place[group]
        place[last] = another(key, value)
        walked += 1
        try:
            if asked_of_fairseq(changed) == told and key not in READ_BY_THE_RUNNER:
                silent.append(key)
        except RunError:
            continue  # refused
    assert walked > 35
    # A run that begins with another's weights evaluates them in any case.
    assert silent == (["protocol.initial"] if config["init_from"] is not None else [])
