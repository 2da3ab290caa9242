"""How a command ends."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

#: What a shell calls a process that wrote into a pipe which nobody reads any more: 128 + SIGPIPE.
BROKEN_PIPE = 141


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
