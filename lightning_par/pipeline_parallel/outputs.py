"""What a training step returns: a loss, and the number of samples that it is a mean over."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_par.pipeline_parallel.microbatches import merge

__all__ = ["NUM_SAMPLES", "loss_of", "merge_weighted", "num_samples_of"]

NUM_SAMPLES = "num_samples"
"""The key beside ``"loss"`` in what a step returns."""


def loss_of(output: Any) -> Tensor:
    """The loss in what a training step returned.

    Raises:
        ValueError: If there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ValueError(
            f"The step returned {type(output).__name__}, but training needs the loss: a tensor of one element, "
            "or a dictionary with one under 'loss'. A step can't be skipped by returning None."
        )
    return loss


def num_samples_of(output: Any) -> float | None:
    """How many samples the loss in what a step returned is a mean over; ``None`` if it does not say.

    Raises:
        ValueError: If that is no finite number of at least 0.
    """
    given = output.get(NUM_SAMPLES) if isinstance(output, Mapping) else None
    if given is None:
        return None
    number = float(given) if isinstance(given, int | float) or _is_single(given) else math.nan
    if not (math.isfinite(number) and number >= 0):
        raise ValueError(
            f"The step returned {NUM_SAMPLES!r}: {given!r}, but it is the number of samples (or tokens) that the loss "
            "is a mean over: a finite number, or tensor of one element, of at least 0."
        )
    return number


def merge_weighted(outputs: Sequence[Any]) -> Any:
    """What a training step would have returned for the whole batch; see :func:`merge` for all but the loss."""
    merged = merge(outputs)
    weights = [num_samples_of(output) for output in outputs]
    known = [weight for weight in weights if weight is not None]
    if not outputs or len(known) < len(outputs):
        return merged
    # A micro-batch without samples may have no loss, as the mean of nothing.
    parts = [output["loss"] * weight for output, weight in zip(outputs, known, strict=True) if weight > 0]
    loss = sum(parts) / sum(known) if parts else outputs[0]["loss"]
    return {**merged, "loss": loss, NUM_SAMPLES: sum(output[NUM_SAMPLES] for output in outputs)}


def _is_single(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1
