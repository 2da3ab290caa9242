"""How far long work is: a bar in a terminal, elsewhere a line a minute without control characters."""

import contextlib
import io
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import track

INTERVAL_S = 60.0

Item = TypeVar("Item")


class Lines:
    """Lines on the error stream as it is now, none of them sooner than a minute after the one before."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        self._last = self._start = time.monotonic()

    def tell(self, words: str) -> None:
        """Prints a line, unless one has been printed within the last minute."""
        now = time.monotonic()
        if now - self._last >= INTERVAL_S:
            self._last = now
            print(f"{words} ({(now - self._start) / 60:.0f} min)", file=self._stream, flush=True)


class AtWork:
    """What is being done, for `at_work` to print."""

    def __init__(self, now: str) -> None:
        self.now = now


@contextlib.contextmanager
def at_work(now: str, quiet: bool = False) -> Iterator[AtWork]:
    """Prints once a minute what is being done, by a thread: for work that does not come back in between.

    Args:
        now: what is being done; set `now` of what is yielded where it changes.
        quiet: prints nothing.
    """
    work, ended, lines = AtWork(now), threading.Event(), Lines()

    def watch() -> None:
        while not ended.wait(INTERVAL_S):
            lines.tell(work.now)

    thread = threading.Thread(target=watch, daemon=True)
    if not quiet:
        thread.start()
    try:
        yield work
    finally:
        ended.set()
        if not quiet:
            thread.join()


def tracked(
    items: Iterable[Item], description: str, total: int | None = None, completed: int = 0, *, console: Console
) -> Iterator[Item]:
    """The items, with a bar where the console is a terminal, or else a line a minute.

    Args:
        items: what is worked on one after the other.
        description: of the work.
        total: how many there are, where that is known.
        completed: how many of them had been done before.
        console: where it is shown; a quiet one shows nothing.
    """
    if console.file.isatty() or console.quiet:
        yield from track(items, description, total, completed, console=console, transient=True)
        return
    lines = Lines()
    for done, item in enumerate(items, completed + 1):
        yield item
        lines.tell(f"{description}: {done:,}{'' if total is None else f' of {total:,}'}")


def for_terminals() -> contextlib.AbstractContextManager[object]:
    """Within it, what is written to the error stream is lost unless that is a terminal: bars of other libraries."""
    return contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
