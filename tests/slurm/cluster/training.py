"""Models whose training takes time without taking the processor, or goes wrong; jobs import this file by its name."""

import os
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from experiments.models import timm_model


class Slow(nn.Module):
    """A model whose training steps take SLOW_STEP seconds each, which changes no number.

    SLOW_STEP may be a file that holds the seconds and is read at each step: so a test ends the wait when it is ready.

    Args:
        raises_at: the training step, from 0, at which it raises.
        model: what it computes.
    """

    def __init__(self, model: nn.Module, raises_at: int | None) -> None:
        super().__init__()
        self.model, self.raises_at, self.step = model, raises_at, 0

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            if self.step == self.raises_at:
                raise FloatingPointError("the loss is not finite, as it may happen")
            self.step += 1
            seconds = os.environ.get("SLOW_STEP", "0")
            time.sleep(float(Path(seconds).read_text() if os.path.isabs(seconds) else seconds))
        return self.model(images)


def slow_model(raises_at: int | None = None, **options: Any) -> Slow:
    """A vision transformer in `Slow`."""
    return Slow(timm_model(**options), raises_at)
