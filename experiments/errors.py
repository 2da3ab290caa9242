"""The exceptions for what their message explains in full: what, where and what to do."""

import math
from collections.abc import Mapping

from hydra.errors import CompactHydraException


class RunError(CompactHydraException):
    """A fault that its message explains in full: what, where and what to do. Shown without a traceback."""


class Diverged(RunError):
    """The numbers of a training are no longer finite: the run has failed, and begun again it would fail again.

    Raised within `RunDir.attempt` it makes the run's state "diverged". As any `RunError` it ends the command with 1,
    after which no job is queued again.
    """

    @classmethod
    def at(cls, what: str, value: float, step: int, epoch: int, rate: float | None = None) -> "Diverged":
        """The error that says where it happened.

        Args:
            what: what is no longer finite, "the loss" for example.
            value: its value, NaN or infinite.
            step: optimizer steps that had been made.
            epoch: epochs that were finished.
            rate: the learning rate, None where the one who knows the step does not know it.
        """
        kind = "NaN" if math.isnan(value) else "infinite"
        at_rate = "" if rate is None else f"; learning rate {rate:g}"
        return cls(
            f"{what} became {kind} at step {step}, epoch {epoch}{at_rate}: the run has diverged. Lower optimizer.lr, "
            "warm up longer, or clip the gradient (trainer.gradient_clip_norm)"
        )


def check_finite(metrics: Mapping[str, float], what: str, step: int, epoch: int, rate: float | None = None) -> None:
    """Refuses metrics that are NaN or infinite.

    Args:
        metrics: by their names.
        what: they are of: a split ("train", "val" or "test").
        step: optimizer steps made.
        epoch: epochs finished.
        rate: the learning rate, where it is known.

    Raises:
        Diverged: names the first of them.
    """
    words = {"train": "training", "val": "validation"}.get(what, what)
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise Diverged.at(f"the {words} {name}", value, step, epoch, rate)
