"""Expands a sweep into its runs, thousands in seconds, with the configurations that Hydra itself composes.

A composition takes Hydra a tenth of a second, so there is one for each set of group choices (`attention=sinkhorn
model=vit_mnist`), and plain values (`attention.n_iters=5`) are set in it afterwards, by Hydra's own functions.
"""

import copy
import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import hydra
import omegaconf.base
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from omegaconf import DictConfig, ListConfig, OmegaConf

from experiments.config import composing, refuse_ignored, resolve
from experiments.errors import RunError
from experiments.runners.run_dir import RunDir, folders_by_hash


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep.

    Attributes:
        overrides: the words after `python -m experiments.train` that make it, in Hydra's grammar.
        run: its folder; nothing has been made on the disk.
        config: its resolved configuration.
    """

    overrides: list[str]
    run: RunDir
    config: dict[str, Any]


def plan(overrides: Sequence[str]) -> list[PlannedRun]:
    """The runs of a sweep, in the order of `python -m experiments.train -m *overrides`.

    Args:
        overrides: in Hydra's grammar, sweeps included: `a=1,2`, `a=range(3)`, `a=choice(x,y)`, `group=glob(*)`.

    Returns:
        One entry for each run; of equal runs the first, and a line on the error stream says how many others there were.

    Raises:
        RunError: for what Hydra or the checks of a configuration refuse, naming the run.
    """
    with composing() as loader, _interpolations_parsed_once():
        parsed = parse(overrides, loader)
        expanded = BasicSweeper.split_arguments(parsed, None)[0]
        planner = _Planner(loader, parsed)
        planned: dict[str, PlannedRun] = {}
        for number, words in enumerate(expanded, 1):
            try:
                config = planner.config(words)
            except Exception as error:  # RunError, and whatever Hydra raises for a value that does not fit
                place = f"run {number} of {len(expanded)} ({' '.join(words)})" if len(expanded) > 1 else "this run"
                raise RunError(f"{place}: {' '.join(_reason(error).split())}") from error
            run = planner.folder(config)
            planned.setdefault(run.hash, PlannedRun(words, run, config))
    if len(planned) < len(expanded):
        print(
            f"{len(expanded) - len(planned)} of {len(expanded)} runs of this sweep are equal to others and left out",
            file=sys.stderr,
        )
    return list(planned.values())


def parse(overrides: Sequence[str], loader: ConfigLoaderImpl) -> list[Override]:
    """The words of a sweep, which the sweeper that Hydra uses for `-m` then expands.

    Raises:
        RunError: for settings of Hydra itself, which are not a run's, and for sweeps without an end (`interval`).
        HydraException: for a word that is not in the grammar.
    """
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
    for override in parsed:
        if override.is_hydra_override():
            raise RunError(f"{override.input_line} is a setting of Hydra's own, which a submitted run does not take")
        if override.is_sweep_override() and not override.is_discrete_sweep():
            raise RunError(f"{override.input_line} has no end: take values (a,b,c), range(…) or choice(…)")
    return parsed


def _elements(parsed: Sequence[Override]) -> Iterator[Override]:
    """What each value of each sweep would be parsed to, had it been written alone; parsing them takes longer."""
    for override in parsed:
        if override.is_sweep_override():
            for value in override.sweep_iterator():
                word = f"{override.get_key_element()}={Override._get_value_element_as_str(value)}"
                yield replace(override, value_type=ValueType.ELEMENT, _value=value, input_line=word)


@contextmanager
def _interpolations_parsed_once() -> Iterator[None]:
    """Keeps the syntax trees of interpolations: OmegaConf parses at each reading, two thirds of the time of a plan."""
    parse = omegaconf.base.parse
    omegaconf.base.parse = functools.cache(parse)
    try:
        yield
    finally:
        omegaconf.base.parse = parse


def _reason(error: Exception) -> str:
    cause: BaseException = error
    words = str(error)
    while cause.__cause__ is not None and not isinstance(error, RunError):
        cause = cause.__cause__
        words = f"{words}: {str(cause).splitlines()[0]}" if str(cause) else words
    return words


class _Planner:
    """Configurations of one sweep's runs; keeps what they have in common."""

    def __init__(self, loader: ConfigLoaderImpl, sweeps: Sequence[Override]) -> None:
        self.loader = loader
        self.parsed = {str(one.input_line): (one, self._is_choice(one)) for one in _elements(sweeps)}
        self.composed: dict[tuple[str, ...], DictConfig] = {}
        self.shared: dict[tuple[tuple[str, ...], tuple[str, ...]], _Shared] = {}
        self.folders: dict[Path, dict[str, Path]] = {}

    def config(self, words: Sequence[str]) -> dict[str, Any]:
        """The resolved configuration of one run."""
        for word in words:
            if word not in self.parsed:
                override = OverridesParser.create().parse_override(word)
                self.parsed[word] = override, self._is_choice(override)
        choices = tuple(word for word in words if self.parsed[word][1])
        values = [override for override, is_choice in map(self.parsed.__getitem__, words) if not is_choice]
        if choices not in self.composed:
            self.composed[choices] = hydra.compose("train", overrides=list(choices))
        base = self.composed[choices]
        if not all(_sets_a_leaf(override, base) for override in values):
            config = copy.deepcopy(base)
            ConfigLoaderImpl._apply_overrides_to_config(values, config)
            refuse_ignored(config, words)
            return resolve(config)
        # The same leaves are set in every run of these keys, so what an earlier run left there is overwritten.
        key = choices, tuple(override.key_or_group for override in values)
        if key not in self.shared:
            self.shared[key] = _Shared(copy.deepcopy(base), values)
        resolved = self.shared[key].resolved(values)
        refuse_ignored(self.shared[key].config, words)
        return resolved

    def _is_choice(self, override: Override) -> bool:
        return not isinstance(override.value(), dict) and self.loader.repository.group_exists(override.key_or_group)

    def folder(self, config: dict[str, Any]) -> RunDir:
        """The run's folder; that of the experiment, with those of its runs, is listed once for all."""
        parent = Path(config["paths"]["runs"]) / config["experiment"]
        if parent not in self.folders:
            self.folders[parent] = folders_by_hash(parent)
        return RunDir.of(config, self.folders[parent])


def _sets_a_leaf(override: Override, base: DictConfig) -> bool:
    if override.is_add() or override.is_force_add() or override.is_delete():
        return False
    value = override.value()
    if isinstance(value, dict | list) or (isinstance(value, str) and "${" in value):
        return False
    parent, _, last = override.key_or_group.rpartition(".")
    node = OmegaConf.select(base, parent) if parent else base
    return isinstance(node, DictConfig) and not isinstance(node._get_node(last), DictConfig | ListConfig | None)


class _Shared:
    """Runs that differ in the values of the same leaves: sections that no leaf reaches are resolved once."""

    def __init__(self, config: DictConfig, values: Sequence[Override]) -> None:
        self.config = config
        self.unchanged: dict[str, Any] | None = None
        set_here = {override.key_or_group.partition(".")[0] for override in values}
        self.varying = {name for name in map(str, config) if name in set_here or _interpolates(config._get_node(name))}

    def resolved(self, values: list[Override]) -> dict[str, Any]:
        ConfigLoaderImpl._apply_overrides_to_config(values, self.config)
        whole = resolve(self.config, self.unchanged)
        if self.unchanged is None:
            self.unchanged = {name: section for name, section in whole.items() if name not in self.varying}
        return {name: copy.deepcopy(whole[name]) if name in self.unchanged else whole[name] for name in whole}


def _interpolates(node: Any) -> bool:
    if node._is_interpolation():
        return True
    if node._is_none() or node._is_missing():
        return False
    if isinstance(node, DictConfig):
        return any(_interpolates(node._get_node(key)) for key in node)
    if isinstance(node, ListConfig):
        return any(_interpolates(node._get_node(index)) for index in range(len(node)))
    return False
