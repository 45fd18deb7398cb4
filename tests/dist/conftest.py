"""Every test in this folder is a `dist` test and may use the shared `ranks`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dist.parity import LAYOUTS, SINGLE
from tests.dist.ranks import OneProcess, RankPool, Ranks

TEST_TIMEOUT = 60
"""Seconds a test may take; starting the shared ranks is not a test's."""


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in its own
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.dist)
            if "ranks" in item.fixturenames:
                # One worker for a pool, the shared one or a module's own.
                own = vars(item.getparent(pytest.Module).obj).get("ranks")
                item.add_marker(pytest.mark.xdist_group("ranks" if own is None else item.path.stem))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TEST_TIMEOUT, func_only=True))


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks(world_size, fn, *args, timeout=45, **kwargs)`: one return value per rank."""
    with RankPool() as pool:
        pool.start(max(layout.world_size for layout in LAYOUTS.values()))
        yield pool.run


@pytest.fixture(scope="session")
def one_process(ranks: Ranks) -> OneProcess:
    """`one_process(fn, *args)`: what `fn(SINGLE, *args)` returns under plain Lightning, run once a session."""
    known: dict[bytes, Any] = {}

    def reference(fn: Callable[..., Any], *args: Any) -> Any:
        key = pickle.dumps((fn, args))
        if key not in known:
            (known[key],) = ranks(1, fn, SINGLE, *args)
        return copy.deepcopy(known[key])

    return reference
