"""What is kept off the device, and where: the words of the strategies' ``offload`` argument."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

__all__ = ["Offload", "OffloadPolicy", "resolve_offload"]


@dataclass(frozen=True)
class OffloadPolicy:
    """What of the model state is kept off the device, and where.

    Attributes:
        device: ``"cpu"`` for host memory, ``"disk"`` for memory-mapped files.
        path: Folder of those files, which must exist; each rank makes files of its own there, which go with the
            process. Required for ``"disk"``.
        pin_memory: Whether host memory that travels to and from an accelerator is page-locked, which copies need to
            overlap with its work. Without an accelerator nothing is.
        overlap: Whether copies and host steps go on while the device computes; the numbers are the same either way.
        fraction: Part of the elements, from 0 to 1, whose states are kept off the device. The parameters that a forward
            uses first stay on it: their gradients come last, and they are needed first.
        parameters: Whether parameters are kept off the device too, and gathered to it unit by unit.

    Raises:
        ValueError: If a value makes no sense.
    """

    device: Literal["cpu", "disk"] = "cpu"
    path: str | Path | None = None
    pin_memory: bool = True
    overlap: bool = True
    fraction: float = 1.0
    parameters: bool = False

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "disk"):
            raise ValueError(f'offload device={self.device!r} is unknown. Choose "cpu" (host memory) or "disk".')
        if self.device == "disk" and self.path is None:
            raise ValueError('offload device="disk" needs path=, an existing folder for its files.')
        if self.device == "cpu" and self.path is not None:
            raise ValueError(
                f'offload path={str(self.path)!r} is where device="disk" keeps files, and device="cpu" keeps none. '
                'Set device="disk", or leave path out.'
            )
        is_number = isinstance(self.fraction, (int, float)) and not isinstance(self.fraction, bool)
        if not is_number or not 0 < self.fraction <= 1:
            raise ValueError(
                f"offload fraction={self.fraction!r} must be above 0 and at most 1; 1 keeps all states off the device, "
                "and offload=None keeps all on it."
            )


Offload: TypeAlias = Literal["optimizer", "all"] | OffloadPolicy | None

_WORDS = {"optimizer": OffloadPolicy(), "all": OffloadPolicy(parameters=True)}


def resolve_offload(offload: Offload, zero_stage: int) -> OffloadPolicy | None:
    """The policy that a user's choice stands for.

    Raises:
        ValueError: If it is none, or nothing is sharded that could be kept elsewhere.
    """
    if offload is None:
        return None
    policy = _WORDS.get(offload) if isinstance(offload, str) else offload
    if not isinstance(policy, OffloadPolicy):
        raise ValueError(
            f'offload={offload!r} is unknown. Choose None, "optimizer" (optimizer states and the step on the host), '
            '"all" (parameters too) or an OffloadPolicy.'
        )
    if policy.path is not None and not Path(policy.path).is_dir():
        raise ValueError(f"offload path={str(policy.path)!r} is no existing folder. Create it, or set one that exists.")
    if zero_stage == 0:
        raise ValueError(
            f"offload={offload!r} needs zero_stage 1, 2 or 3: with 0 every rank would keep all states on its host. On "
            "one device each stage means the same."
        )
    return policy
