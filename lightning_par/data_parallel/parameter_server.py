"""The classic parameter server: gradients go to one rank, which averages them, steps, and hands the weights back.

Of the ranks of a data axis one, the server, holds the only optimizer state (Li et al., OSDI 2014, in its synchronous
form). Elements sent in a step, with ``P`` parameters and ``N`` ranks that see data:

====================  ===================  =====================
\\                     server               each other rank
====================  ===================  =====================
gradients             0                    P
weights               (N - 1) P            0
received              (N - 1) P            P
====================  ===================  =====================

The server's traffic grows with ``N``, an all-reduce's stays at ``2 P`` for every rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_par.gradients import local

__all__ = ["ParameterServer", "ServerOptions"]

_BUCKET_BYTES = 25 * 2**20
"""Gradients travel together in buckets of this size, the one that ``DistributedDataParallel`` has by default."""
_BUCKETS_IN_FLIGHT = 2
"""More would cost the server a copy of the model for each worker."""


@dataclass(frozen=True)
class ServerOptions:
    """Which rank of the data axis is the server.

    Attributes:
        rank: Its index on the axis.
        is_dedicated: Whether it sees no data.

    Raises:
        ValueError: If the index is no such number.
    """

    rank: int = 0
    is_dedicated: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 0:
            raise ValueError(f"server_rank={self.rank!r} must be an integer of at least 0.")

    def check(self, num_ranks: int) -> None:
        """Check against the size of the data axis.

        Raises:
            ValueError: If the server's rank is outside of it, or a dedicated server would be alone.
        """
        if self.rank >= num_ranks:
            raise ValueError(
                f"server_rank={self.rank} is outside of the data axis, whose {num_ranks} rank(s) count from 0. "
                f"Choose one below {num_ranks}."
            )
        if self.is_dedicated and num_ranks == 1:
            raise ValueError(
                "dedicated=True keeps the server without data, but the data axis has one rank, so nobody would have "
                "any. Use more devices, or dedicated=False."
            )


@dataclass
class _Bucket:
    """Parameters of one type that travel together, and what is on its way for them."""

    parameters: list[nn.Parameter]
    missing: int = 0
    flats: list[Tensor] = field(default_factory=list)
    works: list[dist.Work] = field(default_factory=list)

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters[0].dtype

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(sum(local(p).numel() for p in self.parameters), dtype=self.dtype, device=device)

    def wait(self) -> list[Tensor]:
        """What has arrived, or been sent."""
        for work in self.works:
            work.wait()
        flats, self.flats, self.works = self.flats, [], []
        return flats


class ParameterServer:
    """One rank's part in the exchange between a server and its workers.

    Args:
        parameters: Gives this rank's parameters; the same on every rank of the group, in the same order.
        group: The data axis.
        options: Which of them is the server.
        overlaps: Whether gradients may leave while backward goes on; else they leave at its end.
        device: This rank's device.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterable[nn.Parameter]],
        group: dist.ProcessGroup,
        options: ServerOptions,
        *,
        overlaps: bool,
        device: torch.device,
    ) -> None:
        self._parameters = parameters
        self.group = group
        self.rank = options.rank
        self._overlaps = overlaps
        self._device = device
        self.is_server = group.rank() == options.rank
        self._workers = [rank for rank in range(group.size()) if rank != options.rank]
        self._num_contributions = len(self._workers) + (0 if options.is_dedicated else 1)
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[nn.Parameter, _Bucket] = {}
        self._hooks: list[Any] = []
        self._num_launched = 0
        self._is_last = True
        self._in_window = False
        self._averaged: dict[nn.Parameter, Tensor] = {}
        self._used: set[nn.Parameter] = set()

    def before_backward(self, is_last: bool) -> None:
        """At the begin of each backward.

        Args:
            is_last: Whether it is the last of its accumulation window.
        """
        if not self._in_window:
            self._in_window = True
            self._rebuild_if_needed()
            # What stands here has been averaged before: it must not be averaged again with what comes.
            self._averaged = {p: p.grad for p in self._bucket_of if p.grad is not None}
            for parameter in self._averaged:
                parameter.grad = None
        self._is_last = is_last
        self._num_launched = 0
        self._used = set()
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)

    @torch.no_grad()
    def finish(self) -> None:
        """After the last backward of a window: the server has the average of all, workers have no gradients."""
        self._used.update(parameter for parameter in self._bucket_of if parameter.grad is not None)
        while self._num_launched < len(self._buckets):
            self._launch_next()
        for bucket in self._buckets:
            self._settle(bucket)
        unused = self._unused_by_all()
        for parameter in unused:
            parameter.grad = None
        for parameter, earlier in self._averaged.items():
            parameter.grad = earlier if parameter.grad is None else parameter.grad.add_(earlier)
        self._averaged = {}
        self._in_window = False

    @torch.no_grad()
    def return_weights(self, stepped: Collection[Tensor]) -> None:
        """After an optimizer's step: every worker takes the server's values of what it has stepped."""
        wanted = {id(parameter) for parameter in stepped}
        for bucket in self._buckets:
            parameters = [parameter for parameter in bucket.parameters if id(parameter) in wanted]
            if not parameters:
                continue
            if self.is_server:
                flat = _flatten([local(parameter.detach()) for parameter in parameters])
                bucket.flats = [flat]
                bucket.works = [self._send(flat, worker) for worker in self._workers]
            else:
                part = _Bucket(parameters)
                bucket.flats = [part.empty(self._device)]
                bucket.works = [self._receive(bucket.flats[0], self.rank)]
        for bucket in self._buckets:
            parameters = [parameter for parameter in bucket.parameters if id(parameter) in wanted]
            for flat in bucket.wait():
                if not self.is_server:
                    for parameter, value in zip(parameters, _views(flat, parameters), strict=True):
                        local(parameter.detach()).copy_(value)

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _rebuild_if_needed(self) -> None:
        """Parameters may be frozen and thawed between steps."""
        trained = [parameter for parameter in self._parameters() if parameter.requires_grad]
        if self._bucket_of.keys() == set(trained):
            return
        self.close()
        # Backward reaches the last ones first.
        self._buckets = [_Bucket(parameters) for parameters in _packed(list(reversed(trained)))]
        self._bucket_of = {parameter: bucket for bucket in self._buckets for parameter in bucket.parameters}
        if self._overlaps:
            hook = partial(_tell, weakref.ref(self))  # a hook that held this would keep the parameters alive for ever
            self._hooks = [parameter.register_post_accumulate_grad_hook(hook) for parameter in trained]

    @torch.no_grad()
    def on_gradient(self, parameter: nn.Parameter) -> None:
        """A parameter's gradient is complete for this backward: send what can go."""
        if not (self._is_last and self._in_window):
            return
        if parameter in self._used:
            raise RuntimeError(
                f"A parameter of shape {tuple(parameter.shape)} got a gradient twice in one backward, after the first "
                "had been sent to the parameter server. Checkpoint activations with use_reentrant=False."
            )
        self._used.add(parameter)
        self._bucket_of[parameter].missing -= 1
        # In one order on all ranks, whatever order gradients are ready in.
        while self._num_launched < len(self._buckets) and self._buckets[self._num_launched].missing == 0:
            self._launch_next()

    def _launch_next(self) -> None:
        bucket = self._buckets[self._num_launched]
        if self._num_launched >= _BUCKETS_IN_FLIGHT:
            self._settle(self._buckets[self._num_launched - _BUCKETS_IN_FLIGHT])
        self._num_launched += 1
        if self.is_server:
            bucket.flats = [bucket.empty(self._device) for _ in self._workers]
            pairs = zip(bucket.flats, self._workers, strict=True)
            bucket.works = [self._receive(flat, worker) for flat, worker in pairs]
            return
        flat = _flatten([_gradient(parameter) for parameter in bucket.parameters])
        for parameter in bucket.parameters:
            parameter.grad = None
        bucket.flats, bucket.works = [flat], [self._send(flat, self.rank)]

    def _settle(self, bucket: _Bucket) -> None:
        """Wait for what is on its way; on the server, average it with what is here."""
        parts = [_views(flat, bucket.parameters) for flat in bucket.wait()]
        if not (self.is_server and parts):
            return
        for position, parameter in enumerate(bucket.parameters):
            own = [] if parameter.grad is None else [local(parameter.grad)]
            total = _sum([*own, *(views[position] for views in parts)])
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            local(parameter.grad).copy_(total / self._num_contributions)

    def _unused_by_all(self) -> list[nn.Parameter]:
        """On the server: what neither it nor any worker has used."""
        order = list(self._bucket_of)
        own = torch.tensor([parameter in self._used for parameter in order], dtype=torch.uint8, device=self._device)
        if not self.is_server:
            self._send(own, self.rank).wait()
            return []
        told = [torch.empty_like(own) for _ in self._workers]
        works = [self._receive(flags, worker) for flags, worker in zip(told, self._workers, strict=True)]
        for work in works:
            work.wait()
        used = torch.stack([own, *told]).amax(0).tolist()
        return [parameter for parameter, is_used in zip(order, used, strict=True) if not is_used]

    def _send(self, tensor: Tensor, to: int) -> dist.Work:
        return _started(dist.isend(tensor, group=self.group, group_dst=to))

    def _receive(self, tensor: Tensor, source: int) -> dist.Work:
        return _started(dist.irecv(tensor, group=self.group, group_src=source))


def _tell(server: weakref.ref[ParameterServer], parameter: nn.Parameter) -> None:
    known = server()
    if known is not None:
        known.on_gradient(parameter)


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


def _packed(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Parameters in lists of one type and at most a bucket's bytes, but at least one."""
    packed: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        nbytes = local(parameter.detach()).nbytes
        if packed and (size + nbytes > _BUCKET_BYTES or parameter.dtype != packed[0].dtype):
            yield packed
            packed, size = [], 0
        packed.append(parameter)
        size += nbytes
    if packed:
        yield packed


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(local(parameter.detach())) if parameter.grad is None else local(parameter.grad)


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _views(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    shapes = [local(parameter.detach()).shape for parameter in parameters]
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _sum(tensors: Sequence[Tensor]) -> Tensor:
    """In float32 at least: sums of many half-precision gradients lose digits."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    total = tensors[0].to(dtype, copy=True)
    for tensor in tensors[1:]:
        total += tensor
    return total
