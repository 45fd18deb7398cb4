"""Running a batch through the stages of this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_par.pipeline_parallel.link import GradientSteering, LinkedStage
from lightning_par.pipeline_parallel.outputs import loss_of
from lightning_par.pipeline_parallel.schedules import Schedule, check_num_microbatches
from lightning_par.step import Step

__all__ = ["Call", "Pipeline"]

_MAX_SHAPES = 64
"""Shapes of batches whose links are kept."""


@dataclass(frozen=True)
class Call:
    """One micro-batch of a step, and what it is called with."""

    method: Step
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


class Pipeline:
    """The stages of this rank and their schedule.

    Args:
        stages: This rank's stages, by their index; their parameters get the gradients.
        run: Runs one micro-batch of a stage: (stage index, received hidden state or none, micro-batch number, call).
        num_stages: Stages in the whole pipeline.
        schedule: The order of micro-batches in training.
        group: The ``pp`` axis.
        device: This rank's device.
        steering: When each local stage's gradients are reduced, by its index.
        recomputes: Whether stages compute activations again in their backwards.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        run: Callable[[int, tuple[Tensor, ...], int, Call], Any],
        num_stages: int,
        schedule: Schedule,
        group: dist.ProcessGroup,
        device: torch.device,
        steering: Mapping[int, GradientSteering],
        recomputes: bool = False,
    ) -> None:
        self._stages = stages
        self._num_stages = num_stages
        self._schedule = schedule
        self._group = group
        self._device = device
        self._steering = steering
        self._recomputes = recomputes
        self._run = run
        self._rank_of_stage = ranks_of_stages(schedule, num_stages, group.size())
        self._links: dict[Any, list[LinkedStage]] = {}
        self._runners: dict[Any, Any] = {}
        self._calls: Sequence[Call] = ()
        self._outputs: dict[int, Any] = {}
        self._loss_scale = 1.0
        self._weigh: Callable[[Any], float] = lambda output: 1.0

    @property
    def holds_last(self) -> bool:
        """Whether this rank holds the last stage."""
        return self._num_stages - 1 in self._stages

    @property
    def last_rank(self) -> int:
        """Rank in the group that holds the last stage."""
        return self._rank_of_stage[-1]

    def train(self, calls: Sequence[Call], shape: Any, loss_scale: float, weigh: Callable[[Any], float]) -> list[Any]:
        """Forward and backward of one batch. A collective of the group.

        Args:
            calls: The micro-batches.
            shape: Whatever tells batches apart whose hidden states differ in shape.
            loss_scale: Factor of each micro-batch's loss before its backward.
            weigh: A further one, by what the step returned for it.

        Returns:
            What the user's step returned for each micro-batch, where the last stage is; else an empty list. Tensors are
            detached.
        """
        self._begin(calls)
        self._loss_scale = loss_scale
        self._weigh = weigh
        links = self._links_for(shape, len(calls), backward=True)
        if self._suits(len(calls)):
            self._run_schedule(links, shape)
        else:
            self._run_all_forwards(links)
            self._run_all_backwards(links)
        return self._finish()

    def evaluate(self, calls: Sequence[Call], shape: Any) -> list[Any]:
        """Forward of one batch; arguments and result as in :meth:`train`."""
        self._begin(calls)
        self._run_all_forwards(self._links_for(shape, len(calls), backward=False))
        return self._finish()

    def forget_shapes(self) -> None:
        """After a batch that failed: what is known of its hidden states may be wrong."""
        self._links.clear()
        self._runners.clear()

    def _begin(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._outputs = {}

    def _finish(self) -> list[Any]:
        self._calls = ()
        outputs, self._outputs = self._outputs, {}
        return [outputs[number] for number in sorted(outputs)]

    def _suits(self, num_microbatches: int) -> bool:
        """Whether the schedule takes this many: the last batch of an epoch may be too small for it."""
        try:
            check_num_microbatches(self._schedule, num_microbatches, self._group.size())
        except ValueError:
            return False
        return True

    def _links_for(self, shape: Any, num_microbatches: int, backward: bool) -> list[LinkedStage]:
        """The links for batches of this shape, in the order of the model."""
        key = (shape, num_microbatches, backward)
        if key not in self._links:
            if len(self._links) >= _MAX_SHAPES:
                self._links.pop(oldest := next(iter(self._links)))
                self._runners.pop(oldest, None)
            self._links[key] = [self._link(index) for index in sorted(self._stages)]
        links = self._links[key]
        for link in links:
            link.has_backward = backward
            link.clear_runtime_states()
            link.chunks = num_microbatches
        return links

    def _link(self, index: int) -> LinkedStage:
        return LinkedStage(
            self._stages[index],
            self._run_stage,
            index,
            self._num_stages,
            self._device,
            self._group,
            self._rank_of_stage,
            self._steering[index],
            self._recomputes,
        )

    def _run_stage(self, index: int, hidden: tuple[Tensor, ...], microbatch: int) -> Any:
        output = self._run(index, hidden, microbatch, self._calls[microbatch])
        if index < self._num_stages - 1:
            return output
        if not torch.is_grad_enabled():
            self._outputs[microbatch] = output
            return ()
        loss = loss_of(output).reshape(())
        self._outputs[microbatch] = _detached({**output, "loss": loss} if isinstance(output, Mapping) else loss)
        return loss * self._weigh(output)

    def _run_schedule(self, links: list[LinkedStage], shape: Any) -> None:
        key = (shape, len(self._calls), True)
        if key not in self._runners:
            stages = links if self._schedule.is_multi_stage else links[0]
            self._runners[key] = self._schedule.torch_class(
                stages, len(self._calls), loss_fn=lambda loss, _: loss * self._loss_scale, scale_grads=False
            )
        numbers = range(len(self._calls))
        self._runners[key]._step_microbatches(
            arg_mbs=[()] * len(numbers),
            kwarg_mbs=[{"microbatch": number} for number in numbers],
            target_mbs=[None] * len(numbers),
            return_outputs=False,
        )

    def _run_all_forwards(self, links: list[LinkedStage]) -> None:
        """Stage by stage, all micro-batches: for evaluation, and for batches too small for the schedule."""
        sends = []
        following = [*links[1:], None]
        for link, after in zip(links, following, strict=True):
            for number in range(len(self._calls)):
                if link.stage_index and link.previous_rank != link.group_rank:
                    _wait(_start(link.get_fwd_recv_ops(number)))
                output = link.forward_one_chunk(number, (), {"microbatch": number}, save_forward_output=False)
                if after is not None and after.stage_index == link.stage_index + 1:
                    after.set_local_fwd_input(output, number)
                elif not link.is_last:
                    sends += _start(link.get_fwd_send_ops(number))
                if not link.has_backward:
                    link.fwd_cache.pop(number)
        _wait(sends)

    def _run_all_backwards(self, links: list[LinkedStage]) -> None:
        sends = []
        preceding = [None, *links[:-1]]
        for link, before in zip(reversed(links), reversed(preceding), strict=True):
            for number in range(len(self._calls)):
                if not link.is_last and link.next_rank != link.group_rank:
                    _wait(_start(link.get_bwd_recv_ops(number)))
                loss = link.fwd_cache[number][0][0] * self._loss_scale if link.is_last else None
                link.backward_one_chunk(number, loss=loss, last_backward=number == len(self._calls) - 1)
                if before is not None and before.stage_index == link.stage_index - 1:
                    before.set_local_bwd_input(link.get_local_bwd_output(number), number)
                else:
                    sends += _start(link.get_bwd_send_ops(number))
            link.perform_reduce_grad(1)
        _wait(sends)


def ranks_of_stages(schedule: Schedule, num_stages: int, num_ranks: int) -> list[int]:
    """The pipeline rank that holds each stage."""
    if schedule.placement == "v":
        return [min(index, num_stages - 1 - index) for index in range(num_stages)]
    return [index % num_ranks for index in range(num_stages)]


def _detached(output: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), output)


def _start(operations: list[dist.P2POp]) -> list[Any]:
    return [
        operation.op(
            operation.tensor,
            group=operation.group,
            **{"group_dst" if operation.op is dist.isend else "group_src": operation.group_peer},
        )
        for operation in operations
    ]


def _wait(works: list[Any]) -> None:
    for work in works:
        work.wait()
