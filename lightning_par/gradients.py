"""The total gradient norm and clipping over all axes of the mesh.

Gradients are local shards on different meshes, which ``torch.nn.utils.clip_grad_norm_`` refuses to mix. A gradient's
share of the norm is summed over exactly the axes it is sharded on, so replicated parameters count once and so do tied
ones (they are one parameter).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["clip_by_norm_", "clip_by_value_", "local", "total_norm"]


def local(tensor: Tensor) -> Tensor:
    """This rank's part of ``tensor``: its shard if it is a DTensor, else the tensor itself. Shares memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def total_norm(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Norm of all gradients together, equal on every rank and to that of one process.

    Args:
        parameters: Parameters whose ``.grad`` counts; those without one are skipped. Each rank gives its own.
        norm_type: Order of the norm, ``math.inf`` for the largest absolute value.

    Returns:
        Scalar float64 tensor on the gradients' device.
    """
    shares: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            shares[_sharding_groups(parameter)].append(local(parameter.grad))
    if not shares:
        return torch.zeros((), dtype=torch.float64)
    return _combine([_sum_over_ranks(group, grads, norm_type) for group, grads in shares.items()], norm_type)


@torch.no_grad()
def clip_by_norm_(parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale gradients in place so that their total norm is at most ``max_norm``.

    Returns:
        The total norm before clipping, as :func:`total_norm` gives it.
    """
    parameters = list(parameters)
    norm = total_norm(parameters, norm_type)
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


def _sum_over_ranks(groups: tuple[dist.ProcessGroup, ...], grads: list[Tensor], norm_type: float) -> Tensor:
    """Norm of ``grads`` and their peers' on the ranks of ``groups``."""
    norm = _combine([_norm(grad, norm_type) for grad in grads], norm_type)
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
