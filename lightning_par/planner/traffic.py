"""Bytes on each mesh axis, by the formulas that the counter of collectives is tested against, and their time on a link.

An all-reduce of n bytes counts 2n, an all-gather its output, a reduce-scatter its input
(:mod:`lightning_par.communication`); a ring of N ranks moves (N-1)/N of that over each link.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_par.data_parallel import ZERO_POLICIES
from lightning_par.layout import AXES, ParallelLayout
from lightning_par.pipeline_parallel.schedules import SCHEDULES
from lightning_par.planner.choice import Candidate
from lightning_par.planner.cluster import Cluster, Link
from lightning_par.planner.model import PlannedModel
from lightning_par.planner.stages import Held

__all__ = ["DataTraffic", "collective_seconds", "crosses_nodes", "data_traffic", "link_of"]

_REDUCED = 4
"""Bytes of an element of summed gradients: at least float32."""


def link_of(cluster: Cluster, layout: ParallelLayout, axis: str) -> Link:
    """The link that an axis talks over.

    Ranks next to each other differ in ``tp`` first. An axis that leaves a machine is as fast as the network, times the
    members that it has on each machine, since each brings its own share of the machine's links.
    """
    if axis in cluster.links_by_axis:
        return cluster.links_by_axis[axis]
    if not crosses_nodes(cluster, layout, axis):
        return cluster.inside
    members = max(1, min(cluster.devices_per_node // _stride(layout, axis), getattr(layout, axis)))
    bandwidth = min(cluster.inside.bandwidth, members * cluster.between.bandwidth)
    return Link(bandwidth, cluster.between.latency)


def crosses_nodes(cluster: Cluster, layout: ParallelLayout, axis: str) -> bool:
    """Whether some ranks of an axis are on different machines."""
    return cluster.nodes > 1 and _stride(layout, axis) * getattr(layout, axis) > cluster.devices_per_node


def _stride(layout: ParallelLayout, axis: str) -> int:
    inner = AXES[AXES.index(axis) + 1 :]
    return math.prod(getattr(layout, name) for name in inner)


def collective_seconds(link: Link, ranks: int, moved: float, calls: float) -> float:
    """Time of collectives that move so many counted bytes in so many calls."""
    if ranks == 1 or not moved:
        return 0.0
    rounds = 2 * math.ceil(math.log2(ranks))
    return moved * (ranks - 1) / ranks / link.bandwidth + calls * rounds * link.latency


@dataclass(frozen=True)
class DataTraffic:
    """What one rank moves over the data axes in an optimizer step, in counted bytes.

    Attributes:
        gathered: Parameters, by all-gather.
        reduced: Gradients, over the ranks that share one copy of the states.
        replicated: Gradients, over replicas of it.
        num_units: Units, and so collectives each time.
        gathers: How often parameters are gathered.
        reductions: How often gradients are reduced.
        axes: Axis -> bytes.
    """

    gathered: float
    reduced: float
    replicated: float
    num_units: int
    gathers: int
    reductions: int
    axes: Mapping[str, int] = field(default_factory=dict)


def data_traffic(model: PlannedModel, candidate: Candidate, held: Held) -> DataTraffic:
    """Bytes on the data axes: of P elements 2P for replicas and stage 1, P + kP for stage 2, 3kP for stage 3."""
    layout, policy = candidate.layout, ZERO_POLICIES[candidate.zero_stage]
    splits = layout.pp > 1 and SCHEDULES[candidate.schedule].splits_backward
    numel = trained = trained_bytes = num_units = 0
    for shape, count in held.shapes():
        numel += shape.numel * count
        if shape.trains:
            trained += shape.numel * count
            trained_bytes += shape.numel * shape.itemsize * count
    num_units = sum(count for _, count, is_root in held.units() if not is_root) + held.trees
    if layout.data_parallel_size == 1:
        return DataTraffic(0.0, 0.0, 0.0, num_units, 0, 0)
    if not policy.shards:
        moved = 2.0 * trained_bytes
        return DataTraffic(0.0, 0.0, moved, num_units, 0, 1, {"dp_replicate": int(moved)})
    k = candidate.num_microbatches
    gathers = 2 * k if policy.frees_after_use and not splits else 1
    reductions = k if policy.reduces_each_micro_batch and not splits else 1
    gathered = float(gathers * numel * model.compute_itemsize)
    reduced = float(reductions * trained * _REDUCED)
    replicated = 2.0 * trained * _REDUCED / layout.dp_shard if layout.dp_replicate > 1 else 0.0
    axes = {"dp_shard": int(gathered + reduced), "dp_replicate": int(replicated)}
    return DataTraffic(
        gathered, reduced, replicated, num_units, gathers, reductions, {k: v for k, v in axes.items() if v}
    )
