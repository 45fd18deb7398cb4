"""The strategy that asks the planner, for a loop of your own: it chooses when the first module is set up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from lightning.fabric.plugins.precision import MixedPrecision
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_par.fabric.laid_out import StepFunction
from lightning_par.fabric.strategy import HybridStrategy
from lightning_par.layout import ParallelLayout
from lightning_par.planner.trace import UntraceableError
from lightning_par.process_group import set_mesh_coordinates
from lightning_par.strategies.auto import Auto, Training, rule_of
from lightning_par.strategies.mesh import DEFAULT_TIMEOUT

__all__ = ["AutoStrategy"]

_NO_STEP = (
    "only a loop that calls fabric.strategy.step runs under a pipeline, and AutoStrategy was given no step_fn to say so"
)
_OPTIMIZER_APART = (
    "a pipeline needs module and optimizer set up together, by model, optimizer = fabric.setup(model, optimizer)"
)
_HOW_TO_TRACE = "AutoStrategy(sample_batch=..., step_fn=...) would trace the real step"


class AutoStrategy(Auto, HybridStrategy):
    """Chooses the layout itself, when the first module is set up; later ones are laid out alike.

    With ``sample_batch`` and ``step_fn`` the choice comes from a trace of the real step; otherwise from formulas, and
    it says so. One rank decides for all; it prints why, and leaves the whole answer in :attr:`plan`. Before the
    choice nobody knows how many ranks see different batches: set up the module before the loaders. The machine is
    measured once and remembered in the user's cache.

    Args:
        sample_batch: A batch such as one data-parallel rank trains on, or a function that returns it, which is called
            on rank 0 only. Its values do not matter, its sizes do.
        step_fn: What the loop gives :meth:`step`: ``step_fn(module, batch) -> loss``. Without it no pipeline is chosen.
        batch_size: Samples in a batch of one data-parallel rank, ``None`` to count those of ``sample_batch`` (1 without
            one).
        accumulate: Batches in an optimizer step.
        tensor_parallel_plan: As for :class:`~lightning_par.fabric.HybridStrategy`.
        find_unused_parameters: As there.
        process_group_backend: As there.
        timeout: As there.
        **lightning: Lightning's own arguments.

    Raises:
        ValueError: If ``batch_size`` or ``accumulate`` is not positive.
        MisconfigurationException: When a module is set up and no layout fits, with what is missing and what would help.
    """

    starts = "Fabric sets a module up for the first time"

    def __init__(
        self,
        sample_batch: Any = None,
        step_fn: StepFunction | None = None,
        batch_size: int | None = None,
        accumulate: int = 1,
        tensor_parallel_plan: Mapping[str, str] | None = None,
        find_unused_parameters: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        **lightning: Any,
    ) -> None:
        for name, value in (("batch_size", batch_size), ("accumulate", accumulate)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")
        super().__init__(
            tensor_parallel_plan=tensor_parallel_plan,
            find_unused_parameters=find_unused_parameters,
            process_group_backend=process_group_backend,
            timeout=timeout,
            **lightning,
        )
        self._sample_batch = sample_batch
        self._step_fn = step_fn
        self._batch_size = batch_size
        self._accumulate = accumulate

    @property
    @override
    def layout(self) -> ParallelLayout:
        """Degrees by axis; known once a module is set up.

        Raises:
            RuntimeError: If asked for earlier, as ``fabric.setup_dataloaders`` does for the data-parallel size.
        """
        if self.candidate is None:
            raise RuntimeError(
                f"AutoStrategy chooses the layout when {self.starts}; before that nobody knows how many ranks see "
                "different batches. Call model, optimizer = fabric.setup(model, optimizer) first, and "
                "fabric.setup_dataloaders after it."
            )
        return super().layout

    @override
    def _make_mesh(self) -> None:
        if self.candidate is None:
            set_mesh_coordinates({})  # those of an earlier run in this process
        else:
            super()._make_mesh()

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        self._choose_for(module, (), _OPTIMIZER_APART)
        return super().setup_module(module)

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any | None = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        self._choose_for(module, optimizers)
        return super().setup_module_and_optimizers(module, optimizers, scheduler)

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        _ = self.layout  # Fabric does not ask for the data-parallel size where a loader has a sampler of its own
        return super().process_dataloader(dataloader)

    def _choose_for(self, module: nn.Module, optimizers: Sequence[Optimizer], no_pipeline: str = "") -> None:
        if self.candidate is None:
            self.choose(type(module).__name__, lambda: self._training_of(module, optimizers, no_pipeline))
            self._make_mesh()

    def _training_of(self, module: nn.Module, optimizers: Sequence[Optimizer], no_pipeline: str) -> Training:
        batch = self._sample_batch() if callable(self._sample_batch) else self._sample_batch
        if batch is not None and not isinstance(self.precision, MixedPrecision):
            batch = self.precision.convert_input(batch)  # as step does
        return Training(
            module,
            self._step_fn or _untraceable,
            batch,
            self._batch_size,
            self._accumulate,
            precision=str(self.precision.precision),
            optimizer=rule_of(optimizers[0]) if optimizers else None,
            no_pipeline=no_pipeline if self._step_fn is not None else _NO_STEP,
            notes=() if batch is not None and self._step_fn is not None else (_HOW_TO_TRACE,),
        )


def _untraceable(module: nn.Module, batch: Any) -> Any:
    raise UntraceableError("there is no step_fn to trace")
