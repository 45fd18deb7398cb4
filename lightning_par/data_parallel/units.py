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


def find_units(root: nn.Module, split_children: bool = False) -> list[Unit]:
    """Cut ``root`` into units: each block, then the root with all that is left.

    Blocks are the children with parameters of every outermost ``nn.ModuleList`` or ``nn.Sequential`` of two or more
    children, if those are of one class. A block that shares a parameter with something outside itself stays
    with the root, since a parameter can be gathered by one unit only. Embeddings, heads and loose parameters stay with
    the root too: models use their weights outside the module that holds them (a tied head, a fused loss), and the
    root's are there during a whole step.

    Args:
        root: The user's module.
        split_children: Whether each child of the root is a unit too, gathered anew in each of its forwards. Needed
            where a step itself freezes and updates children in turn.

    Returns:
        Units, inner before outer, in the order of registration; the root is the last.
    """
    candidates = _blocks(root)
    if split_children:
        candidates += [(name, child) for name, child in root.named_children() if _can_be_called(child)]
    places = _num_places(root)
    units: list[Unit] = []
    inside: set[nn.Module] = set()
    for name, module in candidates:
        if module not in inside and not _shares(module, places):
            units.append(_unit(name, module, inside))
    return [*units, _unit("", root, inside)]


def _unit(name: str, module: nn.Module, inside: set[nn.Module]) -> Unit:
    """The unit of ``module``, of all below it that is not ``inside`` a unit yet; which it then is."""
    members = tuple((path, member) for path, member in module.named_modules(prefix=name) if member not in inside)
    inside.update(member for _, member in members)
    return Unit(name, module, members)


def _can_be_called(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict)) and _holds_parameters(module)


def _blocks(module: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """The blocks below ``module``, outermost lists first, in the order of registration."""
    if _is_list_of_like_blocks(module):
        return [(f"{prefix}{name}", child) for name, child in module.named_children() if _holds_parameters(child)]
    return [block for name, child in module.named_children() for block in _blocks(child, f"{prefix}{name}.")]


def _is_list_of_like_blocks(module: nn.Module) -> bool:
    if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
        return False
    # Children without parameters may stand for blocks that live elsewhere.
    blocks = [child for child in module if _holds_parameters(child)]
    like = len({type(child) for child in blocks}) == 1
    # Composite blocks only: a stack of bare Linear layers gains nothing from a collective for each.
    return like and all(any(True for _ in child.children()) for child in blocks)


def _holds_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _shares(module: nn.Module, places: dict[nn.Parameter, int]) -> bool:
    """Whether a parameter of ``module`` is registered outside of it too."""
    inner = _num_places(module)
    return any(places[parameter] > number for parameter, number in inner.items())


def _num_places(root: nn.Module) -> dict[nn.Parameter, int]:
    """In how many places each parameter is registered."""
    places: dict[nn.Parameter, int] = {}
    for module in root.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                places[parameter] = places.get(parameter, 0) + 1
    return places
