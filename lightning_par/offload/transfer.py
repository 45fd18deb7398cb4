"""Copies between a device and its host that do not hold up either of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["Arrival", "Transfers"]

Arrival: TypeAlias = Callable[[], None] | None
"""Waits on the host until a copy has arrived; ``None`` if it has."""


class Transfers:
    """Copies on two streams of their own, one a direction. On a device that is its own host nothing is copied.

    Args:
        device: The device.
        overlap: Whether copies go on while the device computes.
    """

    def __init__(self, device: torch.device, overlap: bool) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        uses_streams = overlap and device.type != "cpu"
        self._down: Any = self._module.Stream(device) if uses_streams else None
        self._up: Any = self._module.Stream(device) if uses_streams else None

    def to_host(self, tensor: Tensor, pin: bool) -> tuple[Tensor, Arrival]:
        """A host copy of what ``tensor`` will hold once the current stream gets here; itself if it is on the host.

        Args:
            tensor: A tensor of the device that nobody writes to any more.
            pin: Whether the copy is page-locked, which it must be to overlap.
        """
        if tensor.device.type == "cpu":
            return tensor, None
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin)
        if self._down is not None:
            self._down.wait_stream(self._module.current_stream(tensor.device))
        with self._on(self._down):
            copy.copy_(tensor, non_blocking=True)
            if self._down is not None:
                tensor.record_stream(self._down)
            done = self._module.Event()
            done.record()
        return copy, done.synchronize

    def fence(self) -> None:
        """Let no copy to the device start before what the current stream has been given so far."""
        if self._up is not None:
            self._up.wait_stream(self._module.current_stream(self._up.device))

    def to_device(self, target: Tensor, source: Tensor) -> Arrival:
        """Copy ``source``, which stays as it is until the copy has arrived, into ``target``.

        Returns:
            Makes the stream that is current at its call wait for the copy.
        """
        if target.device.type == "cpu":
            target.copy_(source)
            return None
        with self._on(self._up):
            target.copy_(source, non_blocking=True)
            done = self._module.Event()
            done.record()
        return lambda: self._module.current_stream(target.device).wait_event(done)

    def adopt_thread(self) -> None:
        """Make the calling thread one that works for the device."""
        if self._device.index is not None:
            self._module.set_device(self._device)

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else self._module.stream(stream)
