"""The process group of this job: made once, reused, and replaced when the ranks change.

torch keeps one default group a process and Lightning never replaces it, so that a second run with other ranks would
silently talk over the first one's group. Here the group carries its members: asked again for the same members it is
reused; for others it is destroyed and made anew on the same store under the next number, or on a new store when the
address has changed. All ranks of one address ask in the same order, so all count the same numbers.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from lightning_par.mesh_caches import forget_meshes

__all__ = [
    "Cluster",
    "destroy_process_group",
    "ensure_process_group",
    "rank_label",
    "set_mesh_coordinates",
    "shared_store",
]

STORE_TIMEOUT = timedelta(minutes=5)
"""How long ranks wait for one another before there is a group."""
PARTING_TIMEOUT = timedelta(seconds=60)
"""How long the members of a group wait for one another before they leave it."""


class Cluster(Protocol):
    """The part of Lightning's ``ClusterEnvironment`` that a process group needs."""

    @property
    def main_address(self) -> str: ...

    @property
    def main_port(self) -> int: ...

    def global_rank(self) -> int: ...

    def world_size(self) -> int: ...


@dataclass(frozen=True)
class _Members:
    """What two groups have in common when one can stand for the other."""

    endpoint: tuple[str, int]
    rank: int
    world_size: int
    backend: str


@dataclass
class _State:
    """What this process knows about its group; one per process, as torch's default group is."""

    endpoint: tuple[str, int] | None = None
    store: dist.Store | None = None
    number: int = 0
    members: _Members | None = None
    group_store: dist.Store | None = None
    group: weakref.ref[Any] | None = None
    coordinates: dict[str, int] = field(default_factory=dict)
    role: str | None = None


_STATE = _State()


def ensure_process_group(
    cluster: Cluster,
    backend: str,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    timeout: timedelta | None = None,
    **kwargs: Any,
) -> bool:
    """Make sure that the default process group is that of the given ranks. Called by all of them, in the same order.

    Args:
        cluster: Where rank 0 is (``main_address``, ``main_port``), and the rank and world size if not given.
        backend: ``"gloo"``, ``"nccl"`` ...
        rank: This process's global rank.
        world_size: Number of ranks in the group.
        timeout: How long a collective waits for a missing rank; ``None`` takes torch's default for the backend.
        **kwargs: More arguments of ``torch.distributed.init_process_group``.

    Returns:
        Whether a new group was made: meshes and subgroups of an earlier one are then dead.

    Raises:
        RuntimeError: If a group exists that was made elsewhere and has other ranks, or if a member of the old group
            does not come to its end.
    """
    wanted = _Members(
        endpoint=(cluster.main_address, cluster.main_port),
        rank=cluster.global_rank() if rank is None else rank,
        world_size=cluster.world_size() if world_size is None else world_size,
        backend=backend,
    )
    if dist.is_initialized():
        if _is_ours():
            if wanted == _STATE.members:
                return False
            _retire(wanted.endpoint)
        else:
            _check_foreign_group(wanted)
            return False
    store = shared_store(*wanted.endpoint, rank=wanted.rank)
    dist.init_process_group(
        backend, store=store, rank=wanted.rank, world_size=wanted.world_size, timeout=timeout, **kwargs
    )
    _STATE.members, _STATE.group_store = wanted, store
    _STATE.group = weakref.ref(dist.group.WORLD)
    # Once is enough; torch warns about an NCCL group that is still there when the process ends.
    atexit.unregister(destroy_process_group)
    atexit.register(destroy_process_group)
    return True


def destroy_process_group() -> None:
    """Destroy the default group, if there is one, and forget its coordinates. Does not wait for other ranks."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        forget_meshes()
    _STATE.members = _STATE.group_store = _STATE.group = None
    _STATE.coordinates, _STATE.role = {}, None


def shared_store(address: str, port: int, *, rank: int) -> dist.Store:
    """A fresh key-value store between the ranks of one address. Called by all of them, in the same order.

    Rank 0 serves it, unless torch's elastic agent already does at that address.

    Args:
        address: Host of rank 0.
        port: Its port.
        rank: This process's global rank.
    """
    if _STATE.endpoint != (address, port) or _STATE.store is None:
        agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        _STATE.store = dist.TCPStore(
            address,
            port,
            is_master=rank == 0 and not agent_serves,
            timeout=STORE_TIMEOUT,
            wait_for_workers=False,
            multi_tenant=True,
        )
        _STATE.endpoint, _STATE.number = (address, port), 0
    # The agent's store outlives the ranks it restarts, and the keys of their group with it.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"lightning_par/{attempt}/{_STATE.number}", _STATE.store)
    _STATE.number += 1
    return store


def set_mesh_coordinates(coordinates: Mapping[str, int], role: str | None = None) -> None:
    """Remember where on the mesh this rank stands, for the messages of :func:`rank_label`.

    Args:
        coordinates: Mesh axis -> index of this rank along it.
        role: What this rank is to the others, if they are not all alike.
    """
    _STATE.coordinates = dict(coordinates)
    _STATE.role = role


def rank_label() -> str:
    """This rank in words, such as ``"rank 3 of 4 (dp_shard=1, tp=1)"``."""
    rank, world_size = _rank_and_world_size()
    words = [f"{axis}={index}" for axis, index in _STATE.coordinates.items()]
    place = ", ".join(words if _STATE.role is None else [_STATE.role, *words])
    return f"rank {rank} of {world_size}" + (f" ({place})" if place else "")


def _rank_and_world_size() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", os.environ.get("LOCAL_RANK", "0")))
    return int(rank), int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1")))


def _is_ours() -> bool:
    """Whether the default group is the very object made here; a user may have replaced it."""
    return _STATE.group is not None and _STATE.group() is dist.group.WORLD


def _retire(next_endpoint: tuple[str, int]) -> None:
    """Leave the group that was made here, with its other members unless those are another job's and have gone."""
    members, store = _STATE.members, _STATE.group_store
    if members is not None and store is not None and members.endpoint == next_endpoint:
        _meet(store, members)
    destroy_process_group()


def _check_foreign_group(wanted: _Members) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if (rank, world_size) != (wanted.rank, wanted.world_size):
        raise RuntimeError(
            f"A process group of {world_size} ranks (this is rank {rank}) already exists and was not made by "
            f"lightning_par, but this run needs {wanted.world_size} ranks (this one as rank {wanted.rank}). Call "
            "torch.distributed.destroy_process_group() before it, or start the run in a process of its own."
        )


def _meet(store: dist.Store, members: _Members) -> None:
    """Wait at the store for all members, so that none closes a connection another still reads from."""
    if store.add("parting", 1) == members.world_size:
        store.set("parted", "yes")
    try:
        store.wait(["parted"], PARTING_TIMEOUT)
    except dist.DistStoreError as error:
        raise RuntimeError(
            f"Only {store.add('parting', 0)} of {members.world_size} ranks came to the end of the earlier process "
            "group. All ranks must run the same Trainers in the same order; look for a Trainer inside a condition on "
            "the rank."
        ) from error
