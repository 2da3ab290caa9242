"""Every rank has its share of each batch: nothing is lost or counted twice, and a step is that of one device."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from experiments.config import compose, resolve
from experiments.data.base import BatchSampler, Borrowed, Shares
from experiments.data.clouds import CloudArrays
from experiments.data.images import ImageArrays
from experiments.data.photos import PhotoBatches
from experiments.errors import RunError
from experiments.runners import lightning
from experiments.runners.classifier import Classifier
from experiments.runners.run_dir import RunDir

WORLDS = range(1, 65)
# Three batches and the last one of three experiments, of 27, 16 and 27 samples; and one of a single sample.
SIZES = {
    "modelnet40_set": (3 * 64 + 27, 64),
    "cats_dogs_vit": (3 * 64 + 16, 64),
    "modelnet40_pct": (3 * 32 + 27, 32),
    "one": (3 * 64 + 1, 64),
}


def datasets(size):
    """One of each class of data sets; the labels are the numbers of the samples."""
    labels, rng = np.arange(size), np.random.default_rng(0)
    pixels = rng.integers(0, 256, (size, 8, 8, 3), dtype=np.uint8)
    points = rng.normal(size=(size, 6, 3)).astype(np.float32)
    return {
        "images": ImageArrays(pixels[..., 0], labels, 0.0, 1.0, 2),
        "clouds": CloudArrays(points, np.zeros((size, 3)), np.ones(size), labels, num_points=5, training=True),
        "photos": PhotoBatches(pixels, np.arange(size), labels, [0.0] * 3, [1.0] * 3),
    }


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_nothing_is_lost_on_1_to_64_ranks(sizes):
    size, batch_size = sizes
    alone = [[key.sample for key in batch] for batch in BatchSampler(size, batch_size, 1, True)]
    borrowing = 0
    for world in WORLDS:
        shares = [list(BatchSampler(size, batch_size, 1, True, rank, world)) for rank in range(world)]
        assert {len(batches) for batches in shares} == {len(alone)}
        for number, whole in enumerate(alone):
            parts = [batches[number] for batches in shares]
            counted = [key.sample for part in parts if not isinstance(part, Borrowed) for key in part]
            assert sorted(counted) == sorted(whole)
            assert all(part for part in parts)
            assert all(key.sample in whole for part in parts for key in part)
        borrowing += any(isinstance(part, Borrowed) for part in parts)
    last = size % batch_size or batch_size
    assert borrowing == 64 - last


@pytest.mark.parametrize("kind", ["images", "clouds", "photos"])
@pytest.mark.parametrize("left", [1, 3, 16, 27, 64])
def test_the_last_batch_of_every_data_set_on_1_to_64_ranks(kind, left):
    size = 64 + left
    shared = Shares(datasets(size)[kind])
    for world in WORLDS:
        counted = []
        for rank in range(world):
            sampler = BatchSampler(size, 64, 1, True, rank, world)
            assert (sampler.samples(0), sampler.samples(1)) == (64, left)
            inputs, labels = shared[list(sampler)[1]]
            assert len(inputs) == max(len(labels), 1)
            counted += labels.tolist()
        assert sorted(counted) == sorted(key.sample for key in list(BatchSampler(size, 64, 1, True))[1])


class Numbers(torch.utils.data.Dataset):
    """Samples of float64, of three classes."""

    def __init__(self, size):
        self.inputs = torch.randn(size, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def __getitem__(self, keys):
        rows = torch.tensor([key.sample for key in keys])
        return self.inputs[rows], rows % 3


def steps(size, batch_size, batches, world):
    """The gradient of each step, summed over batches and averaged over ranks as the trainer does, and the mean loss."""
    model = nn.Linear(4, 3).double()
    torch.nn.init.ones_(model.weight)
    torch.nn.init.zeros_(model.bias)
    module = Classifier(model, 3, 0, torch.optim.SGD, None, "batches")
    found, metrics = [], []
    for rank in range(world):
        one = copy.deepcopy(module)
        sampler = BatchSampler(size, batch_size, 1, True, rank, world)
        loader = torch.utils.data.DataLoader(Shares(Numbers(size)), batch_size=None, sampler=sampler)
        one.trainer = SimpleNamespace(train_dataloader=loader, world_size=world, accumulate_grad_batches=batches)
        gradients = []
        for number, batch in enumerate(loader):
            (one.training_step(batch, number) / batches).backward()
            if (number + 1) % batches == 0 or number + 1 == len(sampler):
                gradients.append(one.model.weight.grad / world)
                one.model.zero_grad()
        found.append(torch.stack(gradients))
        metrics.append(one.training_metrics.loss)
    total = sum(float(metric.total) for metric in metrics) / sum(float(metric.weight) for metric in metrics)
    return sum(found), total


@pytest.mark.parametrize("world", [1, 2, 3, 8, 28, 60])
def test_a_step_is_that_of_one_device(world):
    size, batch_size = 2 * 64 + 27, 64
    alone, loss = steps(size, batch_size, 1, 1)
    shared, same = steps(size, batch_size, 1, world)
    torch.testing.assert_close(shared, alone, rtol=0, atol=1e-14)
    assert same == pytest.approx(loss, rel=1e-6)  # the mean over batches is that of whole batches


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_accumulated_batches_are_one_large_batch(world):
    """155 samples in steps of 60: four batches of 15, four more, and of the last step 15, 15 and 5."""
    alone, _ = steps(155, 60, 1, 1)
    summed, _ = steps(155, 15, 4, world)
    assert len(alone) == len(summed) == 3
    torch.testing.assert_close(summed, alone, rtol=0, atol=1e-14)


def prepared(overrides):
    config = resolve(compose([*overrides, "logger=none", "trainer.accelerator=cpu"]))
    return lightning.prepare(config, RunDir.of(config))


def test_a_batch_that_is_smaller_than_the_processes_is_refused(runs):
    with pytest.raises(RunError, match=r"data\.batch_size=2 is divided among 3 processes"):
        prepared(runs.overrides("data.batch_size=2", "trainer.devices=3", "trainer.strategy=ddp"))
    assert not runs.folders()


def normalised(runs, *more):
    return runs.overrides("model._target_=tests.experiments.normalised.model", *more)


def test_one_sample_left_over_with_batch_normalisation_is_refused(runs):
    """400 digits in batches of 57: the eighth batch holds one."""
    message = (
        r"batch normalisation, and an epoch's last batch holds 1 of 400 samples \(data\.batch_size=57\), which has no"
    )
    with pytest.raises(RunError, match=message):
        prepared(normalised(runs, "data.batch_size=57"))
    assert not runs.folders()
    prepared(normalised(runs, "data.batch_size=58"))
    prepared(runs.overrides("data.batch_size=57"))  # a model without
