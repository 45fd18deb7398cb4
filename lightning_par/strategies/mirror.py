"""What one rank makes, taken over by another that makes nothing itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

__all__ = ["Pair"]


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

    def mirror(self, make: Callable[[], Any]) -> Any:
        """What ``make`` returns on the source, itself there and a copy without a graph on the target.

        Raises:
            Exception: On both, if it raises.
        """
        if not self.is_here:
            content = self.share(None)
            if isinstance(content, Exception):
                raise content
            return _to(content, self.device)
        try:
            content = make()
        except Exception as error:  # the other rank waits for what comes from here
            self.share(error)
            raise
        self.share(_to(content, torch.device("cpu")))
        return content


def _to(content: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to(device), content)
