"""Creating parameters that were built on the meta device, a unit at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["check_can_materialize", "materialize"]


def check_can_materialize(root: nn.Module) -> None:
    """Check that every module with meta tensors can be initialised.

    Raises:
        ValueError: If a module has parameters or buffers on the meta device and nobody says how to initialise it.
    """
    lost = [
        f"{name or 'the module itself'} ({type(module).__name__})"
        for name, module in root.named_modules()
        if _has_meta(module) and not _initializers(root, name, module)
    ]
    if lost:
        raise ValueError(
            f"{', '.join(lost)} was built on the meta device, and there is no way to initialise it. Give its class a "
            "`reset_parameters()` method, or a module above it an `_init_weights(module)` method."
        )


def materialize(root: nn.Module, members: Iterable[tuple[str, nn.Module]], device: torch.device) -> None:
    """Give the meta tensors of ``members`` memory on ``device`` and initialise them, in order.

    A module is initialised by its own ``reset_parameters()`` and then by ``_init_weights(module)`` of the nearest
    module above it that has one, the convention of Hugging Face models.

    Args:
        root: The module that ``members`` are named in.
        members: Dotted name and module; children are not descended into.
        device: Where the tensors are created.

    Raises:
        ValueError: If the initialisation leaves out a tensor.
    """
    for name, module in members:
        if _has_meta(module):
            module.to_empty(device=device, recurse=False)
            with torch.no_grad():
                _mark_uninitialised(module)
                for initialize in _initializers(root, name, module):
                    initialize()
            _check_initialised(name, module)


def _mark_uninitialised(module: nn.Module) -> None:
    for tensor in _own_tensors(module):
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)


def _check_initialised(name: str, module: nn.Module) -> None:
    own = chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
    missed = [key for key, tensor in own if tensor.is_floating_point() and tensor.isnan().any()]
    if missed:
        raise ValueError(
            f"{name or 'the module itself'} ({type(module).__name__}) was built on the meta device, and its "
            f"initialisation leaves out {', '.join(missed)}. Set it in the `reset_parameters()` method of its class or "
            "in the `_init_weights(module)` method of a module above it."
        )


def _has_meta(module: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in _own_tensors(module))


def _own_tensors(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(recurse=False), module.buffers(recurse=False))


def _initializers(root: nn.Module, name: str, module: nn.Module) -> list[Callable[[], Any]]:
    """What initialises ``module``, as calls without arguments, in order."""
    own = getattr(module, "reset_parameters", None)
    parts = name.split(".") if name else []
    above = [root.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1)]
    methods = (getattr(parent, "_init_weights", None) for parent in above)
    owners = next((method for method in methods if callable(method)), None)
    return [*([own] if callable(own) else []), *([partial(owners, module)] if owners is not None else [])]
