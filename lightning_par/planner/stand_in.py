"""A module to trace in place of the user's: the same, on tensors without memory, and with like blocks run once.

A model of a hundred like blocks is traced by one of them: the others are skipped, and hand on what the one has handed
on. A tensor axis is there without ranks; it counts what it would send.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from lightning_par.pipeline_parallel.standins import copy_shell
from lightning_par.planner.ledger import Ledger
from lightning_par.tensor_parallel.axis import TensorAxis

__all__ = ["CountingAxis", "fake_copy", "like_blocks", "outline", "skip_like"]


class CountingAxis(TensorAxis):
    """A tensor axis without ranks: nothing is sent, and what would be is counted.

    Args:
        size: The degree.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.rank = 0
        self.ledger: Ledger | None = None

    def part(self, whole: nn.Parameter, dim: int | None) -> Tensor:
        """The first rank's slice."""
        detached = whole.detach()
        return detached.clone() if dim is None else detached.chunk(self.size, dim)[0].clone()

    def all_reduce(self, tensor: Tensor) -> None:
        """Count twice the tensor."""
        self._note(2 * tensor.nbytes)

    def all_gather(self, part: Tensor) -> Tensor:
        """Count the whole."""
        self._note(self.size * part.nbytes)
        return part.new_empty(self.size * part.shape[0], *part.shape[1:])

    def _note(self, moved: int) -> None:
        if self.ledger is not None:
            self.ledger.note_collective(moved)


def fake_copy(
    module: nn.Module, device: str, dtype: torch.dtype | None = None, hollow: Iterable[nn.Module] = ()
) -> nn.Module:
    """A copy whose tensors have no memory; enter a ``FakeTensorMode`` around the call.

    Args:
        module: Any module, on any device; it is not touched.
        device: What the copy's tensors say they are on.
        dtype: Type of floating-point parameters, ``None`` for their own.
        hollow: Modules in it whose copies are left without children and parameters.
    """
    memo: dict[int, Any] = {id(part): _shell(part) for part in hollow}
    for part in module.modules():
        for tensor in [*part._parameters.values(), *part._buffers.values(), *vars(part).values()]:
            if isinstance(tensor, Tensor) and id(tensor) not in memo:
                memo[id(tensor)] = _like(tensor, device, dtype)
        # What a module hangs on is not to be copied with it.
        memo.update({id(held): None for name in ("_trainer", "_fabric") if (held := vars(part).get(name)) is not None})
    return copy.deepcopy(module, memo)


def _shell(module: nn.Module) -> nn.Module:
    shell = copy_shell(module)
    for table in (shell._modules, shell._parameters, shell._buffers):
        table.clear()
    return shell


def _like(tensor: Tensor, device: str, dtype: torch.dtype | None) -> Tensor:
    is_parameter = isinstance(tensor, nn.Parameter)
    kind = dtype if dtype is not None and is_parameter and tensor.is_floating_point() else tensor.dtype
    made = torch.empty(tuple(tensor.shape), dtype=kind, device=device)
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if is_parameter else made


def like_blocks(blocks: Iterable[nn.Module]) -> list[list[int]]:
    """Indices of blocks by kind: of one class, with parameters of the same names, sizes, types and training."""
    kinds: dict[Any, list[int]] = {}
    for index, block in enumerate(blocks):
        parameters = tuple(
            (name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
            for name, parameter in block.named_parameters()
        )
        kinds.setdefault((type(block), parameters), []).append(index)
    return list(kinds.values())


class _Skip(torch.autograd.Function):
    """In the place of a block: takes one tensor, hands on one of the right size, and computes nothing."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        ctx.size, ctx.dtype = tuple(tensor.shape), tensor.dtype
        ctx.save_for_backward(tensor)  # as a block would
        return tensor.new_empty(size, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0].new_empty(ctx.size, dtype=ctx.dtype), None, None


def skip_like(block: nn.Module, output_of: Callable[[], Any], on_entry: Callable[[], None]) -> None:
    """Let ``block`` hand on what its like has handed on, and do nothing else.

    Args:
        block: A block of a copied module.
        output_of: Tells the :func:`outline` of what the block that ran has returned.
        on_entry: Called first.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        on_entry()
        if output_of() is None:
            raise ValueError("a block is called before the first one of its kind")
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        source = next((t for t in tensors if t.requires_grad), None)
        leaves, spec = tree_flatten(output_of())
        made = [_handed_on(leaf, source) if isinstance(leaf, _Outline) else leaf for leaf in leaves]
        return tree_unflatten(made, spec)

    block.__dict__["forward"] = forward


def _handed_on(like: _Outline, source: Tensor | None) -> Tensor:
    if source is None or not like.dtype.is_floating_point:
        return torch.empty(like.size, dtype=like.dtype, device=like.device)
    made: Tensor = _Skip.apply(source, like.size, like.dtype)
    return made


@dataclass(frozen=True)
class _Outline:
    size: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def outline(output: Any) -> Any:
    """The structure of an output without its tensors, which would keep a graph alive."""
    return tree_map_only(Tensor, lambda tensor: _Outline(tuple(tensor.shape), tensor.dtype, tensor.device), output)
