"""A check after a backward pass that whole parameters got the same gradient on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

__all__ = ["check_replicated_gradients"]


@torch.no_grad()
def check_replicated_gradients(module: nn.Module, mesh: DeviceMesh, tolerance: float = 1e-3) -> None:
    """Check that the gradients of parameters not split over the tensor axis agree on its ranks.

    They differ where a plan forgets a module that works on this rank's heads only; training would
    then let the ranks drift apart without an error. Two small collectives: meant for a first step.

    Args:
        module: after a backward pass; every rank must call this.
        mesh: the one-axis mesh that the plan was applied on.
        tolerance: largest difference of a gradient's norm between ranks, relative to the largest
            norm. Rounding differs by far less.

    Raises:
        ValueError: on every rank, naming the parameters.
    """
    grads = {
        name: parameter.grad
        for name, parameter in module.named_parameters()
        if parameter.grad is not None and not _is_split(parameter, mesh)
    }
    if mesh.size() == 1 or not grads:
        return
    # A signed sum too: equal norms can belong to different gradients.
    marks = torch.stack([_marks(grad) for grad in grads.values()])
    highest, lowest = marks.clone(), -marks
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=mesh.get_group())
    dist.all_reduce(lowest, dist.ReduceOp.MAX, group=mesh.get_group())
    # A gradient that is zero but for rounding may differ in all its digits.
    scale = highest[:, :1].clamp(min=max(1e-4 * highest[:, 0].max().item(), torch.finfo(highest.dtype).tiny))
    apart = ((highest + lowest) / scale).amax(dim=1) > tolerance
    names = [name for name, differs in zip(grads, apart.tolist(), strict=True) if differs]
    if names:
        raise ValueError(
            f"the ranks of the tensor axis got different gradients of {', '.join(names)}, which each of "
            "them holds whole: the modules work on a part of the heads or features. Give them style "
            "'replicated_with_grad_allreduce' in the tensor-parallel plan; if they come before the split layers, look "
            "for a module beside those that mixes whole and split features, and leave that block's layers out"
        )


def _is_split(parameter: Tensor, mesh: DeviceMesh) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ()
    ours = (mesh.mesh_dim_names or ("",))[0]
    placed = dict(zip(names, parameter.placements, strict=False))
    return ours in placed and not placed[ours].is_replicate()


def _marks(grad: Tensor) -> Tensor:
    """Norm, and a signed sum scaled to the norm's size, of this rank's part of a gradient."""
    local = (grad.to_local() if isinstance(grad, DTensor) else grad).flatten().float()
    signs = torch.arange(local.numel(), device=local.device).remainder(2).mul(2).sub(1)
    return torch.stack([local.norm(), (local * signs).sum() / max(local.numel(), 1) ** 0.5])
