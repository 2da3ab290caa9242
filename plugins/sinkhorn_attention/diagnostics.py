"""How far attention is from doubly stochastic: measures of a map, and a recorder of the maps of a running model."""

import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker

from .normalizers import Normalizer

#: Entries of the maps that the recorder makes at a time, a whole map at least.
CHUNK_ENTRIES = 1 << 22
#: The methods of a normalizer that make a map.
RECORDED = ("attend", "coupling", "from_scores")


class MarginalError(NamedTuple):
    """Largest absolute deviation of the row sums and of the column sums from their targets, each of shape (...)."""

    rows: Tensor
    columns: Tensor


class AttentionRecord(NamedTuple):
    """What is kept of one call of one layer, detached, in float32 at least, on the model's device.

    Attributes:
        column_sums: (..., m), 0 at masked keys.
        row_error: (...), largest deviation of a valid row's sum from 1.
        column_error: (...), largest deviation of a valid column's sum from n_valid / m_valid.
        entropy: (..., n), in nats, 0 at masked queries.
        query_mask: (..., n), the queries that take part: unmasked, with something to attend to.
        key_mask: (..., m), the keys that take part.
    """

    column_sums: Tensor
    row_error: Tensor
    column_error: Tensor
    entropy: Tensor
    query_mask: Tensor
    key_mask: Tensor


def column_sums(coupling: Tensor) -> Tensor:
    """What each key receives in all, (..., m), of a coupling (..., n, m); summed in float32 at least.

    1 everywhere for a square doubly stochastic map, anything from 0 to n for softmax (Sander et al. 2022, figure 2).
    """
    return _wide(coupling).sum(-2)


def attention_entropy(coupling: Tensor) -> Tensor:
    """Entropy in nats of each row, (..., n), of a coupling (..., n, m); from 0 (one key) to log m (uniform).

    Rows are divided by their sums first, which changes nothing where they sum to 1; an empty row gives 0.
    """
    coupling = _wide(coupling)
    law = coupling / coupling.sum(-1, keepdim=True).clamp(min=torch.finfo(coupling.dtype).tiny)
    return -torch.special.xlogy(law, law).sum(-1)


def marginal_error(coupling: Tensor, query_mask: Tensor | None = None, key_mask: Tensor | None = None) -> MarginalError:
    """Row and column marginal error of a coupling (..., n, m).

    Valid rows should sum to 1 and valid columns to n_valid / m_valid; masked ones are left out. Without a mask every
    row and column is valid, as `sinkhorn` leaves them where all scores are finite. Without any, the error is 0.

    Args:
        coupling: (..., n, m).
        query_mask: broadcastable to (..., n), True = the row takes part.
        key_mask: broadcastable to (..., m), True = the column takes part.

    Raises:
        ValueError: for a mask that is not boolean; an integer mask may mean either polarity.
    """
    for name, mask in (("query_mask", query_mask), ("key_mask", key_mask)):
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError(f"{name} must be boolean, True = takes part, got {mask.dtype}")
    coupling = _wide(coupling)
    row_sums, sums = coupling.sum(-1), coupling.sum(-2)
    rows = torch.ones_like(row_sums, dtype=torch.bool) if query_mask is None else query_mask.expand_as(row_sums)
    columns = torch.ones_like(sums, dtype=torch.bool) if key_mask is None else key_mask.expand_as(sums)
    target = rows.sum(-1, keepdim=True).to(coupling.dtype) / columns.sum(-1, keepdim=True).clamp(min=1)
    return MarginalError(_largest(row_sums - 1, rows), _largest(sums - target, columns))


def _wide(coupling: Tensor) -> Tensor:
    return coupling.to(torch.promote_types(coupling.dtype, torch.float32))


def _largest(error: Tensor, valid: Tensor) -> Tensor:
    """The largest absolute value among the valid entries of the last dimension, 0 where there is none."""
    error = torch.where(valid, error, 0.0).abs()
    return error.amax(-1) if error.shape[-1] else error.sum(-1)


@contextmanager
def record_attention(model: nn.Module) -> Iterator[dict[str, list[AttentionRecord]]]:
    """Records column sums, marginal errors and entropies of every attention layer while the model runs.

        with record_attention(model) as log:
            model(images)
        log["blocks.0.attn"][0].column_sums  # (batch, heads, tokens)

    Layers are the modules that hold a `Normalizer`: those of the suite, and those that a `convert` of the suite made,
    `convert(model, "softmax")` for a stock model. Outputs, gradients and random numbers are what they are without
    recording. Each call makes its map once more, without gradients and before dropout, a few heads at a time, and keeps
    the sums alone: recording costs time, and memory for one map of one head at most.

    A recomputation by torch.utils.checkpoint during backward is not recorded again. Contexts may be nested. What
    torch.compile has compiled runs uncompiled inside the context, where its outputs may differ in rounding.

    Args:
        model: any module.

    Yields:
        A dict with an entry for every layer, by module name in the order of the model: the list of its records, one for
        each call.

    Raises:
        ValueError: for a model without such a layer.
    """
    layers = _layers(model)
    log: dict[str, list[AttentionRecord]] = {name: [] for name in layers}
    # Importing torch._dynamo takes seconds, and before it is imported nothing can have been compiled.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    try:
        for name, normalizer in layers.items():
            _Recorder.of(normalizer).logs.append(log[name])
        with eager:
            yield log
    finally:
        for name, normalizer in layers.items():
            _Recorder.of(normalizer).remove(log[name])


def _layers(model: nn.Module) -> dict[str, Normalizer]:
    """The normalizers of a model by the name of the module that holds them; of nested ones, the outer."""
    found: dict[str, Normalizer] = {}
    for name, module in model.named_modules():
        if isinstance(module, Normalizer) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    if not found:
        raise ValueError(
            f"{type(model).__qualname__} has no attention that can be recorded; convert(model, 'softmax') makes a "
            "stock model's visible and keeps its results"
        )
    parents = [name.rpartition(".")[0] for name in found]
    names = [parent if parents.count(parent) == 1 else name for parent, name in zip(parents, found, strict=True)]
    return {name.removeprefix("_orig_mod."): found[full] for name, full in zip(names, found, strict=True)}


class _Recorder:
    """Stands before the methods of one normalizer and hands what it measures to every open log."""

    def __init__(self, normalizer: Normalizer) -> None:
        self.normalizer = normalizer
        self.logs: list[list[AttentionRecord]] = []
        self.state = threading.local()  # one thread's call must not hide another's
        self.before = {name: normalizer.__dict__.get(name) for name in RECORDED}
        self.methods: dict[str, Callable[..., Tensor]] = {name: getattr(normalizer, name) for name in RECORDED}
        for name in RECORDED:
            normalizer.__dict__[name] = _RecordedMethod(self, name)

    @classmethod
    def of(cls, normalizer: Normalizer) -> "_Recorder":
        """The recorder of this normalizer, a new one if there is none."""
        method = normalizer.__dict__.get(RECORDED[0])
        return method.recorder if isinstance(method, _RecordedMethod) else cls(normalizer)

    def remove(self, log: list[AttentionRecord]) -> None:
        """Closes a log; the last one leaves the normalizer as it was."""
        self.logs = [other for other in self.logs if other is not log]
        if self.logs:
            return
        for name, before in self.before.items():
            if before is None:
                del self.normalizer.__dict__[name]
            else:
                self.normalizer.__dict__[name] = before

    def record(self, name: str, result: Tensor, arguments: dict[str, Any]) -> None:
        """Measures the map of a call that has just been made."""
        masks = arguments.get("query_mask"), arguments.get("key_mask")
        if name == "attend":
            record = self.measure_in_chunks(arguments)
        else:
            record = _measure(result, arguments.get("attn_bias", arguments.get("scores")), *masks)
        for log in self.logs:
            log.append(record)

    def measure_in_chunks(self, arguments: dict[str, Any]) -> AttentionRecord:
        """The record of an `attend`, whose map was not kept: it is made once more, some matrices at a time."""
        query, key = arguments["query"], arguments["key"]
        lead, n, m = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]), query.shape[-2], key.shape[-2]
        tokens = [tensor.expand(*lead, *tensor.shape[-2:]) for tensor in (query, key)]
        bias = arguments.get("attn_bias")
        bias = None if bias is None else bias.expand(*lead, n, m)
        masks = [arguments.get("query_mask"), arguments.get("key_mask")]
        masks = [None if mask is None else mask.expand(*lead, mask.shape[-1]) for mask in masks]

        # A normalizer with parameters may have some for each head: only samples are then separated.
        split = lead[:1] if next(self.normalizer.parameters(), None) is not None else lead
        matrices = CHUNK_ENTRIES // max(n * m * lead[len(split) :].numel(), 1)
        record: AttentionRecord | None = None
        for part in _chunks(split, matrices):
            part_bias, *part_masks = (None if tensor is None else tensor[part] for tensor in (bias, *masks))
            coupling = self.methods["coupling"](
                *(tensor[part] for tensor in tokens),
                scale=arguments.get("scale"),
                attn_bias=part_bias,
                query_mask=part_masks[0],
                key_mask=part_masks[1],
            )
            measured = _measure(coupling, part_bias, *part_masks)
            if record is None:
                record = AttentionRecord(*(field.new_empty((*lead, *field.shape[len(lead) :])) for field in measured))
            for whole, field in zip(record, measured, strict=True):
                whole[part] = field
        assert record is not None
        return record


class _RecordedMethod:
    """A method of a normalizer, recorded. A copy of the normalizer, by deepcopy or pickle, gets the plain method."""

    tracker = ModuleTracker()

    def __init__(self, recorder: _Recorder, name: str) -> None:
        self.recorder = recorder
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        recorder, method = self.recorder, self.recorder.methods[self.name]
        # One method may call another; and backward runs a checkpointed layer a second time.
        if getattr(recorder.state, "busy", False) or self.tracker.is_bw:
            return method(*args, **kwargs)
        recorder.state.busy = True
        try:
            result = method(*args, **kwargs)
            with torch.no_grad():
                bound = inspect.signature(method).bind(*args, **kwargs).arguments
                recorder.record(self.name, result, {**bound, **bound.get("options", {})})
        finally:
            recorder.state.busy = False
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.recorder.normalizer, self.name)


def _chunks(lead: torch.Size, most: int) -> Iterator[tuple[slice, ...]]:
    """Slices that cover leading dimensions, each of at most `most` matrices, one at least."""
    if lead.numel() <= max(most, 1):
        yield ()
        return
    inner = lead[1:].numel()
    step = max(most // inner, 1)
    for start in range(0, lead[0], step):
        for rest in _chunks(lead[1:], most):
            yield (slice(start, start + step), *rest)


def _measure(
    coupling: Tensor, bias: Tensor | None, query_mask: Tensor | None, key_mask: Tensor | None
) -> AttentionRecord:
    """The record of a map; -inf or False in the bias, or in the scores, is no support."""
    if bias is None:
        support = torch.ones(1, dtype=torch.bool, device=coupling.device)
    else:
        support = bias if bias.dtype == torch.bool else bias != -math.inf
    support = support.expand_as(coupling)
    if query_mask is not None:
        support = support & query_mask.unsqueeze(-1)
    if key_mask is not None:
        support = support & key_mask.unsqueeze(-2)
    rows, columns = support.any(-1), support.any(-2)
    error = marginal_error(coupling, rows, columns)
    return AttentionRecord(column_sums(coupling), error.rows, error.columns, attention_entropy(coupling), rows, columns)
