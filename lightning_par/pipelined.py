"""The engine of a module that is split into pipeline stages.

The user's step is the stage: every stage calls all of it on each micro-batch, enters late, at its first block, and
leaves early, after its last (:mod:`lightning_par.pipeline_parallel.stage`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_par.data_parallel import defer_reduction, reduce_now, set_last_micro_batch
from lightning_par.engine import ParallelEngine
from lightning_par.layout import ParallelLayout
from lightning_par.loss_weights import LossWeights
from lightning_par.pipeline_parallel.link import GradientSteering
from lightning_par.pipeline_parallel.mean_check import LossMismatch, compare_losses
from lightning_par.pipeline_parallel.microbatches import batch_size_of, num_parts, split
from lightning_par.pipeline_parallel.outputs import loss_of, num_samples_of
from lightning_par.pipeline_parallel.placement import build_stages
from lightning_par.pipeline_parallel.runtime import Call, Pipeline
from lightning_par.pipeline_parallel.same_batch import check_same_batch
from lightning_par.pipeline_parallel.schedules import (
    Schedule,
    check_num_eval_microbatches,
    check_num_microbatches,
    check_num_virtual_stages,
    default_num_microbatches,
    schedule_named,
    stage_indices,
)
from lightning_par.pipeline_parallel.shared import Shared, SharedParameters
from lightning_par.pipeline_parallel.split import block_costs, split_by_hand, split_evenly_by_cost
from lightning_par.pipeline_parallel.trunk import find_trunk
from lightning_par.random_state import share_random_state
from lightning_par.step import Step, step_key
from lightning_par.tree import Tree

__all__ = ["Context", "PipelineOptions", "PipelinedEngine"]

Context: TypeAlias = Callable[[bool], AbstractContextManager[Any]]
"""Entered around each forward of a stage; told whether it is the last stage, where the step runs to its end."""

_VERIFIED_BATCHES = 3
"""How many first batches are checked for what a pipeline can't do."""


@dataclass(frozen=True)
class PipelineOptions:
    """How a module is piped.

    Attributes:
        schedule: Name of the schedule.
        num_microbatches: Parts that a batch is cut into; ``None`` for the default rule.
        num_virtual_stages: Stages a rank holds; ``None`` for the schedule's own.
        num_eval_microbatches: Parts that a batch is cut into in evaluation.
        blocks: Dotted name of the list of blocks, ``None`` to find it.
        split: Number of blocks of each stage, ``None`` to balance their cost.
        first: Names of modules that belong to the first stage whatever their order.
        last: Names of modules that belong to the last.
    """

    schedule: str = "1f1b"
    num_microbatches: int | None = None
    num_virtual_stages: int | None = None
    num_eval_microbatches: int = 1
    blocks: str | None = None
    split: Sequence[int] | None = None
    first: Sequence[str] = ()
    last: Sequence[str] = ()

    def check(self, pipeline_parallel_size: int | None = None) -> None:
        """Check what can be checked without a module.

        Args:
            pipeline_parallel_size: Number of ranks, if known.

        Raises:
            ValueError: If the schedule is unknown or does not take these numbers, or one is below 1.
        """
        check_num_eval_microbatches(self.num_eval_microbatches)
        schedule = schedule_named(self.schedule)
        check_num_virtual_stages(schedule, self.num_virtual_stages)
        if self.num_microbatches is not None and pipeline_parallel_size is not None:
            check_num_microbatches(schedule, self.num_microbatches, pipeline_parallel_size)


class PipelinedEngine(ParallelEngine):
    """A module laid out over the ranks of a mesh, with a pipeline axis.

    Args:
        module: The user's module.
        layout: The degrees.
        mesh: The mesh made by the layout.
        options: How it is piped.
        **kwargs: As for :class:`~lightning_par.engine.ParallelEngine`.

    Raises:
        ValueError: If the module can't be split like that.
    """

    def __init__(
        self, module: nn.Module, layout: ParallelLayout, mesh: DeviceMesh, *, options: PipelineOptions, **kwargs: Any
    ) -> None:
        self.options = options
        self.schedule: Schedule = schedule_named(options.schedule)
        self._group = mesh.get_group("pp")
        self._num_stages = layout.pp * check_num_virtual_stages(self.schedule, options.num_virtual_stages)
        self._local = stage_indices(self.schedule, self._group.rank(), layout.pp, options.num_virtual_stages)
        first_names: dict[nn.Parameter, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            first_names.setdefault(parameter, name)
        self.first_name_of = {
            name: first_names[parameter] for name, parameter in module.named_parameters(remove_duplicate=False)
        }
        self.state_names = list(module.state_dict())
        if self.schedule.splits_backward:
            # Gradients that come in halves pass by the hooks that see use; and weights must stay for their half.
            kwargs["find_unused_parameters"] = False
            kwargs["zero_stage"] = min(kwargs.get("zero_stage", 0), 2)
        super().__init__(module, layout, mesh, **kwargs)
        self._tree_of = dict(zip(self._local, self._trees, strict=True))
        self._pipeline = Pipeline(
            {index: tree.step_module for index, tree in self._tree_of.items()},
            self._run_stage,
            self._num_stages,
            self.schedule,
            self._group,
            self.device,
            {index: _Steering(self, tree) for index, tree in self._tree_of.items()},
            recomputes=self._settings.activation_checkpointing is not False,
        )
        self._parameters = self.parameters()
        self._fresh: list[Tensor | None] = []
        holders = self._find_holders()
        self.owner_of_state = {name: ranks[0] for name, ranks in self._gather_names(list(module.state_dict())).items()}
        self._shared = SharedParameters(holders, self._group, self.device)
        self._shared.equalize()
        self.norm_scope = replace(self.norm_scope, group=self._group, counted_elsewhere=self._shared.owned_elsewhere())
        self._num_verified: dict[object, int] = {}
        self._in_window = False
        self._error: Exception | None = None
        self._is_verifying = False
        share_random_state(self._group, self.device)
        share_random_state(mesh.get_group("tp"), self.device)
        self._seeds = random.Random(int(torch.randint(2**62, ())))
        self._batch_seed = 0
        self._context: Context = nullcontext  # any until the first batch
        self._received: dict[int, Tensor] = {}
        self._mismatch: LossMismatch | None = None

    def _split(self) -> list[Any]:
        options = self.options
        trunk = find_trunk(self.module, options.blocks)
        if options.split is None:
            self.ranges = split_evenly_by_cost(
                *block_costs(self.module, trunk, options.first, options.last), self._num_stages
            )
        else:
            self.ranges = split_by_hand(options.split, trunk.num_blocks, self._num_stages)
        self.trunk = trunk
        self._staged = build_stages(self.module, trunk, self.ranges, self._local, options.first, options.last)
        return list(self._staged.stages)

    def blocks_of(self, pipeline_rank: int) -> str:
        """Which stages and blocks a rank of the pipeline holds, in words."""
        stages = stage_indices(self.schedule, pipeline_rank, self.layout.pp, self.options.num_virtual_stages)
        held = [f"{self.ranges[stage].start}-{self.ranges[stage].stop - 1}" for stage in stages]
        return f"stage {', '.join(map(str, stages))}: {self.trunk.name} {', '.join(held)}"

    # Steps

    @property
    def holds_last(self) -> bool:
        """Whether this rank holds the last stage, where the step's result is."""
        return self._pipeline.holds_last

    @property
    def last_rank(self) -> int:
        """Rank in the pipeline that holds the last stage."""
        return self._pipeline.last_rank

    def from_last(self, content: Any) -> Any:
        """The last stage's picklable object, on every rank of the pipeline. A collective."""
        boxed = [content]
        dist.broadcast_object_list(boxed, group_src=self._pipeline.last_rank, group=self._group, device=self.device)
        return boxed[0]

    def train_batch(
        self,
        args: tuple[Any, ...],
        loss_scale: float,
        context: Context,
        step: Step = "training_step",
        weights: LossWeights | None = None,
    ) -> list[Any]:
        """Forward and backward of a batch; :meth:`hand_over_gradients` then gives parameters their gradients.

        Args:
            args: Arguments of the step, the batch first.
            loss_scale: Factor of the batch's loss before its backward.
            context: Entered around each forward of a stage.
            step: What to run.
            weights: What losses that say their number of samples are weighted by; ``None`` for none.

        Returns:
            What the step returned for each micro-batch, on the ranks with the last stage; else an empty list.
        """
        calls = _calls(step, args, {}, self._num_train_parts(args[0]))
        earlier = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        if weights is not None:
            weights.guess(batch_size_of(args[0]))

        def weigh(output: Any) -> float:
            num_samples = None if weights is None else num_samples_of(output)
            return 1 / len(calls) if weights is None or num_samples is None else weights.factor(num_samples)

        with self._steps(step, args[0], context):
            outputs = self._pipeline.train(calls, self._shape_of(calls), loss_scale, weigh)
            if weights is not None and self._received and self._error is None and len(calls) > 1:
                self._mismatch = self._compare_losses(calls, Call(step, args, {}))
        self._fresh = [parameter.grad for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, earlier, strict=True):
            parameter.grad = gradient
        return outputs

    def _compare_losses(self, calls: Sequence[Call], whole: Call) -> LossMismatch | None:
        """On the last stage, of one of the first batches: is its loss the mean over micro-batches?"""
        tree = self._tree_of[self._num_stages - 1]
        hidden = [self._received[number] for number in range(len(calls))]
        tree.step_module.verify, tree.step_module.on_entry = False, None

        def run(received: tuple[Tensor, ...], call: Call) -> Any:
            return tree(*received, method=call.method, args=call.args, kwargs=call.kwargs)

        try:
            with self._context(False):  # logs and counts nothing
                return compare_losses(run, calls, whole, hidden, {self.module, tree.module})
        finally:
            tree.release()  # the module shows its shards again

    @property
    def whole_in_step(self) -> tuple[str, ...]:
        """As in other engines; a split backward keeps all until its last half."""
        shards = self._settings.policy.shards
        return ("parameters", "gradients") if shards and self.schedule.splits_backward else super().whole_in_step

    def take_mismatch(self) -> LossMismatch | None:
        """On the last stage: the losses of the last batch, if it was among the first and they do not fit."""
        mismatch, self._mismatch = self._mismatch, None
        return mismatch

    def evaluate_batch(
        self, method: Step, args: tuple[Any, ...], kwargs: Mapping[str, Any], context: Context
    ) -> list[Any]:
        """Forward of a batch, by default as one micro-batch; arguments and result as in :meth:`train_batch`."""
        calls = _calls(method, args, kwargs, self._num_eval_parts(args[0]))
        with self._steps(method, args[0], context):
            return self._pipeline.evaluate(calls, self._shape_of(calls))

    def take_gradients(self) -> list[Tensor | None]:
        """The last batch's gradients, for :meth:`hand_over_gradients` at any later time."""
        fresh, self._fresh = self._fresh, []
        return fresh

    @torch.no_grad()
    def hand_over_gradients(self, gradients: Sequence[Tensor | None] | None = None, factor: float = 1.0) -> None:
        """Add a batch's gradients to those the parameters have.

        Args:
            gradients: What :meth:`take_gradients` gave, ``None`` for the last batch's.
            factor: By which they are multiplied first.
        """
        for parameter, fresh in zip(self._parameters, self._given(gradients), strict=True):
            if fresh is None:
                continue
            if factor != 1.0:
                fresh = fresh * factor
            parameter.grad = fresh if parameter.grad is None else parameter.grad.add_(fresh)

    def _given(self, gradients: Sequence[Tensor | None] | None) -> Sequence[Tensor | None]:
        return self.take_gradients() if gradients is None else gradients

    @property
    def sums_window(self) -> bool:
        """Whether the schedules of a window leave their gradients to its last, which reduces them all together."""
        policy = self._settings.policy
        waits = not policy.reduces_each_micro_batch or self.layout.dp_replicate > 1
        return self._settings.composes_units and waits and not self.schedule.splits_backward

    def before_backward(self) -> None:
        """Tell the engine that a backward begins."""
        if not self._in_window:
            self._in_window = True
            self._shared.set_aside()
        super().before_backward()

    def _finish_gradients(self) -> None:
        super()._finish_gradients()
        self._shared.sum_gradients()
        self._in_window = False

    def share_from_last(self, make: Callable[[], Any]) -> Any:
        """What ``make`` returns on the last stage, on every rank of the pipeline. A collective.

        Raises:
            Exception: On every rank, if it raises.
        """
        content: Any = None
        if self.holds_last:
            try:
                content = _to(make(), torch.device("cpu"))
            except Exception as error:  # the other ranks wait for what comes from here
                content = error
        content = self.from_last(content)
        if isinstance(content, Exception):
            raise content
        return _to(content, self.device)

    def _num_train_parts(self, batch: Any) -> int:
        policy = self._settings.policy
        batch_size = self._divisible_size(
            batch_size_of(batch), meets=policy.reduces_each_micro_batch or policy.frees_after_use
        )
        wanted = self.options.num_microbatches
        if wanted is not None:
            return num_parts(batch_size, wanted)
        try:
            return default_num_microbatches(self.schedule, batch_size, self.layout.pp)
        except ValueError:  # a last batch too small for the schedule runs all forwards, then all backwards
            return batch_size

    def _num_eval_parts(self, batch: Any) -> int:
        wanted = self.options.num_eval_microbatches
        if wanted == 1:
            return 1
        batch_size = self._divisible_size(batch_size_of(batch), meets=self._settings.policy.frees_after_use)
        return num_parts(batch_size, wanted)

    def _divisible_size(self, batch_size: int, meets: bool) -> int:
        """A number whose divisors divide this rank's batch; and all replicas', if they meet in every micro-batch."""
        group = self.mesh.get_group("dp")
        if group.size() == 1 or not meets:
            return batch_size
        sizes = torch.zeros(group.size(), dtype=torch.int64, device=self.device)
        sizes[group.rank()] = batch_size
        dist.all_reduce(sizes, group=group)
        return math.gcd(*sizes.tolist())

    @staticmethod
    def _shape_of(calls: Sequence[Call]) -> Any:
        leaves = [leaf for leaf in tree_leaves(calls[0].args) if isinstance(leaf, Tensor)]
        return step_key(calls[0].method), tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves)

    @contextmanager
    def _steps(self, step: Step, batch: Any, context: Context) -> Iterator[None]:
        """Around a batch: one stream of random numbers for all stages, and a close look at the first batches."""
        key = step_key(step)
        count = self._num_verified.get(key, 0)
        self._is_verifying = count < _VERIFIED_BATCHES
        self._num_verified[key] = count + 1
        self._error = None
        self._context = context
        self._batch_seed = self._seeds.getrandbits(62)
        for tree in self._trees:
            tree.step_module.verify = self._is_verifying
        if self._is_verifying:
            check_same_batch(batch, [self._group, self.mesh.get_group("tp")], self.device)
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices):
                yield
        finally:
            self._received = {}
        if self._is_verifying:
            self._raise_together()

    def _run_stage(self, index: int, hidden: tuple[Tensor, ...], microbatch: int, call: Call) -> Any:
        tree, is_last = self._tree_of[index], index == self._num_stages - 1
        seed = self._batch_seed + microbatch
        # Up to the blocks all stages draw the same numbers; from there on each stage its own.
        torch.manual_seed(seed)
        tree.step_module.on_entry = lambda: torch.manual_seed(hash((seed, index)) % 2**62)
        try:
            with self._context(is_last):
                output = tree(*hidden, method=call.method, args=call.args, kwargs=call.kwargs)
            if is_last and torch.is_grad_enabled():
                loss_of(output)  # what has none is refused here, where all get to know
                num_samples_of(output)
                if self._is_verifying:
                    self._received[microbatch] = hidden[0].detach()
            return output
        except Exception as error:
            if not self._is_verifying:
                raise
            # The others wait for what this stage sends. All go on to the end of the batch, and raise together.
            self._error = self._error or error
            return _nothing(hidden, is_last, self.device)

    def _raise_together(self) -> None:
        own = None if self._error is None else f"{type(self._error).__name__}: {self._error}"
        found: list[Any] = [own]
        for group in (self._group, self.mesh.get_group("tp")):
            gathered: list[Any] = [None] * group.size()
            dist.all_gather_object(gathered, found, group=group)
            found = [error for errors in gathered for error in errors if error is not None]
        if found:
            self._pipeline.forget_shapes()
        if self._error is not None:
            raise self._error
        if found:
            raise ValueError(f"Another stage of the pipeline failed: {found[0]}")

    # State

    def remove(self) -> None:
        """Take the layout off the module again, which is left whole and on the host. A collective of the mesh."""
        super().remove()
        vars(self.module).pop("forward", None)  # where a trainer has put its own
        elsewhere = self._fetch_absent()
        self._staged.restore(lambda name, tensor: tensor.copy_(elsewhere[name]))

    @torch.no_grad()
    def _fetch_absent(self) -> dict[str, Tensor]:
        """The whole tensors that only other ranks of the pipeline hold, on the host. A collective."""
        module = self.module
        own = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
        absent: dict[str, Tensor] = {}
        for name, ranks in self._gather_names(list(own)).items():
            if len(ranks) == self._group.size():
                continue
            boxed = [own[name].detach() if self._group.rank() == ranks[0] else None]
            dist.broadcast_object_list(boxed, group_src=ranks[0], group=self._group, device=self.device)
            if name not in own:
                assert boxed[0] is not None
                absent[name] = boxed[0]
        return absent

    def _find_holders(self) -> list[Shared]:
        """The parameters that more than one rank of the pipeline holds."""
        own = dict(self.module.named_parameters(remove_duplicate=False))
        held = {self.first_name_of[name]: parameter for name, parameter in own.items()}
        ranks = self._gather_names(list(held))
        order = dict.fromkeys(self.first_name_of.values())
        return [Shared(name, tuple(ranks[name]), held.get(name)) for name in order if len(ranks.get(name, ())) > 1]

    def _gather_names(self, names: list[str]) -> dict[str, list[int]]:
        """Name -> pipeline ranks that have it. A collective."""
        by_rank: list[Any] = [None] * self._group.size()
        dist.all_gather_object(by_rank, names, group=self._group)
        found: dict[str, list[int]] = {}
        for rank, present in enumerate(by_rank):
            for name in present:
                found.setdefault(name, []).append(rank)
        return found


class _Steering(GradientSteering):
    """Reduces a stage's gradients as its ZeRO policy says."""

    def __init__(self, engine: PipelinedEngine, tree: Tree) -> None:
        self._engine = engine
        self._tree = tree

    def before_backward(self, is_last: bool) -> None:
        if self._engine.schedule.splits_backward:
            defer_reduction(self._tree.root)
        else:
            is_last = is_last and self._engine._is_last_micro_batch
            set_last_micro_batch(self._tree.root, self._engine._settings.policy, is_last)

    def after_all(self) -> None:
        if self._engine.schedule.splits_backward:
            reduce_now(self._tree.root)


def _to(content: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), content)


def _calls(method: Step, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_parts: int) -> list[Call]:
    """The calls of a step with each part of its batch."""
    batch, *rest = args
    return [Call(method, (part, *rest), kwargs) for part in split(batch, num_parts)]


def _nothing(hidden: tuple[Tensor, ...], is_last: bool, device: torch.device) -> Any:
    """What a stage that has failed hands on."""
    source = hidden[0] if hidden else torch.zeros(1, device=device, requires_grad=torch.is_grad_enabled())
    return (source * 0).sum() if is_last else source * 0
