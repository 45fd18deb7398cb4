"""Steps of a dedicated parameter server: those of the first worker, whose results and logs reach it.

So a rank that computes nothing has the same losses, metrics and progress as the others, and callbacks work on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_par.strategies.mirror import Pair
from lightning_par.trainer.pipeline_logging import LogRecorder, replay

__all__ = ["MirroredSteps"]


class MirroredSteps:
    """Runs a step on the first worker and repeats what came of it on the server.

    Args:
        module: The user's module.
        pair: The two ranks; others are not given this class.
    """

    def __init__(self, module: LightningModule, pair: Pair) -> None:
        self._module = module
        self._pair = pair

    def run(self, step: Callable[[], Any]) -> Any:
        """The step's result; on the server a copy of it, with a loss that takes a backward and leads nowhere."""

        def recorded() -> tuple[Any, Any]:
            with LogRecorder().recording([self._module]) as recorder:
                outputs = step()
            return outputs, recorder.take()

        outputs, entries = self._pair.mirror(recorded)
        replay(self._module, entries)
        return outputs if self._pair.is_here else _with_gradient(outputs)


def _with_gradient(outputs: Any) -> Any:
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if isinstance(loss, Tensor) and torch.is_grad_enabled():
        loss.requires_grad_()
    return outputs
