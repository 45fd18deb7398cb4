"""The total gradient norm and clipping over all axes of the mesh.

Gradients are local shards on different meshes, which ``torch.nn.utils.clip_grad_norm_`` refuses to mix. A gradient's
share of the norm is summed over exactly the axes it is sharded on, so replicated parameters count once and so do tied
ones (they are one parameter).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = [
    "NormScope",
    "clip_by_norm_",
    "clip_by_value_",
    "is_sharded",
    "local",
    "scale_gradients",
    "total_norm",
    "whole",
]


@dataclass(frozen=True)
class NormScope:
    """Ranks that hold different parameters, and what to leave out so that nothing counts twice.

    Attributes:
        group: The ranks (the ``pp`` axis), ``None`` if all hold the same parameters.
        counted_elsewhere: This rank's parameters that another rank of the group counts.
        device: This rank's device.
        told_by: A group and the rank in it whose gradients count for all, ``None`` if each rank has its own.
    """

    group: dist.ProcessGroup | None = None
    counted_elsewhere: Collection[Tensor] = ()
    device: torch.device = torch.device("cpu")
    told_by: tuple[dist.ProcessGroup, int] | None = None


def local(tensor: Tensor) -> Tensor:
    """This rank's part of ``tensor``: its shard if it is a DTensor, else the tensor itself. Shares memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_sharded(tensor: Tensor, axis: str) -> bool:
    """Whether ``tensor`` is cut over that axis of the mesh."""
    return isinstance(tensor, DTensor) and axis in (tensor.device_mesh.mesh_dim_names or ())


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """All of ``tensor``. A collective of its mesh if it is a DTensor, whose shard may be on the host."""
    if not isinstance(tensor, DTensor):
        return tensor
    shard, mesh = tensor.to_local(), tensor.device_mesh
    if shard.device.type != mesh.device_type:
        shape, stride = tensor.shape, tensor.stride()
        shard = shard.to(mesh.device_type)
        tensor = DTensor.from_local(shard, mesh, tensor.placements, run_check=False, shape=shape, stride=stride)
    return tensor.full_tensor()


@torch.no_grad()
def total_norm(parameters: Iterable[Tensor], norm_type: float = 2.0, scope: NormScope = NormScope()) -> Tensor:
    """Norm of all gradients together, equal on every rank and to that of one process.

    Args:
        parameters: Parameters whose ``.grad`` counts; those without one are skipped. Each rank gives its own.
        norm_type: Order of the norm, ``math.inf`` for the largest absolute value.
        scope: Further ranks whose parameters count.

    Returns:
        Scalar float64 tensor on the scope's device.
    """
    shares: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    elsewhere = {id(parameter) for parameter in scope.counted_elsewhere}
    for parameter in parameters:
        if parameter.grad is not None and id(parameter) not in elsewhere:
            shares[_sharding_groups(parameter)].append(local(parameter.grad))
    # Gradients may be on the host, where a device's groups can't reach them.
    own = {groups: _norms(grads, norm_type).to(scope.device) for groups, grads in shares.items()}
    norms = [_over_ranks(norm, groups, norm_type) for groups, norm in own.items()]
    norm = _combine(norms, norm_type) if norms else torch.zeros((), dtype=torch.float64, device=scope.device)
    if scope.group is not None:
        norm = _over_ranks(norm, [scope.group], norm_type)
    if scope.told_by is not None:
        group, rank = scope.told_by
        norm = norm.to(scope.device)
        dist.broadcast(norm, group=group, group_src=rank)
    return norm


@torch.no_grad()
def clip_by_norm_(
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    scope: NormScope = NormScope(),
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``.

    Returns:
        The total norm before clipping, as :func:`total_norm` gives it.

    Raises:
        RuntimeError: On every rank and with nothing scaled, if the norm is not a finite number and is asked to be.
    """
    parameters = list(parameters)
    norm = total_norm(parameters, norm_type, scope)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"The total gradient norm of order {norm_type} is {float(norm)}, so gradients can't be clipped by it. Look "
            "for the step that made it, or scale by it nevertheless with error_if_nonfinite=False."
        )
    # The same factor as torch.nn.utils.clip_grad_norm_, so that results equal one process.
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for grad in _local_grads(parameters):
        grad.mul_(factor.to(grad.device, grad.dtype))
    return norm


@torch.no_grad()
def clip_by_value_(parameters: Iterable[Tensor], max_value: float) -> None:
    """Clamp every gradient element in place to ``[-max_value, max_value]``."""
    for grad in _local_grads(parameters):
        grad.clamp_(-max_value, max_value)


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply every gradient in place."""
    for grad in _local_grads(parameters):
        grad.mul_(factor)


def _local_grads(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [local(parameter.grad) for parameter in parameters if parameter.grad is not None]


def _sharding_groups(parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Process groups of the axes that ``parameter`` is sharded on. The same on every rank, in the same order."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    # Not `is_shard()`: the strided shards of ZeRO over tensor parallelism answer False to it.
    return tuple(
        mesh.get_group(dim) for dim, placement in enumerate(parameter.placements) if not placement.is_replicate()
    )


def _norms(grads: list[Tensor], norm_type: float) -> Tensor:
    return _combine([_norm(grad, norm_type) for grad in grads], norm_type)


def _over_ranks(norm: Tensor, groups: Iterable[dist.ProcessGroup], norm_type: float) -> Tensor:
    """The norm of all ranks' parts together."""
    if math.isinf(norm_type):
        for group in groups:
            dist.all_reduce(norm, op=dist.ReduceOp.MAX, group=group)
        return norm
    power = norm.pow(norm_type)
    for group in groups:
        dist.all_reduce(power, group=group)
    return power.pow(1.0 / norm_type)


def _norm(grad: Tensor, norm_type: float) -> Tensor:
    """Summed in float32 at least, and handed on in one type that all ranks share."""
    dtype = torch.promote_types(grad.dtype, torch.float32)
    return torch.linalg.vector_norm(grad, norm_type, dtype=dtype).double()


def _combine(norms: list[Tensor], norm_type: float) -> Tensor:
    return torch.linalg.vector_norm(torch.stack(norms), norm_type)
