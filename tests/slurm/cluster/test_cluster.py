"""Sweeps on a real cluster of two nodes: they finish, survive what clusters do to jobs, and never train a run twice."""

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.experiments.fairseq_runs.conftest import SENTIMENT
from tests.slurm.cluster.sweeps import ROOT, SLOW, Jobs, Sweep, epochs, queue, until

SINKHORN = ("attention=sinkhorn", "attention.n_iters=3")
NODE = "cluster.sbatch={{nodelist:{}}}".format


def assert_equal(run: Path, reference: Path) -> None:
    for name in ("metrics.jsonl", "result.json"):
        assert (run / name).read_bytes() == (reference / name).read_bytes(), name


def preempt(node: str) -> None:
    """Submits a short job that needs all of a node, on the partition that goes first."""
    urgent = ["sbatch", "--partition=high", f"--nodelist={node}", "--exclusive", "--mem=0", "--output=/dev/null"]
    subprocess.run([*urgent, "--time=1", "--wrap=sleep 3"], check=True, capture_output=True)


def attempts(run: Path) -> list[dict]:
    return json.loads((run / "run.json").read_text())["attempts"]


@pytest.fixture(scope="session")
def time_limited(tmp_path_factory, data_folder):
    """A run of about 48 s in jobs of one minute, begun before everything else: it takes several of them."""
    sweep = Sweep(tmp_path_factory.mktemp("time"), data_folder)
    words = (*SLOW, *SINKHORN, "trainer.max_epochs=6", "+model.drop_rate=0.2")
    limits = ("cluster.time=1", "cluster.signal_before_end_s=5", "cluster.partition=main", NODE("node1"))
    return sweep, words, sweep.submit(*words, cluster=(*limits, "cluster.environment={SLOW_STEP:'2'}"))


@pytest.mark.usefixtures("time_limited")
def test_preempted(sweep):
    """By a job on a higher partition, in the middle of an epoch, and on the one node where both fit one at a time."""
    words = (*SLOW, *SINKHORN, "+model.drop_rate=0.2", "trainer.max_epochs=5")
    jobs = sweep.submit(*words, cluster=(NODE("node2"), "cluster.environment={SLOW_STEP:'1.5'}"))
    (run,) = jobs.runs
    until(lambda: epochs(run) >= 1, 120, jobs.logs)
    preempt("node2")
    until(lambda: any(event["event"] == "requeued" for event in jobs.events()), 60, jobs.logs)
    state = sweep.status()[run.name]
    assert state["state"] == "preempted", state
    reference = sweep.alone(*words)
    jobs.wait()
    assert_equal(run, reference)
    requeued = [event["reason"] for event in jobs.events() if event["event"] == "requeued"]
    assert requeued == ["preempted"]
    first, second = attempts(run)
    assert (first["state"], second["state"]) == ("interrupted", "finished")
    assert second["from_step"] > 4
    assert [attempt["slurm"] for attempt in (first, second)] == [
        {"job": jobs.id, "restart": 0, "nodes": "node2"},
        {"job": jobs.id, "restart": 1, "nodes": "node2"},
    ]
    assert sweep.status()[run.name]["state"] == "finished"


def test_a_sweep_of_four_is_one_array(sweep):
    words = (*SLOW, "attention=sinkhorn", "attention.n_iters=1,2", "seed=range(2)", "trainer.max_epochs=2")
    # So slow that none has finished when the same line is given again, on a busy machine too.
    jobs = sweep.submit(*words, cluster=(sweep.pace(8),))
    assert [task["job_id"] for task in jobs.content["tasks"]] == [f"{jobs.id}_{index}" for index in range(4)]
    again = sweep.command("slurm.submit", *sweep.words(*words), "cluster=dev")
    assert again.returncode == 0
    assert "4 queued or running" in again.stderr
    assert "nothing to submit" in again.stdout
    sweep.pace(0)
    jobs.wait()
    assert all((run / "result.json").exists() for run in jobs.runs), jobs.logs()
    assert set(jobs.accounts().values()) == {"COMPLETED"}
    assert {state["state"] for state in sweep.status().values()} == {"finished"}
    once_more = sweep.command("slurm.submit", *sweep.words(*words), "cluster=dev")
    assert "nothing to submit" in once_more.stdout
    before = (jobs.runs[3] / "result.json").read_bytes()
    (jobs.runs[3] / "result.json").unlink()
    one = sweep.submit(*words)
    assert [Path(task["folder"]) for task in one.content["tasks"]] == [jobs.runs[3]]
    one.wait()
    assert (jobs.runs[3] / "result.json").read_bytes() == before


def test_failures_are_told_and_made_good(sweep):
    """One seed's run is killed as for want of memory, the other's is left alone; a variant raises."""
    words = (*SLOW, *SINKHORN, "+model.raises_at=null,5", "seed=0,1")
    jobs = sweep.submit(*words, cluster=(NODE("node2"), sweep.pace(2)))
    by_words = {tuple(task["overrides"][-2:]): Path(task["folder"]) for task in jobs.content["tasks"]}
    killed, raising = by_words["+model.raises_at=null", "seed=0"], by_words["+model.raises_at=5", "seed=0"]
    other = by_words["+model.raises_at=null", "seed=1"]
    until(lambda: all(epochs(run) for run in by_words.values()), 180, jobs.logs)  # four slots: all run at once
    os.kill(attempts(killed)[-1]["pid"], signal.SIGKILL)
    until(lambda: len(queue(jobs.id)) <= 2, 90, jobs.logs)
    states = sweep.status(jobs.id)
    assert states[killed.name]["state"] in ("failed", "lost")
    assert "SIGKILL" in states[killed.name]["detail"]
    assert states[raising.name]["state"] == "failed"
    assert "the loss is not finite" in states[raising.name]["detail"]
    assert states[other.name]["state"] in ("running", "finished")
    ids = {Path(task["folder"]): task["job_id"] for task in jobs.content["tasks"]}
    sweep.pace(0)
    jobs.wait()
    accounts = jobs.accounts()
    assert accounts[ids[raising]] == accounts[ids[killed]] == "FAILED"
    assert accounts[ids[other]] == "COMPLETED"
    # The same line again: what is finished stays, the killed run goes on, the one that raises does so again.
    before = (other / "result.json").stat().st_mtime_ns
    again = sweep.submit(*words)
    assert set(again.runs) == {killed, *(run for run in jobs.runs if run not in (killed, other))}
    again.wait()
    assert (killed / "result.json").exists(), again.logs()
    assert attempts(killed)[1]["from_step"] >= 4
    assert (other / "result.json").stat().st_mtime_ns == before
    assert sweep.status()[raising.name]["state"] == "failed"


def test_a_node_goes_down(sweep):
    """The job is restarted on the other one without a signal, and goes on from the newest whole checkpoint."""
    words = (*SLOW, *SINKHORN, "+model.drop_rate=0.1")
    jobs = sweep.submit(*words, cluster=("cluster.environment={SLOW_STEP:'1'}", "cluster.sbatch={exclude:node1}"))
    (run,) = jobs.runs
    until(lambda: epochs(run) >= 2, 120, jobs.logs)
    update = ["scontrol", "update"]
    subprocess.run([*update, "nodename=node2", "state=down", "reason=test"], check=True)
    try:
        until(lambda: any("PENDING" in line for line in queue(jobs.id)), 30, jobs.logs)
        # At once: the node may be back before long, and refuses a job that it has just been told to kill.
        subprocess.run([*update, f"jobid={jobs.id}", "excnodelist=node2"], check=True)
        assert sweep.status()[run.name]["state"] in ("requeued", "preempted", "pending", "starting", "running")
        reference = sweep.alone(*words)

        def over() -> bool:
            if any("held" in line for line in queue(jobs.id)):  # as SLURM does with a job that a node has refused
                subprocess.run(["scontrol", "release", jobs.id], check=True)
            return not queue(jobs.id)

        until(over, 240, jobs.logs)
    finally:
        # Refused where the node has come back by itself, since its daemon is alive.
        subprocess.run([*update, "nodename=node2", "state=resume"], capture_output=True, check=False)
    assert (run / "result.json").exists(), jobs.logs()
    assert_equal(run, reference)
    slurm = [attempt["slurm"] for attempt in attempts(run)]
    assert [one["nodes"] for one in slurm] == ["node2", "node1"]
    assert slurm[0]["restart"] == 0 < slurm[1]["restart"]
    assert attempts(run)[1]["from_step"] >= 8


def test_two_nodes_train_one_run(sweep):
    """Stopped once in the middle of an epoch, too; batches of 101 leave the processes unequal shares."""
    words = (*SLOW, *SINKHORN, "trainer.precision=64", "data.batch_size=101", "trainer.accumulate_grad_batches=2")
    environment = "cluster.environment={SLOW_STEP:'1'}"
    jobs = sweep.submit(*words, cluster=("cluster.nodes=2", "cluster.partition=main", environment))
    (run,) = jobs.runs
    until(lambda: epochs(run) >= 1, 180, jobs.logs)
    subprocess.run(["scancel", "--signal=USR2", jobs.id], check=True)
    reference = sweep.alone(*words)
    jobs.wait()
    assert (run / "result.json").exists(), jobs.logs()
    assert [attempt["state"] for attempt in attempts(run)] == ["interrupted", "finished"]
    assert [event["event"] for event in jobs.events()].count("requeued") == 1
    for attempt in attempts(run):
        assert attempt["devices"] == ["cpu", "cpu"]
        assert attempt["slurm"]["nodes"] == "node[1-2]"
    assert run.name == reference.name
    ours, theirs = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (run, reference)
    )
    assert [(row["step"], row["split"]) for row in ours] == [(row["step"], row["split"]) for row in theirs]
    for row, expected in zip(ours, theirs, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert row["accuracy"] == expected["accuracy"]
    last = json.loads((run / "result.json").read_text())["last"]["checkpoint"]
    weights, expected_weights = (
        torch.load(folder / last, weights_only=True)["state_dict"] for folder in (run, reference)
    )
    for name, expected in expected_weights.items():
        torch.testing.assert_close(weights[name], expected, rtol=0, atol=1e-6)


def test_two_submitters_at_once(sweep):
    words = [*sweep.words("seed=0,1,2", "trainer.max_epochs=1"), "cluster=dev"]
    start = [sys.executable, "-m", "slurm.submit", *words]
    both = [
        subprocess.Popen(start, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)
    ]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sorted("nothing to submit" in out for out, _ in said) == [False, True]
    (content,) = (sweep.folder / "runs" / ".submissions").glob("*/submission.json")
    jobs = Jobs("", json.loads(content.read_text()), content.parent)
    jobs.wait()
    assert [len(attempts(run)) for run in jobs.runs] == [1, 1, 1]


ODD = "a b'c\"d, $HOME `id` \\ {x} é雪 (1) #!=%j"


def test_odd_values_reach_the_run(sweep, tmp_path):
    from experiments.runners.run_dir import override

    canary = tmp_path / "canary"
    value = f"{ODD} $(touch {canary}); touch {canary}"
    jobs = sweep.submit("trainer.max_epochs=1", override("label", value))
    jobs.wait()
    (run,) = jobs.runs
    assert (run / "result.json").exists(), jobs.logs()
    card = json.loads((run / "run.json").read_text())
    assert card["label"] == value
    assert shlex.split(card["command"])[-1] == override("label", value)
    assert not canary.exists()


def test_a_fairseq_run_is_preempted(sweep, text_data):
    """The same commands and the same promises for a run that fairseq trains."""
    text = Sweep(sweep.folder, text_data, SENTIMENT)
    words = (*SINKHORN, "trainer.max_epochs=30")
    jobs = text.submit(*words, cluster=(NODE("node2"),))
    (run,) = jobs.runs
    until(lambda: epochs(run) >= 2, 180, jobs.logs)
    preempt("node2")
    reference = text.alone(*words)
    jobs.wait()
    assert (run / "result.json").exists(), jobs.logs()
    assert_equal(run, reference)
    assert ("requeued", "preempted") in [(event["event"], event.get("reason")) for event in jobs.events()]
    assert [attempt["state"] for attempt in attempts(run)] == ["interrupted", "finished"]
    assert attempts(run)[1]["from_step"] > 0
    again = text.command("slurm.submit", *text.words(*words), "cluster=dev")
    assert "nothing to submit" in again.stdout


def test_fairseq_on_two_nodes(sweep, text_data):
    """Batches are divided, so that an epoch has the steps of one process; it learns the word that tells the label."""
    text = Sweep(sweep.folder, text_data, SENTIMENT)
    jobs = text.submit(*SINKHORN, cluster=("cluster.nodes=2", "cluster.partition=main"))
    (run,) = jobs.runs
    jobs.wait()
    assert (run / "result.json").exists(), jobs.logs()
    (attempt,) = attempts(run)
    assert attempt["slurm"]["nodes"] == "node[1-2]"
    assert attempt["devices"] == ["cpu", "cpu"]
    rows = list(map(json.loads, (run / "metrics.jsonl").read_text().splitlines()))
    losses = {row["epoch"]: (row["step"], row["loss"]) for row in rows if row["split"] == "val"}
    assert [step for step, _ in losses.values()] == [8, 16, 24]
    assert losses[3][1] < losses[1][1]


def test_a_time_limit_is_met(time_limited):
    sweep, words, jobs = time_limited
    reference = sweep.alone(*words)
    (run,) = jobs.runs
    jobs.wait()
    assert (run / "result.json").exists(), jobs.logs()
    assert_equal(run, reference)
    requeued = [event["reason"] for event in jobs.events() if event["event"] == "requeued"]
    assert len(requeued) >= 1
    assert set(requeued) == {"time limit"}
    assert len(attempts(run)) >= 2
