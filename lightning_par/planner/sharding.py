"""How a candidate spreads the model state of a rank, in the words of the engine's own policies."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_par.data_parallel import ZERO_POLICIES
from lightning_par.pipeline_parallel.schedules import SCHEDULES
from lightning_par.planner.choice import Candidate
from lightning_par.planner.profile import Shape

__all__ = ["REDUCED", "Sharding", "States"]

REDUCED = 4
"""Bytes of an element of summed gradients: at least float32 (:mod:`lightning_par.data_parallel.apply`)."""


@dataclass(frozen=True)
class States:
    """Bytes of model state on one rank at rest, after a step."""

    parameters: int
    gradients: int
    optimizer: int


@dataclass(frozen=True)
class Sharding:
    """How a candidate spreads the states of a rank.

    Attributes:
        shards: Ranks that share them.
        wraps: Whether units are gathered and their gradients reduced into new tensors.
        replicates_whole: Whether ``DistributedDataParallel`` does it, whose gradient buckets stay.
        frees: Whether gathered units are freed after use.
        keeps_gradients_whole: Whether gradients stay whole until the last micro-batch.
    """

    shards: int
    wraps: bool
    replicates_whole: bool
    frees: bool
    keeps_gradients_whole: bool

    @classmethod
    def of(cls, candidate: Candidate) -> Sharding:
        layout, policy = candidate.layout, ZERO_POLICIES[candidate.zero_stage]
        several = candidate.num_microbatches > 1
        splits = bool(layout.pp > 1 and SCHEDULES[candidate.schedule].splits_backward)
        is_data_parallel = layout.data_parallel_size > 1
        wraps = candidate.gathers
        return cls(
            shards=layout.dp_shard if policy.shards else 1,
            wraps=wraps,
            replicates_whole=is_data_parallel and not policy.shards and layout.tp == layout.pp == 1,
            frees=wraps and policy.frees_after_use and not splits,
            keeps_gradients_whole=not wraps or splits or (several and not policy.reduces_each_micro_batch),
        )

    def gradient(self, shape: Shape) -> int:
        """Bytes of the gradients of some parameters, between the backwards of two micro-batches."""
        if not self.keeps_gradients_whole:
            return shape.local(self.shards) * shape.itemsize
        return shape.numel * (max(shape.itemsize, REDUCED) if self.wraps else shape.itemsize)
