"""The Trainer's strategy class over what both adapters share."""

from __future__ import annotations

from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from typing_extensions import override

from lightning_par.strategies.hybrid import Hybrid

__all__ = ["MeshStrategy"]


class MeshStrategy(Hybrid, ParallelStrategy):  # type: ignore[misc]
    """A strategy for the Trainer that knows its ranks, and no steps yet."""

    # Lightning asks for this attribute of strategies it does not know, before it injects distributed samplers.
    is_distributed = True

    @property
    @override
    def is_failing(self) -> bool:
        """Whether the Trainer is on its way out of an exception, where no collective may start."""
        module = self.lightning_module
        trainer = module._trainer if module is not None else None
        return trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED
