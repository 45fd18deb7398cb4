"""The planner's prediction for a job that ran: the same model, layout and batch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_par.layout import ParallelLayout
from lightning_par.pipeline_parallel.schedules import (
    check_num_virtual_stages,
    default_num_microbatches,
    schedule_named,
)
from lightning_par.planner.app import model_for
from lightning_par.planner.choice import Candidate
from lightning_par.planner.cluster import Cluster
from lightning_par.planner.measure import measure_cluster
from lightning_par.planner.memory import predict_memory, state_bytes
from lightning_par.planner.model import PlannedModel
from lightning_par.planner.plan import StepTime
from lightning_par.planner.time import predict_time
from lightning_par.reports.jobs import JobRecord

__all__ = ["Prediction", "Predictor", "candidate_of"]

_PRECISIONS = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "64": "64-true"}
_KEYS = ("model", "data", "optimizer", "strategy", "trainer", "launch")


@dataclass(frozen=True)
class Prediction:
    """What the planner says of a job.

    Attributes:
        time: Of a step on this machine; ``None`` where nothing is predicted.
        state_bytes: Model state of the rank that holds most.
        memory_bytes: Of the fullest rank at its fullest moment, what the runtime takes included.
        reason: Why nothing is predicted.
    """

    time: StepTime | None = None
    state_bytes: int = 0
    memory_bytes: int = 0
    reason: str = ""


@dataclass
class Predictor:
    """Predicts jobs; models and the machine are looked at once.

    Attributes:
        clusters: By number of ranks and accelerator: this machine is measured unless it was before.
        models: By what they were built from.
    """

    clusters: dict[tuple[int, int, str], Cluster] = field(default_factory=dict)
    models: dict[str, PlannedModel] = field(default_factory=dict)

    def predict(self, record: JobRecord) -> Prediction:
        """What the planner says of a job; anything that keeps it from saying is the reason that it gives instead."""
        try:
            return self._predict(record)
        except Exception as error:  # a job's own model and data are built here: whatever they raise, the report goes on
            return Prediction(reason=str(error).partition("\n")[0] or type(error).__name__)

    def _predict(self, record: JobRecord) -> Prediction:
        config, summary = record.config, record.summary
        if missing := [key for key in _KEYS if key not in config]:
            raise ValueError(f"the job's configuration has no {', '.join(missing)}")
        candidate = candidate_of(config, summary["layout"])
        model, cluster = self._model(config), self._cluster(config, summary["world_size"])
        states = [state_bytes(model, candidate, rank) for rank in range(candidate.layout.pp)]
        largest = max(one.parameters + one.gradients + one.optimizer for one in states)
        memory = predict_memory(model, cluster, candidate).total
        return Prediction(predict_time(model, cluster, candidate), largest, memory)

    def _model(self, config: Mapping[str, Any]) -> PlannedModel:
        plan, precision = config["strategy"].get("tensor_parallel_plan"), _precision(config["trainer"])
        key = json.dumps([config[group] for group in _KEYS[:3]] + [plan, precision], default=str)
        if key not in self.models:
            self.models[key], _ = model_for(config, precision, tensor_parallel_plan=plan)
        return self.models[key]

    def _cluster(self, config: Mapping[str, Any], world_size: int) -> Cluster:
        nodes = config["launch"].get("nnodes") or 1
        key = (world_size // nodes, nodes, config["trainer"].get("accelerator") or "auto")
        if key not in self.clusters:
            self.clusters[key] = measure_cluster(*key)
        return self.clusters[key]


def candidate_of(config: Mapping[str, Any], layout: Mapping[str, int]) -> Candidate:
    """A job's configuration as a candidate.

    Args:
        config: With ``strategy``, ``trainer`` and ``data``, resolved.
        layout: The degrees that it ran with.

    Raises:
        ValueError: If the planner knows no such candidate.
    """
    strategy, batch = config["strategy"], config["data"]["batch_size"]
    accumulate = config["trainer"].get("accumulate_grad_batches") or 1
    _check_known(strategy, accumulate, layout)
    degrees = ParallelLayout(**layout)
    size, number, schedule, stages = batch, accumulate, "", 1
    if degrees.pp > 1:
        chosen = schedule_named(strategy.get("schedule") or "1f1b")
        number = strategy.get("num_microbatches") or default_num_microbatches(chosen, batch, degrees.pp)
        stages = check_num_virtual_stages(chosen, strategy.get("num_virtual_stages"))
        size, schedule = batch // number, chosen.name
    return Candidate(
        layout=degrees,
        zero_stage=strategy["zero_stage"],
        micro_batch_size=size,
        num_microbatches=number,
        schedule=schedule,
        num_virtual_stages=stages,
        activation_checkpointing=strategy.get("activation_checkpointing") or False,
    )


def _check_known(strategy: Mapping[str, Any], accumulate: int, layout: Mapping[str, int]) -> None:
    refused: Sequence[tuple[bool, str]] = (
        ("zero_stage" not in strategy, f"{strategy.get('_target_')} is not a strategy whose layout is configured"),
        (strategy.get("sync", "all_reduce") != "all_reduce", "a parameter server is not among the planner's layouts"),
        (bool(strategy.get("offload")), "an offloaded job is not compared: part of its state is on the host"),
        (bool(strategy.get("pipeline_split")), "the planner splits a pipeline by cost, not as pipeline_split says"),
        (layout["pp"] > 1 and accumulate > 1, "the planner does not accumulate over a pipeline's batches"),
    )
    for is_so, reason in refused:
        if is_so:
            raise ValueError(reason)


def _precision(trainer: Mapping[str, Any]) -> str:
    given = str(trainer.get("precision") or "32-true")
    return _PRECISIONS.get(given, given)
