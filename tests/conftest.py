"""For all tests."""

import os
from collections import defaultdict

import pytest

#: No test waits for a network; read when huggingface_hub is first imported, here and in processes that tests start.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long begins first, with every worker: one long test at the end would leave the others idle."""
    items[:] = spread(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def spread(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """The tests in the order in which `--dist worksteal` cuts them into one piece for each worker.

    A worker takes others' tests from the end of their pieces alone, so each piece begins with its share of the slow
    ones. Those of a file stay together, since they share what it prepares.
    """
    files: dict[str, list[pytest.Item]] = defaultdict(list)
    rest = []
    for item in items:
        if item.get_closest_marker("slow") is None:
            rest.append(item)
        else:
            files[item.nodeid.partition("::")[0]].append(item)
    shares: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for tests in sorted(files.values(), key=len, reverse=True):
        min(shares, key=len).extend(tests)
    ordered: list[pytest.Item] = []
    for number, share in enumerate(shares):
        size = (len(items) - len(ordered)) // (workers - number)
        taken = max(size - len(share), 0)
        ordered += share + rest[:taken]
        rest = rest[taken:]
    return ordered + rest
