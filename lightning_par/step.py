"""What runs as one step of a module: a method of it by name, or any function of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from torch import nn

__all__ = ["Step", "run_step", "step_key", "step_name"]

Step: TypeAlias = str | Callable[..., Any]
"""A method's name, or a function that is called with the module first."""


def run_step(module: nn.Module, step: Step, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call ``module.<step>(*args, **kwargs)``, or ``step(module, *args, **kwargs)``."""
    return getattr(module, step)(*args, **kwargs) if isinstance(step, str) else step(module, *args, **kwargs)


def step_name(step: Step) -> str:
    """What a step is called in messages."""
    return step if isinstance(step, str) else getattr(step, "__qualname__", type(step).__qualname__)


def step_key(step: Step) -> object:
    """What tells steps apart, although a loop may make its function anew each time, by ``lambda`` or ``partial``."""
    if isinstance(step, str):
        return step
    return step_key(step.func) if isinstance(step, partial) else getattr(step, "__code__", type(step))
