"""torchmetrics under a pipeline: the last stage counts, every rank computes the same value."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric, MetricCollection

__all__ = ["Source", "adopt_states_from", "adopt_states_over", "inside_a_step", "stop_adopting", "without_counting"]

_INSIDE_A_STEP: ContextVar[bool] = ContextVar("inside_a_step", default=False)
_HOST = torch.device("cpu")
_COUNTING = ("forward", "update", "reset")
"""Methods of a metric that change its states."""


class Source(Protocol):
    """Where a group's states are."""

    @property
    def is_here(self) -> bool: ...

    def share(self, content: Any) -> Any:
        """The source's picklable object, on every rank of the group."""


def adopt_states_over(module: nn.Module, group: dist.ProcessGroup, src_group_rank: int, device: torch.device) -> None:
    """Let the metrics of ``module`` take the states of the last stage each time before they synchronise.

    Only the last stage runs the user's step to its end, so only its metrics have counted.

    Args:
        module: The user's module; every rank of the group must have the same metrics.
        group: The ``pp`` axis.
        src_group_rank: Rank in the group that holds the last stage.
        device: This rank's device, for the group's backend.
    """
    adopt_states_from(_Source(group, src_group_rank, device), module)


def adopt_states_from(source: Source, module: nn.Module) -> None:
    """Let the metrics of ``module`` take the states of ``source`` each time before they synchronise.

    From then on, ``compute`` is a collective of the ranks of the source, whatever the metric's own settings, and gives
    each of them the same value. Inside a step, which the source finishes alone, it is none.
    """
    stop_adopting(module)
    for metric in module.modules():
        if isinstance(metric, Metric):
            # A value remembered by a stage that counts nothing would never be forgotten.
            metric.compute_with_cache = False
            metric._computed = None
            vars(metric)["sync"] = _AdoptingSync(metric, source)


def stop_adopting(module: nn.Module) -> None:
    """Let the metrics of ``module`` synchronise as their class does."""
    for metric in module.modules():
        if isinstance(metric, Metric) and isinstance(vars(metric).get("sync"), _AdoptingSync):
            del vars(metric)["sync"]


@contextmanager
def inside_a_step() -> Iterator[None]:
    """Around a step that only the last stage finishes: metrics synchronise among the last stages alone."""
    token = _INSIDE_A_STEP.set(True)
    try:
        yield
    finally:
        _INSIDE_A_STEP.reset(token)


@contextmanager
def without_counting(modules: Iterable[nn.Module]) -> Iterator[None]:
    """While open, the metrics of ``modules`` stay as they are, whatever is done to them."""
    # Collections too: their first update looks for members with equal states, to count once for all of them.
    kinds = (Metric, MetricCollection)
    metrics = {id(metric): metric for module in modules for metric in module.modules() if isinstance(metric, kinds)}
    before = [{name: vars(metric).get(name) for name in _COUNTING} for metric in metrics.values()]
    try:
        for metric in metrics.values():
            vars(metric).update({name: partial(_value_of_nothing, metric) for name in _COUNTING})
        yield
    finally:
        for metric, methods in zip(metrics.values(), before, strict=True):
            for name, method in methods.items():
                del vars(metric)[name]
                if method is not None:
                    vars(metric)[name] = method


def _value_of_nothing(metric: Metric | MetricCollection, *_: Any, **__: Any) -> Any:
    nothing = torch.tensor(torch.nan)
    return dict.fromkeys(metric.keys(), nothing) if isinstance(metric, MetricCollection) else nothing


@dataclass(frozen=True)
class _Source:
    """A rank of a group that has the states of all of it."""

    group: dist.ProcessGroup
    rank: int
    device: torch.device

    def share(self, content: Any) -> Any:
        """That rank's picklable object, on every rank. A collective of the group."""
        boxed = [content]
        dist.broadcast_object_list(boxed, group_src=self.rank, group=self.group, device=self.device)
        return boxed[0]

    @property
    def is_here(self) -> bool:
        return self.group.rank() == self.rank


class _AdoptingSync:
    """Stands for one metric's ``sync``, which ``compute`` calls even if there is nothing to synchronise."""

    def __init__(self, metric: Metric, source: Source) -> None:
        self._metric = metric
        self._source = source

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Adopt the last stage's states, then synchronise over the metric's own group."""
        if self._is_collective():
            self._adopt()
        type(self._metric).sync(self._metric, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _AdoptingSync:
        return _AdoptingSync(copy.deepcopy(self._metric, memo), self._source)

    def _is_collective(self) -> bool:
        # A metric's forward computes the batch's value, and says by this that it will put its own states back.
        in_forward = not self._metric._should_unsync
        return dist.is_initialized() and not (in_forward or self._metric._is_synced or _INSIDE_A_STEP.get())

    def _adopt(self) -> None:
        metric, source = self._metric, self._source
        # Copies: pickle would send the whole of a tensor that the state shows a part of.
        own = _copied(metric.metric_state, _HOST) if source.is_here else None
        states, count = source.share((own, metric.update_count))
        if source.is_here:
            return
        for name, state in states.items():
            stays = metric.compute_on_cpu and isinstance(state, list)
            setattr(metric, name, _copied(state, _HOST if stays else metric.device))
        metric._update_count = count


def _copied(states: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to(device, copy=True), states)
