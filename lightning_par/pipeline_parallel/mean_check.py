"""Whether the loss of a batch is the mean of those of its micro-batches.

A schedule gives each micro-batch the same weight, as gradient accumulation does. For a mean over samples that is the
loss of the whole batch; for a mean over tokens that are not padding, a contrastive loss or a norm over the batch it is
another number. The last stage can tell by itself: it runs once on the hidden states of all micro-batches joined, and
compares.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.pipeline_parallel.outputs import loss_of, num_samples_of
from lightning_par.pipeline_parallel.runtime import Call

__all__ = ["LossMismatch", "compare_losses"]

_TOLERANCE, _HALF_TOLERANCE = 1e-4, 2e-2
"""Relative; half precision has 8 bits (bfloat16), and a loss sums up many such errors."""
_INTERNAL = frozenset(vars(nn.Module()))


@dataclass(frozen=True)
class LossMismatch:
    """A loss that is no mean over samples.

    Attributes:
        whole: Of the whole batch, in evaluation mode.
        mean: Of its micro-batches, weighted by the number of samples that the step returned, if it did.
        num_microbatches: How many they are.
    """

    whole: float
    mean: float
    num_microbatches: int

    def __str__(self) -> str:
        return (
            f"The training loss of a whole batch is {self.whole:.6g}, but that of its {self.num_microbatches} "
            f"micro-batches has the mean {self.mean:.6g}: it is no mean over samples, so the pipeline weights it as "
            "gradient accumulation does, and trains on the second. If it is a mean over something else, such as the "
            'tokens that are not padding, return {"loss": loss, "num_samples": their number}, which makes it exact. '
            "If it compares samples of a batch with each other, use num_microbatches=1 with schedule='gpipe', or "
            "pipeline_parallel_size=1."
        )


@torch.no_grad()
def compare_losses(
    run: Callable[[tuple[Tensor, ...], Call], Any],
    parts: Sequence[Call],
    whole: Call,
    hidden: Sequence[Tensor],
    modules: Iterable[nn.Module],
) -> LossMismatch | None:
    """Compare a batch's loss with that of its micro-batches, without dropout, and leave no trace on the modules.

    Args:
        run: Runs the last stage: (received hidden state, call) -> what the step returns.
        parts: The micro-batches.
        whole: The batch.
        hidden: What the last stage has received for each micro-batch.
        modules: The user's module, and its copy for the stage.

    Returns:
        The two losses if they differ; ``None`` also if the step can't be run like that, such as one whose modules
        return no loss in evaluation mode.
    """
    with ExitStack() as stack:
        for each in {inner for module in modules for inner in module.modules()}:
            stack.enter_context(_evaluating(each))
            stack.enter_context(_undone(each))
        try:
            outputs = [run((state,), call) for state, call in zip(hidden, parts, strict=True)]
            joined = torch.cat(list(hidden))
            own = float(loss_of(run((joined,), whole)))
            mean = _mean(outputs)
        except Exception:
            return None
    is_half = joined.dtype.itemsize < 4 or torch.is_autocast_enabled(joined.device.type)
    differs = abs(own - mean) > (_HALF_TOLERANCE if is_half else _TOLERANCE) * max(abs(own), abs(mean))
    return LossMismatch(own, mean, len(parts)) if differs else None  # comparisons with nan are false


def _mean(outputs: Sequence[Any]) -> float:
    losses, weights = [float(loss_of(output)) for output in outputs], [num_samples_of(output) for output in outputs]
    pairs = [(loss, 1.0 if weight is None else weight) for loss, weight in zip(losses, weights, strict=True)]
    total = sum(weight for _, weight in pairs)
    return sum(loss * weight for loss, weight in pairs if weight) / total if total else math.nan


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    training = module.training
    try:
        module.training = False  # not by eval(), which a module may override
        yield
    finally:
        module.training = training


@contextmanager
def _undone(module: nn.Module) -> Iterator[None]:
    """Take back what a step writes on a module or into its buffers, or puts into its lists and dictionaries."""
    own = {name: value for name, value in vars(module).items() if name not in _INTERNAL}
    contents = {name: copy.copy(value) for name, value in own.items() if isinstance(value, dict | list | set | deque)}
    buffers = dict(module._buffers)
    held = [value for value in (*own.values(), *buffers.values()) if isinstance(value, Tensor)]
    saved = [(tensor, tensor._version, tensor.clone()) for tensor in held if not tensor.is_inference()]
    try:
        yield
    finally:
        for name in [name for name in vars(module) if name not in _INTERNAL and name not in own]:
            del vars(module)[name]
        vars(module).update(own)
        module._buffers.update(buffers)
        for name, content in contents.items():
            _refill(own[name], content)
        for tensor, version, value in saved:
            if tensor._version != version:
                tensor.copy_(value)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if isinstance(container, list | deque):
        container.extend(content)
    else:
        container.update(content)
