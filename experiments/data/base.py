"""What the training loop asks of a data set: hashed splits, and loaders whose order depends on (seed, epoch) alone."""

import hashlib
import io
import shlex
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from ..files import write_atomic
from ..seeding import generator

SPLITS = ("train", "val", "test")
Batch = tuple[Tensor, ...]


class SampleKey(NamedTuple):
    """What decides a sample of a batch, its augmentation included."""

    sample: int
    seed: int
    epoch: int


class Borrowed(list[SampleKey]):
    """The share of a rank that a batch has no sample left for: one of another rank, which is not to be counted."""


class BatchSampler(Sampler[list[SampleKey]]):
    """Batches of sample keys, split over the ranks.

    Every rank sees the same global batches and takes every world_size-th sample of each, so that the number of devices
    changes neither the batches nor the number of steps. A rank that a small last batch leaves without a sample borrows
    one (`Borrowed`), since all ranks compute together.

    Args:
        size: number of samples.
        batch_size: samples of a batch over all ranks together; the last batch of an epoch may be smaller.
        seed: the run's seed.
        shuffle: a new order each epoch, from (seed, epoch); otherwise 0, 1, 2, ...
        rank: this process.
        world_size: number of processes.
        drop_trailing: leaves out the batch that reaches the end, even a full one, as the published ModelNet40 code
            does.

    Raises:
        ValueError: where that leaves no batch.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = False,
        rank: int = 0,
        world_size: int = 1,
        drop_trailing: bool = False,
    ) -> None:
        if drop_trailing and size <= batch_size:
            raise ValueError(f"drop_trailing leaves nothing of {size} samples in batches of {batch_size}")
        self.size, self.batch_size, self.seed, self.shuffle = size, batch_size, seed, shuffle
        self.rank, self.world_size, self.drop_trailing = rank, world_size, drop_trailing
        self.epoch = 0
        self._start = (0, 0)

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next pass is of, from 0 (Lightning's name for it)."""
        self.epoch = epoch

    def start_at(self, epoch: int, batch: int) -> None:
        """Goes to a batch in the middle of an epoch; later epochs are whole."""
        self.epoch, self._start = epoch, (epoch, batch)

    def samples(self, batch: int) -> int:
        """Samples of a batch of the epoch, over all ranks."""
        return min(self.batch_size, self.size - batch * self.batch_size)

    def samples_of_step(self, batch: int, batches: int) -> int:
        """Samples of the step that a batch is part of: a step has so many batches, an epoch's last perhaps fewer."""
        first = batch - batch % batches
        return sum(self.samples(number) for number in range(first, min(first + batches, len(self))))

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return (self.size - 1) // self.batch_size + (not self.drop_trailing)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        epoch, (start_epoch, start) = self.epoch, self._start
        order = list(range(self.size))
        if self.shuffle:
            order = torch.randperm(self.size, generator=generator("shuffle", self.seed, epoch)).tolist()
        for batch in range(start if epoch == start_epoch else 0, len(self)):
            whole = order[batch * self.batch_size : (batch + 1) * self.batch_size]
            mine = [SampleKey(index, self.seed, epoch) for index in whole[self.rank :: self.world_size]]
            yield mine or Borrowed([SampleKey(whole[0], self.seed, epoch)])


class Shares(Dataset[Batch]):
    """Batches of a data set by what a `BatchSampler` gives; those that are borrowed have inputs and no labels."""

    def __init__(self, dataset: "Dataset[Batch]") -> None:
        self.dataset = dataset

    def __getitem__(self, keys: list[SampleKey]) -> Batch:
        *inputs, labels = self.dataset[keys]
        return (*inputs, labels[:0] if isinstance(keys, Borrowed) else labels)


class DataModule(ABC):
    """A data set in splits.

    Subclasses set `name`, `num_classes` and implement `dataset`; a dataset is asked for whole batches, by a list of
    `SampleKey`, and gives a tuple whose last entry is the labels (B,) and whose others are the model's inputs.

    Args:
        batch_size: training samples of a step, over all devices together.
        eval_batch_size: samples of an evaluation step.
        num_workers: processes that load, 0 for none; changes nothing but speed.
        train_on: the splits that are trained on.
        drop_trailing: leaves out the batch that reaches the end of a split: see `BatchSampler`.
    """

    name: str
    num_classes: int
    #: The epoch, from 0, that an evaluation apart from training is of, where evaluation draws random numbers.
    evaluation_epoch: int = 0

    def __init__(
        self,
        batch_size: int,
        eval_batch_size: int,
        num_workers: int = 0,
        train_on: Sequence[str] = ("train",),
        drop_trailing: bool = False,
    ) -> None:
        for key, value, least in (
            ("batch_size", batch_size, 1),
            ("eval_batch_size", eval_batch_size, 1),
            ("num_workers", num_workers, 0),
        ):
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{key} must be an integer of at least {least}; got {value}")
        if not train_on or not set(train_on) <= set(SPLITS):
            raise ValueError(f"train_on must list splits out of {', '.join(SPLITS)}; got {train_on}")
        self.batch_size, self.eval_batch_size, self.num_workers = batch_size, eval_batch_size, num_workers
        self.train_on, self.drop_trailing = tuple(train_on), drop_trailing

    @abstractmethod
    def dataset(self, splits: Sequence[str], augment: bool = False) -> "Dataset[Batch]":
        """The samples of some splits, one after the other; augmented for training where the data set has that."""

    @property
    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Samples of each split."""

    @property
    @abstractmethod
    def split_hash(self) -> str:
        """Hash of what lies in which split; equal exactly where runs saw the same samples in the same splits."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of their numbers."""
        return tuple(map(str, range(self.num_classes)))

    def facts(self) -> dict[str, Any]:
        """What the run card, the checkpoints and the result say of the data."""
        return {
            "name": self.name,
            "split_hash": self.split_hash,
            "sizes": self.sizes,
            "classes": list(self.classes),
        }

    def train_loader(self, seed: int, rank: int = 0, world_size: int = 1) -> "DataLoader[Batch]":
        """Batches to train on; its `sampler` is a `BatchSampler`."""
        return self._loader(self.dataset(self.train_on, augment=True), self.train_sampler(seed, rank, world_size))

    def train_sampler(self, seed: int, rank: int = 0, world_size: int = 1) -> BatchSampler:
        """Which samples the batches to train on have."""
        size = sum(self.sizes[split] for split in self.train_on)
        return BatchSampler(size, self.batch_size, seed, True, rank, world_size, self.drop_trailing)

    def eval_loader(self, split: str, rank: int = 0, world_size: int = 1) -> "DataLoader[Batch]":
        """Batches of a split in its own order, every sample once, or, with `drop_trailing`, all but the last batch."""
        sampler = BatchSampler(self.sizes[split], self.eval_batch_size, 0, False, rank, world_size, self.drop_trailing)
        return self._loader(self.dataset([split]), sampler)

    def _loader(self, dataset: "Dataset[Batch]", sampler: BatchSampler) -> "DataLoader[Batch]":
        return DataLoader(
            Shares(dataset),
            batch_size=None,
            sampler=sampler,
            collate_fn=_as_it_is,  # type: ignore[arg-type]  # batches come whole from the dataset
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )


def other_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """What tells data from those of before, in words; None where they are the same.

    Args:
        before: the facts of a run's data. Old runs name no classes.
        now: the facts of the data at hand.
    """
    if before.get("name", now["name"]) != now["name"]:
        return f"{now['name']}, not {before['name']}"
    classes = before.get("classes", now["classes"])
    if len(classes) != len(now["classes"]):
        return f"{len(now['classes'])} classes, not {len(classes)}"
    for number, (old, new) in enumerate(zip(classes, now["classes"], strict=True)):
        if old != new:
            return f"class {number} is {new!r}, not {old!r}"
    if before["split_hash"] != now["split_hash"]:
        return f"their splits have the hash {now['split_hash'][:12]}, not {before['split_hash'][:12]}"
    return None


def _as_it_is(batch: Batch) -> Batch:
    return batch


def stratified_split(labels: np.ndarray, held_out: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
    """Sorted indices of "train" and of every held-out split, each class in its share of the whole.

    Args:
        labels: (n,) integer classes.
        held_out: samples of each split but "train", which gets the rest.
        seed: of the choice.

    Raises:
        ValueError: where less than one sample would be left to train on.
    """
    if any(size < 0 for size in held_out.values()) or sum(held_out.values()) >= len(labels):
        raise ValueError(f"cannot hold out {dict(held_out)} of {len(labels)} samples: nothing is left to train on")
    rng = np.random.default_rng([seed, 0])
    classes, counts = np.unique(labels, return_counts=True)
    pools = {label: list(rng.permutation(np.flatnonzero(labels == label))) for label in classes}
    parts: dict[str, list[int]] = {}
    for name, size in held_out.items():
        exact = counts * (size / len(labels))
        share = np.floor(exact).astype(int)
        # The samples that whole shares leave over go to the classes with the largest remainders.
        for place in np.argsort(-(exact - share), kind="stable")[: size - share.sum()]:
            share[place] += 1
        parts[name] = [pools[label].pop() for label, number in zip(classes, share, strict=True) for _ in range(number)]
    parts["train"] = [index for pool in pools.values() for index in pool]
    return {name: np.sort(np.asarray(indices, dtype=np.int64)) for name, indices in parts.items()}


def hash_arrays(arrays: Mapping[str, np.ndarray]) -> str:
    """sha256 of named arrays: names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        digest.update(f"{name} {little.dtype.str} {little.shape};".encode())
        digest.update(little.tobytes())
    return digest.hexdigest()


def data_folder(folder: str | Path) -> Path:
    """The folder of all data; the default one, `data` in the current folder, is made where it is missing.

    Raises:
        FileNotFoundError: for any other folder that is not there.
    """
    path = Path(folder)
    if path == Path("data"):
        path.mkdir(exist_ok=True)
    if not path.is_dir():
        raise FileNotFoundError(
            f"the data folder paths.data={folder} is not there: make it, or correct the path (the default is data)"
        )
    return path


def prepare_command(data_set: str, folder: str | Path, more: str = "") -> str:
    """The command that prepares a data set in the folder in which it was looked for."""
    where = "" if Path(folder) == Path("data") else f" --folder {shlex.quote(str(folder))}"
    return f"python -m experiments.data.prepare {data_set}{more}{where}"


def cached(path: Path, build: Callable[[], Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Arrays that are built once and kept in `path` (.npz); its name must tell all options of `build`.

    One process builds while others wait; a file is complete or not there, and one that cannot be read is built anew.
    """
    with FileLock(path.with_name(f".{path.name}.lock")):
        if path.is_file():
            try:
                with np.load(path, allow_pickle=False) as stored:
                    return {name: stored[name] for name in stored.files}
            except (OSError, ValueError, EOFError, zipfile.BadZipFile):
                path.unlink()
        arrays = dict(build())
        buffer = io.BytesIO()
        np.savez(buffer, **arrays)  # type: ignore[arg-type]
        write_atomic(path, buffer.getbuffer())
        return arrays
