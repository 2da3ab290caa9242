"""What a process that runs fairseq tells the one that started it: lines of JSON on its output."""

import contextlib
import ctypes
import errno
import json
import logging
import math
import os
import signal
import sys
import threading
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np

from ..errors import Diverged

PREFIX = "@run "
PR_SET_PDEATHSIG = 1
METRICS = ("loss", "nll_loss", "accuracy", "bleu")


class FairseqError(Exception):
    """What went wrong, in one sentence."""


def emit(event: str, **facts: Any) -> None:
    """Tells the starting process of an event."""
    # One write, so that lines of other threads and processes do not come in between.
    os.write(1, f"\n{PREFIX}{json.dumps({'event': event, **facts})}\n".encode())


def read_event(line: str) -> dict[str, Any] | None:
    """The event of a line, None for any other line."""
    return json.loads(line[len(PREFIX) :]) if line.startswith(PREFIX) else None


@contextlib.contextmanager
def explained(where: str = "") -> Iterator[None]:
    """Ends the process with an event of one sentence where something goes wrong; the log has the traceback."""
    try:
        yield
    except Exception as error:  # whatever fairseq or a plugin may raise
        sys.stdout.flush()
        with contextlib.suppress(Exception):
            sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        facts = {"full": _no_space(error), "diverged": isinstance(error, Diverged)}
        emit("failed", message=f"{where}{in_one_sentence(error)}", **facts)
        raise SystemExit(1) from None


def in_one_sentence(error: BaseException) -> str:
    """The message for a user."""
    words = " ".join(str(error).split())
    if isinstance(error, FairseqError | Diverged):
        return words
    if "out of memory" in words:
        return (
            "the GPU's memory is used up: take smaller batches (data.max_tokens or data.batch_size), and as many times "
            "more of them to a step (trainer.accumulate_grad_batches)"
        )
    if isinstance(error, ValueError | AssertionError | FileNotFoundError) and words:
        return words
    return f"{type(error).__name__}: {words}"


def _no_space(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def parse_plainly() -> None:
    """What argparse objects to becomes an exception instead of a usage of 300 lines and an exit."""

    def error(self: ArgumentParser, message: str) -> NoReturn:
        raise FairseqError(message)

    ArgumentParser.error = error  # type: ignore[method-assign]


def end_with_parent() -> None:
    """A process whose starter is killed must not go on: the starter's lock on the run's folder is gone, too."""
    with contextlib.suppress(OSError, AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:  # the starter holds the other end until this process has ended
        while os.read(0, 1024):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def write_log() -> None:
    """Fairseq's own format of its log, which it sets up only where no other library has set up one before."""
    form = "%(asctime)s | %(levelname)s | %(name)s | %(message)s"
    logging.basicConfig(format=form, level=logging.INFO, stream=sys.stdout, force=True)


def keep_digits() -> None:
    """Fairseq rounds losses to three digits when they are read; here they are kept, in its log as well."""
    from fairseq.logging import meters, progress_bar

    def keep(number: Any, digits: int) -> Any:
        return number.item() if hasattr(number, "item") and np.ndim(number) == 0 else number

    round_format = progress_bar.format_stat

    def format_stat(stat: Any) -> Any:
        return stat if isinstance(stat, float) else round_format(stat)

    meters.safe_round, progress_bar.format_stat = keep, format_stat


def numbers(stats: dict[str, Any]) -> dict[str, float]:
    """Metrics as plain numbers under the suite's names: losses in nats, accuracy as a fraction of 1."""
    known: dict[str, float] = {name: float(stats[name]) for name in METRICS if name in stats}
    for name in ("loss", "nll_loss"):
        if name in known:
            known[name] *= math.log(2)  # fairseq's are in bits
    if "accuracy" in known:
        known["accuracy"] = round(known["accuracy"] / 100, 6)  # a float32; six digits count 100,000 sentences
        known.pop("nll_loss", None)  # of a sentence over its tokens: it says nothing
    return known


def improves(value: float, best: float | None, highest: bool) -> bool:
    """Whether an epoch's value is better than the best so far; of equal ones the earlier stays the best."""
    if best is None or math.isnan(best):
        return True
    return value > best if highest else value < best
