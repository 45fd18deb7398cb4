"""What runs as one step of a module: a method of it by name, or any function of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import nn

__all__ = ["Step", "run_step", "step_name"]

Step: TypeAlias = str | Callable[..., Any]
"""A method's name, or a function that is called with the module first."""


def run_step(module: nn.Module, step: Step, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call ``module.<step>(*args, **kwargs)``, or ``step(module, *args, **kwargs)``."""
    return getattr(module, step)(*args, **kwargs) if isinstance(step, str) else step(module, *args, **kwargs)


def step_name(step: Step) -> str:
    """What a step is called in messages; of one place in a program always the same."""
    return step if isinstance(step, str) else getattr(step, "__qualname__", type(step).__qualname__)
