"""The decision list: which parallelism suits which situation, as data, and what the figures say of it.

=================================  ========================================================
situation                          advice
=================================  ========================================================
one device, the model fits         no parallelism
one device, it does not fit        ZeRO with offload to the host
several, it fits                   data parallelism, optionally ZeRO
several, it does not fit           a pipeline, ZeRO or tensor parallelism
several, the largest layer         a pipeline with tensor parallelism or ZeRO-3
does not fit either
several machines, a fast link      ZeRO
several machines, a slow link      data, pipeline and tensor parallelism and ZeRO together,
                                   the tensor axis never across the link
=================================  ========================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_par.planner.choice import Candidate
from lightning_par.planner.cluster import Cluster
from lightning_par.planner.memory import predict_memory
from lightning_par.planner.model import PlannedModel
from lightning_par.planner.plan import Advice, Evaluation
from lightning_par.planner.search import Found, seconds_per_sample
from lightning_par.planner.words import gigabytes, seconds

__all__ = ["ROWS", "Row", "Situation", "advise", "compare", "situation_of"]

TOLERANCE = 0.05
"""The list is followed if it costs no more than this: predicted times are no better."""


@dataclass(frozen=True)
class Situation:
    """What the list asks for.

    Attributes:
        cluster: The machines.
        fits: Whether a device can hold the whole training.
        whole: Bytes that takes, at the smallest micro-batch.
        largest_fits: Whether a device can hold the largest unit with its gradients and optimizer states.
        largest: Bytes that takes.
    """

    cluster: Cluster
    fits: bool
    whole: int
    largest_fits: bool
    largest: int


@dataclass(frozen=True)
class Row:
    """One row of the list.

    Attributes:
        name: The situation.
        advice: What to do.
        applies: Whether the situation is this one.
        follows: Whether a candidate does what the row says.
        why: The reason, with the situation's numbers.
    """

    name: str
    advice: str
    applies: Callable[[Situation], bool]
    follows: Callable[[Candidate], bool]
    why: Callable[[Situation], str]


def _uses(candidate: Candidate) -> set[str]:
    """``PP``, ``TP``, ``DP``, ``ZeRO``, ``ZeRO-3``, as far as a candidate is made of them."""
    layout, used = candidate.layout, set()
    if layout.pp > 1:
        used.add("PP")
    if layout.tp > 1:
        used.add("TP")
    if layout.data_parallel_size > 1:
        used.add("DP")
        if candidate.zero_stage:
            used |= {"ZeRO"} | ({"ZeRO-3"} if candidate.zero_stage == 3 else set())
    return used


def _one_of_pp_tp_zero(candidate: Candidate) -> bool:
    return len(_uses(candidate) & {"PP", "TP", "ZeRO"}) == 1


ROWS: tuple[Row, ...] = (
    Row(
        "one device, and the model fits",
        "no parallelism",
        lambda s: s.cluster.num_devices == 1 and s.fits,
        lambda c: not c.offload,
        lambda s: f"training takes {gigabytes(s.whole)} of the {_limit(s)} that may be used: nothing else is needed",
    ),
    Row(
        "one device, and the model does not fit",
        "ZeRO with offload to the host",
        lambda s: s.cluster.num_devices == 1,
        lambda c: bool(c.offload),
        lambda s: (
            f"training takes {gigabytes(s.whole)}, more than the {_limit(s)} that may be used, and there is no other "
            "device to share it with: the host's memory takes the optimizer states, and the parameters if it must"
        ),
    ),
    Row(
        "several machines with a slow link",
        "data, pipeline and tensor parallelism and ZeRO together, the tensor axis inside a machine",
        lambda s: s.cluster.has_slow_link,
        lambda c: {"PP", "TP", "DP"} <= _uses(c),
        lambda s: (
            f"the link between machines carries {gigabytes(int(s.cluster.between.bandwidth))}/s for each device, "
            f"{s.cluster.inside.bandwidth / s.cluster.between.bandwidth:.0f} times less than the one inside: only a "
            "pipeline's hidden states should cross it, while gradients, shards and above all the tensor axis's "
            "activations stay inside a machine"
        ),
    ),
    Row(
        "several machines with a fast link",
        "ZeRO",
        lambda s: s.cluster.nodes > 1,
        lambda c: _uses(c) & {"PP", "TP", "ZeRO"} == {"ZeRO"},
        lambda s: (
            f"the link between machines carries {gigabytes(int(s.cluster.between.bandwidth))}/s for each device, "
            "enough to hide gathers and reductions behind computation, so that states can be shared by all devices"
        ),
    ),
    Row(
        "several devices, and the model fits one",
        "data parallelism, optionally with ZeRO",
        lambda s: s.fits,
        lambda c: "DP" in _uses(c) and not _uses(c) & {"PP", "TP"},
        lambda s: (
            f"training takes {gigabytes(s.whole)} of the {_limit(s)} that may be used, so each device can hold the "
            "whole model and only gradients travel"
        ),
    ),
    Row(
        "several devices, and not even the largest layer fits one",
        "a pipeline with tensor parallelism or ZeRO-3",
        lambda s: not s.largest_fits,
        lambda c: "PP" in _uses(c) and bool(_uses(c) & {"TP", "ZeRO-3"}),
        lambda s: (
            f"the largest layer with its gradients and optimizer states takes {gigabytes(s.largest)}, more than the "
            f"{_limit(s)} of a device that may be used, so layers must be split besides being spread"
        ),
    ),
    Row(
        "several devices, and the model does not fit one",
        "a pipeline, ZeRO or tensor parallelism",
        lambda s: True,
        _one_of_pp_tp_zero,
        lambda s: (
            f"training takes {gigabytes(s.whole)}, more than the {_limit(s)} of a device that may be used, so the "
            "model's states must be shared, in one way of the three"
        ),
    ),
)


def _limit(situation: Situation) -> str:
    return gigabytes(int(situation.cluster.memory_limit))


def situation_of(model: PlannedModel, cluster: Cluster) -> Situation:
    """Find out what the list asks for, by the planner's own figures for one device."""
    plain = [
        predict_memory(model, cluster, Candidate(activation_checkpointing=choice))
        for choice in (False, "selective", True)
    ]
    profile = model.profile()
    sections = (profile.before, *profile.kinds, profile.after)
    shapes = max(
        (unit.shapes for section in sections for unit in section.units),
        key=lambda shapes: sum(shape.numel * shape.itemsize for shape in shapes),
    )
    largest = sum(
        shape.numel * shape.itemsize * (2 if shape.trains else 1)
        + (model.optimizer.nbytes(shape.numel, shape.itemsize, shape.count) if shape.trains else 0)
        for shape in shapes
    )
    return Situation(
        cluster=cluster,
        fits=any(memory.fits for memory in plain),
        whole=min(memory.total for memory in plain),
        largest_fits=largest + cluster.device.reserved <= cluster.memory_limit,
        largest=largest,
    )


def row_of(situation: Situation) -> Row:
    """The first row that applies."""
    return next(row for row in ROWS if row.applies(situation))


def choose(fitting: Sequence[Evaluation], row: Row) -> Evaluation | None:
    """The layout to take: the fastest, or of those as fast within the tolerance the simplest that follows the list."""
    if not fitting:
        return None
    fastest = min(map(seconds_per_sample, fitting))
    alike = [one for one in fitting if seconds_per_sample(one) <= fastest * (1 + TOLERANCE)]
    return min(alike, key=lambda one: (not row.follows(one.candidate), *_simplicity(one), seconds_per_sample(one)))


def _simplicity(evaluation: Evaluation) -> tuple[int, int, float]:
    """Fewer mechanisms first, then a lower stage, then the fastest to a percent."""
    candidate = evaluation.candidate
    used = _uses(candidate) - {"ZeRO-3"}
    mechanisms = len(used) + bool(candidate.offload) + bool(candidate.activation_checkpointing)
    return mechanisms, candidate.zero_stage, round(seconds_per_sample(evaluation), 6)


def advise(situation: Situation, found: Found, recommended: Evaluation | None) -> Advice:
    """The list's row beside the recommendation, and both times where they differ."""
    row = row_of(situation)
    following = [one for one in found.fitting if row.follows(one.candidate)]
    kinds = tuple(dict.fromkeys(one.candidate.kind for one in sorted(following, key=seconds_per_sample)))
    agrees = recommended is not None and row.follows(recommended.candidate)
    comparison = "" if agrees else compare(row, following, recommended)
    return Advice(row.name, row.advice, row.why(situation), kinds, agrees, comparison)


def compare(row: Row, following: Sequence[Evaluation], recommended: Evaluation | None) -> str:
    """Why the recommendation is not what the list says, with both numbers."""
    if recommended is None:
        return "No layout fits, those of the list included."
    chosen = f"{recommended.candidate.kind} takes {seconds(recommended.time.total)} a step"
    if not following:
        return f"The list says {row.advice}, of which nothing fits here; {chosen}."
    best = min(following, key=seconds_per_sample)
    slower = seconds_per_sample(best) / seconds_per_sample(recommended) - 1
    return (
        f"The list says {row.advice}; the best of that ({best.candidate.kind}) takes {seconds(best.time.total)} a "
        f"step, {slower:.0%} more than what is recommended: {chosen}."
    )
