"""The engine: applies the parallelisms to a module in their fixed order, and runs its steps.

The order matters, so it is in one place (:meth:`ParallelEngine._prepare`): a unit's parameters are created and made
equal on all ranks, then split over ``tp``, then sharded or replicated over the data axes. Units come inner before
outer, so no rank ever holds more than its share and one whole unit on its device. A pipeline splits stages before all
of this; activation checkpointing and compilation of blocks go between the tensor and the data axis.

The engine knows torch and nothing of Lightning: trainers drive it through :meth:`ParallelEngine.run`,
:meth:`ParallelEngine.accumulating` and the gradient functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_par.data_parallel import (
    ZERO_POLICIES,
    Unit,
    UnitPrecision,
    UsedParameters,
    apply_data_axis,
    average_scalar_gradients,
    defer_gradient_sync,
    find_units,
    gather,
    make_root,
    release_gathered,
    wrap_whole,
)
from lightning_par.layout import ParallelLayout
from lightning_par.materialize import check_can_materialize, materialize
from lightning_par.restore import Footprint
from lightning_par.tensor_parallel import (
    apply_plan,
    check_plan,
    check_replicated_gradients,
    explain_errors,
    resolve_plan,
)
from lightning_par.ties import find_ties, restore_ties

__all__ = ["ParallelEngine", "StepModule", "engine_of"]

_REPLICA_AXES = ("dp_replicate", "dp_shard", "tp")
_BROADCAST_BYTES = 64 * 2**20
"""Tensors are sent together in buckets of this size."""


class StepModule(nn.Module):
    """The root of everything that wraps: its forward calls one method of the user's module.

    So wrappers see a step as an ordinary forward, whatever the step is called, and the user's module needs none.

    Args:
        module: The user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call ``module.<method>(*args, **kwargs)``."""
        return getattr(self.module, method)(*args, **kwargs)


class _Link:
    """Ties a module to the engine that has laid it out, for whoever wants to lay it out in another way.

    It hangs on the module itself, so that both are freed together; a copy of the module has no engine.
    """

    NAME = "_parallel_engine_link"

    def __init__(self, engine: ParallelEngine | None = None) -> None:
        self.engine = engine

    def __reduce__(self) -> tuple[type[_Link], tuple[()]]:
        return _Link, ()


class ParallelEngine:
    """A module laid out over the ranks of a mesh.

    Args:
        module: The user's module, ordinary or (in whole or part) on the meta device. Changed in place.
        layout: The degrees.
        mesh: The mesh made by the layout.
        device: This rank's device.
        zero_stage: 0, 1, 2 or 3.
        tensor_parallel_plan: Dotted pattern -> style name; ``None`` takes the module's own plan.
        parameter_dtype: Type that sharded parameters are gathered and used in, ``None`` for their own.
        find_unused_parameters: Whether to cope with parameters that a step does not use, on some ranks or on all.
        steps_inside: Whether the user's step runs backward and steps optimizers itself.

    Raises:
        ValueError: If the layout does not suit the module (see :mod:`lightning_par.tensor_parallel`), or meta
            parameters cannot be initialised.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: ParallelLayout,
        mesh: DeviceMesh,
        *,
        device: torch.device,
        zero_stage: int = 0,
        tensor_parallel_plan: Mapping[str, str] | None = None,
        parameter_dtype: torch.dtype | None = None,
        find_unused_parameters: bool = True,
        steps_inside: bool = False,
    ) -> None:
        self.module = module
        self.layout = layout
        self.mesh = mesh
        self.device = device
        self.zero_stage = zero_stage
        self._policy = ZERO_POLICIES[zero_stage]
        self._parameter_dtype = parameter_dtype if self._policy.shards else None
        self._steps_inside = steps_inside
        self._running = False
        self._is_last_micro_batch = True
        self.plan = resolve_plan(module, tensor_parallel_plan) if layout.tp > 1 else {}
        check_plan(module, self.plan, layout.tp)
        self._checks_gradients = layout.tp > 1
        check_can_materialize(module)
        self._footprint = Footprint(module)
        self.step_module = StepModule(module)
        self.root: nn.Module = self.step_module
        self._ties = find_ties(module)
        units = find_units(module, split_children=steps_inside)
        for unit in units:
            self._prepare(unit)
        self._wrap_root(units[-1], find_unused_parameters)
        self._scalars = [parameter for parameter in module.parameters() if parameter.ndim == 0]
        self._used = self._watch_use(units) if find_unused_parameters else None
        self._laid_out = _modules_with_parameters(module)
        self._footprint.complete()
        vars(module)[_Link.NAME] = _Link(self)

    def still_holds(self, module: nn.Module, mesh: DeviceMesh | None) -> bool:
        """Whether ``module`` is as this engine laid it out on ``mesh``."""
        same = module is self.module and mesh is self.mesh
        return same and self._laid_out == _modules_with_parameters(module)

    def remove(self) -> None:
        """Take the layout off the module again, which is left whole and on the host. A collective of the mesh."""
        release_gathered(self.root)
        self._footprint.remove()
        del vars(self.module)[_Link.NAME]

    def run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run one step of the user's module through the wrappers."""
        self._running = True
        try:
            # Evaluation needs no gradients reduced, and ranks may make different numbers of steps in it.
            root = self.root if torch.is_grad_enabled() else self.step_module
            with explain_errors():
                return root(method, *args, **kwargs)
        finally:
            self._running = False

    @property
    def gathers_in_forward(self) -> bool:
        """Whether a forward is a collective of the data axis."""
        return self._policy.shards and self.layout.data_parallel_size > 1

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Context of a micro-batch that is not the last of its accumulation window."""
        self._is_last_micro_batch = False
        try:
            with defer_gradient_sync(self.root, self._policy):
                yield
        finally:
            self._is_last_micro_batch = True

    def before_evaluation(self) -> None:
        """Give every rank the batch-norm statistics of the first, as the checkpoint has them. A collective."""
        norms = (module for module in self.module.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
        self._equalize([buffer for norm in norms for buffer in norm.buffers(recurse=False)])

    def before_backward(self) -> None:
        """Tell the engine that a backward begins."""
        if self._used is not None:
            self._used.before_backward()

    def after_backward(self) -> None:
        """Tell the engine that a backward ended.

        Raises:
            ValueError: After the first backward, on every rank, if gradients of whole parameters differ over the tensor
                axis: the plan then forgets a layer, and training would let the ranks drift apart unseen.
        """
        if self._checks_gradients and any(parameter.grad is not None for parameter in self.module.parameters()):
            self._checks_gradients = False
            check_replicated_gradients(self.module, self.mesh["tp"])
        if self._composes_units and self._is_last_micro_batch:
            scalars = [parameter for parameter in self._scalars if parameter.requires_grad]
            average_scalar_gradients(scalars, self.mesh.get_group("dp"))
            if self._used is not None:
                self._used.settle()
        self._gather_root_again()

    def release(self) -> None:
        """Free gathered copies of parameters, so that the module shows its shards."""
        release_gathered(self.root)

    def after_optimizer_step(self) -> None:
        """Tell the engine that an optimizer changed parameters."""
        release_gathered(self.root)
        self._gather_root_again()

    def parameters(self) -> list[nn.Parameter]:
        """This rank's parameters as optimizers see them (sharded where they are), tied ones once."""
        release_gathered(self.root)
        return list(self.module.parameters())

    def _gather_root_again(self) -> None:
        """Inside a step, what the root holds must stay usable: blocks gather themselves, the root only on entry."""
        if self._steps_inside and self._running:
            gather(self.root)

    def _prepare(self, unit: Unit) -> None:
        """Create, equalise, split and shard one unit: the fixed order of parallelisms."""
        materialize(self.module, unit.members, self.device)
        restore_ties(self._ties)
        unit.module.to(self.device)
        self._equalize([tensor for _, member in unit.members for tensor in _own_tensors(member)])
        if self.plan:
            apply_plan(self.module, self.plan, self.mesh["tp"], members=[name for name, _ in unit.members])
        if unit.module is not self.module and self._composes_units:
            self._apply_data_axis(unit.module, casts_inputs=True)

    def _wrap_root(self, unit: Unit, find_unused_parameters: bool) -> None:
        if self.layout.data_parallel_size == 1:
            return
        if not self._composes_units:
            self.root = wrap_whole(self.step_module, self.mesh, find_unused_parameters)
            return
        # The root sees the user's batch as it is: targets keep their precision.
        self._apply_data_axis(self.step_module, casts_inputs=False)
        make_root(self.step_module)
        for _, member in unit.members:
            member.register_forward_pre_hook(self._before_member)

    def _watch_use(self, units: list[Unit]) -> UsedParameters | None:
        if not self._composes_units or not UsedParameters.is_supported():
            return None
        modules = [self.step_module if unit.module is self.module else unit.module for unit in units]
        members = [unit.members for unit in units]
        return UsedParameters(self.module, zip(modules, members, strict=True), self.mesh.get_group("dp"), self.device)

    def _before_member(self, *_: Any) -> None:
        """Gather what the root holds for a call from outside a step, such as a callback's."""
        if not self._running:
            gather(self.root)

    @property
    def _composes_units(self) -> bool:
        """Whether the data axis works unit by unit; plain replication does it whole, which is faster."""
        plain = not self._policy.shards and self.layout.tp == 1 and not self._steps_inside
        return self.layout.data_parallel_size > 1 and not plain

    def _apply_data_axis(self, module: nn.Module, casts_inputs: bool) -> None:
        precision = UnitPrecision(self._parameter_dtype, casts_inputs)
        apply_data_axis(module, self.mesh, self._policy, precision)

    def _equalize(self, tensors: list[Tensor]) -> None:
        """Give every rank the tensors of the first, as if one process had made them."""
        unique = list({id(tensor): tensor.detach() for tensor in tensors}.values())
        for axis in _REPLICA_AXES:
            group = self.mesh.get_group(axis)
            if group.size() > 1 and unique:
                dist._broadcast_coalesced(group, unique, _BROADCAST_BYTES, 0)


def engine_of(module: nn.Module) -> ParallelEngine | None:
    """The engine that has laid out ``module``, if one has."""
    link = vars(module).get(_Link.NAME)
    return link.engine if link is not None else None


def _modules_with_parameters(root: nn.Module) -> list[nn.Module]:
    return [module for module in root.modules() if module._parameters]


def _own_tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]
