"""A job's process and its training, with programs in the training's place: signals, requeues and what is recorded."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WATCH = """
import json, sys
from slurm import job
job.VISIBLE_S = {visible}
options, training = json.loads(sys.argv[1]), sys.argv[2]
sys.executable = training
job.TrainingJob(tuple(options.pop("overrides")), **options)()
"""
# Stands for `python -m experiments.train`: says what it is given, and stops as that does.
TRAINING = """#!{python} -IS
import json, os, signal, sys, time
names = ("SIGUSR1", "SIGUSR2", "SIGTERM")
ignored = [name for name in names if signal.getsignal(getattr(signal, name)) is signal.SIG_IGN]
signal.signal(signal.SIGTERM, lambda *_: sys.exit({on_term}))
with open({said!r}, "w") as file:
    json.dump({{"arguments": sys.argv[1:], "ignored": ignored, "pid": os.getpid(),
               "threads": os.environ.get("OMP_NUM_THREADS")}}, file)
time.sleep({seconds})
sys.exit({code})
"""


class Node:
    """A node of a cluster on which one job is started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.submission = folder / "submission"
        self.submission.mkdir()
        (folder / "bin").mkdir()
        self.slurm_says(JobState="RUNNING")

    def slurm_says(self, requeue: str = "exit 0", **facts: str) -> None:
        """What `scontrol show job` prints, and what `scontrol requeue` does."""
        shown = " ".join(f"{name}={value}" for name, value in facts.items())
        script = (
            f'#!/bin/sh\necho "$@" >> {self.folder}/asked\n[ "$1" = requeue ] && {{ {requeue}; }}\necho "{shown}"\n'
        )
        (self.folder / "bin" / "scontrol").write_text(script)
        (self.folder / "bin" / "scontrol").chmod(0o755)

    def start(
        self, seconds=30.0, code=0, on_term=143, restart=0, environment=(), visible=0.3, **options
    ) -> subprocess.Popen:
        training = self.folder / "training"
        said = str(self.folder / "said")
        training.write_text(
            TRAINING.format(python=sys.executable, said=said, seconds=seconds, code=code, on_term=on_term)
        )
        training.chmod(0o755)
        job = {
            "overrides": ["a=b c", "d='$HOME'"],
            "submission": str(self.submission),
            "index": 4,
            "folder": str(self.folder / "label-12345678"),
            "requeue": True,
            "max_restarts": 3,
            "max_timeouts": 1,
            "signal_before_end_s": 60,
        }
        slurm = {
            "SLURM_ARRAY_JOB_ID": "123",
            "SLURM_ARRAY_TASK_ID": "4",
            "SLURM_JOB_ID": "123",  # as one task of every array has it
            "SLURM_RESTART_COUNT": str(restart),
            "SLURM_CPUS_PER_TASK": "3",
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        }
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        watch = WATCH.replace("{visible}", str(visible))
        arguments = [sys.executable, "-c", watch, json.dumps(job | options), str(training)]
        return subprocess.Popen(arguments, cwd=ROOT, env=inherited | slurm | dict(environment), stderr=subprocess.PIPE)

    def said(self) -> dict:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                return json.loads((self.folder / "said").read_text())
            except (OSError, ValueError):
                time.sleep(0.05)
        raise TimeoutError

    def stop(self, process: subprocess.Popen, signum: int) -> int:
        self.said()
        process.send_signal(signum)
        code = process.wait(60)
        (self.folder / "said").unlink()
        return code

    def events(self) -> list[tuple]:
        lines = (self.submission / "events-4.jsonl").read_text().splitlines()
        return [(event["event"], event.get("reason")) for event in map(json.loads, lines)]

    def requeued(self) -> list[str]:
        asked = self.folder / "asked"
        return [line for line in asked.read_text().splitlines() if "requeue" in line] if asked.exists() else []


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def test_finished(node):
    (node.folder / "other-12345678").mkdir()
    (node.folder / "other-12345678" / "result.json").write_text("{}\n")
    process = node.start(seconds=0)
    assert process.wait(60) == 0, process.stderr.read()
    said = node.said()
    assert said["arguments"] == ["-m", "experiments.train", "a=b c", "d='$HOME'"]
    assert said["ignored"] == ["SIGUSR1", "SIGUSR2"]
    assert said["threads"] == "3"
    assert node.events() == [("started", None), ("ended", "finished")]
    assert node.requeued() == []


def test_another_run_than_was_submitted(node):
    assert node.start(seconds=0).wait(60) == 1
    assert node.events()[-1][1].startswith("another run has been trained: the configuration changed")


@pytest.mark.parametrize("empty", [False, True])
def test_a_result_that_this_node_sees_later(node, empty):
    """As network file systems go: the name, or what the file holds, comes seconds after another node has written it."""
    result = node.folder / "label-12345678" / "result.json"
    result.parent.mkdir()
    if empty:
        result.touch()
    process = node.start(seconds=0, visible=60.0)
    node.said()
    time.sleep(1.5)
    assert process.poll() is None
    result.write_text("{}\n")
    assert process.wait(60) == 0
    assert node.events()[-1] == ("ended", "finished")


def test_a_result_that_stays_empty_is_none(node):
    (node.folder / "label-12345678").mkdir()
    (node.folder / "label-12345678" / "result.json").touch()
    assert node.start(seconds=0).wait(60) == 1
    assert node.events()[-1][0] == "ended"


def test_a_submission_that_the_node_has_not(tmp_path):
    code = "from slurm import job; job.VISIBLE_S = 0.1; job.main(['--submission', 'nowhere'])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: nowhere/submission.json cannot be read")


@pytest.mark.parametrize("signum", [signal.SIGUSR2, signal.SIGUSR1, signal.SIGTERM])
def test_preempted_requeues_its_own_task(node, signum):
    """Though it may last five minutes and has run for none of them, it is no time limit: none is allowed."""
    soon = (datetime.now() + timedelta(minutes=5)).isoformat(timespec="seconds")
    node.slurm_says(JobState="RUNNING", EndTime=soon, PreemptTime="2026-01-01T00:00:00")
    assert node.stop(node.start(max_timeouts=0), signum) == 143
    assert node.events() == [("started", None), ("stopped", "preempted"), ("requeued", "preempted")]
    assert node.requeued() == ["requeue 123_4"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full, a disk without space, is Linux's")
def test_requeued_from_a_full_disk(node):
    (node.submission / "events-4.jsonl").symlink_to("/dev/full")
    process = node.start()
    assert node.stop(process, signal.SIGUSR2) == 143
    assert node.requeued() == ["requeue 123_4"]
    said = process.stderr.read().decode()
    assert "job: it is not written down that the run requeued: [Errno 28]" in said
    assert "Traceback" not in said


def test_time_limits_are_counted_over_requeues(node):
    soon = (datetime.now() + timedelta(seconds=70)).isoformat(timespec="seconds")
    node.slurm_says(JobState="RUNNING", EndTime=soon, PreemptTime="None")
    assert node.stop(node.start(), signal.SIGUSR2) == 143
    # A preemption in between counts for nothing.
    node.slurm_says(JobState="RUNNING", EndTime=soon, PreemptTime="2026-01-01T00:00:00")
    assert node.stop(node.start(restart=1), signal.SIGUSR2) == 143
    node.slurm_says(JobState="RUNNING", EndTime=soon, PreemptTime="None")
    assert node.stop(node.start(restart=2), signal.SIGUSR2) == 1
    assert node.events()[-1] == ("ended", "time limit met 2 times, and 1 are allowed")
    assert node.requeued() == ["requeue 123_4"] * 2


def test_signalled_by_hand(node):
    late = (datetime.now() + timedelta(hours=1)).isoformat(timespec="seconds")
    node.slurm_says(JobState="RUNNING", EndTime=late, PreemptTime="None")
    assert node.stop(node.start(), signal.SIGUSR2) == 143
    assert node.events()[-1] == ("requeued", "signal")


@pytest.mark.parametrize(("options", "state"), [({}, "COMPLETING"), ({"requeue": False}, "RUNNING")])
def test_cancelled_or_not_to_be_requeued(node, options, state):
    node.slurm_says(JobState=state, PreemptTime="None")
    assert node.stop(node.start(**options), signal.SIGTERM) == 143
    assert node.requeued() == []


def test_restarts_have_an_end(node):
    node.slurm_says(JobState="RUNNING", PreemptTime="2026-01-01T00:00:00")
    assert node.stop(node.start(restart=3), signal.SIGUSR2) == 1
    assert node.events()[-1] == ("ended", "preempted, after 3 restarts of 3")
    # SLURM has requeued it itself: it does not even begin.
    process = node.start(restart=4)
    assert process.wait(60) == 1
    assert "The same submission continues it" in process.stderr.read().decode()
    assert not (node.folder / "said").exists()
    assert node.requeued() == []


def test_slurm_does_not_requeue(node):
    node.slurm_says("echo Requested operation is disabled >&2; exit 1", JobState="RUNNING")
    assert node.stop(node.start(), signal.SIGUSR2) == 1
    assert node.events()[-1] == ("ended", "SLURM does not requeue: Requested operation is disabled")


def test_no_scontrol_in_a_container(node):
    assert node.stop(node.start(environment={"PATH": "/nowhere"}), signal.SIGUSR2) == 1
    assert "a container needs SLURM's programs" in node.events()[-1][1]


def test_an_error_while_stopping_is_no_reason_to_start_again(node):
    """The disk is full, say: the checkpoint could not be written."""
    assert node.stop(node.start(on_term=1), signal.SIGUSR2) == 1
    assert node.requeued() == []
    assert node.events()[-1] == ("ended", "an error, see the log")


def test_raised(node):
    assert node.start(seconds=0, code=1).wait(60) == 1
    assert node.events()[-1] == ("ended", "an error, see the log")


@pytest.mark.parametrize("newer", [False, True])
def test_killed(node, newer):
    """The run card says so, unless a new attempt has begun."""
    process = node.start()
    killed = node.said()["pid"]
    attempt = {"pid": killed + newer, "host": socket.gethostname(), "state": "running", "ended": None, "message": None}
    (node.folder / "label-12345678").mkdir()
    card = node.folder / "label-12345678" / "run.json"
    card.write_text(json.dumps({"state": "running", "attempts": [attempt]}))
    os.kill(killed, signal.SIGKILL)
    assert process.wait(60) == 128 + signal.SIGKILL
    assert node.events()[-1] == ("ended", "killed by SIGKILL (out of memory?)")
    found = json.loads(card.read_text())
    expected = ("running", None) if newer else ("failed", "killed by SIGKILL (out of memory?)")
    assert (found["attempts"][0]["state"], found["attempts"][0]["message"]) == expected
    assert found["state"] == expected[0]


def test_further_processes_leave_it_to_the_first(node):
    node.slurm_says(JobState="RUNNING", PreemptTime="2026-01-01T00:00:00")
    assert node.stop(node.start(environment={"SLURM_PROCID": "1"}), signal.SIGUSR2) == 0
    assert node.requeued() == []
    assert not (node.submission / "events-4.jsonl").exists()
