"""The strategy that asks the planner: it measures module and machines, chooses a layout, and trains with it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from typing_extensions import override

from lightning_par.offload import resolve_offload
from lightning_par.pipelined import PipelineOptions
from lightning_par.planner import Candidate, Cluster, Plan, PlannedModel, Workload, make_plan, optimizer_rule
from lightning_par.planner.batches import count_samples
from lightning_par.planner.measure import measure_cluster, measure_links, with_link
from lightning_par.planner.model import OptimizerRule
from lightning_par.planner.stand_in import fake_copy
from lightning_par.planner.trace import PRECISIONS
from lightning_par.strategies.mesh import DEFAULT_TIMEOUT
from lightning_par.trainer.pipeline_steps import refuse_under_a_pipeline
from lightning_par.trainer.strategy import HybridStrategy

if TYPE_CHECKING:
    from lightning_par.planner import Link

__all__ = ["AutoStrategy"]


class AutoStrategy(HybridStrategy):
    """Chooses the layout itself, when a fit begins: by a trace of the module's step and by what the machines can do.

    The loader's batch size and ``accumulate_grad_batches`` are taken as they are, so the number of samples in an
    optimizer step follows from the data-parallel size that is chosen. One rank decides for all; it prints why, and
    leaves the whole answer in :attr:`plan`. The machine is measured once and remembered in the user's cache.

    Args:
        tensor_parallel_plan: As for :class:`~lightning_par.HybridStrategy`.
        find_unused_parameters: As there.
        process_group_backend: As there.
        timeout: As there.
        **lightning: Lightning's own arguments.

    Raises:
        MisconfigurationException: When a fit begins and no layout fits, with what is missing and what would help.
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
        self._planned_for: pl.LightningModule | None = None

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Register ``par_auto``."""
        strategy_registry.register("par_auto", cls, description="The layout that the planner recommends", override=True)

    @override
    def _connect_processes(self) -> None:
        super()._connect_processes()
        module = self.lightning_module
        assert module is not None
        if self._planned_for is not module:
            self._adopt(self._agree(module))
            self._planned_for = module

    def _agree(self, module: pl.LightningModule) -> Candidate:
        """Rank 0 decides, and tells the others. A collective."""
        links = measure_links({"world": dist.group.WORLD}, self.root_device)
        decided: list[Any] = [None, "", ""]
        if self.global_rank == 0:
            decided = self._decide(module, links.get("world"))
        words = decided[1]
        decided[1] = ""
        dist.broadcast_object_list(decided, 0, device=self.root_device)
        candidate, _, error = decided
        if error:
            raise MisconfigurationException(f"AutoStrategy found no layout for {type(module).__name__}. {error}")
        if words:
            print(words, flush=True)  # a choice made for the user is said whatever loggers are set to
        return candidate

    def _decide(self, module: pl.LightningModule, link: Link | None) -> list[Any]:
        """Candidate, why, and what is wrong; errors too are for all ranks."""
        try:
            plan = self._make_plan(module, link)
        except Exception as error:
            return [None, "", f"{type(error).__name__}: {error}"]
        self.plan = plan
        if plan.recommended is None:
            return [None, "", plan.fix]
        return [plan.recommended.candidate, _words(plan), ""]

    def _make_plan(self, module: pl.LightningModule, link: Link | None) -> Plan:
        batch, notes = _batch_of(module)
        built = _built(module)
        precision = str(getattr(self.precision_plugin, "precision", "32-true"))
        model = PlannedModel(
            built,
            batch,
            precision=precision if precision in PRECISIONS else "32-true",
            optimizer=_optimizer_of(built),
            tensor_parallel_plan=self._plan,
            no_pipeline=_refusal(module),
        )
        samples = count_samples(batch) if batch is not None else 1
        workload = Workload(batch_size=samples, accumulate=max(1, module.trainer.accumulate_grad_batches))
        return make_plan(model, self._cluster(link), workload, notes=notes)

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


def _words(plan: Plan) -> str:
    assert plan.recommended is not None
    lines = [f"AutoStrategy: {plan.recommended.candidate.describe()}. {plan.recommended.reason}"]
    if plan.advice is not None and plan.advice.comparison:
        lines.append(plan.advice.comparison)
    lines += [f"Next best: {one.candidate.describe()}. {one.reason}" for one in plan.runners_up[:2]]
    lines += [f"Note: {note}." for note in plan.notes]
    return "\n  ".join(lines)


def _refusal(module: pl.LightningModule) -> str:
    try:
        refuse_under_a_pipeline(module)
    except MisconfigurationException as error:
        return str(error)
    return ""


def _built(module: pl.LightningModule) -> nn.Module:
    """The module, or a copy on the meta device where ``configure_model`` has yet to build it."""
    if not is_overridden("configure_model", module):
        return module
    twin = fake_copy(module, "meta")
    with torch.device("meta"):
        twin.configure_model()  # type: ignore[operator]
    return twin


def _optimizer_of(module: nn.Module) -> OptimizerRule:
    """What the module's own optimizer keeps; Adam's moments if it can't be made without a Trainer."""
    twin = fake_copy(module, "meta")
    try:
        made: Any = twin.configure_optimizers()  # type: ignore[operator]
        optimizer = made["optimizer"] if isinstance(made, Mapping) else made
        optimizer = optimizer[0] if isinstance(optimizer, list | tuple) else optimizer
        settings = {name: value for name, value in optimizer.defaults.items() if name not in ("fused", "foreach")}
        return optimizer_rule(lambda parameters: type(optimizer)(parameters, **settings))
    except Exception:
        return OptimizerRule()


def _batch_of(module: pl.LightningModule) -> tuple[Any, list[str]]:
    """The first batch that would be trained on; the loader, its data module and random numbers stay as they are."""
    source = module.trainer.fit_loop._data_source
    state = torch.get_rng_state()
    try:
        holder = source.instance
        if source.is_module() and isinstance(holder, pl.LightningDataModule):
            if callable(sample := getattr(holder, "sample_batch", None)):
                return sample(), []
            holder = copy.copy(holder)
            holder.prepare_data()
            holder.setup("fit")
        loader: Any = getattr(holder, source.name)() if source.is_module() else holder
        return next(iter(loader)), []
    except Exception as error:
        return None, [f"the training data gives no batch before a fit ({type(error).__name__}: {error})"]
    finally:
        torch.set_rng_state(state)
