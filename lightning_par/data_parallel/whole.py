"""Parameters that stay whole on every rank of the data axis, outside of all units.

``fully_shard`` refuses those without dimensions, such as a learned temperature. And one that two trees of a rank share
(a tied embedding whose first and last pipeline stage meet there) can't belong to the units of both.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from lightning_par.gradients import local

__all__ = ["Place", "average_whole_gradients", "places_in_several", "whole_parameters"]

Place: TypeAlias = tuple[int, str]
"""Where a parameter is registered: the id of a module's table of parameters, and the name in it.

The parameter itself is replaced while it is laid out, its place is not; and copies of a module share its table.
"""


def places_in_several(trees: Sequence[nn.Module]) -> set[Place]:
    """Where the parameters are registered that more than one of ``trees`` holds."""
    holders: dict[nn.Parameter, set[int]] = {}
    places: dict[nn.Parameter, set[Place]] = {}
    for number, tree in enumerate(trees):
        for place, parameter in _registered(tree):
            holders.setdefault(parameter, set()).add(number)
            places.setdefault(parameter, set()).add(place)
    return {place for parameter, found in places.items() if len(holders[parameter]) > 1 for place in found}


def whole_parameters(root: nn.Module, shared: Collection[Place]) -> list[nn.Parameter]:
    """The parameters of ``root`` that stay whole, each once, in the order of registration."""
    found = (parameter for place, parameter in _registered(root) if parameter.ndim == 0 or place in shared)
    return list(dict.fromkeys(found))


def _registered(root: nn.Module) -> list[tuple[Place, nn.Parameter]]:
    return [
        ((id(module._parameters), name), parameter)
        for module in root.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


@torch.no_grad()
def average_whole_gradients(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, device: torch.device) -> None:
    """Average gradients over the ranks that see different batches. A collective for each, and one for all.

    Args:
        parameters: The same on every rank, in the same order. Ranks that did not use one count as zero; one that no
            rank used keeps no gradient.
        group: The data axis.
        device: This rank's device.
    """
    if not parameters:
        return
    used = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32, device=device)
    dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
    for parameter, is_used in zip(parameters, used.tolist(), strict=True):
        if not is_used:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        grad = local(parameter.grad)
        total = grad.to(torch.promote_types(grad.dtype, torch.float32))
        dist.all_reduce(total, group=group)
        grad.copy_(total / group.size())
