"""Lightning's hooks of saving and restoring, answered by what both adapters share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer, _configure_optimizers
from lightning.pytorch.trainer.call import _call_lightning_module_hook
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_par.checkpoint import to_plain
from lightning_par.trainer.mesh_strategy import MeshStrategy

if TYPE_CHECKING:
    from lightning.fabric.utilities.types import _PATH

__all__ = ["CheckpointHooks", "optimizer_order"]

OptimizerOrder = list[list[list[str]]]
"""For each optimizer, for each of its groups: parameter names."""


def optimizer_order(trainer: Trainer, module: LightningModule) -> OptimizerOrder:
    """How one process numbers the parameters of the module's optimizers; ask before the module is split."""
    conf = _call_lightning_module_hook(trainer, "configure_optimizers", pl_module=module)
    optimizers = _configure_optimizers(conf)[0] if conf is not None else []
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [[[names[p] for p in group["params"]] for group in optimizer.param_groups] for optimizer in optimizers]


class CheckpointHooks(MeshStrategy):
    """Gathers full state on saving and cuts it up on loading."""

    _optimizer_order: OptimizerOrder | None = None

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        # Weights are cut up by the layout, which exists after set-up.
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Full weights by global parameter name on rank 0, nothing on others. A collective."""
        return {} if self._skips_saving() else self.full_module_state(self.engine)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Full state of one optimizer on rank 0, by parameter position as one process numbers it. A collective."""
        if self._skips_saving():
            return {}
        inner = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return self.full_optimizer_state(self.engine, inner)

    @override
    def optimizer_names(self, optimizer: Optimizer) -> list[list[str]]:
        assert self._optimizer_order is not None
        pairs = zip(self.optimizers, self._optimizer_order, strict=True)
        return next(names for known, names in pairs if known is optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        if self._skips_saving():
            return
        if storage_options is not None or not self.write_ordinary_file(checkpoint, filepath):
            super().save_checkpoint(to_plain(checkpoint), filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        content = self.read_ordinary_file(checkpoint_path, weights_only)
        return super().load_checkpoint(checkpoint_path, weights_only) if content is None else content

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.load_full_module_state(self.engine, checkpoint["state_dict"], strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, full in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            self.load_full_optimizer_state(self.engine, optimizer, full)

    def _skips_saving(self) -> bool:
        if self.is_failing:
            rank_zero_warn("Not saving a checkpoint after an exception: it needs all ranks, and one has failed.")
        return self.is_failing
