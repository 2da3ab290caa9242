"""A run that was stopped anywhere gives the numbers of one that was not, bit for bit."""

import json
import os
import signal

import pytest
import torch

from experiments.errors import RunError
from experiments.runners import checkpoints, classifier, lightning
from experiments.runners.checkpoints import read_checkpoint

SINKHORN = ("attention=sinkhorn", "attention.n_iters=3")
DROPOUT = (*SINKHORN, "+model.drop_rate=0.2", "data.max_shift=2")
MID_EPOCH = (*DROPOUT, "trainer.checkpoint_every_n_steps=3")


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def at_step(step, action):
    """Acts in the middle of the training step after `step` optimizer steps."""

    def patch():
        original = classifier.Classifier.training_step

        def training_step(self, batch, batch_idx):
            if self.global_step == step:
                action()
            return original(self, batch, batch_idx)

        classifier.Classifier.training_step = training_step

    return patch


def assert_equal(folder, reference, config_differs=False):
    assert (folder / "metrics.jsonl").read_bytes() == (reference / "metrics.jsonl").read_bytes()
    assert (folder / "result.json").read_bytes() == (reference / "result.json").read_bytes()
    last = json.loads((folder / "result.json").read_text())["last"]["checkpoint"]
    ours, theirs = (checkpoints.read_checkpoint(path / last) for path in (folder, reference))
    for name, weights in theirs["state_dict"].items():
        assert torch.equal(ours["state_dict"][name], weights), name
    for index, state in theirs["optimizer_states"][0]["state"].items():
        assert torch.equal(ours["optimizer_states"][0]["state"][index]["exp_avg"], state["exp_avg"])


def test_twice_the_same(runs, finished):
    assert_equal(runs.start(*DROPOUT).folder, finished(*DROPOUT))


def test_dropout_and_augmentation_are_on(finished):
    plain, noisy = finished(*SINKHORN), finished(*DROPOUT)
    assert (plain / "metrics.jsonl").read_bytes() != (noisy / "metrics.jsonl").read_bytes()


# Four steps an epoch: 2 is in the first epoch, 4 the first step of the second, 6 in it, 11 the last of all.
@pytest.mark.parametrize("step", [2, 4, 6, 11])
def test_killed_in_a_step(runs, finished, step):
    assert runs.in_child(at_step(step, kill), *DROPOUT) == -signal.SIGKILL
    outcome = runs.start(*DROPOUT)
    assert_equal(outcome.folder, finished(*DROPOUT))
    card = json.loads((outcome.folder / "run.json").read_text())
    assert [attempt["from_step"] for attempt in card["attempts"]] == [0, step - step % 4]
    assert [attempt["state"] for attempt in card["attempts"]] == ["running", "finished"]


# Every third step has a checkpoint: 4 goes on from 4 (the epoch's end), 5 from 4, 7 from 6, 8 from 8, 10 from 9.
@pytest.mark.parametrize(("step", "from_step"), [(5, 4), (7, 6), (8, 8), (10, 9)])
def test_killed_between_checkpoints_within_epochs(runs, finished, step, from_step):
    assert runs.in_child(at_step(step, kill), *MID_EPOCH) == -signal.SIGKILL
    outcome = runs.start(*MID_EPOCH)
    assert_equal(outcome.folder, finished(*DROPOUT))
    card = json.loads((outcome.folder / "run.json").read_text())
    assert card["attempts"][1]["from_step"] == from_step


def test_float64_goes_on_in_float64(runs, finished):
    """Weights that are rounded to float32 when they are loaded differ by 1e-7 in the end."""
    words = (*SINKHORN, "trainer.precision=64")
    assert runs.in_child(at_step(6, kill), *words) == -signal.SIGKILL
    assert_equal(runs.start(*words).folder, finished(*words))


def test_killed_again_and_again(runs, finished):
    for step in (3, 5, 6, 9, 10):
        assert runs.in_child(at_step(step, kill), *MID_EPOCH) == -signal.SIGKILL
    assert_equal(runs.start(*MID_EPOCH).folder, finished(*DROPOUT))


def test_killed_while_a_checkpoint_is_written(runs, finished):
    def patch():
        def half(path, content):
            if path.name == "step00000008.ckpt":
                path.with_name(f".{path.name}.tmp").write_bytes(bytes(content)[: len(content) // 2])
                kill()
            write_atomic(path, content)

        write_atomic = checkpoints.write_atomic
        checkpoints.write_atomic = half

    assert runs.in_child(patch, *DROPOUT) == -signal.SIGKILL
    (folder,) = runs.folders()
    assert (folder / "checkpoints" / ".step00000008.ckpt.tmp").exists()
    outcome = runs.start(*DROPOUT)
    assert_equal(outcome.folder, finished(*DROPOUT))
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == sorted(
        path.name for path in (finished(*DROPOUT) / "checkpoints").iterdir()
    )


def test_killed_between_metrics_and_checkpoint(runs, finished):
    """The rows of an epoch are on the disk, its checkpoint is not: they must not stand there twice."""

    def patch():
        save = checkpoints.RunCheckpoints.on_train_epoch_end

        def on_train_epoch_end(self, trainer, module):
            if trainer.global_step == 8:
                with open(self.recorder.folder / "metrics.jsonl", "a") as file:
                    file.write('{"epoch": 3, "st')
                kill()
            save(self, trainer, module)

        checkpoints.RunCheckpoints.on_train_epoch_end = on_train_epoch_end

    assert runs.in_child(patch, *DROPOUT) == -signal.SIGKILL
    assert_equal(runs.start(*DROPOUT).folder, finished(*DROPOUT))


def test_killed_in_the_final_test(runs, finished):
    def patch():
        lightning.evaluate = lambda *_: kill()

    assert runs.in_child(patch, *DROPOUT) == -signal.SIGKILL
    (folder,) = runs.folders()
    assert not (folder / "result.json").exists()
    assert_equal(runs.start(*DROPOUT).folder, finished(*DROPOUT))


def test_a_cut_off_checkpoint_is_passed_over(runs, finished, capsys):
    assert runs.in_child(at_step(9, kill), *DROPOUT) == -signal.SIGKILL
    (folder,) = runs.folders()
    newest = folder / "checkpoints" / "step00000008.ckpt"
    newest.write_bytes(newest.read_bytes()[:-2000])
    outcome = runs.start(*DROPOUT)
    said = capsys.readouterr().err
    assert f"warning: checkpoint {newest} cannot be read and is passed over: " in said
    assert "begins anew" not in said
    assert_equal(outcome.folder, finished(*DROPOUT))
    assert json.loads((folder / "run.json").read_text())["attempts"][1]["from_step"] == 4


def test_no_valid_checkpoint_at_all(runs, finished, capsys):
    assert runs.in_child(at_step(9, kill), *DROPOUT) == -signal.SIGKILL
    (folder,) = runs.folders()
    first, second = sorted((folder / "checkpoints").iterdir())
    first.write_bytes(b"")
    torch.save([1, 2], second)
    outcome = runs.start(*DROPOUT)
    said = capsys.readouterr().err
    assert f"warning: checkpoint {second} cannot be read and is passed over: it is no checkpoint of a training" in said
    assert f"warning: no checkpoint in {folder / 'checkpoints'} can be read: the run begins anew" in said
    assert_equal(outcome.folder, finished(*DROPOUT))


def test_a_fresh_run_says_nothing_of_checkpoints(runs, capsys):
    runs.start(*DROPOUT)
    assert "checkpoint" not in capsys.readouterr().err


def test_newest_is_by_step_not_by_time(tmp_path):
    for step, age in ((4, 0), (12, 1000), (8, 500)):
        path = tmp_path / checkpoints.checkpoint_name(step)
        torch.save({"global_step": step}, path)
        os.utime(path, (1e9 - age, 1e9 - age))
    (tmp_path / "other.ckpt").write_bytes(b"not ours")
    path, content = checkpoints.newest_valid(tmp_path)
    assert path.name == "step00000012.ckpt"
    assert content == {"global_step": 12}


@pytest.mark.parametrize(("step", "saved"), [(1, 2), (3, 4), (6, 7)])
def test_sigterm_saves_and_exits(runs, finished, step, saved):
    terminate = at_step(step, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert runs.in_child(terminate, *DROPOUT) == 143
    (folder,) = runs.folders()
    card = json.loads((folder / "run.json").read_text())
    assert card["state"] == card["attempts"][0]["state"] == "interrupted"
    assert card["attempts"][0]["message"] == "stopped by a signal"
    assert (folder / "checkpoints" / checkpoints.checkpoint_name(saved)).exists()
    assert_equal(runs.start(*DROPOUT).folder, finished(*DROPOUT))
    assert json.loads((folder / "run.json").read_text())["attempts"][1]["from_step"] == saved


def test_ctrl_c(runs, finished):
    def interrupt():
        raise KeyboardInterrupt

    assert runs.in_child(at_step(6, interrupt), *DROPOUT) == 130
    (folder,) = runs.folders()
    card = json.loads((folder / "run.json").read_text())
    assert (card["state"], card["attempts"][0]["message"]) == ("interrupted", "stopped by Ctrl-C")
    assert_equal(runs.start(*DROPOUT).folder, finished(*DROPOUT))


def test_ctrl_c_in_the_final_test(runs, finished):
    def patch():
        def test_step(self, batch, batch_idx):
            raise KeyboardInterrupt

        classifier.Classifier.test_step = test_step

    assert runs.in_child(patch, *DROPOUT) == 130
    (folder,) = runs.folders()
    assert json.loads((folder / "run.json").read_text())["state"] == "interrupted"
    assert_equal(runs.start(*DROPOUT).folder, finished(*DROPOUT))


def test_samples_of_a_stopped_epoch(runs, tmp_path):
    """Each sample once per epoch, in the same order, whether the epoch was stopped in its middle or at its end."""
    log = tmp_path / "samples"

    def patch(stop_at):
        def apply():
            original = classifier.Classifier.training_step

            def training_step(self, batch, batch_idx):
                with open(log, "a") as file:
                    sums = batch[0].flatten(1).sum(1).tolist()
                    file.write(json.dumps([self.current_epoch, self.global_step, sums]) + "\n")
                if self.global_step == stop_at:
                    os.kill(os.getpid(), signal.SIGTERM)
                return original(self, batch, batch_idx)

            classifier.Classifier.training_step = training_step

        return apply

    assert runs.in_child(patch(2), *SINKHORN) == 143
    assert runs.in_child(patch(7), *SINKHORN) == 143
    assert runs.in_child(patch(None), *SINKHORN) == 0
    stopped = [json.loads(line) for line in log.read_text().splitlines()]
    log.unlink()
    assert runs.in_child(patch(None), *SINKHORN, "label=again", f"paths.runs={tmp_path / 'again'}") == 0
    unbroken = [json.loads(line) for line in log.read_text().splitlines()]
    assert stopped == unbroken
    assert [step for _, step, _ in stopped] == list(range(12))
    epochs = [[value for epoch, _, sums in stopped if epoch == number for value in sums] for number in range(3)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert len(epochs[0]) == 400


def test_best_epoch_survives(runs, finished):
    """The best epoch lies before the kill: it is still there afterwards, with its weights."""
    reference = json.loads((finished(*DROPOUT) / "result.json").read_text())
    assert runs.in_child(at_step(11, kill), *DROPOUT) == -signal.SIGKILL
    outcome = runs.start(*DROPOUT)
    assert outcome.result["best"] == reference["best"]
    assert (outcome.folder / outcome.result["best"]["checkpoint"]).exists()


def test_a_flipped_bit_of_a_weight_is_no_checkpoint(tmp_path):
    """torch.load takes it: the archive's checksums are looked at first."""
    path = tmp_path / "epoch1-step2.ckpt"
    torch.save({"global_step": 2, "state_dict": {"weight": torch.ones(1000)}}, path)
    assert read_checkpoint(path)["global_step"] == 2
    content = bytearray(path.read_bytes())
    place = content.index(torch.ones(10).numpy().tobytes()) + 402
    content[place] ^= 0x40
    path.write_bytes(content)
    assert torch.load(path, weights_only=True)["state_dict"]["weight"].sum() != 1000
    with pytest.raises(RunError, match="is damaged"):
        read_checkpoint(path)
