"""The pipeline schedules by name, and the rules each lays on its numbers.

What sets one schedule apart from another is data: torch's class that runs it, where the stages lie, and which numbers
of micro-batches it takes. The rules are those of torch 2.13's own classes, checked before a process group exists.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

from torch.distributed import pipelining

__all__ = [
    "SCHEDULES",
    "Schedule",
    "check_num_eval_microbatches",
    "check_num_microbatches",
    "check_num_virtual_stages",
    "default_num_microbatches",
    "schedule_named",
    "stage_indices",
    "suitable_num_microbatches",
]

_MICROBATCHES_PER_RANK = 4
"""GPipe (arXiv 1811.06965) found the bubble small once m >= 4p: at m = 4p it is (p-1)/(5p-1), less than a fifth."""


@dataclass(frozen=True)
class Schedule:
    """One way to order the micro-batches of a pipeline.

    Attributes:
        name: What users write.
        summary: What it does, in a line.
        torch_class: The class of ``torch.distributed.pipelining`` that runs it.
        num_virtual_stages: Stages that each rank holds; ``None`` leaves the choice to the user, two or more.
        placement: ``"loop"`` puts stage ``s`` on rank ``s % p``; ``"v"`` goes down the ranks and back up.
        splits_backward: Whether gradients of inputs (I) and of weights (W) are separate actions. torch can't compile
            the stages of such a schedule.
        microbatches_per_rank: It needs at least this many micro-batches for each rank of the pipeline.
        equal_rounds: Micro-batches go in ``max(1, m // p)`` rounds, which must be equally long.
    """

    name: str
    summary: str
    torch_class: type[Any]
    num_virtual_stages: int | None = 1
    placement: Literal["loop", "v"] = "loop"
    splits_backward: bool = False
    microbatches_per_rank: int = 0
    equal_rounds: bool = False

    @property
    def is_multi_stage(self) -> bool:
        """Whether torch's class takes a list of stages rather than one."""
        return self.num_virtual_stages != 1


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("gpipe", "all forwards, then all backwards", pipelining.ScheduleGPipe),
        Schedule(
            "1f1b",
            "each forward is followed by a backward, so that few activations wait",
            pipelining.Schedule1F1B,
            microbatches_per_rank=1,
        ),
        Schedule(
            "interleaved_1f1b",
            "1F1B over several stages a rank: 1/v of the bubble, v times the messages",
            pipelining.ScheduleInterleaved1F1B,
            num_virtual_stages=None,
            equal_rounds=True,
        ),
        Schedule(
            "looped_bfs",
            "GPipe over several stages a rank: each stage runs all micro-batches before the next",
            pipelining.ScheduleLoopedBFS,
            num_virtual_stages=None,
        ),
        Schedule(
            "interleaved_zero_bubble",
            "interleaved 1F1B whose weight gradients fill the bubble",
            pipelining.ScheduleInterleavedZeroBubble,
            num_virtual_stages=None,
            splits_backward=True,
            equal_rounds=True,
        ),
        Schedule(
            "zbv",
            "two stages a rank in a V: no bubble between a rank's first and last action if F = I = W",
            pipelining.ScheduleZBVZeroBubble,
            num_virtual_stages=2,
            placement="v",
            splits_backward=True,
        ),
        Schedule(
            "dualpipev",
            "two stages a rank in a V: forwards paired with backwards, to overlap their messages",
            pipelining.ScheduleDualPipeV,
            num_virtual_stages=2,
            placement="v",
            splits_backward=True,
            microbatches_per_rank=2,
        ),
    )
}


def schedule_named(name: str) -> Schedule:
    """The schedule of that name.

    Raises:
        ValueError: If there is none.
    """
    if name in SCHEDULES:
        return SCHEDULES[name]
    near = difflib.get_close_matches(str(name).lower(), SCHEDULES, n=1, cutoff=0.0)[0]
    raise ValueError(f"schedule={name!r} is unknown. Did you mean {near!r}? There are: {', '.join(SCHEDULES)}.")


def check_num_virtual_stages(schedule: Schedule, num_virtual_stages: int | None = None) -> int:
    """How many stages each rank holds.

    Args:
        schedule: The schedule.
        num_virtual_stages: The user's choice; ``None`` takes the schedule's own number, two where it has a choice.

    Raises:
        ValueError: If the schedule can't have that many.
    """
    fixed = schedule.num_virtual_stages
    if num_virtual_stages is None:
        return fixed or 2
    if fixed is None:
        if num_virtual_stages < 2:
            raise ValueError(
                f"num_virtual_stages={num_virtual_stages} is too few for schedule={schedule.name!r}, which puts at "
                "least 2 stages on each rank. Raise it, or choose a schedule with one: 'gpipe' or '1f1b'."
            )
    elif num_virtual_stages != fixed:
        choices = ", ".join(repr(other.name) for other in SCHEDULES.values() if other.num_virtual_stages is None)
        raise ValueError(
            f"num_virtual_stages={num_virtual_stages} does not fit schedule={schedule.name!r}, which puts {fixed} on "
            f"each rank. Leave it out, or choose a schedule that takes any number: {choices}."
        )
    return num_virtual_stages


def stage_indices(
    schedule: Schedule, rank: int, pipeline_parallel_size: int, num_virtual_stages: int | None = None
) -> list[int]:
    """Which of the model's stages a rank holds, in the model's order.

    Raises:
        ValueError: If the schedule can't have that many virtual stages, or the rank is outside the pipeline.
    """
    p, v = pipeline_parallel_size, check_num_virtual_stages(schedule, num_virtual_stages)
    if not 0 <= rank < p:
        raise ValueError(f"rank {rank} is outside a pipeline of {p} ranks. Ranks count from 0 to {p - 1}.")
    return [rank, 2 * p - 1 - rank] if schedule.placement == "v" else [rank + loop * p for loop in range(v)]


def check_num_microbatches(schedule: Schedule, num_microbatches: int, pipeline_parallel_size: int) -> None:
    """Check that a schedule can run a number of micro-batches.

    Raises:
        ValueError: If it can't, with the rule and the nearest numbers that it can.
    """
    m, p = num_microbatches, pipeline_parallel_size
    if m < 1 or p < 1:
        raise ValueError(f"num_microbatches={m} on pipeline_parallel_size={p}: both must be at least 1.")
    if _suits(schedule, m, p):
        return
    below = next((n for n in range(m - 1, 0, -1) if _suits(schedule, n, p)), None)
    above = next(n for n in count(m + 1) if _suits(schedule, n, p))
    rule = (
        f"runs them in {m // p} rounds ({m} // {p}) of equal length"
        if schedule.equal_rounds
        else f"needs at least {schedule.microbatches_per_rank * p} on {p} ranks"
    )
    raise ValueError(
        f"num_microbatches={m} does not fit schedule={schedule.name!r}, which {rule}. "
        f"Use {f'{below} or ' if below else ''}{above}, or schedule='gpipe', which takes any number."
    )


def check_num_eval_microbatches(num_eval_microbatches: int) -> None:
    """Check how many parts a batch is cut into where there is no backward.

    Raises:
        ValueError: If it is no positive integer.
    """
    m = num_eval_microbatches
    if isinstance(m, bool) or not isinstance(m, int) or m < 1:
        raise ValueError(
            f"num_eval_microbatches={m!r} must be a positive integer: 1 hands whole batches to validation, test and "
            "predict steps, as one process does; more fill the pipeline, and a step sees parts of a batch."
        )


def suitable_num_microbatches(schedule: Schedule, batch_size: int, pipeline_parallel_size: int) -> list[int]:
    """Every number of equal micro-batches that a batch can be cut into and the schedule can run, ascending."""
    return [m for m in range(1, batch_size + 1) if batch_size % m == 0 and _suits(schedule, m, pipeline_parallel_size)]


def default_num_microbatches(schedule: Schedule, batch_size: int, pipeline_parallel_size: int) -> int:
    """The number of micro-batches, if the user gives none.

    Of the numbers that divide the batch and suit the schedule it is the smallest with m >= 4p, and the largest if all
    are below that. So the bubble is small if the batch allows, and micro-batches are no smaller than that takes.

    Args:
        schedule: The schedule.
        batch_size: Samples that one pipeline gets in a batch (one data-parallel rank's share).
        pipeline_parallel_size: Ranks in the pipeline.

    Raises:
        ValueError: If no number divides the batch and suits the schedule.
    """
    suitable = suitable_num_microbatches(schedule, batch_size, pipeline_parallel_size)
    if not suitable:
        needed = max(1, schedule.microbatches_per_rank * pipeline_parallel_size)
        raise ValueError(
            f"A batch of {batch_size} can't be cut into equal micro-batches for schedule={schedule.name!r} on "
            f"{pipeline_parallel_size} ranks, which needs at least {needed}. Make the batch a multiple of {needed}, or "
            "choose schedule='gpipe', which takes any number."
        )
    goal = _MICROBATCHES_PER_RANK * pipeline_parallel_size
    return next((m for m in suitable if m >= goal), suitable[-1])


def _suits(schedule: Schedule, num_microbatches: int, pipeline_parallel_size: int) -> bool:
    rounds = max(1, num_microbatches // pipeline_parallel_size) if schedule.equal_rounds else 1
    enough = num_microbatches >= schedule.microbatches_per_rank * pipeline_parallel_size
    return enough and num_microbatches % rounds == 0
