"""For all tests."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long begins first: one long test at the end would leave the other workers idle."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
