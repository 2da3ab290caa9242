"""The other ways onto a cluster: sbatch files written by hand, Hydra's launcher, and wandb's sweeps."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import hydra
import pytest
import yaml
from hydra.utils import instantiate
from omegaconf import OmegaConf
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from experiments.config import CONFIGS, composing
from slurm.sweep import plan

ROOT = CONFIGS.parent
FILES = sorted((ROOT / "slurm").glob("*.sbatch"))
SWEEPS = sorted((CONFIGS / "wandb" / "sweeps").glob("*.yaml"))
# One end of each continuous distribution that the sweeps use.
ENDS = {"log_uniform_values": ("min", "max")}


def header(file: Path) -> dict[str, str]:
    """The options of an sbatch file; SLURM reads no further than the first command."""
    options = {}
    for line in file.read_text().splitlines():
        if match := re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line):
            options[match[1]] = match[2] or ""
        elif line.strip() and not line.startswith("#"):
            break
    return options


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_sbatch_files_are_read_whole(file):
    text = file.read_text()
    assert text.startswith("#!/bin/bash\n")
    assert len(header(file)) == len(re.findall(r"(?m)^#SBATCH", text)) > 5
    subprocess.run(["bash", "-n", file], check=True)
    subprocess.run([Path(sys.executable).with_name("shellcheck"), file], check=True)


def test_train_sbatch_stops_in_time_and_is_queued_again():
    options = header(ROOT / "slurm" / "train.sbatch")
    assert options["signal"] == "USR2@120"
    assert "requeue" in options
    assert options["open-mode"] == "append"
    assert "no-requeue" in header(ROOT / "slurm" / "wandb_agent.sbatch")


@pytest.fixture
def srun(tmp_path, monkeypatch):
    """An srun that writes down its arguments, one after a zero byte each."""
    (tmp_path / "srun").write_text(f"#!/bin/sh\nprintf '%s\\0' \"$@\" > '{tmp_path}/arguments'\n")
    (tmp_path / "sleep").write_text("#!/bin/sh\n")
    for name in ("srun", "sleep"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for name, value in (("SUBMIT_DIR", str(ROOT)), ("JOB_NUM_NODES", "2"), ("NTASKS_PER_NODE", "3")):
        monkeypatch.setenv(f"SLURM_{name}", value)

    def call(name: str, *words: str) -> list[str]:
        subprocess.run(["bash", ROOT / "slurm" / name, *words], check=True)
        return (tmp_path / "arguments").read_text().split("\0")[:-1]

    return call


def test_words_of_train_sbatch_reach_the_job_unchanged(srun, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "4")
    words = ["label='a, b  $HOME `id` $(id) \"x\" größe*'", "optimizer.lr=1e-3"]
    arguments = srun("train.sbatch", *words)
    start = arguments.index("slurm.job")
    assert arguments[start - 2 : start] == [".venv/bin/python", "-m"]
    assert arguments[-2:] == words
    [planned] = plan(arguments[start + 1 :])
    assert planned.config["seed"] == 4
    assert (planned.config["trainer"]["num_nodes"], planned.config["trainer"]["devices"]) == (2, 3)
    assert planned.config["label"] == 'a, b  $HOME `id` $(id) "x" größe*'


def test_agents_forward_signals_to_their_runs(srun):
    assert "--forward-signals" in srun("wandb_agent.sbatch", "me/project/abc")
    wrong = subprocess.run(["bash", ROOT / "slurm" / "wandb_agent.sbatch"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert "usage: sbatch slurm/wandb_agent.sbatch ENTITY/PROJECT/SWEEP" in wrong.stderr


@pytest.mark.parametrize("file", SWEEPS, ids=lambda file: file.stem)
def test_every_command_of_a_wandb_sweep_is_a_run(file, monkeypatch):
    """As wandb's agent makes them: of each parameter one value."""
    sweep = yaml.safe_load(file.read_text())
    parameters = sweep["parameters"]
    assert file.stem == sweep["name"]
    values = [
        setting.get("values") or [setting[key] for key in ENDS.get(setting.get("distribution"), ("value",))]
        for setting in parameters.values()
    ]
    hashes, count = set(), 0
    for chosen in itertools.product(*(value if len(value) < 3 else (value[0], value[-1]) for value in values)):
        arguments = create_sweep_command_args(
            {"args": {name: {"value": value} for name, value in zip(parameters, chosen, strict=True)}}
        )
        command = create_sweep_command(sweep["command"])
        place = command.index("${args_no_hyphens}")
        command = [*command[:place], *arguments["args_no_hyphens"], *command[place + 1 :]]
        start = command.index("-m")
        assert command[start + 1] == "${program}"
        assert sweep["program"] == "experiments.train"
        [planned] = plan(command[start + 2 :])
        assert planned.config["logger"]["wandb"] is True
        assert planned.config["wandb"] == {"mode": "online", "project": sweep["project"], "entity": None}
        split, metric = sweep["metric"]["name"].split("/")
        assert split == planned.config["protocol"]["select_on"]
        assert metric in ("accuracy", "loss")
        hashes.add(planned.run.hash)
        count += 1
    assert len(hashes) == count


def test_hydra_launcher_is_submitits_and_its_files_are_where_all_nodes_see_them(tmp_path):
    words = [
        "experiment=mnist_patches",
        "hydra/launcher=slurm",
        f"paths.runs={tmp_path}",
        "hydra.launcher.partition=gpu",
    ]
    with composing():
        config = hydra.compose("train", overrides=words, return_hydra_config=True)
    launcher = instantiate(config.hydra.launcher)
    assert type(launcher).__name__ == "SlurmLauncher"
    assert launcher.params["submitit_folder"] == f"{tmp_path}/.hydra_launcher/%j"
    assert launcher.params["partition"] == "gpu"
    assert launcher.params["timeout_min"] > 10
    assert launcher.params["max_num_timeout"] > 0
    assert OmegaConf.to_container(config.hydra.launcher.additional_parameters)["requeue"] is True
