import pytest

from slurm import queue
from slurm.queue import SlurmError, cancel, expand, read_accounts, read_jobs, read_queue


@pytest.mark.parametrize(
    ("identifier", "tasks"),
    [
        ("123", ["123"]),
        ("123_4", ["123_4"]),
        ("123_[0-2]", ["123_0", "123_1", "123_2"]),
        ("123_[0-1,7,9-10%3]", ["123_0", "123_1", "123_7", "123_9", "123_10"]),
        ("123_[0-8:4%1]", ["123_0", "123_4", "123_8"]),
        ("123_[5%2]", ["123_5"]),
    ],
)
def test_ids_of_arrays(identifier, tasks):
    assert list(expand(identifier)) == tasks


def test_the_queue_by_task(slurm, monkeypatch):
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    monkeypatch.setenv("SQUEUE_FORMAT", "%i")
    reason = "(ReqNodeNotAvail, UnavailableNodes:node[1-2])"
    slurm.queue(("12_[0-1%2]", "PENDING", 0, reason), ("12_7", "RUNNING", 2, "None"), ("13", "COMPLETED", 0, "None"))
    jobs = read_queue(["me", "other"])
    assert list(jobs) == ["12_0", "12_1", "12_7", "13"]
    assert jobs["12_1"].reason == reason
    assert [jobs[one].alive for one in jobs] == [True, True, True, False]
    assert [jobs[one].waiting for one in jobs] == [True, True, False, False]
    assert jobs["12_7"].restarts == 2
    assert jobs["12_7"].reason == ""
    asked = slurm.asked("squeue")
    assert "--user=me,other" in asked
    assert "--array" in asked
    assert "SQUEUE_" not in slurm.environment("squeue")


def test_either_form_of_an_array_in_the_queue(slurm):
    """SLURM 22.05 prints the task's id where its manual says the array's."""
    slurm.queue(("12_3", "RUNNING", 0, "None"))
    line = (slurm.folder / "squeue.out").read_text()
    assert list(read_queue()) == ["12_3"]
    slurm.answers("squeue", line.replace(f"{'12':24}|", f"{'12_3':24}|"))
    assert list(read_queue()) == ["12_3"]


def test_jobs_that_left_the_queue_are_looked_up_in_the_accounts(slurm):
    slurm.queue(("12_0", "RUNNING", 0, "None"))
    slurm.accounts(("12_0", "RUNNING"), ("12_1", "NODE_FAIL"), ("12_2", "CANCELLED by 1000"), ("12_[5-6]", "PENDING"))
    jobs = read_jobs(["12_0", "12_1", "12_2", "12_6", "12_9"])
    states = {"12_0": "RUNNING", "12_1": "NODE_FAIL", "12_2": "CANCELLED", "12_6": "PENDING"}
    assert {one: job.state for one, job in jobs.items()} == states
    assert "--jobs=12" in slurm.asked("sacct")


def test_without_accounts(slurm):
    slurm.queue(("12_0", "RUNNING", 0, "None"))
    assert list(read_jobs(["12_0", "12_1"])) == ["12_0"]


def test_what_sacct_objects_to_is_not_taken_for_an_empty_list(slurm):
    slurm.answers("sacct", err="sacct: error: Problem talking to the database: Connection refused\n", code=1)
    assert read_accounts(["12"]) == {}
    slurm.answers("sacct", err="sacct: unrecognized option '--array'\n", code=1)
    with pytest.raises(SlurmError, match="unrecognized option"):
        read_accounts(["12"])


def test_a_controller_that_does_not_answer(slurm, monkeypatch):
    monkeypatch.setattr(queue.run, "__defaults__", (0.3,))
    slurm.never_answers("squeue")
    slurm.never_answers("sacct")
    with pytest.raises(SlurmError, match=r"has not answered squeue within 0\.3 s: its controller is busy or down"):
        read_queue()
    with pytest.raises(SlurmError, match="has not answered sacct"):
        read_accounts(["1"])


def test_no_slurm_here(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmError, match=r"there is no SLURM on this machine \(squeue is not on the PATH\)"):
        read_queue()
    assert read_accounts(["1"]) == {}


def test_what_squeue_objects_to_is_passed_on(slurm):
    slurm.answers("squeue", err="squeue: error: Invalid user: nobody\n", code=1)
    with pytest.raises(SlurmError, match="squeue refuses: squeue: error: Invalid user: nobody"):
        read_queue(["nobody"])


def test_single_tasks_are_cancelled_and_those_that_are_gone_do_no_harm(slurm):
    slurm.answers("scancel", err="scancel: error: Kill job error on job id 12_0: Invalid job id specified\n", code=1)
    cancel(["12_0", "12_3"])
    assert slurm.asked("scancel") == ["12_0", "12_3"]
    slurm.answers("scancel", err="scancel: error: Access/permission denied\n", code=1)
    with pytest.raises(SlurmError, match="permission denied"):
        cancel(["12_0"])


def test_lines_that_are_no_jobs_are_passed_over(slurm):
    """Banners of a site's wrapper, and warnings that some versions print on their output."""
    slurm.queue(("12_0", "RUNNING", 0, "None"))
    slurm.answers("squeue", "Welcome!\n" + (slurm.folder / "squeue.out").read_text())
    slurm.answers("sacct", "sacct: warning | of | four | cells\n\nstray\n12_1|FAILED|node1|1:0\n")
    assert {one: job.state for one, job in read_jobs(["12_0", "12_1"]).items()} == {"12_0": "RUNNING", "12_1": "FAILED"}


@pytest.mark.parametrize("word", ["EXPEDITING", "REVOKED", "RV", "POWER_UP_NODE", "LAUNCH_FAILED", "SOMETHING_NEW"])
def test_a_word_that_is_no_end_is_a_job_that_lives(slurm, word):
    """A job that is wrongly taken for ended would be submitted twice."""
    slurm.queue(("12_0", word, 0, "None"))
    slurm.accounts(("12_1", word))
    assert [job.alive for job in read_jobs(["12_0", "12_1"]).values()] == [True, True]


@pytest.mark.parametrize("word", sorted(queue.ENDS))
def test_the_words_that_are_ends(slurm, word):
    slurm.queue(("12_0", word, 0, "None"))
    slurm.accounts(("12_1", f"{word} by 1000"))
    assert [job.alive for job in read_jobs(["12_0", "12_1"]).values()] == [False, False]
