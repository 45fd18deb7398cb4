"""The timeline of a pipeline schedule as boxes for a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_par.pipeline_parallel.grid import COMPUTATIONS, build_grid
from lightning_par.pipeline_parallel.schedules import SCHEDULES
from lightning_par.pipeline_parallel.simulate import Costs, Timeline, simulate
from lightning_par.planner.plan import Evaluation

__all__ = ["Gantt", "GanttBox", "gantt_of"]

WIDTH, ROW, GAP = 1000.0, 24.0, 4.0
_NUMBERED = 15.0
"""Least width of a box with a number in it."""
_MOST_BOXES = 6000
"""Beyond, only the step's first micro-batches are drawn: a page of megabytes would show nothing but stripes."""


@dataclass(frozen=True)
class GanttBox:
    """One computation: place and size in the picture, its kind, number, and how far its stage is tinted (0 to 1)."""

    x: float
    y: float
    width: float
    kind: str
    label: str
    tint: float


@dataclass(frozen=True)
class Gantt:
    """A picture of a schedule.

    Attributes:
        boxes: All computations.
        num_ranks: Rows.
        kinds: Letter -> what it means, of those that occur.
        bubble_share: Share of the ranks' time that is bubble.
        total: Seconds from the left to the right.
        note: What to know of how it was drawn.
    """

    boxes: Sequence[GanttBox]
    num_ranks: int
    kinds: dict[str, str]
    bubble_share: float
    total: float
    note: str = ""

    width, row = WIDTH, ROW

    @property
    def height(self) -> float:
        """Of the picture."""
        return self.num_ranks * (ROW + GAP) - GAP

    def top(self, rank: int) -> float:
        """Of a rank's row."""
        return rank * (ROW + GAP)


def gantt_of(evaluation: Evaluation) -> Gantt | None:
    """The recommended schedule under its predicted times; ``None`` without a pipeline."""
    candidate = evaluation.candidate
    p, v, asked = candidate.layout.pp, candidate.num_virtual_stages, candidate.num_microbatches
    if p == 1:
        return None
    m = asked
    while 2 * p * m * v > _MOST_BOXES and m % 2 == 0 and m > 2 * p:
        m //= 2
    schedule = SCHEDULES[candidate.schedule]
    grid = build_grid(schedule, p, m, v)
    times = [_time_of(evaluation.time.stage_times, grid.rank_of_stage[stage], p, v) for stage in range(grid.num_stages)]
    halves = [backward / 2 for _, backward in times]
    timeline = simulate(grid, Costs([forward for forward, _ in times], halves, halves))
    note = f"Drawn with {m} of the step's {asked} micro-batches." if m < asked else ""
    return _boxes(timeline, note)


def _time_of(times: Sequence[tuple[float, float]], rank: int, p: int, v: int) -> tuple[float, float]:
    """Of one stage. A step's prediction has times of the first rank, of one in the middle and of the last."""
    forward, backward = times[0] if rank == 0 else times[-1] if rank == p - 1 else times[len(times) // 2]
    return forward / v, backward / v


def _boxes(timeline: Timeline, note: str) -> Gantt:
    total, boxes = timeline.total_time, []
    for rank, spans in enumerate(timeline.ranks):
        stages = timeline.grid.stages_of(rank)
        for (stage, kind, microbatch), start, end in spans:
            width = WIDTH * (end - start) / total
            label = str(microbatch) if width >= _NUMBERED else ""
            tint = stages.index(stage) / max(1, len(stages) - 1)
            boxes.append(GanttBox(WIDTH * start / total, rank * (ROW + GAP), width, kind, label, tint))
    present = {box.kind for box in boxes}
    kinds = {kind: text for kind, text in COMPUTATIONS.items() if kind in present}
    return Gantt(boxes, len(timeline.ranks), kinds, timeline.bubble_share, total, note)
