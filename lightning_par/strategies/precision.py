"""What Lightning's precision plugins need to count over all ranks."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim import Optimizer

from lightning_par.gradients import local
from lightning_par.offload import stepped_parameters

__all__ = ["DistributedGradScaler", "parameter_dtype", "scale_together"]


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
        parts = [_local_part(parameter) for parameter in stepped_parameters(optimizer) if parameter.grad is not None]
        found = found_inf.to(self._root_device)
        # Gradients may be on the host, where torch expects to find the scale too.
        for device in {part.device for part in parts}:
            here = _Gradients([part for part in parts if part.device == device])
            scale, none_found = inv_scale.to(device), torch.zeros_like(found_inf, device=device)
            by_device = super()._unscale_grads_(here, scale, none_found, allow_fp16)  # type: ignore[arg-type]
            found = torch.stack([found, *(value.to(self._root_device) for value in by_device.values())]).amax(0)
        if dist.is_initialized():
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return {self._root_device: found}


class _Gradients:
    """What a scaler reads of an optimizer."""

    def __init__(self, parameters: list[Tensor]) -> None:
        self.param_groups = [{"params": parameters}]


def _local_part(parameter: Tensor) -> Tensor:
    part = local(parameter.detach())
    part.grad = None if parameter.grad is None else local(parameter.grad)
    return part


def scale_together(plugin: Any, supported: Collection[type], device: torch.device) -> None:
    """Let a precision plugin's gradient scaler, if it has one, decide over all ranks.

    Args:
        plugin: The plugin Lightning made for ``precision=...``, or the user's own.
        supported: The kinds that are known to work.
        device: This rank's device.

    Raises:
        MisconfigurationException: If the plugin is of a kind that changes layers or scales in its own way.
    """
    if type(plugin) not in supported:
        raise MisconfigurationException(
            f"Precision plugin {type(plugin).__name__} is not supported by this strategy. Choose precision "
            "'32-true', 'bf16-mixed', 'bf16-true', '16-mixed', '16-true' or '64-true'."
        )
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and not isinstance(scaler, DistributedGradScaler):
        plugin.scaler = DistributedGradScaler(scaler, device)


def parameter_dtype(plugin: Any) -> torch.dtype | None:
    """Type that sharded parameters are gathered in: half the bytes under mixed precision, else their own type."""
    return {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(plugin.precision)
