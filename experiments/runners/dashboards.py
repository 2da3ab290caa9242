"""TensorBoard and wandb, which a run is shown on: what fails there costs the log there, never the run.

The files of the run's folder have all that a dashboard shows.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger


class Dashboard(Logger):
    """A logger of Lightning's that is left alone from its first fault on, of which one line tells.

    Lightning's own calls do nothing: what is shown is told by `tell`.

    Args:
        title: what messages call it.
        start: makes the logger.
    """

    def __init__(self, title: str, start: Callable[[], Logger]) -> None:
        super().__init__()
        self.title = title
        self.logger: Logger | None = None
        try:
            self.logger = start()
        except Exception as error:  # whatever a library may raise that is no part of the training
            self._give_up(error)

    @property
    def name(self) -> str | None:
        return self.title

    @property
    def version(self) -> str | None:
        return None

    def tell(self, act: Callable[[Any], object]) -> None:
        """Calls `act` with the logger, unless it has failed before."""
        if self.logger is None:
            return
        try:
            act(self.logger)
        except Exception as error:  # likewise
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        is_wandb, self.logger = self.title == "wandb", None
        lines = str(error).strip().splitlines()
        reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        print(
            f"warning: {self.title} has failed ({reason}); the run goes on, is shown there no further, and has all of "
            "it in its own files",
            file=sys.stderr,
            flush=True,
        )
        if is_wandb:
            forget_wandb()

    def log_metrics(self, *arguments: Any, **named: Any) -> None:
        """Nothing: see `tell`."""

    def log_hyperparams(self, *arguments: Any, **named: Any) -> None:
        """Nothing: see `tell`."""


def tell(dashboards: Sequence[Logger], act: Callable[[Any], object]) -> None:
    """Tells all dashboards the same."""
    for dashboard in dashboards:
        if isinstance(dashboard, Dashboard):
            dashboard.tell(act)


def offline_wandb(dashboards: Sequence[Logger]) -> list[Logger]:
    """Those that write into a folder of wandb's which is to be uploaded later."""
    inner = [(one, one.logger if isinstance(one, Dashboard) else one) for one in dashboards]
    return [one for one, logger in inner if isinstance(logger, WandbLogger) and logger._offline]


def forget_wandb() -> None:
    """Ends wandb's service, or what is left of it, so that the next run of this process begins with one of its own."""
    with suppress(Exception, SystemExit):  # a service that was killed has no way to be ended well
        import wandb

        wandb.teardown()
