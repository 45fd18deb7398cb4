"""Making Lightning's precision plugins count over all ranks.

The Trainer clips through its precision plugin and never asks the strategy, and the plugin only sees this rank's shards.
So the strategy hands each plugin it is given to :func:`connect_precision`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from torch import Tensor
from torch.optim import Optimizer

from lightning_par.gradients import NormScope, clip_by_norm_, clip_by_value_
from lightning_par.offload import stepped_parameters
from lightning_par.strategies.precision import scale_together

__all__ = ["connect_precision"]

_SUPPORTED = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)


def connect_precision(
    plugin: Precision, device: torch.device, on_norm: Callable[[Tensor], None], scope: Callable[[], NormScope]
) -> None:
    """Let ``plugin`` clip and scale over all ranks.

    Methods are replaced on the instance, since the plugin's class name is the key of its state in checkpoints.

    Args:
        plugin: The plugin Lightning made for ``Trainer(precision=...)``, or the user's own.
        device: This rank's device.
        on_norm: Called with the total gradient norm before each clipping by norm.
        scope: Whose gradients count in it.

    Raises:
        MisconfigurationException: If the plugin is of a kind that changes layers or scales in its own way.
    """
    scale_together(plugin, _SUPPORTED, device)

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
        on_norm(clip_by_norm_(stepped_parameters(optimizer), clip_val, scope=scope()))

    def clip_grad_by_value(optimizer: Optimizer, clip_val: int | float) -> None:
        clip_by_value_(stepped_parameters(optimizer), clip_val)

    replacements: dict[str, Any] = {"clip_grad_by_norm": clip_grad_by_norm, "clip_grad_by_value": clip_grad_by_value}
    vars(plugin).update(replacements)
