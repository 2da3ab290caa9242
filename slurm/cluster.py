"""What a job asks of a cluster: configs/cluster/NAME.yaml, or that in configs/local/, and `cluster.key=value`."""

import getpass
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.config import CONFIGS, composing
from experiments.errors import RunError
from experiments.runners.run_dir import override

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
    local = override("", f"file://{CONFIGS / 'local'}")[1:]
    further = [f"hydra.searchpath=[{local}]"] if (CONFIGS / "local").is_dir() else []
    # These two take any key; to Hydra that is an addition.
    words = [f"++{word}" if re.match(r"cluster\.(environment|sbatch)[.=]", word) else word for word in words]
    try:
        with composing():
            config = hydra.compose("cluster", overrides=[*further, *words]).cluster
        missing = sorted(map(str, OmegaConf.missing_keys(config)))
        if missing:
            key = missing[0].removeprefix("cluster.")
            raise RunError(f"cluster.{key} is not set: give cluster.{key}=…{_known(key)}")
        found = OmegaConf.to_object(config)
    except (HydraException, OmegaConfBaseException) as error:
        raise RunError(" ".join(str(error).split())) from error
    assert isinstance(found, ClusterConfig)
    for key, least in (("nodes", 1), ("gpus_per_node", 0), ("cpus_per_task", 1), ("max_restarts", 0)):
        if getattr(found, key) < least:
            raise RunError(f"cluster.{key} must be at least {least}; got {getattr(found, key)}")
    found.minutes  # noqa: B018  # refuses what is no time
    return found


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
    return set(run(["sinfo", "--noheader", "--format=%P"]).split())


def _accounts() -> set[str]:
    """The user's accounts; empty where the cluster keeps none, which then takes any."""
    try:
        words = ["sacctmgr", "--noheader", "--parsable2", "show", "associations", "format=account", "where"]
        return set(run([*words, f"user={_user()}"]).split())
    except RunError:
        return set()


def _known(key: str) -> str:
    try:
        found = {"partition": _partitions, "account": _accounts}[key]()
    except (KeyError, RunError):
        return ""
    return f" (there are {', '.join(sorted(name.rstrip('*') for name in found))})" if found else ""


def _user() -> str:

    return getpass.getuser()
