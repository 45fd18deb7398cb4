"""torchmetrics that count every sample once, whatever the layout."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torchmetrics import Metric

__all__ = ["sync_metrics_over"]

_OURS = "_lightning_par_group"


def sync_metrics_over(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Let the metrics of ``module`` synchronise over ``group`` (the data axis) instead of all ranks.

    Ranks that share a batch would count its samples again. Metrics to which the user has given a group keep it.
    """
    for metric in module.modules():
        if isinstance(metric, Metric) and (metric.process_group is None or getattr(metric, _OURS, False)):
            metric.process_group = group
            metric.__dict__[_OURS] = True
