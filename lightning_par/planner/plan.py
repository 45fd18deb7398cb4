"""What the planner answers with: memory and time of each layout, the recommendation, and why not the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from lightning_par.planner.choice import Candidate
from lightning_par.planner.cluster import MEMORY_LINE, Cluster

__all__ = ["Advice", "Evaluation", "MemoryBreakdown", "ModelSummary", "Plan", "Rejection", "StepTime"]


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes of the fullest rank at its fullest moment.

    Attributes:
        parameters: At rest: this rank's shards, or all.
        gradients: Those that exist at the fullest moment.
        optimizer: States of the optimizer on the device.
        activations: What waits for its backward, of all micro-batches in flight, and what the running operator needs.
        gathered: Copies of parameters that are whole while they are used.
        communication: Buffers that collectives read and write.
        buffers: The module's own buffers and its batch.
        reserved: What the runtime takes.
        capacity: The device's memory.
        host: Bytes on the host, of one rank.
        disk: Bytes on disk, of one rank.
        pipeline_rank: Which rank of the pipeline is the fullest.
        moment: When, in words.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    gathered: int
    communication: int
    buffers: int
    reserved: int
    capacity: int
    host: int = 0
    disk: int = 0
    pipeline_rank: int = 0
    moment: str = ""

    PARTS = ("parameters", "gradients", "optimizer", "activations", "gathered", "communication", "buffers", "reserved")

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return sum(getattr(self, part) for part in self.PARTS)

    @property
    def limit(self) -> int:
        """What it may be at most."""
        return int(MEMORY_LINE * self.capacity)

    @property
    def margin(self) -> int:
        """Bytes left below the limit; negative if it does not fit."""
        return self.limit - self.total

    @property
    def fits(self) -> bool:
        """Whether it does."""
        return self.margin >= 0

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, with the derived figures."""
        return {**asdict(self), "total": self.total, "limit": self.limit, "margin": self.margin, "fits": self.fits}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step, of the slowest rank; the parts add up to it.

    Attributes:
        compute: Forward and backward.
        recompute: Forwards again, for activation checkpointing.
        bubble: Waiting for other pipeline stages.
        communication: Collectives and messages that nothing hides.
        offload: Host step and transfers that nothing hides.
        optimizer: The optimizer on the device.
        tokens: Tokens (or samples) of the step, of all ranks.
        num_devices: Devices.
        model_flops: FLOPs of the step's forward and backward, of all ranks, without recomputation.
        peak_flops: Dense peak of one device, FLOP/s.
        hidden_communication: Collectives that run beside computation.
        traffic: Axis -> bytes that one rank moves, counted as :mod:`lightning_par.communication` counts them.
        stage_times: Forward and backward seconds of one micro-batch on each stage, for a timeline.
    """

    compute: float
    recompute: float
    bubble: float
    communication: float
    offload: float
    optimizer: float
    tokens: float
    num_devices: int
    model_flops: float
    peak_flops: float
    hidden_communication: float = 0.0
    traffic: Mapping[str, int] = field(default_factory=dict)
    stage_times: tuple[tuple[float, float], ...] = ()

    PARTS = ("compute", "recompute", "bubble", "communication", "offload", "optimizer")

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(getattr(self, part) for part in self.PARTS)

    @property
    def tokens_per_second_per_device(self) -> float:
        """The rate that compares clusters of different size."""
        return self.tokens / self.total / self.num_devices

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the devices could do at their dense peak; recomputation does not count."""
        return self.model_flops / (self.total * self.peak_flops * self.num_devices)

    @property
    def hfu(self) -> float:
        """As MFU, recomputation counted."""
        again = self.recompute / self.compute if self.compute else 0.0
        return self.mfu * (1 + again)

    def shares(self) -> dict[str, float]:
        """Each part's share of the step."""
        return {part: getattr(self, part) / self.total for part in self.PARTS}

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, with the derived figures."""
        return {
            **asdict(self),
            "total": self.total,
            "tokens_per_second_per_device": self.tokens_per_second_per_device,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "shares": self.shares(),
        }


@dataclass(frozen=True)
class Evaluation:
    """A candidate with its figures.

    Attributes:
        candidate: The layout.
        memory: Of its fullest rank.
        time: Of a step.
        reason: Why it was chosen, or why another was.
    """

    candidate: Candidate
    memory: MemoryBreakdown
    time: StepTime
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain containers."""
        return {
            "candidate": self.candidate.to_dict(),
            "memory": self.memory.to_dict(),
            "time": self.time.to_dict(),
            "reason": self.reason,
        }


@dataclass(frozen=True)
class Rejection:
    """What was not chosen, and why.

    Attributes:
        label: A family of layouts, or one of them.
        reason: In words, with the numbers.
        closest: Of the family, the one that came nearest; ``None`` where it was refused before it was evaluated.
        missing: Bytes that it lacks, 0 if memory was not the reason.
    """

    label: str
    reason: str
    closest: Evaluation | None = None
    missing: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain containers."""
        return {
            "label": self.label,
            "reason": self.reason,
            "missing": self.missing,
            "closest": self.closest and self.closest.to_dict(),
        }


@dataclass(frozen=True)
class ModelSummary:
    """The model in a few figures.

    Attributes:
        name: Its class, or the configuration's name.
        num_parameters: All, tied ones once.
        num_trained: Those with gradients.
        num_blocks: Blocks of the list that a pipeline splits; 0 without one.
        tokens_per_sample: Tokens of a sample, 1 where samples have none.
        precision: As ``Trainer(precision=...)``.
        largest_unit: Bytes of the largest block or other unit, in the type it is computed in.
        source: ``"traced"``, or how the figures came about instead.
    """

    name: str
    num_parameters: int
    num_trained: int
    num_blocks: int
    tokens_per_sample: int
    precision: str
    largest_unit: int
    source: str

    def to_dict(self) -> dict[str, Any]:
        """Plain containers."""
        return asdict(self)


@dataclass(frozen=True)
class Advice:
    """What the decision list says, whatever the figures say.

    Attributes:
        situation: Which row of the list it is, in words.
        advice: What the row recommends.
        reason: Why, with this model's and cluster's numbers.
        kinds: The kinds of layout (:attr:`Candidate.kind`) that follow it.
        agrees: Whether the recommendation is one of them.
        comparison: Where it is not: both step times, in words.
    """

    situation: str
    advice: str
    reason: str
    kinds: tuple[str, ...]
    agrees: bool = True
    comparison: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain containers."""
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """The answer.

    Attributes:
        model: What is trained.
        cluster: On what.
        global_batch: Samples of an optimizer step.
        advice: The decision list's row.
        recommended: The layout to take; ``None`` if nothing fits.
        runners_up: The next best of other kinds, the fastest first, each with why it was not chosen.
        rejected: The families that do not come into question, and why.
        overrides: What to write after ``python examples/train.py``.
        fix: If nothing fits, what would make the closest candidate fit.
        notes: Whatever a reader must know of how the figures came about.
        num_considered: Layouts looked at.
        seconds: How long the search took.
    """

    model: ModelSummary
    cluster: Cluster
    global_batch: int
    advice: Advice | None
    recommended: Evaluation | None
    runners_up: tuple[Evaluation, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    overrides: tuple[str, ...] = ()
    fix: str = ""
    notes: tuple[str, ...] = ()
    num_considered: int = 0
    seconds: float = 0.0

    @property
    def command(self) -> str:
        """The line to paste."""
        return " ".join(["python examples/train.py", *self.overrides])

    def to_dict(self) -> dict[str, Any]:
        """Plain containers, as ``--json`` prints them."""
        return {
            "model": self.model.to_dict(),
            "cluster": self.cluster.to_dict(),
            "global_batch": self.global_batch,
            "advice": self.advice and self.advice.to_dict(),
            "recommended": self.recommended and self.recommended.to_dict(),
            "runners_up": [evaluation.to_dict() for evaluation in self.runners_up],
            "rejected": [rejection.to_dict() for rejection in self.rejected],
            "overrides": list(self.overrides),
            "command": self.command,
            "fix": self.fix,
            "notes": list(self.notes),
            "num_considered": self.num_considered,
            "seconds": self.seconds,
        }
