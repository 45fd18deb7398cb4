"""All layouts worth a look, and which of them fit.

The space is every product of degrees that makes the number of devices, ZeRO stage, shard size, schedule, virtual
stages, micro-batch size, checkpointing and offload. What can only cost time is tried only where the cheaper choice does
not fit: checkpointing where activations do not, offload where states do not. ``gpipe`` and ``looped_bfs`` have the
bubble of the 1F1B schedules and keep more, so they are never better and left out. So are schedules with fewer
micro-batches than their published formulas hold for, where the bubble is large.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from lightning_par.activation_checkpointing import Checkpointing
from lightning_par.layout import ParallelLayout
from lightning_par.pipeline_parallel.formulas import Case, published
from lightning_par.pipeline_parallel.schedules import SCHEDULES, check_num_microbatches
from lightning_par.planner.choice import Candidate
from lightning_par.planner.cluster import MEMORY_LINE, Cluster
from lightning_par.planner.memory import predict_memory
from lightning_par.planner.model import PlannedModel
from lightning_par.planner.plan import Evaluation, MemoryBreakdown
from lightning_par.planner.time import predict_time

__all__ = ["Found", "Workload", "seconds_per_sample", "search"]

_MAX_MICRO_BATCH = 64
_CHECKPOINTING: tuple[Checkpointing, ...] = (False, "selective", True)
_SCHEDULES = (("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("zbv", 2))


@dataclass(frozen=True)
class Workload:
    """How many samples a step takes: of all ranks together, or of each data-parallel rank.

    Attributes:
        global_batch: Samples of an optimizer step of all ranks, for comparing layouts at equal training.
        batch_size: Samples of a batch of one data-parallel rank, where the loader is fixed.
        accumulate: Batches of an optimizer step, with ``batch_size``.

    Raises:
        ValueError: If not exactly one of the two is given, or a number is not positive.
    """

    global_batch: int | None = None
    batch_size: int | None = None
    accumulate: int = 1

    def __post_init__(self) -> None:
        if (self.global_batch is None) == (self.batch_size is None):
            raise ValueError("Give either global_batch, the samples of a step of all ranks, or batch_size of one.")
        for name in ("global_batch", "batch_size", "accumulate"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1.")

    def per_rank(self, data_parallel_size: int) -> int:
        """Samples of an optimizer step of one data-parallel rank; 0 if they do not divide."""
        if self.global_batch is None:
            assert self.batch_size is not None
            return self.batch_size * self.accumulate
        return 0 if self.global_batch % data_parallel_size else self.global_batch // data_parallel_size

    def micro_batches(self, data_parallel_size: int, pipelined: bool) -> list[tuple[int, int]]:
        """Micro-batch sizes and how many there are, the largest first."""
        samples = self.per_rank(data_parallel_size)
        if self.batch_size is not None and not pipelined:
            return [(self.batch_size, self.accumulate)]
        if self.batch_size is not None:
            samples = self.batch_size
        sizes = [size for size in range(min(samples, _MAX_MICRO_BATCH), 0, -1) if samples % size == 0]
        return [(size, samples // size) for size in sizes]


@dataclass
class Found:
    """What a search has found.

    Attributes:
        fitting: Layouts that fit, with their figures.
        closest: By kind, the layout that misses least, where none of the kind fits.
        refused: By kind or degree, why it was refused before it was looked at.
        num_considered: Layouts whose memory was worked out.
    """

    fitting: list[Evaluation] = field(default_factory=list)
    closest: dict[str, tuple[Candidate, MemoryBreakdown, int]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    num_considered: int = 0


def search(model: PlannedModel, cluster: Cluster, workload: Workload, any_will_do: bool = False) -> Found:
    """Look at every layout of all the cluster's devices, or only until one fits."""
    found = Found()
    layouts = list(_layouts(model, cluster, workload, found))
    starts = [
        candidate
        for layout, zero_stage in layouts
        for schedule, stages in _schedules(model, layout, zero_stage)
        for candidate in _loads(Candidate(layout, zero_stage, schedule=schedule, num_virtual_stages=stages), workload)
    ]
    for candidate in starts:
        if candidate.zero_stage == 0 or candidate.layout.data_parallel_size > 1:
            _consider(model, cluster, _checkpointed(candidate), found)
            if any_will_do and found.fitting:
                break
    if not found.fitting:
        for candidate in starts:
            if candidate.zero_stage > 0 and candidate.layout.pp == 1:
                _consider(model, cluster, _offloaded(cluster, candidate), found)
    return found


def seconds_per_sample(evaluation: Evaluation) -> float:
    """What layouts are compared by: the time of a step by its samples."""
    candidate = evaluation.candidate
    return evaluation.time.total / (candidate.batch_size * candidate.layout.data_parallel_size)


def _layouts(
    model: PlannedModel, cluster: Cluster, workload: Workload, found: Found
) -> Iterator[tuple[ParallelLayout, int]]:
    """Degrees and ZeRO stages that model, batch and machines allow."""
    world = cluster.num_devices
    no_pipeline = model.refuses_pipeline() if world > 1 else ""
    if no_pipeline:
        found.refused["PP"] = no_pipeline
    for tp in _divisors(cluster.devices_per_node):
        if tp > 1 and (reason := model.refuses_tensor_parallel(tp)):
            found.refused[f"TP of {tp}"] = reason
            continue
        for pp in _divisors(world // tp):
            if pp > 1 and (no_pipeline or pp > model.profile().num_blocks):
                continue
            dp = world // tp // pp
            if not workload.per_rank(dp):
                found.refused[f"DP of {dp}"] = (
                    f"{workload.global_batch} samples of a step do not divide over {dp} data-parallel ranks"
                )
                continue
            yield from _sharded(cluster, pp, dp, tp)


def _sharded(cluster: Cluster, pp: int, dp: int, tp: int) -> Iterator[tuple[ParallelLayout, int]]:
    yield ParallelLayout(pp=pp, dp_replicate=dp, tp=tp), 0
    if dp == 1:
        # On one rank ZeRO shards nothing, but it is what offload works on.
        yield from ((ParallelLayout(pp=pp, tp=tp), stage) for stage in (1, 3) if pp == 1)
        return
    inside = cluster.devices_per_node // tp
    sizes = {dp, inside if cluster.nodes > 1 and 1 < inside < dp and dp % inside == 0 else dp}
    for shard in sorted(sizes):
        layout = ParallelLayout(pp=pp, dp_replicate=dp // shard, dp_shard=shard, tp=tp)
        yield from ((layout, stage) for stage in (1, 2, 3))


def _schedules(model: PlannedModel, layout: ParallelLayout, zero_stage: int) -> Iterator[tuple[str, int]]:
    if layout.pp == 1:
        yield "", 1
        return
    for schedule, stages in _SCHEDULES:
        enough = layout.pp * stages <= model.profile().num_blocks
        # A split backward keeps parameters whole: what stage 3 would be for.
        if enough and not (SCHEDULES[schedule].splits_backward and zero_stage == 3):
            yield schedule, stages


def _loads(start: Candidate, workload: Workload) -> Iterator[Candidate]:
    layout = start.layout
    for size, number in workload.micro_batches(layout.data_parallel_size, layout.pp > 1):
        if layout.pp > 1:
            schedule = SCHEDULES[start.schedule]
            try:
                check_num_microbatches(schedule, number, layout.pp)
            except ValueError:
                continue
            if published(schedule, Case(layout.pp, number, start.num_virtual_stages)) is None:
                continue
        yield replace(start, micro_batch_size=size, num_microbatches=number)


def _consider(model: PlannedModel, cluster: Cluster, variants: Iterable[Candidate], found: Found) -> None:
    """Try the cheapest variant first; each further one costs time and saves memory."""
    for variant in variants:
        memory = predict_memory(model, cluster, variant)
        found.num_considered += 1
        missing = missing_bytes(cluster, variant, memory)
        if missing <= 0:
            found.fitting.append(Evaluation(variant, memory, predict_time(model, cluster, variant)))
            return
        key = family(variant)
        if key not in found.closest or missing < found.closest[key][2]:
            found.closest[key] = (variant, memory, missing)


def _checkpointed(candidate: Candidate) -> Iterator[Candidate]:
    # What recomputes runs its backward in one, which takes a schedule that splits it its advantage.
    splits = bool(candidate.schedule) and SCHEDULES[candidate.schedule].splits_backward
    for choice in _CHECKPOINTING[:1] if splits else _CHECKPOINTING:
        yield replace(candidate, activation_checkpointing=choice)


def _offloaded(cluster: Cluster, candidate: Candidate) -> Iterator[Candidate]:
    devices = ["cpu"] * cluster.device.is_gpu + ["disk"] * (cluster.host.disk is not None)
    for device in devices:
        for offload in ("optimizer", "all") if candidate.zero_stage == 3 else ("optimizer",):
            yield from _checkpointed(replace(candidate, offload=offload, offload_device=device))


def missing_bytes(cluster: Cluster, candidate: Candidate, memory: MemoryBreakdown) -> int:
    """Bytes that a rank lacks, on its device or of its share of host or disk; negative or 0 if it fits."""
    sharers = min(cluster.devices_per_node, candidate.layout.world_size)
    missing = -memory.margin
    if memory.host:
        missing = max(missing, memory.host - int(MEMORY_LINE * cluster.host.memory / sharers))
    if memory.disk and cluster.host.disk is not None:
        missing = max(missing, memory.disk - int(MEMORY_LINE * cluster.host.disk.capacity / sharers))
    return missing


def family(candidate: Candidate) -> str:
    """The kind, with offload told apart."""
    return candidate.kind + (f" + offload to {candidate.offload_device}" if candidate.offload else "")


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
