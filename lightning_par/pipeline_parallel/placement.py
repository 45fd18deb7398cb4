"""Placing a module on stages: which stage holds what, and a module tree for each.

Every replaceable part of the user's module is a :class:`Slot`: a block, or a module beside the path from the root to
the blocks. What comes before the path at its level lives on the first stage, what comes after on the last; modules
without parameters and parameters that hang on the path itself live on every stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.pipeline_parallel.passage import Passage
from lightning_par.pipeline_parallel.stage import StageModule
from lightning_par.pipeline_parallel.standins import (
    AbsentBlock,
    LateStandIn,
    NextBlock,
    Placeholder,
    Site,
    StandIn,
    copy_shell,
    meta_twin,
    to_meta,
)
from lightning_par.pipeline_parallel.trunk import Trunk
from lightning_par.ties import Tie, find_ties, restore_ties

__all__ = ["Slot", "Staged", "build_stages", "survey"]


@dataclass(frozen=True)
class Slot:
    """A part of a module that lives on some stages and has a placeholder on the others.

    Attributes:
        parent: The module it is registered in.
        key: Its name there.
        name: Its dotted name in the root.
        module: The part.
        block: Its index in the trunk, ``None`` beside it.
        at_start: Whether it lives on the first stage (no block). One that lives on the first and the last lives on all.
        at_end: Whether it lives on the last stage (no block).
    """

    parent: nn.Module
    key: str
    name: str
    module: nn.Module
    block: int | None = None
    at_start: bool = False
    at_end: bool = False

    def stages(self, ranges: Sequence[range]) -> list[int]:
        """The stages it lives on, where stage i holds the blocks ``ranges[i]``."""
        if self.block is not None:
            return [stage for stage, blocks in enumerate(ranges) if self.block in blocks]
        return list(range(0 if self.at_start else len(ranges) - 1, len(ranges) if self.at_end else 1))


def survey(
    root: nn.Module, trunk: Trunk, first: Sequence[str] = (), last: Sequence[str] = ()
) -> tuple[list[Slot], list[nn.Module]]:
    """The slots of a module, in the order of registration, and the modules that contain them.

    Args:
        root: The user's module.
        trunk: Its blocks.
        first: Dotted names of modules that live on the first stage, wherever they are registered.
        last: The same for the last stage. Modules named in both live on every stage.

    Raises:
        ValueError: If a name is not that of such a module.
    """
    blocks = root.get_submodule(trunk.name)
    path = {module for module in root.modules() if any(inner is blocks for inner in module.modules())}
    slots: list[Slot] = []
    opened: dict[nn.Module, None] = {}

    def visit(module: nn.Module, prefix: str, at_start: bool) -> None:
        opened[module] = None
        for index, (key, child) in enumerate(module._modules.items()):
            name = f"{prefix}{key}"
            if module is blocks:
                assert child is not None
                slots.append(Slot(module, key, name, child, block=index))
            elif child is None or next(child.parameters(), None) is None:
                continue
            elif child in path or type(child).forward is nn.Module.forward:
                if child not in opened:
                    visit(child, f"{name}.", at_start)
                at_start = at_start and child not in path
            else:
                slots.append(Slot(module, key, name, child, at_start=at_start, at_end=not at_start))

    visit(root, "", True)
    return _moved(slots, first, last), list(opened)


def _moved(slots: list[Slot], first: Sequence[str], last: Sequence[str]) -> list[Slot]:
    """Slots where the user wants them; a module that is registered in several places lives wherever one of them is."""
    beside = [slot.name for slot in slots if slot.block is None]
    for argument, names in (("pipeline_first", first), ("pipeline_last", last)):
        for name in names:
            if not any(_covers(name, known) for known in beside):
                raise ValueError(
                    f'{argument} names "{name}", which is not a module with parameters beside the blocks. Those that '
                    f"can be placed are {', '.join(beside) or 'none'}."
                )
    moved = []
    for slot in slots:
        at_start, at_end = (any(_covers(name, slot.name) for name in names) for names in (first, last))
        wanted = slot.block is None and (at_start or at_end)
        moved.append(replace(slot, at_start=at_start, at_end=at_end) if wanted else slot)
    return [
        replace(
            slot,
            at_start=any(other.at_start for other in moved if other.module is slot.module),
            at_end=any(other.at_end for other in moved if other.module is slot.module),
        )
        for slot in moved
    ]


def _covers(name: str, slot_name: str) -> bool:
    return slot_name == name or slot_name.startswith(f"{name}.")


class Staged:
    """A module cut into the stages of this rank.

    Attributes:
        stages: One for each local stage, in the order asked for.
        holders: Every name of every parameter of the whole module, and the stages that hold the parameter. The same on
            every rank. Tied parameters have the stages of all their places.
    """

    def __init__(self, root: nn.Module, slots: Sequence[Slot], opened: Iterable[nn.Module], ranges: Sequence[range]):
        self.stages: list[StageModule] = []
        self.holders = _holders(root, slots, opened, ranges)
        self._root = root
        self._slots = slots
        self._ties = find_ties(root)
        self._emptied: dict[nn.Module, str] = {}

    def empty_absent(self) -> None:
        """Free the tensors of modules that are no longer in the user's module."""
        present = set(self._root.modules())
        for slot in self._slots:
            for name, module in slot.module.named_modules(prefix=slot.name):
                if module not in present and module not in self._emptied:
                    self._emptied[module] = name
                    for tensors in _own_tensors(module):
                        tensors.update({key: to_meta(tensor) for key, tensor in tensors.items() if tensor is not None})

    def restore(self, fetch: Callable[[str, Tensor], object]) -> None:
        """Make the user's module whole again: local modules return with their tensors, the others with new ones.

        Args:
            fetch: Called with the name of each missing parameter (a tied one once) and buffer, in the order of
                registration, and with a tensor on the host to write its value into.
        """
        for slot in self._slots:
            slot.parent._modules[slot.key] = slot.module
        # A tied parameter that is here under another name needs no fetching.
        ties: list[Tie] = [sorted(tie, key=lambda place: place[0] in self._emptied) for tie in self._ties]
        borrowed = {place for tie in ties for place in tie[1:]}
        for module, name in self._emptied.items():
            for tensors in _own_tensors(module):
                for key, tensor in tensors.items():
                    if tensor is not None and (module, key) not in borrowed:
                        value = torch.empty_like(tensor.detach(), device="cpu")
                        fetch(f"{name}.{key}", value)
                        is_parameter = isinstance(tensor, nn.Parameter)
                        tensors[key] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
        restore_ties(ties)


def build_stages(
    root: nn.Module,
    trunk: Trunk,
    ranges: Sequence[range],
    local: Sequence[int],
    first: Sequence[str] = (),
    last: Sequence[str] = (),
) -> Staged:
    """Cut a module into the stages of one rank.

    The user's object keeps what lives on any of them, under the same names. With one local stage it is the stage's
    module itself. With more, each stage has second objects of the modules that contain slots; they share parameters,
    buffers and, at the start of each step, attributes with the user's.

    Args:
        root: The user's module, whole; on any device. Changed in place.
        trunk: Its blocks.
        ranges: The blocks of every stage.
        local: The stages of this rank.
        first: See :func:`survey`.
        last: See :func:`survey`.

    Raises:
        ValueError: See :func:`survey`.
    """
    slots, opened = survey(root, trunk, first, last)
    staged = Staged(root, slots, opened, ranges)
    themselves = {module: module for module in opened}
    twins: dict[nn.Module, nn.Module] = {}
    site = Site(_device(root))

    def place(parents: Mapping[nn.Module, nn.Module], here: Sequence[int], passage: Passage) -> None:
        for slot in slots:
            stages = slot.stages(ranges)
            if not set(stages) & set(here):
                twin = meta_twin(slot.module, twins)
                kind = _placeholder(slot, is_earlier=stages[0] < min(here))
                parents[slot.parent]._modules[slot.key] = kind(slot.name, twin, passage, site)

    for stage in local:
        passage = Passage()
        objects = themselves if len(local) == 1 else _doubles(opened)
        place(objects, [stage], passage)
        doubles = objects.items() if len(local) > 1 else ()
        staged.stages.append(
            StageModule(objects[root], trunk, ranges[stage], passage, doubles, writes_back=stage == max(local))
        )
    if len(local) > 1:
        place(themselves, local, Passage())
    staged.empty_absent()
    return staged


def _placeholder(slot: Slot, is_earlier: bool) -> type[Placeholder]:
    if slot.block is not None:
        return AbsentBlock if is_earlier else NextBlock
    return StandIn if slot.at_start else LateStandIn


def _doubles(opened: Iterable[nn.Module]) -> dict[nn.Module, nn.Module]:
    """Second objects of modules, with one another as children where the modules have."""
    doubles = {module: copy_shell(module) for module in opened}
    for double in doubles.values():
        double._modules.update({key: doubles[child] for key, child in double._modules.items() if child in doubles})
    return doubles


def _holders(
    root: nn.Module, slots: Iterable[Slot], opened: Iterable[nn.Module], ranges: Sequence[range]
) -> dict[str, list[int]]:
    stages: dict[nn.Parameter, set[int]] = {}
    for slot in slots:
        for parameter in slot.module.parameters():
            stages.setdefault(parameter, set()).update(slot.stages(ranges))
    for module in opened:
        for parameter in module.parameters(recurse=False):
            stages[parameter] = set(range(len(ranges)))
    return {name: sorted(stages[parameter]) for name, parameter in root.named_parameters(remove_duplicate=False)}


def _own_tensors(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


def _device(root: nn.Module) -> torch.device:
    device = next(root.parameters()).device
    return torch.device("cpu") if device.type == "meta" else device
