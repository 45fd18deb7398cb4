"""The part of a strategy that knows ranks and groups but no model: launch, process group, mesh, collectives."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _distributed_is_initialized,
    _get_default_process_group_backend_for_device,
)
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.fabric.utilities.seed import reset_seed
from torch import Tensor

from lightning_par.data_parallel import ServerOptions
from lightning_par.layout import AUTO, Degree, ParallelLayout, check_degrees, check_zero
from lightning_par.process_group import ensure_process_group, set_mesh_coordinates
from lightning_par.strategies.launcher import ScriptLauncher
from lightning_par.strategies.lightning import LightningStrategy

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["DEFAULT_TIMEOUT", "OnMesh"]

T = TypeVar("T")
DEFAULT_TIMEOUT = timedelta(minutes=30)

_REDUCE_OPS = {
    "mean": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "product": dist.ReduceOp.PRODUCT,
}


class OnMesh(LightningStrategy):
    """Ranks laid out on a mesh.

    Args:
        data_parallel_size: Number of ranks that see different batches, or ``"auto"``.
        tensor_parallel_size: Number of ranks that share each planned layer, or ``"auto"``.
        pipeline_parallel_size: Number of pipeline stages.
        zero_stage: 0, 1, 2 or 3.
        zero_shard_size: Ranks that share one copy of the model state.
        parameter_server: Which rank of the data axis steps for all of them; ``None`` if each does.
        process_group_backend: ``None`` chooses by device.
        timeout: How long a collective waits for a missing rank.
        **kwargs: Lightning's own arguments.

    Raises:
        ValueError: If the degrees or the stage make no sense by themselves.
    """

    driver = "Trainer"
    """What drives the strategy, in messages."""
    starts = "the Trainer starts to fit, validate, test or predict"
    """When it connects the processes and lays out modules, in messages."""

    def __init__(
        self,
        data_parallel_size: Degree = AUTO,
        tensor_parallel_size: Degree = 1,
        pipeline_parallel_size: Degree = 1,
        zero_stage: int = 0,
        zero_shard_size: int | None = None,
        parameter_server: ServerOptions | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = DEFAULT_TIMEOUT,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._degrees: dict[str, Degree] = {
            "data_parallel_size": data_parallel_size,
            "tensor_parallel_size": tensor_parallel_size,
            "pipeline_parallel_size": pipeline_parallel_size,
        }
        check_degrees(self._degrees)
        check_zero(zero_stage, zero_shard_size)
        self.zero_stage = zero_stage
        self.zero_shard_size = zero_shard_size
        self._parameter_server = parameter_server
        self._num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout = timeout
        self._layout: ParallelLayout | None = None
        self._mesh: DeviceMesh | None = None

    @property
    def num_nodes(self) -> int:
        """Number of machines."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        self._num_nodes = number

    @property
    def layout(self) -> ParallelLayout:
        """Degrees by axis; known as soon as the Trainer or Fabric is constructed.

        Raises:
            RuntimeError: If asked for earlier.
        """
        if self._layout is None:
            raise RuntimeError(f"The layout is known once a {self.driver} is constructed with this strategy.")
        return self._layout

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh; known once the processes are connected (in ``LightningModule.setup``, or after a launch).

        Raises:
            RuntimeError: If asked for earlier.
        """
        if self._mesh is None:
            raise RuntimeError(f"The mesh is made when {self.starts}.")
        return self._mesh

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's position along each axis."""
        return self.layout.coordinates(self.global_rank)

    @property
    def data_parallel_rank(self) -> int:
        """Index of this rank among those that see different batches."""
        return self.layout.data_parallel_rank(self.global_rank)

    @property
    def idle_rank(self) -> int | None:
        """Data-parallel rank that sees no data of its own, if there is one."""
        server = self._parameter_server
        return None if server is None or not server.is_dedicated else server.rank

    @property
    def is_idle(self) -> bool:
        """Whether this rank sees no data of its own, and takes part in no mean over those that do."""
        return self.data_parallel_rank == self.idle_rank

    @property
    def holds_optimizer_state(self) -> bool:
        """Whether this rank's optimizers step."""
        server = self._parameter_server_among_several
        return server is None or server.rank == self.data_parallel_rank

    @property
    def collecting_rank(self) -> int:
        """Global rank that full state is collected on first: one that holds optimizer state."""
        server = self._parameter_server_among_several
        return 0 if server is None else server.rank * self.layout.tp

    @property
    def _parameter_server_among_several(self) -> ServerOptions | None:
        return self._parameter_server if self.layout.data_parallel_size > 1 else None

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks that see different batches."""
        return self.layout.data_parallel_size - (self.idle_rank is not None)

    @property
    def data_rank(self) -> int:
        """Whose share of the data this rank reads; an idle one the first's, which it only looks at."""
        if self.idle_rank is None or self.data_parallel_rank < self.idle_rank:
            return self.data_parallel_rank
        return 0 if self.is_idle else self.data_parallel_rank - 1

    @property
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Number of ranks on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.num_data_ranks, "rank": self.data_rank}

    @property
    def process_group_backend(self) -> str | None:
        """Backend of the process group."""
        return self._process_group_backend

    def set_world_ranks(self) -> None:
        """Fix this rank's place, and with it the layout; Lightning calls this before any process starts.

        Raises:
            ValueError: If the degrees do not multiply to the number of devices of all nodes.
        """
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
            self._layout = ParallelLayout.from_degrees(
                self.world_size,
                **self._degrees,
                zero_stage=self.zero_stage,
                zero_shard_size=self.zero_shard_size,
            )
            if self._parameter_server is not None:
                self._parameter_server.check(self._layout.data_parallel_size)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        # Also in the ranks that a script has started: there it sees to it that they leave with their parent.
        self._launcher = ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Connect the processes, and make the mesh."""
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)
        reset_seed()
        self.set_world_ranks()
        self._connect_processes()
        self._make_mesh()

    def _make_mesh(self) -> None:
        """Take this rank's place on the mesh, and make it if there is none; a collective then."""
        set_mesh_coordinates(self.coordinates, self._role)
        if self._mesh is None:
            self._mesh = self.layout.build_mesh(self.root_device.type, self._timeout)

    @property
    def _role(self) -> str | None:
        """What this rank is to the others, if they are not all alike."""
        if self._parameter_server is None:
            return None
        return "parameter server" if self.data_parallel_rank == self._parameter_server.rank else "worker"

    def _connect_processes(self) -> None:
        assert self.cluster_environment is not None
        device = self.root_device
        self._process_group_backend = self._process_group_backend or _get_default_process_group_backend_for_device(
            device
        )
        made_new = ensure_process_group(
            self.cluster_environment,
            self._process_group_backend,
            timeout=self._timeout,
            device_id=device if device.type != "cpu" else None,
        )
        if made_new:
            self._mesh = None

    def barrier(self, name: str | None = None) -> None:
        # After an exception the other ranks do not come: waiting for them would hide the error behind a timeout.
        if not _distributed_is_initialized() or self.is_failing:
            return
        on_gpu = self.root_device.type == "cuda"
        dist.barrier(device_ids=[self.root_device.index] if on_gpu else None)

    def broadcast(self, obj: T, src: int = 0) -> T:
        if not _distributed_is_initialized():
            return obj
        boxed = [obj]
        dist.broadcast_object_list(boxed, src)
        return boxed[0]

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: dist.ReduceOp | str | None = "mean") -> Any:
        """Reduce a tensor over the ranks that see different batches.

        Args:
            tensor: Any tensor; other values are returned as they are.
            group: Process group, the data axis by default: ranks that share a batch hold the same value.
            reduce_op: ``"mean"`` (default), ``"sum"``, ``"max"``, ``"min"``, ``"product"`` or a ``ReduceOp``.

        Returns:
            A new tensor on the root device. Means are floating-point, so integers are not truncated.

        Raises:
            ValueError: If ``reduce_op`` is an unknown word.
        """
        if not isinstance(tensor, Tensor) or not _distributed_is_initialized():
            return tensor
        over_data = group is None
        group = self.mesh.get_group("dp") if group is None else group
        operation, is_mean = _reduce_operation(reduce_op)
        result = tensor.detach().to(self.root_device, copy=True)
        if is_mean and not result.is_floating_point():
            result = result.float()
        if over_data and self.is_idle:
            result = _neutral(result, operation)
        dist.all_reduce(result, op=operation, group=group)
        return result / (self.num_data_ranks if over_data else dist.get_world_size(group)) if is_mean else result

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        # All ranks decide together, also those that share a batch.
        votes = self.reduce(torch.tensor(int(decision)), group=dist.group.WORLD, reduce_op="min" if all else "max")
        return bool(votes)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor from the ranks that see different batches (or from ``group``), stacked in a new first dim."""
        over_data = group is None and _distributed_is_initialized()
        group = self.mesh.get_group("dp") if over_data else group
        gathered = _all_gather_ddp_if_available(tensor, group=group, sync_grads=sync_grads)
        if not over_data or self.idle_rank is None:
            return gathered
        return torch.cat([gathered[: self.idle_rank], gathered[self.idle_rank + 1 :]])

    @property
    def is_failing(self) -> bool:
        """Whether the run is on its way out of an exception, where no collective may start."""
        return False


def _neutral(tensor: Tensor, operation: Any) -> Tensor:
    """What a rank adds that has nothing to add."""
    limits = torch.finfo(tensor.dtype) if tensor.is_floating_point() else torch.iinfo(tensor.dtype)
    neutral = {
        dist.ReduceOp.SUM: 0,
        dist.ReduceOp.PRODUCT: 1,
        dist.ReduceOp.MAX: limits.min,
        dist.ReduceOp.MIN: limits.max,
    }
    if operation not in neutral:
        raise ValueError(f"reduce_op={operation} can't leave out a dedicated server. Use sum, mean, max or min.")
    return torch.full_like(tensor, neutral[operation])


def _reduce_operation(reduce_op: dist.ReduceOp | str | None) -> tuple[Any, bool]:
    """The backend's operation and whether to divide by the number of ranks: gloo knows no average."""
    if reduce_op is None:
        reduce_op = "mean"
    if not isinstance(reduce_op, str):
        is_average = reduce_op == dist.ReduceOp.AVG
        return (dist.ReduceOp.SUM if is_average else reduce_op), is_average
    name = reduce_op.lower()
    if name not in _REDUCE_OPS:
        raise ValueError(f"reduce_op={reduce_op!r} is unknown. Choose one of {', '.join(_REDUCE_OPS)}.")
    return _REDUCE_OPS[name], name in ("mean", "avg")
