"""Unsharded values of what a laid-out module holds."""

from __future__ import annotations

from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor


def whole(tensor: Tensor) -> Tensor:
    """The unsharded value of a tensor, as a copy; a collective of its ranks if it is sharded."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def whole_weights(module: LightningModule) -> dict[str, Tensor]:
    """Every parameter of the module, unsharded."""
    return {name: whole(parameter) for name, parameter in module.named_parameters()}
