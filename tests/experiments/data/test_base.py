import multiprocessing
import os
import signal

import numpy as np
import pytest
import torch

from experiments.data import base
from experiments.data.base import BatchSampler, SampleKey, cached, stratified_split
from experiments.data.images import ImageData


def samples(sampler):
    return [[key.sample for key in batch] for batch in sampler]


def test_an_epoch_has_every_sample_once_in_an_order_of_its_own():
    sampler = BatchSampler(10, 3, seed=5, shuffle=True)
    orders = []
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert [len(batch) for batch in batches] == [3, 3, 3, 1]
        assert len(sampler) == 4
        assert sorted(key.sample for batch in batches for key in batch) == list(range(10))
        assert {(key.seed, key.epoch) for batch in batches for key in batch} == {(5, epoch)}
        orders.append(batches)
    assert samples(orders[0]) != samples(orders[1])


def test_order_depends_on_seed_and_epoch_alone():
    def order(seed, epoch, before=0):
        sampler = BatchSampler(100, 7, seed, True)
        for number in range(before):
            sampler.set_epoch(number)
            list(sampler)
        torch.manual_seed(before)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(1, 4) == order(1, 4, before=4)
    assert order(1, 4) != order(2, 4)


def test_without_shuffling():
    assert samples(BatchSampler(5, 2)) == [[0, 1], [2, 3], [4]]


def test_the_trailing_batch_is_left_out_even_where_it_is_full():
    """ModelNet40 in the published code: 2,432 of the 2,468 test meshes; of 128 in batches of 64 it takes one batch."""
    for size, batches in ((2468, 38), (2433, 38), (2432, 37), (128, 1), (65, 1)):
        sampler = BatchSampler(size, 64, drop_trailing=True)
        assert [len(batch) for batch in sampler] == [64] * batches
        assert len(sampler) == batches
    with pytest.raises(ValueError, match="drop_trailing leaves nothing of 64 samples in batches of 64"):
        BatchSampler(64, 64, drop_trailing=True)


def test_start_in_the_middle():
    whole = BatchSampler(20, 3, 1, True)
    whole.set_epoch(2)
    sampler = BatchSampler(20, 3, 1, True)
    sampler.start_at(2, 4)
    assert list(sampler) == list(whole)[4:]
    assert len(sampler) == len(whole) == 7
    sampler.set_epoch(3)
    assert len(list(sampler)) == 7
    sampler.start_at(3, 7)
    assert list(sampler) == []


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_batches_of_one_device(world_size):
    alone = samples(BatchSampler(20, 6, 1, True))
    shared = [samples(BatchSampler(20, 6, 1, True, rank, world_size)) for rank in range(world_size)]
    assert {len(batches) for batches in shared} == {len(alone)}
    for number, batch in enumerate(alone):
        parts = [batches[number] for batches in shared]
        own = parts[: len(batch)]  # further ranks borrow the first sample
        assert sorted(sample for part in own for sample in part) == sorted(batch)
        assert max(map(len, own)) - min(map(len, own)) <= 1
        assert parts[len(batch) :] == [batch[:1]] * (world_size - len(own))


def test_a_stratified_split_is_one():
    labels = np.repeat(np.arange(4), [40, 40, 10, 30])
    parts = stratified_split(labels, {"test": 30, "val": 13}, seed=0)
    assert {name: len(part) for name, part in parts.items()} == {"test": 30, "val": 13, "train": 77}
    assert sorted(np.concatenate(list(parts.values()))) == list(range(120))
    np.testing.assert_array_equal(np.bincount(labels[parts["test"]]), [10, 10, 3, 7])
    again, other = stratified_split(labels, {"test": 30, "val": 13}, 0), stratified_split(labels, {"test": 30}, 1)
    np.testing.assert_array_equal(parts["test"], again["test"])
    assert not np.array_equal(parts["test"], other["test"])


def test_no_split_without_training_samples():
    with pytest.raises(ValueError, match="nothing is left to train on"):
        stratified_split(np.zeros(10, int), {"test": 6, "val": 4}, 0)


def images(max_shift=3, num_workers=0, **changes):
    rng = np.random.default_rng(0)
    sizes = {"train": 50, "val": 20, "test": 30}
    pictures = {split: rng.integers(0, 256, (size, 28, 28), dtype=np.uint8) for split, size in sizes.items()}
    labels = {split: rng.integers(0, 10, size, dtype=np.uint8) for split, size in sizes.items()}
    settings = {"mean": 0.1307, "std": 0.3081, "batch_size": 8, "eval_batch_size": 7, "train_on": ["train"]}
    return ImageData(pictures, labels, max_shift=max_shift, num_workers=num_workers, **{**settings, **changes})


def epoch_of(data, number, seed=3):
    loader = data.train_loader(seed)
    loader.sampler.set_epoch(number)
    return [torch.cat(parts) for parts in zip(*loader, strict=True)]


def test_workers_change_nothing():
    alone, helped = epoch_of(images(), 1), epoch_of(images(num_workers=2), 1)
    for ours, theirs in zip(alone, helped, strict=True):
        assert torch.equal(ours, theirs)


def test_augmentation_depends_on_seed_epoch_and_sample_alone():
    data = images()
    dataset = data.dataset(["train"], augment=True)
    key = SampleKey(5, 3, 1)
    alone, among = dataset[[key]][0], dataset[[SampleKey(1, 3, 1), key]][0][1:]
    assert torch.equal(alone, among)
    torch.manual_seed(99)
    assert torch.equal(alone, dataset[[key]][0])
    shifted = {tuple(dataset[[SampleKey(5, 3, epoch)]][0].flatten().tolist()) for epoch in range(8)}
    assert len(shifted) > 4
    assert not torch.equal(alone, dataset[[SampleKey(5, 4, 1)]][0])


def test_a_shift_moves_the_picture():
    data = images(max_shift=2, mean=0.0, std=1.0)
    plain = data.dataset(["train"])[[SampleKey(0, 0, 0)]][0][0, 0]
    shifted = data.dataset(["train"], augment=True)[[SampleKey(0, 0, 0)]][0][0, 0]
    padded = torch.nn.functional.pad(plain, [2] * 4)
    windows = [padded[top : top + 28, left : left + 28] for top in range(5) for left in range(5)]
    assert sum(torch.equal(window, shifted) for window in windows) == 1


def test_evaluation_is_not_augmented_and_in_order():
    data = images()
    inputs, labels = [torch.cat(parts) for parts in zip(*data.eval_loader("val"), strict=True)]
    expected = (torch.from_numpy(data.images["val"]).float() / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(inputs[:, 0], expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(labels.numpy(), data.labels["val"])
    assert inputs.shape == (20, 1, 28, 28)


def test_trained_on_two_splits():
    data = images(train_on=["train", "val"])
    _, labels = epoch_of(data, 0)
    assert sorted(labels.tolist()) == sorted([*data.labels["train"], *data.labels["val"]])


def test_the_split_hash_is_of_what_lies_where():
    plain = images()
    assert plain.split_hash == images(batch_size=3, max_shift=0, num_workers=1).split_hash
    moved = images()
    moved.images = {**plain.images, "train": plain.images["train"][::-1]}
    assert moved.split_hash != plain.split_hash
    swapped = images()
    swapped.images = {**plain.images, "val": plain.images["test"], "test": plain.images["val"]}
    swapped.labels = {**plain.labels, "val": plain.labels["test"], "test": plain.labels["val"]}
    assert swapped.split_hash != plain.split_hash


# What is prepared and kept: one writer, whole files, no stale ones.


def _build_slowly(log):
    with open(log, "a") as file:
        file.write("built\n")
    return {"values": np.arange(1000)}


def _get(folder, start, results):
    start.wait(60)
    results.put(int(cached(folder / "a.npz", lambda: _build_slowly(folder / "log"))["values"].sum()))


def test_four_processes_on_an_empty_cache(tmp_path):
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    processes = [context.Process(target=_get, args=(tmp_path, start, results)) for _ in range(4)]
    for process in processes:
        process.start()
    start.set()
    assert [results.get(timeout=60) for _ in processes] == [499500] * 4
    for process in processes:
        process.join()
    assert (tmp_path / "log").read_text() == "built\n"


def _die_half_way(folder):
    def half(file, **arrays):
        file.write(b"PK half a file")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    base.np.savez = half
    cached(folder / "a.npz", lambda: {"values": np.arange(3)})


def test_a_process_killed_while_it_writes(tmp_path):
    process = multiprocessing.get_context("fork").Process(target=_die_half_way, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "a.npz").exists()
    np.testing.assert_array_equal(cached(tmp_path / "a.npz", lambda: {"values": np.arange(3)})["values"], [0, 1, 2])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".a.npz.lock", "a.npz"]


@pytest.mark.parametrize("damage", [b"", b"garbage", b"PK\x03\x04"])
def test_a_damaged_cache_is_built_anew(tmp_path, damage):
    (tmp_path / "a.npz").write_bytes(damage)
    np.testing.assert_array_equal(cached(tmp_path / "a.npz", lambda: {"values": np.arange(3)})["values"], [0, 1, 2])


def test_a_folder_that_is_not_there(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="is not there: make it, or correct the path"):
        base.data_folder(tmp_path / "nowhere")
    monkeypatch.chdir(tmp_path)
    assert base.data_folder("data").is_dir()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 0}, "batch_size must be an integer of at least 1; got 0"),
        ({"eval_batch_size": 2.5}, "eval_batch_size must be an integer"),
        ({"num_workers": -1}, "num_workers must be an integer of at least 0; got -1"),
        ({"train_on": []}, "train_on must list splits"),
        ({"train_on": ["dev"]}, "train_on must list splits"),
        ({"max_shift": -1}, "max_shift must be 0 or more pixels; got -1"),
        ({"std": 0}, "std must be positive; got 0"),
    ],
)
def test_bad_arguments(changes, words):
    with pytest.raises(ValueError, match=words):
        images(**changes)
