"""What can be known to be wrong with a layout before any process starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hydra.utils import instantiate

from lightning_par.launch import world_size
from lightning_par.layout import ParallelLayout

__all__ = ["check_layout"]

_DEGREES = (
    "data_parallel_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "zero_stage",
    "zero_shard_size",
)


def check_layout(config: Mapping[str, Any]) -> ParallelLayout | None:
    """Build the strategy, and see that its degrees fit the number of ranks.

    Args:
        config: the resolved configuration.

    Returns:
        The layout that the ranks will have; None if the strategy is another's.

    Raises:
        ValueError: if the strategy refuses its arguments, the launch its settings, or the degrees do not multiply to
            the number of ranks.
    """
    from lightning_par.trainer import HybridStrategy

    if not isinstance(instantiate(config["strategy"]), HybridStrategy):
        return None
    degrees = {name: config["strategy"][name] for name in _DEGREES if name in config["strategy"]}
    return ParallelLayout.from_degrees(world_size(instantiate(config["launch"])), **degrees)
