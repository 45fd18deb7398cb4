"""What Lightning's two strategy classes, the Trainer's and Fabric's, have in common.

They are unrelated classes, so what both adapters share is written over this one, which is nothing at run time: an
adapter's class names its own Lightning class after the shared ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from torch.optim import Optimizer

__all__ = ["LightningStrategy"]


class LightningStrategy:
    """The attributes of Lightning's strategies that shared code reads."""

    if TYPE_CHECKING:
        _launcher: Any
        accelerator: Any
        parallel_devices: list[torch.device] | None
        cluster_environment: ClusterEnvironment | None
        checkpoint_io: CheckpointIO
        optimizers: list[Optimizer]

        def __init__(self, **kwargs: Any) -> None: ...

        @property
        def global_rank(self) -> int: ...

        @property
        def local_rank(self) -> int: ...

        @property
        def node_rank(self) -> int: ...

        @property
        def world_size(self) -> int: ...

        @property
        def is_global_zero(self) -> bool: ...
