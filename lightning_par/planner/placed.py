"""A module's parameters by section and unit, placed by the functions that the engine itself places them with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from lightning_par.data_parallel import find_units
from lightning_par.pipeline_parallel.placement import survey
from lightning_par.pipeline_parallel.split import block_costs
from lightning_par.pipeline_parallel.trunk import Trunk
from lightning_par.planner.ledger import Entry
from lightning_par.planner.profile import Line, Profile, Section, Shape, Unit, Work
from lightning_par.planner.stand_in import like_blocks
from lightning_par.planner.trace import AFTER, BACKWARD, BEFORE
from lightning_par.tensor_parallel import STYLES

__all__ = ["SAMPLES", "PlacedModule"]

SAMPLES = (1, 2)
"""Batch sizes that a step is traced with."""


class PlacedModule:
    """What of a module lies where; worked out once for all tensor-parallel degrees.

    Args:
        module: The whole module.
        trunk: Its blocks, ``None`` where there are none.
        rest: Type of floating-point parameters at rest, ``None`` for their own.
    """

    def __init__(self, module: nn.Module, trunk: Trunk | None, rest: torch.dtype | None) -> None:
        self._rest = rest
        self._names = {id(part): name for name, part in module.named_modules()}
        self._sections: list[tuple[str, tuple[int, ...], list[nn.Module]]] = []
        self._opened: list[nn.Module] = []
        self._tied: set[nn.Parameter] = set()
        self._costs: tuple[list[float], float, float] = ([], 0.0, 0.0)
        units = find_units(module)
        self._unit_of = {id(member): unit.name for unit in units for _, member in unit.members}
        if trunk is None:
            self._sections = [(BEFORE, (), list(module.modules()))]
            return
        slots, self._opened = survey(module, trunk)
        beside = [slot for slot in slots if slot.block is None]
        start = [part for slot in beside if slot.at_start for part in slot.module.modules()]
        end = [part for slot in beside if slot.at_end for part in slot.module.modules()]
        blocks = list(module.get_submodule(trunk.name).named_children())
        self._sections = [(BEFORE, (), start), (AFTER, (), end)]
        for kind in like_blocks(block for _, block in blocks):
            name, first = blocks[kind[0]]
            self._sections.append((f"{trunk.name}.{name}", tuple(kind), list(first.modules())))
        self._tied = _parameters(start).keys() & _parameters(end).keys()
        self._costs = block_costs(module, trunk)

    def profile(
        self, plan: Mapping[str, str], tensor_parallel_size: int, traced: Sequence[dict[str, Entry]] = ()
    ) -> Profile:
        """The profile at one degree; without a trace, only parameters."""
        cut = _Cut(self._names, plan, tensor_parallel_size, self._rest)
        sections = [self._section(name, blocks, modules, cut, traced) for name, blocks, modules in self._sections]
        costs, before, after = self._costs
        return Profile(
            before=sections[0],
            kinds=tuple(sections[2:]),
            after=sections[1] if len(sections) > 1 else Section(AFTER),
            everywhere=cut.shapes(_parameters(self._opened)),
            tied=cut.shapes({p: place for p, place in _parameters(self._sections[0][2]).items() if p in self._tied}),
            block_costs=tuple(costs),
            cost_before=before,
            cost_after=after,
        )

    def _section(
        self,
        name: str,
        blocks: tuple[int, ...],
        modules: list[nn.Module],
        cut: _Cut,
        traced: Sequence[dict[str, Entry]],
    ) -> Section:
        by_unit: dict[str, dict[nn.Parameter, tuple[nn.Module, str]]] = {}
        for parameter, place in _parameters(modules).items():
            by_unit.setdefault(self._unit_of[id(place[0])], {})[parameter] = place
        units = tuple(Unit(unit, cut.shapes(parameters)) for unit, parameters in by_unit.items())
        buffers = sum(b.nbytes for module in modules for b in module._buffers.values() if b is not None)
        return _with_activity(Section(name, blocks, units, buffers), traced)


class _Cut:
    """Parameters as one rank of the tensor axis holds them."""

    def __init__(self, names: Mapping[int, str], plan: Mapping[str, str], size: int, rest: torch.dtype | None) -> None:
        self._names, self._plan, self._size, self._rest = names, plan, size, rest

    def shapes(self, parameters: Mapping[nn.Parameter, tuple[nn.Module, str]]) -> tuple[Shape, ...]:
        """Each shape once, with how many there are."""
        counted: dict[Shape, int] = {}
        for parameter, (module, key) in parameters.items():
            shape = self._shape(parameter, module, key)
            counted[shape] = counted.get(shape, 0) + 1
        return tuple(replace(shape, count=count) for shape, count in counted.items())

    def _shape(self, parameter: nn.Parameter, module: nn.Module, key: str) -> Shape:
        size = list(parameter.shape)
        style = self._plan.get(self._names.get(id(module), ""))
        dim = None if style is None else STYLES[style].split_dim(key)
        if dim is not None:
            size[dim] = math.ceil(size[dim] / self._size)
        casts = self._rest is not None and parameter.is_floating_point()
        itemsize = self._rest.itemsize if casts and self._rest is not None else parameter.element_size()
        return Shape(tuple(size), itemsize, parameter.requires_grad, is_split=dim is not None)


def _parameters(modules: Iterable[nn.Module]) -> dict[nn.Parameter, tuple[nn.Module, str]]:
    """Each parameter of some modules (not of modules below them) and its first place."""
    found: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    for module in modules:
        for key, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, (module, key))
    return found


def _with_activity(section: Section, traced: Sequence[dict[str, Entry]]) -> Section:
    """The section with what a trace of two batch sizes tells."""
    forward = [entries.get(section.name, Entry()) for entries in traced]
    backward = [entries.get(section.name + BACKWARD, Entry()) for entries in traced]
    if not traced:
        return section

    def line(values: Sequence[float]) -> Line:
        return Line.through(SAMPLES, (values[0], values[1]))

    return replace(
        section,
        kept=line([entry.end - entry.start for entry in forward]),
        costly=line([entry.costly for entry in forward]),
        output=line([entry.output for entry in forward]),
        forward_peak=line([entry.peak - entry.start for entry in forward]),
        backward_peak=line([entry.peak - entry.start for entry in backward]),
        forward=_work(forward, line),
        backward=_work(backward, line),
    )


def _work(entries: Sequence[Entry], line: Callable[[Sequence[float]], Line]) -> Work:
    return Work(
        flops=line([entry.flops for entry in entries]),
        product_bytes=line([entry.product_bytes for entry in entries]),
        other_bytes=line([entry.other_bytes for entry in entries]),
        operators=entries[0].operators,
        tensor_bytes=line([entry.tensor_bytes for entry in entries]),
        tensor_calls=entries[0].tensor_calls,
    )
