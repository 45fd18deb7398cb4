"""The trunk of a model: the list of like blocks that a pipeline cuts into stages."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

__all__ = ["CannotSplitError", "Trunk", "find_trunk"]


class CannotSplitError(ValueError):
    """The module can't be cut into stages as it is; the message names the part and the way out."""


@dataclass(frozen=True)
class Trunk:
    """Where the blocks are.

    Attributes:
        name: Dotted name of the list in the user's module, such as ``"model.layers"``; never empty.
        num_blocks: Blocks in it.
    """

    name: str
    num_blocks: int


def find_trunk(root: nn.Module, name: str | None = None) -> Trunk:
    """Find the blocks, or check those that are named.

    Args:
        root: The user's module.
        name: Dotted name of the list. ``None`` takes, of the ``nn.ModuleList`` and ``nn.Sequential`` of two or more
            children of one class that hold parameters and children of their own, the one with most parameters (the
            outermost of equals).

    Raises:
        CannotSplitError: If there is no such list, or its blocks share a parameter with one another.
    """
    trunk = _largest(root) if name is None else _named(root, name)
    _check_apart(root, trunk)
    return trunk


def _largest(root: nn.Module) -> Trunk:
    lists = {name: module for name, module in _lists(root).items() if _is_like(module)}
    if not lists:
        raise CannotSplitError(
            f"{type(root).__name__} has no list of like blocks to cut into pipeline stages: an nn.ModuleList or "
            "nn.Sequential of two or more children of one class, each with layers of its own. Keep the blocks in such "
            f'a list, or name the list to cut with pipeline_blocks="..."; it has {_names(root)}.'
        )
    name = max(lists, key=lambda name: sum(parameter.numel() for parameter in lists[name].parameters()))
    return Trunk(name, len(lists[name]))


def _named(root: nn.Module, name: str) -> Trunk:
    module = _lists(root).get(name)
    if module is None:
        raise CannotSplitError(
            f'pipeline_blocks="{name}" is not an nn.ModuleList or nn.Sequential inside {type(root).__name__} with two '
            f"or more blocks. Name one of its lists: it has {_names(root)}."
        )
    return Trunk(name, len(module))


def _check_apart(root: nn.Module, trunk: Trunk) -> None:
    """Blocks on different stages can't share a parameter: it would need its gradient summed in every block."""
    owners: dict[nn.Parameter, str] = {}
    for key, block in root.get_submodule(trunk.name)._modules.items():
        assert block is not None
        for parameter_name, parameter in block.named_parameters():
            owner = owners.setdefault(parameter, key)
            if owner != key:
                raise CannotSplitError(
                    f"{trunk.name}.{owner} and {trunk.name}.{key} share the parameter {parameter_name}. A pipeline "
                    "needs blocks with weights of their own: give each its own, name another list of blocks with "
                    'pipeline_blocks="...", or use pipeline_parallel_size=1.'
                )


def _lists(root: nn.Module) -> dict[str, nn.ModuleList | nn.Sequential]:
    return {
        name: module
        for name, module in root.named_modules()
        if name and isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1
    }


def _is_like(blocks: nn.ModuleList | nn.Sequential) -> bool:
    like = len({type(block) for block in blocks}) == 1
    # Composite blocks only: a stack of bare layers is a part of a model, not its trunk.
    return like and all(any(block.children()) and any(True for _ in block.parameters()) for block in blocks)


def _names(root: nn.Module) -> str:
    return ", ".join(f'"{name}"' for name in _lists(root)) or "none"
