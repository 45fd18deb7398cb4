"""``self.log`` under a pipeline.

Calls are recorded for each micro-batch on the last stage, where the step ends, and then made once for the batch on
every rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from operator import attrgetter
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import MaxMetric, Metric, MinMetric, SumMetric

from lightning_par.trainer.pipeline_metrics import inside_a_step, without_counting

__all__ = ["LogEntry", "LogRecorder", "replay"]

_OPTIONS = tuple(inspect.signature(LightningModule.log).parameters)[3:]  # after self, name and value
_REDUCTIONS = {"mean": "mean", "sum": "sum", "max": "amax", "min": "amin"}
"""What Lightning lets ``reduce_fx`` be, and the tensor method that does it along a dim."""
_WORDS: dict[Any, str] = {
    torch.mean: "mean",
    torch.sum: "sum",
    torch.max: "max",
    torch.min: "min",
    sum: "sum",
    max: "max",
    min: "min",
    "avg": "mean",
}
_BATCH_REDUCTIONS: dict[type[Metric], str] = {SumMetric: "sum", MaxMetric: "max", MinMetric: "min"}
"""How a metric's values of micro-batches make that of the batch, where their mean does not."""


@dataclass(frozen=True)
class LogEntry:
    """One key, as the last stage has logged it for a batch. Picklable, with tensors on the host.

    Attributes:
        name: The key.
        value: The value of the whole batch; for a metric that of its last ``forward``.
        options: The other arguments of ``self.log``.
        metric: Dotted name of the metric in the module, if one was logged.
        update_count: How often that metric had been updated.
        error: Why this can't be logged under a pipeline, if it can't.
    """

    name: str
    value: Any
    options: Mapping[str, Any] = field(default_factory=dict)
    metric: str | None = None
    update_count: int = 0
    error: str | None = None


class LogRecorder:
    """Keeps what modules log, instead of handing it to Lightning."""

    def __init__(self) -> None:
        self._calls: dict[Any, list[_Call]] = {}
        self._modules: Sequence[LightningModule] = ()
        self._is_open = True

    @contextmanager
    def recording(self, modules: Sequence[LightningModule]) -> Iterator[LogRecorder]:
        """While open, ``log`` of these modules (the user's, and its copies for stages) is recorded.

        Nothing is raised for what can't be logged: it would stop this rank alone. :func:`replay` raises it on all.
        """
        before = [vars(module).get("log") for module in modules]
        self._modules = modules
        try:
            for module in modules:
                vars(module)["log"] = partial(self._record, module)
            with inside_a_step():
                yield self
        finally:
            for module, own in zip(modules, before, strict=True):
                vars(module).pop("log", None)
                if own is not None:
                    vars(module)["log"] = own

    @contextmanager
    def unfinished(self) -> Iterator[None]:
        """Around the run of a stage that leaves the step early, on a rank that holds the last stage as well.

        What it logs and counts before its blocks, the last stage logs and counts too: it is dropped here.
        """
        self._is_open = False
        try:
            with without_counting(self._modules):
                yield
        finally:
            self._is_open = True

    def take(self) -> list[LogEntry]:
        """One entry for each key, in the order of their first appearance; the recorder is empty then.

        A key logged with different options makes an entry for each, so that Lightning refuses it as ever.
        """
        calls, self._calls = self._calls, {}
        names = _NamesOfMetrics()
        return [_entry(of_key, names) for of_key in calls.values()]

    def clear(self) -> None:
        """Drop what was recorded: without the last stage, it is only a part."""
        self._calls = {}

    def _record(self, module: LightningModule, /, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        if not self._is_open:
            return
        options = {**dict(zip(_OPTIONS, args, strict=False)), **kwargs}
        metric = value if isinstance(value, Metric) else None
        snapshot = _snapshot(value if metric is None else metric._forward_cache)
        manner = repr({option: given for option, given in options.items() if option != "batch_size"})
        self._calls.setdefault((name, id(metric), manner), []).append(_Call(module, name, snapshot, options, metric))


def replay(module: LightningModule, entries: Sequence[LogEntry]) -> None:
    """Log the entries of the last stage, on every rank, inside the hook that they were recorded in.

    Raises:
        MisconfigurationException: If something was logged that can't be under a pipeline.
    """
    for entry in entries:
        if entry.error is not None:
            raise MisconfigurationException(entry.error)
        value = entry.value
        if isinstance(value, Tensor):
            value = value.to(module.trainer.strategy.root_device)
        if entry.metric is not None:
            metric = attrgetter(entry.metric)(module)
            metric._forward_cache = value
            metric._update_count = entry.update_count
            value = metric
        module.log(entry.name, value, **entry.options)


@dataclass(frozen=True)
class _Call:
    """One call of ``self.log``; ``value`` of a metric is that of its last forward."""

    module: LightningModule
    name: str
    value: Any
    options: Mapping[str, Any]
    metric: Metric | None


class _NamesOfMetrics:
    """Dotted names of the metrics in modules, looked up once for each module."""

    def __init__(self) -> None:
        self._names: dict[int, dict[int, str]] = {}

    def find(self, call: _Call) -> str | None:
        """The metric's name, also if only ``metric_attribute`` tells it."""
        module, given = call.module, call.options.get("metric_attribute")
        if id(module) not in self._names:
            self._names[id(module)] = {
                id(inner): name for name, inner in module.named_modules() if isinstance(inner, Metric)
            }
        found = self._names[id(module)].get(id(call.metric))
        return given if found is None and given and _is_at(module, given, call.metric) else found


def _is_at(module: LightningModule, name: str, metric: Metric | None) -> bool:
    try:
        return attrgetter(name)(module) is metric
    except AttributeError:
        return False


def _snapshot(value: Any) -> Any:
    """The value as it is now; what Lightning will refuse is kept in words, which can be sent."""
    if isinstance(value, Real):
        value = torch.tensor(float(value), dtype=torch.promote_types(torch.get_default_dtype(), torch.float32))
    if isinstance(value, Tensor):
        # As Lightning keeps it: in float32 or float64.
        value = value.detach().to(torch.promote_types(value.dtype, torch.float32), copy=True)
        return value.reshape(()) if value.numel() == 1 else value
    return None if value is None else repr(value)


def _entry(calls: Sequence[_Call], names: _NamesOfMetrics) -> LogEntry:
    name, metric, options = calls[-1].name, calls[-1].metric, dict(calls[-1].options)
    if options.pop("sync_dist_group", None) is not None:
        return LogEntry(name, None, error=_NO_GROUP.format(name=name))
    if "reduce_fx" in options:
        options["reduce_fx"] = _word(options["reduce_fx"])
    sizes = [call.options.get("batch_size") for call in calls]
    weights = [float(size) for size in sizes if size is not None]
    if len(weights) == len(calls):
        options["batch_size"] = int(sum(weights))
    if metric is None:
        reduction = options.get("reduce_fx", "mean")
        return LogEntry(name, _combined(calls, reduction, weights), options)
    attribute = names.find(calls[-1])
    if attribute is None:
        return LogEntry(name, None, error=_NO_ATTRIBUTE.format(name=name))
    value = _combined(calls, _BATCH_REDUCTIONS.get(type(metric), "mean"), [])
    return LogEntry(name, value, options, attribute, metric.update_count)


def _word(reduce_fx: Any) -> str:
    """The reduction in the words that can be sent; what Lightning does not know, it will refuse by its name."""
    word = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
    known = _WORDS.get(word, word)
    return known if isinstance(known, str) else repr(known)


def _combined(calls: Sequence[_Call], reduction: str, weights: Sequence[float]) -> Any:
    """The batch's value of those of micro-batches, of which there is one for each call."""
    last = calls[-1].value
    values = [call.value for call in calls]
    if not all(isinstance(value, Tensor) and value.shape == last.shape for value in values):
        return last.cpu() if isinstance(last, Tensor) else last  # nothing, or what Lightning will refuse
    stacked = torch.stack([value.to(last.device) for value in values])
    if reduction == "mean" and len(weights) == len(calls) and sum(weights) > 0:
        # A micro-batch without samples may have no value, as the mean of nothing.
        stacked = stacked[[weight > 0 for weight in weights]]
        factors = torch.tensor([weight / sum(weights) * len(stacked) for weight in weights if weight > 0])
        stacked = stacked * factors.to(stacked).reshape(-1, *[1] * last.ndim)
    return getattr(stacked, _REDUCTIONS.get(reduction, "mean"))(dim=0).cpu()


_NO_GROUP = (
    "self.log({name!r}, ..., sync_dist_group=...) can't be used under a pipeline: only the last stage calls it, and "
    "other ranks do not know the group. Leave it out; sync_dist=True reduces over the data-parallel ranks."
)
_NO_ATTRIBUTE = (
    "self.log({name!r}, ...) was given a torchmetrics.Metric that is no attribute of the LightningModule, so other "
    "stages of the pipeline can't find theirs. Set it as an attribute, or give metric_attribute= its dotted name."
)
