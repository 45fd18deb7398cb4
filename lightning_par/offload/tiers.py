"""Where states are kept that are not on the device: host memory, or memory-mapped files."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from lightning_par.offload.policy import OffloadPolicy

__all__ = ["DiskTier", "HostTier", "Tier", "make_tier"]

_ALIGNMENT = 64
"""Bytes; what torch's vectorised kernels like."""


class Tier(Protocol):
    """A place for tensors."""

    name: str

    def hold(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of ``tensors`` in this place, of the same shapes and types."""
        ...

    def keep(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """``tensors`` of the host, in this place: themselves if they are there already."""
        ...

    def rest(self, tensors: Iterable[Tensor]) -> None:
        """Say that tensors of this place will not be used for a while."""
        ...


class HostTier:
    """Host memory.

    Args:
        pin: Whether it is page-locked.
    """

    name = "host"

    def __init__(self, pin: bool) -> None:
        self._pin = pin

    def hold(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies in host memory; if page-locked memory can't be had, ordinary, with one warning."""
        return [self._empty_like(tensor).copy_(tensor) for tensor in tensors]

    def keep(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Themselves: what never travels need not be page-locked."""
        return list(tensors)

    def rest(self, tensors: Iterable[Tensor]) -> None:
        """Nothing to do."""

    def _empty_like(self, tensor: Tensor) -> Tensor:
        if self._pin:
            try:
                return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            except RuntimeError as error:
                self._pin = False
                warnings.warn(
                    f"Page-locked host memory can't be had ({error}): offloaded states use ordinary memory from here "
                    "on, and copies no longer overlap. Raise the limit (ulimit -l), or set pin_memory=False.",
                    stacklevel=2,
                )
        return torch.empty(tensor.shape, dtype=tensor.dtype)


class DiskTier:
    """Memory-mapped files in a folder, one for each call of :meth:`hold`.

    A file has no name any more once it is mapped: its space is free again as soon as the process ends, however it ends,
    and two ranks or runs with one folder can't meet in a file.

    Args:
        folder: An existing folder.

    Raises:
        ValueError: If it is no folder one can write to.
    """

    name = "disk"

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ValueError(f"The offload folder {folder} does not exist. Create it, or set path to one that does.")
        if not os.access(folder, os.W_OK):
            raise ValueError(f"The offload folder {folder} can't be written to. Set path to one that can.")
        self._folder = folder
        self._maps: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()  # tensors keep them, and let them go

    @property
    def free_bytes(self) -> int:
        """Space left on the folder's disk."""
        return shutil.disk_usage(self._folder).free

    def hold(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies in a new file.

        Raises:
            OSError: If the disk is full.
        """
        offsets, size = [], 0
        for tensor in tensors:
            offsets.append(size)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if size == 0:
            return [tensor.detach().to("cpu", copy=True) for tensor in tensors]
        mapped = self._map(size)
        flat = torch.frombuffer(mapped, dtype=torch.uint8)
        self._maps[flat.data_ptr()] = mapped
        held = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            part = flat[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            held.append(part.copy_(tensor))
        self.rest(held)
        return held

    def keep(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies in a file of those that are in none yet.

        Raises:
            OSError: If the disk is full.
        """
        new = iter(self.hold([tensor for tensor in tensors if not self._holds(tensor)]))
        return [tensor if self._holds(tensor) else next(new) for tensor in tensors]

    def _holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._maps

    def rest(self, tensors: Iterable[Tensor]) -> None:
        """Let go of the memory that mirrors the files; what was written stays in them."""
        for address in {tensor.untyped_storage().data_ptr() for tensor in tensors}:
            mapped = self._maps.get(address)
            if mapped is not None:
                mapped.madvise(mmap.MADV_DONTNEED)

    def _map(self, size: int) -> mmap.mmap:
        with tempfile.TemporaryFile(dir=self._folder, prefix="lightning_par-") as file:
            try:
                # Space is taken now: a write to a mapped page of a full disk would kill the process.
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                raise OSError(
                    error.errno,
                    f"The offload folder {self._folder} has no room for {size:,} bytes more of optimizer state "
                    f"({self.free_bytes:,} free). Set path to a larger disk, use more ranks, or lower fraction",
                ) from error
            return mmap.mmap(file.fileno(), size)


def make_tier(policy: OffloadPolicy, device: torch.device) -> Tier:
    """Where a policy keeps states of ``device``.

    Raises:
        ValueError: If its folder can't be used.
    """
    if policy.device == "disk":
        assert policy.path is not None
        return DiskTier(Path(policy.path))
    return HostTier(pin=policy.pin_memory and device.type != "cpu")
