"""Parameters registered under several names (tied weights), kept tied while modules are rebuilt around them."""

from __future__ import annotations

from torch import nn

__all__ = ["Tie", "find_ties", "restore_ties"]

Tie = list[tuple[nn.Module, str]]


def find_ties(root: nn.Module) -> list[Tie]:
    """Places that share one parameter, in the order of registration; only parameters with two or more places."""
    places: dict[nn.Parameter, Tie] = {}
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((module, name))
    return [tie for tie in places.values() if len(tie) > 1]


def restore_ties(ties: list[Tie]) -> None:
    """Register the parameter of each tie's first place at its other places."""
    for (owner, owner_name), *others in ties:
        for module, name in others:
            module._parameters[name] = owner._parameters[owner_name]
