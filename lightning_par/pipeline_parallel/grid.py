"""What each rank of a pipeline does, in order: the action grid of a schedule, as plain data.

The grid is written down while torch's own schedule runs: it is given stages that, instead of computing, note what they
are asked to do. So what is printed, checked and simulated is what trains, messages included, and no process group is
needed. (torch publishes a ``pipeline_order`` too, but the loops of its single-stage schedules do not read it, and in
torch 2.13 that of ``Schedule1F1B`` starts the last rank at micro-batch 1.)

Actions are written as torch writes them, stage first: ``2F0`` is the forward of micro-batch 0 on stage 2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from lightning_par.pipeline_parallel.schedules import (
    Schedule,
    check_num_microbatches,
    check_num_virtual_stages,
    stage_indices,
)

__all__ = ["COMPUTATIONS", "Action", "Grid", "build_grid"]

COMPUTATIONS = {"F": "forward", "B": "backward", "I": "gradient of inputs", "W": "gradient of weights"}
"""The kinds of action that compute. ``B`` is ``I`` and ``W`` in one."""


class Action(NamedTuple):
    """One thing a rank does.

    Attributes:
        stage: Which stage, counted over the whole model.
        kind: A key of ``COMPUTATIONS``; or, between ranks, ``SEND_F`` and ``RECV_F`` (a stage's output to the next
            stage's input), ``SEND_B`` and ``RECV_B`` (the gradient back). Stages of one rank hand over directly.
        microbatch: Which micro-batch.
    """

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class Grid:
    """The actions of every rank, in order.

    Attributes:
        ranks: Actions by rank.
        num_stages: Stages of the whole model.
        num_microbatches: Micro-batches of one step.
    """

    ranks: tuple[tuple[Action, ...], ...]
    num_stages: int
    num_microbatches: int

    @cached_property
    def rank_of_stage(self) -> dict[int, int]:
        """Which rank computes each stage."""
        return {action.stage: rank for rank, actions in enumerate(self.ranks) for action in actions}

    def stages_of(self, rank: int) -> list[int]:
        """The stages a rank holds, ascending."""
        return sorted(stage for stage, holder in self.rank_of_stage.items() if holder == rank)


def build_grid(
    schedule: Schedule, pipeline_parallel_size: int, num_microbatches: int, num_virtual_stages: int | None = None
) -> Grid:
    """Run a schedule of torch on stages that compute nothing, and note what it does on each rank.

    Args:
        schedule: The schedule.
        pipeline_parallel_size: Ranks in the pipeline, p.
        num_microbatches: Micro-batches in a step, m.
        num_virtual_stages: Stages on each rank; ``None`` takes the schedule's own number.

    Returns:
        Forwards, backwards, sends and receives of each rank, in order. An action that torch overlaps (DualPipeV's
        forward with backward) is noted as its parts, one after the other, which is how torch runs it by default.

    Raises:
        ValueError: If the schedule can't run with these numbers.
    """
    check_num_microbatches(schedule, num_microbatches, pipeline_parallel_size)
    num_stages = pipeline_parallel_size * check_num_virtual_stages(schedule, num_virtual_stages)
    ranks = []
    for rank in range(pipeline_parallel_size):
        actions: list[Action] = []
        stages = [
            _NotingStage(stage, num_stages, rank, pipeline_parallel_size, actions)
            for stage in stage_indices(schedule, rank, pipeline_parallel_size, num_virtual_stages)
        ]
        runner = schedule.torch_class(
            stages if schedule.is_multi_stage else stages[0], num_microbatches, loss_fn=lambda output, target: None
        )
        with torch.enable_grad():  # torch refuses a training step without
            runner.step(target=torch.empty(num_microbatches), return_outputs=False)
        ranks.append(tuple(actions))
    return Grid(tuple(ranks), num_stages, num_microbatches)


class _NotingStage:
    """Stands in for torch's pipeline stage and notes what a schedule asks of it."""

    submod = None
    device = torch.device("cpu")
    args_recv_info: dict[int, tuple[Any, ...]] = {0: ()}
    act_send_info: dict[int, list[int]] = {}

    def __init__(self, stage: int, num_stages: int, rank: int, num_ranks: int, actions: list[Action]) -> None:
        self.stage_index, self.num_stages = stage, num_stages
        self.group_rank, self.group_size = rank, num_ranks
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self._actions = actions

    def _note(self, kind: str, microbatch: int) -> list[Any]:
        self._actions.append(Action(self.stage_index, kind, microbatch))
        return []  # where torch asked for messages to post: none

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self._note("F", microbatch)

    def backward_one_chunk(self, microbatch: int, full_backward: bool = True, **kwargs: Any) -> None:
        self._note("B" if full_backward else "I", microbatch)

    def backward_weight_one_chunk(self, microbatch: int, **kwargs: Any) -> None:
        self._note("W", microbatch)

    def get_fwd_recv_ops(self, microbatch: int) -> list[Any]:
        return [] if self.is_first else self._note("RECV_F", microbatch)

    def get_fwd_send_ops(self, microbatch: int) -> list[Any]:
        return [] if self.is_last else self._note("SEND_F", microbatch)

    def get_bwd_recv_ops(self, microbatch: int) -> list[Any]:
        return [] if self.is_last else self._note("RECV_B", microbatch)

    def get_bwd_send_ops(self, microbatch: int) -> list[Any]:
        return [] if self.is_first else self._note("SEND_B", microbatch)

    def __getattr__(self, name: str) -> Callable[..., tuple[()]]:
        # Whatever else torch calls prepares buffers and process groups, of which there are none.
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: ()
