"""The strategy that asks the planner: it measures module and machines, chooses a layout, and trains with it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from typing_extensions import override

from lightning_par.planner.model import OptimizerRule
from lightning_par.planner.stand_in import fake_copy
from lightning_par.planner.trace import training_step
from lightning_par.strategies.auto import Auto, Training, rule_of
from lightning_par.trainer.pipeline_steps import refuse_under_a_pipeline
from lightning_par.trainer.strategy import HybridStrategy

__all__ = ["AutoStrategy"]


class AutoStrategy(Auto, HybridStrategy):
    """Chooses the layout itself, when a fit begins: by a trace of the module's step and by what the machines can do.

    The loader's batch size and ``accumulate_grad_batches`` are taken as they are, so the number of samples in an
    optimizer step follows from the data-parallel size that is chosen. One rank decides for all; it prints why, and
    leaves the whole answer in :attr:`plan`. The machine is measured once and remembered in the user's cache.

    Args:
        tensor_parallel_plan: As for :class:`~lightning_par.HybridStrategy`.
        find_unused_parameters: As there.
        process_group_backend: As there.
        timeout: As there.
        **lightning: Lightning's own arguments.

    Raises:
        MisconfigurationException: When a fit begins and no layout fits, with what is missing and what would help.
    """

    _planned_for: pl.LightningModule | None = None

    @override
    def _connect_processes(self) -> None:
        super()._connect_processes()
        module = self.lightning_module
        assert module is not None
        if self._planned_for is not module:
            self.choose(type(module).__name__, lambda: self._training_of(module))
            self._planned_for = module

    def _training_of(self, module: pl.LightningModule) -> Training:
        batch, notes = _batch_of(module)
        built = _built(module)
        return Training(
            built,
            training_step,
            batch,
            accumulate=max(1, module.trainer.accumulate_grad_batches),
            precision=str(getattr(self.precision_plugin, "precision", "32-true")),
            optimizer=_optimizer_of(built),
            no_pipeline=_refusal(module),
            notes=notes,
        )


def _refusal(module: pl.LightningModule) -> str:
    try:
        refuse_under_a_pipeline(module)
    except MisconfigurationException as error:
        return str(error)
    return ""


def _built(module: pl.LightningModule) -> nn.Module:
    """The module, or a copy on the meta device where ``configure_model`` has yet to build it."""
    if not is_overridden("configure_model", module):
        return module
    twin = fake_copy(module, "meta")
    with torch.device("meta"):
        twin.configure_model()  # type: ignore[operator]
    return twin


def _optimizer_of(module: nn.Module) -> OptimizerRule:
    """What the module's own optimizer keeps; Adam's moments if it can't be made without a Trainer."""
    twin = fake_copy(module, "meta")
    try:
        made: Any = twin.configure_optimizers()  # type: ignore[operator]
        optimizer = made["optimizer"] if isinstance(made, Mapping) else made
        optimizer = optimizer[0] if isinstance(optimizer, list | tuple) else optimizer
        return rule_of(optimizer)
    except Exception:
        return OptimizerRule()


def _batch_of(module: pl.LightningModule) -> tuple[Any, tuple[str, ...]]:
    """The first batch that would be trained on; the loader and its data module stay as they are."""
    source = module.trainer.fit_loop._data_source
    try:
        holder = source.instance
        if source.is_module() and isinstance(holder, pl.LightningDataModule):
            if callable(sample := getattr(holder, "sample_batch", None)):
                return sample(), ()
            holder = copy.copy(holder)
            holder.prepare_data()
            holder.setup("fit")
        loader: Any = getattr(holder, source.name)() if source.is_module() else holder
        return next(iter(loader)), ()
    except Exception as error:
        return None, (f"the training data gives no batch before a fit ({type(error).__name__}: {error})",)
