"""Letting host steps overlap with what nobody looks at: which hooks a run has decides.

A hook that may look at gradients must find them, and one that may look at parameters must find those of after the
step. Lightning's own callbacks look at neither, but for those that average or thaw.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_par.offload import ModelOffload

__all__ = ["overlap_unseen"]

_SEE_GRADIENTS = (
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_zero_grad",
    "on_before_zero_grad",
)
_SEE_PARAMETERS = (
    "optimizer_step",
    "lr_scheduler_step",
    "on_train_batch_end",
    "on_train_batch_start",
    "on_train_epoch_start",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)
_LOOKING = (BaseFinetuning, StochasticWeightAveraging, WeightAveraging)
_OURS = ("lightning.pytorch.", "lightning_par.")


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
    sees_gradients = _any_of(_SEE_GRADIENTS, module, callbacks)
    # A step that optimizes by itself goes on with its own code after each step.
    sees_parameters = not module.automatic_optimization or _any_of(_SEE_PARAMETERS, module, callbacks)
    changes_gradients = bool(trainer.gradient_clip_val) or getattr(trainer.precision_plugin, "scaler", None) is not None
    offload.observe(
        defers=not (sees_gradients or sees_parameters),
        takes_gradients=not (sees_gradients or sees_parameters),
        steps_in_backward=not changes_gradients,
    )


def _any_of(hooks: Iterable[str], module: LightningModule, callbacks: Iterable[Callback]) -> bool:
    return any(is_overridden(hook, module) or any(_looks(callback, hook) for callback in callbacks) for hook in hooks)


def _looks(callback: Callback, hook: str) -> bool:
    if hook in vars(callback):  # a function of the user's, as LambdaCallback has them
        return True
    return _may_look(callback) and _overrides(hook, callback)


def _may_look(callback: Any) -> bool:
    return isinstance(callback, _LOOKING) or not type(callback).__module__.startswith(_OURS)


def _overrides(hook: str, callback: Callback) -> bool:
    return getattr(type(callback), hook, None) is not getattr(Callback, hook, None)
