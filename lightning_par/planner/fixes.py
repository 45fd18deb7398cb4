"""What to do where nothing fits: the closest layout, what it lacks, and what each knob would buy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lightning_par.planner.choice import Candidate
from lightning_par.planner.cluster import MEMORY_LINE, Cluster
from lightning_par.planner.memory import predict_memory
from lightning_par.planner.model import PlannedModel
from lightning_par.planner.plan import MemoryBreakdown
from lightning_par.planner.search import Found, Workload, missing_bytes, search
from lightning_par.planner.trace import PRECISIONS
from lightning_par.planner.words import gigabytes

__all__ = ["explain_misfit"]

_MAX_DOUBLINGS = 6


def explain_misfit(model: PlannedModel, cluster: Cluster, workload: Workload, found: Found) -> str:
    """The closest layout in words, with what buys the bytes that it lacks."""
    if not found.closest:
        reasons = "; ".join(f"{label}: {reason}" for label, reason in found.refused.items())
        return f"No layout could be looked at. {reasons}"
    candidate, memory, missing = min(found.closest.values(), key=lambda entry: entry[2])
    where = _where(memory)
    knobs = list(_knobs(model, cluster, workload, candidate, missing))
    advice = " ".join(knobs) or "No single knob buys that: take larger devices, or a smaller model."
    return (
        f"Nothing fits. The closest is {candidate.describe()}: it lacks {gigabytes(missing)} ({missing:,} bytes) "
        f"{where}. {advice}"
    )


def _where(memory: MemoryBreakdown) -> str:
    if not memory.fits:
        return f"of a device, of which {gigabytes(memory.total)} are taken and {gigabytes(memory.limit)} may be"
    kept, place = (memory.host, "host") if memory.host else (memory.disk, "disk")
    return f"of its share of the {place}, where it would keep {gigabytes(kept)}"


def _knobs(
    model: PlannedModel, cluster: Cluster, workload: Workload, candidate: Candidate, missing: int
) -> Iterator[str]:
    yield from _more_machines(model, cluster, workload)
    yield from _less_batch(model, cluster, candidate, missing)
    yield from _half_precision(model, cluster, candidate, missing)
    memory = cluster.device.memory
    yield f"Devices of {gigabytes(memory + missing / MEMORY_LINE)} instead of {gigabytes(memory)} would do."


def _more_machines(model: PlannedModel, cluster: Cluster, workload: Workload) -> Iterator[str]:
    for doubling in range(1, _MAX_DOUBLINGS + 1):
        nodes = cluster.nodes * 2**doubling
        # As many samples for each device, so that they go on dividing.
        load = (
            workload
            if workload.global_batch is None
            else replace(workload, global_batch=workload.global_batch * 2**doubling)
        )
        more = search(model, cluster.sized(nodes=nodes), load, any_will_do=True)
        if more.fitting:
            kind = max(more.fitting, key=lambda one: one.memory.margin).candidate.kind
            yield f"{nodes} machines instead of {cluster.nodes} (cluster.nodes={nodes}) would do, with {kind}."
            return
        if nodes * cluster.devices_per_node > 4096:
            return


def _less_batch(model: PlannedModel, cluster: Cluster, candidate: Candidate, missing: int) -> Iterator[str]:
    size = candidate.micro_batch_size
    if size == 1:
        return
    smaller = replace(candidate, micro_batch_size=1)
    saved = missing - missing_bytes(cluster, smaller, predict_memory(model, cluster, smaller))
    enough = "which is enough" if saved >= missing else "which is not enough"
    yield f"Micro-batches of 1 sample instead of {size} save {gigabytes(saved)}, {enough}."


def _half_precision(model: PlannedModel, cluster: Cluster, candidate: Candidate, missing: int) -> Iterator[str]:
    if model.precision.rest is not None:
        return
    other = model.with_precision("bf16-true")
    saved = missing - missing_bytes(cluster, candidate, predict_memory(other, cluster, candidate))
    if saved > 0 and "bf16-true" in PRECISIONS:
        enough = "which is enough, at the price of rounded weights" if saved >= missing else "which is not enough"
        yield f"trainer.precision=bf16-true saves {gigabytes(saved)}, {enough}."
