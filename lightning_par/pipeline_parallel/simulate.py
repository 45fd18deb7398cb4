"""When each action of a grid starts and ends, without a process.

A rank does its actions one after the other. A message leaves when its send is reached, takes ``communication``, and
delays the action that needs it and nothing else: links are never busy, and sends are not waited for. (torch's 1F1B does
wait for a send that it posts together with a receive.) Launches, the loss, the reduction of gradients and the optimizer
take no time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from lightning_par.pipeline_parallel.check import check_grid, dependencies, execution_order
from lightning_par.pipeline_parallel.grid import COMPUTATIONS, Action, Grid

__all__ = ["Costs", "Span", "Timeline", "peak_activations", "simulate"]


@dataclass(frozen=True)
class Costs:
    """Times of one micro-batch on one stage, in any unit: a number, or one for each stage.

    Attributes:
        forward: Time of F.
        backward_input: Time of I, the gradient with respect to a stage's inputs.
        backward_weight: Time of W, the gradient with respect to its weights. A whole backward B takes I + W.
        communication: Time of a message from one rank to another.

    Raises:
        ValueError: If a time is not finite or not above 0 (a message may take 0).
    """

    forward: float | Sequence[float] = 1.0
    backward_input: float | Sequence[float] = 1.0
    backward_weight: float | Sequence[float] = 1.0
    communication: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            times = value if isinstance(value, Sequence) else [value]
            may_be_zero = name == "communication"
            if not all(0 < time < math.inf or (may_be_zero and time == 0) for time in times):
                raise ValueError(f"{name}={value} must be a finite time, {'not below' if may_be_zero else 'above'} 0.")

    def by_kind(self, num_stages: int) -> dict[str, list[float]]:
        """Time of each kind of computation by stage.

        Raises:
            ValueError: If times are given by stage, but not for every stage.
        """
        times = {}
        for name, kind in (("forward", "F"), ("backward_input", "I"), ("backward_weight", "W")):
            value = getattr(self, name)
            times[kind] = list(value) if isinstance(value, Sequence) else [value] * num_stages
            if len(times[kind]) != num_stages:
                raise ValueError(
                    f"{name} has {len(times[kind])} times for {num_stages} stages. Give one for each, or one number."
                )
        return {**times, "B": [i + w for i, w in zip(times["I"], times["W"], strict=True)]}


class Span(NamedTuple):
    """A computation and the time it takes, from ``start`` to ``end``."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each rank computes what.

    Attributes:
        grid: The grid that was simulated.
        ranks: Computations of each rank, in order.
    """

    grid: Grid
    ranks: tuple[tuple[Span, ...], ...]

    @cached_property
    def total_time(self) -> float:
        """Time from the first action of any rank to the last."""
        return max(spans[-1].end for spans in self.ranks)

    @cached_property
    def busy_time(self) -> list[float]:
        """Time that each rank computes."""
        return [sum(span.end - span.start for span in spans) for spans in self.ranks]

    @property
    def bubble_time(self) -> list[float]:
        """Time that each rank idles while any rank works."""
        return [self.total_time - busy for busy in self.busy_time]

    @property
    def inner_bubble_time(self) -> list[float]:
        """Time that each rank idles between its own first action and its own last."""
        return [spans[-1].end - spans[0].start - busy for spans, busy in zip(self.ranks, self.busy_time, strict=True)]

    @property
    def bubble_share(self) -> float:
        """Share of all ranks' time that is bubble, from 0 to 1."""
        return 1 - sum(self.busy_time) / (self.total_time * len(self.ranks)) if self.total_time else 0.0


def simulate(grid: Grid, costs: Costs | None = None) -> Timeline:
    """Time every action of a grid.

    Args:
        grid: What each rank does.
        costs: How long it takes; all computations 1 and messages 0 by default.

    Raises:
        ValueError: If the grid can't run, or the costs do not fit its stages.
    """
    check_grid(grid)
    costs = costs or Costs()
    times, needs = costs.by_kind(grid.num_stages), dependencies(grid)
    clocks = [0.0] * len(grid.ranks)
    sent: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in grid.ranks]
    for rank, action in execution_order(grid):
        if action.kind in COMPUTATIONS:
            arrivals = (sent[need] + costs.communication for need in needs[action] if need in sent)
            start = max(clocks[rank], *arrivals, 0.0)
            clocks[rank] = start + times[action.kind][action.stage]
            spans[rank].append(Span(action, start, clocks[rank]))
        elif action.kind.startswith("SEND"):
            sent[action] = clocks[rank]
    return Timeline(grid, tuple(map(tuple, spans)))


def peak_activations(grid: Grid) -> list[int]:
    """The most activations that each rank keeps at once, in stages times micro-batches.

    One is kept from the forward of a micro-batch on a stage to the end of its backward, which is W where the backward
    is split.
    """
    changes = {"F": 1, "B": -1, "W": -1}
    peaks = []
    for actions in grid.ranks:
        kept = peak = 0
        for action in actions:
            kept += changes.get(action.kind, 0)
            peak = max(peak, kept)
        peaks.append(peak)
    return peaks
