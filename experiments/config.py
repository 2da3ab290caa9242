"""The shape of a configuration: its sections, their types, and its resolution. Unknown keys are refused."""

import functools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import hydra
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import MISSING, AnyNode, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .data.fashion import standin_source
from .errors import RunError
from .plugins import import_plugins
from .runners.run_dir import NOT_IDENTITY, override, run_hash
from .search_path import CONFIGS, further_folders, register_folders

PRECISIONS = {"32": "32-true", "64": "64-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


@dataclass
class TrainerConfig:
    """Section `trainer`; configs/trainer/default.yaml says what each key is."""

    max_epochs: int = MISSING
    precision: str = "32"
    matmul_precision: str = "high"
    compile: bool = False
    accelerator: str = "auto"
    threads: int | None = None
    devices: int = 1
    num_nodes: int = 1
    strategy: str = "auto"
    accumulate_grad_batches: int = 1
    gradient_clip_norm: float | None = None
    deterministic: bool = True
    checkpoint_every_n_steps: int | None = None
    progress_bar: bool = True


@dataclass
class ProtocolConfig:
    """Section `protocol`; configs/train.yaml says what each key is."""

    select_on: str = "val"
    metric: str = "accuracy"
    test: bool = True
    mean_over: str = "samples"
    initial: bool = False


@dataclass
class ColumnsConfig:
    """Section `columns`; configs/train.yaml says what each key is."""

    every: int | None = None
    samples: int = 64


@dataclass
class ReportConfig:
    """Section `report`; configs/train.yaml says what each key is."""

    leave_out_below: float | None = None
    overwrite_last_point: bool = False


@dataclass
class LoggerConfig:
    """Section `logger`; configs/logger says what each key is."""

    csv: bool = False
    wandb: bool = False
    tensorboard: bool = False


@dataclass
class WandbConfig:
    """Section `wandb`; configs/wandb says what each key is."""

    mode: str = "offline"
    project: str = "sinkformer-suite"
    entity: str | None = None


@dataclass
class PathsConfig:
    """Section `paths`; configs/paths says what each key is."""

    data: str = "data"
    runs: str = "runs"


@dataclass
class Config:
    """A whole configuration; sections without a class of their own are checked by what they are passed to."""

    experiment: str = MISSING
    label: str = MISSING
    plugins: list[str] = field(default_factory=list)
    engine: str = "lightning"
    init_from: dict[str, Any] | None = None
    seed: int = 0
    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    attention: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    scheduler: dict[str, Any] | None = None
    learning_rates: dict[str, Any] = field(default_factory=dict)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    protocol: ProtocolConfig = field(default_factory=ProtocolConfig)
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)


# Names, which are read as they are written.
_TEXTS = ("label", "paths.data", "paths.runs", "wandb.entity", "wandb.project")


def register() -> None:
    """Makes the shape known to Hydra under the name that configs/train.yaml refers to.

    Hydra checks a file against any schema of the same name that some package stored: fairseq, once imported, has an
    optimizer/adam of its own. Such schemas of our groups are taken out.
    """
    OmegaConf.register_new_resolver("standin_source", standin_source, replace=True)
    register_folders()
    store = ConfigStore.instance()
    store.store(name="shape", node=Config)
    for group in groups():
        if group != "hydra":
            store.repo.pop(group, None)


def groups() -> list[str]:
    """Names of the groups, those of further folders too, sorted."""
    found = (entry for folder in (CONFIGS, *further_folders()) for entry in folder.iterdir() if entry.is_dir())
    return sorted({entry.name for entry in found if entry.name != "__pycache__"})


def files_of(group: str) -> list[Path]:
    """The files of a group in all folders, by name; of two of one name the one that is taken."""
    files: dict[str, Path] = {}
    for folder in (CONFIGS, *further_folders()):
        for file in folder.glob(f"{group}/*.yaml"):
            files.setdefault(file.stem, file)
    return [files[name] for name in sorted(files)]


@contextmanager
def composing() -> Iterator[ConfigLoaderImpl]:
    """Hydra's composition of the files in `CONFIGS`: within it, `hydra.compose` works; yields the loader of the files.

    Raises:
        RunError: for what Hydra refuses.
    """
    register()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONFIGS)):
            loader = GlobalHydra.instance().config_loader()
            assert isinstance(loader, ConfigLoaderImpl)
            yield loader
    except HydraException as error:
        raise RunError(in_one_sentence(error)) from error


def in_one_sentence(error: Exception) -> str:
    """What Hydra objects to, without the list of places where it has looked."""
    if isinstance(error, MissingConfigException) and error.options:
        name = (error.missing_cfg_file or "").rpartition("/")[2]
        # Begun names count as near: `shapes` for shapes_set.
        begun = [option for option in error.options if name and option.startswith(name)]
        near = get_close_matches(name, error.options, 1) or begun
        hint = f", did you mean {' or '.join(near)}?" if near else ";"
        return f"{str(error).splitlines()[0]}{hint} there are {', '.join(error.options)}"
    words = " ".join(str(error).partition("Config search path:")[0].split())
    unknown = re.match(r"Could not override '(\w+)\.(\w+)'", words)
    if unknown is not None:
        group, key = unknown.groups()
        owners = [f"{group}={file.stem}" for file in files_of(group) if key in OmegaConf.load(file)]
        if owners:
            return f"{unknown[0]}: it is a key of {', '.join(owners)}, which this configuration has not; name one too"
    unknown = re.match(r"Could not override '(\w+)'", words)
    near = get_close_matches(unknown[1], [*groups(), *(entry.name for entry in fields(Config))], 1) if unknown else []
    return f"{words}; did you mean {near[0]}?" if near and unknown and near[0] != unknown[1] else words


def compose(overrides: Sequence[str]) -> DictConfig:
    """The configuration that the command line `python -m experiments.train *overrides` makes.

    Raises:
        RunError: for an override that Hydra refuses.
    """
    with composing():
        return hydra.compose("train", overrides=list(overrides))


def resolve(config: DictConfig, unchanged: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A configuration as plain values, resolved once for all and checked as far as it can be without data or model.

    Args:
        config: composed.
        unchanged: sections known from a resolved configuration that differs from this one in plain values of other
            sections alone. These sections are not read, and the others once: that clocks are no part of them is known.

    Raises:
        RunError: for a missing value, an interpolation that leads nowhere or changes between two readings, or a value
            out of range.
    """
    known = {} if unchanged is None else unchanged
    _whole_numbers(config, known)
    OmegaConf.clear_cache(config)
    try:
        resolved = again = _read(config, known)
        if unchanged is None:
            OmegaConf.clear_cache(config)
            again = _read(config, known)
    except OmegaConfBaseException as error:
        raise RunError(f"configuration: {str(error).splitlines()[0]}{_place(error)}") from error
    for section in resolved:
        if resolved[section] != again[section]:
            raise RunError(
                f"configuration: {section} reads differently each time (now {again[section]!r}): "
                "a run is known by its configuration, so clocks and random values cannot be part of it"
            )
    whole = {str(section): resolved.get(str(section), known.get(str(section))) for section in config}
    _check(whole)
    import_plugins(whole)
    if whole["init_from"] is not None:
        # Of the identity: another run before makes another run of this.
        before = whole["init_from"]
        whole["init_from"] = {**before, "run": _origin_hash(tuple(before["overrides"]), before["seed"])}
    return whole


def refuse_ignored(config: DictConfig, overrides: Sequence[str]) -> None:
    """Refuses words that would be taken for something else, or that nothing would take.

    These are texts that Hydra reads as numbers (`paths.runs=2026_12`), and rates beside what sets the rate; one that
    stands in an experiment's file is not meant.

    Args:
        config: composed with the overrides, unresolved: what looks a rate up still says where.
        overrides: the words after `python -m experiments.train` that made it.

    Raises:
        RunError: says which word, and what sets the rate.
    """
    given = [(word, *word.lstrip("+").partition("=")[::2]) for word in overrides]
    for word, key, value in given:
        if key in _TEXTS and str(read := _element(word)) != value.strip() and isinstance(read, int | float):
            raise RunError(f"{word}: Hydra reads {value} as the number {read}; write \"{key}='{value}'\"")
    section = OmegaConf.select(config, "optimizer")
    rate = OmegaConf.to_container(section, resolve=False).get("lr") if OmegaConf.is_dict(section) else None  # type: ignore[union-attr]
    of_rate = [
        word for word, key, value in given if key == "optimizer.lr" or (key, "lr" in value) == ("optimizer", True)
    ]
    if OmegaConf.select(config, "init_from") is not None and of_rate and rate is not None:
        raise RunError(
            f"{of_rate[-1]}: this run begins with another one's weights, and init_from.rate says its rate (times that "
            "one's last): give init_from.rate, or leave the word out"
        )
    of_table = [word for word, key, _ in given if key.partition(".")[0] == "learning_rates"]
    if of_table and "learning_rates" not in str(rate):
        raise RunError(f"{of_table[-1]}: this run's rate is optimizer.lr={rate}, not of that table: give optimizer.lr")


def _element(word: str) -> Any:
    with suppress(HydraException):
        return OverridesParser.create().parse_override(word).value()
    return None


def origin(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The run whose last weights a run begins with, as `init_from` of its resolved configuration names it.

    It is done where and shown as this one is (paths, loggers, devices).

    Returns:
        Its resolved configuration, and the overrides that make it.

    Raises:
        RunError: for overrides that Hydra refuses.
    """
    words = [*config["init_from"]["overrides"], f"seed={config['init_from']['seed']}"]
    kept = GlobalHydra.instance().hydra  # this may be a run of Hydra's, which goes on afterwards
    try:
        composed = compose(words)
        refuse_ignored(composed, words)
        resolved = resolve(composed)
    finally:
        GlobalHydra.instance().hydra = kept
    for key in NOT_IDENTITY:
        section, _, name = key.partition(".")
        if section in ("label", "learning_rates", "report"):
            continue
        if not name:
            resolved[section] = config[section]
        elif name in resolved[section] and name in config[section]:
            resolved[section][name] = config[section][name]
    paths = [override(f"paths.{name}", path) for name, path in config["paths"].items()]
    return resolved, [*words, *paths]


@functools.lru_cache(maxsize=1024)
def _origin_hash(overrides: tuple[str, ...], seed: int) -> str:
    shared = resolve(compose([*overrides, f"seed={seed}"]))
    return run_hash(shared)


def _whole_numbers(node: Any, known: Collection[str] = ()) -> None:
    """Makes 7 of 7.0 where a key takes any type: both are one run, so what is looked up by them has to be one word.

    A float of 2^53 or more, such as a rate of 1e30, is no count: torch takes an int of more than 64 bits nowhere.
    """
    if node._is_none() or node._is_missing() or node._is_interpolation():
        return
    keys = node if isinstance(node, DictConfig) else range(len(node))
    for key in keys:
        if key in known:
            continue
        child = node._get_node(key)
        if isinstance(child, DictConfig | ListConfig):
            _whole_numbers(child)
        elif isinstance(child, AnyNode) and isinstance(value := child._value(), float) and value.is_integer():
            child._set_value(int(value) if abs(value) < 2**53 else value)


def _read(config: DictConfig, known: Mapping[str, Any]) -> dict[str, Any]:
    plain = {}
    for section in map(str, config):
        if section not in known:
            value = config[section]
            plain[section] = (
                OmegaConf.to_container(value, resolve=True, throw_on_missing=True, enum_to_str=True)
                if OmegaConf.is_config(value)
                else value
            )
    return plain


def _place(error: OmegaConfBaseException) -> str:
    return f" (at {error.full_key})" if error.full_key else ""


def _check(config: dict[str, Any]) -> None:
    # Hydra refuses unknown keys, but not those that are appended with a plus.
    _known("", config, Config)
    if gone := [entry.name for entry in fields(Config) if entry.name not in config]:
        raise RunError(f"the configuration has no {gone[0]}: ~{gone[0]} has taken it out, and a run needs it")
    for section in fields(Config):
        if is_dataclass(section.type) and isinstance(section.type, type):
            _known(f"{section.name}.", config[section.name], section.type)
    trainer, protocol = config["trainer"], config["protocol"]
    _choice("trainer.precision", trainer["precision"], list(PRECISIONS))
    _choice("protocol.select_on", protocol["select_on"], ["val", "test"])
    _choice("protocol.metric", protocol["metric"], ["accuracy", "loss", "bleu"])
    _choice("engine", config["engine"], ["lightning", "fairseq"])
    origin_keys = () if config["init_from"] is None else ("overrides", "rate", "seed")
    if missing := [key for key in origin_keys if key not in config["init_from"]]:
        raise RunError(f"init_from.{missing[0]} is missing; configs/train.yaml says what it is")
    if config["init_from"] is not None:
        _check_origin(config["init_from"])
    _choice("protocol.mean_over", protocol["mean_over"], ["samples", "batches"])
    _choice("wandb.mode", config["wandb"]["mode"], ["offline", "online"])
    for key, least in (("max_epochs", 1), ("devices", 1), ("num_nodes", 1), ("accumulate_grad_batches", 1)):
        _at_least(f"trainer.{key}", trainer[key], least)
    _at_least("seed", config["seed"], 0)
    for key in ("threads", "checkpoint_every_n_steps"):
        if trainer[key] is not None:
            _at_least(f"trainer.{key}", trainer[key], 1)
    if config["columns"]["every"] is not None:
        _at_least("columns.every", config["columns"]["every"], 1)
    _at_least("columns.samples", config["columns"]["samples"], 1)
    if trainer["gradient_clip_norm"] is not None and not trainer["gradient_clip_norm"] > 0:
        raise RunError(f"trainer.gradient_clip_norm must be positive, or null; got {trainer['gradient_clip_norm']}")
    if not config["experiment"].endswith("_official"):
        for key, usual in asdict(ReportConfig()).items():
            if config["report"][key] != usual:
                raise RunError(
                    f"report.{key} is how the published code treats its numbers, for *_official experiments alone: the "
                    f"report would not do it to the runs of {config['experiment']}"
                )
    if protocol["initial"] and config["engine"] == "fairseq":
        raise RunError(
            "protocol.initial=true is for engine=lightning: fairseq's runs evaluate their first weights where these "
            "are another run's (init_from), and nowhere else"
        )
    if protocol["select_on"] == "test" and not protocol["test"]:
        raise RunError("protocol.select_on=test evaluates the test split each epoch; protocol.test=false forbids it")


def _check_origin(before: dict[str, Any]) -> None:
    known = ("overrides", "rate", "seed")
    if further := sorted(before.keys() - {*known, "run"}):
        raise RunError(f"there is no init_from.{further[0]}; known here are {', '.join(known)}")
    words, rate = before["overrides"], before["rate"]
    if not isinstance(words, list):
        raise RunError(f"init_from.overrides must be a list of words; got {words!r}")
    if twice := [word for word in words if str(word).lstrip("+").startswith("seed=")]:
        raise RunError(f"init_from.overrides has {twice[0]}, and init_from.seed={before['seed']}: give it there alone")
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
        raise RunError(f"init_from.rate must be a number above 0; got {rate}")


def _known(prefix: str, section: dict[str, Any], shape: type) -> None:
    known = {entry.name for entry in fields(shape)}
    for key in section:
        if key not in known:
            raise RunError(
                f"there is no {prefix}{key}; known here are {', '.join(prefix + name for name in sorted(known))}"
            )


def _choice(key: str, value: Any, allowed: list[str]) -> None:
    if value not in allowed:
        raise RunError(f"{key} must be one of {', '.join(allowed)}; got {value}")


def _at_least(key: str, value: int, least: int) -> None:
    if value < least:
        raise RunError(f"{key} must be at least {least}; got {value}")
