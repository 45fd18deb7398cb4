"""Bytes of the fullest rank under a candidate.

States are exact: by the same units, rows and ties as the engine shards by. What comes and goes within a step is walked
through section by section, since activations go as gradients come.
"""

from __future__ import annotations

from lightning_par.planner.choice import Candidate
from lightning_par.planner.cluster import Cluster
from lightning_par.planner.model import PlannedModel
from lightning_par.planner.moments import fullest_moment, hidden_bytes
from lightning_par.planner.plan import MemoryBreakdown
from lightning_par.planner.profile import Shape
from lightning_par.planner.sharding import REDUCED, Sharding, States
from lightning_par.planner.stages import Held, held_by

__all__ = ["host_bytes", "predict_memory", "state_bytes"]


def state_bytes(model: PlannedModel, candidate: Candidate, pipeline_rank: int = 0, shard_rank: int = 0) -> States:
    """Bytes of parameters, gradients and optimizer states of one rank after a step, to the byte.

    Args:
        model: What is trained.
        candidate: How.
        pipeline_rank: Index on the ``pp`` axis.
        shard_rank: Index on the ``dp_shard`` axis; the first rank has most.
    """
    held = held_by(model.profile(candidate.layout.tp, candidate.gathers), candidate, pipeline_rank)
    return _states(model, held, Sharding.of(candidate), shard_rank)


def _states(model: PlannedModel, held: Held, sharding: Sharding, index: int = 0) -> States:
    parameters = gradients = optimizer = 0
    for shape, count in held.shapes():
        local = shape.local(_shards(shape, held, sharding), index)
        parameters += local * shape.itemsize * count
        if shape.trains:
            gradients += local * shape.itemsize * count
            optimizer += model.optimizer.nbytes(local, shape.itemsize, shape.count) * count
    return States(parameters, gradients, optimizer)


def _shards(shape: Shape, held: Held, sharding: Sharding) -> int:
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
    sharding = Sharding.of(candidate)
    states = _states(model, held, sharding)
    gathered, buffers_of = _whole_units(model, held, sharding)
    # An accelerator's allocator keeps what another stream has used, so buffers count at every moment there.
    kept = cluster.device.is_gpu
    moment = fullest_moment(candidate, held, sharding, states, (0, 0) if kept else buffers_of)
    on_host = candidate.offload != "" and cluster.device.is_gpu
    keeps = candidate.offload != "all"
    largest = max((unit.numel for unit, _, _ in held.units()), default=0)
    communication = _kept_buffers(model, held, sharding) if kept else moment.communication
    buffers = sum(section.buffers * count for section, count in held.sections())
    batch = candidate.batch_size if candidate.layout.pp > 1 else candidate.micro_batch_size
    host = host_bytes(states, candidate) if candidate.offload else 0
    if candidate.layout.pp > 1:
        communication += int(2 * hidden_bytes(held, candidate))
    if on_host:
        communication += 2 * REDUCED * largest // sharding.shards  # a unit's gradients on their way
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


def _whole_units(model: PlannedModel, held: Held, sharding: Sharding) -> tuple[int, tuple[int, int]]:
    """Bytes of parameters gathered at once, and of the buffers that a block and the root are gathered and reduced in.

    Freed units leave two at a time, the one in use and the one fetched ahead, beside the root's, which stay.
    """
    if not sharding.wraps:
        return 0, (0, 0)
    itemsize = model.compute_itemsize
    root = sum(unit.numel * count for unit, count, is_root in held.units() if is_root)
    root -= sum(shape.numel for shape in held.tied)
    blocks = [(unit.numel, count) for unit, count, is_root in held.units() if not is_root]
    largest = max((numel for numel, _ in blocks), default=0)
    total = sum(numel * count for numel, count in blocks)
    at_once = min(total, 2 * largest) if sharding.frees else total
    # One flat buffer that a unit is gathered into, if it is anew, and one that its gradients are summed in.
    reduced = REDUCED if any(shape.trains for shape, _ in held.shapes()) else 0
    block = largest * (reduced + (itemsize if sharding.frees else 0))
    return int((root + at_once) * itemsize), (int(block), int(root * reduced))


def _kept_buffers(model: PlannedModel, held: Held, sharding: Sharding) -> int:
    """Bytes of a buffer that the largest unit (or the root) is gathered into, and one that it is reduced in."""
    if not sharding.wraps:
        return 0
    root = sum(unit.numel * count for unit, count, is_root in held.units() if is_root)
    root -= sum(shape.numel for shape in held.tied)
    flat = max([root, *(unit.numel for unit, _, is_root in held.units() if not is_root)])
    reduced = REDUCED if any(shape.trains for shape, _ in held.shapes()) else 0
    return flat * (model.compute_itemsize + reduced)
