"""How many bytes of model state a rank holds: measured on its tensors, and by formula."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

from torch import Tensor
from torch.optim import Optimizer

from lightning_par.gradients import local

__all__ = ["ModelStateBytes", "count_parameters", "expected_state_bytes", "measure_state_bytes", "total_state_bytes"]

_ADAM_MOMENTS = 2


class ModelStateBytes(TypedDict):
    """Bytes on this rank by kind of model state."""

    parameters: int
    gradients: int
    optimizer: int


def count_parameters(parameters: Iterable[Tensor]) -> int:
    """Number of elements of the full parameters."""
    return sum(parameter.numel() for parameter in parameters)


def measure_state_bytes(parameters: Sequence[Tensor], optimizers: Iterable[Optimizer]) -> ModelStateBytes:
    """Bytes of this rank's shards."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    states = [
        value
        for optimizer in optimizers
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, Tensor)
    ]
    return {"parameters": _nbytes(parameters), "gradients": _nbytes(gradients), "optimizer": _nbytes(states)}


def total_state_bytes(by_place: Mapping[str, ModelStateBytes]) -> ModelStateBytes:
    """The sum over places."""
    parts = list(by_place.values())
    return {
        "parameters": sum(part["parameters"] for part in parts),
        "gradients": sum(part["gradients"] for part in parts),
        "optimizer": sum(part["optimizer"] for part in parts),
    }


def expected_state_bytes(parameters: Iterable[Tensor], steps: bool = True) -> int:
    """Bytes per rank once gradients and Adam's moments exist.

    Args:
        parameters: This rank's parameters.
        steps: Whether this rank's optimizers step. A worker of a parameter server keeps nothing but parameters.

    With ``P`` parameters of 4 bytes sharded over ``N`` ranks this is the 16 P / N of the ZeRO paper (arXiv 1910.02054,
    figure 1): the parameter, its gradient and two moments, each of the parameter's own type; frozen parameters have
    none of the last three.
    """
    return sum(
        local(parameter).nbytes * (2 + _ADAM_MOMENTS if parameter.requires_grad and steps else 1)
        for parameter in parameters
    )


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)
