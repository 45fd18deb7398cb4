"""The one counter of collectives: calls and bytes, by mesh axis and by kind.

It watches the dispatcher, so it sees every collective whoever issues it: ``DistributedDataParallel``'s buckets,
``fully_shard``'s gathers, DTensor's redistributions, our own reductions. What is counted is the *algorithmic* volume of
the ZeRO paper (arXiv 1910.02054, section 7): an all-reduce of ``n`` elements moves ``2n`` (a reduce-scatter and an
all-gather), an all-gather moves its output, a reduce-scatter its input, each by every rank of the group. The factor
``(N - 1) / N`` of a ring is left out, so figures compare directly with 2 Psi and 3 Psi.

Watching costs Python time per operator: measure a few steps, not a whole training run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["CommunicationCounter", "Traffic"]

FLATTENED = "dp"
WORLD = "world"
OTHER = "other"


@dataclass(frozen=True)
class _Collective:
    """How to count one operator: its kind, where its full-size tensor is, and how often its bytes move."""

    kind: str
    argument: int = 0
    factor: int = 1


_ALL_REDUCE = _Collective("all_reduce", factor=2)
_BARRIER = _Collective("barrier", factor=0)
# Operator -> how to count it. In the `c10d` family argument 0 is the output where there is one, argument 1 the input.
# In the functional family argument 0 is the input, and a gather's output is its input times the group's size.
_COLLECTIVES: dict[str, _Collective] = {
    "c10d::allreduce_": _ALL_REDUCE,
    "c10d::allreduce_coalesced_": _ALL_REDUCE,
    "c10d::allgather_": _Collective("all_gather"),
    "c10d::_allgather_base_": _Collective("all_gather"),
    "c10d::allgather_coalesced_": _Collective("all_gather"),
    "c10d::allgather_into_tensor_coalesced_": _Collective("all_gather"),
    "c10d::reduce_scatter_": _Collective("reduce_scatter", argument=1),
    "c10d::_reduce_scatter_base_": _Collective("reduce_scatter", argument=1),
    "c10d::reduce_scatter_tensor_coalesced_": _Collective("reduce_scatter", argument=1),
    "c10d::broadcast_": _Collective("broadcast"),
    "c10d::reduce_": _Collective("reduce"),
    "c10d::scatter_": _Collective("scatter", argument=0),
    "c10d::gather_": _Collective("gather", argument=1),
    "c10d::alltoall_": _Collective("all_to_all"),
    "c10d::alltoall_base_": _Collective("all_to_all"),
    "c10d::send": _Collective("send"),
    "c10d::recv_": _Collective("recv", factor=0),
    "c10d::barrier": _BARRIER,
    "c10d::monitored_barrier_": _BARRIER,
    "_c10d_functional::all_reduce": _ALL_REDUCE,
    "_c10d_functional::all_reduce_": _ALL_REDUCE,
    "_c10d_functional::all_reduce_coalesced": _ALL_REDUCE,
    "_c10d_functional::all_reduce_coalesced_": _ALL_REDUCE,
    "_c10d_functional::all_gather_into_tensor": _Collective("all_gather"),
    "_c10d_functional::all_gather_into_tensor_coalesced": _Collective("all_gather"),
    "_c10d_functional::reduce_scatter_tensor": _Collective("reduce_scatter"),
    "_c10d_functional::reduce_scatter_tensor_coalesced": _Collective("reduce_scatter"),
    "_c10d_functional::all_to_all_single": _Collective("all_to_all"),
    "_c10d_functional::broadcast": _Collective("broadcast"),
    "_c10d_functional::broadcast_": _Collective("broadcast"),
}
_FUNCTIONAL_GATHERS = ("_c10d_functional::all_gather_into_tensor",)


@dataclass
class Traffic:
    """Calls and bytes of one kind of collective on one axis.

    Attributes:
        calls: Number of times this rank entered the collective.
        bytes: Algorithmic volume in bytes (see the module's text).
    """

    calls: int = 0
    bytes: int = 0


class CommunicationCounter(TorchDispatchMode):
    """Counts this rank's collectives while it is entered as a context manager.

    Args:
        mesh: The device mesh whose axes name the process groups. Collectives on all ranks count as ``"world"``, on
            groups the mesh does not know as ``"other"``. Without a mesh everything is ``"world"`` or ``"other"``.

    Example::

        with CommunicationCounter(mesh) as counter:
            loss.backward()
        counter.bytes_by_axis()  # {"dp_shard": 1024}
    """

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self._axis_of_group = _axes_by_group(mesh)
        self.traffic: dict[tuple[str, str], Traffic] = defaultdict(Traffic)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count ``func`` if it is a collective, and run it."""
        name = func._schema.name
        # Two string tests keep the common operator cheap; any other member of these families would be a collective
        # that slipped through, or a wait.
        if name.startswith(("c10d::", "_c10d_functional::")) and (rule := _COLLECTIVES.get(name)):
            self._count(rule, name, func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def bytes_by_axis(self, kind: str | None = None) -> dict[str, int]:
        """Bytes by axis, for the axes that moved any, of one ``kind`` of collective or of all."""
        return self._sum_by_axis(lambda traffic: traffic.bytes, kind)

    def calls(self, kind: str | None = None) -> dict[str, int]:
        """Number of collectives by axis, of one ``kind`` or of all."""
        return self._sum_by_axis(lambda traffic: traffic.calls, kind)

    def table(self) -> list[dict[str, str | int]]:
        """Rows ``axis, collective, calls, bytes``, sorted, for printing."""
        return [
            {"axis": axis, "collective": kind, "calls": traffic.calls, "bytes": traffic.bytes}
            for (axis, kind), traffic in sorted(self.traffic.items())
        ]

    def _sum_by_axis(self, measure: Callable[[Traffic], int], kind: str | None = None) -> dict[str, int]:
        total: dict[str, int] = defaultdict(int)
        for (axis, this_kind), traffic in self.traffic.items():
            if kind in (None, this_kind):
                total[axis] += measure(traffic)
        return {axis: amount for axis, amount in sorted(total.items()) if amount}

    def _count(self, rule: _Collective, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        group = _group_of(func, args, kwargs)
        size = sum(tensor.nbytes for tensor in _tensors(args[rule.argument])) if rule.factor else 0
        if name.startswith(_FUNCTIONAL_GATHERS):
            size *= group.size()
        entry = self.traffic[self._axis(group), rule.kind]
        entry.calls += 1
        entry.bytes += rule.factor * size

    def _axis(self, group: dist.ProcessGroup) -> str:
        if axis := self._axis_of_group.get(group.group_name):
            return axis
        return WORLD if group.size() == dist.get_world_size() else OTHER


def _axes_by_group(mesh: DeviceMesh | None) -> dict[str, str]:
    """Process-group name -> axis name. Axes of one rank move nothing and are left out."""
    if mesh is None:
        return {}
    names = [name for name in (FLATTENED, *(mesh.mesh_dim_names or ())) if _has_axis(mesh, name)]
    return {mesh.get_group(name).group_name: name for name in names}


def _has_axis(mesh: DeviceMesh, name: str) -> bool:
    try:
        return mesh.get_group(name).size() > 1
    except (KeyError, RuntimeError, ValueError):  # a mesh without the flattened axis
        return False


def _group_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dist.ProcessGroup:
    """The process group argument: an object in the ``c10d`` family, a name in the functional one."""
    values = [*args, *kwargs.values()]
    for value in values:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
        if isinstance(value, dist.ProcessGroup):
            return value
    name = [value for value in values if isinstance(value, str)][-1]
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
