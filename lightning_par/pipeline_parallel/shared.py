"""Parameters that several ranks of a pipeline hold: tied embeddings and heads, loose ones that every stage reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_par.gradients import local

__all__ = ["Shared", "SharedParameters"]


@dataclass(frozen=True)
class Shared:
    """One such parameter.

    Attributes:
        name: Its first global name.
        holders: Pipeline ranks that hold it, ascending; the first owns it.
        parameter: This rank's, ``None`` where it holds none.
    """

    name: str
    holders: tuple[int, ...]
    parameter: nn.Parameter | None


class SharedParameters:
    """Keeps them equal, and their gradients complete.

    Args:
        shared: The same parameters in the same order on every rank of the group.
        group: The ``pp`` axis.
        device: This rank's device.
    """

    def __init__(self, shared: Sequence[Shared], group: dist.ProcessGroup, device: torch.device) -> None:
        self._shared = shared
        self._group = group
        self._device = device
        self._summed: dict[nn.Parameter, Tensor] = {}

    def owned_elsewhere(self) -> list[nn.Parameter]:
        """This rank's parameters that count on another rank, as in a norm over all."""
        rank = self._group.rank()
        return [one.parameter for one in self._shared if one.parameter is not None and one.holders[0] != rank]

    @torch.no_grad()
    def equalize(self) -> None:
        """Give every holder the values of the owner. A collective of the group."""
        for one in self._shared:
            if one.parameter is None:
                continue
            value = local(one.parameter.detach())
            owner, *others = one.holders
            if self._group.rank() == owner:
                sent = value.contiguous().to(self._device)
                for other in others:
                    dist.send(sent, group=self._group, group_dst=other)
            else:
                received = torch.empty_like(value, memory_format=torch.contiguous_format, device=self._device)
                dist.recv(received, group=self._group, group_src=owner)
                value.copy_(received)

    def set_aside(self) -> None:
        """At the begin of a window: what stands here has been summed before, and must not be summed again."""
        own = [one.parameter for one in self._shared if one.parameter is not None]
        self._summed = {parameter: parameter.grad for parameter in own if parameter.grad is not None}
        for parameter in self._summed:
            parameter.grad = None

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Give every holder the sum of all holders' gradients, and add what was set aside. A collective of the group.

        A parameter that no holder used keeps the gradient that it had, or none.
        """
        self._sum_fresh()
        for parameter, earlier in self._summed.items():
            parameter.grad = earlier if parameter.grad is None else parameter.grad.add_(earlier)
        self._summed = {}

    def _sum_fresh(self) -> None:
        trained = [one for one in self._shared if one.parameter is None or one.parameter.requires_grad]
        if not trained:
            return
        has = [one.parameter is not None and one.parameter.grad is not None for one in trained]
        used = torch.tensor(has, dtype=torch.int32, device=self._device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._group)
        for one, is_used in zip(trained, used.tolist(), strict=True):
            if one.parameter is not None and is_used:
                if one.parameter.grad is None:
                    one.parameter.grad = torch.zeros_like(one.parameter)
                grad = local(one.parameter.grad)
                dtype = torch.promote_types(grad.dtype, torch.float32)
                grad.copy_(self._sum(grad.to(self._device, dtype), one.holders))

    def _sum(self, value: Tensor, holders: Sequence[int]) -> Tensor:
        if len(holders) == self._group.size():
            value = value.contiguous().clone()
            dist.all_reduce(value, group=self._group)
            return value
        return self._swap_and_add(value.contiguous(), [rank for rank in holders if rank != self._group.rank()])

    def _swap_and_add(self, value: Tensor, others: Sequence[int]) -> Tensor:
        """For a few holders, such as the first and last stage: the stages between have no part in it."""
        received = [torch.empty_like(value) for _ in others]
        operations = [dist.P2POp(dist.isend, value, group=self._group, group_peer=other) for other in others]
        operations += [
            dist.P2POp(dist.irecv, buffer, group=self._group, group_peer=other)
            for buffer, other in zip(received, others, strict=True)
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        # In the order of ranks, so that all holders get the same digits.
        parts = dict(zip(others, received, strict=True)) | {self._group.rank(): value}
        return torch.stack([parts[rank] for rank in sorted(parts)]).sum(0)
