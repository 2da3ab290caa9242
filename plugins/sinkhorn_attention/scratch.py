"""Scratch memory for the engines: fresh pages cost up to a fifth of a small call, so buffers are used again.

A buffer is borrowed, belongs to the borrower alone, and goes back afterwards; whatever is idle is bounded by `MAX_IDLE`
bytes in the whole process, and `release()` gives it back to the system.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

#: Bytes kept idle at most. A dense backward pass borrows three buffers of one chunk each (see `dense.CHUNK_BYTES`);
#: anything larger than this is allocated for one call and freed.
MAX_IDLE = 32 << 20

_idle: list[Tensor] = []
_lock = threading.Lock()


@contextmanager
def borrow(*shapes: tuple[int, ...], dtype: torch.dtype, device: torch.device | None = None) -> Iterator[list[Tensor]]:
    """Uninitialised tensors of the given shapes, to be used inside the block only."""
    with torch.inference_mode(False):  # a tensor made in inference mode could not be written to outside of it
        buffers = [_take(_size(shape), dtype, device or torch.device("cpu")) for shape in shapes]
        tensors = [buffer[: _size(shape)].view(shape) for buffer, shape in zip(buffers, shapes, strict=True)]
    try:
        yield tensors
    finally:
        for buffer in buffers:
            _give(buffer)


def release() -> None:
    """Frees all idle buffers."""
    with _lock:
        _idle.clear()


def idle_bytes() -> int:
    """Bytes that are kept for the next call."""
    with _lock:
        return sum(buffer.nbytes for buffer in _idle)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


def _take(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The smallest idle buffer that is large enough, or a new one."""
    with _lock:
        fitting = [i for i, b in enumerate(_idle) if b.numel() >= size and b.dtype == dtype and b.device == device]
        if fitting:
            return _idle.pop(min(fitting, key=lambda i: _idle[i].numel()))
    return torch.empty(size, dtype=dtype, device=device)


def _give(buffer: Tensor) -> None:
    """Keeps the buffer, and lets go of the oldest ones beyond the bound."""
    with _lock:
        _idle.append(buffer)
        while sum(kept.nbytes for kept in _idle) > MAX_IDLE:
            _idle.pop(0)
