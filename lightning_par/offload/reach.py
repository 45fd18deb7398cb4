"""How much of a model an optimizer looks at to update one element, found out on tiny tensors."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Reach", "twin", "update_reach"]

Reach = Literal["element", "tensor", "model"]
_SCALES = (1.0, 3.0, 0.1)
"""Of the gradients of the steps that are tried."""
_SIZE = 4


def twin(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer of the same class and settings with parameter groups and a state of its own, and no hooks."""
    other: Optimizer = object.__new__(type(optimizer))
    vars(other).update(vars(optimizer))
    vars(other).pop("step", None)  # where a scheduler or an adapter has put its own
    other.param_groups = groups
    other.state = defaultdict(dict)
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            setattr(other, name, OrderedDict())
        elif name not in ("param_groups", "state", "defaults") and isinstance(value, (dict, list, set, Tensor)):
            setattr(other, name, copy.deepcopy(value))
    return other


def update_reach(optimizer: Optimizer) -> Reach:
    """What one step of ``optimizer`` on an element depends on.

    Returns:
        ``"element"`` if only on that element's own gradients, so that it may step on any part of a tensor (Adam, SGD);
        ``"tensor"`` if on others of its tensor (Adafactor, Muon); ``"model"`` if on other tensors, or if it asks for a
        closure (LBFGS).
    """
    if not optimizer.param_groups:
        return "element"
    draw = torch.Generator().manual_seed(0)
    values, gradients = torch.randn(2, 2, _SIZE, _SIZE, generator=draw)
    steps = [gradients * scale for scale in _SCALES]
    try:
        together = _stepped(optimizer, list(values), [list(step) for step in steps])
        apart = [_stepped(optimizer, [values[i]], [[step[i]] for step in steps])[0] for i in range(len(values))]
    except Exception:  # what can't step without a closure, or on tiny tensors, is not trusted with parts
        return "model"
    if not _equal(together, apart):
        return "model"
    try:
        rows = [slice(0, _SIZE // 2), slice(_SIZE // 2, _SIZE)]
        halves = [_stepped(optimizer, [values[0][part]], [[step[0][part]] for step in steps])[0] for part in rows]
    except Exception:
        return "tensor"
    return "element" if _equal([together[0]], [torch.cat(halves)]) else "tensor"


def _stepped(optimizer: Optimizer, values: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Values after steps with these gradients, of which the outer sequence has one entry a step."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    settings = {
        name: value.detach().cpu().clone() if isinstance(value, Tensor) else copy.copy(value)
        for name, value in optimizer.param_groups[0].items()
        if name != "params"
    }
    plain: dict[str, Any] = {name: False for name in ("foreach", "fused", "capturable") if name in settings}
    tiny = twin(optimizer, [{**settings, **plain, "params": parameters}])
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        type(optimizer).step(tiny)
    return [parameter.detach() for parameter in parameters]


def _equal(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(ones, others, strict=True))
