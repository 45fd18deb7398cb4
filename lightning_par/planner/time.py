"""Seconds of a step under a candidate: roofline of each section, collectives on their links, bubble, host.

A section's products take the longer of their FLOPs at the rate that large products reach and their bytes at the
memory's rate; all other operators take their bytes. On an accelerator that hides the launching of operators, or is
hidden by it; on a CPU both add up.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_par.pipeline_parallel.schedules import SCHEDULES
from lightning_par.planner.choice import Candidate
from lightning_par.planner.cluster import Cluster
from lightning_par.planner.memory import host_bytes, state_bytes
from lightning_par.planner.model import PlannedModel
from lightning_par.planner.plan import StepTime
from lightning_par.planner.profile import Section, Work
from lightning_par.planner.stages import Held, bubble_units, held_by
from lightning_par.planner.traffic import collective_seconds, data_traffic, link_of

__all__ = ["predict_time"]

_OVERLAP = 0.9
"""Share of computation that collectives of an accelerator hide behind; they share its units for the rest."""
_UNIT_OPERATORS = 200
"""What the hooks of a unit take in one pass, in launches of an operator (``fully_shard`` of torch 2.13, CPU ranks)."""
_GATHER_COPIES, _REDUCE_COPIES = 4, 4
"""Reads and writes of a unit that go with a gather (into one buffer, and out of it) and with a reduction."""
_GLOO_REDUCTION = 2
"""gloo scatters a sum by making all of it everywhere: twice the bytes."""
_MESSAGES_EXPOSED = 0.5
"""Share of a pipeline's messages between two computations that nothing hides."""


@dataclass(frozen=True)
class _Pass:
    """Seconds of one micro-batch on one rank."""

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    tensor: float = 0.0
    tensor_bytes: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward + self.recompute + self.tensor


def predict_time(model: PlannedModel, cluster: Cluster, candidate: Candidate) -> StepTime:
    """Seconds of an optimizer step."""
    profile = model.profile(candidate.layout.tp, candidate.gathers)
    layout, m = candidate.layout, candidate.num_microbatches
    last = layout.pp - 1
    ranks = [held_by(profile, candidate, rank) for rank in sorted({0, min(1, last), last})]
    passes = [_pass(model, cluster, candidate, held) for held in ranks]
    slowest = max(range(len(ranks)), key=lambda index: passes[index].total)
    held, one = ranks[slowest], passes[slowest]
    data = _data_seconds(model, cluster, candidate, held, one)
    messages, message_bytes = _messages(cluster, candidate, held)
    units = bubble_units(candidate.schedule, layout.pp, m, candidate.num_virtual_stages)
    bubble = units * (one.total / candidate.num_virtual_stages) / 3
    offload = _offload_seconds(model, cluster, candidate, held, one)
    samples = candidate.batch_size * layout.data_parallel_size
    traffic = {"tp": int(one.tensor_bytes * m), "pp": int(message_bytes)} | dict(data.axes)
    return StepTime(
        compute=m * (one.forward + one.backward),
        recompute=m * one.recompute,
        bubble=bubble,
        communication=m * one.tensor + data.exposed + messages,
        offload=offload,
        optimizer=_optimizer_seconds(model, cluster, candidate, held),
        tokens=float(samples * model.tokens_per_sample),
        num_devices=layout.world_size,
        model_flops=samples * _flops_per_sample(model),
        peak_flops=cluster.device.peak(model.precision.peak),
        hidden_communication=data.hidden,
        traffic={axis: moved for axis, moved in traffic.items() if moved},
        stage_times=tuple((p.forward, p.backward + p.recompute + p.tensor) for p in passes),
    )


# Computation


def _pass(model: PlannedModel, cluster: Cluster, candidate: Candidate, held: Held) -> _Pass:
    samples, layout = candidate.micro_batch_size, candidate.layout
    link = link_of(cluster, layout, "tp")
    forward = backward = recompute = tensor = tensor_bytes = 0.0
    for section, count in held.sections():
        again = _again(section, candidate)
        hooks = _UNIT_OPERATORS * len(section.units) if candidate.gathers else 0
        forward += count * _seconds(model, cluster, section.forward, samples, hooks)
        backward += count * _seconds(model, cluster, section.backward, samples, hooks)
        recompute += count * _recompute(model, cluster, section, candidate)
        moved = section.forward.tensor_bytes.at(samples) * (1 + again) + section.backward.tensor_bytes.at(samples)
        calls = section.forward.tensor_calls * (1 + again) + section.backward.tensor_calls
        tensor += count * collective_seconds(link, layout.tp, moved, calls)
        tensor_bytes += count * moved
    return _Pass(forward, backward, recompute, tensor, tensor_bytes)


def _again(section: Section, candidate: Candidate) -> bool:
    return bool(section.blocks and candidate.activation_checkpointing)


def _recompute(model: PlannedModel, cluster: Cluster, section: Section, candidate: Candidate) -> float:
    if not _again(section, candidate):
        return 0.0
    samples = candidate.micro_batch_size
    if candidate.activation_checkpointing == "selective":
        work = section.forward
        return _seconds(model, cluster, Work(other_bytes=work.other_bytes, operators=work.operators), samples)
    return _seconds(model, cluster, section.forward, samples)


def _seconds(model: PlannedModel, cluster: Cluster, work: Work, samples: int, hooks: int = 0) -> float:
    device = cluster.device
    rate, stream = device.peak(model.precision.peak) * device.efficiency, device.stream
    products = max(work.flops.at(samples) / rate, work.product_bytes.at(samples) / stream)
    busy = products + work.other_bytes.at(samples) / stream
    launch = (work.operators + hooks) * device.overhead
    return max(busy, launch) if device.is_gpu else busy + launch


def _flops_per_sample(model: PlannedModel) -> float:
    """Forward and backward of the whole model, nothing computed again."""
    profile = model.profile()
    sections = [(profile.before, 1), *((kind, len(kind.blocks)) for kind in profile.kinds), (profile.after, 1)]
    return sum(count * (s.forward.flops.per_sample + s.backward.flops.per_sample) for s, count in sections)


# Communication


@dataclass(frozen=True)
class _Data:
    exposed: float
    hidden: float
    axes: dict[str, int]


def _data_seconds(model: PlannedModel, cluster: Cluster, candidate: Candidate, held: Held, one: _Pass) -> _Data:
    """Collectives of the data axes: gathers hide behind the forward (and backward), reductions behind the backward."""
    traffic, layout = data_traffic(model, candidate, held), candidate.layout
    shard, replicate = (link_of(cluster, layout, axis) for axis in ("dp_shard", "dp_replicate"))
    units = traffic.num_units
    gather = collective_seconds(shard, layout.dp_shard, traffic.gathered, units * traffic.gathers)
    reduction = collective_seconds(shard, layout.dp_shard, traffic.reduced, units * traffic.reductions)
    copies = _GATHER_COPIES * traffic.gathered + _REDUCE_COPIES * traffic.reduced
    if not cluster.device.is_gpu:
        reduction *= _GLOO_REDUCTION
    replica = collective_seconds(replicate, layout.dp_replicate, traffic.replicated, units)
    # How many forwards and backwards there are to hide behind.
    forwards = max(1, traffic.gathers // 2)
    backwards = max(1, traffic.reductions)
    overlap = _OVERLAP if cluster.device.is_gpu else 0.0
    gathers_in_backward = gather / 2 if traffic.gathers > 1 else 0.0
    late = reduction + replica + gathers_in_backward
    early = gather - gathers_in_backward
    exposed = _exposed(early, overlap * forwards * one.forward, forwards * units)
    exposed += _exposed(late, overlap * backwards * (one.backward + one.recompute), backwards * units)
    hidden = early + late - exposed
    return _Data(exposed + copies / cluster.device.stream, hidden, dict(traffic.axes))


def _exposed(communication: float, hides: float, pieces: int) -> float:
    """What can't be hidden, and the first or last piece, which has nothing to hide behind."""
    return max(communication - hides, communication / max(1, pieces))


def _messages(cluster: Cluster, candidate: Candidate, held: Held) -> tuple[float, float]:
    """Seconds and bytes of hidden states and their gradients between stages."""
    p, m, v = candidate.layout.pp, candidate.num_microbatches, candidate.num_virtual_stages
    if p == 1:
        return 0.0, 0.0
    link = link_of(cluster, candidate.layout, "pp")
    size = max((kind.output.at(candidate.micro_batch_size) for kind, _ in held.kinds), default=0.0)
    one_way = link.latency + size / link.bandwidth
    sends = 2 * m * v - (held.before is not None) * m - (held.after is not None) * m
    if candidate.schedule and SCHEDULES[candidate.schedule].placement == "v":
        sends -= (2 if held.rank == p - 1 else 0) * m  # the turn of the V stays on the last rank
    return _MESSAGES_EXPOSED * 2 * m * v * one_way + 2 * (p - 1) * one_way, sends * size


# Optimizer and host


def _step_bytes(model: PlannedModel, elements: float) -> float:
    """Read and written by an optimizer: the parameter and each state both ways, the gradient one way (28 for Adam)."""
    return elements * model.rest_itemsize * (3 + 2 * model.optimizer.per_element)


def _optimizer_seconds(model: PlannedModel, cluster: Cluster, candidate: Candidate, held: Held) -> float:
    if candidate.offload:
        return 0.0
    states = state_bytes(model, candidate, held.rank)
    return _step_bytes(model, states.gradients / model.rest_itemsize) / cluster.device.stream


def _offload_seconds(model: PlannedModel, cluster: Cluster, candidate: Candidate, held: Held, one: _Pass) -> float:
    """Gradients down, the host's step, parameters up (arXiv 2101.06840), unit by unit beside the backward."""
    if not candidate.offload:
        return 0.0
    states, host = state_bytes(model, candidate, held.rank), cluster.host
    elements = states.gradients / model.rest_itemsize
    # Gradients go down in the type they are summed in, parameters up in their own.
    travels = (4 * elements + states.parameters) / host.link if cluster.device.is_gpu else 0.0
    sharers = min(cluster.devices_per_node, candidate.layout.world_size)
    step = _step_bytes(model, elements) * sharers / host.memory_bandwidth
    if candidate.offload_device == "disk" and host.disk is not None:
        step += 2 * host_bytes(states, candidate) * sharers / host.disk.bandwidth
    fetched = 0.0
    if candidate.offload == "all" and cluster.device.is_gpu:
        uses = 2 * candidate.num_microbatches
        fetched = uses * states.parameters / host.link
        hides = uses * (one.forward + one.backward) / 2
        fetched = max(0.0, fetched - _OVERLAP * hides)
    hidden = _OVERLAP * one.backward if cluster.device.is_gpu else 0.0
    return max(travels + step - hidden, (travels + step) / max(1, held.num_blocks)) + fetched
