"""Random numbers by what they are for: the same wherever, however often and in whatever order they are drawn."""

import hashlib

import numpy as np
import torch


def stream_seed(purpose: str, *numbers: int) -> int:
    """A 64-bit seed for a purpose ("shuffle", "augment", ...) and the numbers that it depends on (seed, epoch, ...)."""
    # The count is part of it because numpy takes [1] and [1, 0] for the same.
    word = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:4], "little")
    return int(np.random.SeedSequence([word, len(numbers), *numbers]).generate_state(1, np.uint64)[0])


def generator(purpose: str, *numbers: int) -> torch.Generator:
    """A CPU generator with the seed of `stream_seed`."""
    return torch.Generator().manual_seed(stream_seed(purpose, *numbers))
