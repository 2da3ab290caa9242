"""The order in which tests are dealt out to workers."""

from types import SimpleNamespace

import pytest

from tests.conftest import spread


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_each_worker_begins_with_its_share_of_the_slow_ones(workers: int) -> None:
    def test(file: int, number: int) -> SimpleNamespace:
        slow = file % 4 == 0 and number < 3
        return SimpleNamespace(nodeid=f"f{file}::t{number}", get_closest_marker=lambda name: True if slow else None)

    items = [test(file, number) for file in range(40) for number in range(7)]
    ordered = spread(items, workers)
    assert sorted(item.nodeid for item in ordered) == sorted(item.nodeid for item in items)
    sizes, start = [], 0
    for left in range(workers, 0, -1):
        end = start + (len(items) - start) // left
        slow = [item.get_closest_marker("slow") is not None for item in ordered[start:end]]
        assert slow == sorted(slow, reverse=True)
        sizes.append(sum(slow))
        start = end
    assert sum(sizes) == 30
    assert max(sizes) - min(sizes) <= 3
