"""What sets the ZeRO stages apart, as data."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ZERO_POLICIES", "ZeroPolicy"]


@dataclass(frozen=True)
class ZeroPolicy:
    """When a stage gathers parameters and reduces gradients.

    Attributes:
        shards: Whether the model state is sharded over ``dp_shard`` at all.
        frees_after_use: Whether gathered parameters are freed after each forward and backward (else they stay from the
            first forward to the last backward of an optimizer step).
        reduces_each_micro_batch: Whether gradients are reduced in every backward (else only in the last one of an
            accumulation window).
    """

    shards: bool
    frees_after_use: bool
    reduces_each_micro_batch: bool


ZERO_POLICIES: dict[int, ZeroPolicy] = {
    0: ZeroPolicy(shards=False, frees_after_use=False, reduces_each_micro_batch=False),
    1: ZeroPolicy(shards=True, frees_after_use=False, reduces_each_micro_batch=False),
    2: ZeroPolicy(shards=True, frees_after_use=False, reduces_each_micro_batch=True),
    3: ZeroPolicy(shards=True, frees_after_use=True, reduces_each_micro_batch=True),
}
