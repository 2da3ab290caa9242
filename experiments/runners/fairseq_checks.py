"""What is refused before anything trains: options that fairseq would not heed, and sentences that do not fit."""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from fairseq import utils
from fairseq.dataclass import configs

from .fairseq_events import FairseqError

#: What all of fairseq's runs have in common. Most of it is set by the suite, or replaced by it (checkpoints, the choice
#: of the best epoch, the processes), and would change nothing here.
COMMON = {
    entry.name
    for section in ("Common", "DistributedTraining", "Dataset", "Optimization", "Checkpoint", "FairseqBMUF", "EMA")
    for entry in fields(getattr(configs, f"{section}Config"))
}
#: What of it a configuration may set.
HEEDED = {
    "all_gather_list_size",
    "data_buffer_size",
    "empty_cache_freq",
    "num_workers",
    "required_seq_len_multiple",
    "sentence_avg",
    "skip_remainder_batch",
    "update_ordered_indices_seed",
}
#: What of it is for precision fp16.
SCALING = {"amp_batch_retries", "amp_init_scale", "amp_scale_window", "min_loss_scale"}


def check_options(parser: ArgumentParser, cfg: Any, given: Mapping[str, str]) -> None:
    """Refuses options that would change nothing.

    Args:
        parser: fairseq's, for training.
        cfg: fairseq's configuration.
        given: the configuration's key of each option that it gives by fairseq's own name.

    Raises:
        FairseqError: naming the key.
    """
    for option, key in given.items():
        action = parser._option_string_actions.get(f"--{option}")
        if action is None or action.dest not in COMMON:
            continue
        if action.dest in SCALING:
            if not cfg.common.amp:
                raise FairseqError(f"{key} is for trainer.precision=fp16")
        elif action.dest not in HEEDED:
            raise FairseqError(f"{key}: --{option} is not for the suite's runs, which would not heed it")
        elif action.dest == "sentence_avg" and "sentence_avg" not in cfg.criterion:
            raise FairseqError(f"{key}: the criterion {cfg.criterion._name} does not heed it")


def check_generation(task: Any, model: Any, generation: Mapping[str, Any]) -> None:
    """Refuses settings of the translation that fairseq does not ask for.

    Raises:
        FairseqError: naming the key.
    """
    asked: set[str] = set()

    class Asked(Namespace):
        def __getattribute__(self, name: str) -> Any:
            asked.add(name)
            return super().__getattribute__(name)

    task.build_generator([model], Asked(**generation))
    for key in generation:
        if key not in asked:
            raise FairseqError(f"data.generation.{key}: fairseq knows no such setting of a translation")


def check_lengths(task: Any, model: Any, cfg: Any, test: bool, eval_max_tokens: int | None) -> dict[str, Any]:
    """Loads the splits and looks for sentences that are too long.

    Args:
        task: fairseq's.
        model: of the run.
        cfg: fairseq's configuration.
        test: whether the split "test" is evaluated as well.
        eval_max_tokens: of a batch of an evaluation.

    Returns:
        how many training sentences fairseq will leave out (`count`), of how many (`of`), and `why`.

    Raises:
        FairseqError: where a sentence that is evaluated is too long, or none is left to train on.
    """
    positions = utils.resolve_max_positions(task.max_positions(), model.max_positions())
    two = isinstance(positions, tuple | list)
    keys = "data.max_source_positions and data.max_target_positions" if two else "data.max_positions"
    reads = " and ".join(map(str, positions)) if two else positions
    for split in dict.fromkeys([*cfg.dataset.valid_subset.split(","), *(["test"] if test else [])]):
        task.load_dataset(split)
        dataset = task.dataset(split)
        count, longest = _too_long(dataset, positions)
        if count:
            raise FairseqError(
                f"{count:,} of {len(dataset):,} sentences of the split {split} are longer than the {reads} tokens that "
                f"the model reads (the longest has {longest:,}): raise {keys}"
            )
        count, longest = _too_long(dataset, utils.resolve_max_positions(positions, eval_max_tokens))
        if count:
            raise FairseqError(
                f"{count:,} of {len(dataset):,} sentences of the split {split} do not fit into a batch of "
                f"{eval_max_tokens:,} tokens (the longest has {longest:,}): raise data.eval_max_tokens"
            )
    split = cfg.dataset.train_subset
    task.load_dataset(split, combine=True, epoch=1)
    dataset = task.dataset(split)
    count, longest = _too_long(dataset, utils.resolve_max_positions(positions, cfg.dataset.max_tokens))
    beyond, _ = _too_long(dataset, positions)
    limits = [
        *([f"the {reads} tokens that the model reads ({keys})"] if beyond else []),
        *([f"data.max_tokens={cfg.dataset.max_tokens}"] if count > beyond else []),
    ]
    why = f"longer than {' or '.join(limits)}; the longest has {longest:,} tokens"
    if count == len(dataset):
        raise FairseqError(f"all {count:,} training sentences are {why}")
    return {"count": count, "of": len(dataset), "why": why}


def _too_long(dataset: Any, positions: Any) -> tuple[int, int]:
    """How many sentences are beyond the limits, and the tokens of the longest of these."""
    _, left = dataset.filter_indices_by_size(dataset.ordered_indices(), positions)
    return len(left), max((int(np.max(dataset.size(index))) for index in left), default=0)
