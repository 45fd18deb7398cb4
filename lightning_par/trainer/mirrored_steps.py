"""Steps of a dedicated parameter server: those of the first worker, whose results and logs reach it.

So a rank that computes nothing has the same losses, metrics and progress as the others, and callbacks work on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_par.trainer.pipeline_logging import LogRecorder, replay

__all__ = ["MirroredSteps", "Pair"]


@dataclass(frozen=True)
class Pair:
    """Two ranks of a group, of which one takes over what the other has.

    Attributes:
        group: The data axis.
        source: Rank in it that has.
        target: Rank in it that takes over.
        device: This rank's device, for the group's backend.
    """

    group: dist.ProcessGroup
    source: int
    target: int
    device: torch.device

    @property
    def is_here(self) -> bool:
        """Whether this is the rank that has."""
        return self.group.rank() == self.source

    @property
    def takes_part(self) -> bool:
        """Whether this is one of the two."""
        return self.group.rank() in (self.source, self.target)

    def share(self, content: Any) -> Any:
        """The source's picklable object, on both."""
        if self.is_here:
            dist.send_object_list([content], group=self.group, group_dst=self.target, device=self.device)
            return content
        boxed = [None]
        dist.recv_object_list(boxed, group=self.group, group_src=self.source, device=self.device)
        return boxed[0]


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
        if self._pair.is_here:
            outputs, content = self._run_here(step)
            self._pair.share(content)
        else:
            content = self._pair.share(None)
            if isinstance(content, Exception):
                raise content
            outputs = _with_gradient(_to(content[0], self._pair.device))
        replay(self._module, content[1])
        return outputs

    def _run_here(self, step: Callable[[], Any]) -> tuple[Any, Any]:
        try:
            with LogRecorder().recording([self._module]) as recorder:
                outputs = step()
            return outputs, (_to(outputs, torch.device("cpu")), recorder.take())
        except Exception as error:  # the server waits for what comes from here
            self._pair.share(error)
            raise


def _to(content: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to(device), content)


def _with_gradient(outputs: Any) -> Any:
    loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
    if isinstance(loss, Tensor) and torch.is_grad_enabled():
        loss.requires_grad_()
    return outputs
