"""What stands on a stage in the place of modules that live on other stages.

The user's step runs on every stage up to the stage's own blocks, so it meets modules that are not there. A placeholder
keeps such a module's shape on the meta device, outside of the registry of parameters: called, it returns tensors of
the right shape that hold no numbers (NaN). They serve to work out masks and positions; that nothing else comes of
them is verified by :class:`lightning_par.pipeline_parallel.passage.Passage`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_par.pipeline_parallel.passage import LeaveStage, Origin, Passage, find_hidden
from lightning_par.pipeline_parallel.trunk import CannotSplitError

__all__ = [
    "AbsentBlock",
    "LateStandIn",
    "NextBlock",
    "Placeholder",
    "Site",
    "StandIn",
    "adopt",
    "copy_shell",
    "meta_twin",
    "to_meta",
]

_OWN = {"_modules", *(name for name in vars(nn.Module()) if "hooks" in name)}
"""Attributes of a module that a second object of it does not share."""
_MAX_SHAPES = 64
"""Calls of different shapes whose results are kept."""


def adopt(source: nn.Module, target: nn.Module) -> None:
    """Give ``target`` all attributes of ``source`` but its children and hooks."""
    for name, value in vars(source).items():
        if name not in _OWN:
            bound = isinstance(value, MethodType) and value.__self__ is source
            vars(target)[name] = MethodType(value.__func__, target) if bound else value


def copy_shell(module: nn.Module) -> nn.Module:
    """A second object of ``module`` with the same children, parameters and attributes, and hooks of its own.

    Neither a constructor nor a copying method of the user runs.
    """
    copy = object.__new__(type(module))
    adopt(module, copy)
    vars(copy).update({name: type(value)(value) for name, value in vars(module).items() if name in _OWN})
    return copy


def meta_twin(module: nn.Module, memo: dict[nn.Module, nn.Module]) -> nn.Module:
    """A second object of ``module`` and all below it on the meta device, without hooks.

    Args:
        module: Left as it is.
        memo: Twins made before; gets the new ones.
    """
    if module in memo:
        return memo[module]
    twin = memo[module] = object.__new__(type(module))
    adopt(module, twin)
    # Lists and dictionaries become new ones, so that the twin's forward writes into none of the user's.
    state = {name: tree_map_only(Tensor, to_meta, value) for name, value in vars(twin).items()}
    state |= {name: value for name, value in vars(nn.Module()).items() if name in _OWN}
    state["_modules"] = {
        name: child if child is None else meta_twin(child, memo) for name, child in module._modules.items()
    }
    vars(twin).update(state)
    return twin


def to_meta(tensor: Tensor) -> Tensor:
    """A tensor, or parameter, of the same shape and type on the meta device."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


@dataclass
class Site:
    """Where the tensors of a rank are; shared by its placeholders."""

    device: torch.device


class Placeholder(nn.Module):
    """Stands for a module of another stage. Attributes are read from the module's twin on the meta device.

    Args:
        name: Dotted name of the module.
        twin: The module on the meta device.
        passage: That of the stage.
        site: Where the rank's tensors are; ``.to()`` changes it.
    """

    way_out = ""
    owns_memory = False

    def __init__(self, name: str, twin: nn.Module, passage: Passage, site: Site) -> None:
        super().__init__()
        self._name = name
        self._passage = passage
        self._site = site
        self._results: dict[Any, Any] = {}
        vars(self)["_twin"] = twin  # not registered

    @property
    def _origin(self) -> Origin:
        kind = type(self._twin).__name__
        return Origin(f"what comes from {self._name} ({kind}), which lives on another stage", self.way_out)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return tensors of the right shape and no numbers."""
        return self._stand("forward", *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        twin = vars(self).get("_twin")
        if twin is None:
            raise AttributeError(name)
        value = getattr(twin, name)
        if isinstance(value, nn.Module):
            return self._part(value)
        if isinstance(value, MethodType) and value.__self__ is twin:
            return partial(self._stand, name)
        return self._site.device if isinstance(value, torch.device) else self._fill(value, self._site.device, False)

    def _part(self, twin: nn.Module) -> nn.Module:
        return type(self)(self._name, twin, self._passage, self._site)

    def _apply(self, fn: Any, recurse: bool = True) -> Placeholder:
        """Follow ``.to()``: the data type goes to the twin, the device to the site."""

        def moved(dtype: torch.dtype) -> Tensor:
            return fn(torch.empty(0, dtype=dtype, device=self._site.device))

        self._twin._apply(lambda tensor: tensor.to(moved(tensor.dtype).dtype))
        self._site.device = moved(torch.float32).device
        self._results.clear()
        return self

    def _check_running(self) -> None:
        if self._passage.method is None:
            raise RuntimeError(
                f"{self._name} is called outside of a step, but lives on another stage: no rank of a pipeline holds "
                "the whole module. Compute in a training, validation, test or predict step."
            )

    def _stand(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self._check_running()
        leaves = tree_leaves((args, kwargs))
        key = (method, self._passage.training, len(args), *kwargs, *map(_signature, leaves))
        if key not in self._results:
            if len(self._results) >= _MAX_SHAPES:
                self._results.clear()
            self._results[key] = self._run_twin(method, args, kwargs)
        devices = (leaf.device for leaf in leaves if isinstance(leaf, Tensor))
        return self._fill(self._results[key], next(devices, self._site.device), self.owns_memory)

    def _run_twin(self, method: str, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, to_meta, (args, kwargs))
        with torch.no_grad():
            return getattr(self._twin.train(self._passage.training), method)(*args, **kwargs)

    def _fill(self, tree: Any, device: torch.device, owns_memory: bool) -> Any:
        filled = tree_map_only(Tensor, partial(_no_numbers, device=device, owns_memory=owns_memory), tree)
        self._passage.mark(filled, self._origin)
        return filled


class AbsentBlock(Placeholder):
    """A block of an earlier stage: what it returns is replaced at the entry of this stage's first block."""

    way_out = (
        "Only the first floating-point tensor that a block is called with travels from stage to stage. Keep all else "
        "that blocks pass on inside of a block, or compute it before the blocks; else use pipeline_parallel_size=1."
    )

    def _part(self, twin: nn.Module) -> nn.Module:
        return Placeholder(self._name, twin, self._passage, self._site)

    def _run_twin(self, method: str, args: Any, kwargs: Any) -> Any:
        try:
            return super()._run_twin(method, args, kwargs)
        except Exception as error:
            # Not every operation has a shape-only form; most blocks return what they are called with.
            found = find_hidden(args, kwargs)
            if found is None:
                raise
            self._passage.excuses[self._name] = f"{type(error).__name__}: {error}"
            return to_meta(found[1])


class NextBlock(AbsentBlock):
    """A block of a later stage: reaching it ends the step on this one."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Leave with the hidden state that this block is called with."""
        self._check_running()
        passage = self._passage
        if not passage.entered:
            raise CannotSplitError(
                f"{passage.method} calls {self._name} without having called the first block of the stage before it. A "
                "pipeline needs every block called once, in order; else use pipeline_parallel_size=1."
            )
        found = find_hidden(args, kwargs)
        if found is None:
            raise CannotSplitError(
                f"{self._name} is called without a floating-point tensor, so nothing can travel to its stage. "
                f"{self.way_out}"
            )
        passage.hidden = found[1]
        if passage.hidden.is_nested:
            raise CannotSplitError(
                f"{self._name} is called with a nested tensor, which has no shape to send. Build the encoder around it "
                "with enable_nested_tensor=False."
            )
        raise LeaveStage


class StandIn(Placeholder):
    """A module that is called before the blocks, such as an embedding. What it returns may be written to in place."""

    way_out = (
        "Name it in pipeline_last if it is only used after the blocks. If before them too, or by the blocks, name it "
        "in both, pipeline_first and pipeline_last: it then lives on every stage."
    )
    owns_memory = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return tensors of the right shape and no numbers."""
        if self._passage.entered and self._passage.method is not None:
            self._origin.refuse(f"{self._passage.method} calls {self._name} after the blocks: it uses {{}}")
        return super().forward(*args, **kwargs)

    def _run_twin(self, method: str, args: Any, kwargs: Any) -> Any:
        try:
            return super()._run_twin(method, args, kwargs)
        except Exception as error:
            raise CannotSplitError(
                f"{self._name} ({type(self._twin).__name__}) lives on another stage, and its shape there can't be "
                f"worked out: {type(error).__name__}: {error}. {self.way_out}"
            ) from error


class LateStandIn(Placeholder):
    """A module that is called after the blocks, such as a head: no earlier stage comes to it."""

    way_out = (
        "Name it in pipeline_first if it is only used before the blocks. If after them too, or by the blocks, name it "
        "in both, pipeline_first and pipeline_last: it then lives on every stage."
    )

    def _stand(self, method: str, *args: Any, **kwargs: Any) -> NoReturn:
        self._check_running()
        self._origin.refuse(
            f"{self._passage.method} calls {self._name} before the blocks, but by its place after them in the module "
            "it is on the last stage: it uses {}"
        )


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf)


def _no_numbers(tensor: Tensor, device: torch.device, owns_memory: bool) -> Tensor:
    nothing = torch.nan if tensor.is_floating_point() or tensor.is_complex() else 0
    if owns_memory:
        return torch.full(tensor.shape, nothing, dtype=tensor.dtype, device=device)
    return torch.full((), nothing, dtype=tensor.dtype, device=device).expand(tensor.shape)
