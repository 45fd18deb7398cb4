"""What every test leaves behind for the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hydra.core.hydra_config import HydraConfig


@pytest.fixture(autouse=True)
def no_hydra_job() -> Iterator[None]:
    """No test finds itself inside a Hydra job that another has begun."""
    yield
    HydraConfig.instance().cfg = None
