"""Across the ranks of a pipeline: metrics have one value, and a batch that differs is found."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAccuracy, BinaryF1Score

from lightning_par.pipeline_parallel.same_batch import batch_fingerprint, check_same_batch
from lightning_par.trainer.metrics import sync_metrics_over
from lightning_par.trainer.pipeline_metrics import adopt_states_over, inside_a_step
from tests.dist.ranks import RankError, Ranks

CPU = torch.device("cpu")
BATCH = {"scores": torch.tensor([0.9, 0.2, 0.7, 0.4]), "targets": torch.tensor([1, 0, 0, 1])}


class Metrics(nn.Module):
    """Metrics that hold their states, and synchronise, in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = SumMetric()
        self.cat = CatMetric()
        self.alone = MeanMetric(sync_on_compute=False)
        self.on_step = MeanMetric(dist_sync_on_step=True)
        self.both = MetricCollection({"accuracy": BinaryAccuracy(), "f1": BinaryF1Score()})

    def step(self, scores: Tensor, targets: Tensor) -> list[float]:
        """What the last stage alone does with a batch; values that it computes there."""
        for part in scores.split(2):
            self.sum(part)
            self.on_step(part)
            self.cat.update(part)
            self.alone.update(part)
        self.both.update(scores, targets)
        return [metric.compute().item() for metric in (self.sum, self.on_step)]

    def values(self) -> dict[str, Any]:
        """What every stage computes between steps."""
        single = {"sum": self.sum, "cat": self.cat, "alone": self.alone, "on_step": self.on_step}
        values = {name: metric.compute() for name, metric in single.items()} | self.both.compute()
        return {name: value.tolist() for name, value in values.items()}


def run_epochs(metrics: Metrics, is_last: bool) -> list[Any]:
    """Two epochs of two steps; values after each step, asked for twice."""
    found: list[Any] = []
    for _ in range(2):
        for _ in range(2):
            if is_last:
                with inside_a_step():
                    metrics.step(**BATCH)
            found += [metrics.values(), metrics.values(), metrics.sum.update_count]
        for metric in metrics.modules():
            if isinstance(metric, Metric):
                metric.reset()
    return found


def epochs_of_a_pipeline() -> tuple[list[Any], Any]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
    metrics = Metrics()
    sync_metrics_over(metrics, mesh.get_group("dp"))
    for _ in range(2):  # the second Trainer call of a script
        adopt_states_over(metrics, mesh.get_group("pp"), src_group_rank=1, device=CPU)
    found = run_epochs(metrics, is_last=dist.get_rank() == 1)
    metrics.alone.process_group = None  # a group can't be copied
    twin = copy.deepcopy(metrics.alone)
    if dist.get_rank() == 1:
        twin.update(2.5)
    return found, (twin.compute().item(), metrics.alone.update_count)


@pytest.mark.filterwarnings("ignore:The ``compute`` method")
def test_every_stage_computes_what_the_last_has_counted(ranks: Ranks) -> None:
    first, last = ranks(2, epochs_of_a_pipeline)
    assert first == last
    values, of_the_copy = first
    assert values == run_epochs(Metrics(), is_last=True)
    assert of_the_copy == (2.5, 0)


def epochs_of_two_replicas() -> list[dict[str, Any]]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))
    metrics = Metrics()
    sync_metrics_over(metrics, mesh.get_group("dp"))
    adopt_states_over(metrics, mesh.get_group("pp"), src_group_rank=0, device=CPU)
    with inside_a_step():
        metrics.step(**{name: values.chunk(2)[dist.get_rank()] for name, values in BATCH.items()})
    return [metrics.values() for _ in range(2)]


def test_replicas_synchronise_as_before(ranks: Ranks) -> None:
    whole = Metrics()
    whole.step(**BATCH)
    expected = {name: value for name, value in whole.values().items() if name != "alone"}
    for values in [values for of_rank in ranks(2, epochs_of_two_replicas) for values in of_rank]:
        del values["alone"]  # each replica's own, as the user wants it
        assert values == expected


def check_batches(of_rank: list[Any]) -> int:
    dist.init_process_group("gloo")
    batch = of_rank[dist.get_rank()]
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "tp"))
    check_same_batch(batch, [mesh.get_group("pp"), mesh.get_group("tp")], CPU)
    return batch_fingerprint(batch)


def test_a_batch_that_differs_within_a_replica_is_refused_on_every_rank(ranks: Ranks) -> None:
    batch = {**BATCH, "kinds": {"a", "b"}}
    assert ranks(2, check_batches, [batch, batch]) == [batch_fingerprint(batch)] * 2
    with pytest.raises(RankError, match="differs between the ranks of one replica") as caught:
        ranks(2, check_batches, [batch, {**batch, "targets": BATCH["targets"].flip(0) + 1}])
    assert len(caught.value.failures) == 2
    assert "seed_everything(seed, workers=True)" in str(caught.value)
