"""One ordinary checkpoint of a module whose stages lie on different ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_par.checkpoint.stages import (
    collect_from_stages,
    localize_optimizer_state,
    number_optimizer_state,
)
from lightning_par.engine import ParallelEngine
from lightning_par.pipelined import PipelinedEngine

__all__ = ["StagedCheckpoint", "names_of_parameters"]


def names_of_parameters(engine: ParallelEngine) -> dict[nn.Parameter, str]:
    """This rank's parameters, by their first names in the whole module, of which a stage may lack the first place."""
    engine.release()
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    if isinstance(engine, PipelinedEngine):
        return {parameter: engine.first_name_of[name] for parameter, name in names.items()}
    return names


class StagedCheckpoint:
    """Saves and loads the state of a split module.

    Args:
        engine: The engine that has split it.
        keeps: Whether this is the first rank of its stage.
    """

    def __init__(self, engine: PipelinedEngine, keeps: bool) -> None:
        self._engine = engine
        self._keeps = keeps

    def module_state(self) -> dict[str, Any]:
        """Full weights and buffers by global name on rank 0. A collective."""
        engine = self._engine
        first = engine.first_name_of
        names = [name for name in engine.state_names if first.get(name, name) == name]
        collected = self._collect(names, engine.module.state_dict(), engine.owner_of_state)
        complete = {name: collected.get(first.get(name, name)) for name in engine.state_names}
        return complete if collected else {}

    def load_module_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The part of ``state`` that this rank holds.

        Raises:
            RuntimeError: On every rank, if a name is missing or unknown.
        """
        known = set(self._engine.state_names)
        missing, unexpected = sorted(known - state.keys()), sorted(state.keys() - known)
        if missing or unexpected:
            raise RuntimeError(
                f"The checkpoint does not fit {type(self._engine.module).__name__}: missing {missing}, unexpected "
                f"{unexpected}."
            )
        return {name: state[name] for name in self._engine.module.state_dict()}

    def optimizer_state(
        self, optimizer: Optimizer, names_by_group: Sequence[Sequence[str]], state: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Full state of an optimizer on rank 0, as one process numbers it. A collective.

        Args:
            optimizer: This rank's.
            names_by_group: Parameter names of each group of the one process.
            state: This rank's ``state_dict()``.
        """
        local_names = [name for names in self.local_names(optimizer) for name in names]
        named = {local_names[position]: entry for position, entry in state["state"].items()}
        owners = self._owners(list(named))
        all_names = [name for names in names_by_group for name in names]
        collected = self._collect(all_names, named, owners)
        return number_optimizer_state(collected, state["param_groups"], names_by_group) if self._is_first else {}

    def load_optimizer_state(
        self, optimizer: Optimizer, names_by_group: Sequence[Sequence[str]], full: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What this rank's optimizer takes of a full state; arguments as in :meth:`optimizer_state`."""
        return localize_optimizer_state(full, names_by_group, self.local_names(optimizer))

    def local_names(self, optimizer: Optimizer) -> list[list[str]]:
        """Parameter names of each group of this rank's optimizer."""
        names = names_of_parameters(self._engine)
        return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]

    @property
    def _is_first(self) -> bool:
        return self._keeps and self._engine.mesh.get_group("pp").rank() == 0

    def _owners(self, names: Sequence[str]) -> dict[str, int]:
        group = self._engine.mesh.get_group("pp")
        by_rank: list[Any] = [None] * group.size()
        dist.all_gather_object(by_rank, names, group=group)
        return {name: rank for rank in reversed(range(group.size())) for name in by_rank[rank]}

    def _collect(self, names: Sequence[str], states: Mapping[str, Any], owners: Mapping[str, int]) -> dict[str, Any]:
        engine = self._engine
        return collect_from_stages(names, states, owners, engine.mesh.get_group("pp"), engine.device, keep=self._keeps)
