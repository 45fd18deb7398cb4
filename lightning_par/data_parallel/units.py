"""Cutting a module into units: what is gathered, reduced and (from the meta device) created together."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

__all__ = ["Unit", "find_units"]


@dataclass(frozen=True)
class Unit:
    """A module whose parameters travel together.

    Attributes:
        name: Dotted name in the root, ``""`` for the root itself.
        module: The module that fully_shard or replicate is applied to.
        members: Dotted name and module of every submodule (itself included) that belongs to this unit and to no unit
            inside it.
    """

    name: str
    module: nn.Module
    members: tuple[tuple[str, nn.Module], ...]


def find_units(root: nn.Module) -> list[Unit]:
    """Cut ``root`` into units: each block, then the root with all that is left.

    Blocks are the children of every outermost ``nn.ModuleList`` or ``nn.Sequential`` of two or more children of one
    class that hold trainable or frozen parameters. A block that shares a parameter with something outside itself stays
    with the root, since a parameter can be gathered by one unit only. Embeddings, heads and loose parameters stay with
    the root too: models use their weights outside the module that holds them (a tied head, a fused loss), and the
    root's are there during a whole step.

    Returns:
        Units, inner before outer, in the order of registration; the root is the last.
    """
    shared = _shared_outside(root)
    blocks = [(name, module) for name, module in _blocks(root) if not shared & {id(p) for p in module.parameters()}]
    units = [Unit(name, module, tuple(_named_members(name, module))) for name, module in blocks]
    inside = {member for unit in units for _, member in unit.members}
    rest = tuple((name, module) for name, module in root.named_modules() if module not in inside)
    return [*units, Unit("", root, rest)]


def _named_members(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    return list(module.named_modules(prefix=name))


def _blocks(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """The blocks below ``module``, outermost lists first, in the order of registration."""
    if _is_list_of_like_blocks(module):
        return [(f"{prefix}{name}", child) for name, child in module.named_children()]
    return [
        block for name, child in module.named_children() for block in _blocks(child, f"{prefix}{name}.")
    ]


def _is_list_of_like_blocks(module: nn.Module) -> bool:
    if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
        return False
    like = len({type(child) for child in module}) == 1
    # Composite blocks only: a stack of bare Linear layers gains nothing from a collective for each.
    return like and all(any(True for _ in child.children()) and _holds_parameters(child) for child in module)


def _holds_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _shared_outside(root: nn.Module) -> set[int]:
    """Identities of parameters registered under more than one module."""
    owners: dict[int, set[int]] = {}
    for module in root.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add(id(module))
    return {parameter for parameter, modules in owners.items() if len(modules) > 1}
