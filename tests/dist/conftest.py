"""Every test in this folder is a `dist` test and may use the shared `ranks`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.ranks import RankPool, Ranks

TEST_TIMEOUT = 240
"""Seconds; above each call's own timeout, because the first test also starts the ranks."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.dist)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TEST_TIMEOUT))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks(world_size, fn, *args, timeout=60, **kwargs)`: one return value per rank."""
    with RankPool() as pool:
        yield pool.run
