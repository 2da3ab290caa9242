"""The page of the theory: the numbers of results.json, figures in the page itself, damaged folders listed."""

import base64
import json
import re

import pytest

from experiments.report.__main__ import main
from experiments.report.theory import collect_checks, summary_line

FIGURE = '<svg xmlns="http://www.w3.org/2000/svg"><text>a picture</text></svg>'


@pytest.fixture
def make_check(tmp_path):
    """`make_check(name, holds)`: the folder of a check with a statement for each of `holds`."""

    def make(name="invariance", holds=(True,), root=None, measured=1.25e-12, sentence="max |K~ - K| <b>"):
        folder = (root or tmp_path / "runs" / "theory") / name
        folder.mkdir(parents=True)
        statements = [
            {
                "sentence": f"{sentence} {i}",
                "expected": "0 ± 1e-10",
                "measured": measured,
                "tolerance": None,
                "holds": h,
            }
            for i, h in enumerate(holds)
        ]
        content = {
            "name": name,
            "title": f"Title of {name}",
            "holds": False not in holds,
            "statements": statements,
            "options": {"seed": 3, "counts": [1, 3], "run": ""},
            "seconds": 0.5,
            "figure": "figure.svg",
            "table": "table.csv",
        }
        (folder / "results.json").write_text(json.dumps(content), encoding="utf-8")
        (folder / "figure.svg").write_text(FIGURE, encoding="utf-8")
        return folder

    return make


def test_the_page_has_statements_numbers_and_figures(make_check, tmp_path, capsys):
    make_check("transport", (True, False, None))
    make_check("invariance", (True,), measured="nan")
    assert main([str(tmp_path / "runs")]) == 0
    folder = tmp_path / "runs" / "theory" / "report"
    assert {path.name for path in folder.iterdir()} == {"index.html", "theory.md"}
    page = (folder / "index.html").read_text(encoding="utf-8")
    page = page[page.index('<article id="theory"') :]
    assert re.findall(r"<h2[^>]*>([^<]*)</h2>", page) == ["invariance", "transport"]
    rows = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in re.findall(r"<tr.*</tr>", page)]
    assert [row[1:] for row in rows if row] == [
        ["0 ± 1e-10", "nan", "yes"],
        ["0 ± 1e-10", "1.25e-12", "yes"],
        ["0 ± 1e-10", "1.25e-12", "no"],
        ["0 ± 1e-10", "1.25e-12", "open"],
    ]
    assert page.count('<tr class="strong">') == 1
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    pictures = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]*)"', page)
    assert [base64.b64decode(picture).decode() for picture in pictures] == [FIGURE, FIGURE]
    assert "python -m experiments.theory transport seed=3 counts=[1,3]</pre>" in page
    assert not re.findall(r'(?:href|src)="(?!#|data:)', (folder / "index.html").read_text(encoding="utf-8"))
    markdown = (folder / "theory.md").read_text(encoding="utf-8")
    out = capsys.readouterr().out
    for words in ("2 of 3 statements hold; 1 numbers of open questions.", "1.25e-12"):
        assert words in page
        assert words in markdown
        assert words in out
    assert out.rstrip().endswith(str(folder / "index.html"))


def test_the_statement_that_does_not_hold_is_named(make_check):
    checks, _ = collect_checks([make_check("transport", (True, False), sentence="S")])
    assert summary_line(checks).endswith("These do not: S 1 (transport).")


def test_a_check_reached_twice_is_read_once(make_check, tmp_path):
    folder = make_check()
    checks, problems = collect_checks([tmp_path / "runs", folder, folder.parent])
    assert [check.folder for check in checks] == [folder]
    assert problems == []


@pytest.mark.parametrize("damage", ["cut", "no figure", "another file"])
def test_a_damaged_check_is_listed_and_breaks_nothing(make_check, tmp_path, damage):
    make_check("invariance")
    broken = make_check("transport")
    if damage == "no figure":
        (broken / "figure.svg").unlink()
    else:
        (broken / "results.json").write_text('{"a": 1}' if damage == "another file" else '{"a', encoding="utf-8")
    checks, problems = collect_checks([tmp_path / "runs"])
    assert [check.name for check in checks] == ["invariance"]
    assert [problem.folder for problem in problems] == [broken]
    assert main([str(tmp_path / "runs")]) == 0
    assert str(broken) in (tmp_path / "runs" / "theory" / "report" / "index.html").read_text(encoding="utf-8")


def test_only_damaged_checks_are_an_error(make_check, tmp_path, capsys):
    (make_check() / "figure.svg").unlink()
    assert main([str(tmp_path / "runs")]) == 1
    assert "figure" in capsys.readouterr().err


def test_runs_and_theory_each_have_a_view_and_a_folder(make_check, make_run, tmp_path):
    make_check()
    make_run()
    out = tmp_path / "out"
    assert main([str(tmp_path / "runs"), "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {"index.html", "mnist_patches", "theory"}
    page = (out / "index.html").read_text(encoding="utf-8")
    assert "max |K~ - K|" in page[page.index('<article id="theory"') :]
    assert "max |K~ - K|" not in page[: page.index('<article id="theory"')]
    assert main([str(tmp_path / "runs" / "theory"), "--out", str(tmp_path / "alone")]) == 0
    assert (tmp_path / "alone" / "index.html").is_file()


def test_checks_in_several_folders_need_a_place(make_check, tmp_path, capsys):
    paths = [str(make_check(root=tmp_path / name)) for name in ("a/theory", "b/theory")]
    assert main(paths) == 1
    assert "--out" in capsys.readouterr().err
