"""Whole tensors out of the parts that ranks hold, without a collective.

Each rank hands back its own part of every tensor and where it belongs; the test puts them together.
That is much cheaper than gathering on the ranks, and shows whether copies of one part agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


@dataclass(frozen=True)
class Piece:
    """A rank's part of a tensor of the given shape, from `offset` on."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    part: Tensor

    @property
    def place(self) -> tuple[slice, ...]:
        sizes = zip(self.offset, self.part.shape, strict=True)
        return tuple(slice(start, start + size) for start, size in sizes)


Pieces = dict[str, Piece]
Weights = dict[str, Tensor]


def piece(tensor: Tensor) -> Piece:
    """A copy of this rank's part of a tensor that may be sharded."""
    if not isinstance(tensor, DTensor):
        return Piece(tuple(tensor.shape), (0,) * tensor.ndim, tensor.detach().clone())
    assert not any(placement.is_partial() for placement in tensor.placements)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Piece(tuple(tensor.shape), tuple(offset), tensor.detach().to_local().clone())


def pieces(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> Pieces:
    """This rank's part of each named tensor, as of `module.named_parameters()`."""
    return {name: piece(tensor) for name, tensor in dict(tensors).items()}


def assemble(by_rank: Sequence[Pieces]) -> Weights:
    """Put the parts of all ranks together; what no rank holds is NaN, or missing.

    Raises:
        AssertionError: Two copies of one part differ in a bit.
    """
    names = dict.fromkeys(name for parts in by_rank for name in parts)
    return {name: _join(name, [parts[name] for parts in by_rank if name in parts]) for name in names}


def _join(name: str, parts: Sequence[Piece]) -> Tensor:
    whole = torch.full(parts[0].shape, float("nan"), dtype=parts[0].part.dtype)
    for rank, part in enumerate(parts):
        assert part.shape == tuple(whole.shape), f"{name} has another shape on rank {rank}"
        known = whole[part.place]
        assert ((known == part.part) | known.isnan()).all(), f"rank {rank}'s copy of {name} differs"
        whole[part.place] = part.part
    return whole
