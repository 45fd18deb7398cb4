"""The module that calls planned layers: one gradient sum for one input, and errors in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.tensor_parallel import axis as exchange
from lightning_par.tensor_parallel.axis import TensorAxis
from lightning_par.tensor_parallel.explain import explain
from lightning_par.tensor_parallel.head_guard import HeadGuard

__all__ = ["Arguments", "CallerForward", "SharedInput", "caller_forward"]


class SharedInput:
    """The input that several layers of one caller share, entered on the tensor axis once.

    Query, key and value projections get the same tensor object. Entering it once makes autograd add
    their gradients before the one all-reduce, where three separate entries would need three.
    It holds the tensor only while the caller's forward runs.
    """

    def __init__(self) -> None:
        self.open = False
        self._source: Tensor | None = None
        self._version = 0
        self._entered: Tensor | None = None

    def enter(self, tensor: Tensor, axis: TensorAxis) -> Tensor:
        """`tensor`, its gradient summed over the axis; the same object for the same input."""
        if not (torch.is_grad_enabled() and tensor.requires_grad):
            return tensor
        if self._source is tensor and self._version == tensor._version:
            assert self._entered is not None
            return self._entered
        entered = exchange.sum_gradient(tensor, axis)
        if self.open:
            self.put(tensor, entered)
        return entered

    def put(self, source: Tensor, entered: Tensor) -> None:
        """Remember `entered` as what `source`, as it is now, becomes."""
        self._source, self._version, self._entered = source, source._version, entered

    def clear(self) -> None:
        """Let go of the tensors."""
        self.open, self._source, self._entered = False, None, None


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(eq=False)
class CallerForward:
    """Stands in for the forward of a module that calls planned layers.

    Attributes:
        module: the module.
        forward: its own forward.
        axis: the tensor axis.
        shared: the input its layers share.
        prepare: changes the arguments before the forward.
        finish: changes the output after it.
        holds_heads: whether its layers leave it a slice of their features.
        guard: checks head counts during the first forward.
    """

    module: nn.Module
    forward: Callable[..., Any]
    axis: TensorAxis
    shared: SharedInput = field(default_factory=SharedInput)
    prepare: Callable[[Arguments], Arguments] | None = None
    finish: Callable[[Any], Any] | None = None
    holds_heads: bool = False
    guard: HeadGuard | None = None

    def __post_init__(self) -> None:
        self.__wrapped__ = self.forward  # where `inspect.signature` finds the arguments

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward.

        Raises:
            Exception: what the forward raises; a shape error with a sentence on local heads.
        """
        self.shared.open = True
        try:
            if self.prepare is not None:
                args, kwargs = self.prepare((args, kwargs))
            output = self._run(args, kwargs)
            return output if self.finish is None else self.finish(output)
        except RuntimeError as error:
            name, degree = type(self.module).__name__, self.axis.size
            explained = explain(error, name, degree, self.holds_heads)
            if explained is None:
                raise
            raise explained from error
        finally:
            self.shared.clear()

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.guard is None or torch.compiler.is_compiling():
            return self.forward(*args, **kwargs)
        with self.guard:
            output = self.forward(*args, **kwargs)
        self.guard = None
        return output


def caller_forward(module: nn.Module, axis: TensorAxis) -> CallerForward:
    """The stand-in for `module`'s forward, installed now if it is not there yet."""
    forward = module.__dict__.get("forward")
    if not isinstance(forward, CallerForward):
        forward = CallerForward(module, module.forward, axis)
        module.__dict__["forward"] = forward
    return forward
