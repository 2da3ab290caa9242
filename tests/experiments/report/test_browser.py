"""The page in a real browser: one session for all checks, for a browser takes its time to start."""

import json
import os
import shutil
import subprocess

import pytest

from experiments.errors import RunError
from experiments.report.__main__ import main
from experiments.report.browser import NAMES, Browser, find_chromium
from experiments.report.screenshot import main as screenshot
from experiments.report.screenshot import picture


@pytest.fixture(scope="module")
def chromium():
    """A browser of this machine; installed where that can be done."""
    if find_chromium() is None and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for words in (["update", "-qq"], ["install", "-y", "-qq", "chromium"]):
            subprocess.run(["apt-get", *words], env=environment, capture_output=True, check=False, timeout=600)
    found = find_chromium()
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed, and apt-get cannot install chromium here")
    return found


@pytest.fixture(scope="module")
def page(all_kinds_of_runs):
    assert main([str(all_kinds_of_runs[0])]) == 0
    return all_kinds_of_runs[0] / "report" / "index.html"


@pytest.fixture(scope="module")
def session(chromium, page):
    with Browser(chromium) as browser:
        browser.size(1200, 900)
        browser.open(page)
        yield browser
        assert browser.errors == []
        asked = [address for address in browser.requests if not address.startswith(("data:", page.as_uri()))]
        assert asked == []


@pytest.fixture
def browser(session, page):
    """The session, at the overview with everything shown."""
    session.size(1200, 900)
    session.media()
    session.value("sessionStorage.clear(), history.replaceState(null, '', location.pathname)")
    session.reload()
    return session


def shown(browser, selector):
    """How many elements are to be seen: of SVG parts, checkVisibility does not know that they are not displayed."""
    test = "each.checkVisibility() && getComputedStyle(each).display !== 'none'"
    return browser.value(f"[...document.querySelectorAll({json.dumps(selector)})].filter(each => {test}).length")


def test_the_overview_comes_first_and_each_experiment_has_a_view(browser, page):
    assert browser.value("[...document.querySelectorAll('[data-view]')].filter(v => !v.hidden).map(v => v.id)") == [
        "overview"
    ]
    assert browser.value("[...document.querySelectorAll('nav a')].map(link => link.textContent)") == [
        "Overview",
        "mnist_patches",
        "shapes_set",
        "Theory",
    ]
    browser.value("document.querySelector('#overview td a').click()")
    browser.settle()
    assert browser.value("[...document.querySelectorAll('[data-view]')].filter(v => !v.hidden).map(v => v.id)") == [
        "mnist_patches"
    ]
    assert browser.value("document.querySelector('nav [aria-current]').textContent") == "mnist_patches"
    assert shown(browser, "#mnist_patches figure svg") == 4  # chosen, last, curves, column sums
    assert browser.value("document.activeElement.tagName") == "H1"


def test_numbers_equal_result_json(browser, page, all_kinds_of_runs):
    found = browser.value(
        "Object.fromEntries([...document.querySelectorAll('details.run')].map("
        "run => [run.dataset.folder, [Number(run.dataset.chosen), Number(run.dataset.last)]]))"
    )
    expected = all_kinds_of_runs[1]
    assert len(expected) == 32
    assert {folder: tuple(values) for folder, values in found.items()} == expected
    browser.open(page, "mnist_patches")
    rows = browser.value(
        "[...document.querySelectorAll('#mnist_patches tr[data-seed]')].map(r => [...r.cells].map(c => c.textContent))"
    )
    ours = sorted((f"{100 * a:.2f}", f"{100 * b:.2f}") for path, (a, b) in expected.items() if "mnist" in path)
    assert sorted((row[3], row[5]) for row in rows) == ours


def test_filters_hide_rows_runs_and_parts_of_pictures(browser, page):
    browser.open(page, "mnist_patches")
    assert shown(browser, "#mnist_patches details.run") == 30
    dots, lines = shown(browser, "svg g[data-seed='3']"), shown(browser, "svg g[data-n-iters='3']")
    assert dots > 0
    assert lines > dots
    browser.value("document.querySelector('#mnist_patches input[name=seed][value=\"3\"]').click()")
    assert shown(browser, "#mnist_patches details.run") == 24
    assert shown(browser, "#mnist_patches tr[data-seed='3'], #mnist_patches svg g[data-seed='3']") == 0
    browser.value("document.querySelector('#mnist_patches input[value=softmax]').click()")
    assert shown(browser, "#mnist_patches details.run") == 16
    assert shown(browser, "#mnist_patches tr[data-n-iters=softmax]") == 0
    assert shown(browser, "#mnist_patches tr[data-n-iters='5']") > 0
    assert browser.value("document.querySelector('#mnist_patches output').textContent") == "16 of 30 runs shown"
    browser.reload()  # as the page does by itself while it is watched
    assert shown(browser, "#mnist_patches details.run") == 16
    browser.value("document.querySelector('#mnist_patches button[type=reset]').click()")
    browser.settle()
    assert shown(browser, "#mnist_patches details.run") == 30


def test_by_keyboard(browser, page):
    browser.press("Tab")
    assert browser.value("document.activeElement.className") == "skip"
    for _ in range(2):
        browser.press("Tab")
    browser.press("Enter")
    browser.settle()
    assert browser.value("location.hash") == "#mnist_patches"
    browser.press("Tab")
    assert browser.value("document.activeElement.textContent") == "listed below"
    browser.press("Tab")
    assert browser.value("document.activeElement.name") == "n-iters"
    browser.press(" ")
    assert shown(browser, "#mnist_patches details.run") == 20
    assert browser.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_light_and_dark(browser):
    def ground():
        return browser.value("getComputedStyle(document.body).backgroundColor")

    assert ground() == "rgb(255, 255, 255)"
    browser.media(scheme="dark")
    assert ground() == "rgb(20, 23, 28)"
    for theme, colour in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 28)")):
        browser.value("document.getElementById('theme').click()")
        assert browser.value("document.documentElement.dataset.theme") == theme
        assert ground() == colour
        assert browser.value("getComputedStyle(document.querySelector('figure text')).fill") != colour


def test_on_a_phone_only_tables_scroll_sideways(browser, page):
    browser.size(390, 844, mobile=True)
    for view in ("overview", "mnist_patches", "theory"):
        browser.open(page, view)
        assert browser.value("document.documentElement.scrollWidth") == 390
    browser.open(page, "mnist_patches")
    assert browser.value(
        "[...document.querySelectorAll('#mnist_patches .scroll')].some(box => box.scrollWidth > box.clientWidth)"
    )


def test_long_names_do_not_widen_a_phone_s_page(browser, page):
    browser.size(390, 844, mobile=True)
    browser.open(page, "shapes_set")
    browser.value("document.querySelectorAll('details').forEach(each => each.open = true)")
    for selector in ("nav a", "h2", "#shapes_set dt", "#shapes_set dd", "#shapes_set summary"):
        browser.value(f"document.querySelector('{selector}').textContent = 'e'.repeat(400)")
        assert browser.value("document.documentElement.scrollWidth") == 390, selector


def test_on_paper_the_cards_are_open_and_there_are_no_controls(browser, page):
    browser.open(page, "mnist_patches")
    assert browser.pdf().startswith(b"%PDF")
    browser.value("dispatchEvent(new Event('beforeprint'))")
    browser.media("print")
    assert shown(browser, "#mnist_patches details.run dl") == 30
    assert shown(browser, "nav, .filters") == 0
    browser.value("dispatchEvent(new Event('afterprint'))")
    browser.media()
    assert shown(browser, "#mnist_patches details.run dl") == 0


def test_what_stands_in_files_is_words(browser, page):
    assert browser.value("document.title") == "Sinkhorn attention: results"
    assert browser.value("document.querySelectorAll('script').length") == 1
    assert browser.value("document.querySelectorAll('img[src=x]').length") == 0
    for view in ("mnist_patches", "shapes_set", "theory"):
        assert "onerror" in browser.value(f"document.getElementById('{view}').textContent")
    # The policy stands behind the escaping: a script that got in would not run.
    browser.value(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.a = 1'}))"
    )
    assert browser.value("window.a") is None
    assert "Content Security Policy" in browser.errors.pop()


def test_names_are_there_once(browser):
    assert (
        browser.value(
            "[...document.querySelectorAll('[id]')].map(e => e.id)"
            ".filter((id, at, all) => !/^[Cmp][0-9a-f_]+/.test(id) && all.indexOf(id) !== at)"
        )
        == []
    )


def test_a_page_without_scripts_is_whole(browser, page):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.reload()
        assert shown(browser, "[data-view]") == 4
        assert shown(browser, ".filters, nav button") == 0
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


def test_the_picture_for_the_readme(chromium, page, tmp_path, capsys):
    assert screenshot([str(tmp_path / "none.html"), str(tmp_path / "a.png")]) == 1
    assert "experiments.report" in capsys.readouterr().err
    content = picture(page, "shapes_set")
    assert content.startswith(b"\x89PNG")
    assert len(content) < 300_000


def test_without_a_browser(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(RunError, match="install chromium"):
        Browser()
