"""What the papers say of bubbles and activations, to stand beside what the simulator finds.

Figures are those of one stage, so that most need no v. A rank's bubble is the time it idles between the first action of
any rank and the last. Where torch's schedules part from the papers there is no formula here:

* Interleaved with m < p: each loop waits p - m turns more than the paper's (p-1)(f+i+w).
* ``interleaved_zero_bubble`` is the paper's ZB-H1, (p-1)(f+i-w), while w <= min(f, i). In general torch's fixed order
  idles (p-1) max(f, i, f+i-w), since the first forward and the last gradient must still go through all ranks.
* ``zbv`` idles not at all between a rank's own first action and its own last, as the paper has it, but rank r starts
  r forwards late. Both hold for f = i = w and m >= 2p-1.
* ``dualpipev`` is DualPipe's table, (p/2-1)(F&B + B - 3W), for 2p stages on p ranks. Its pairs are not overlapped here,
  so that F&B = f+i+w, and it is reached for f = i = w.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_par.pipeline_parallel.schedules import Schedule

__all__ = ["Case", "Published", "published"]


@dataclass(frozen=True)
class Case:
    """What the formulas take.

    Attributes:
        p: Pipeline ranks.
        m: Micro-batches.
        v: Stages on each rank.
        f: Time of one stage's forward of one micro-batch.
        i: Time of its gradient of inputs.
        w: Time of its gradient of weights.
    """

    p: int
    m: int
    v: int
    f: float = 1.0
    i: float = 1.0
    w: float = 1.0

    @property
    def per_round(self) -> int:
        """Micro-batches that torch sends through one stage before the next; the papers' p if p divides m."""
        return self.m // max(1, self.m // self.p)


@dataclass(frozen=True)
class Published:
    """Formulas of one schedule.

    Attributes:
        paper: Where they are from, on arXiv.
        bubble: Idle time of each rank, in the unit of the times.
        peak_activations: Most activations that rank 0 keeps at once, in stages times micro-batches.
        holds: Whether torch's schedule keeps to them.
    """

    paper: str
    bubble: Callable[[Case], float]
    peak_activations: Callable[[Case], int]
    holds: Callable[[Case], bool] = lambda c: True


_PUBLISHED = {
    "gpipe": Published("1811.06965", lambda c: (c.p - 1) * (c.f + c.i + c.w), lambda c: c.m),
    "1f1b": Published("2104.04473", lambda c: (c.p - 1) * (c.f + c.i + c.w), lambda c: min(c.m, c.p)),
    "interleaved_1f1b": Published(
        "2104.04473",
        lambda c: (c.p - 1) * (c.f + c.i + c.w),
        lambda c: min(c.m * c.v, (c.v - 1) * c.per_round + 2 * c.p - 1),
        lambda c: c.m >= c.p,
    ),
    "looped_bfs": Published(
        "2211.05953", lambda c: (c.p - 1) * (c.f + c.i + c.w), lambda c: c.m * c.v, lambda c: c.m >= c.p
    ),
    "interleaved_zero_bubble": Published(
        "2401.10241",
        lambda c: (c.p - 1) * (c.f + c.i - c.w),
        lambda c: (c.v - 1) * c.per_round + c.p,
        lambda c: c.m >= c.p and c.w <= min(c.f, c.i),
    ),
    "zbv": Published(
        "2401.10241",
        lambda c: (c.p - 1) * c.f,
        lambda c: 2 * c.p,
        lambda c: c.f == c.i == c.w and c.m >= 2 * c.p - 1,
    ),
    "dualpipev": Published(
        "2412.19437",
        lambda c: (c.p - 1) * (c.f + 2 * c.i - c.w),
        lambda c: 2 * c.p + 1,
        lambda c: c.f == c.i == c.w,
    ),
}


def published(schedule: Schedule, case: Case) -> Published | None:
    """The published formulas of a schedule; ``None`` where they do not hold for torch's."""
    formulas = _PUBLISHED[schedule.name]
    return formulas if formulas.holds(case) else None
