"""Parameters without dimensions, such as a learned temperature: nothing to shard, so they stay whole on every rank.

``fully_shard`` refuses them. They are left out of the units, and their gradients are averaged here.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["average_scalar_gradients", "scalar_parameters"]


def scalar_parameters(root: nn.Module) -> set[nn.Parameter]:
    """The parameters of ``root`` that have no dimension."""
    return {parameter for parameter in root.parameters() if parameter.ndim == 0}


@torch.no_grad()
def average_scalar_gradients(scalars: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Average the gradients of whole scalars over the ranks that see different batches. One collective for all.

    Args:
        scalars: The same on every rank, in the same order. Ranks that did not use one count as zero; one that no rank
            used keeps no gradient.
        group: The data axis.
    """
    if not scalars:
        return
    packed = torch.zeros(len(scalars), 2, dtype=torch.float64, device=scalars[0].device)
    for row, parameter in zip(packed, scalars, strict=True):
        if parameter.grad is not None:
            row[0], row[1] = parameter.grad, 1
    dist.all_reduce(packed, group=group)
    for parameter, total, num_users in zip(scalars, packed[:, 0], packed[:, 1].tolist(), strict=True):
        if num_users:
            parameter.grad = (total / group.size()).to(parameter.dtype)
