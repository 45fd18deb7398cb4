"""Letting host steps overlap with what nobody looks at: which hooks a run has decides.

A hook that may look at gradients must find them, and one that may look at parameters must find those of after the
step.
"""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_par.offload import ModelOffload
from lightning_par.trainer.looking_hooks import SEE_GRADIENTS, SEE_PARAMETERS, who_looks

__all__ = ["overlap_unseen"]


class SettleOffload(Callback):
    """Finishes what is on its way before hooks that come seldom enough to always be served."""

    def __init__(self, offload: ModelOffload) -> None:
        self._offload = offload

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Settle."""
        self._offload.settle()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Settle."""
        self._offload.settle()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Settle."""
        self._offload.settle()


def overlap_unseen(trainer: Trainer, offload: ModelOffload) -> None:
    """Tell ``offload`` what no hook of the module or a callback may look at, and settle before the other hooks."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks[:] = [callback for callback in callbacks if not isinstance(callback, SettleOffload)]
    callbacks.insert(0, SettleOffload(offload))
    module = trainer.lightning_module
    sees_gradients = bool(who_looks(SEE_GRADIENTS, module, callbacks))
    # A step that optimizes by itself goes on with its own code after each step.
    sees_parameters = not module.automatic_optimization or bool(who_looks(SEE_PARAMETERS, module, callbacks))
    changes_gradients = bool(trainer.gradient_clip_val) or getattr(trainer.precision_plugin, "scaler", None) is not None
    offload.observe(
        defers=not (sees_gradients or sees_parameters),
        takes_gradients=not (sees_gradients or sees_parameters),
        steps_in_backward=not changes_gradients,
    )
