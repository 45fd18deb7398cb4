"""What the planner chooses between: one way to lay a training step out over the devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_par.activation_checkpointing import Checkpointing
from lightning_par.layout import ParallelLayout

__all__ = ["Candidate"]


@dataclass(frozen=True)
class Candidate:
    """One layout, with all that bears on memory and time.

    Attributes:
        layout: The degrees.
        zero_stage: 0 to 3.
        micro_batch_size: Samples in one forward.
        num_microbatches: Forwards of one data-parallel rank in an optimizer step: a pipeline's micro-batches, or
            accumulated batches without one.
        schedule: Order of a pipeline's micro-batches; empty without one.
        num_virtual_stages: Stages on each rank of a pipeline.
        activation_checkpointing: What blocks keep for their backward.
        offload: ``""``, ``"optimizer"`` (masters, moments and the step on the host) or ``"all"`` (parameters too).
        offload_device: ``"cpu"`` or ``"disk"``.
    """

    layout: ParallelLayout = ParallelLayout()
    zero_stage: int = 0
    micro_batch_size: int = 1
    num_microbatches: int = 1
    schedule: str = ""
    num_virtual_stages: int = 1
    activation_checkpointing: Checkpointing = False
    offload: str = ""
    offload_device: str = "cpu"

    @property
    def batch_size(self) -> int:
        """Samples that one data-parallel rank sees in an optimizer step."""
        return self.micro_batch_size * self.num_microbatches

    @property
    def kind(self) -> str:
        """The parallelisms it is made of: ``"plain"``, or some of DP, ZeRO-1 ... ZeRO-3, TP, PP joined by ``+``."""
        layout = self.layout
        parts = ["PP"] * (layout.pp > 1) + ["TP"] * (layout.tp > 1)
        if self.zero_stage and (layout.data_parallel_size > 1 or self.offload):
            parts.append(f"ZeRO-{self.zero_stage}")
        elif layout.data_parallel_size > 1:
            parts.append("DP")
        return "+".join(parts) or "plain"

    @property
    def gathers(self) -> bool:
        """Whether parameters are gathered in their compute type."""
        return self.zero_stage > 0 and (self.layout.data_parallel_size > 1 or self.offload == "all")

    def describe(self) -> str:
        """One line for people."""
        layout = self.layout
        words = [self.kind if layout.world_size == 1 else f"{self.kind} ({layout})"]
        if self.schedule and layout.pp > 1:
            words.append(self.schedule + (f" v={self.num_virtual_stages}" if self.num_virtual_stages > 1 else ""))
        words.append(f"{self.num_microbatches} x {self.micro_batch_size} samples")
        if self.activation_checkpointing:
            selective = self.activation_checkpointing == "selective"
            words.append("selective checkpointing" if selective else "checkpointing")
        if self.offload:
            words.append(f"offload {self.offload} to {self.offload_device}")
        return ", ".join(words)

    def strategy_arguments(self) -> dict[str, Any]:
        """Arguments of :class:`lightning_par.HybridStrategy` that differ from its defaults."""
        layout = self.layout
        arguments: dict[str, Any] = {
            "pipeline_parallel_size": layout.pp,
            "data_parallel_size": layout.data_parallel_size,
            "tensor_parallel_size": layout.tp,
        }
        if self.zero_stage:
            arguments["zero_stage"] = self.zero_stage
            if layout.dp_replicate > 1:
                arguments["zero_shard_size"] = layout.dp_shard
        if layout.pp > 1:
            arguments |= {"schedule": self.schedule, "num_microbatches": self.num_microbatches}
            if self.num_virtual_stages > 1:
                arguments["num_virtual_stages"] = self.num_virtual_stages
        if self.activation_checkpointing:
            arguments["activation_checkpointing"] = self.activation_checkpointing
        if self.offload:
            arguments["offload"] = self.offload
        return arguments

    def to_dict(self) -> dict[str, Any]:
        """Plain containers."""
        return {
            "kind": self.kind,
            "layout": self.layout.as_dict(),
            "zero_stage": self.zero_stage,
            "micro_batch_size": self.micro_batch_size,
            "num_microbatches": self.num_microbatches,
            "schedule": self.schedule,
            "num_virtual_stages": self.num_virtual_stages,
            "activation_checkpointing": self.activation_checkpointing,
            "offload": self.offload,
            "offload_device": self.offload_device,
            "description": self.describe(),
        }
