import json

from slurm import cancel, status


def test_only_what_is_alive_of_the_selection_is_cancelled(slurm, sweep, capsys, monkeypatch):
    sweep.submit("123")
    slurm.queue(("123_0", "RUNNING", 0, "None"), ("123_1", "COMPLETED", 0, "None"), ("123_2", "PENDING", 0, "Priority"))
    two = ["experiment=mnist_patches", "seed=0,1", "trainer.max_epochs=5", f"paths.runs={sweep.runs}"]
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert cancel.main(two) == 2
    printed = capsys.readouterr()
    assert printed.out.split("\t")[0] == "123_0"
    assert "nothing is cancelled: add --yes to cancel these 1 jobs" in printed.err
    assert slurm.asked("scancel") == []
    assert cancel.main([*two, "--yes"]) == 0
    assert slurm.asked("scancel") == ["123_0"]
    # SLURM forgets it, without accounts; the submission does not.
    slurm.queue(("123_2", "PENDING", 0, "Priority"))
    capsys.readouterr()
    assert status.main([*sweep.overrides, "--json"]) == 0
    states = [row["state"] for row in json.loads(capsys.readouterr().out)["runs"]]
    assert states == ["cancelled", "lost", "pending"]


def test_it_asks_at_a_terminal(slurm, sweep, capsys, monkeypatch):
    sweep.submit("123")
    slurm.queue(("123_0", "RUNNING", 0, "None"), ("123_2", "PENDING", 0, "Priority"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert cancel.main(sweep.overrides) == 2
    assert slurm.asked("scancel") == []
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert cancel.main(["123", f"paths.runs={sweep.runs}"]) == 0
    assert slurm.asked("scancel") == ["123_0", "123_2"]


def test_nothing_to_cancel_and_no_slurm(slurm, sweep, capsys, monkeypatch, tmp_path):
    assert cancel.main(sweep.overrides) == 0
    assert "none of these runs is queued or running" in capsys.readouterr().err
    sweep.submit("123")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cancel.main(sweep.overrides) == 1
    assert "error: there is no SLURM on this machine" in capsys.readouterr().err
