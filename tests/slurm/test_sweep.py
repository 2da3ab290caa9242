"""A sweep's runs are those of `python -m experiments.train -m`, with the configurations that Hydra composes."""

import json
import subprocess
import sys
from pathlib import Path

import hydra
import pytest

from experiments.config import CONFIGS, compose, resolve
from experiments.errors import RunError
from experiments.runners.run_dir import RunDir, run_hash
from slurm.sweep import plan

# Hydra itself, over our configurations, with a task that writes down what it is given.
RECORDER = """
import json, sys
import hydra
from hydra.core.hydra_config import HydraConfig
from experiments.config import register, resolve

@hydra.main(version_base="1.3", config_path={configs!r}, config_name="train")
def main(config):
    with open({out!r}, "a", encoding="utf-8") as file:
        file.write(json.dumps([list(HydraConfig.get().overrides.task), resolve(config)]) + "\\n")

register()
main()
"""

MIXED = [
    "experiment=mnist_patches,shapes_set",
    "attention=softmax,sinkhorn",
    "seed=range(2)",
    "optimizer._target_='a, b $HOME','größe \\'x\\''",
    "optimizer.lr=1e-3",
    "label='$(id), \"é\"'",
]


def test_mixed_runs_are_those_of_hydra(tmp_path):
    out = tmp_path / "runs.jsonl"
    script = RECORDER.format(configs=str(CONFIGS), out=str(out))
    words = ["-m", f"hydra.sweep.dir={tmp_path / 'hydra'}", *MIXED]
    subprocess.run([sys.executable, "-c", script, *words], check=True, cwd=Path.cwd(), capture_output=True, timeout=300)
    theirs = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    ours = plan(MIXED)
    assert len(ours) == len(theirs) == 16
    for planned, (overrides, config) in zip(ours, theirs, strict=True):
        assert planned.overrides == overrides
        assert planned.config == config
        assert planned.run.hash == run_hash(config)
    assert {planned.config["optimizer"]["_target_"] for planned in ours} == {"a, b $HOME", "größe 'x'"}
    assert {planned.config["label"] for planned in ours} == {'$(id), "é"'}


@pytest.mark.parametrize(
    "sweep",
    [
        ["experiment=mnist_patches", "data.train_on=[train],[train,val]", "seed=1,2"],
        ["experiment=mnist_patches", "+attention.option=1,2.5,null", "~logger"],
        ["experiment=mnist_patches", "attention=custom", "attention.name=softmax,sinkhorn"],
        ["experiment=mnist_patches", "scheduler=null,{_target_:x,gamma:0.5}", "seed=1,2"],
        ["experiment=mnist_patches", "label='${attention.name}${seed}'", "seed=1,2", "optimizer.lr='${seed}',0.5"],
        ["experiment=mnist_patches", "~optimizer.weight_decay", "optimizer.lr=range(0.1,0.35,0.1)"],
        ["experiment=mnist_patches", "++model.patch_size=7,14", "data.batch_size=50", "++model.more.deep='a=b #c'"],
        ["experiment=glob(shapes_set*,exclude=*_lr)", "attention=glob(s*)"],
        ["experiment=mnist_patches", "seed=shuffle(range(3))"],
        ["experiment=mnist_patches", "data.val_size=400,500", "data={split_seed:1}"],
    ],
)
def test_configurations_that_are_more_than_leaves(sweep):
    planned = plan(sweep)
    assert len(planned) > 1 or "glob" in sweep[0]
    for run in planned:
        assert run.config == resolve(compose(run.overrides)), run.overrides


def test_values_of_one_run_do_not_stay_for_the_next():
    """Runs share what they have in common, but not the objects."""
    runs = plan(["experiment=mnist_patches", "attention=sinkhorn", "attention.n_iters=1,3", "seed=0,1"])
    assert [run.config["attention"]["n_iters"] for run in runs] == [1, 1, 3, 3]
    assert [run.config["label"] for run in runs] == [f"patch7-sinkhorn{n}-seed{s}" for n in (1, 3) for s in (0, 1)]
    for section in ("data", "trainer", "model", "learning_rates"):
        runs[0].config[section]["changed"] = True
        assert "changed" not in runs[1].config[section]


def test_equal_runs_are_merged_and_said(capsys):
    runs = plan(["experiment=mnist_patches", "seed=0,1,0", "trainer.threads=1,2"])
    assert [run.config["seed"] for run in runs] == [0, 1]
    assert "4 of 6 runs of this sweep are equal to others and left out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seed=0,-1"], r"run 2 of 2 \(experiment=mnist_patches .* seed=-1\): seed must be at least 0; got -1"),
        (["trainer.max_epochs=3,many"], r"run 2 of 2 .*trainer.max_epochs=many.*'many'"),
        (["trainer.precision=32,31"], r"run 2 of 2 .*trainer.precision must be one of 32, 64"),
        (["attention=softmax,sinkhron"], r"run 2 of 2 .*attention=sinkhron.*Available options.*sinkhorn"),
        (["trainer.epochs=3"], r"this run.*trainer.epochs"),
        (["+foo=1,2"], r"run 1 of 2 .*there is no foo"),
        (["attention=custom"], r"this run: .*attention.name"),
        (["seed=interval(0,3)"], r"seed=interval\(0,3\) has no end"),
        (["hydra/launcher=joblib"], r"hydra/launcher=joblib is a setting of Hydra's own"),
        (["seed=(1"], r"seed=\(1"),
        (["label=${nothing.here}"], r"nothing\.here"),
        (["label='${now:%f}'", "seed=0,1"], "reads differently each time"),
    ],
)
def test_invalid_values_name_the_run(words, message, tmp_path):
    with pytest.raises(RunError, match=message) as caught:
        plan(["experiment=mnist_patches", f"paths.runs={tmp_path}", *words])
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_folder_made_before_is_found_under_a_changed_label(tmp_path):
    words = ["experiment=mnist_patches", f"paths.runs={tmp_path}"]
    [run] = plan(words)
    run.run.path.mkdir(parents=True)
    [again, other] = plan([*words, "label=other", "seed=0,1"])
    assert again.run.path == run.run.path
    assert other.run.path.name.startswith("other-")
    assert RunDir.of(again.config).path == run.run.path


def test_a_thousand_runs_are_composed_once_for_each_choice(monkeypatch):
    """Once for each set of group choices; a composition takes longer than all the rest of a run's plan."""
    composed, by_hydra = [], hydra.compose
    monkeypatch.setattr(hydra, "compose", lambda *words, **more: composed.append(more) or by_hydra(*words, **more))
    runs = plan(["experiment=mnist_patches", "attention=sinkhorn,softmax", "model.patch_size=7,14", "seed=range(250)"])
    assert len({run.run.path for run in runs}) == 1000
    assert len(composed) == 2


def test_seven_is_seven_in_a_plan_too(capsys):
    """7.0 finds the learning rate of 7, and is the same run."""
    (run,) = plan(["experiment=mnist_patches", "attention=softmax", "model.patch_size=7,7.0"])
    assert run.config["optimizer"]["lr"] == 2e-3
    assert "1 of 2 runs of this sweep are equal to others" in capsys.readouterr().err
    runs = plan(["experiment=mnist_patches", "attention=softmax", "model.patch_size=14.0,7.0"])
    assert [one.config["optimizer"]["lr"] for one in runs] == [5e-4, 2e-3]
