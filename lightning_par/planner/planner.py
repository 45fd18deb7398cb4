"""Putting a plan together: search, decision list, recommendation, and the reason for each that was not taken."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from lightning_par.planner.cluster import Cluster
from lightning_par.planner.fixes import explain_misfit
from lightning_par.planner.guide import advise, choose, row_of, situation_of
from lightning_par.planner.model import PlannedModel
from lightning_par.planner.overrides import overrides_for
from lightning_par.planner.plan import Evaluation, Plan, Rejection
from lightning_par.planner.search import Found, Workload, family, search, seconds_per_sample
from lightning_par.planner.time import predict_time
from lightning_par.planner.words import gigabytes, seconds

__all__ = ["make_plan"]

_NUM_RUNNERS_UP = 5
_PARTS = {
    "recompute": "computing activations again",
    "bubble": "waiting for other pipeline stages",
    "communication": "communication that nothing hides",
    "offload": "the host",
    "optimizer": "the optimizer",
    "compute": "computation",
}


def make_plan(
    model: PlannedModel, cluster: Cluster, workload: Workload, given: Iterable[str] = (), notes: Iterable[str] = ()
) -> Plan:
    """Recommend a layout.

    Args:
        model: What is trained.
        cluster: On what.
        workload: How many samples a step takes.
        given: Overrides to repeat in the command, such as ``model=gpt_7b``.
        notes: What a reader must know besides.

    Returns:
        The plan; its ``recommended`` is ``None`` if nothing fits.
    """
    start = time.perf_counter()
    situation = situation_of(model, cluster)
    found = search(model, cluster, workload)
    recommended = choose(found.fitting, row_of(situation))
    advice = advise(situation, found, recommended)
    rejected = _rejections(model, cluster, found, workload)
    if recommended is not None:
        recommended = replace(recommended, reason=_reason_for(recommended, advice.reason if advice.agrees else ""))
    candidate = recommended.candidate if recommended else None
    return Plan(
        model=model.summary(),
        cluster=cluster,
        global_batch=candidate.batch_size * candidate.layout.data_parallel_size
        if candidate
        else workload.global_batch or 0,
        advice=advice,
        recommended=recommended,
        runners_up=_runners_up(found, recommended) if recommended else (),
        rejected=rejected,
        overrides=(*given, *overrides_for(candidate, cluster, model)) if candidate else (),
        fix="" if recommended else explain_misfit(model, cluster, workload, found),
        notes=(*notes, *model.notes),
        num_considered=found.num_considered,
        seconds=time.perf_counter() - start,
    )


def _reason_for(recommended: Evaluation, rule: str) -> str:
    memory = recommended.memory
    words = (
        f"It takes {gigabytes(memory.total)} of a device at its fullest moment ({memory.moment}), "
        f"{gigabytes(memory.margin)} below the line of {gigabytes(memory.limit)}, and is the fastest of those that "
        "fit, or as fast within 5% and simpler."
    )
    return f"{rule[0].upper()}{rule[1:]}. {words}" if rule else words


def _runners_up(found: Found, recommended: Evaluation) -> tuple[Evaluation, ...]:
    """The best of each other family, the fastest first."""
    best: dict[str, Evaluation] = {}
    for one in sorted(found.fitting, key=seconds_per_sample):
        best.setdefault(family(one.candidate), one)
    best.pop(family(recommended.candidate), None)
    others = list(best.values())[:_NUM_RUNNERS_UP]
    return tuple(replace(one, reason=_reason_against(one, recommended)) for one in others)


def _reason_against(other: Evaluation, recommended: Evaluation) -> str:
    ratio = seconds_per_sample(other) / seconds_per_sample(recommended)
    if ratio <= 1.0:
        return (
            f"{1 - ratio:.1%} faster, less than the figures can tell apart, but not so simple or not what is advised."
        )
    losses = {
        part: getattr(other.time, part) * _scale(other, recommended) - getattr(recommended.time, part)
        for part in _PARTS
    }
    worst = max(losses, key=lambda part: losses[part])
    return f"{ratio - 1:.1%} slower: {seconds(max(0.0, losses[worst]))} a step more for {_PARTS[worst]}."


def _scale(other: Evaluation, recommended: Evaluation) -> float:
    """Steps of the one for one of the other, so that both have seen as many samples."""
    return recommended.time.tokens / other.time.tokens


def _rejections(model: PlannedModel, cluster: Cluster, found: Found, workload: Workload) -> tuple[Rejection, ...]:
    fitting = {family(one.candidate) for one in found.fitting}
    rejected = []
    for name, (candidate, memory, missing) in sorted(found.closest.items()):
        if name in fitting:
            continue
        place = "a device"
        if memory.fits:
            place = "the host" if memory.host else "the disk"
        reason = f"lacks {gigabytes(missing)} of {place} at its best ({candidate.describe()}; {memory.moment})"
        closest = Evaluation(candidate, memory, predict_time(model, cluster, candidate), reason)
        rejected.append(Rejection(name, reason, closest, missing))
    rejected += [Rejection(label, reason) for label, reason in found.refused.items()]
    return tuple(rejected)
