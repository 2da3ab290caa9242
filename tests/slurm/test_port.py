"""Ports that processes meet at."""

import random
import socket
import subprocess
import sys
from pathlib import Path

from slurm import port


def test_outside_of_the_ephemeral_range():
    lowest = int(port._EPHEMERAL.read_text().split()[0])
    found = {port.free_port() for _ in range(50)}
    assert all(1024 < one < lowest for one in found)
    assert len(found) > 40  # two jobs whose numbers end alike do not meet


def test_a_taken_port_is_passed_over(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        free = port.free_port()
        choices = iter([taken.getsockname()[1], free])
        monkeypatch.setattr(random.SystemRandom, "randrange", lambda *_: next(choices))
        assert port.free_port() == free


def test_command():
    root = Path(__file__).parents[2]
    shown = subprocess.run([sys.executable, "-m", "slurm.port"], cwd=root, capture_output=True, text=True, check=True)
    assert 1024 < int(shown.stdout) < 65536
