"""Losses that are means over different numbers of samples, put together as one process would.

A step may return ``{"loss": mean, "num_samples": n}``, with a mean over ``n`` samples, tokens or whatever it counts.
The loss of an optimizer step is then

    sum(loss_i * n_i) / sum(n_i)

over its micro-batches, its accumulated batches and the ranks that see different data: one mean over all samples, where
the mean of means that Lightning and ``DistributedDataParallel`` take would give those of a short row more weight.

The last sum is known only when the window's last step has run, and backwards run before that. So every loss of a window
is divided by one number, the window's ``unit``, and gradients are multiplied once at its end by what that was off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_par.pipeline_parallel.outputs import NUM_SAMPLES, num_samples_of

__all__ = ["LossWeights"]


class LossWeights:
    """The weights of the losses of one accumulation window after another.

    Args:
        group: The data axis.
        num_ranks: Ranks in it that see data, whose gradients are averaged.
        device: This rank's device, for the group's backend.
    """

    def __init__(self, group: dist.ProcessGroup, num_ranks: int, device: torch.device) -> None:
        self._group = group
        self._num_ranks = num_ranks
        self._device = device
        self._is_weighted: bool | None = None
        self._guess: float | None = None
        self._unit: float | None = None
        self._total = 0.0

    def guess(self, batch_size: float) -> None:
        """Choose the unit of a window whose losses are weighted before anything is known of them. A collective.

        The samples of the last window are as good a guess as any; for the first it is what the ranks' batches hold.
        """
        if self._unit is None:
            self._guess = self._unit = self._sum(float(batch_size)) if self._guess is None else self._guess

    def sum_over_ranks(self, outputs: Sequence[Any], counts: bool = True) -> float | None:
        """Samples of a batch on all ranks together, ``None`` if its losses are not weighted. A collective.

        Args:
            outputs: What the step returned, for each micro-batch.
            counts: Whether this rank's samples are its own.

        Raises:
            ValueError: If some losses are weighted and others not.
        """
        weights = [num_samples_of(output) for output in outputs]
        known = [weight for weight in weights if weight is not None]
        self._agree(bool(known), is_mixed=0 < len(known) < len(weights))
        return self._sum(sum(known) if counts else 0.0) if known else None

    def add(self, num_samples: float | None) -> None:
        """Count a batch of the window, of :meth:`sum_over_ranks`."""
        if num_samples is None:
            self._unit = None
            return
        if self._unit is None:
            self._unit = num_samples
        self._total += num_samples

    def factor(self, num_samples: float | None) -> float:
        """By which a loss of this rank is multiplied: its samples in units, times the ranks that are averaged over."""
        if num_samples is None:
            return 1.0
        return num_samples * self._num_ranks / (self._unit or 1.0)

    def close(self, num_batches: int) -> float:
        """End the window.

        Args:
            num_batches: What the trainer has divided losses by, as those of a full window.

        Returns:
            By what gradients are to be multiplied.
        """
        unit, total = self._unit, self._total
        self._unit, self._total = None, 0.0
        if unit is None or not total:
            return 1.0
        self._guess = total
        return num_batches * (unit or 1.0) / total

    def _agree(self, is_weighted: bool, is_mixed: bool) -> None:
        """All batches of all ranks are weighted, or none; the first time the ranks ask each other."""
        if self._is_weighted is None:
            kinds = torch.zeros(3, device=self._device)
            kinds[2 if is_mixed else int(is_weighted)] = 1
            if self._group.size() > 1:
                dist.all_reduce(kinds, group=self._group)
            is_mixed = int((kinds > 0).sum()) > 1 or bool(kinds[2])
            self._is_weighted = is_weighted
        if is_mixed or is_weighted != self._is_weighted:
            raise ValueError(
                f"The training step returned {NUM_SAMPLES!r} for some batches and not for others. Return it always, "
                "also where it is 0, or never: without it every batch counts alike."
            )

    def _sum(self, number: float) -> float:
        if self._group.size() == 1:
            return number
        total = torch.tensor(number, dtype=torch.float64, device=self._device)
        dist.all_reduce(total, group=self._group)
        return float(total)
