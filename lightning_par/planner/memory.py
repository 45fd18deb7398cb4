"""Bytes of the fullest rank under a candidate.

States are exact: by the same units, rows and ties as the engine shards by. What comes and goes within a step is walked
through section by section, since activations go as gradients come.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_par.data_parallel import ZERO_POLICIES
from lightning_par.pipeline_parallel.schedules import SCHEDULES
from lightning_par.planner.choice import Candidate
from lightning_par.planner.cluster import Cluster
from lightning_par.planner.model import PlannedModel
from lightning_par.planner.plan import MemoryBreakdown
from lightning_par.planner.profile import Section, Shape
from lightning_par.planner.stages import Held, held_by, in_flight

__all__ = ["States", "host_bytes", "predict_memory", "state_bytes"]

_REDUCED = 4
"""Bytes of an element of summed gradients: at least float32 (:mod:`lightning_par.data_parallel.apply`)."""


@dataclass(frozen=True)
class States:
    """Bytes of model state on one rank at rest, after a step."""

    parameters: int
    gradients: int
    optimizer: int


@dataclass(frozen=True)
class _Sharding:
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
    def of(cls, candidate: Candidate) -> _Sharding:
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


def state_bytes(model: PlannedModel, candidate: Candidate, pipeline_rank: int = 0, shard_rank: int = 0) -> States:
    """Bytes of parameters, gradients and optimizer states of one rank after a step, to the byte.

    Args:
        model: What is trained.
        candidate: How.
        pipeline_rank: Index on the ``pp`` axis.
        shard_rank: Index on the ``dp_shard`` axis; the first rank has most.
    """
    held = held_by(model.profile(candidate.layout.tp, candidate.gathers), candidate, pipeline_rank)
    return _states(model, held, _Sharding.of(candidate), shard_rank)


def _states(model: PlannedModel, held: Held, sharding: _Sharding, index: int = 0) -> States:
    parameters = gradients = optimizer = 0
    for shape, count in held.shapes():
        local = shape.local(_shards(shape, held, sharding), index)
        parameters += local * shape.itemsize * count
        if shape.trains:
            gradients += local * shape.itemsize * count
            optimizer += model.optimizer.nbytes(local, shape.itemsize, shape.count) * count
    return States(parameters, gradients, optimizer)


def _shards(shape: Shape, held: Held, sharding: _Sharding) -> int:
    """Two trees of one rank can't both shard what they share, so it stays whole on the data axis."""
    return 1 if held.trees > 1 and shape in held.tied else sharding.shards


def predict_memory(model: PlannedModel, cluster: Cluster, candidate: Candidate) -> MemoryBreakdown:
    """Bytes of the fullest rank at its fullest moment."""
    profile = model.profile(candidate.layout.tp, candidate.gathers)
    last = candidate.layout.pp - 1
    ranks = sorted({0, min(1, last), last})
    return max(
        (_of_rank(model, cluster, candidate, held_by(profile, candidate, rank)) for rank in ranks),
        key=lambda memory: memory.total,
    )


def _of_rank(model: PlannedModel, cluster: Cluster, candidate: Candidate, held: Held) -> MemoryBreakdown:
    sharding = _Sharding.of(candidate)
    states = _states(model, held, sharding)
    moment = _fullest_moment(model, candidate, held, sharding, states)
    on_host = candidate.offload != "" and cluster.device.is_gpu
    keeps = candidate.offload != "all"
    largest = max((unit.numel for unit, _, _ in held.units()), default=0)
    gathered, communication = _whole_units(model, held, sharding)
    buffers = sum(section.buffers * count for section, count in held.sections())
    batch = candidate.batch_size if candidate.layout.pp > 1 else candidate.micro_batch_size
    host = host_bytes(states, candidate) if candidate.offload else 0
    if candidate.layout.pp > 1:
        communication += int(2 * _hidden(held, candidate))
    if on_host:
        communication += 2 * _REDUCED * largest // sharding.shards  # a unit's gradients on their way
    off_device = on_host or candidate.offload_device == "disk"
    return MemoryBreakdown(
        parameters=states.parameters if keeps or not off_device else 0,
        gradients=0 if off_device and candidate.offload else moment.gradients,
        optimizer=0 if off_device and candidate.offload else states.optimizer,
        activations=int(moment.activations),
        gathered=gathered if keeps or sharding.wraps else 2 * largest * model.compute_itemsize,
        communication=communication,
        buffers=buffers + batch * model.batch_bytes,
        reserved=int(cluster.device.reserved),
        capacity=int(cluster.device.memory),
        host=host if candidate.offload_device == "cpu" else 0,
        disk=host if candidate.offload_device == "disk" else 0,
        pipeline_rank=held.rank,
        moment=moment.name,
    )


def host_bytes(states: States, candidate: Candidate) -> int:
    """Bytes of one rank that offload keeps off the device: masters, their gradients and moments."""
    return states.parameters + states.gradients + states.optimizer if candidate.offload else 0


@dataclass(frozen=True)
class _Moment:
    name: str
    activations: float
    gradients: int

    @property
    def total(self) -> float:
        return self.activations + self.gradients


def _fullest_moment(
    model: PlannedModel, candidate: Candidate, held: Held, sharding: _Sharding, states: States
) -> _Moment:
    """Walk through the last micro-batch in flight, backwards."""
    return max(_moments(model, candidate, held, sharding, states), key=lambda moment: moment.total)


def _moments(
    model: PlannedModel, candidate: Candidate, held: Held, sharding: _Sharding, states: States
) -> Iterator[_Moment]:
    samples = candidate.micro_batch_size
    sections = list(held.sections())
    kept = [_kept(section, candidate, samples) * count for section, count in sections]
    received = _hidden(held, candidate) * (held.trees - (held.before is not None))
    waiting = (in_flight(candidate, held.rank) - 1) * (sum(kept) + received)
    alive = waiting + sum(kept) + received
    whole = _gradients(held, sharding)
    accumulates = candidate.num_microbatches > 1
    # A schedule runs before Lightning empties the last step's gradients, which are set aside for it.
    earlier = states.gradients if candidate.layout.pp > 1 else 0
    gradients = earlier + (whole if accumulates or sharding.replicates_whole else 0)
    if sections:
        section, _ = sections[-1]
        peak = section.forward_peak.at(samples) - section.kept.at(samples)
        yield _Moment(f"end of forward ({section.name})", alive + max(0.0, peak), gradients)
    for (section, count), own in zip(reversed(sections), reversed(kept), strict=True):
        again = section.kept.at(samples) - own / max(1, count) if section.blocks else 0.0
        peak = section.backward_peak.at(samples) + max(0.0, again)
        yield _Moment(f"backward of {section.name}", alive + peak, gradients)
        if section.blocks and not accumulates and not sharding.replicates_whole:
            # The last of a run of like blocks: the others' activations are gone, their gradients there.
            rest = _section_gradients(section, sharding) * (count - 1)
            left = alive - own * (count - 1) / count
            yield _Moment(f"backward of {section.name}", left + peak, gradients + rest)
        alive -= own
        if not accumulates and not sharding.replicates_whole:
            gradients += _section_gradients(section, sharding) * count
    work_space = max((s.numel * s.itemsize for s, _ in held.shapes() if s.trains), default=0) // sharding.shards
    step_gradients = whole if sharding.replicates_whole or not sharding.wraps else states.gradients
    yield _Moment("optimizer step", float(work_space), step_gradients)


def _kept(section: Section, candidate: Candidate, samples: int) -> float:
    """Bytes that a section keeps for its backward, of one micro-batch."""
    choice = candidate.activation_checkpointing
    if not section.blocks or not choice:
        return section.kept.at(samples)
    kept = section.output + section.costly if choice == "selective" else section.output
    return min(kept.at(samples), section.kept.at(samples))


def _hidden(held: Held, candidate: Candidate) -> float:
    """Bytes of one micro-batch's hidden state."""
    return max((kind.output.at(candidate.micro_batch_size) for kind, _ in held.kinds), default=0.0)


def _gradients(held: Held, sharding: _Sharding) -> int:
    """Bytes of the gradients of all micro-batches but the running one."""
    total = 0
    for shape, count in held.shapes():
        if shape.trains:
            total += _gradient(shape, sharding) * count
    return total


def _section_gradients(section: Section, sharding: _Sharding) -> int:
    return sum(_gradient(shape, sharding) for shape in section.shapes if shape.trains)


def _gradient(shape: Shape, sharding: _Sharding) -> int:
    if not sharding.keeps_gradients_whole:
        return shape.local(sharding.shards) * shape.itemsize
    return shape.numel * (max(shape.itemsize, _REDUCED) if sharding.wraps else shape.itemsize)


def _whole_units(model: PlannedModel, held: Held, sharding: _Sharding) -> tuple[int, int]:
    """Bytes of parameters gathered at once, and of the buffers that gather and reduce them.

    Freed units leave two at a time, the one in use and the one fetched ahead, beside the root's, which stay.
    """
    if not sharding.wraps:
        return 0, 0
    itemsize = model.compute_itemsize
    root = sum(unit.numel * count for unit, count, is_root in held.units() if is_root)
    root -= sum(shape.numel for shape in held.tied)
    blocks = [(unit.numel, count) for unit, count, is_root in held.units() if not is_root]
    largest = max((numel for numel, _ in blocks), default=0)
    total = sum(numel * count for numel, count in blocks)
    at_once = min(total, 2 * largest) if sharding.frees else total
    # One flat buffer that a unit is gathered into, and one that its gradients are summed in.
    flat = max(largest, root)
    trained = any(shape.trains for shape, _ in held.shapes())
    return int((root + at_once) * itemsize), int(flat * itemsize + (flat * _REDUCED if trained else 0))
