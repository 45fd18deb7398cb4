"""The model as the planner sees it: its parameters placed as the engine places them, its step traced when asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lightning_par.model_state import count_parameters
from lightning_par.pipeline_parallel.trunk import CannotSplitError, Trunk, find_trunk
from lightning_par.planner.batches import bytes_per_sample, count_tokens
from lightning_par.planner.ledger import Entry
from lightning_par.planner.placed import SAMPLES, PlacedModule
from lightning_par.planner.plan import ModelSummary
from lightning_par.planner.profile import Profile
from lightning_par.planner.rough import rough_activity
from lightning_par.planner.trace import PRECISIONS, Precision, Step, UntraceableError, trace, training_step
from lightning_par.tensor_parallel import check_plan, resolve_plan

__all__ = ["OptimizerRule", "PlannedModel", "optimizer_rule"]


@dataclass(frozen=True)
class OptimizerRule:
    """What an optimizer keeps.

    Attributes:
        name: Its class.
        per_element: Tensors as large as the parameter.
        per_parameter: Further bytes for each parameter, such as a step count.
    """

    name: str = "AdamW"
    per_element: float = 2.0
    per_parameter: int = 4

    def nbytes(self, numel: int, itemsize: int, parameters: int) -> int:
        """Bytes of the states of some parameters."""
        return int(self.per_element * numel * itemsize) + self.per_parameter * parameters


def optimizer_rule(factory: Callable[[Any], Optimizer] = AdamW) -> OptimizerRule:
    """Find out what an optimizer keeps, by a step on one small parameter."""
    parameter = nn.Parameter(torch.zeros(8, 16))
    optimizer = factory([parameter])
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = [value for value in optimizer.state[parameter].values() if isinstance(value, Tensor)]
    whole = [state for state in states if state.numel() == parameter.numel()]
    others = [state for state in states if state.numel() != parameter.numel()]
    return OptimizerRule(type(optimizer).__name__, float(len(whole)), sum(state.nbytes for state in others))


class PlannedModel:
    """A module with what is needed to plan for it. The module itself is not touched.

    Args:
        module: On any device; the meta device serves.
        batch: A batch of its training data, of any size; ``None`` if there is none to trace with.
        precision: As ``Trainer(precision=...)``.
        optimizer: What the optimizer keeps.
        tensor_parallel_plan: As the strategy's argument.
        step: What a step is; Lightning's ``training_step`` by default.
        tokens_per_sample: Tokens of a sample, ``None`` to read it off the batch (1 without one).
        no_pipeline: Why it can't run under a pipeline, if its trainer knows a reason.
        name: What to call the model, its class's name by default.

    Raises:
        ValueError: If the precision is unknown or the module has no parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        batch: Any,
        *,
        precision: str = "32-true",
        optimizer: OptimizerRule | None = None,
        tensor_parallel_plan: Mapping[str, str] | None = None,
        step: Step = training_step,
        tokens_per_sample: int | None = None,
        no_pipeline: str = "",
        name: str = "",
    ) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision={precision!r} is not one of {', '.join(PRECISIONS)}.")
        self.module = module
        self.batch = batch
        self.precision: Precision = PRECISIONS[precision]
        self.precision_name = precision
        self.optimizer = optimizer or OptimizerRule()
        self.name = name or type(module).__name__
        self.notes: dict[str, None] = {}
        self.tokens_per_sample = tokens_per_sample or (1 if batch is None else count_tokens(batch))
        self._plan = tensor_parallel_plan
        self._step = step
        self._no_pipeline = no_pipeline
        self._profiles: dict[tuple[int, bool], Profile] = {}
        self._plans: dict[int, dict[str, str]] = {1: {}}
        self.num_parameters = count_parameters(module.parameters())
        if not self.num_parameters:
            raise ValueError(f"{self.name} has no parameters, so there is nothing to plan.")

    def with_precision(self, precision: str) -> PlannedModel:
        """The same module at another precision."""
        return PlannedModel(
            self.module,
            self.batch,
            precision=precision,
            optimizer=self.optimizer,
            tensor_parallel_plan=self._plan,
            step=self._step,
            tokens_per_sample=self.tokens_per_sample,
            no_pipeline=self._no_pipeline,
            name=self.name,
        )

    # What it is

    @cached_property
    def trunk(self) -> Trunk | None:
        """The blocks, ``None`` where there is no list of like ones."""
        try:
            return find_trunk(self.module)
        except CannotSplitError as error:
            self._no_trunk = str(error)
            return None

    @property
    def batch_bytes(self) -> int:
        """Bytes of a sample."""
        return bytes_per_sample(self.batch) if self.batch is not None else 0

    @property
    def rest_itemsize(self) -> int:
        """Bytes of an element at rest, of the parameters' most common type."""
        if self.precision.rest is not None:
            return self.precision.rest.itemsize
        return max(p.element_size() for p in self.module.parameters())

    @property
    def compute_itemsize(self) -> int:
        """Bytes of an element of gathered parameters."""
        return self.precision.compute.itemsize if self.precision.compute is not None else self.rest_itemsize

    def summary(self) -> ModelSummary:
        """The model in a few figures."""
        profile = self.profile()
        units = [unit.numel for section in (profile.before, *profile.kinds, profile.after) for unit in section.units]
        return ModelSummary(
            name=self.name,
            num_parameters=self.num_parameters,
            num_trained=count_parameters(p for p in self.module.parameters() if p.requires_grad),
            num_blocks=profile.num_blocks,
            tokens_per_sample=self.tokens_per_sample,
            precision=self.precision_name,
            largest_unit=max(units, default=0) * self.compute_itemsize,
            source=profile.source,
        )

    # What it refuses

    def refuses_tensor_parallel(self, size: int) -> str:
        """Why the tensor axis can't have that size; empty if it can."""
        try:
            self._planned(size)
        except ValueError as error:
            return str(error)
        return ""

    def refuses_pipeline(self) -> str:
        """Why there can be no pipeline; empty if there can."""
        if self._no_pipeline:
            return self._no_pipeline
        if self.trunk is None:
            return self._no_trunk
        if not getattr(self.module, "automatic_optimization", True):
            return f"{self.name} optimizes manually, which a pipeline's schedule can't run."
        return "" if self.profile().num_blocks else next(iter(self.notes), "the blocks can't be told apart")

    def _planned(self, size: int) -> dict[str, str]:
        if size not in self._plans:
            plan = resolve_plan(self.module, self._plan)
            check_plan(self.module, plan, size)
            self._plans[size] = plan
        return self._plans[size]

    # What it needs

    def profile(self, tensor_parallel_size: int = 1, gathers: bool = False) -> Profile:
        """The model at a tensor-parallel degree.

        Args:
            tensor_parallel_size: The degree.
            gathers: Whether parameters are gathered in their compute type (ZeRO), instead of cast in each operator.

        Raises:
            ValueError: If the degree does not suit the module.
        """
        gathers = gathers and self.precision.compute is not None
        key = (tensor_parallel_size, gathers)
        if key not in self._profiles:
            self._profiles[key] = self._make_profile(*key)
        return self._profiles[key]

    def _make_profile(self, size: int, gathers: bool) -> Profile:
        plan = self._planned(size)
        dtype = self.precision.compute if gathers else self.precision.rest
        try:
            if self.batch is None:
                raise UntraceableError("there is no batch to trace with")
            traced = self._trace(plan, size, dtype)
        except UntraceableError as error:
            self.notes[f"{error}: activations and times are from formulas instead of a trace"] = None
            bare = self._placed.profile(plan, size)
            return rough_activity(bare, self.tokens_per_sample, size, self.compute_itemsize)
        return self._placed.profile(plan, size, traced)

    @cached_property
    def _placed(self) -> PlacedModule:
        return PlacedModule(self.module, self.trunk, self.precision.rest)

    def _trace(self, plan: dict[str, str], size: int, dtype: torch.dtype | None) -> list[dict[str, Entry]]:
        return trace(
            self.module,
            self.batch,
            SAMPLES,
            trunk=self.trunk.name if self.trunk else None,
            plan=plan,
            tensor_parallel_size=size,
            dtype=dtype,
            autocast=self.precision.autocast,
            step=self._step,
        )
