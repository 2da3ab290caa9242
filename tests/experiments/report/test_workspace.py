"""The template of the dashboard: what would be saved on the server, and that runs log what it shows."""

import json
import re

import pytest

from experiments.errors import RunError
from experiments.report.workspace import load_template, main


def test_what_would_be_saved(tmp_path):
    assert main(["--entity", "us", "--spec", str(tmp_path / "spec.json")]) == 0
    spec = json.loads((tmp_path / "spec.json").read_text(encoding="utf-8"))
    sections = spec["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == ["Test split", "Training", "Attention maps"]
    panels = [panel["config"] for section in sections for panel in section["panels"]]
    template = [panel for section in load_template().sections for panel in section.panels]
    assert [panel["chartTitle"] for panel in panels] == [panel.title for panel in template]
    lines = [panel for panel in panels if panel.get("xAxis")]
    assert {panel["xAxis"] for panel in lines} == {"trainer/global_step"}
    assert [panel["metricRegex"] for panel in lines if panel.get("metricRegex")] == [
        panel.regex for panel in template if panel.regex
    ]
    grouping = json.dumps(spec["section"]["runSets"][0]["grouping"])
    assert "attention.value.name" in grouping
    assert "attention.value.n_iters" in grouping


def test_runs_log_what_the_panels_show(finished, rows):
    """Of the names in the template, those of accuracies, losses and rates are the names that a run's rows get."""
    logged = {f"{row['split']}/{name}" for row in rows(finished()) for name in row}
    logged |= {f"{place}/test/{name}" for place in ("best", "last") for name in ("accuracy", "loss")}
    named = {name for section in load_template().sections for panel in section.panels for name in panel.metrics}
    assert {name for name in named if not name.endswith("bleu")} <= logged
    patterns = [panel.regex for section in load_template().sections for panel in section.panels if panel.regex]
    for name in ("deviation/blocks.0.attn", "row_error/blocks.0.attn", "column_error/x", "column_sums/x"):
        assert sum(bool(re.fullmatch(pattern, name)) for pattern in patterns) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nx_axis: b\ngroup_by: []\n", "sections is missing"),
        ("{", "expected"),
        ("nonsense: 1\n", "nonsense"),
        ("name: a\nx_axis: b\ngroup_by: []\nsections: [{name: s, panels: [{kind: pie, title: t}]}]\n", "pie"),
        ("name: a\nx_axis: b\ngroup_by: []\nsections: [{name: s, panels: [{kind: bar, title: t}]}]\n", "either"),
        (
            "name: a\nx_axis: b\ngroup_by: []\nsections: [{name: s, panels: [{kind: bar, title: t, regex: r}]}]\n",
            "no regex",
        ),
    ],
)
def test_a_template_that_is_none(tmp_path, capsys, text, message):
    path = tmp_path / "template.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RunError, match=message):
        load_template(path)
    assert main(["--entity", "us", "--template", str(path), "--spec", str(tmp_path / "spec.json")]) == 1
    assert str(path) in capsys.readouterr().err
    assert not (tmp_path / "spec.json").exists()


def test_a_server_out_of_reach(monkeypatch, capsys):
    from wandb_workspaces.workspaces import Workspace

    def save(self):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(Workspace, "save", save)
    assert main(["--entity", "us"]) == 1
    assert capsys.readouterr().err == "error: the workspace was not saved: ConnectionError: no route to host\n"


def test_a_template_is_read_as_it_is_written(tmp_path):
    """YAML makes numbers of names: 1.10 becomes 1.1, and the key 010 the key 8."""
    path = tmp_path / "template.yaml"
    panel = "{kind: line, title: 1_0, metrics: [1e3], regex: null, log: true}"
    path.write_text(f"name: 1.10\nx_axis: 010\ngroup_by: [yes]\nsections: [{{name: 7, panels: [{panel}]}}]\n")
    found = load_template(path)
    assert (found.name, found.x_axis, found.group_by) == ("1.10", "010", ["yes"])
    (section,) = found.sections
    assert (section.name, section.panels[0].title, section.panels[0].metrics) == ("7", "1_0", ["1e3"])
    assert (section.panels[0].log, section.panels[0].regex) == (True, None)
