"""The planner: which layout suits a model on a cluster, why, and what it costs, without starting a process.

A :class:`Cluster` says what the machines can do, a profile what the model needs (traced on tensors without memory, its
own ``training_step``), a :class:`Candidate` is one layout. Memory and time of each candidate are predicted by the rules
that the engine follows. The answer is a :class:`Plan`: the layout to take, as a command to paste, the next best ones,
and the reason why each other was not taken.
"""

from lightning_par.planner.choice import Candidate
from lightning_par.planner.cluster import MEMORY_LINE, Cluster, Device, Disk, Host, Link
from lightning_par.planner.memory import predict_memory, state_bytes
from lightning_par.planner.model import OptimizerRule, PlannedModel, optimizer_rule
from lightning_par.planner.plan import (
    Advice,
    Evaluation,
    MemoryBreakdown,
    ModelSummary,
    Plan,
    Rejection,
    StepTime,
)
from lightning_par.planner.planner import make_plan
from lightning_par.planner.search import Workload
from lightning_par.planner.time import predict_time
from lightning_par.planner.zero_figure import zero_figure

__all__ = [
    "MEMORY_LINE",
    "Advice",
    "Candidate",
    "Cluster",
    "Device",
    "Disk",
    "Evaluation",
    "Host",
    "Link",
    "MemoryBreakdown",
    "ModelSummary",
    "Plan",
    "OptimizerRule",
    "PlannedModel",
    "Rejection",
    "StepTime",
    "Workload",
    "make_plan",
    "optimizer_rule",
    "predict_memory",
    "predict_time",
    "state_bytes",
    "zero_figure",
]
