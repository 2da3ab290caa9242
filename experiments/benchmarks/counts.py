"""`python -m experiments.benchmarks counts`: kernels and passes over the map of one call, as on a device.

On a GPU a small call costs its kernels, a large one its traffic: each read or write of the float32 map of all heads is
a pass. Both are counted on CPU tensors that the portable engine is told to take for those of a device, without a GPU; a
kernel is an operation of torch's that is neither a view nor an allocation.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from sinkhorn_attention.engines import PORTABLE, domains
from sinkhorn_attention.engines.problem import Problem
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .published import published_attention
from .results import show_table

COUNTS = (1, 3, 5, 21)
HEADS, TOKENS, WIDTH = 4, 64, 8
#: Allocations, and what the host alone does.
NO_KERNELS = {"empty", "empty_like", "new_empty", "empty_strided", "detach", "alias", "_local_scalar_dense"}
#: What writes its first argument without reading it.
WRITERS = {"copy_", "fill_", "zero_"}
HEADER = ("engine", "half-steps", "kernels, forward", "backward", "both", "passes, forward", "backward", "both")


class Counting(TorchDispatchMode):
    """Counts kernels, passes over maps of `size` elements, and looks at data, for which a program waits."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.kernels, self.passes, self.looks = size, 0, 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        self.looks += name in ("nonzero", "_local_scalar_dense", "is_nonzero", "masked_select")
        if func.is_view or name in NO_KERNELS:
            return result
        tensors = [tensor for tensor in tree_leaves((args, kwargs, result)) if isinstance(tensor, Tensor)]
        if all(tensor.dim() == 0 for tensor in tensors):
            return result  # a number, which stays on the host
        self.kernels += 1
        read = tree_leaves((args[1:] if name in WRITERS else args, {k: v for k, v in kwargs.items() if k != "out"}))
        if kwargs.get("beta") == 0 or (name == "baddbmm" and args[0].numel() < self.size):
            read = read[1:]  # what is added, which is not there
        for tensor in (*read, *tree_leaves(result)):
            if isinstance(tensor, Tensor) and tensor.numel() >= self.size:
                self.passes += tensor.numel() * tensor.element_size() / (4 * self.size)
        return result


@dataclass(frozen=True)
class Cost:
    """Of one call forward and backward: kernels, passes, and looks at data, forward and backward each."""

    kernels: tuple[int, int]
    passes: tuple[float, float]
    looks: tuple[int, int]


@contextmanager
def as_on_a_device(captured: bool = False) -> Iterator[None]:
    """The portable engine takes CPU tensors for those of a device, or for those of a CUDA graph that is captured."""
    with (
        mock.patch.object(domains, "is_asynchronous", return_value=True),
        mock.patch.object(domains, "is_captured", return_value=captured),
    ):
        yield


def tokens() -> list[Tensor]:
    """Query, key, value and the gradient that arrives, (1, HEADS, TOKENS, WIDTH) each."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, TOKENS, WIDTH, generator=generator) for _ in range(4)]


def count(forward: Callable[[], Any], backward: Callable[[Any], Any]) -> Cost:
    """Counts a forward call, and a backward call of what it gave."""
    first, second = (Counting(HEADS * TOKENS * TOKENS) for _ in range(2))
    with first:
        found = forward()
    with second:
        backward(found)
    return Cost((first.kernels, second.kernels), (first.passes, second.passes), (first.looks, second.looks))


def count_portable(n_iters: int, captured: bool = False, **options: Any) -> Cost:
    """Counts the portable engine on a device; `options` are a `Problem`'s."""
    query, key, value, arriving = tokens()
    problem, engine = Problem(query, key, value, n_iters=n_iters, scale=WIDTH**-0.5, **options), PORTABLE.engine

    def backward(found: Any) -> None:
        output, rows, columns, domain = found
        engine.backward(problem, (output, arriving), (rows, columns, domain), problem.attn_bias is not None)

    with as_on_a_device(captured), torch.no_grad():
        return count(lambda: engine.forward(problem), backward)


def count_autograd(attend: Callable[..., Tensor], *more: Any) -> Cost:
    """Counts attention of torch's own operations and its derivative by autograd."""
    query, key, value, arriving = tokens()
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    return count(lambda: attend(*inputs, *more), lambda output: torch.autograd.grad(output, inputs, arriving))


def softmax_formula(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(QK^T) V."""
    return (query @ key.mT * WIDTH**-0.5).softmax(-1) @ value


def table() -> list[tuple[Any, ...]]:
    """The rows, as `HEADER` names them."""
    found = [("softmax as its formula", 1, count_autograd(softmax_formula))]
    for n_iters in COUNTS:
        found.append(("portable, on a device", n_iters, count_portable(n_iters)))
        found.append(("portable, captured: log domain", n_iters, count_portable(n_iters, captured=True)))
        found.append(("published arithmetic", n_iters, count_autograd(published_attention, n_iters)))
    return [
        (name, n_iters, *cost.kernels, sum(cost.kernels), *map(round, cost.passes), round(sum(cost.passes)))
        for name, n_iters, cost in found
    ]


def run(options: argparse.Namespace, console: Console) -> None:
    """Prints the table and writes counts.csv."""
    show_table(
        options,
        console,
        "counts",
        "one call as on a device: kernels, and passes over the map of all heads",
        HEADER,
        table(),
    )
