"""One parameter of an optimizer, and its values in the place where they are stepped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_par.gradients import local
from lightning_par.offload.tiers import Tier
from lightning_par.offload.transfer import Arrival, Transfers

__all__ = ["Slot", "like"]

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Slot:
    """A parameter's master values, their gradient, and the way between them and the parameter.

    Args:
        parameter: As the module and the optimizer have it: this rank's part of it is what is stepped.
        master: Where it is stepped: other memory of the same shape, or the part itself.

    Attributes:
        is_copy: Whether ``master`` is other memory.
    """

    def __init__(self, parameter: Tensor, master: Tensor, is_copy: bool) -> None:
        self.parameter = parameter
        self.master = nn.Parameter(master, requires_grad=parameter.requires_grad)
        self.is_copy = is_copy
        self._mark = int(checksum(master)) if is_copy else None
        self._incoming: list[tuple[Tensor, Arrival]] = []

    def fetch_gradient(self, transfers: Transfers, pin: bool) -> None:
        """Start to copy what the parameter has got; the parameter may then lose it."""
        if self.parameter.grad is None:
            return
        gradient = local(self.parameter.grad)
        on_device = self.master.device.type != "cpu"
        self._incoming.append((gradient, None) if on_device else transfers.to_host(gradient, pin))

    def collect_gradient(self) -> None:
        """Add up what has come in. Only this keeps the sum: it may be scaled in place."""
        for gradient, arrival in self._incoming:
            if arrival is not None:
                arrival()
            gradient = as_stored(gradient, self.master)
            self.master.grad = gradient if self.master.grad is None else self.master.grad + gradient
        self._incoming = []

    def drop_gradient(self) -> None:
        """Forget the gradient."""
        self.master.grad, self._incoming = None, []

    def seen_mark(self) -> Tensor:
        """A scalar that tells whether the parameter has been written to since :meth:`send_back`, on its device."""
        return checksum(local(self.parameter.detach()))

    def refresh(self, mark: int | None) -> None:
        """Take the parameter's values over if somebody else has written to it.

        Args:
            mark: What :meth:`seen_mark` has given; ``None`` if nobody can have.
        """
        if mark is not None and mark != self._mark:
            self.master.detach().copy_(local(self.parameter.detach()))
            self._mark = mark

    def send_back(self, transfers: Transfers) -> Arrival:
        """Hand the master values to the parameter."""
        if not self.is_copy:
            return None
        self._mark = int(checksum(self.master.detach()))
        return transfers.to_device(local(self.parameter.detach()), self.master.detach())

    def stand_in(self) -> Tensor:
        """What the parameter would be if it were where it is stepped, gradient included; shares the master's memory."""
        stand_in = like(self.master.detach(), self.parameter)
        if self.master.grad is not None:
            stand_in.grad = like(self.master.grad, self.parameter)
        return stand_in

    def gradient_holder(self) -> Tensor:
        """The tensor that the gradient is at: the parameter, or once it has left that, what stands in for it."""
        return self.parameter if self.master.grad is None else self.stand_in()


def make_slots(parameters: list[Tensor], tier: Tier | None) -> list[Slot]:
    """Slots whose masters are in ``tier``; ``None`` for the parameters' own memory."""
    parts = [local(parameter.detach()) for parameter in parameters]
    masters = parts if tier is None else tier.hold(parts)
    pairs = zip(parameters, masters, strict=True)
    return [Slot(parameter, master, is_copy=tier is not None) for parameter, master in pairs]


def like(part: Any, parameter: Tensor) -> Any:
    """``part`` as this rank's part of a tensor laid out as ``parameter``, if it has its shape; shares memory."""
    if not isinstance(parameter, DTensor) or not isinstance(part, Tensor):
        return part
    if part.shape != parameter._local_tensor.shape:
        return part
    return DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def as_stored(tensor: Tensor, master: Tensor) -> Tensor:
    """``tensor`` with the strides of ``master`` if it has its shape: fused kernels walk all memory in one order."""
    if tensor.shape != master.shape or tensor.stride() == master.stride():
        return tensor
    return torch.empty_strided(master.shape, master.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def checksum(tensor: Tensor) -> Tensor:
    """Sum of the elements' bits, taken as integers."""
    return tensor.view(_BITS[tensor.element_size()]).sum(dtype=torch.int64)
