"""In place of the processes of fairseq: forks of one that has imported it already, which takes longer than a run."""

import multiprocessing
import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["fairseq_cli.train", "sacrebleu.metrics"])


def start_server() -> None:
    """Starts the process that is forked: once, while the environment is still as it was."""
    forkserver.ensure_running()


def _run(
    module: str, words: Sequence[str], environment: Mapping[str, str], source: Connection, sink: Connection
) -> None:
    """In the fork: what `python -m module *words` does in a session of its own."""
    os.setsid()
    for number, end in ((0, source), (1, sink), (2, sink)):
        os.dup2(end.fileno(), number)
    source.close()
    sink.close()
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = paths = environment["PYTHONPATH"].split(os.pathsep)
    for path in paths:  # as a Python that begins does
        if os.path.isfile(os.path.join(path, "sitecustomize.py")):
            runpy.run_path(os.path.join(path, "sitecustomize.py"))
    sys.argv = [module, *words]
    warnings.simplefilter("ignore")
    runpy.run_module(module, run_name="__main__", alter_sys=True)


class Forked:
    """As much of `subprocess.Popen` as is used of it."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], **_: Any) -> None:
        (source, given), (taken, sink) = CONTEXT.Pipe(False), CONTEXT.Pipe(False)
        self._process = CONTEXT.Process(target=_run, args=(command[2], command[3:], dict(env), source, sink))
        self._process.start()
        source.close()
        sink.close()
        self.stdin = open(os.dup(given.fileno()), "w", encoding="utf-8")  # noqa: SIM115
        self.stdout = open(os.dup(taken.fileno()), encoding="utf-8", errors="replace")  # noqa: SIM115
        given.close()
        taken.close()

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, when there is one."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("fork", timeout or 0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """To the process alone."""
        if self._process.pid is not None and self.poll() is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """At once."""
        self._process.kill()

    def communicate(self) -> tuple[str, None]:
        """What it still writes, until it ends."""
        self.stdin.close()
        rest = self.stdout.read()
        self.stdout.close()
        self.wait()
        return rest, None


#: In place of the module `subprocess`.
FORKING = SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)
