"""The part of the strategy that saves and restores: one ordinary file, the same under every layout."""

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
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_par.checkpoint import (
    gather_full_state,
    save_file,
    shard_full_state,
    shard_optimizer_state,
    to_plain,
)
from lightning_par.trainer.mesh_strategy import MeshStrategy
from lightning_par.trainer.optimizers import choose_update, forget_update
from lightning_par.trainer.pipeline_checkpoint import StagedCheckpoint

if TYPE_CHECKING:
    from lightning.fabric.utilities.types import _PATH

__all__ = ["CheckpointHooks"]

_COMPILED = "_orig_mod."


class CheckpointHooks(MeshStrategy):
    """Gathers full state on saving and cuts it up on loading."""

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        # Weights are cut up by the layout, which exists after set-up.
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Full weights by global parameter name on rank 0, nothing on others. A collective."""
        if self._skips_saving():
            return {}
        assert self.lightning_module is not None
        if self.staged_checkpoint is not None:
            return self._without_wrappers(self._handed_over(self.staged_checkpoint.module_state()))
        full = gather_full_state(self.lightning_module.state_dict(), keep=self.is_global_zero)
        return self._without_wrappers(full)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Full state of one optimizer on rank 0, by parameter position as one process numbers it. A collective."""
        if self._skips_saving():
            return {}
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        if self.staged_checkpoint is not None:
            state = forget_update(inner, inner.state_dict())
            full = self.staged_checkpoint.optimizer_state(inner, self._number_of(inner), state)
        else:
            keep = self.global_rank == self.collecting_rank
            full = gather_full_state(forget_update(inner, inner.state_dict()), keep)
        return self._handed_over(full)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        if self._skips_saving():
            return
        if self._is_ordinary_file(filepath) and storage_options is None:
            if self.is_global_zero:
                save_file(to_plain(checkpoint), Path(filepath))
        else:
            super().save_checkpoint(to_plain(checkpoint), filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        # An ordinary file is mapped, not read: each rank then reads just its share of every tensor.
        if self._is_ordinary_file(checkpoint_path) and os.path.isfile(checkpoint_path):
            return torch.load(checkpoint_path, map_location="cpu", mmap=True, weights_only=weights_only)
        return super().load_checkpoint(checkpoint_path, weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        present = self.lightning_module.state_dict()
        names = {name.replace(_COMPILED, ""): name for name in present}
        full = {names.get(name.replace(_COMPILED, ""), name): value for name, value in checkpoint["state_dict"].items()}
        if self.staged_checkpoint is not None:
            full = self.staged_checkpoint.load_module_state(full)
        self.lightning_module.load_state_dict(shard_full_state(full, present), strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for number, (optimizer, full) in enumerate(zip(self.optimizers, checkpoint["optimizer_states"], strict=False)):
            if self.staged_checkpoint is not None:
                full = self.staged_checkpoint.load_optimizer_state(optimizer, number, full)
            if not self.holds_optimizer_state:
                full = {**full, "state": {}}
            optimizer.load_state_dict(shard_optimizer_state(full, optimizer))
            choose_update(optimizer)
            _optimizer_to_device(optimizer, self.root_device)

    @property
    def staged_checkpoint(self) -> StagedCheckpoint | None:
        """Saves and loads what lies on several stages; ``None`` without a pipeline."""
        return None

    @property
    def holds_optimizer_state(self) -> bool:
        """Whether this rank's optimizers step."""
        return True

    @property
    def collecting_rank(self) -> int:
        """Global rank that full state is collected on first: one that holds optimizer state."""
        return 0

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

    def _number_of(self, optimizer: Optimizer) -> int:
        return next(number for number, known in enumerate(self.optimizers) if known is optimizer)

    @staticmethod
    def _without_wrappers(state: dict[str, Any]) -> dict[str, Any]:
        return {name.replace(_COMPILED, ""): value for name, value in state.items()}

    def _is_ordinary_file(self, path: _PATH) -> bool:
        """Whether the path is on this machine and no plugin of the user's has its own idea of saving."""
        return type(self.checkpoint_io) is TorchCheckpointIO and _is_local_file_protocol(path)

    def _skips_saving(self) -> bool:
        if self.is_failing:
            rank_zero_warn("Not saving a checkpoint after an exception: it needs all ranks, and one has failed.")
        return self.is_failing
