"""The process that runs fairseq, seen from the one that started it; another program stands for it."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.runners.fairseq_process import Child


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full, a disk without space, is Linux's")
def test_a_log_on_a_full_disk_is_told_once() -> None:
    words = [sys.executable, "-c", "print('a line')"]
    child = Child(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    try:
        child.keep_log(Path("/dev/full"))
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            list(child.events())
    finally:
        child.end()  # closing writes once more what could not be written
    assert child.log is not None
    assert child.log.closed
