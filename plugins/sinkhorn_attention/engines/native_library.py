"""The native engine's library: which of those that were built fits this processor, and why none does.

The package's build makes one library for each of `LEVELS` (setup.py), next to this file; none is made when a job runs.
"""

import ctypes
import hashlib
import os
import platform
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import torch

#: Environment variable: 0 turns the engine off, a path names another library.
SWITCH = "SINKHORN_ATTENTION_NATIVE"
#: What libraries are built for, best first, by the machine and torch's name for its vectors.
LEVELS = {
    ("x86_64", "AVX512"): ("x86-64-v4", "x86-64-v3"),
    ("x86_64", "AVX2"): ("x86-64-v3",),
    ("aarch64", "DEFAULT"): ("armv8-a",),
}
FOLDER = Path(__file__).parent


def file_of(level: str) -> Path:
    """The library for a level."""
    return FOLDER / f"libsinkhorn_{level}.so"


class Library:
    """The library, loaded and checked at its first use.

    Args:
        disagreement: what a library gets wrong of small problems, or None.

    Attributes:
        build: what it was built for and the first digits of its checksum; empty if there is none.
        reason: why there is none, or None.
    """

    def __init__(self, disagreement: Callable[[ctypes.CDLL], str | None]) -> None:
        self.disagreement = disagreement
        self.build = ""
        self.reason: str | None = None
        self._loaded: ctypes.CDLL | None = None
        self._tried = False
        self._lock = threading.Lock()
        self._forked = False
        os.register_at_fork(after_in_child=self._after_fork)

    def load(self) -> ctypes.CDLL | None:
        """The library, or None, with the `reason`."""
        if not self._tried:
            with self._lock:
                if not self._tried:
                    self._loaded, self.reason = self._load()
                    self._tried = True
        return self._loaded

    def threads(self) -> int:
        """Threads that a call may ask for: torch's, but one in a forked child, which has none of its parent's."""
        return 1 if self._forked else torch.get_num_threads()

    def _after_fork(self) -> None:
        self._forked, self._lock = True, threading.Lock()

    def _load(self) -> tuple[ctypes.CDLL | None, str | None]:
        named = os.environ.get(SWITCH, "")
        if named == "0":
            return None, f"{SWITCH}=0 turns it off"
        path = Path(named) if named not in ("", "1") else _built_for_this_processor()
        if isinstance(path, str):
            return None, path
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            return None, f"its library cannot be loaded: {error}"
        library.sinkhorn_scratch_bytes.restype = ctypes.c_int64
        library.sinkhorn_run.restype = None
        if not _shares_threads(library):
            return None, "it would bring a second OpenMP with its own threads beside torch's"
        wrong = self.disagreement(library)
        if wrong is not None:
            return None, wrong
        self.build = f"{path.stem.removeprefix('libsinkhorn_')} {hashlib.sha256(path.read_bytes()).hexdigest()[:8]}"
        return library, None


def _built_for_this_processor() -> Path | str:
    """The library to take, or why there is none."""
    if not sys.platform.startswith("linux"):
        return f"it is for Linux (this is {sys.platform})"
    machine, vectors = platform.machine(), torch.backends.cpu.get_cpu_capability()
    levels = LEVELS.get((machine, vectors), ())
    if not levels:
        return f"it needs AVX2 or ARMv8 (torch says {vectors} on {machine})"
    for level in levels:
        if file_of(level).exists():
            return file_of(level)
    return "it was not built: install a C++20 compiler (g++ 11 or newer) and then the package again"


def _shares_threads(library: ctypes.CDLL) -> bool:
    """Whether the library's OpenMP is torch's: a number of threads that torch is given is seen by it."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        return library.sinkhorn_max_threads() == before + 1
    finally:
        torch.set_num_threads(before)
