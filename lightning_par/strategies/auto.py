"""What the strategies that ask the planner share: one rank decides, all take the layout on before there is a mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import Optimizer

from lightning_par.offload import resolve_offload
from lightning_par.pipelined import PipelineOptions
from lightning_par.planner import Candidate, Cluster, Plan, PlannedModel, Workload, make_plan, optimizer_rule
from lightning_par.planner.batches import count_samples
from lightning_par.planner.measure import measure_cluster, measure_links, with_link
from lightning_par.planner.model import OptimizerRule
from lightning_par.planner.trace import PRECISIONS, Step
from lightning_par.strategies.hybrid import Hybrid
from lightning_par.strategies.mesh import DEFAULT_TIMEOUT

if TYPE_CHECKING:
    from lightning_par.planner import Link

__all__ = ["Auto", "Training", "rule_of"]


@dataclass(frozen=True)
class Training:
    """What an adapter knows of the training to plan for.

    Attributes:
        module: The whole module, on any device.
        step: What a step of it is.
        batch: A batch of one data-parallel rank, ``None`` if there is none to trace with.
        batch_size: Samples in such a batch, ``None`` to count those of ``batch`` (1 without one).
        accumulate: Batches of an optimizer step.
        precision: As ``Trainer(precision=...)``.
        optimizer: What the optimizer keeps.
        no_pipeline: Why it can't run under a pipeline; empty if nothing is known against it.
        notes: What a reader of the plan must know besides.
    """

    module: nn.Module
    step: Step
    batch: Any = None
    batch_size: int | None = None
    accumulate: int = 1
    precision: str = "32-true"
    optimizer: OptimizerRule | None = None
    no_pipeline: str = ""
    notes: tuple[str, ...] = ()


class Auto(Hybrid):
    """Takes on the layout that the planner recommends, once its adapter knows what is trained.

    Attributes:
        candidate: The layout that was chosen, ``None`` before.
        plan: The planner's whole answer, on rank 0.
    """

    def __init__(
        self,
        tensor_parallel_plan: Mapping[str, str] | None = None,
        find_unused_parameters: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        **lightning: Any,
    ) -> None:
        super().__init__(
            tensor_parallel_plan=tensor_parallel_plan,
            find_unused_parameters=find_unused_parameters,
            process_group_backend=process_group_backend,
            timeout=timeout,
            **lightning,
        )
        self.candidate: Candidate | None = None
        self.plan: Plan | None = None

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``par_auto``."""
        strategy_registry.register("par_auto", cls, description="The layout that the planner recommends", override=True)

    def choose(self, name: str, training: Callable[[], Training]) -> None:
        """Choose a layout and take it on; the mesh is not made yet. A collective of all ranks.

        Args:
            name: What to call the module in messages.
            training: Asked on rank 0 alone; the random numbers that it draws are drawn again by training.

        Raises:
            MisconfigurationException: On every rank, if nothing fits or rank 0 fails to ask or to plan.
        """
        links = measure_links({"world": dist.group.WORLD}, self.root_device)
        decided: list[Any] = [None, "", ""]
        if self.global_rank == 0:
            decided = self._decide(training, links.get("world"))
        words = decided[1]
        decided[1] = ""
        dist.broadcast_object_list(decided, 0, device=self.root_device)
        candidate, _, error = decided
        if error:
            raise MisconfigurationException(f"AutoStrategy found no layout for {name}. {error}")
        if words:
            print(words, flush=True)  # a choice made for the user is said whatever loggers are set to
        self._adopt(candidate)

    def _decide(self, training: Callable[[], Training], link: Link | None) -> list[Any]:
        """Candidate, why, and what is wrong; errors too are for all ranks."""
        try:
            with torch.random.fork_rng(devices=[]):
                plan = self._make_plan(training(), link)
        except Exception as error:
            return [None, "", f"{type(error).__name__}: {error}"]
        self.plan = plan
        if plan.recommended is None:
            return [None, "", plan.fix]
        return [plan.recommended.candidate, _words(plan), ""]

    def _make_plan(self, training: Training, link: Link | None) -> Plan:
        model = PlannedModel(
            training.module,
            training.batch,
            precision=training.precision if training.precision in PRECISIONS else "32-true",
            optimizer=training.optimizer,
            tensor_parallel_plan=self._plan,
            step=training.step,
            no_pipeline=training.no_pipeline,
        )
        samples = training.batch_size
        if samples is None:
            samples = 1 if training.batch is None else count_samples(training.batch)
        workload = Workload(batch_size=samples, accumulate=training.accumulate)
        return make_plan(model, self._cluster(link), workload, notes=training.notes)

    def _cluster(self, link: Link | None) -> Cluster:
        on_gpu = self.root_device.type == "cuda"
        cluster = measure_cluster(self.num_processes, self.num_nodes, "cuda" if on_gpu else "cpu")
        # A disk needs a folder, which only a user can name.
        cluster = replace(cluster, host=replace(cluster.host, disk=None))
        return cluster if link is None else with_link(cluster, link)

    def _adopt(self, candidate: Candidate) -> None:
        """Become the strategy of that layout, before there is a mesh."""
        layout = candidate.layout
        self.candidate = candidate
        self._degrees = {
            "data_parallel_size": layout.data_parallel_size,
            "tensor_parallel_size": layout.tp,
            "pipeline_parallel_size": layout.pp,
        }
        self.zero_stage = candidate.zero_stage
        self.zero_shard_size = layout.dp_shard if candidate.zero_stage and layout.dp_replicate > 1 else None
        self.offload_policy = resolve_offload(candidate.offload or None, candidate.zero_stage)  # type: ignore[arg-type]
        self._activation_checkpointing = candidate.activation_checkpointing
        if layout.pp > 1:
            several = candidate.schedule.startswith("interleaved")
            self._pipeline = PipelineOptions(
                schedule=candidate.schedule,
                num_microbatches=candidate.num_microbatches,
                num_virtual_stages=candidate.num_virtual_stages if several else None,
            )
        self._mesh = None
        self.set_world_ranks()


def rule_of(optimizer: Optimizer) -> OptimizerRule:
    """What an optimizer of this class and with these settings keeps; Adam's moments if that can't be tried."""
    try:
        settings = {name: value for name, value in optimizer.defaults.items() if name not in ("fused", "foreach")}
        return optimizer_rule(lambda parameters: type(optimizer)(parameters, **settings))
    except Exception:
        return OptimizerRule()


def _words(plan: Plan) -> str:
    assert plan.recommended is not None
    lines = [f"AutoStrategy: {plan.recommended.candidate.describe()}. {plan.recommended.reason}"]
    if plan.advice is not None and plan.advice.comparison:
        lines.append(plan.advice.comparison)
    lines += [f"Next best: {one.candidate.describe()}. {one.reason}" for one in plan.runners_up[:2]]
    lines += [f"Note: {note}." for note in plan.notes]
    return "\n  ".join(lines)
