"""One tree of modules that is called as a whole, laid out over the ranks: a module, or a pipeline stage of one.

The order of parallelisms is in one place (:meth:`Tree._prepare`): a unit's parameters are created and made equal on all
ranks, then split over ``tp``, then its activations are checkpointed, then it is sharded or replicated over the data
axes. Units come inner before outer, so no rank ever holds more than its share and one whole unit on its device.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_par.activation_checkpointing import Checkpointing, checkpoint_activations
from lightning_par.data_parallel import (
    HostShards,
    Place,
    ServerOptions,
    Unit,
    UnitPrecision,
    UsedParameters,
    ZeroPolicy,
    apply_data_axis,
    defer_gradient_sync,
    find_units,
    gather,
    make_root,
    release_gathered,
    whole_parameters,
    wrap_whole,
)
from lightning_par.layout import ParallelLayout
from lightning_par.materialize import materialize
from lightning_par.offload import OffloadedUnit, OffloadPolicy, Tier, num_on_device
from lightning_par.step import Step, run_step
from lightning_par.tensor_parallel import apply_plan, explain_errors
from lightning_par.ties import find_ties, restore_ties

__all__ = ["Settings", "StepModule", "Tree", "equalize"]

_REPLICA_AXES = ("dp_replicate", "dp_shard", "tp")
_BROADCAST_BYTES = 64 * 2**20
"""Tensors are sent together in buckets of this size."""


@dataclass(frozen=True)
class Settings:
    """How a tree is laid out.

    Attributes:
        layout: The degrees.
        mesh: The mesh made by the layout.
        device: This rank's device.
        policy: The ZeRO stage.
        plan: Module name -> tensor-parallel style, empty without a tensor axis.
        parameter_dtype: Type that sharded parameters are gathered and used in, ``None`` for their own.
        find_unused_parameters: Whether to cope with parameters that a step does not use.
        steps_inside: Whether the user's step runs backward and steps optimizers itself.
        activation_checkpointing: What blocks keep for their backward.
        parameter_server: Which rank of the data axis averages gradients and steps; ``None`` for all of them.
        offload: What is kept off the device, ``None`` for nothing.
        tier: Where it is kept.
    """

    layout: ParallelLayout
    mesh: DeviceMesh
    device: torch.device
    policy: ZeroPolicy
    plan: Mapping[str, Any]
    parameter_dtype: torch.dtype | None = None
    find_unused_parameters: bool = True
    steps_inside: bool = False
    activation_checkpointing: Checkpointing = False
    parameter_server: ServerOptions | None = None
    offload: OffloadPolicy | None = None
    tier: Tier | None = None

    @property
    def gathers_from_host(self) -> bool:
        """Whether parameters are off the device until they are used."""
        return self.offload is not None and self.offload.parameters

    @property
    def host_shards(self) -> HostShards:
        """How parameters are kept off the device."""
        assert self.offload is not None
        assert self.tier is not None
        return HostShards(self.offload.pin_memory, self.tier.hold if self.offload.device == "disk" else None)

    @property
    def wraps(self) -> bool:
        """Whether modules are wrapped for the data axis; what gathers over ranks also gathers from the host."""
        return self.parameter_server is None and (self.layout.data_parallel_size > 1 or self.gathers_from_host)

    @property
    def composes_units(self) -> bool:
        """Whether the data axis works unit by unit; plain replication does it whole, which is faster."""
        alone = self.layout.tp == self.layout.pp == 1
        plain = not self.policy.shards and alone and not self.steps_inside
        return self.wraps and not plain


class StepModule(nn.Module):
    """The root of everything that wraps: its forward runs one step of the user's module.

    So wrappers see a step as an ordinary forward, whatever the step is called, and the user's module needs none.

    Args:
        module: The user's module.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *, method: Step, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one step of the module."""
        return run_step(self.module, method, args, kwargs)


class Tree:
    """A tree laid out.

    Args:
        step_module: The tree's root, with the user's module (or a stage's copy of it) as its ``module``.
        settings: How.
        shared: Where parameters are registered that other trees hold too; they stay outside of the data axis.
    """

    def __init__(self, step_module: Any, settings: Settings, shared: Collection[Place]) -> None:
        self.step_module = step_module
        self.root: nn.Module = step_module
        self.module: nn.Module = step_module.module
        self.is_running = False
        self._settings = settings
        self._shared = shared
        self._ties = find_ties(self.module)
        units = find_units(self.module, split_children=settings.steps_inside)
        self._units_in_use = [units[-1], *units[:-1]]  # a forward starts with what the root holds
        self._on_host = self._choose_on_host()
        for unit in units:
            self._prepare(unit)
        self._replicated: list[nn.Parameter] = []
        self._wrap_root(units[-1])
        self.used = self._watch_use(units) if settings.find_unused_parameters else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the root through its wrappers."""
        self.is_running = True
        try:
            # Evaluation needs no gradients reduced, and ranks may make different numbers of steps in it.
            root = self._trained_root() if torch.is_grad_enabled() else self.step_module
            with explain_errors():
                return root(*args, **kwargs)
        finally:
            self.is_running = False

    def accumulating(self) -> AbstractContextManager[None]:
        """Context of a micro-batch that is not the last of its accumulation window."""
        return defer_gradient_sync(self._trained_root(), self._settings.policy)

    def release(self) -> None:
        """Free gathered copies of parameters, so that the module shows its shards."""
        release_gathered(self.root)

    def gather_again(self) -> None:
        """Inside a step, what the root holds must stay usable: blocks gather themselves, the root only on entry."""
        if self._settings.steps_inside and self.is_running:
            gather(self.root)

    def _prepare(self, unit: Unit) -> None:
        """Create, equalise, split and shard one unit: the fixed order of parallelisms."""
        settings = self._settings
        materialize(self.module, unit.members, settings.device)
        restore_ties(self._ties)
        unit.module.to(settings.device)
        equalize([tensor for _, member in unit.members for tensor in _own_tensors(member)], settings.mesh)
        if settings.plan:
            names = [name for name, member in unit.members if any(True for _ in member.parameters())]
            apply_plan(self.module, settings.plan, settings.mesh["tp"], members=names)
        if unit.module is self.module:
            return
        checkpoint_activations(unit.module, settings.activation_checkpointing)
        if settings.composes_units:
            self._apply_data_axis(unit.module, unit, casts_inputs=True)

    def _wrap_root(self, unit: Unit) -> None:
        settings = self._settings
        if not settings.wraps:
            return
        if not settings.composes_units:
            self._trained_root()
            return
        # The root sees the user's batch as it is: targets keep their precision.
        self._apply_data_axis(self.step_module, unit, casts_inputs=False)
        make_root(self.step_module)
        for _, member in unit.members:
            member.register_forward_pre_hook(self._before_member)

    def _trained_root(self) -> nn.Module:
        """The root, whose wrapper for whole replication knows only what is trained when it is made."""
        settings = self._settings
        if settings.wraps and not settings.composes_units:
            trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
            if len(trained) != len(self._replicated) or any(map(operator.is_not, trained, self._replicated)):
                self.root = self.step_module  # the old wrapper takes its hooks along
                self.root = wrap_whole(self.step_module, settings.mesh, settings.find_unused_parameters)
                self._replicated = trained
        return self.root

    def _watch_use(self, units: list[Unit]) -> UsedParameters | None:
        settings = self._settings
        if not settings.composes_units or not UsedParameters.is_supported():
            return None
        modules = [self.step_module if unit.module is self.module else unit.module for unit in units]
        watched = zip(modules, [unit.members for unit in units], strict=True)
        return UsedParameters(self.module, watched, settings.mesh.get_group("dp"), settings.device)

    def _before_member(self, *_: Any) -> None:
        """Gather what the root holds for a call from outside a step, such as a callback's."""
        if not self.is_running:
            gather(self.root)

    def _apply_data_axis(self, module: nn.Module, unit: Unit, casts_inputs: bool) -> None:
        settings = self._settings
        precision = UnitPrecision(settings.parameter_dtype, casts_inputs)
        whole = set(whole_parameters(module, self._shared))
        on_host = settings.host_shards if unit.name in self._on_host else None
        apply_data_axis(module, settings.mesh, settings.policy, precision, whole, on_host)

    def _choose_on_host(self) -> set[str]:
        """Names of the units whose parameters are off the device."""
        offload, units = self._settings.offload, self._units_in_use
        if offload is None or not offload.parameters:
            return set()
        sizes = [sum(parameter.numel() for parameter in _parameters_of(unit)) for unit in units]
        return {unit.name for unit in units[num_on_device(sizes, offload.fraction) :]}

    def offloaded_units(self) -> list[OffloadedUnit]:
        """The units in the order in which a forward uses them."""
        units = self._units_in_use
        modules = [self.step_module, *(unit.module for unit in units[1:])]
        return [
            OffloadedUnit(module, _parameters_of(unit), is_on_host=unit.name in self._on_host)
            for module, unit in zip(modules, units, strict=True)
        ]


def equalize(tensors: list[Tensor], mesh: DeviceMesh, data_source: int = 0) -> None:
    """Give every rank of a replica axis the tensors of one, as if one process had made them. A collective.

    Args:
        tensors: The same on all ranks.
        mesh: The ranks.
        data_source: Index on the axis ``dp_replicate`` that has the right ones; it is the first of the other axes.
    """
    unique = list({id(tensor): tensor.detach() for tensor in tensors}.values())
    for axis in _REPLICA_AXES:
        group = mesh.get_group(axis)
        if group.size() > 1 and unique:
            source = data_source if axis == "dp_replicate" else 0
            dist._broadcast_coalesced(group, unique, _BROADCAST_BYTES, source)


def _parameters_of(unit: Unit) -> list[nn.Parameter]:
    """The parameters of a unit, each once."""
    return list(dict.fromkeys(p for _, member in unit.members for p in member.parameters(recurse=False)))


def _own_tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]
