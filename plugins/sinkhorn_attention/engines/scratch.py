"""Scratch memory for the engines: fresh pages cost up to a fifth of a small call, so buffers are used again.

A buffer is borrowed, belongs to the borrower alone, and goes back afterwards; whatever is idle between calls is bounded
by `MAX_IDLE` bytes in the whole process, and `release()` gives it back to the system.
"""

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import torch
from torch import Tensor

#: Bytes kept idle at most between calls. A dense backward pass borrows three buffers of one chunk each (see
#: `dense.CHUNK_BYTES`); anything larger than this is allocated for one call and freed.
MAX_IDLE = 32 << 20
#: Bytes below which a buffer is simply allocated: the system hands out small pieces without fresh pages, in a tenth of
#: the time that borrowing takes.
MIN_BYTES = 1 << 16

_idle: list[Tensor] = []
_holders = 0
_lock = threading.Lock()


class borrow:
    """Context of uninitialised tensors of the given shapes, to be used inside the block only.

    Off the CPU they are torch's own: its allocator there keeps what was used before.
    """

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.shapes, self.dtype, self.device = shapes, dtype, torch.device(device)
        self.buffers: list[Tensor] = []

    def __enter__(self) -> list[Tensor]:
        tensors = []
        for shape in self.shapes:
            size = math.prod(shape)
            if size * self.dtype.itemsize < MIN_BYTES or self.device.type != "cpu":
                tensors.append(torch.empty(shape, dtype=self.dtype, device=self.device))
                continue
            self.buffers.append(_take(size, self.dtype))
            tensors.append(self.buffers[-1][:size].view(shape))
        return tensors

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for buffer in reversed(self.buffers):  # the next to borrow the same gets each in the same place
            _give(buffer)


@contextmanager
def hold() -> Iterator[None]:
    """Keeps every idle buffer, however large, until the block ends.

    Heads of one call use a map of 64 MB one after the other: allocated for each, its pages cost a fifth of the time.
    """
    global _holders
    with _lock:
        _holders += 1
    try:
        yield
    finally:
        with _lock:
            _holders -= 1
            _trim()


def release() -> None:
    """Frees all idle buffers."""
    with _lock:
        _idle.clear()


def idle_bytes() -> int:
    """Bytes that are kept for the next call."""
    with _lock:
        return sum(buffer.nbytes for buffer in _idle)


def _take(size: int, dtype: torch.dtype) -> Tensor:
    """The buffer of about this size that was used last, which the cache still holds, or a new one."""
    with _lock:
        for i in reversed(range(len(_idle))):
            if size <= _idle[i].numel() <= 2 * size and _idle[i].dtype == dtype:
                return _idle.pop(i)
    with torch.inference_mode(False):  # a tensor made in inference mode could not be written to outside of it
        return torch.empty(size, dtype=dtype)


def _give(buffer: Tensor) -> None:
    """Keeps the buffer."""
    with _lock:
        _idle.append(buffer)
        _trim()


def _trim() -> None:
    """Lets go of the oldest buffers beyond the bound, unless they are held."""
    while not _holders and sum(kept.nbytes for kept in _idle) > MAX_IDLE:
        _idle.pop(0)
