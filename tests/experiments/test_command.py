"""How a command ends: its code, and a reader that has gone."""

import subprocess
import sys
from pathlib import Path

import pytest

from experiments.command import BROKEN_PIPE, finish

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("code", [0, 1, None])
def test_the_code_is_the_commands(code: int | None) -> None:
    with pytest.raises(SystemExit) as stop:
        finish(lambda: code)
    assert stop.value.code == code


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_has_gone_is_no_error(lines: int) -> None:
    """Whether it goes before the buffer is full, or while the command still writes."""
    script = f"from experiments.command import finish\nfinish(lambda: print('row\\n' * {lines}))"
    command = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert command.stdout is not None
    command.stdout.close()
    assert command.stderr is not None
    assert command.stderr.read() == ""
    assert command.wait() == BROKEN_PIPE
