"""`python -m experiments.benchmarks estimate`: what a training step of the suite's models might take on two GPUs.

An estimate, not a measurement: no GPU was at hand. What a step does is counted on the CPU: of the model with softmax
the products, the bytes that its other operations move, and its kernels; of attention the same, by how it is computed.
Then a GPU of a data sheet's speed does products and exponentials at half of what the sheet says, moves four fifths of
its bytes a second, and takes no less than its launches, one after the other. Products are in bfloat16, all else in
float32.
"""

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Console
from sinkhorn_attention.engines.portable import DEVICE_CHUNK_BYTES
from sinkhorn_attention.engines.problem import Problem
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from .counts import COUNTS, NO_KERNELS, count_portable
from .results import show_table
from .steps import MODELS, build, recorded_calls

#: Samples of a step; the models are counted with fewer, to which all counts are proportional.
BATCH, COUNTED_BATCH = 64, 16
#: Seconds of the host for a kernel of torch's and for one of Triton's, which Python launches.
LAUNCH_S, TRITON_LAUNCH_S = 6e-6, 15e-6
#: Shares of the data sheet's numbers that are reached.
OF_PRODUCTS, OF_EXPONENTIALS, OF_BYTES = 0.5, 0.5, 0.8
#: Kernels and passes of one call forward and backward on a device before the portable engine left the log domain there.
BEFORE = {1: (105, 90), 3: (225, 186), 5: (344, 282), 21: (1296, 1050)}
WAYS = ("softmax", "before", "portable", "triton")
HEADER = ("GPU", "model", "half-steps", *(f"{way}, ms" for way in WAYS), "triton / softmax", "before / softmax")


@dataclass(frozen=True)
class Gpu:
    """Of a data sheet: products a second in bfloat16 (two operations each), exponentials and bytes a second."""

    name: str
    operations: float
    exponentials: float
    bytes: float


#: Exponentials: 16 for each clock and multiprocessor.
GPUS = (
    Gpu("A100 80 GB", 312e12, 108 * 1.41e9 * 16, 2.0e12),
    Gpu("H100 SXM", 989e12, 132 * 1.83e9 * 16, 3.35e12),
)


@dataclass
class Work:
    """What a GPU has to do: operations of products, exponentials, bytes, and seconds of launches."""

    operations: float = 0.0
    exponentials: float = 0.0
    bytes: float = 0.0
    launches: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, name) + getattr(other, name) for name in vars(self)))

    def seconds(self, gpu: Gpu) -> float:
        """The longer of what the device does and of the launches."""
        device = self.operations / (OF_PRODUCTS * gpu.operations)
        device += self.exponentials / (OF_EXPONENTIALS * gpu.exponentials) + self.bytes / (OF_BYTES * gpu.bytes)
        return max(device, self.launches)


@dataclass(frozen=True)
class Call:
    """One attention of a model: heads of all samples, queries, keys, widths, and whether there is a mask."""

    heads: int
    n: int
    m: int
    width: int
    value_width: int
    masked: bool

    @property
    def entries(self) -> int:
        """Of all maps."""
        return self.heads * self.n * self.m


class _Moved(TorchDispatchMode):
    """Counts kernels, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.bytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in NO_KERNELS:
            self.kernels += 1
            tensors = [tensor for tensor in tree_leaves((args, kwargs, result)) if isinstance(tensor, Tensor)]
            self.bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return result


def count_model(name: str, quick: bool) -> tuple[Work, list[Call]]:
    """The work of a step without attention, and the calls of attention in it, for `BATCH` samples."""
    torch.manual_seed(0)
    model, inputs, classes = build(name, None, quick)
    samples = len(inputs[0])
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, foreach=True)
    labels = torch.randint(classes, (samples,))
    with FlopCounterMode(display=False) as counted, _Moved() as moved, recorded_calls() as recorded:
        F.cross_entropy(model(*inputs), labels).backward()
        optimizer.step()
    of_products = sum(
        flops for operation, flops in counted.get_flop_counts()["Global"].items() if "attention" not in str(operation)
    )
    times, calls = BATCH / samples, []
    for call in recorded:
        query, key, value = call["tokens"]
        masked = any(isinstance(each, Tensor) for each in (*call["positional"], *call["options"].values()))
        heads = round(times * math.prod(query.shape[:-2]))
        calls.append(Call(heads, query.shape[-2], key.shape[-2], query.shape[-1], value.shape[-1], masked))
    return Work(times * of_products, 0.0, times * moved.bytes, LAUNCH_S * moved.kernels), calls


def softmax(call: Call) -> Work:
    """Flash attention: two products forward, five backward, a map's exponentials each way."""
    operations = 2 * call.entries * (4 * call.width + 3 * call.value_width)
    return Work(operations, 2 * call.entries, 0.0, 4 * LAUNCH_S)


def by_passes(call: Call, kernels: int, passes: float) -> Work:
    """Attention that keeps its maps: each pass over them moves 4 bytes an entry, in chunks of heads."""
    chunks = max(1, round(4 * call.entries / DEVICE_CHUNK_BYTES))
    operations = 2 * call.entries * (4 * call.width + 3 * call.value_width)
    return Work(operations, 0.0, 4.0 * passes * call.entries, chunks * kernels * LAUNCH_S)


def by_triton(call: Call, n_iters: int) -> Work:
    """The Triton engine: the kernels that it would launch, each with its products and exponentials an entry."""
    from sinkhorn_attention.engines.triton import TRITON

    mask = torch.ones(call.n, dtype=torch.bool) if call.masked else None
    shapes = (1, call.n, call.width), (1, call.m, call.width), (1, call.m, call.value_width)
    query, key, value = (torch.empty(shape, dtype=torch.bfloat16) for shape in shapes)
    problem = Problem(query, key, value, query_mask=mask, n_iters=n_iters, scale=1.0)
    with _launches() as launched, torch.no_grad():
        output, rows, columns, domain = TRITON.engine.forward(problem)
        TRITON.engine.backward(problem, (output, output), (rows, columns, domain), False)
    d, dv, pairs = call.width, call.value_width, n_iters // 2
    of_kernel = {
        "forward_kernel": (pairs * d + d + dv, 2 * pairs + 1),
        "potential_gradient_kernel": (pairs * d + d + dv, 2 * pairs + 1),
        "half_step_kernel": (d, 1),
        "output_kernel": (d + dv, 1),
        "reverse_kernel": (d + dv, 1),
        "query_gradient_kernel": (2 * d + dv, n_iters),
        "key_gradient_kernel": (2 * d + 2 * dv, n_iters),
        "column_sums_kernel": (0, 0),
    }
    products, exponentials = (sum(of_kernel[name][part] for name in launched) for part in (0, 1))
    return Work(2.0 * products * call.entries, exponentials * call.entries, 0.0, len(launched) * TRITON_LAUNCH_S)


@contextmanager
def _launches() -> Iterator[list[str]]:
    """The kernels that the Triton engine would launch; none runs."""
    from sinkhorn_attention.engines import triton

    launched: list[str] = []

    def note(kernel: Any, *rest: Any) -> None:
        launched.append(kernel.fn.__name__)

    with mock.patch.object(triton, "launch", note):
        yield launched


def table(quick: bool = False) -> list[tuple[Any, ...]]:
    """The rows, as `HEADER` names them: milliseconds of a step."""
    costs = {n_iters: count_portable(n_iters) for n_iters in COUNTS}
    models = {name: count_model(name, quick) for name in MODELS}
    rows: list[tuple[Any, ...]] = []
    for gpu in GPUS:
        for name, (rest, calls) in models.items():
            for n_iters in COUNTS:
                cost = costs[n_iters]
                ways = {
                    "softmax": [softmax(call) for call in calls],
                    "before": [by_passes(call, *BEFORE[n_iters]) for call in calls],
                    "portable": [by_passes(call, sum(cost.kernels), sum(cost.passes)) for call in calls],
                    "triton": [by_triton(call, n_iters) for call in calls],
                }
                found = [1e3 * sum(ways[way], rest).seconds(gpu) for way in WAYS]
                shares = (found[3] / found[0], found[1] / found[0])
                rows.append((gpu.name, name, n_iters, *(f"{ms:.1f}" for ms in found), *(f"{s:.2f}" for s in shares)))
    return rows


def run(options: argparse.Namespace, console: Console) -> None:
    """Prints the table and writes estimate.csv."""
    title = f"ESTIMATE, not measured: milliseconds of a training step of {BATCH} samples, products in bfloat16"
    show_table(options, console, "estimate", title, HEADER, table(options.quick), words=2)
