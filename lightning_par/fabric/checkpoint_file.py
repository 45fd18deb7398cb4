"""The content of a checkpoint: under the loop's own keys, and under those that the Trainer reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import lightning
from lightning.fabric.strategies.strategy import _apply_filter, _validate_keys_for_strict_loading
from lightning.fabric.utilities.types import _Stateful
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_par.fabric.laid_out import LaidOut

if TYPE_CHECKING:
    from lightning_par.fabric.strategy import HybridStrategy

__all__ = ["CheckpointFile"]

_ADDED = "lightning_par_added_keys"
"""In a file of Fabric's, the keys that stand for others of it."""
_WEIGHTS, _OPTIMIZERS, _SCHEDULERS = "state_dict", "optimizer_states", "lr_schedulers"


class CheckpointFile:
    """Fills and reads a checkpoint.

    Args:
        strategy: Gathers and cuts state.
    """

    def __init__(self, strategy: HybridStrategy) -> None:
        self._strategy = strategy

    def content(self, state: Mapping[str, Any], filters: Mapping[str, Callable[[str, Any], bool]]) -> dict[str, Any]:
        """What is written for ``state``. A collective; only rank 0 gets all of it.

        With one module in ``state``, a Trainer can go on from the file. The same tensors under a second key take no
        second place in it.
        """
        content: dict[str, Any] = {}
        for key, value in state.items():
            _apply_filter(key, dict(filters), self._state_of(value), content)
        added = _trainer_keys(state, content)
        return {**added, **content, _ADDED: [key for key in added if key not in content]}

    def restore(self, content: dict[str, Any], state: Any, strict: bool) -> dict[str, Any]:
        """Give the objects in ``state`` theirs of ``content``, a file of Fabric's or the Trainer's; what is left over.

        Raises:
            KeyError: If strict, and ``state`` has a key that the file has nothing for.
        """
        if not state:
            return content
        if isinstance(state, nn.Module | Optimizer):
            self._load(state, content, strict)
            return {}
        added = content.pop(_ADDED, [])
        for key, standing_for in _trainers_places(state, content).items():
            content.setdefault(key, standing_for)
        _validate_keys_for_strict_loading(state.keys(), content.keys(), strict=strict)
        for key, value in list(state.items()):
            if key not in content:
                continue
            if isinstance(value, _Stateful):
                self._load(value, content.pop(key), strict)
            else:
                state[key] = content.pop(key)
        loaded = {_WEIGHTS, _OPTIMIZERS, _SCHEDULERS} if _modules(state) else set()
        return {key: value for key, value in content.items() if key not in loaded and key not in added}

    def _state_of(self, value: Any) -> Any:
        strategy = self._strategy
        if isinstance(value, LaidOut):
            return strategy.full_module_state(_released(value))
        if isinstance(value, Optimizer):
            engine = strategy.engine_of_optimizer(value)
            return value.state_dict() if engine is None else strategy.full_optimizer_state(engine, value)
        if isinstance(value, _Stateful):
            return value.state_dict()
        return value

    def _load(self, target: Any, value: Any, strict: bool) -> None:
        strategy = self._strategy
        if isinstance(target, LaidOut):
            strategy.load_full_module_state(_released(target), value, strict)
        elif isinstance(target, nn.Module):
            target.load_state_dict(value, strict=strict)
        elif isinstance(target, Optimizer) and (engine := strategy.engine_of_optimizer(target)) is not None:
            strategy.load_full_optimizer_state(engine, target, value)
        else:
            target.load_state_dict(value)


def _trainer_keys(state: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """What the Trainer looks for, taken from what stands under the loop's own keys."""
    modules = _modules(state)
    if len(modules) != 1 or modules[0] not in content:
        return {}
    return {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": lightning.__version__,
        _WEIGHTS: content[modules[0]],
        _OPTIMIZERS: [content[key] for key in _keys(state, Optimizer) if key in content],
        _SCHEDULERS: [content[key] for key in _keys(state, LRScheduler) if key in content],
    }


def _trainers_places(state: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """For the loop's keys, what the Trainer has put under its own."""
    modules = _modules(state)
    found = {modules[0]: content[_WEIGHTS]} if len(modules) == 1 and _WEIGHTS in content else {}
    for kind, place in ((Optimizer, _OPTIMIZERS), (LRScheduler, _SCHEDULERS)):
        found.update(zip(_keys(state, kind), content.get(place, ()), strict=False))
    return found


def _modules(state: Mapping[str, Any]) -> list[str]:
    return _keys(state, LaidOut)


def _keys(state: Mapping[str, Any], kind: type) -> list[str]:
    return [key for key, value in state.items() if isinstance(value, kind)]


def _released(module: LaidOut) -> Any:
    module.engine.release()
    return module.engine
