"""Which hooks of a run may look at gradients or parameters between steps.

Lightning's own callbacks look at neither, but for those that average or thaw.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden

__all__ = ["SEE_GRADIENTS", "SEE_PARAMETERS", "who_looks"]

SEE_GRADIENTS = (
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "optimizer_zero_grad",
    "on_before_zero_grad",
)
SEE_PARAMETERS = (
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


def who_looks(hooks: Iterable[str], module: LightningModule, callbacks: Iterable[Callback]) -> list[str]:
    """The hooks of the module and of callbacks that are not known to look at nothing, such as ``"Mine.on_fit_end"``."""
    known = list(callbacks)
    found = [f"{type(module).__name__}.{hook}" for hook in hooks if is_overridden(hook, module)]
    return found + [
        f"{type(callback).__name__}.{hook}" for hook in hooks for callback in known if _looks(callback, hook)
    ]


def _looks(callback: Callback, hook: str) -> bool:
    if hook in vars(callback):  # a function of the user's, as LambdaCallback has them
        return True
    return _may_look(callback) and _overrides(hook, callback)


def _may_look(callback: Any) -> bool:
    return isinstance(callback, _LOOKING) or not type(callback).__module__.startswith(_OURS)


def _overrides(hook: str, callback: Callback) -> bool:
    return getattr(type(callback), hook, None) is not getattr(Callback, hook, None)
