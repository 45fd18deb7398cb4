"""Making Lightning's precision plugins count over all ranks.

The Trainer clips through its precision plugin and never asks the strategy, and the plugin only sees this rank's shards.
So the strategy hands each plugin it is given to :func:`connect_precision`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import (
    DoublePrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
)
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer

from lightning_par.gradients import NormScope, clip_by_norm_, clip_by_value_, local

__all__ = ["DistributedGradScaler", "connect_precision", "parameter_dtype"]

_SUPPORTED = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)


class DistributedGradScaler(torch.amp.GradScaler):
    """A gradient scaler that skips a step on all ranks as soon as one of them overflowed.

    Args:
        like: The scaler whose settings are taken over.
        device: Where the ranks' findings are compared.
    """

    def __init__(self, like: torch.amp.GradScaler, device: torch.device) -> None:
        super().__init__(
            device=device.type,
            init_scale=like.get_scale(),
            growth_factor=like.get_growth_factor(),
            backoff_factor=like.get_backoff_factor(),
            growth_interval=like.get_growth_interval(),
            enabled=like.is_enabled(),
        )
        self._root_device = device

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale this rank's shards, then agree on whether any rank found an infinity."""
        by_device = super()._unscale_grads_(_LocalGradients(optimizer), inv_scale, found_inf, allow_fp16)  # type: ignore[arg-type]
        found = torch.stack([value.to(self._root_device) for value in [found_inf, *by_device.values()]]).amax(0)
        if dist.is_initialized():
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return {self._root_device: found}


class _LocalGradients:
    """What a scaler reads of an optimizer, with every parameter replaced by this rank's part of it."""

    def __init__(self, optimizer: Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.param_groups = [{"params": [_local_parameter(parameter) for parameter in parameters]}]


def _local_parameter(parameter: Tensor) -> Tensor:
    part = local(parameter.detach())
    part.grad = None if parameter.grad is None else local(parameter.grad)
    return part


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
    if type(plugin) not in _SUPPORTED:
        raise MisconfigurationException(
            f"Precision plugin {type(plugin).__name__} is not supported by this strategy. Choose precision "
            "'32-true', 'bf16-mixed', 'bf16-true', '16-mixed', '16-true' or '64-true'."
        )

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
        on_norm(clip_by_norm_(plugin.main_params(optimizer), clip_val, scope=scope()))

    def clip_grad_by_value(optimizer: Optimizer, clip_val: int | float) -> None:
        clip_by_value_(plugin.main_params(optimizer), clip_val)

    replacements: dict[str, Any] = {"clip_grad_by_norm": clip_grad_by_norm, "clip_grad_by_value": clip_grad_by_value}
    vars(plugin).update(replacements)
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and not isinstance(scaler, DistributedGradScaler):
        plugin.scaler = DistributedGradScaler(scaler, device)  # type: ignore[attr-defined]


def parameter_dtype(plugin: Precision) -> torch.dtype | None:
    """Type that sharded parameters are gathered in: half the bytes under mixed precision, else their own type."""
    types = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    return types.get(plugin.precision) if isinstance(plugin, MixedPrecision) else None
