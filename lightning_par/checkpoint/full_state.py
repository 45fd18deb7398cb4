"""From shards to full tensors, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_par.gradients import whole

__all__ = ["gather_full_state", "shard_full_state", "shard_optimizer_state"]


def gather_full_state(state: Any, keep: bool) -> Any:
    """Replace every tensor of a nested state by its full value on the host.

    A collective: every rank of the mesh calls it with a state of the same structure.

    Args:
        state: Nested containers with tensors, DTensors and plain values.
        keep: Whether this rank keeps the result; others take part tensor by tensor and get an empty dictionary.
    """
    full = tree_map_only(Tensor, lambda tensor: _gather(tensor, keep), state)
    return full if keep else {}


def shard_full_state(full: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, Any]:
    """Cut this rank's share out of full tensors.

    Args:
        full: Full tensors by name, on the host.
        reference: The present state by the same names, whose DTensors say how each tensor is cut. Names that are
            missing here pass through as they are, for the loading module to judge.

    Raises:
        ValueError: If a tensor's shape differs from the reference's.
    """
    return {name: _shard(name, value, reference.get(name)) for name, value in full.items()}


def shard_optimizer_state(
    full: Mapping[str, Any], optimizer: Optimizer, references: Sequence[Tensor] | None = None
) -> dict[str, Any]:
    """Cut this rank's share out of an optimizer's full ``state_dict()``.

    Args:
        full: An optimizer state of one process: state by parameter position, and parameter groups.
        optimizer: The optimizer to load it into, over this rank's parameters in the same order.
        references: Tensors laid out and placed as the state of each parameter is to be; ``None`` for the parameters.

    Raises:
        ValueError: If a state tensor has several elements but not its parameter's shape, so that nobody knows how to
            cut it for a sharded parameter.
    """
    parameters = references or [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        position: {
            name: _shard_moment(f"state {name!r} of parameter {position}", value, parameters[position])
            for name, value in entry.items()
        }
        for position, entry in full["state"].items()
    }
    return {**full, "state": state}


@torch.no_grad()
def _gather(tensor: Tensor, keep: bool) -> Tensor | None:
    full = whole(tensor)
    return full.detach().cpu() if keep else None


def _shard_moment(name: str, value: Any, parameter: Tensor) -> Any:
    counts_steps = isinstance(value, Tensor) and value.numel() == 1 and value.shape != parameter.shape
    return value if counts_steps else _shard(name, value, parameter)


def _shard(name: str, value: Any, reference: Any) -> Any:
    if not isinstance(reference, DTensor) or not isinstance(value, Tensor):
        return value
    if value.shape != reference.shape:
        raise ValueError(
            f"The checkpoint's {name} has shape {tuple(value.shape)}, but {tuple(reference.shape)} is needed here."
        )
    mesh, placements = reference.device_mesh, reference.placements
    shape, offset = compute_local_shape_and_global_offset(value.shape, mesh, placements)
    window = tuple(slice(start, start + length) for start, length in zip(offset, shape, strict=True))
    part = value[window].to(device=reference.device, copy=True).contiguous()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=reference.shape, stride=reference.stride())
