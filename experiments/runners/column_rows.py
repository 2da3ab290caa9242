"""What the lines of column_sums.jsonl say, measured on a model; `columns` tells what that is. Needs torch alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from sinkhorn_attention.diagnostics import AttentionRecord, record_attention
from torch import nn

#: The most numbers of a line's `column_sums`.
QUANTILES = 64
Row = dict[str, Any]


def evenly_spaced(samples: int, size: int) -> list[int]:
    """So many indices of a split, evenly spaced over it, or all: the recorded samples, the same in every run."""
    return np.linspace(0, size - 1, min(samples, size)).round().astype(int).tolist()


def due(epoch: int, every: int, last: int) -> bool:
    """Whether an epoch is recorded: 0, every so many, and the last."""
    return epoch % every == 0 or epoch == last


def column_rows(model: nn.Module, forward: Callable[[], Any], epoch: int, step: int) -> list[Row]:
    """The lines of one epoch; the model is put into evaluation mode for it and left as it was, random numbers too.

    Args:
        model: whatever holds the attention layers (`sinkhorn_attention.record_attention` finds them).
        forward: runs the model on the recorded samples.
        epoch: finished epochs.
        step: optimizer steps.

    Raises:
        ValueError: for a model without attention that can be recorded.
    """
    with _as_it_was(model), torch.no_grad(), record_attention(model) as log:
        forward()
    rows = []
    for layer, records in log.items():
        for call, record in enumerate(records):
            name = layer if len(records) == 1 else f"{layer}#{call}"
            rows.append({"epoch": epoch, "step": step, "layer": name, **summarize(record)})
    return rows


def summarize(record: AttentionRecord, quantiles: int = QUANTILES) -> dict[str, Any]:
    """`n_tokens`, `column_sums`, `deviation`, `row_error` and `column_error` of one record, as the module says.

    Maps without a key that takes part are left out.
    """
    keys = record.key_mask.sum(-1)
    kept = keys > 0
    keys, valid = keys[kept], record.key_mask[kept]
    if not len(keys):
        return {"n_tokens": 0, "column_sums": [], "deviation": 0.0, "row_error": 0.0, "column_error": 0.0}
    target = record.query_mask.sum(-1)[kept].double() / keys
    sums = record.column_sums[kept].double() / target.unsqueeze(-1)
    deviation = (sums - 1).abs().masked_fill(~valid, 0.0).sum(-1) / keys
    # Masked keys sort behind all others; quantiles are taken of the valid beginning of each map.
    ordered = sums.masked_fill(~valid, torch.inf).sort(-1).values
    count = min(quantiles, ordered.shape[-1])
    place = torch.linspace(0, 1, count, dtype=torch.float64, device=sums.device) * (keys - 1).unsqueeze(-1)
    below = place.floor().long()
    above = torch.minimum(below + 1, (keys - 1).unsqueeze(-1))
    low, high = ordered.gather(-1, below), ordered.gather(-1, above)
    curve = (low + (place - below) * (high - low)).mean(0)
    numbers = torch.stack(
        [
            keys.double().mean(),
            deviation.mean(),
            record.row_error[kept].double().mean(),
            (record.column_error[kept].double() / target).mean(),
        ]
    )
    tokens, *found = torch.cat([numbers, curve]).tolist()
    mean_deviation, row_error, column_error, *column_sums = map(_short, found)
    return {
        "n_tokens": int(tokens) if tokens.is_integer() else _short(tokens),
        "column_sums": column_sums,
        "deviation": mean_deviation,
        "row_error": row_error,
        "column_error": column_error,
    }


def _short(value: float) -> float:
    """As the shortest decimal that names its float32."""
    return float(str(np.float32(value)))


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while; every module's own mode and the random numbers are those of before afterwards."""
    modes = {module: module.training for module in model.modules()}
    devices = {tensor.device.index for tensor in model.parameters() if tensor.device.type == "cuda"}
    model.eval()
    try:
        with torch.random.fork_rng(devices=sorted(device for device in devices if device is not None)):
            yield
    finally:
        for module, training in modes.items():
            module.training = training
