"""A run's identity and its folder, `runs/<experiment>/<label>-<hash8>/`.

The hash is that of the resolved configuration without what cannot change the numbers (`NOT_IDENTITY`), so that the same
run always finds its own folder, after a kill, on another machine or under a changed label.

In the folder:

- `config.yaml`: the resolved configuration, whole.
- `run.json`, the run card: `hash` (64 hex digits), `experiment`, `label`, `seed`, `state` ("running", "interrupted",
  "failed", "diverged" or "finished"), `identity` (the hashed part of the configuration), `command`, `git` (`commit`,
  `dirty`, `diff`), `versions`, `seeds`, `data` (`name`, `split_hash`, `sizes`, `classes`), `n_params`, and `attempts`:
  one object per start with `started`, `ended` (ISO 8601, UTC), `state`, `message`, `from_step`, `host`, `pid`,
  `platform`, `devices`, `threads`, `cpu_engine` (what computes attention on a CPU), `slurm` (`job`, `restart`, `nodes`;
  null elsewhere).
- `metrics.jsonl`: one object per evaluation: `epoch` (finished epochs, so the first is 1), `step` (optimizer steps),
  `split` ("train", "val" or "test"), then metric names (`loss`, `accuracy` as a fraction of 1; `lr` for "train"). The
  "train" row is the mean over the epoch while it was trained. No times: two equal runs have byte-identical files.
- `timing.jsonl`: per epoch `epoch`, `step`, `seconds`, `samples_per_second`, `ended`; of every attempt, so epochs that
  were repeated after a kill stand there twice.
- `checkpoints/step<8 digits>.ckpt`: the two newest and the best; in the end the best and the last.
- `result.json`: written last, so its presence means finished: `hash`, `experiment`, `label`, `seed`, `epochs`, `steps`,
  `n_params`, `data`, `selected_on` (the split that chose the epoch), `metric`, `skipped_steps` (of fp16, whose scaler
  leaves out steps that overflow), and `best` and `last`, each with `epoch`, `step`, `checkpoint` and the metrics of
  `val` and `test` (each only where the protocol evaluates it).
- `column_sums.jsonl`: column sums of the attention, where `columns.every` asks for them: see `columns`.
- `metrics.csv`, `wandb/`, `tensorboard/`: where the logger asks for them; copies of metrics.jsonl.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from sinkhorn_attention.engines.native import describe_cpu_engine, describe_device_engine

from ..errors import Diverged, RunError
from ..files import explain_full_disk, write_atomic, write_json

# Where the work is done and how it is shown. `learning_rates` is the table that optimizer.lr is looked up in.
NOT_IDENTITY = (
    "columns",
    "label",
    "learning_rates",
    "logger",
    "paths",
    "report",
    "wandb",
    "data.cache",
    "data.folder",
    "data.num_workers",
    "trainer.accelerator",
    "trainer.checkpoint_every_n_steps",
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.progress_bar",
    "trainer.strategy",
    "trainer.threads",
)
# What says nothing where it is as usual: a run has the same identity as one whose configuration lacks the key.
USUAL: dict[str, Any] = {
    "engine": "lightning",
    "init_from": None,
    "plugins": [],
    "protocol.mean_over": "samples",
    "protocol.initial": False,
    "trainer.matmul_precision": "high",
    "trainer.compile": False,
}
# Environment variable by which the first process of a run tells the run's folder to those that it starts.
RUN_FOLDER = "SINKFORMER_RUN_FOLDER"
PACKAGES = (
    "torch",
    "timm",
    "lightning",
    "torchmetrics",
    "hydra-core",
    "numpy",
    "ve-fairseq",
    "sacrebleu",
    "sinkhorn-attention",
)


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a resolved configuration that can change the numbers."""
    kept: dict[str, Any] = json.loads(json.dumps(config))
    for key in NOT_IDENTITY:
        place, last = _place(kept, key)
        place.pop(last, None)
    for key, usual in USUAL.items():
        place, last = _place(kept, key)
        if place.get(last, usual) == usual:
            place.pop(last, None)
    return _plain_numbers(kept)


def _place(config: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """The section that a dotted key is in, and its name there."""
    *groups, last = key.split(".")
    for group in groups:
        config = config.get(group, {})
    return config, last


def run_hash(config: Mapping[str, Any]) -> str:
    """sha256 of `identity`; the order of keys and the spelling of a number (1 or 1.0) do not matter."""
    canonical = json.dumps(identity(config), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def _plain_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain_numbers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def override(key: str, value: str) -> str:
    """`key=value` in Hydra's grammar, with the value quoted where Hydra would read a bare one as something else."""
    if re.fullmatch(r"[\w./:@%+-]+", value, re.ASCII):
        return f"{key}={value}"
    # Hydra takes a backslash as an escape only in front of a quote (or of the end, which is one).
    escaped = re.sub(r"(\\*)'", lambda match: match[1] * 2 + "\\'", value)
    escaped = re.sub(r"(\\+)$", lambda match: match[1] * 2, escaped)
    return f"{key}='{escaped}'"


def train_command(overrides: Sequence[str]) -> str:
    """The shell command of a run: overrides, already in Hydra's grammar, quoted once more for the shell."""
    return shlex.join(["python", "-m", "experiments.train", *overrides])


@dataclass
class RunDir:
    """A run's folder. Making the object touches nothing on the disk."""

    path: Path
    config: dict[str, Any]
    hash: str
    card: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, config: dict[str, Any], folders: Mapping[str, Path] | None = None) -> "RunDir":
        """The folder of a resolved configuration: the one that ends in its hash, or else the one to be made.

        Args:
            config: resolved.
            folders: of its experiment, as `folders_by_hash` gives them; listed here where they are not given.
        """
        digest = run_hash(config)
        parent = Path(config["paths"]["runs"]) / config["experiment"]
        label = re.sub(r"[^A-Za-z0-9._-]+", "-", config["label"]).strip("-.") or "run"
        existing = (folders_by_hash(parent) if folders is None else folders).get(digest[:8])
        return cls(existing or parent / f"{label}-{digest[:8]}", config, digest)

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def finished(self) -> bool:
        """Whether result.json is there; an empty one, of a crash of the disk or not wholly visible yet, is not."""
        with suppress(OSError):
            return (self.path / "result.json").stat().st_size > 0
        return False

    def result(self) -> dict[str, Any]:
        """What result.json holds.

        Raises:
            RunError: where it is damaged.
        """
        result = read_record(self.path / "result.json")
        places = [result.get(name) for name in ("best", "last")]
        whole = all(isinstance(place, dict) and {"epoch", "checkpoint"} <= place.keys() for place in places)
        if not whole or not isinstance(result.get("data"), dict) or not {"metric", "selected_on"} <= result.keys():
            raise RunError(
                f"{self.path / 'result.json'} is no result of a run: remove it and give the run's command again"
            )
        return result

    @contextmanager
    def attempt(self, command: str, facts: Mapping[str, Any], devices: Sequence[str], threads: int) -> Iterator[None]:
        """Makes the folder, holds it against other processes, and keeps the run card over one attempt.

        The lock is the kernel's: it falls with the process that holds it, however that process ends.

        Args:
            command: the shell command that starts this run.
            facts: further entries of the run card: data, n_params.
            devices: names of the devices.
            threads: CPU threads of torch.

        Raises:
            RunError: where another process is at this run, the folder belongs to another configuration or cannot be
                made, or the disk is full.
        """
        lock = FileLock(self.path / ".lock")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=_patience_s())
        except Timeout:
            raise RunError(f"another process is at this run already{self._holder()}: {self.path}") from None
        except OSError as error:
            reason = error.strerror or str(error)
            raise RunError(
                f"the run's folder {self.path} cannot be written ({reason}): give another folder of runs, paths.runs=…"
            ) from error
        try:
            with explain_full_disk(f"{self.path} stands at its last checkpoint"):
                self._begin(command, facts, devices, threads)
                try:
                    yield
                except BaseException as error:
                    # A full disk must not hide the fault that is being recorded.
                    with suppress(OSError):
                        self._end(*_how_it_ended(error))
                    raise
                self._end("finished")
        finally:
            lock.release()

    def _begin(self, command: str, facts: Mapping[str, Any], devices: Sequence[str], threads: int) -> None:
        self.checkpoints.mkdir(exist_ok=True)
        card_file = self.path / "run.json"
        earlier = read_record(card_file) if card_file.is_file() else {}
        if earlier and earlier.get("hash") != self.hash:
            owner = str(earlier.get("hash"))[:16]
            raise RunError(
                f"{self.path} belongs to another configuration ({owner}, not {self.hash[:16]}): move that folder away"
            )
        write_atomic(self.path / "config.yaml", yaml.safe_dump(self.config, sort_keys=False, allow_unicode=True))
        seed = self.config["seed"]
        attempt = {
            "started": _now(),
            "ended": None,
            "state": "running",
            "message": None,
            "from_step": 0,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "platform": platform.platform(),
            "devices": list(devices),
            "threads": threads,
            "cpu_engine": describe_cpu_engine(),
            "slurm": _slurm_job(),
        }
        self.card = {
            "hash": self.hash,
            "experiment": self.config["experiment"],
            "label": self.config["label"],
            "seed": seed,
            "state": "running",
            "command": command,
            "identity": identity(self.config),
            "seeds": {"run": seed, "split": self.config["data"].get("split_seed")},
            **facts,
            "git": git_state(),
            "versions": versions(),
            "attempts": [*earlier.get("attempts", []), attempt],
        }
        write_json(card_file, self.card)

    def note_resumed(self, step: int) -> None:
        """Records in the run card the optimizer step that this attempt goes on from.

        Warns where attention is computed by another engine than before.
        """
        self.card["attempts"][-1]["from_step"] = step
        self._warn_of_another("cpu_engine", "the CPU")
        write_json(self.path / "run.json", self.card)

    def note_device_engine(self, engine: str | None) -> None:
        """Records in the run card what has computed attention on CUDA devices, which is known after the first steps.

        Warns where it was another engine before.
        """
        attempt = self.card["attempts"][-1]
        if engine in (None, attempt.get("device_engine")):
            return
        attempt["device_engine"] = engine
        self._warn_of_another("device_engine", "CUDA devices")
        write_json(self.path / "run.json", self.card)

    def _warn_of_another(self, key: str, where: str) -> None:
        *earlier, attempt = self.card["attempts"]
        before = next((each[key] for each in reversed(earlier) if key in each), None)
        if before not in (None, attempt[key]):
            print(
                f"warning: attention on {where} is now computed by {attempt[key]}, before by {before}: "
                "numbers may differ in their last bits",
                file=sys.stderr,
            )

    def finish(self, result: Mapping[str, Any]) -> None:
        """Writes result.json: from here on the run is finished."""
        write_json(self.path / "result.json", result)

    def _end(self, state: str, message: str | None = None) -> None:
        self.note_device_engine(describe_device_engine())
        self.card["state"] = state
        self.card["attempts"][-1] |= {"ended": _now(), "state": state, "message": message}
        write_json(self.path / "run.json", self.card)

    def _holder(self) -> str:
        with suppress(OSError, ValueError, LookupError):
            attempt = json.loads((self.path / "run.json").read_text(encoding="utf-8"))["attempts"][-1]
            return f" (process {attempt['pid']} on {attempt['host']}, since {attempt['started']})"
        return ""


def folders_by_hash(experiment: Path) -> dict[str, Path]:
    """The run folders of an experiment by the eight digits that their names end in; of several the first by name."""
    folders: dict[str, Path] = {}
    for path in sorted(experiment.glob("*-*")):
        folders.setdefault(path.name.rpartition("-")[2], path)
    return folders


def _how_it_ended(error: BaseException) -> tuple[str, str]:
    """State and message of an attempt that an exception ends."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return "interrupted", _stop(error)
    message = str(error).strip() or type(error).__name__
    return "diverged" if isinstance(error, Diverged) else "failed", message.splitlines()[0]


def _stop(error: BaseException) -> str:
    """What stopped a run in order."""
    code = error.code if isinstance(error, SystemExit) else 128 + signal.SIGINT
    known = {128 + signal.SIGINT: "stopped by Ctrl-C", 128 + signal.SIGTERM: "stopped by a signal"}
    return known.get(code, f"ended with exit code {code}") if isinstance(code, int) else f"ended with {code}"


def _patience_s() -> float:
    """Seconds to wait for a run that another process is at: SLURM may restart a job before the old one has ended."""
    return 120.0 if os.environ.get("SLURM_RESTART_COUNT", "0") != "0" else 0.0


def _slurm_job() -> dict[str, Any] | None:
    """The job that this attempt is part of, how often SLURM had restarted it by then, and its nodes; None elsewhere."""
    if "SLURM_JOB_ID" not in os.environ:
        return None
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return {
        "job": f"{array}_{task}" if array else os.environ["SLURM_JOB_ID"],
        "restart": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
        "nodes": os.environ.get("SLURM_JOB_NODELIST"),
    }


def process_rank() -> int:
    """Which of the processes that train one run this is; 0 for the first and for one that is alone.

    Raises:
        RunError: where a variable that says so is no number.
    """
    # Batch scripts and interactive shells have SLURM_PROCID=0, also for further processes that Lightning starts there.
    # By hand a second machine's first process has NODE_RANK alone.
    for variables in (("RANK",), ("LOCAL_RANK", "NODE_RANK"), ("SLURM_PROCID",)):
        given = [(name, os.environ[name]) for name in variables if name in os.environ]
        for name, value in given:
            if not value.isdecimal():
                raise RunError(f"the environment sets {name}={value}, which is no number of a process: unset it")
        if given:
            return sum(int(value) for _, value in given)
    return 0


def refuse_left_over_rank(trainer: Mapping[str, Any]) -> None:
    """Refuses a rank in the environment that no process of this run has, such as one that is left over in a shell.

    The process would take itself for a further one, and leave the folder, the card and the result to the first.

    Args:
        trainer: section of the configuration.

    Raises:
        RunError: names the variables.
    """
    rank, processes = process_rank(), trainer["devices"] * trainer["num_nodes"]
    if rank >= processes:
        names = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
        given = " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
        raise RunError(
            f"the environment says {given}, as for a further process of several, and the run has {processes} "
            "(trainer.devices × trainer.num_nodes): unset it, or give the devices that there are"
        )


def read_config(folder: Path) -> dict[str, Any]:
    """The resolved configuration stored in a run folder.

    Raises:
        RunError: where it is damaged or missing.
    """
    return _read_mapping(folder / "config.yaml", yaml.safe_load)


def read_record(path: Path) -> dict[str, Any]:
    """The object that a file of JSON in a run's folder holds.

    Raises:
        RunError: where it is damaged or missing. Runs write such files whole or not at all.
    """
    return _read_mapping(path, json.loads)


def _read_mapping(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    try:
        content = parse(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise RunError(f"{path} cannot be read ({reason}): remove it and give the run's command again") from error
    return content


def git_state() -> dict[str, Any] | None:
    """Commit, whether tracked files differ from it, and that difference; None outside a repository."""

    def git(*arguments: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout

    try:
        commit, diff = git("rev-parse", "HEAD").strip(), git("diff", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return None
    return {"commit": commit, "dirty": bool(diff), "diff": diff}


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that make the numbers."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
