"""Keeping the states of one rank's part of a module off its device."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lightning_par.gradients import local
from lightning_par.model_state import ModelStateBytes, measure_state_bytes
from lightning_par.offload.optimizer import OffloadedOptimizer, Placement
from lightning_par.offload.policy import OffloadPolicy
from lightning_par.offload.reach import update_reach
from lightning_par.offload.tiers import DiskTier, Tier

__all__ = ["ModelOffload", "OffloadedUnit", "num_on_device"]


_WATCHED_FORWARDS = 2
"""How many of a run's first forwards are looked at closely."""


class OffloadedUnit:
    """A unit of the module, as a forward meets it.

    Args:
        module: Its forward is the first to use the parameters.
        parameters: As optimizers see them.
        is_on_host: Whether the parameters themselves are off the device.
    """

    def __init__(self, module: nn.Module, parameters: Sequence[Tensor], is_on_host: bool) -> None:
        self.module = module
        self.parameters = list(parameters)
        self.is_on_host = is_on_host


def num_on_device(sizes: Sequence[int], fraction: float) -> int:
    """How many of the first items stay on the device, so that about ``fraction`` of all elements leave it.

    Args:
        sizes: Elements of each item, in the order in which a forward uses them.
        fraction: As in :class:`~lightning_par.offload.policy.OffloadPolicy`.
    """
    wanted = sum(sizes) * (1 - fraction)
    before = 0.0
    for number, size in enumerate(sizes):
        if before + size / 2 > wanted:  # to the nearest
            return number
        before += size
    return len(sizes)


class ModelOffload:
    """The states of one rank that are not on its device, and the way of their gradients.

    Args:
        policy: What is kept where.
        tier: The place.
        device: This rank's device.
        units: In the order in which a forward uses them.
        whole: Parameters whose gradients are averaged only after the last backward of a window.
        can_take: Whether gradients may leave in a backward at all.
        final_in_backward: Whether those that a backward makes are final.
    """

    def __init__(
        self,
        policy: OffloadPolicy,
        tier: Tier,
        device: torch.device,
        units: Sequence[OffloadedUnit],
        *,
        whole: Sequence[Tensor],
        can_take: bool,
        final_in_backward: bool = True,
    ) -> None:
        self._policy = policy
        self._tier = tier
        self._device = device
        self._units = units
        self._can_take = can_take and policy.overlap
        self._final_in_backward = final_in_backward
        self._optimizers: weakref.WeakSet[OffloadedOptimizer] = weakref.WeakSet()
        self._whole = {id(parameter) for parameter in whole}
        self._hooks: list[Any] = []
        self._is_last = True
        self._number_of = {id(p): number for number, unit in enumerate(units) for p in unit.parameters}
        self._entered: set[int] = set()
        self._used_early: set[int] = set()
        self._num_watched = 0
        for number, unit in enumerate(units):
            unit.module.register_forward_pre_hook(partial(_enter, _Weak(self), number), prepend=True)

    def forward(self) -> AbstractContextManager[Any]:
        """Context of a step's forward. The first ones are watched for parameters that are used before their unit is.

        Those are waited for at the begin of a forward from then on.
        """
        if self._num_watched == _WATCHED_FORWARDS or not torch.is_grad_enabled():
            return nullcontext()
        self._num_watched += 1
        self.settle()
        self._entered.clear()
        return _Watch(self)

    def on_use(self, tensor: object) -> None:
        """While watched: an operation takes ``tensor``."""
        number = self._number_of.get(id(tensor))
        if number is not None and number not in self._entered:
            self._used_early.add(number)

    def enter(self, number: int) -> None:
        """A forward is about to use a unit."""
        self._entered.add(number)
        for each in (*self._used_early, number) if number == 0 else (number,):
            for optimizer in self._optimizers:
                optimizer.wait_for(each)

    def attach(self, optimizer: Optimizer) -> None:
        """Keep and step the states of ``optimizer`` where the policy says.

        Raises:
            ValueError: If it can't be stepped unit by unit, or the disk is too small for its states.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        _check_steps_in_parts(optimizer, parameters)
        self._check_room(parameters)
        on_host = {id(p) for unit in self._units if unit.is_on_host for p in unit.parameters if isinstance(p, DTensor)}
        stepped = {id(parameter) for parameter in parameters}
        in_order = [p for unit in self._units for p in unit.parameters if id(p) in stepped]
        if self._policy.parameters:
            on_device = {id(p) for unit in self._units if not unit.is_on_host for p in unit.parameters}
        else:
            count = num_on_device([local(p.detach()).numel() for p in in_order], self._policy.fraction)
            on_device = {id(parameter) for parameter in in_order[:count]}
        pin = self._policy.pin_memory and self._device.type != "cpu"
        placement = Placement(
            self._device, self._tier, pin, self._policy.overlap, frozenset(on_device), frozenset(on_host)
        )
        units = [[id(parameter) for parameter in unit.parameters] for unit in self._units]
        self._optimizers.add(OffloadedOptimizer(optimizer, units, placement))
        self._watch([p for p in in_order if p.requires_grad])

    def observe(self, *, defers: bool, takes_gradients: bool, steps_in_backward: bool) -> None:
        """Say what nobody looks at; see :class:`~lightning_par.offload.optimizer.OffloadedOptimizer`."""
        for optimizer in self._optimizers:
            optimizer.defers = defers and self._policy.overlap
            optimizer.takes_gradients = takes_gradients and self._can_take
            steps = steps_in_backward and self._final_in_backward
            optimizer.steps_in_backward = steps and optimizer.takes_gradients

    def hold_steps(self) -> None:
        """Step nothing in backward: gradients are going to change after it."""
        for optimizer in self._optimizers:
            optimizer.steps_in_backward = False

    def before_backward(self, is_first: bool, is_last: bool) -> None:
        """A backward begins.

        Args:
            is_first: Whether it is the first of an accumulation window.
            is_last: Whether it is the last.
        """
        self._is_last = is_last
        for optimizer in self._optimizers:
            optimizer.before_backward(is_first)

    def drop_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Forget gradients that have left parameters which no rank has used."""
        unused = list(parameters)
        for optimizer in self._optimizers:
            optimizer.drop_gradients(unused)

    def settle(self) -> None:
        """Wait until all parameters and states are those of after the last step."""
        for optimizer in self._optimizers:
            optimizer.settle()

    def state_bytes(self) -> dict[str, ModelStateBytes]:
        """Bytes of this rank's model state by place: ``"device"``, and ``"host"`` or ``"disk"``."""
        self.settle()
        parameters = [(p, unit.is_on_host and isinstance(p, DTensor)) for unit in self._units for p in unit.parameters]
        places: dict[str, ModelStateBytes] = {}
        for place, is_off in (("device", False), (self._tier.name, True)):
            here = list(dict.fromkeys(p for p, off in parameters if off is is_off))
            places[place] = measure_state_bytes(here, [])
        for optimizer in self._optimizers:
            places["device"]["optimizer"] += optimizer.state_bytes(on_host=False)
            places[self._tier.name]["optimizer"] += optimizer.state_bytes(on_host=True)
            # Gradients go through host memory, whatever keeps the rest.
            places.setdefault("host", measure_state_bytes([], []))["gradients"] += optimizer.gradient_bytes()
        return places

    def detach(self) -> None:
        """Forget the optimizers, which the next fit replaces, and take the hooks off the parameters."""
        self.settle()
        self._optimizers.clear()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _watch(self, parameters: Sequence[Tensor]) -> None:
        if not self._can_take:
            return
        tell = partial(_tell, _Weak(self))  # a hook that held this would keep the parameters alive for ever
        for parameter in parameters:
            if id(parameter) not in self._whole:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(tell))

    def on_gradient(self, parameter: Tensor) -> None:
        """A backward has made a parameter's gradient."""
        for optimizer in self._optimizers:
            if optimizer.takes_gradients:
                optimizer.on_gradient(parameter, self._is_last)

    def _check_room(self, parameters: Sequence[Tensor]) -> None:
        if not isinstance(self._tier, DiskTier):
            return
        masters = sum(local(p.detach()).nbytes for p in parameters if p.requires_grad)
        if masters > self._tier.free_bytes:
            raise ValueError(
                f"The offload folder {self._policy.path} has {self._tier.free_bytes:,} bytes free, but the master "
                f"weights of this rank alone take {masters:,}. Set path to a larger disk, or use more ranks."
            )


class _Weak:
    """A hook's reference to what it tells, of which a copy of the module knows nothing."""

    def __init__(self, offload: ModelOffload | None = None) -> None:
        self._reference = None if offload is None else weakref.ref(offload)

    def __call__(self) -> ModelOffload | None:
        return None if self._reference is None else self._reference()

    def __reduce__(self) -> tuple[type[_Weak], tuple[()]]:
        return _Weak, ()


class _Watch(TorchFunctionMode):
    """Tells which tensors operations take."""

    def __init__(self, offload: ModelOffload) -> None:
        super().__init__()
        self._offload = offload

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs or {})):
            self._offload.on_use(value)
        return func(*args, **(kwargs or {}))


def _check_steps_in_parts(optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
    reach = update_reach(optimizer)
    name = type(optimizer).__name__
    if reach == "model":
        raise ValueError(
            f"{name} looks at several parameters together (or asks for a closure), so it can't be stepped unit by unit "
            "as offload does. Use another optimizer, such as AdamW, or offload=None."
        )
    if reach == "tensor" and any(_is_split(parameter) for parameter in parameters):
        raise ValueError(
            f"{name} looks at whole parameters, and each rank holds only parts of them, so it can't step those on its "
            "host. Use an optimizer that looks at single elements, such as AdamW, or one rank."
        )


def _is_split(parameter: Tensor) -> bool:
    return isinstance(parameter, DTensor) and parameter._local_tensor.shape != parameter.shape


def _enter(offload: _Weak, number: int, *_: Any) -> None:
    known = offload()
    if known is not None:
        known.enter(number)


def _tell(offload: _Weak, parameter: Tensor) -> None:
    known = offload()
    if known is not None:
        known.on_gradient(parameter)
