"""Measuring a run: step time, tokens, memory, model state and communication, into ``summary.json``."""

from __future__ import annotations

import json
import os
import resource
import statistics
import time
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_par.communication import CommunicationCounter
from lightning_par.trainer.strategy import HybridStrategy

__all__ = ["RunMonitor"]

T = TypeVar("T")
_WARM_UP_STEPS = 2
_RECENT_STEPS = 20


class RunMonitor(Callback):
    """Measures a fit and writes ``summary.json`` at its end.

    A step is timed from the end of the one before to its own end, loading of data included; validation and checkpoints
    between two steps are not. Communication and model state are read in one early step, which is left out of the times
    because counting slows it down.

    Args:
        path: Directory of ``summary.json``; ``None`` writes none.
        train_metric: Name of the logged training loss.
        val_metric: Name of the logged validation loss.

    Attributes:
        summary: What was measured, from the end of a fit on.
    """

    def __init__(self, path: str | Path | None, train_metric: str = "train_loss", val_metric: str = "val_loss") -> None:
        self._path = path
        self._train_metric = train_metric
        self._val_metric = val_metric
        self.summary: dict[str, Any] | None = None
        self._reset()

    def _reset(self) -> None:
        self._seconds: list[float] = []
        self._tokens: list[int] = []
        self._micro_batch_tokens = 0
        self._started: float | None = None
        self._num_steps = 0
        self._global_step = 0
        self._counter: CommunicationCounter | None = None
        self._traffic: dict[str, int] = {}
        self._state: dict[str, Any] = {}
        self._first_loss: float | None = None

    def recent_tokens_per_second(self) -> float | None:
        """Tokens per second over the last steps and all ranks, ``None`` if batches hold no tokens or none ran yet."""
        seconds = sum(self._seconds[-_RECENT_STEPS:])
        tokens = sum(self._tokens[-_RECENT_STEPS:])
        return tokens / seconds if seconds and tokens else None

    @staticmethod
    def memory_bytes() -> int:
        """Peak bytes of this rank so far: allocated on its GPU, or resident on the host."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            return torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start afresh."""
        self._reset()
        self._global_step = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Start the clock if it does not run."""
        self._micro_batch_tokens += _count_tokens(batch)
        if self._counter is None and self._counts_this_step(trainer):
            assert isinstance(trainer.strategy, HybridStrategy)
            self._counter = trainer.strategy.count_communication()
            self._counter.__enter__()
        if self._started is None:
            self._started = _now()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Read the clock after an optimizer's step."""
        if trainer.global_step == self._global_step:
            return
        self._global_step = trainer.global_step
        self._num_steps += 1
        now = _now()
        if self._counter is not None:
            self._end_counted_step(trainer)
        elif self._num_steps > _WARM_UP_STEPS and self._started is not None:
            self._seconds.append(now - self._started)
            self._tokens.append(self._micro_batch_tokens * _num_data_ranks(trainer))
        if self._first_loss is None:
            self._first_loss = _reduced(trainer, self._train_metric)
        self._started, self._micro_batch_tokens = now, 0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop the clock until training goes on."""
        self._started = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Stop the clock until training goes on."""
        self._started = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Stop counting."""
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._counter = None

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collect from all ranks and write the summary. A collective."""
        summary = {
            **_describe(trainer),
            "parameters": _total_parameters(trainer, pl_module),
            "steps": trainer.global_step,
            "tokens_per_second": _rate(self._tokens, self._seconds),
            "step_time_ms": _step_times(self._seconds),
            "peak_memory_bytes": _from_all_ranks(self.memory_bytes()),
            "model_state_bytes": _from_all_ranks(sum(sum(kinds.values()) for kinds in self._state.values())),
            "model_state_in_step_bytes": _from_all_ranks(_state_in_step(trainer, self._state)),
            "model_state_by_place": _from_all_ranks(self._state),
            "communication_bytes_per_step": self._traffic,
            "train_loss": {"first": self._first_loss, "last": _reduced(trainer, self._train_metric)},
            "val_loss": _reduced(trainer, self._val_metric),
        }
        self.summary = summary
        if trainer.is_global_zero and self._path is not None:
            _write_json(Path(self._path) / "summary.json", summary)

    def _counts_this_step(self, trainer: Trainer) -> bool:
        # The second step, since the first makes buckets and optimizer states; the first if there is no other.
        is_only_step = trainer.estimated_stepping_batches == 1
        return isinstance(trainer.strategy, HybridStrategy) and self._num_steps == (0 if is_only_step else 1)

    def _end_counted_step(self, trainer: Trainer) -> None:
        assert self._counter is not None
        assert isinstance(trainer.strategy, HybridStrategy)
        self._counter.__exit__(None, None, None)
        self._traffic = self._counter.bytes_by_axis()
        self._state = trainer.strategy.model_state_by_place()
        self._counter = None


def _now() -> float:
    """Seconds, once the device has done what it was given."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


def _describe(trainer: Trainer) -> dict[str, Any]:
    strategy = trainer.strategy
    layout = strategy.layout.as_dict() if isinstance(strategy, HybridStrategy) else {}
    order = ("dp_replicate", "dp_shard", "tp", "pp")
    return {
        "strategy": _strategy_name(strategy),
        "layout": {axis: layout.get(axis, 1) for axis in order},
        "world_size": trainer.world_size,
    }


def _strategy_name(strategy: Any) -> str:
    if not isinstance(strategy, HybridStrategy):
        return type(strategy).__name__
    layout = strategy.layout
    data = f"zero{strategy.zero_stage}" if strategy.zero_stage else "dp" if layout.data_parallel_size > 1 else ""
    if strategy.offload_policy is not None:
        data += "_offload"
    parts = ("pp" if layout.pp > 1 else "", data, "tp" if layout.tp > 1 else "")
    return "+".join(part for part in parts if part) or "single"


def _total_parameters(trainer: Trainer, module: LightningModule) -> int:
    strategy = trainer.strategy
    if isinstance(strategy, HybridStrategy):
        return strategy.total_num_parameters
    return sum(parameter.numel() for parameter in module.parameters())


def _num_data_ranks(trainer: Trainer) -> int:
    strategy = trainer.strategy
    return strategy.num_data_ranks if isinstance(strategy, HybridStrategy) else trainer.world_size


def _count_tokens(batch: Any) -> int:
    """Elements of the batch's first integer tensor: token ids of shape [batch, sequence]."""
    ids = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim == 2 and _is_integer(leaf))
    first = next(ids, None)
    return 0 if first is None else first.numel()


def _is_integer(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and tensor.dtype is not torch.bool


def _rate(tokens: list[int], seconds: list[float]) -> float | None:
    return sum(tokens) / sum(seconds) if seconds and sum(tokens) else None


def _step_times(seconds: list[float]) -> dict[str, float | None]:
    if not seconds:
        return {"median": None, "p90": None}
    ordered = sorted(seconds)
    p90 = ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return {"median": 1000 * statistics.median(ordered), "p90": 1000 * p90}


def _reduced(trainer: Trainer, name: str) -> float | None:
    """A logged metric, averaged over the ranks that see different batches. A collective."""
    value = trainer.callback_metrics.get(name)
    return None if value is None else float(trainer.strategy.reduce(value.float(), reduce_op="mean"))


def _state_in_step(trainer: Trainer, by_place: dict[str, Any]) -> int:
    """What was read between steps, and what a step holds whole on top."""
    strategy = trainer.strategy
    whole = strategy.engine.step_bytes() if isinstance(strategy, HybridStrategy) else 0
    return sum(sum(kinds.values()) for kinds in by_place.values()) + whole


def _from_all_ranks(value: T) -> list[T]:
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _write_json(path: Path, content: Any) -> None:
    """Write by renaming, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(temporary, path)
