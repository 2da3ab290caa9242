"""A process that runs fairseq, seen from the one that started it: its events, its log, and the signals it is passed."""

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ..errors import Diverged, RunError
from ..plugins import import_plugins
from . import fairseq_command as command
from .fairseq_events import read_event

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
TERMINATED, INTERRUPTED = 128 + signal.SIGTERM, 128 + signal.SIGINT


@dataclass
class Child:
    """A process that runs fairseq: its events, and its log."""

    process: "subprocess.Popen[str]"
    log: IO[str] | None = None
    signal: int = 0
    unwritten: list[str] = field(default_factory=list)

    @classmethod
    def start(cls, module: str, words: Sequence[str], config: dict[str, Any]) -> "Child":
        """Starts `python -m experiments.runners.<module>` in a session of its own: signals come from here alone."""
        import_plugins(config)
        environment = dict(os.environ)
        paths = [str(command.ROOT), str(command.PLUGIN.parent), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environment |= {"PYTHONUTF8": "1", "PYTHONWARNINGS": "ignore"}
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with it alone
        if config["trainer"]["accelerator"] == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        if config["trainer"]["threads"] is not None:
            environment["OMP_NUM_THREADS"] = str(config["trainer"]["threads"])
        process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.{module}", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env=environment,
            start_new_session=True,
        )
        return cls(process)

    def events(self) -> Iterator[dict[str, Any]]:
        """What the process tells, until it ends; the rest of its lines goes to the log.

        Raises:
            RunError: for what it says went wrong; `Diverged` where its numbers are no longer finite.
            OSError: for a full disk.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = read_event(line)
            if event is None:
                self._write(line)
                if (update := _progress(line)) is not None:
                    yield {"event": "progress", "epochs": update}
            elif event["event"] == "warning":
                print(f"warning: {event['message']}", file=sys.stderr)
            elif event["event"] == "failed":
                self.process.wait()
                where = f" (everything that fairseq wrote: {self.log.name})" if self.log is not None else ""
                if event["full"]:
                    raise OSError(errno.ENOSPC, event["message"])
                raise (Diverged if event["diverged"] else RunError)(f"{event['message']}{where}")
            else:
                yield event

    def say(self, line: str) -> None:
        """Writes a line to the process's input."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def keep_log(self, path: Path) -> None:
        """Appends all lines to a file, those before as well."""
        self.log = open(path, "a", encoding="utf-8")  # noqa: SIM115  closed by `end`
        self.log.writelines(self.unwritten)
        self.unwritten.clear()

    def _write(self, line: str) -> None:
        if not line.strip():
            return
        if self.log is None:
            self.unwritten.append(line)
        else:
            self.log.write(line)
            self.log.flush()

    def end(self) -> None:
        """Ends the process where it has not ended, and the log."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        if self.log is not None:
            with suppress(OSError):  # of a full disk, which was told when the line was written
                self.log.close()

    def fate(self) -> RunError:
        """Why a process is gone that told nothing."""
        code = self.process.wait()
        log = self.log.name if self.log is not None else None
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        last = next((line.strip() for line in reversed(self.unwritten) if line.strip()), "")
        hint = "; perhaps the memory of the machine was used up" if code == -signal.SIGKILL else ""
        return RunError(f"fairseq's process {how}{hint} ({f'its log: {log}' if log else last or 'it wrote nothing'})")

    @contextmanager
    def forwarding(self) -> Iterator[None]:
        """Passes signals on to the process, which then saves a checkpoint and ends; a second one ends it at once."""

        def forward(signum: int, frame: object) -> None:
            if self.signal:
                self.process.kill()
            else:
                self.signal = signum
                self.process.send_signal(signum)

        try:
            before = {number: signal.signal(number, forward) for number in SIGNALS}
        except ValueError:  # not the main thread, which alone may do this
            yield
            return
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _progress(line: str) -> float | None:
    """The epochs that are done, out of a line of fairseq's JSON log within an epoch."""
    if " | train_inner | {" not in line:
        return None
    try:
        return float(json.loads(line[line.index("{") :])["update"])
    except (ValueError, LookupError):
        return None


def exit_code(signum: int) -> int:
    """The exit code after a signal, as experiments.train documents it."""
    return INTERRUPTED if signum == signal.SIGINT else TERMINATED
