"""Offline wandb runs go to the server once, each by its newest attempt."""

import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import wandb
from wandb.sdk import wandb_setup

from slurm import sync
from slurm.sync import main, newest_attempts

KEY = "0123456789abcdef" * 3

WANDB = """#!/bin/sh
echo "$@" >> '{folder}/calls'
for last; do :; done
case "$last" in *refused*)
    echo "wandb: Syncing 1 run(s):"
    echo "wandb: ERROR Failed to get resume status: returned error 403: not for $WANDB_API_KEY" >&2
    echo "wandb: ERROR " >&2
    exit 0;;
esac
case "$last" in *{bad}*) echo "error: 401 for key $WANDB_API_KEY, or wandb_v1_abc_DEF" >&2; exit 1;; esac
touch "$last/run-fake.wandb.synced"
"""


class _Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    """Something that answers where wandb's server is looked for."""
    httpd = HTTPServer(("127.0.0.1", 0), _Answer)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    monkeypatch.setattr(sync, "server", lambda: f"http://127.0.0.1:{httpd.server_port}")
    yield
    httpd.shutdown()
    thread.join()
    httpd.server_close()


@pytest.fixture
def uploads(tmp_path, monkeypatch):
    """A wandb that only writes down what it is called with; it fails for folders with "bad" in their names."""
    tool = tmp_path / "tool"
    tool.mkdir()
    (tool / "wandb").write_text(WANDB.format(folder=tool, bad="bad"))
    (tool / "wandb").chmod(0o755)
    monkeypatch.setattr(sync, "wandb_command", lambda: [str(tool / "wandb")])
    monkeypatch.setenv("WANDB_API_KEY", KEY)

    def calls() -> list[str]:
        lines = (tool / "calls").read_text().splitlines() if (tool / "calls").exists() else []
        return [line.split("/")[-1] for line in lines]

    return calls


@pytest.fixture
def runs(tmp_path):
    return tmp_path / "runs"


def attempt(runs, run: str, day: int, size: int = 10, state: str = "finished", age: float = 0.0):
    identifier = run[-8:]
    folder = runs / "mnist_patches" / run
    offline = folder / "wandb" / f"offline-run-202611{day:02}_101010-{identifier}"
    offline.mkdir(parents=True)
    log = offline / f"run-{identifier}.wandb"
    log.write_bytes(b"x" * size)
    written = time.time() - age
    os.utime(log, (written, written))
    (folder / "run.json").write_text(json.dumps({"state": state}))
    return offline


def test_the_newest_attempt_alone_and_once(runs, uploads, server, capsys):
    attempt(runs, "a-00000001", 3)
    attempt(runs, "a-00000001", 12)
    attempt(runs, "b-00000002", 5)
    words = [f"paths.runs={runs}"]
    assert main([*words, "--dry-run"]) == 0
    assert uploads() == []
    assert "would be uploaded: 2 runs" in capsys.readouterr().err
    assert main(words) == 0
    first = ["offline-run-20261112_101010-00000001", "offline-run-20261105_101010-00000002"]
    assert uploads() == first
    assert main(words) == 0
    assert uploads() == first
    assert "uploaded: 0 runs" in capsys.readouterr().err


def test_what_has_grown_or_begun_anew_is_uploaded_again(runs, uploads, server):
    words = [f"paths.runs={runs}"]
    folder = attempt(runs, "a-00000001", 3, state="interrupted")
    assert main(words) == 0
    attempt(runs, "a-00000001", 4)
    assert main(words) == 0
    (folder.parent / "offline-run-20261104_101010-00000001" / "run-00000001.wandb").write_bytes(b"x" * 20)
    assert main(words) == 0
    assert main(words) == 0
    names = ["offline-run-20261103_101010-00000001", *["offline-run-20261104_101010-00000001"] * 2]
    assert uploads() == names


def test_a_run_under_way_waits_but_not_one_that_was_killed(runs, uploads, server, capsys):
    attempt(runs, "a-00000001", 3, state="running")
    attempt(runs, "b-00000002", 3, state="running", age=sync.QUIET_S + 1)
    assert main([f"paths.runs={runs}"]) == 0
    assert uploads() == ["offline-run-20261103_101010-00000002"]
    assert "uploaded: 1 runs; 1 are under way, for later" in capsys.readouterr().err


def test_one_failure_does_not_hold_up_the_others_and_no_key_is_shown(runs, uploads, server, capsys):
    attempt(runs, "a-bad00001", 3)
    attempt(runs, "b-00000002", 3)
    words = [f"paths.runs={runs}"]
    assert main(words) == 1
    assert [name[-8:] for name in uploads()] == ["bad00001", "00000002"]
    err = capsys.readouterr().err
    assert "wandb does not upload it: error: 401 for key ***, or ***" in err
    assert "error: 1 of 2 runs could not be uploaded" in err
    assert KEY not in err
    assert main(words) == 1
    assert [name[-8:] for name in uploads()] == ["bad00001", "00000002", "bad00001"]


def test_what_the_server_refuses_is_not_done(runs, uploads, server, capsys):
    """There wandb exits with 0 too, and leaves no mark."""
    attempt(runs, "a-00000001", 3)
    refused = attempt(runs, "refused-00000002", 3)
    words = [f"paths.runs={runs}"]
    for _ in range(2):
        assert main(words) == 1
        err = capsys.readouterr().err
        said = "wandb does not upload it: Failed to get resume status: returned error 403: not for ***"
        assert f"error: {refused}: {said}\n" in err
        assert "uploaded: " not in err
    assert [name[-8:] for name in uploads()] == ["00000001", "00000002", "00000002"]
    assert not (refused.parent / sync.UPLOADED).exists()


def test_what_was_marked_without_wandbs_word_is_tried_again(runs, uploads, server):
    folder = attempt(runs, "a-00000001", 3)
    [upload] = newest_attempts(folder.parent.parent)
    upload.note_done(upload.size)
    assert main([f"paths.runs={runs}"]) == 0
    assert uploads() == [folder.name]
    # A mark of an upload before says nothing of this one.
    (folder / "run-00000001.wandb").write_bytes(b"x" * 30)
    folder.rename(folder.with_name("offline-run-20261103_101010-refused1"))
    moved = folder.with_name("offline-run-20261103_101010-refused1")
    (moved / "run-00000001.wandb").rename(moved / "run-refused1.wandb")
    assert main([f"paths.runs={runs}"]) == 1


def test_an_empty_log_is_named(runs, uploads, server, capsys):
    folder = attempt(runs, "a-00000001", 3, size=0)
    assert main([f"paths.runs={runs}"]) == 1
    assert f"error: {folder}: its log is empty" in capsys.readouterr().err
    assert uploads() == []


class _Refusing(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        code, content = self.server.answer
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST

    def log_message(self, *_):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((401, {"error": "who are you?"}), "returned error 401"),
        ((404, {"error": "no such project"}), "returned error 404"),
        ((200, {"errors": [{"message": "not in this project"}], "data": None}), "not in this project"),
    ],
)
def test_wandb_itself(tmp_path, monkeypatch, capsys, answer, words):
    """Its own program against a server that refuses: what it exits with is not believed."""
    folder = tmp_path / "runs" / "mnist_patches" / "a-00000001"
    folder.mkdir(parents=True)
    run = wandb.init(
        id="00000001", project="p", dir=folder, mode="offline", resume="allow", settings=wandb.Settings(silent=True)
    )
    run.log({"a": 1})
    run.finish()
    wandb.teardown()
    httpd = HTTPServer(("127.0.0.1", 0), _Refusing)
    httpd.answer = answer
    thread = threading.Thread(target=httpd.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{httpd.server_port}")
    monkeypatch.setattr(sync, "server", lambda: f"http://127.0.0.1:{httpd.server_port}")
    try:
        assert main([f"paths.runs={tmp_path / 'runs'}"]) == 1
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()
    err = capsys.readouterr().err
    assert words in err
    assert "error: 1 of 1 runs could not be uploaded" in err


def test_a_server_that_refuses_all_is_not_asked_a_thousand_times(runs, uploads, server, capsys):
    for number in range(6):
        attempt(runs, f"a-bad0000{number}", 3)
    assert main([f"paths.runs={runs}"]) == 1
    assert len(uploads()) == 3
    assert "3 of 6 runs could not be uploaded; given up after 3 in a row" in capsys.readouterr().err


def test_without_a_network_it_is_said_at_once(runs, uploads, capsys, monkeypatch):
    attempt(runs, "a-00000001", 3)
    monkeypatch.setattr(sync, "server", lambda: "http://127.0.0.1:9")
    assert main([f"paths.runs={runs}"]) == 1
    assert uploads() == []
    assert "wandb's server http://127.0.0.1:9 is out of reach from this machine" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(wandb_setup, "_singleton", None)  # which keeps what the first in a process has read
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    assert sync.server() == "http://127.0.0.1:9"


def test_two_at_the_same_time(runs, uploads, server, capsys):
    attempt(runs, "a-00000001", 3)
    with sync.FileLock(runs / ".sync.lock"):
        assert main([f"paths.runs={runs}"]) == 1
    assert "another slurm.sync is at work" in capsys.readouterr().err
    assert uploads() == []


def test_selection_by_sweep(slurm, sweep, uploads, server):
    for index in (0, 1):
        run = sweep.planned[index].run.path
        attempt(sweep.runs, run.name, 3)
    two = [*sweep.overrides, "seed=1"]
    assert main(two) == 0
    assert [name[-8:] for name in uploads()] == [sweep.planned[1].run.hash[:8]]


def test_folders_without_a_log_are_passed_over(runs):
    folder = attempt(runs, "a-00000001", 3)
    (folder.parent / "offline-run-20261109_101010-00000001").mkdir()
    [upload] = newest_attempts(folder.parent.parent)
    assert upload.folder == folder


@pytest.mark.parametrize("key", ["f" * 40, "ABCDEF0123456789" * 5, "wandb_v1_x9YZ_abc"])
def test_keys_are_taken_out_of_messages(key, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert sync.without_keys(f"bad key {key}!") == "bad key ***!"


@pytest.mark.parametrize("damage", ["{", "[]", "", "\x00"])
def test_a_damaged_note_costs_an_upload_and_not_the_others(runs, uploads, server, damage):
    """Of a machine that went down: what was uploaded is uploaded once more, which does no harm."""
    folder = attempt(runs, "a-00000001", 3)
    attempt(runs, "b-00000002", 5)
    assert main([f"paths.runs={runs}"]) == 0
    (folder.parent / "uploaded.json").write_text(damage)
    (folder.parent.parent / "run.json").write_text(damage)
    assert main([f"paths.runs={runs}"]) == 0
    assert [name[-8:] for name in uploads()] == ["00000001", "00000002", "00000001"]
