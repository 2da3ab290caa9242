"""Prints a free port for the processes of one run to meet at: `python -m slurm.port`, on the node of the first process.

A port that follows from the job's number, as Lightning takes it, is the same for jobs whose last four digits agree. A
port in the range from which the kernel serves everybody may be taken before the run listens on it.
"""

import random
import socket
from pathlib import Path

LOWEST = 10_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port that nobody listens on, below those that the kernel hands out.

    Raises:
        OSError: where a hundred tries have found none.
    """
    highest = int(_EPHEMERAL.read_text().split()[0]) if _EPHEMERAL.exists() else 32_768
    # Of the system's own randomness: two jobs that start together on a node must not choose alike.
    choice = random.SystemRandom()
    for _ in range(100):
        port = choice.randrange(min(LOWEST, highest - 1_000), highest)
        with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as listener:
            try:
                listener.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError("no free port in a hundred tries")


if __name__ == "__main__":
    print(free_port())
