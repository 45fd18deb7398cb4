"""Errors of a forward pass, explained where tensor parallelism is the likely cause."""

from __future__ import annotations

import re

import torch

__all__ = ["explain"]

_SHAPES = re.compile(
    r"invalid for input of size|must match|cannot be multiplied|size mismatch|split_with_sizes"
    r"|non-singleton dimension|expanded size|inconsistent tensor size|unflatten|shape mismatch"
    r"|not broadcastable|can't divide axis",
    re.IGNORECASE,
)
_MIXED = re.compile(r"mixed torch\.Tensor and DTensor")
_EXPLAINED = "_explained_by_tensor_parallelism"


def explain(error: RuntimeError, module_name: str, degree: int, holds_heads: bool) -> Exception | None:
    """The error again, of its type, with a sentence on what it means on the tensor axis.

    Args:
        error: what a module's forward raised.
        module_name: class of that module.
        degree: tensor-parallel degree.
        holds_heads: whether the module calls layers that leave it a slice of their features.

    Returns:
        None if the error says nothing about shapes, or was explained by a module inside.
    """
    if isinstance(error, torch.OutOfMemoryError) or hasattr(error, _EXPLAINED):
        return None
    sentence = _sentence(str(error), module_name, degree, holds_heads)
    if sentence is None:
        return None
    explained = _same_type(error, f"{error}\n{sentence}")
    setattr(explained, _EXPLAINED, True)
    return explained


def _sentence(message: str, module_name: str, degree: int, holds_heads: bool) -> str | None:
    if _MIXED.search(message):
        return (
            f"{module_name} uses a weight that tensor parallelism splits outside the layer that holds "
            "it. Call the layer (self.head(x), not F.linear(x, self.embedding.weight)), or leave it out "
            "of the plan"
        )
    if holds_heads and _SHAPES.search(message):
        return (
            f"Under tensor parallelism of degree {degree}, {module_name} holds 1/{degree} of the heads "
            "and of the inner features on each rank. Where its forward reshapes them, use -1 for the "
            "head dimension and for all heads together: q.view(batch, length, -1, head_size), "
            "y.reshape(batch, length, -1). A layer that takes such a slice must be 'rowwise' in the "
            "plan, a layer beside one that gives it 'colwise'"
        )
    return None


def _same_type(error: Exception, message: str) -> Exception:
    try:
        return type(error)(message)
    except TypeError:  # a constructor of its own
        return RuntimeError(message)
