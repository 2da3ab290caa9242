"""`python -m experiments.report.workspace --entity ENTITY`: saves the template's panels as a workspace of wandb."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..config import CONFIGS, WandbConfig
from ..errors import RunError
from ..files import TextLoader, write_atomic

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace

TEMPLATE = CONFIGS / "wandb" / "templates" / "workspace.yaml"


class Kind(Enum):
    """What a panel draws: metrics over optimizer steps, or what runs ended with."""

    line = "line"
    bar = "bar"


@dataclass
class Panel:
    """A panel: its metrics by name, or by a regular expression."""

    kind: Kind = MISSING
    title: str = MISSING
    metrics: list[str] = field(default_factory=list)
    regex: str | None = None
    log: bool = False


@dataclass
class Section:
    """A row of panels under a heading."""

    name: str = MISSING
    panels: list[Panel] = MISSING


@dataclass
class Template:
    """A workspace: its heading, the axis of its lines, what runs are grouped by, its sections."""

    name: str = MISSING
    x_axis: str = MISSING
    group_by: list[str] = MISSING
    sections: list[Section] = MISSING


def load_template(path: Path = TEMPLATE) -> Template:
    """Reads and checks a template.

    Raises:
        RunError: for what is missing, unknown or of the wrong type.
    """
    try:
        merged = OmegaConf.merge(
            OmegaConf.structured(Template), OmegaConf.create(yaml.load(path.read_text(encoding="utf-8"), TextLoader))
        )
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            raise RunError(f"{path}: {missing[0]} is missing")
        template = OmegaConf.to_object(merged)
    except (OSError, OmegaConfBaseException, yaml.YAMLError) as error:
        raise RunError(f"{path}: {' '.join(str(error).split())}") from error
    assert isinstance(template, Template)
    for panel in (panel for section in template.sections for panel in section.panels):
        if bool(panel.metrics) == bool(panel.regex):
            raise RunError(f"{path}: panel {panel.title!r} needs either metrics or a regex")
        if panel.kind is Kind.bar and (panel.regex or panel.log):
            raise RunError(f"{path}: panel {panel.title!r}: a bar has metrics, and no regex and no log")
    return template


def build(template: Template, entity: str, project: str) -> "Workspace":
    """The workspace, not saved yet.

    Raises:
        RunError: where the package that makes workspaces is not installed.
    """
    try:
        from wandb_workspaces import workspaces
        from wandb_workspaces.reports import v2 as panels
    except ModuleNotFoundError as error:
        raise RunError(f"workspaces need a package of their own: pip install wandb-workspaces ({error})") from error

    def panel(each: Panel) -> panels.LinePlot | panels.BarPlot:
        if each.kind is Kind.bar:
            return panels.BarPlot(title=each.title, metrics=list(each.metrics), orientation="v")
        return panels.LinePlot(
            title=each.title, x=template.x_axis, y=list(each.metrics), metric_regex=each.regex, log_y=each.log
        )

    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=template.name,
        sections=[
            workspaces.Section(name=section.name, is_open=True, panels=[panel(each) for each in section.panels])
            for section in template.sections
        ],
        settings=workspaces.WorkspaceSettings(x_axis=template.x_axis),
        runset_settings=workspaces.RunsetSettings(groupby=[workspaces.Config(key) for key in template.group_by]),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code is 1 where the workspace could not be saved, for a reason that is printed."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.report.workspace", description="Saves panels for this suite's runs on wandb."
    )
    parser.add_argument("--entity", required=True, help="team or user on the server")
    parser.add_argument("--project", default=WandbConfig.project, help=f"project (default: {WandbConfig.project})")
    parser.add_argument("--template", type=Path, default=TEMPLATE, help="another template than configs/wandb has")
    parser.add_argument("--spec", type=Path, help="write what would be saved into this JSON file, and save nothing")
    options = parser.parse_args(arguments)
    try:
        workspace = build(load_template(options.template), options.entity, options.project)
        if options.spec is not None:
            # The package has no public way to see what it would send.
            write_atomic(options.spec, workspace._to_model().spec.model_dump_json(by_alias=True, indent=2) + "\n")
            print(options.spec)
            return 0
    except (RunError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        print(workspace.save().url)
    except Exception as error:  # whatever the server, or the way to it, may answer
        print(f"error: the workspace was not saved: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
