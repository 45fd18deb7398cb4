"""Bytes of the tensors that are alive on a rank, at every operator of a real step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_par.gradients import local

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Counts the storages of all tensors that operators have made, by their present size.

    ``fully_shard`` empties and refills storages without an operator, so all sizes are read anew each time.

    Args:
        existing: Tensors that were made before, and count as well.
    """

    def __init__(self, existing: Iterable[Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}
        for tensor in existing:
            self._remember(local(tensor.detach()))
        self.look()

    def look(self) -> int:
        """Bytes alive now."""
        alive = 0
        for reference in list(self._storages.values()):
            storage = reference()
            alive += 0 if storage is None else storage.nbytes()
        self.peak = max(self.peak, alive)
        return alive

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, and look."""
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, output)):
            if type(leaf) in (Tensor, torch.nn.Parameter):
                self._remember(leaf)
        self.look()
        return output

    def _remember(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._storages.get(key)
        if known is None or known() is not storage:
            self._storages[key] = weakref.ref(storage, lambda _: self._storages.pop(key, None))
