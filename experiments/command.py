"""How a command ends."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

#: What a shell calls a process that wrote into a pipe which nobody reads any more: 128 + SIGPIPE.
BROKEN_PIPE = 141
PR_SET_PDEATHSIG = 1
_starter: int | None = None


def finish(main: Callable[[], int | None]) -> NoReturn:
    """Runs a command and exits with its code; quietly where the reader of its output has gone, as `| head` does."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would write the rest at its end, and complain that it cannot.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = BROKEN_PIPE
    sys.exit(code)


def end_with_the_sweep() -> None:
    """A process that joblib has started for a sweep is sent TERM when the sweep's own process is gone, however it went.

    So a run saves a checkpoint and ends, where it would go on unseen. Linux alone has this; elsewhere nothing happens.
    """
    global _starter
    if _starter is not None or not multiprocessing.current_process().name.startswith("LokyProcess"):
        return
    _starter = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def is_orphan() -> bool:
    """Whether the process is one of a sweep whose own process is gone."""
    return _starter is not None and os.getppid() != _starter
