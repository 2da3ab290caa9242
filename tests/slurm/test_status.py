"""The state of a run from its folder and from SLURM together; each row a way that runs have ended."""

import io
import json
import os
from collections import Counter
from datetime import timedelta

import pytest

from slurm import queue, state, status
from slurm.queue import Job
from slurm.selection import SelectedRun, SubmittedRun
from slurm.state import last_error, status_of
from slurm.status import main
from slurm.submission import read_events, record_event, submissions

ARRAY = "123"


def shown(capsys, *words: str) -> dict:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def first(capsys, sweep) -> tuple[str, str]:
    row = shown(capsys, *sweep.overrides)["runs"][0]
    return row["state"], row["detail"]


@pytest.mark.parametrize(
    ("attempts", "job", "state", "detail"),
    [
        ([], ("PENDING", 0, "Resources"), "pending", "Resources"),
        ([], ("CONFIGURING", 0, ""), "pending", ""),
        ([], ("RUNNING", 0, ""), "starting", ""),
        (["running"], ("RUNNING", 0, ""), "running", ""),
        (["running"], ("SOMETHING_NEW", 0, ""), "running", "SLURM says SOMETHING_NEW"),
        ([], ("RV", 0, ""), "starting", "SLURM says RV"),
        ([], ("EXPEDITING", 0, ""), "pending", ""),
        (["interrupted", "running"], ("RUNNING", 1, ""), "running", ""),
        (["interrupted"], ("PENDING", 1, "BeginTime"), "preempted", "goes on from epoch 2; BeginTime"),
        (["interrupted"], ("COMPLETING", 0, ""), "preempted", "goes on from epoch 2; saved; waits to be requeued"),
        # A node that failed gives no signal: the card still says running.
        (["running"], ("PENDING", 1, "BeginTime"), "requeued", "goes on from epoch 2; BeginTime"),
        (["running"], ("NODE_FAIL", 0, ""), "lost", "its node failed"),
        (["running"], ("TIMEOUT", 0, ""), "lost", "killed at the time limit: ask for more (cluster.time)"),
        (["running"], ("OUT_OF_MEMORY", 0, ""), "lost", "out of memory: ask for more (cluster.mem) or"),
        (
            ["running"],
            ("FAILED", 0, "NonZeroExitCode"),
            "lost",
            "ended without a word: killed, perhaps for memory (SLURM",
        ),
        (["running"], None, "lost", "ended without a word: killed, perhaps for memory"),
        (["running"], ("CANCELLED", 0, ""), "cancelled", ""),
        ([], ("CANCELLED", 0, ""), "cancelled", ""),
        # submitit pickles the exception, and the job ends well.
        (["failed"], ("COMPLETED", 0, ""), "failed", "loss is not finite"),
        (["failed"], None, "failed", "loss is not finite"),
        (["failed"], ("RUNNING", 0, ""), "failed", "loss is not finite"),
        (["diverged"], ("COMPLETED", 0, ""), "diverged", "loss is not finite"),
        (["diverged"], None, "diverged", "loss is not finite"),
        (["diverged"], ("RUNNING", 0, ""), "diverged", "loss is not finite"),
        (["interrupted"], ("TIMEOUT", 0, ""), "interrupted", "stopped at the time limit; submit again to go on"),
        (["interrupted"], None, "interrupted", "stopped with a checkpoint; submit again to go on"),
        ([], ("COMPLETED", 0, ""), "failed", "SLURM says COMPLETED, and the job's log nothing"),
        ([], None, "lost", "ended without a word"),
    ],
)
def test_states_of_a_submitted_run(sweep, attempts, job, state, detail):
    sweep.submit(ARRAY)
    if attempts:
        written = [sweep.attempt(one, 1 + 15 * n, 11 + 15 * n) for n, one in enumerate(attempts)]
        if attempts[-1] in ("failed", "diverged"):
            written[-1]["message"] = "loss is not finite"
        sweep.write(0, *written, epoch=2)
    jobs = {f"{ARRAY}_1": Job(f"{ARRAY}_1", "PENDING")}
    if job is not None:
        jobs[f"{ARRAY}_0"] = Job(f"{ARRAY}_0", job[0], job[1], reason=job[2])
    [submission] = submissions(sweep.runs)
    row = status_of(
        SelectedRun(sweep.planned[0].run.path, (SubmittedRun(submission, submission.tasks[0]),), epochs=5), jobs
    )
    assert row.state == state
    assert row.detail.startswith(detail)
    assert row.detail or not detail
    assert (row.job, row.epochs, row.epoch) == (f"{ARRAY}_0", 5, 2 if attempts else 0)
    assert row.restarts == max(len(attempts) - 1, job[1] if job else 0, 0)


@pytest.mark.parametrize(
    ("wrote", "event", "reason", "job", "state", "detail"),
    [
        ("interrupted", "requeued", "time limit", "PENDING", "requeued", "goes on from epoch 2; time limit; BeginTime"),
        ("interrupted", "requeued", "preempted", "PENDING", "preempted", "goes on from epoch 2; BeginTime"),
        ("interrupted", "started", None, "PENDING", "preempted", "goes on from epoch 2; BeginTime"),
        ("interrupted", "ended", "time limit met 4 times", None, "interrupted", "time limit met 4 times; submit again"),
        ("running", "ended", "killed by SIGKILL", None, "lost", "killed by SIGKILL"),
        ("running", "cancelled", None, None, "cancelled", ""),
    ],
)
def test_what_the_job_wrote_down_is_heard(slurm, sweep, capsys, wrote, event, reason, job, state, detail):
    folder = sweep.submit(ARRAY)
    sweep.write(0, sweep.attempt(wrote), epoch=2)
    record_event(folder, 0, "started")
    record_event(folder, 0, event, **({"reason": reason} if reason else {}))
    slurm.queue(*([(f"{ARRAY}_0", job, 1, "BeginTime")] if job else []))
    found = first(capsys, sweep)
    assert found[0] == state
    assert found[1].startswith(detail)


def test_a_finished_run_is_finished_whatever_slurm_says(slurm, sweep, capsys):
    sweep.submit(ARRAY)
    sweep.write(0, sweep.attempt("finished"), epoch=5, accuracy=0.875)
    slurm.queue((f"{ARRAY}_0", "NODE_FAIL", 0, "None"))
    row = shown(capsys, *sweep.overrides)["runs"][0]
    assert (row["state"], row["detail"], row["metric"]) == ("finished", "accuracy 0.8750", ["accuracy", 0.875])
    assert (row["epoch"], row["seconds"]) == (5, 600)


def test_what_an_earlier_submission_left_says_nothing_of_the_new_job(slurm, sweep, capsys):
    sweep.start -= timedelta(hours=5)
    sweep.submit("100", "20261129-140000-00000000")
    sweep.write(0, sweep.attempt("failed", message="old"), epoch=3)
    sweep.start += timedelta(hours=5)
    sweep.submit(ARRAY)
    slurm.queue((f"{ARRAY}_0", "PENDING", 0, "Resources"), ("100_0", "COMPLETED", 0, "None"))
    assert first(capsys, sweep) == ("pending", "goes on from epoch 3; Resources")
    slurm.queue((f"{ARRAY}_0", "RUNNING", 0, "None"))
    assert first(capsys, sweep) == ("starting", "goes on from epoch 3")


def test_an_attempt_knows_its_job_whatever_the_clocks_say(slurm, sweep, capsys):
    sweep.submit(ARRAY)
    jobs = [{"job": f"{ARRAY}_0", "restart": 0, "nodes": "node1"}, {"job": "99", "restart": 0, "nodes": "node1"}]
    slurm.queue((f"{ARRAY}_0", "RUNNING", 0, "None"))
    sweep.write(0, sweep.attempt("running", start=-5, slurm=jobs[0]))
    assert first(capsys, sweep)[0] == "running"
    sweep.write(0, sweep.attempt("failed", start=-5, slurm=jobs[1]))
    assert first(capsys, sweep)[0] == "starting"


@pytest.mark.parametrize(
    ("wrote", "job", "state"),
    [
        ("running", ("RUNNING", 0), "running"),
        ("interrupted", ("PENDING", 1), "preempted"),
        ("running", ("NODE_FAIL", 0), "lost"),
        ("running", None, "lost"),
        ("failed", ("COMPLETED", 0), "failed"),
        ("interrupted", ("CANCELLED", 0), "cancelled"),
    ],
)
@pytest.mark.parametrize("submitted_before", [False, True])
def test_jobs_of_an_sbatch_file_are_known_by_the_card(slurm, sweep, capsys, wrote, job, state, submitted_before):
    if submitted_before:
        sweep.submit("100")
    sweep.write(0, sweep.attempt(wrote, host="node1", slurm={"job": "77_3", "restart": 0, "nodes": "node1"}), epoch=1)
    slurm.queue(*([("77_3", *job, "None")] if job else []), ("100_0", "COMPLETED", 0, "None"))
    row = shown(capsys, *sweep.overrides)["runs"][0]
    assert (row["state"], row["job"]) == (state, "77_3")


def test_a_job_that_is_alive_speaks_before_a_newer_one_that_is_not(slurm, sweep, capsys):
    sweep.submit("100", "20261129-140000-00000000")
    sweep.submit(ARRAY)
    slurm.queue((f"{ARRAY}_0", "CANCELLED", 0, "None"), ("100_0", "PENDING", 0, "Priority"))
    row = shown(capsys, *sweep.overrides)["runs"][0]
    assert (row["state"], row["job"]) == ("pending", "100_0")


def test_runs_that_failed_before_their_folder_was_made(slurm, sweep, capsys):
    """Missing data, say: the only trace is the log of the job."""
    folder = sweep.submit(ARRAY)
    log = folder / f"{ARRAY}_0_0_log.err"
    log.write_text(
        "submitit ERROR (2026-11-29) - Submitted job triggered an exception\nTraceback (most recent call last):\n"
        "  File x\nexperiments.errors.RunError: MNIST is not in [data]: fetch it\nsrun: error: task 0: Exited\n\n"
    )
    slurm.queue((f"{ARRAY}_0", "COMPLETED", 0, "None"))
    assert first(capsys, sweep) == ("failed", "experiments.errors.RunError: MNIST is not in [data]: fetch it")
    slurm.queue()
    assert first(capsys, sweep)[0] == "failed"
    log.write_text("one moment\nsrun: error: node1: task 0: Killed\n")
    assert first(capsys, sweep)[0] == "lost"
    assert last_error(log) == ("one moment", False)
    assert main([*sweep.overrides, "--failed"]) == 0
    out = capsys.readouterr().out
    assert str(log) in out


def test_runs_that_were_started_by_hand(slurm, sweep, capsys):
    sweep.write(0, sweep.attempt("running", pid=os.getpid()), epoch=1)
    sweep.write(1, sweep.attempt("running"))
    sweep.write(2, sweep.attempt("running", host="elsewhere"))
    rows = shown(capsys, *sweep.overrides)["runs"]
    assert [row["state"] for row in rows] == ["running", "lost", "unknown"]
    assert rows[2]["detail"] == "started by hand on elsewhere"
    assert slurm.asked("squeue") == []


def test_runs_of_nobody_are_not_submitted(slurm, sweep, capsys):
    content = shown(capsys, *sweep.overrides)
    assert content["counts"] == {"not submitted": 3}


def test_without_slurm_the_folders_speak_and_it_is_said(sweep, capsys, monkeypatch, tmp_path):
    sweep.submit(ARRAY)
    sweep.write(0, sweep.attempt("running"), epoch=1)
    sweep.write(1, sweep.attempt("failed", message="no [data]"))
    monkeypatch.setenv("PATH", str(tmp_path))
    content = shown(capsys, *sweep.overrides)
    assert [row["state"] for row in content["runs"]] == ["running", "failed", "unknown"]
    assert "there is no SLURM on this machine" in content["warning"]
    assert main(list(sweep.overrides)) == 0
    printed = capsys.readouterr()
    assert "no [data]" in printed.out
    assert "warning: there is no SLURM" in printed.err


def test_a_controller_that_hangs_does_not_hang_the_table(slurm, sweep, capsys, monkeypatch):
    monkeypatch.setattr(queue.run, "__defaults__", (0.3,))
    slurm.never_answers("squeue")
    sweep.submit(ARRAY)
    content = shown(capsys, *sweep.overrides)
    assert "has not answered" in content["warning"]
    assert content["counts"] == {"unknown": 3}


def test_selection_by_submission(slurm, sweep, capsys):
    paths = f"paths.runs={sweep.runs}"
    sweep.submit("100", "20261129-140000-00000000")
    newest = sweep.submit(ARRAY, runs=sweep.planned[1:])
    slurm.queue((f"{ARRAY}_1", "RUNNING", 0, "None"), ("100_0", "RUNNING", 0, "None"))
    by_nothing = shown(capsys, paths)
    assert [row["job"] for row in by_nothing["runs"]] == [f"{ARRAY}_0", f"{ARRAY}_1"]
    for name in (newest.name, "20261129-19", ARRAY, str(newest)):
        assert shown(capsys, name, paths) == by_nothing
    assert [row["job"] for row in shown(capsys, "100", paths)["runs"]] == ["100_0", f"{ARRAY}_0", f"{ARRAY}_1"]
    assert main(["99", paths]) == 1
    assert f"there is no submission 99 for runs in {sweep.runs}" in capsys.readouterr().err
    assert main([ARRAY, *sweep.overrides]) == 1
    assert "one or the other" in capsys.readouterr().err


def test_only_what_failed(slurm, sweep, capsys):
    sweep.submit(ARRAY)
    sweep.write(0, sweep.attempt("failed", message="a [bold] thing"))
    sweep.write(1, sweep.attempt("running"))
    slurm.queue((f"{ARRAY}_2", "PENDING", 0, "Priority"))
    content = shown(capsys, *sweep.overrides, "--failed")
    assert [row["state"] for row in content["runs"]] == ["failed", "lost"]
    assert content["counts"] == {"failed": 1, "lost": 1, "pending": 1}
    assert main(list(sweep.overrides)) == 0
    out = capsys.readouterr().out
    assert "a [bold] thing" in out
    assert "3 runs: 1 pending, 1 failed, 1 lost" in out


def test_watching_ends_when_all_is_over(slurm, sweep, capsys, monkeypatch):
    sweep.submit(ARRAY)
    slurm.queue(*((f"{ARRAY}_{index}", "RUNNING", 0, "None") for index in range(3)))

    def finish(_seconds):
        for index in range(3):
            sweep.write(index, sweep.attempt("finished"), epoch=5, accuracy=0.5)

    monkeypatch.setattr(status.time, "sleep", finish)
    assert main([*sweep.overrides, "--watch"]) == 0
    assert "3 runs: 3 finished" in capsys.readouterr().out


def test_time_of_a_lost_attempt_ends_with_what_it_wrote_last(slurm, sweep, capsys):
    sweep.submit(ARRAY)
    folder = sweep.write(0, sweep.attempt("interrupted"), sweep.attempt("running", start=20), epoch=2)
    written = (sweep.start + timedelta(minutes=25)).timestamp()
    for file in folder.iterdir():
        os.utime(file, (written, written))
    slurm.queue()
    row = shown(capsys, *sweep.overrides)["runs"][0]
    assert row["state"] == "lost"
    assert row["seconds"] == pytest.approx(15 * 60, abs=2)


def test_many_runs_are_read_once_and_asked_for_together(slurm, sweep, capsys, monkeypatch):
    """Files opened and commands of SLURM, since a time says more of the machine."""
    opened, opening = [], io.open
    monkeypatch.setattr(io, "open", lambda file, *rest, **more: opened.append(file) or opening(file, *rest, **more))
    big = type(sweep)(sweep.runs, ("experiment=mnist_patches", "seed=range(200)", "trainer.max_epochs=5"))
    big.submit(ARRAY)
    for index in range(200):
        big.write(index, big.attempt("running"), epoch=3)
    slurm.queue(*((f"{ARRAY}_{index}", "RUNNING", 0, "None") for index in range(200)))
    opened.clear()
    assert main(big.overrides) == 0
    assert "200 runs: 200 running" in capsys.readouterr().out
    assert 600 <= len(opened) < 650, Counter(map(str, opened)).most_common(3)
    assert slurm.asked("squeue").count("--noheader") == 1


@pytest.mark.parametrize("name", ["run.json", "result.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"attempts": [{}], "identity": {}}', '{"best": null}'])
def test_a_damaged_record_is_one_line_of_the_table(slurm, sweep, capsys, name, content):
    slurm.queue()
    sweep.submit(ARRAY)
    sweep.write(0, sweep.attempt("finished"), accuracy=0.5)
    file = sweep.write(1, sweep.attempt("running")) / name
    file.write_text(content)
    os.utime(file, (0, 0))
    found = shown(capsys, *sweep.overrides)
    assert found["runs"][0]["state"] == "finished"
    assert (found["runs"][1]["state"], found["runs"][1]["job"]) == ("failed", f"{ARRAY}_1")
    assert found["runs"][1]["detail"].startswith(f"{name} cannot be read (")
    assert found["counts"] == {"finished": 1, "failed": 1, "lost": 1}


@pytest.mark.parametrize("name", ["run.json", "result.json"])
def test_a_record_that_is_empty_yet(slurm, sweep, capsys, name):
    """Another machine is writing it: the run is as far as SLURM and the other records say."""
    slurm.queue((f"{ARRAY}_0", "RUNNING", 0, "None"))
    sweep.submit(ARRAY)
    (sweep.write(0, sweep.attempt("running")) / name).write_text("")
    assert shown(capsys, *sweep.overrides)["runs"][0]["state"] in ("running", "starting")


def test_a_job_that_has_finished_and_a_result_that_is_not_to_be_seen_yet(slurm, sweep, capsys, monkeypatch):
    slurm.queue((f"{ARRAY}_0", "COMPLETED", 0, "None"))
    folder = sweep.submit(ARRAY)
    sweep.write(0, sweep.attempt("running"))
    record_event(folder, 0, "ended", reason="finished")
    run = shown(capsys, *sweep.overrides)["runs"][0]
    assert (run["state"], run["detail"]) == ("running", "has ended; its result is not to be seen from here yet")
    monkeypatch.setattr(state, "VISIBLE_S", 0.0)
    run = shown(capsys, *sweep.overrides)["runs"][0]
    assert run["state"] == "lost"
    assert "there is no result.json" in run["detail"]


@pytest.mark.parametrize("broken", ['{"time": "20', '{"time": "20{"time": "x"}', "[]", '{"reason": "\udce9"'])
def test_a_broken_line_of_events_is_passed_over(slurm, sweep, broken):
    folder = sweep.submit(ARRAY)
    record_event(folder, 0, "started")
    with open(folder / "events-0.jsonl", "ab") as file:
        file.write(f"{broken}\n".encode(errors="surrogateescape"))
    record_event(folder, 0, "ended", reason="x")
    assert [event["event"] for event in read_events(folder, 0)] == ["started", "ended"]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"tasks": [{}]}', '{"tasks": [], "more": 1}'])
def test_a_damaged_submission_is_named(slurm, sweep, capsys, content):
    folder = sweep.submit(ARRAY)
    (folder / "submission.json").write_text(content)
    assert main(sweep.overrides) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {folder / 'submission.json'} cannot be read (")
    assert "squeue --me --name=sinkformer-1f2e3d4c" in error
    assert error.count("\n") == 1


def test_a_submission_without_an_id_is_known_by_what_its_jobs_wrote(slurm, sweep, capsys):
    folder = sweep.submit(ARRAY)
    content = json.loads((folder / "submission.json").read_text())
    tasks = [task | {"job_id": None} for task in content["tasks"]]
    (folder / "submission.json").write_text(json.dumps(content | {"array_job_id": None, "tasks": tasks}))
    slurm.queue((f"{ARRAY}_0", "RUNNING", 0, "None"), (f"{ARRAY}_1", "PENDING", 0, "Priority"))
    assert {run["state"] for run in shown(capsys, *sweep.overrides)["runs"]} == {"not submitted"}
    record_event(folder, 0, "started", job_id=f"{ARRAY}_0")
    assert [run["state"] for run in shown(capsys, *sweep.overrides)["runs"]][:2] == ["starting", "pending"]
