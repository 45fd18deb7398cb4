"""An optimizer whose states are kept and stepped off the device, unit by unit, while the device goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lightning_par.gradients import local
from lightning_par.offload.reach import twin
from lightning_par.offload.slot import Slot, as_stored, like, make_slots
from lightning_par.offload.tiers import Tier
from lightning_par.offload.transfer import Arrival, Transfers

__all__ = ["OffloadedOptimizer", "Placement", "offloaded", "stepped_parameters"]

_LINK = "_offloaded"
_FUSED_ON_HOST = (SGD, Adagrad, Adam, AdamW)
"""Optimizers that torch has a fused kernel for on CPUs."""
_KERNELS = ("foreach", "fused", "capturable")


@dataclass(frozen=True)
class Placement:
    """Where one rank's states are.

    Attributes:
        device: The rank's device.
        tier: Where states are kept off it.
        pin: Whether gradients come to page-locked memory.
        overlap: Whether units are stepped in a thread of their own.
        on_device: Ids of the parameters whose states stay on the device.
        on_host: Ids of the parameters that are off the device themselves.
    """

    device: torch.device
    tier: Tier
    pin: bool
    overlap: bool
    on_device: frozenset[int] = frozenset()
    on_host: frozenset[int] = frozenset()


class _Unit:
    """What is stepped together."""

    def __init__(self, optimizer: Optimizer, steps_on_host: bool) -> None:
        self.twin = twin(optimizer, [])
        self.steps_on_host = steps_on_host
        self.slots: dict[int, Slot] = {}
        self.num_missing = 0


@dataclass
class _Round:
    """One step of all units.

    Attributes:
        settings: Of the user's parameter groups, ``params`` left out.
        group_of: Id of each parameter -> number of its group.
        marks: Id of each parameter that has a copy -> what its values sum up to.
        stepped: Units that have been started.
        returned: Units whose values go back to their parameters; what their arrival waits for.
        changes: What the steps have changed in the settings.
    """

    settings: list[dict[str, Any]]
    group_of: dict[int, int]
    marks: Future[dict[int, int]]
    stepped: dict[int, Future[None]] = field(default_factory=dict)
    returned: dict[int, Future[list[Arrival]]] = field(default_factory=dict)
    changes: dict[int, dict[str, Any]] = field(default_factory=dict)


class OffloadedOptimizer:
    """Steps the parameters of a user's optimizer where their states are.

    The user's object stays what schedulers, callbacks and checkpoints know: its ``param_groups`` are obeyed and its
    ``state`` shows the states, this rank's parts of them, where they are.

    Args:
        optimizer: The user's. Its ``step`` is replaced.
        units: Ids of the parameters of each unit of the module, in the order in which a forward uses them.
        placement: Where states are.

    Attributes:
        defers: Whether :meth:`step` returns before the last unit has been stepped. Whoever sets it sees to it that
            nobody looks at parameters before :meth:`settle` or, for one unit, :meth:`wait_for`.
        takes_gradients: Whether gradients leave the parameters as soon as a backward has made them.
        steps_in_backward: Whether a unit is stepped as soon as its gradients are there. Whoever sets it sees to it that
            nothing changes gradients between backward and step.
    """

    def __init__(self, optimizer: Optimizer, units: Sequence[Sequence[int]], placement: Placement) -> None:
        self.optimizer = optimizer
        self.defers = self.takes_gradients = self.steps_in_backward = False
        self._placement = placement
        self._transfers = Transfers(placement.device, placement.overlap)
        self._units = [_Unit(optimizer, steps_on_host=True) for _ in units]
        # Stepped by the calling thread: what is in no unit, and what stays on the device.
        self._units.append(_Unit(optimizer, steps_on_host=False))
        self._unit_of = {key: n for n, unit in enumerate(units) for key in unit if key not in placement.on_device}
        self._round: _Round | None = None
        self._loading: dict[Tensor, Tensor] = {}
        # The thread ends with its executor; it must not hold what holds that.
        adopt = (torch.get_num_threads(), self._transfers)
        self._thread = ThreadPoolExecutor(1, initializer=_adopt_thread, initargs=adopt)
        self._connect(optimizer)

    def _connect(self, optimizer: Optimizer) -> None:
        step: Any = Optimizer.profile_hook_step(_step)
        step._wrapped_by_lr_sched = True  # a scheduler made before has wrapped the step that this one replaces
        vars(optimizer).update({_LINK: self, "step": MethodType(step, optimizer)})
        optimizer.register_state_dict_pre_hook(lambda _: self.settle())
        optimizer.register_load_state_dict_pre_hook(self._before_load)
        optimizer.register_load_state_dict_post_hook(self._after_load)

    # Gradients

    def before_backward(self, is_first: bool) -> None:
        """A backward begins.

        Args:
            is_first: Whether it is the first of an accumulation window. No gradient outlives one.

        Raises:
            RuntimeError: If an earlier backward has stepped units, and the step that would have finished never came.
        """
        self.settle()
        if is_first and self._round is not None:
            raise RuntimeError(
                f"An earlier backward has stepped a part of {type(self.optimizer).__name__}'s parameters, and no step "
                "followed. Begin anew with a new optimizer, as a new fit does, or use OffloadPolicy(overlap=False)."
            )
        for unit in self._units:
            unit.num_missing = sum(slot.parameter.requires_grad for slot in unit.slots.values())
        if is_first and self.takes_gradients:
            self.drop_gradients(_parameters(self.optimizer))

    @torch.no_grad()
    def on_gradient(self, parameter: Tensor, is_last: bool) -> None:
        """A backward has made a parameter's gradient.

        Args:
            parameter: One of the optimizer's.
            is_last: Whether it is the last backward of an accumulation window.
        """
        number = self._number(parameter)
        unit = self._units[number]
        slot = unit.slots.get(id(parameter))
        if slot is None or not unit.steps_on_host:  # a step makes the slots
            unit.num_missing += len(self._units) + 1 if slot is None else 0
            return
        self._fetch(slot, keeps=False)
        self._run(slot.collect_gradient)
        unit.num_missing -= 1
        if is_last and self.steps_in_backward and unit.num_missing == 0:
            self._start(number)

    def _fetch(self, slot: Slot, keeps: bool) -> None:
        slot.fetch_gradient(self._transfers, self._placement.pin)
        if not keeps:
            slot.parameter.grad = None

    def drop_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Forget what backwards have made for these parameters."""
        self._drain()
        for parameter in parameters:
            slot = self._slot(parameter)
            if slot is not None:
                slot.drop_gradient()

    def stepped_parameters(self) -> list[Tensor]:
        """For each parameter of the optimizer the tensor that its gradient is at: itself, or what stands in for it."""
        self._drain()
        pairs = [(parameter, self._slot(parameter)) for parameter in _parameters(self.optimizer)]
        return [parameter if slot is None else slot.gradient_holder() for parameter, slot in pairs]

    # Steps

    @torch.no_grad()
    def step(self) -> None:
        """Step every unit that has gradients, in the order in which the next forward needs them."""
        new = [p for p in _parameters(self.optimizer) if p.grad is not None and self._slot(p) is None]
        if new:
            self._make_slots(new)
        this = self._begin()
        self._transfers.fence()
        for number, unit in enumerate(self._units):
            if number not in this.stepped:
                for slot in unit.slots.values():
                    self._fetch(slot, keeps=not (self.takes_gradients and unit.steps_on_host))
                self._start(number)
        for number in range(len(self._units)):
            this.returned[number] = self._run(self._send_back, number, this)
        if not self.defers:
            self.settle()

    def settle(self) -> None:
        """Wait until all parameters and states are those of after the step."""
        this = self._round
        if this is None or not this.returned:
            return
        for number in range(len(self._units)):
            self.wait_for(number)
        self._round = None
        for number, changes in this.changes.items():
            self.optimizer.param_groups[number].update(changes)
        self._show_states()

    def wait_for(self, number: int) -> None:
        """Wait until the parameters of one unit are those of after the step."""
        returned = self._round.returned.get(number) if self._round is not None else None
        if returned is not None:
            for arrival in returned.result():
                if arrival is not None:
                    arrival()

    def _begin(self) -> _Round:
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        if self._round is None:
            groups = enumerate(self.optimizer.param_groups)
            group_of = {id(parameter): number for number, group in groups for parameter in group["params"]}
            self._round = _Round(settings, group_of, self._read_marks())
        elif self._round.settings != settings:
            raise RuntimeError(
                f"Settings of {type(self.optimizer).__name__} were changed between a backward, which has stepped with "
                "the old ones, and its step. Use OffloadPolicy(overlap=False)."
            )
        return self._round

    def _read_marks(self) -> Future[dict[int, int]]:
        slots = [slot for unit in self._units for slot in unit.slots.values() if slot.is_copy]
        if not slots:
            return self._run(dict)
        read, arrival = self._transfers.to_host(torch.stack([slot.seen_mark() for slot in slots]), self._placement.pin)

        def marks() -> dict[int, int]:
            if arrival is not None:
                arrival()
            return dict(zip((id(slot.parameter) for slot in slots), read.tolist(), strict=True))

        return self._run(marks)

    def _start(self, number: int) -> None:
        this = self._begin()
        unit = self._units[number]
        slots = [slot for key, slot in unit.slots.items() if key in this.group_of]
        this.stepped[number] = self._run(self._step_unit, unit, slots, this, on_host=unit.steps_on_host)

    @torch.no_grad()
    def _step_unit(self, unit: _Unit, slots: list[Slot], this: _Round) -> None:
        if not slots:
            return
        marks = this.marks.result()
        members: dict[int, list[Tensor]] = {}
        for slot in slots:
            slot.collect_gradient()
            if slot.is_copy:
                slot.refresh(marks.get(id(slot.parameter)))
            members.setdefault(this.group_of[id(slot.parameter)], []).append(slot.master)
        given = {number: self._host_settings(this.settings[number], unit) for number in members}
        unit.twin.param_groups = [{**given[number], "params": masters} for number, masters in members.items()]
        type(self.optimizer).step(unit.twin)
        for number, group in zip(members, unit.twin.param_groups, strict=True):
            changed = {k: v for k, v in group.items() if k != "params" and v is not given[number][k]}
            this.changes.setdefault(number, {}).update(changed)
        for slot in slots:
            slot.drop_gradient()
        if unit.steps_on_host:
            self._keep_states(unit)

    def _host_settings(self, settings: dict[str, Any], unit: _Unit) -> dict[str, Any]:
        if not unit.steps_on_host:
            return settings
        on_host = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in settings.items()}
        on_host |= {name: False for name in _KERNELS if name in on_host}
        # In half precision the fused kernels round less than what one process runs.
        full = all(slot.master.dtype in (torch.float32, torch.float64) for slot in unit.slots.values())
        if type(self.optimizer) in _FUSED_ON_HOST and full and not on_host.get("differentiable"):
            on_host["fused"] = True
        return on_host

    def _keep_states(self, unit: _Unit) -> None:
        tier = self._placement.tier
        places = [
            (entry, name)
            for entry in unit.twin.state.values()
            for name, value in entry.items()
            if isinstance(value, Tensor) and value.numel() > 1
        ]
        for (entry, name), kept in zip(places, tier.keep([entry[name] for entry, name in places]), strict=True):
            entry[name] = kept
        tier.rest([entry[name] for entry, name in places])

    @torch.no_grad()
    def _send_back(self, number: int, this: _Round) -> list[Arrival]:
        this.stepped[number].result()
        slots = list(self._units[number].slots.values())
        arrivals = [slot.send_back(self._transfers) for slot in slots]
        if self._units[number].steps_on_host:
            self._placement.tier.rest([slot.master.detach() for slot in slots])
        return arrivals

    def _run(self, call: Callable[..., Any], *args: Any, on_host: bool = True) -> Future[Any]:
        """Call in the thread, after what it has been given before; or here and now."""
        if self._placement.overlap and on_host:
            return self._thread.submit(call, *args)
        done: Future[Any] = Future()
        done.set_result(call(*args))
        return done

    def _drain(self) -> None:
        if self._placement.overlap:
            self._thread.submit(int).result()

    # States

    def _number(self, parameter: Tensor) -> int:
        return self._unit_of.get(id(parameter), len(self._units) - 1)

    def _slot(self, parameter: Tensor) -> Slot | None:
        return self._units[self._number(parameter)].slots.get(id(parameter))

    @torch.no_grad()
    def _make_slots(self, parameters: Sequence[Tensor]) -> None:
        for number, unit in enumerate(self._units):
            mine = [p for p in parameters if self._number(p) == number]
            for tier in (None, self._placement.tier):
                placed = [p for p in mine if self._tier_of(p) is tier]
                slots = make_slots(placed, tier) if placed else []
                unit.slots.update({id(slot.parameter): slot for slot in slots})

    def _tier_of(self, parameter: Tensor) -> Tier | None:
        """Where a parameter's master is; ``None`` for the parameter's own memory."""
        own = id(parameter) in self._placement.on_host or id(parameter) not in self._unit_of
        return None if own else self._placement.tier

    def _show_states(self) -> None:
        shown = self.optimizer.state
        for unit in self._units:
            for slot in unit.slots.values():
                entry = unit.twin.state.get(slot.master)
                if entry:
                    old = shown.get(slot.parameter, {})
                    shown[slot.parameter] = {k: _shown(v, slot.parameter, old.get(k)) for k, v in entry.items()}

    def gradient_bytes(self) -> int:
        """Bytes of gradients that have left their parameters."""
        self._drain()
        slots = (slot for unit in self._units for slot in unit.slots.values())
        return sum(slot.master.grad.nbytes for slot in slots if slot.master.grad is not None)

    def state_bytes(self, on_host: bool) -> int:
        """Bytes of masters and states that are off the device, or of states on it."""
        self._drain()
        units = [unit for unit in self._units if unit.steps_on_host is on_host]
        masters = [slot.master for unit in units for slot in unit.slots.values() if slot.is_copy]
        states = [value for unit in units for entry in unit.twin.state.values() for value in entry.values()]
        return sum(value.nbytes for value in [*masters, *states] if isinstance(value, Tensor))

    def loading_parameters(self) -> list[Tensor]:
        """For each parameter of the optimizer what its loaded state is to be laid out and placed as."""
        self.settle()
        self._make_slots([p for p in _parameters(self.optimizer) if self._slot(p) is None])
        slots = (self._slot(parameter) for parameter in _parameters(self.optimizer))
        return [slot.stand_in() for slot in slots if slot is not None]

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Let torch move what it loads to where the states are, and not through the device."""
        self._loading = dict(zip(self.loading_parameters(), _parameters(optimizer), strict=True))
        stand_ins = iter(self._loading)
        for group in optimizer.param_groups:
            group["params"] = [next(stand_ins) for _ in group["params"]]

    @torch.no_grad()
    def _after_load(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            group["params"] = [self._loading[stand_in] for stand_in in group["params"]]
        loaded = {self._loading[key]: entry for key, entry in optimizer.state.items() if key in self._loading}
        optimizer.state.clear()
        for unit in self._units:
            unit.twin.state.clear()
            for slot in unit.slots.values():
                if slot.parameter in loaded:
                    entry = loaded[slot.parameter]
                    unit.twin.state[slot.master] = {
                        k: as_stored(local(v), slot.master) if isinstance(v, Tensor) else v for k, v in entry.items()
                    }
            if unit.steps_on_host:
                self._keep_states(unit)
        self._loading = {}
        self._show_states()


def offloaded(optimizer: Optimizer) -> OffloadedOptimizer | None:
    """What steps ``optimizer`` off the device, if anything does."""
    return vars(optimizer).get(_LINK)


def stepped_parameters(optimizer: Optimizer) -> list[Tensor]:
    """For each parameter of ``optimizer`` the tensor that its gradient is at: itself, or what stands in for it."""
    found = offloaded(optimizer)
    return _parameters(optimizer) if found is None else found.stepped_parameters()


def _step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
    """What an offloaded optimizer's ``step`` is."""
    optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers ask whether it was
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    found = offloaded(optimizer)
    assert found is not None
    found.step()
    return loss


def _adopt_thread(num_threads: int, transfers: Transfers) -> None:
    torch.set_num_threads(num_threads)
    transfers.adopt_thread()


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _shown(value: Any, parameter: Tensor, shown: Any) -> Any:
    """A state as the user's optimizer shows it; the object it has shown so far, if that is still of the same memory."""
    is_same = shown is value or getattr(shown, "_local_tensor", None) is value
    return shown if is_same else like(value, parameter)
