"""What a job asks of a cluster: configs/cluster/NAME.yaml, or that in configs/local/, and `cluster.key=value`."""

import getpass
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import (
    CommonTokenStream,
    InputStream,
    OverrideLexer,
    OverrideParser,
    OverridesParser,
    create_functions,
)
from hydra.core.override_parser.overrides_visitor import HydraOverrideVisitor
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.config import CONFIGS, composing
from experiments.errors import RunError
from experiments.files import TextLoader
from experiments.search_path import further_folders

from .queue import run


@dataclass
class ClusterConfig:
    """Section `cluster`; configs/cluster/default.yaml says what each key is."""

    partition: str | None = MISSING
    account: str | None = MISSING
    qos: str | None = None
    constraint: str | None = None
    nodes: int = 1
    tasks_per_node: int | None = None
    gpus_per_node: int = 0
    cpus_per_task: int = 1
    mem: str | None = None
    time: str = "60"
    signal_before_end_s: int = 120
    requeue: bool = True
    max_restarts: int = 50
    max_timeouts: int = 20
    array_parallelism: int | None = None
    modules: list[str] = field(default_factory=list)
    container: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    sbatch: dict[str, Any] = field(default_factory=dict)

    @property
    def processes_per_node(self) -> int:
        """One for each GPU, where nothing else is said."""
        return self.tasks_per_node or max(self.gpus_per_node, 1)

    @property
    def minutes(self) -> int:
        """The time limit in minutes, rounded up."""
        return minutes(self.time)


_LEAST = {
    "nodes": 1,
    "tasks_per_node": 1,
    "gpus_per_node": 0,
    "cpus_per_task": 1,
    "signal_before_end_s": 1,
    "max_restarts": 0,
    "max_timeouts": 0,
    "array_parallelism": 1,
}
# The maps of a cluster whose values are text; in `sbatch` true and false are flags.
_TEXTS = ("environment", "sbatch")
# What the suite says to sbatch itself, and the key by which it is told. Another value would be taken in silence, and
# what depends on it (the processes of a run, its logs, how its jobs are found and stopped) would not know.
_LOGS = "jobs write into the submission's folder, where slurm.status looks"
_SET_HERE = {
    "partition": "give cluster.partition",
    "account": "give cluster.account",
    "qos": "give cluster.qos",
    "constraint": "give cluster.constraint",
    "nodes": "give cluster.nodes",
    "ntasks": "give cluster.nodes and cluster.tasks_per_node",
    "ntasks-per-node": "give cluster.tasks_per_node",
    "gpus-per-node": "give cluster.gpus_per_node",
    "cpus-per-task": "give cluster.cpus_per_task",
    "cpus-per-gpu": "give cluster.cpus_per_task",
    "mem": "give cluster.mem",
    "time": "give cluster.time",
    "signal": "give cluster.signal_before_end_s",
    "requeue": "give cluster.requeue",
    "no-requeue": "give cluster.requeue",
    "array": "the runs are the array; give cluster.array_parallelism for how many at the same time",
    "output": _LOGS,
    "error": _LOGS,
    "open-mode": _LOGS,
    "job-name": "jobs are found by the name that the suite gives them",
    "export": "give cluster.environment",
    "export-file": "give cluster.environment",
    "chdir": "runs are trained in the repository's folder",
    "wrap": "the job's script is the suite's",
    "test-only": "give --dry-run",
    "parsable": "the suite reads what sbatch prints",
    "quiet": "the suite reads what sbatch prints",
    "wait": "slurm.submit does not wait; slurm.status --watch does",
    "clusters": "it would submit to a cluster that squeue is not asked of: set SLURM_CLUSTERS in your environment; all "
    "of SLURM's commands read it",
}
_SHORT = {
    "p": "partition",
    "A": "account",
    "q": "qos",
    "C": "constraint",
    "N": "nodes",
    "n": "ntasks",
    "c": "cpus-per-task",
    "t": "time",
    "a": "array",
    "o": "output",
    "e": "error",
    "J": "job-name",
    "D": "chdir",
    "Q": "quiet",
    "W": "wait",
    "M": "clusters",
    "G": "gpus",
}
# Further options that ask for what a key asks for; where that key is null or 0 they may.
_INSTEAD = {
    "mem-per-cpu": ("mem", None),
    "mem-per-gpu": ("mem", None),
    "gpus": ("gpus_per_node", 0),
    "gpus-per-task": ("gpus_per_node", 0),
    "gpus-per-socket": ("gpus_per_node", 0),
}


def _check_sbatch(cluster: ClusterConfig) -> None:
    """Refuses options of sbatch that say something else than the cluster's keys, or than what the suite relies on.

    Raises:
        RunError: says what to give in their place.
    """
    for key, value in cluster.sbatch.items():
        name = str(key).lstrip("-").replace("_", "-")
        name = _SHORT.get(name, name)
        # sbatch takes the beginning of an option for the whole.
        whole = [one for one in _SET_HERE if len(name) > 1 and one.startswith(name)]
        if name in _SET_HERE or (whole and name not in _INSTEAD):
            raise RunError(f"cluster.sbatch.{key} cannot be given: {_SET_HERE.get(name) or _SET_HERE[whole[0]]}")
        instead, unset = _INSTEAD.get(
            name, ("gpus_per_node", 0) if name == "gres" and "gpu" in str(value) else (None, None)
        )
        if instead is not None and getattr(cluster, instead) != unset:
            raise RunError(
                f"cluster.sbatch.{key} and cluster.{instead}={getattr(cluster, instead)} ask for the same in two ways: "
                f"give cluster.{instead}={'null' if unset is None else unset} with it, or leave it out"
            )


@dataclass
class _Shape:
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command line that are about the cluster, and those that are about the runs.

    Raises:
        RunError: for a word that is not in Hydra's grammar.
    """
    parser = OverridesParser.create()
    cluster: list[str] = []
    runs: list[str] = []
    for word in words:
        try:
            key = parser.parse_override(word).key_or_group
        except HydraException as error:
            raise RunError(" ".join(str(error).split())) from error
        (cluster if key == "cluster" or key.startswith("cluster.") else runs).append(word)
    return cluster, runs


def cluster_config(words: Sequence[str]) -> ClusterConfig:
    """The cluster that `cluster=name cluster.key=value` describe, or the default one.

    Raises:
        RunError: for a name, key or value that there is not, and for one that is still to be set.
    """
    ConfigStore.instance().store(name="cluster_shape", node=_Shape)
    # These two take any key; to Hydra that is an addition.
    added = [
        f"++{word}" if re.match(r"cluster\.(environment|sbatch)[.=]", word) else word for word in map(_as_text, words)
    ]
    try:
        with composing():
            config = hydra.compose("cluster", overrides=added).cluster
        for name in _names(words):
            _check_texts(name)
        missing = sorted(map(str, OmegaConf.missing_keys(config)))
        if missing:
            key = missing[0].removeprefix("cluster.")
            raise RunError(f"cluster.{key} is not set: give cluster.{key}=…{_known(key)}")
        found = OmegaConf.to_object(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise RunError(" ".join(str(error).split())) from error
    assert isinstance(found, ClusterConfig)
    _check_sbatch(found)
    for name in found.environment:
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise RunError(
                f"cluster.environment.{name}: {name!r} is no name of a variable; the job's shell would refuse it"
            )
    for key, least in _LEAST.items():
        value = getattr(found, key)
        if value is not None and value < least:
            raise RunError(f"cluster.{key} must be at least {least}; got {value}")
    seconds = 60 * found.minutes  # 0 is without a limit
    if 0 < seconds <= found.signal_before_end_s:
        raise RunError(
            f"cluster.signal_before_end_s={found.signal_before_end_s} is no less than cluster.time={found.time}, of "
            f"{seconds} s: the run would be stopped as soon as it starts"
        )
    return found


def _is_text(key: str) -> bool:
    """Whether a key of a cluster is read as it is written: `time`, `modules`, `environment.NAME`."""
    section, _, name = key.partition(".")
    if name:
        return section in _TEXTS
    return any(entry.name == key and "str" in str(entry.type) for entry in fields(ClusterConfig))


class _AsWritten(HydraOverrideVisitor):
    """Reads what Hydra takes for a number or a truth value as the text that it is written as, in lists and maps too."""

    def __init__(self, flags: bool) -> None:
        super().__init__(create_functions())
        self.flags = flags  # whether true and false stay what they are

    def visitPrimitive(self, ctx: OverrideParser.PrimitiveContext) -> Any:
        value = super().visitPrimitive(ctx)
        if not isinstance(value, int | float) or (self.flags and isinstance(value, bool)):
            return value
        return QuotedString(ctx.getText().strip(), Quote.single)


def _as_text(word: str) -> str:
    """A word about a key that is text, with quotes where Hydra would read it as something else: 1_000, 1e3, true."""
    parsed = OverridesParser.create().parse_override(word)
    name = parsed.key_or_group.removeprefix("cluster.")
    if not (_is_text(name) or name in _TEXTS) or parsed.is_sweep_override() or parsed.is_delete():
        return word
    lexer = OverrideLexer(InputStream(word))
    tree = OverrideParser(CommonTokenStream(lexer)).override()
    value = _AsWritten(name.partition(".")[0] == "sbatch").visit(tree)._value
    return f"{word.partition('=')[0]}={Override._get_value_element_as_str(value)}"


def _names(words: Sequence[str]) -> list[str]:
    """The files of a cluster: that which is named, and those that it begins with."""
    chosen = [word.partition("=")[2] for word in words if word.lstrip("+").startswith("cluster=")]
    names = [chosen[-1] if chosen else "default"]
    for name in names:
        for _, content in _contents(name):
            for entry in (content or {}).get("defaults", []):
                if isinstance(entry, str) and entry != "_self_" and entry not in names:
                    names.append(entry)
    return names


def _contents(name: str) -> Iterator[tuple[Path, Any]]:
    for folder in (CONFIGS, *further_folders()):
        file = folder / "cluster" / f"{name}.yaml"
        if file.is_file():
            yield file, yaml.load(file.read_text(encoding="utf-8"), TextLoader)


def _check_texts(name: str) -> None:
    """Refuses what YAML reads as something else than is written, under a key that is text: 12:00:00, 0123, 1.10, yes.

    Raises:
        RunError: with the line to write in its place.
    """
    for file, written in _contents(name):
        read = OmegaConf.to_container(OmegaConf.load(file))
        for key, text, value in _leaves(written or {}, read):
            flag = key.startswith("sbatch.") and isinstance(value, bool)
            if _is_text(key) and text and value is not None and str(value) != text and not flag:
                line = f'{key.rpartition(".")[2]}: "{text}"'
                raise RunError(f"{file}: YAML reads cluster.{key}: {text} as {value!r}; write {line}, in quotes")


def _leaves(written: Any, read: Any, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Key, text and value of a file's plain values, the same file read once as text and once as YAML does."""
    values = {str(key): value for key, value in read.items()}
    for key, text in written.items():
        value = values.get(key)
        if isinstance(text, dict) and isinstance(value, dict):
            yield from _leaves(text, value, f"{prefix}{key}.")
        elif isinstance(text, list) and isinstance(value, list):
            yield from ((f"{prefix}{key}", *pair) for pair in zip(text, value, strict=True) if isinstance(pair[0], str))
        elif isinstance(text, str):
            yield f"{prefix}{key}", text, value


def minutes(time: str) -> int:
    """A time limit as sbatch takes it (minutes, m:s, h:m:s, days-hours, days-h:m, days-h:m:s), rounded up.

    Raises:
        RunError: for anything else.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if match is None:
        raise RunError(f"cluster.time={time} is no time limit: give minutes, hours:minutes:seconds or days-hours")
    days, *numbers = (int(number) if number else 0 for number in match.groups())
    if match[1] is not None or match[4] is not None:
        hours, mins, seconds = numbers
    else:
        hours, (mins, seconds) = 0, numbers[:2]
    return math.ceil(((days * 24 + hours) * 60 + mins) + seconds / 60)


def check(cluster: ClusterConfig) -> None:
    """Asks SLURM for the partition and the account, before anything is submitted.

    Raises:
        RunError: where one is not there, or none is named and SLURM has no default.
    """
    partitions = _partitions()
    names = sorted(name.rstrip("*") for name in partitions)
    if cluster.partition is None:
        if not any(name.endswith("*") for name in partitions):
            raise RunError(f"this cluster has no default partition: give cluster.partition=…, of {', '.join(names)}")
    else:
        for name in cluster.partition.split(","):
            if name not in names:
                raise RunError(f"there is no partition {name} on this cluster: there are {', '.join(names)}")
    accounts = _accounts()
    if accounts and cluster.account is not None and cluster.account not in accounts:
        raise RunError(
            f"you have no account {cluster.account} on this cluster: there are {', '.join(sorted(accounts))}"
        )


def _partitions() -> set[str]:
    return _single_words(run(["sinfo", "--noheader", "--format=%P"]))


def _accounts() -> set[str]:
    """The user's accounts; empty where the cluster keeps none, which then takes any."""
    user = _user()
    if user is None:
        return set()
    words = ["sacctmgr", "--noheader", "--parsable2", "show", "associations", "format=account", "where"]
    try:
        return _single_words(run([*words, f"user={user}"]))
    except RunError:
        return set()


def _single_words(text: str) -> set[str]:
    """The lines of one word; sentences that a site's wrapper prints between them are none."""
    return {line.strip() for line in text.splitlines() if len(line.split()) == 1}


def _known(key: str) -> str:
    try:
        found = {"partition": _partitions, "account": _accounts}[key]()
    except (KeyError, RunError):
        return ""
    return f" (there are {', '.join(sorted(name.rstrip('*') for name in found))})" if found else ""


def _user() -> str | None:
    """The user's name; None where neither the environment nor the machine knows it."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return None
