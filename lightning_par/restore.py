"""Taking a module's parallelism off again, so that another layout, or none, can be put on the same module.

``fully_shard``, ``replicate`` and DTensor change a module in place (its class, its hooks, its parameters) and have no
way back of their own. :class:`Footprint` notes what a module looked like before and after, and removes the difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping

from lightning_par.gradients import whole
from lightning_par.ties import find_ties, restore_ties

__all__ = ["Footprint"]

_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


@dataclass(frozen=True)
class _Look:
    """What parallelism may change of one module, apart from its tensors."""

    type: type[nn.Module]
    attributes: frozenset[str]
    numbers: dict[str, int]
    hooks: dict[str, frozenset[Any]]

    @classmethod
    def at(cls, module: nn.Module) -> _Look:
        attributes = vars(module)
        return cls(
            type=type(module),
            attributes=frozenset(attributes),
            numbers={name: value for name, value in attributes.items() if type(value) is int},
            hooks={name: frozenset(attributes[name]) for name in _HOOKS if name in attributes},
        )


class Footprint:
    """What laying out a module changed of it.

    Args:
        root: The module, before anything is applied to it.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._before = {module: _Look.at(module) for module in root.modules()}
        self._after: dict[nn.Module, _Look] = {}

    def complete(self) -> None:
        """Note the module's look after everything has been applied."""
        self._after = {module: _Look.at(module) for module in self._before}

    def remove(self) -> None:
        """Leave the module with plain, full tensors on the host, and take off what was applied. A collective."""
        ties = find_ties(self._root)
        for module in self._before:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[name] = _plain(parameter)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.cpu()
        restore_ties(ties)
        for module, after in self._after.items():
            _undo(module, self._before[module], after)


@torch.no_grad()
def _plain(parameter: Tensor) -> nn.Parameter:
    full = whole(parameter)
    return nn.Parameter(full.detach().cpu(), requires_grad=parameter.requires_grad)


def _undo(module: nn.Module, before: _Look, after: _Look) -> None:
    """Remove what is in ``after`` but not in ``before``; what the user added since stays."""
    module.__class__ = before.type
    _module_state_mapping.pop(module, None)
    attributes = vars(module)
    for name, hooks in after.hooks.items():
        for key in hooks - before.hooks.get(name, frozenset()):
            attributes[name].pop(key, None)
    for name in after.attributes - before.attributes:
        attributes.pop(name, None)
    for name, number in before.numbers.items():
        if after.numbers.get(name, number) != number:
            attributes[name] = number
