"""The degrees of parallelism, in one frozen place.

A :class:`ParallelLayout` says how many ranks stand along each axis of the device mesh. It infers at most one degree,
checks that the degrees multiply to the world size, and makes the one :class:`~torch.distributed.device_mesh.DeviceMesh`
that every mechanism takes its process groups from. Nothing else in the package creates a process group.

Axes, outermost first: ``pp`` (pipeline stages), ``dp_replicate`` (model replicas), ``dp_shard`` (ZeRO shards of one
replica) and ``tp`` (tensor parallelism). Ranks next to each other differ in ``tp`` first, so that the axis that talks
most stays inside a node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AXES", "AUTO", "Degree", "ParallelLayout"]

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
AUTO: Literal["auto"] = "auto"
Degree = int | Literal["auto"]

_DEGREE_NAMES = ("pipeline_parallel_size", "data_parallel_size", "tensor_parallel_size")
_ZERO_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class ParallelLayout:
    """How many ranks stand along each mesh axis.

    Attributes:
        pp: Number of pipeline stages.
        dp_replicate: Number of replicas of the (possibly sharded) model state.
        dp_shard: Number of ranks that share one copy of the model state (ZeRO).
        tp: Number of ranks that share each planned layer.

    Raises:
        ValueError: If a degree is not a positive integer.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            _check_positive(axis, getattr(self, axis))

    @classmethod
    def from_degrees(
        cls,
        world_size: int,
        *,
        data_parallel_size: Degree = AUTO,
        tensor_parallel_size: Degree = 1,
        pipeline_parallel_size: Degree = 1,
        zero_stage: int = 0,
        zero_shard_size: int | None = None,
    ) -> ParallelLayout:
        """Work out the layout of ``world_size`` ranks.

        Args:
            world_size: Number of ranks in the job.
            data_parallel_size: Number of ranks that see different batches, or ``"auto"``.
            tensor_parallel_size: Number of ranks that share each layer, or ``"auto"``.
            pipeline_parallel_size: Number of pipeline stages, or ``"auto"``.
            zero_stage: 0 replicates the model state over the data axis; 1, 2 and 3 shard it.
            zero_shard_size: Ranks that share one copy of the model state; ``None`` means the whole data axis. A
                smaller divisor of the data axis gives hierarchical sharding (shard within, replicate across).

        Returns:
            The layout, whose degrees multiply to ``world_size``.

        Raises:
            ValueError: If the degrees do not multiply to the world size, more than one is ``"auto"``, the stage is
                unknown, or the shard size does not divide the data axis.
        """
        check_zero(zero_stage, zero_shard_size)
        degrees = (pipeline_parallel_size, data_parallel_size, tensor_parallel_size)
        pp, dp, tp = _infer(world_size, dict(zip(_DEGREE_NAMES, degrees, strict=True)))
        shard = 1 if zero_stage == 0 else zero_shard_size or dp
        if dp % shard:
            raise ValueError(
                f"zero_shard_size={shard} does not divide the data axis of {dp} ranks. Choose a divisor of {dp}: "
                f"{_divisors(dp)}, or leave it out to shard over all of them."
            )
        return cls(pp=pp, dp_replicate=dp // shard, dp_shard=shard, tp=tp)

    @property
    def world_size(self) -> int:
        """Number of ranks in the layout."""
        return math.prod(self.as_dict().values())

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that see different batches."""
        return self.dp_replicate * self.dp_shard

    def as_dict(self) -> dict[str, int]:
        """Degrees by axis, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of global ``rank`` along each axis.

        Raises:
            ValueError: If the rank is outside the layout.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a layout of {self.world_size} ranks")
        position = {}
        for axis in reversed(AXES):
            rank, position[axis] = divmod(rank, getattr(self, axis))
        return {axis: position[axis] for axis in AXES}

    def data_parallel_rank(self, rank: int) -> int:
        """Index of global ``rank`` among the ranks that see different batches."""
        position = self.coordinates(rank)
        return position["dp_replicate"] * self.dp_shard + position["dp_shard"]

    def build_mesh(self, device_type: str, timeout: timedelta | None = None) -> DeviceMesh:
        """Create the device mesh; a collective over all ranks of the initialised process group.

        Besides the four axes, the flattened axis ``dp`` (all ranks that see different batches) is available as
        ``mesh["dp"]``.

        Args:
            device_type: ``"cpu"``, ``"cuda"`` ...
            timeout: How long a collective of any axis waits for a missing rank; ``None`` is the backend's own.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.distributed_c10d import _set_pg_timeout

        mesh = init_device_mesh(device_type, tuple(self.as_dict().values()), mesh_dim_names=AXES)
        mesh["dp_replicate", "dp_shard"]._flatten("dp")
        if timeout is not None:
            for axis in (*AXES, "dp"):  # groups of a mesh do not take over the timeout of the whole
                _set_pg_timeout(timeout, mesh.get_group(axis))
        return mesh

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.as_dict().items() if size > 1) or "1 rank"


def check_zero(zero_stage: int, zero_shard_size: int | None) -> None:
    """Check the ZeRO arguments that need no world size.

    Raises:
        ValueError: If the stage is unknown, or a shard size is given where nothing is sharded or is not positive.
    """
    if isinstance(zero_stage, bool) or zero_stage not in _ZERO_STAGES:
        raise ValueError(
            f"zero_stage={zero_stage!r} is unknown. Choose 0 (replicate), 1 (shard optimizer states), "
            "2 (and gradients) or 3 (and parameters)."
        )
    if zero_shard_size is None:
        return
    _check_positive("zero_shard_size", zero_shard_size)
    if zero_stage == 0:
        raise ValueError(
            f"zero_shard_size={zero_shard_size} needs zero_stage 1, 2 or 3, but zero_stage=0 shards nothing. "
            "Set zero_stage, or leave zero_shard_size out."
        )


def check_degrees(degrees: dict[str, Degree]) -> None:
    """Check degrees before the world size is known.

    Raises:
        ValueError: If a degree is neither ``"auto"`` nor a positive integer, or more than one is ``"auto"``.
    """
    unknown = [name for name, degree in degrees.items() if degree == AUTO]
    if len(unknown) > 1:
        raise ValueError(f'Only one degree may be "auto", got {" and ".join(unknown)}. Give all but one as a number.')
    for name, degree in degrees.items():
        if degree != AUTO:
            _check_positive(name, degree)


def _infer(world_size: int, degrees: dict[str, Degree]) -> list[int]:
    """Fill in the one ``"auto"`` degree and check the product."""
    _check_positive("world_size", world_size)
    check_degrees(degrees)
    known = math.prod(degree for degree in degrees.values() if isinstance(degree, int))
    if AUTO in degrees.values():
        if world_size % known:
            raise ValueError(
                f"{_product(degrees)} does not fit {world_size} ranks: {known} does not divide {world_size}."
            )
        return [degree if isinstance(degree, int) else world_size // known for degree in degrees.values()]
    if known != world_size:
        raise ValueError(
            f"{_product(degrees)} = {known} ranks, but the job has {world_size}. Change a degree or the number of "
            'devices, or set one degree to "auto".'
        )
    return [degree for degree in degrees.values() if isinstance(degree, int)]


def _product(degrees: dict[str, Degree]) -> str:
    return " x ".join(f"{name}={degree}" for name, degree in degrees.items())


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be a positive integer.")


def _divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]
