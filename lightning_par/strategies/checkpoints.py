"""The part of a strategy that saves and restores: one ordinary file, the same under every layout."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from torch.optim import Optimizer

from lightning_par.checkpoint import (
    gather_full_state,
    save_file,
    shard_full_state,
    shard_optimizer_state,
    to_plain,
)
from lightning_par.engine import ParallelEngine
from lightning_par.offload import offloaded
from lightning_par.pipelined import PipelinedEngine
from lightning_par.strategies.mesh import OnMesh
from lightning_par.strategies.optimizers import choose_update, forget_update
from lightning_par.strategies.staged_checkpoint import StagedCheckpoint

if TYPE_CHECKING:
    from lightning.fabric.utilities.types import _PATH

__all__ = ["Checkpoints"]

_COMPILED = "_orig_mod."


class Checkpoints(OnMesh):
    """Gathers full state on saving and cuts it up on loading."""

    def optimizer_names(self, optimizer: Optimizer) -> list[list[str]]:
        """Parameter names of each group of an optimizer, as one process has them. Asked for under a pipeline only."""
        raise NotImplementedError

    def full_module_state(self, engine: ParallelEngine) -> dict[str, Any]:
        """Full weights by global parameter name on rank 0, nothing on others. A collective."""
        if self.idle_rank == 0:
            engine.before_evaluation()  # batch-norm statistics: the rank that writes the file has seen no batch
        staged = self._staged(engine)
        if staged is not None:
            return _without_wrappers(self._handed_over(staged.module_state()))
        return _without_wrappers(gather_full_state(engine.module.state_dict(), keep=self.is_global_zero))

    def full_optimizer_state(self, engine: ParallelEngine, optimizer: Optimizer) -> dict[str, Any]:
        """Full state of one optimizer on rank 0, by parameter position as one process numbers it. A collective."""
        state, staged = forget_update(optimizer, optimizer.state_dict()), self._staged(engine)
        if staged is not None:
            full = staged.optimizer_state(optimizer, self.optimizer_names(optimizer), state)
        else:
            full = gather_full_state(state, keep=self.global_rank == self.collecting_rank)
        return self._handed_over(full)

    def load_full_module_state(self, engine: ParallelEngine, given: Mapping[str, Any], strict: bool) -> None:
        """Give a module its part of full weights."""
        present, staged = engine.module.state_dict(), self._staged(engine)
        names = {name.replace(_COMPILED, ""): name for name in present}
        full = {names.get(name.replace(_COMPILED, ""), name): value for name, value in given.items()}
        if staged is not None:
            full = staged.load_module_state(full)
        engine.module.load_state_dict(shard_full_state(full, present), strict=strict)

    def load_full_optimizer_state(self, engine: ParallelEngine, optimizer: Optimizer, full: Mapping[str, Any]) -> None:
        """Give an optimizer its part of full state."""
        staged = self._staged(engine)
        if staged is not None:
            full = staged.load_optimizer_state(optimizer, self.optimizer_names(optimizer), full)
        if not self.holds_optimizer_state:
            full = {**full, "state": {}}
        off_device = offloaded(optimizer)
        references = None if off_device is None else off_device.loading_parameters()
        optimizer.load_state_dict(shard_optimizer_state(full, optimizer, references))
        if off_device is None:
            choose_update(optimizer)
            _optimizer_to_device(optimizer, self.root_device)

    def write_ordinary_file(self, checkpoint: dict[str, Any], path: _PATH) -> bool:
        """Write on rank 0, all at once; unless the path is elsewhere or a plugin of the user's has its own idea."""
        if not self._is_ordinary_file(path):
            return False
        if self.is_global_zero:
            save_file(to_plain(checkpoint), Path(path))
        return True

    def read_ordinary_file(self, path: _PATH, weights_only: bool | None) -> dict[str, Any] | None:
        """Map an ordinary file and read nothing yet: each rank then reads just its share of every tensor."""
        if not (self._is_ordinary_file(path) and os.path.isfile(path)):
            return None
        return torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)

    def _staged(self, engine: ParallelEngine) -> StagedCheckpoint | None:
        """Saves and loads what lies on several stages; ``None`` without a pipeline."""
        if not isinstance(engine, PipelinedEngine):
            return None
        first = self.layout.coordinates(self.collecting_rank)
        keeps = all(index == first[axis] for axis, index in self.coordinates.items() if axis != "pp")
        return StagedCheckpoint(engine, keeps)

    def _handed_over(self, full: dict[str, Any]) -> dict[str, Any]:
        """What the collecting rank has, on rank 0, which writes files."""
        source = self.collecting_rank
        if source == 0 or self.global_rank not in (0, source):
            return full
        if self.global_rank == source:
            dist.send_object_list([full], dst=0, device=self.root_device)
            return {}
        boxed: list[Any] = [None]
        dist.recv_object_list(boxed, src=source, device=self.root_device)
        return boxed[0]

    def _is_ordinary_file(self, path: _PATH) -> bool:
        return type(self.checkpoint_io) is TorchCheckpointIO and _is_local_file_protocol(path)


def _without_wrappers(state: dict[str, Any]) -> dict[str, Any]:
    return {name.replace(_COMPILED, ""): value for name, value in state.items()}
