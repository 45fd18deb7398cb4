"""torchmetrics that count every sample once, whatever the layout."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

__all__ = ["sync_metrics_over"]

_OURS = "_lightning_par_group"


def sync_metrics_over(module: nn.Module, group: dist.ProcessGroup, idle_rank: int | None = None) -> None:
    """Let the metrics of ``module`` synchronise over ``group`` (the data axis) instead of all ranks.

    Ranks that share a batch would count its samples again. Metrics to which the user has given a group keep it.

    Args:
        module: The user's module.
        group: The ranks that see different batches.
        idle_rank: Rank in the group whose counts are another's, and left out.
    """
    for metric in module.modules():
        if isinstance(metric, Metric) and (metric.process_group is None or getattr(metric, _OURS, False)):
            metric.process_group = group
            metric.__dict__[_OURS] = True
            given = metric.dist_sync_fn
            if given is None or (isinstance(given, partial) and given.func is _gather_without):
                metric.dist_sync_fn = None if idle_rank is None else partial(_gather_without, idle_rank)


def _gather_without(idle_rank: int, result: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    return [part for rank, part in enumerate(gather_all_tensors(result, group)) if rank != idle_rank]
