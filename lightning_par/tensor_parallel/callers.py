"""The module that calls planned layers: one gradient sum for one input, and its errors in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.tensor_parallel import axis as exchange
from lightning_par.tensor_parallel.axis import TensorAxis

__all__ = ["Caller", "explain_errors"]

_ATTRIBUTE = "_tensor_parallel_caller"
_SHAPES = re.compile(
    r"invalid for input of size|must match|cannot be multiplied|size mismatch|split_with_sizes"
    r"|non-singleton dimension|expanded size|inconsistent tensor size|unflatten|shape mismatch"
    r"|not broadcastable|can't divide axis",
    re.IGNORECASE,
)
_MIXED = re.compile(r"mixed torch\.Tensor and DTensor")


class Caller:
    """Goes with a module that calls planned layers, and holds the input that several of them share.

    Query, key and value projections get the same tensor object. Entering it on the tensor axis once
    makes autograd add their gradients before the one all-reduce, where three separate entries would
    need three. The tensor is held only while the module's forward runs.

    Attributes:
        axis: the tensor axis.
        holds_heads: whether the layers leave the module a slice of their features.
        guard: context of the module's forward until the first that succeeds.
    """

    def __init__(self, axis: TensorAxis) -> None:
        self.axis = axis
        self.holds_heads = False
        self.guard: AbstractContextManager[Any] | None = None
        self._is_open = self._is_guarded = False
        self._source: Tensor | None = None
        self._version = 0
        self._entered: Tensor | None = None

    @classmethod
    def of(cls, module: nn.Module, axis: TensorAxis) -> Caller:
        """The one that goes with `module`, from now on if there was none."""
        caller: Caller | None = vars(module).get(_ATTRIBUTE)
        if caller is None:
            caller = vars(module)[_ATTRIBUTE] = cls(axis)
            module.register_forward_pre_hook(caller._open)
            module.register_forward_hook(caller._close, always_call=True)
        return caller

    def enter(self, tensor: Tensor) -> Tensor:
        """`tensor`, its gradient summed over the axis; the same object for the same input."""
        if not (torch.is_grad_enabled() and tensor.requires_grad):
            return tensor
        if self._source is tensor and self._version == tensor._version:
            assert self._entered is not None
            return self._entered
        entered = exchange.sum_gradient(tensor, self.axis)
        if self._is_open:
            self._source, self._version, self._entered = tensor, tensor._version, entered
        return entered

    def _open(self, module: nn.Module, args: Any) -> None:
        self._is_open = True
        if self.guard is not None and not torch.compiler.is_compiling():
            self.guard.__enter__()
            self._is_guarded = True

    def _close(self, module: nn.Module, args: Any, output: Any) -> None:
        """After the forward, or its failure, of which the output is None; then perhaps without `_open` before."""
        self._is_open, self._source, self._entered = False, None, None
        if self._is_guarded and self.guard is not None:
            self._is_guarded = False
            self.guard.__exit__(None, None, None)
            self.guard = None if output is not None else self.guard


@contextmanager
def explain_errors() -> Iterator[None]:
    """Context of a step: an error that local heads or split weights explain is raised again with a sentence on them.

    Raises:
        RuntimeError: from the error of torch, with its message and the sentence.
    """
    try:
        yield
    except RuntimeError as error:
        sentence = _explanation(error)
        if sentence is None:
            raise
        raise RuntimeError(f"{error}\n{sentence}") from error


def _explanation(error: RuntimeError) -> str | None:
    """By the innermost caller, among the modules whose methods the error passed, that explains it."""
    passed = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    callers = [module for module in passed if isinstance(module, nn.Module) and _ATTRIBUTE in vars(module)]
    sentences = (_sentence(str(error), type(module).__name__, vars(module)[_ATTRIBUTE]) for module in callers[::-1])
    return next((sentence for sentence in sentences if sentence), None)


def _sentence(message: str, module_name: str, caller: Caller) -> str | None:
    degree = caller.axis.size
    if _MIXED.search(message):
        return (
            f"{module_name} uses a weight that tensor parallelism splits outside the layer that holds "
            "it. Call the layer (self.head(x), not F.linear(x, self.embedding.weight)), or leave it out "
            "of the plan"
        )
    if caller.holds_heads and _SHAPES.search(message):
        return (
            f"Under tensor parallelism of degree {degree}, {module_name} holds 1/{degree} of the heads "
            "and of the inner features on each rank. Where its forward reshapes them, use -1 for the "
            "head dimension and for all heads together: q.view(batch, length, -1, head_size), "
            "y.reshape(batch, length, -1). A layer that takes such a slice must be 'rowwise' in the "
            "plan, a layer beside one that gives it 'colwise'"
        )
    return None
