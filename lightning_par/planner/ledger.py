"""Bytes and FLOPs of what runs, operator by operator, on tensors without memory.

The ledger watches the dispatcher, below autograd, so it sees the forward and the backward of any module. Time is cut
into sections by :meth:`Ledger.enter`; each gets an :class:`Entry`.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lightning_par.activation_checkpointing import COSTLY

__all__ = ["Entry", "Ledger"]

_aten = torch.ops.aten
_CPU_ATTENTION = _aten._scaled_dot_product_flash_attention_for_cpu
_CPU_ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward
_FREE = ("aten::detach", "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty")


@dataclass
class Entry:
    """What one section did.

    Attributes:
        start: Bytes alive when it began.
        end: Bytes alive when it ended.
        peak: Most bytes alive in between.
        output: Bytes of what it hands on.
        costly: Bytes that operators made which selective checkpointing keeps.
        flops: Of matrix products and attention.
        product_bytes: Read and written by those.
        other_bytes: Read and written by all others.
        operators: How many there were.
        tensor_bytes: Moved on the tensor axis.
        tensor_calls: Collectives on it.
    """

    start: int = 0
    end: int = 0
    peak: int = 0
    output: int = 0
    costly: int = 0
    flops: int = 0
    product_bytes: int = 0
    other_bytes: int = 0
    operators: int = 0
    tensor_bytes: int = 0
    tensor_calls: int = 0


class Ledger(TorchDispatchMode):
    """Writes down what runs while it is entered as a context manager.

    Args:
        known: Tensors that exist already and count for nothing: parameters, buffers, the batch.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.entries: dict[str, Entry] = defaultdict(Entry)
        self._alive = 0
        self._section = ""
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        for tensor in known:
            self._remember(tensor, counts=False)
        self.enter("")

    @property
    def section(self) -> str:
        """The present section."""
        return self._section

    def enter(self, section: str) -> None:
        """End the present section and begin another."""
        self.entries[self._section].end = self._alive
        self._section = section
        self.entries[section] = Entry(start=self._alive, peak=self._alive)

    def note_collective(self, moved: int) -> None:
        """Count a collective of the tensor axis that moves so many bytes."""
        entry = self.entries[self._section]
        entry.tensor_bytes += moved
        entry.tensor_calls += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator and write it down."""
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if func._schema.name == "prim::device":
            return output
        results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        for result in results:
            self._remember(result)
        entry = self.entries[self._section]
        entry.peak = max(entry.peak, self._alive)
        if not _is_view(func) and func._schema.name not in _FREE:
            self._note(entry, func, args, kwargs, output, results)
        return output

    def _note(
        self, entry: Entry, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, results: list[Tensor]
    ) -> None:
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        moved = sum(map(_bytes, operands)) + sum(map(_bytes, results))
        flops = _flops(func, args, kwargs, output)
        entry.operators += 1
        entry.flops += flops
        if flops:
            entry.product_bytes += moved
        else:
            entry.other_bytes += moved
        if func in COSTLY:
            entry.costly += sum(map(_bytes, results))

    def _remember(self, tensor: Tensor, counts: bool = True) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._references and self._references[key]() is storage:
            return
        size = storage.nbytes() if counts else 0

        def forget(_: Any) -> None:
            self._references.pop(key, None)
            self._alive -= self._sizes.pop(key, 0)

        self._references[key] = weakref.ref(storage, forget)
        self._sizes[key] = size
        self._alive += size


def _is_view(func: Any) -> bool:
    """Whether an operator only looks at its operand in another way."""
    returns = func._schema.returns
    return bool(returns) and all(value.alias_info and not value.alias_info.is_write for value in returns)


def _bytes(tensor: Tensor) -> int:
    """Bytes that reading a tensor takes; an expanded one is read from what it was expanded from."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> int:
    packet = func._overloadpacket
    # torch counts attention's kernels for GPUs only; the one for CPU does the same.
    if packet is _CPU_ATTENTION:
        return int(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    if packet is _CPU_ATTENTION_BACKWARD:
        return int(sdpa_backward_flop_count(args[0].shape, args[1].shape, args[2].shape, args[3].shape))
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=output)) if formula else 0
