"""Parameters that a step uses on some ranks of the data axis, or on none.

Ranks that did not use a parameter must still enter its reduction, with zeros. And a parameter that none used must keep
the gradient one process would give it, none at all, so that weight decay and momentum leave it alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = ["UsedParameters"]


class UsedParameters:
    """Remembers which parameters got a gradient from the backwards of one accumulation window.

    Args:
        root: The module whose units are sharded or replicated.
        units: Each unit's module and the dotted names and modules that belong to it.
        group: The ranks that see different batches.
        device: Where they compare what they used.
    """

    def __init__(
        self,
        root: nn.Module,
        units: Iterable[tuple[nn.Module, Iterable[tuple[str, nn.Module]]]],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._root = root
        self._group = group
        self._device = device
        # By the module's id: a hook on a parameter that reached its module would keep both from ever being freed.
        self._used: set[tuple[int, str]] = set()
        self._watched: set[tuple[int, str]] = set()
        self._is_open = False
        for module, members in units:
            assert isinstance(module, FSDPModule)
            module.set_reduce_scatter_unused_params(True)
            # After the hook that gathers: it is the gathered parameters that autograd knows.
            module.register_forward_pre_hook(partial(self._watch, [member for _, member in members]))

    @staticmethod
    def is_supported() -> bool:
        """Whether this release of torch can reduce zeros for what a rank did not use."""
        return hasattr(FSDPModule, "set_reduce_scatter_unused_params")

    def before_backward(self) -> None:
        """At the first backward of a window: what has a gradient already, from an earlier window, keeps it."""
        if not self._is_open:
            self._is_open = True
            parameters = (((id(m), name), p) for m in self._root.modules() for name, p in m._parameters.items())
            self._used.update(place for place, p in parameters if p is not None and p.grad is not None)

    @torch.no_grad()
    def settle(self) -> list[nn.Parameter]:
        """After the last backward of a window: take away the gradients of what no rank used. A collective.

        Returns:
            The parameters that no rank used.
        """
        places = [(m, name) for m in self._root.modules() for name, p in m._parameters.items() if p is not None]
        used = torch.tensor([(id(m), name) in self._used for m, name in places], dtype=torch.int32, device=self._device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._group)
        kept = {id(m._parameters[name]) for (m, name), flag in zip(places, used.tolist(), strict=True) if flag}
        parameters = (module._parameters[name] for module, name in places)
        unused = [parameter for parameter in parameters if parameter is not None and id(parameter) not in kept]
        for parameter in unused:
            parameter.grad = None
        self._used.clear()
        self._is_open = False
        return unused

    def _watch(self, members: list[nn.Module], *_: Any) -> None:
        """Attach to each gathered parameter, once: they are the same objects in every step."""
        if not torch.is_grad_enabled():
            return
        for module in members:
            for name, parameter in module._parameters.items():
                place = (id(module), name)
                if parameter is not None and parameter.requires_grad and place not in self._watched:
                    self._watched.add(place)
                    parameter.register_post_accumulate_grad_hook(partial(_mark, self._used, place))


def _mark(used: set[tuple[int, str]], place: tuple[int, str], _: torch.Tensor) -> None:
    used.add(place)
