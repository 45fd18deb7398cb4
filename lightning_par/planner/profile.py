"""What a model needs, in figures that do not depend on the layout of data and pipeline.

A profile is of one tensor-parallel degree. It has three sections: what runs before the blocks, each kind of block, and
what runs after them up to the loss. Whatever grows with the batch is a :class:`Line` through two traced batch sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Line", "Profile", "Section", "Shape", "Unit", "Work", "shard_numel"]


@dataclass(frozen=True)
class Line:
    """A figure that grows with the samples of a micro-batch: ``fixed + per_sample * samples``."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, samples: int) -> float:
        """The figure for that many samples."""
        return self.fixed + self.per_sample * samples

    def __add__(self, other: Line) -> Line:
        return Line(self.fixed + other.fixed, self.per_sample + other.per_sample)

    def __mul__(self, factor: float) -> Line:
        return Line(self.fixed * factor, self.per_sample * factor)

    @classmethod
    def through(cls, samples: tuple[int, int], values: tuple[float, float]) -> Line:
        """The line through the figures of two batch sizes; a constant where those are one."""
        (few, many), (low, high) = samples, values
        slope = (high - low) / (many - few) if many > few else 0.0
        return cls(low - slope * few, slope) if many > few else cls(0.0, low / few)


@dataclass(frozen=True)
class Shape:
    """Parameters of one shape, as one tensor-parallel rank holds them.

    Attributes:
        size: Dims; the first is what ZeRO cuts.
        itemsize: Bytes of an element at rest.
        trains: Whether it gets a gradient.
        count: How many there are.
        is_split: Whether the tensor axis splits it.
    """

    size: tuple[int, ...]
    itemsize: int = 4
    trains: bool = True
    count: int = 1
    is_split: bool = False

    @property
    def numel(self) -> int:
        """Elements of all of them."""
        return math.prod(self.size) * self.count

    def local(self, shards: int, index: int = 0) -> int:
        """Elements of all of them that one of ``shards`` data ranks keeps."""
        return shard_numel(self.size, shards, index) * self.count


def shard_numel(size: tuple[int, ...], shards: int, index: int = 0) -> int:
    """Elements that ``fully_shard`` leaves to one rank: whole rows, as ``torch.chunk`` cuts them along the first dim.

    The first rank has most. A parameter without dims stays whole.
    """
    if not size or shards == 1:
        return math.prod(size)
    rows = math.ceil(size[0] / shards)
    return max(0, min(rows, size[0] - rows * index)) * math.prod(size[1:])


@dataclass(frozen=True)
class Unit:
    """What is gathered together (see :func:`lightning_par.data_parallel.find_units`)."""

    name: str
    shapes: tuple[Shape, ...]

    @property
    def numel(self) -> int:
        """Elements of the unit."""
        return sum(shape.numel for shape in self.shapes)


@dataclass(frozen=True)
class Work:
    """What a device does in one pass over a section.

    Attributes:
        flops: Of matrix products and attention.
        product_bytes: Read and written by those.
        other_bytes: Read and written by all other operators.
        operators: How many are launched.
        tensor_bytes: Moved on the tensor axis, counted as :mod:`lightning_par.communication` counts.
        tensor_calls: Collectives on it.
    """

    flops: Line = Line()
    product_bytes: Line = Line()
    other_bytes: Line = Line()
    operators: float = 0.0
    tensor_bytes: Line = Line()
    tensor_calls: float = 0.0


@dataclass(frozen=True)
class Section:
    """Blocks of one kind, or what is before or after them.

    Attributes:
        name: ``"before"``, ``"after"``, or the name of the first block of the kind.
        blocks: Indices of the blocks of this kind; empty beside them.
        units: Parameters. Of a kind of block, those of one.
        buffers: Bytes of the module's buffers.
        kept: Bytes that wait for the backward, of one block, what it hands on included.
        costly: Of those, what selective checkpointing keeps.
        output: Bytes of what is handed on.
        forward_peak: Most bytes alive in its forward, above those alive when it begins.
        backward_peak: The same of its backward, its own gradients of parameters included.
        forward: Work of its forward.
        backward: Work of its backward.
    """

    name: str
    blocks: tuple[int, ...] = ()
    units: tuple[Unit, ...] = ()
    buffers: int = 0
    kept: Line = Line()
    costly: Line = Line()
    output: Line = Line()
    forward_peak: Line = Line()
    backward_peak: Line = Line()
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """All its parameters."""
        return tuple(shape for unit in self.units for shape in unit.shapes)

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return sum(shape.numel for shape in self.shapes)


@dataclass(frozen=True)
class Profile:
    """A model at one tensor-parallel degree.

    Attributes:
        before: What runs before the blocks; the whole model, where there are none.
        kinds: The kinds of block.
        after: What runs after them, up to the loss.
        everywhere: Parameters that every pipeline stage holds, of the root unit.
        tied: Parameters that ``before`` and ``after`` share; they are in the units of both.
        block_costs: Of each block, for the pipeline's split; see
            :func:`lightning_par.pipeline_parallel.split.block_costs`.
        cost_before: Of what is before the blocks.
        cost_after: Of what is after them.
        source: How the figures came about.
    """

    before: Section
    kinds: tuple[Section, ...]
    after: Section
    everywhere: tuple[Shape, ...] = ()
    tied: tuple[Shape, ...] = ()
    block_costs: tuple[float, ...] = ()
    cost_before: float = 0.0
    cost_after: float = 0.0
    source: str = "traced"

    @property
    def num_blocks(self) -> int:
        """Blocks of all kinds."""
        return sum(len(kind.blocks) for kind in self.kinds)

    def kinds_in(self, blocks: Iterable[int]) -> list[tuple[Section, int]]:
        """The kinds of some blocks and how many of each."""
        wanted = set(blocks)
        counted = [(kind, len(wanted.intersection(kind.blocks))) for kind in self.kinds]
        return [(kind, count) for kind, count in counted if count]
