"""Applying a ZeRO policy to the units of a module, and steering it through an accumulation window."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_par.data_parallel.policy import ZeroPolicy

__all__ = [
    "HostShards",
    "UnitPrecision",
    "apply_data_axis",
    "defer_gradient_sync",
    "defer_reduction",
    "gather",
    "make_root",
    "reduce_now",
    "release_gathered",
    "set_last_micro_batch",
    "wrap_whole",
]


# The argument's name differs between torch releases.
_NEW_NAME, _OLD_NAME = "forward_sync_buffers", "broadcast_buffers"
_SYNC_BUFFERS = _NEW_NAME if _NEW_NAME in signature(DistributedDataParallel.__init__).parameters else _OLD_NAME


@dataclass(frozen=True)
class UnitPrecision:
    """Data types of one unit under mixed precision.

    Attributes:
        parameters: Type that parameters are gathered and used in, ``None`` for their own.
        casts_inputs: Whether floating-point inputs of the unit are cast to ``parameters``.
    """

    parameters: torch.dtype | None = None
    casts_inputs: bool = True


@dataclass(frozen=True)
class HostShards:
    """Shards that are on the host, and copied to the device as they are gathered.

    Attributes:
        pins: Whether they are page-locked.
        hold: Copies tensors to where they are held; ``None`` for ordinary host memory.
    """

    pins: bool
    hold: Callable[[Sequence[Tensor]], list[Tensor]] | None = None


def apply_data_axis(
    module: nn.Module,
    mesh: DeviceMesh,
    policy: ZeroPolicy,
    precision: UnitPrecision,
    whole: set[nn.Parameter],
    on_host: HostShards | None = None,
) -> None:
    """Shard or replicate one unit in place. Call it on inner units first.

    Args:
        module: The unit; its parameters are on the device already and equal on all ranks of the data axis.
        mesh: The root mesh with the axes ``dp_replicate`` and ``dp_shard``.
        policy: The ZeRO stage.
        precision: Data types of the unit.
        whole: Parameters to leave alone.
        on_host: Where shards are kept off the device, ``None`` for on it.
    """
    mixed = MixedPrecisionPolicy(
        param_dtype=precision.parameters,
        reduce_dtype=_sum_dtype(module),
        cast_forward_inputs=precision.casts_inputs,
    )
    options: dict[str, Any] = {"mp_policy": mixed, "ignored_params": whole}
    if on_host is not None:
        pins = on_host.pins and on_host.hold is None and mesh.device_type != "cpu"
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=pins)
    if policy.shards:
        fully_shard(module, mesh=_shard_mesh(mesh), reshard_after_forward=policy.frees_after_use, **options)
    else:
        replicate(module, mesh=mesh["dp_replicate"], **options)
    if mesh.device_type == "cpu":
        # gloo has no average: sum, then divide.
        _composable(module).set_force_sum_reduction_for_comms(True)
    if on_host is not None and on_host.hold is not None:
        _move_shards(module, on_host.hold)


def wrap_whole(module: nn.Module, mesh: DeviceMesh, find_unused_parameters: bool) -> nn.Module:
    """Replicate a whole module by ``DistributedDataParallel``, faster than unit by unit where nothing else is composed.

    Returns:
        The wrapper, or ``module`` itself if it has nothing to train.
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    # Only batch norm changes its buffers in a forward; broadcasting constant tables each step is waste.
    batch_norm = any(isinstance(child, nn.modules.batchnorm._BatchNorm) for child in module.modules())
    return DistributedDataParallel(
        module,
        device_ids=[torch.cuda.current_device()] if mesh.device_type == "cuda" else None,
        process_group=mesh.get_group("dp_replicate"),
        find_unused_parameters=find_unused_parameters,
        init_sync=False,
        gradient_as_bucket_view=True,
        **cast("dict[str, Any]", {_SYNC_BUFFERS: batch_norm}),
    )


@contextmanager
def defer_gradient_sync(root: nn.Module, policy: ZeroPolicy) -> Iterator[None]:
    """Context of every micro-batch but the last of an accumulation window; enter it before the forward."""
    if isinstance(root, DistributedDataParallel):
        with root.no_sync():
            yield
        return
    set_last_micro_batch(root, policy, last=False)
    try:
        yield
    finally:
        set_last_micro_batch(root, policy, last=True)


def make_root(module: nn.Module) -> None:
    """Make ``module`` the root of all units below it, which it would else become in its first forward.

    A block called before that, by a callback for instance, would take itself for the root.
    """
    _composable(module)._get_fsdp_state()._lazy_init()


def gather(module: nn.Module) -> None:
    """Gather the parameters of one unit, if they are not; nothing if it is not composed of units."""
    if isinstance(module, FSDPModule):
        module.unshard()


def release_gathered(root: nn.Module) -> None:
    """Free gathered copies of all units, so that none is older than the parameters an optimizer has just written."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def set_last_micro_batch(root: nn.Module, policy: ZeroPolicy, last: bool) -> None:
    """Say whether the next backward is the last of its window, if ``root`` is composed of units."""
    if not isinstance(root, FSDPModule):
        return
    if not policy.reduces_each_micro_batch:
        root.set_requires_gradient_sync(last)
    # Under hierarchical sharding the replicas only need the sum of the window.
    root.set_requires_all_reduce(last)
    if policy.shards and not policy.frees_after_use:
        root.set_reshard_after_backward(last)


def defer_reduction(root: nn.Module) -> None:
    """Keep parameters gathered and gradients whole until :func:`reduce_now`.

    For backwards that come in halves: the one for weights fires no hook that could reduce them.
    """
    if isinstance(root, FSDPModule):
        root.set_is_last_backward(False)
        root.set_reshard_after_backward(False)
        root.set_requires_gradient_sync(False)


def reduce_now(root: nn.Module) -> None:
    """Reduce the gradients that :func:`defer_reduction` has kept, and free what was gathered."""
    if not isinstance(root, FSDPModule):
        return
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(True)
    root.set_requires_gradient_sync(True)
    root_state = root._get_fsdp_state()
    for state in root_state._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            group.post_backward()
    root_state._root_post_backward_final_callback()


def _move_shards(module: nn.Module, hold: Callable[[Sequence[Tensor]], list[Tensor]]) -> None:
    """Replace the memory of one unit's shards."""
    state = _composable(module)._get_fsdp_state()
    shards: list[Any] = [shard for group in state._fsdp_param_groups for shard in group.fsdp_params]
    with torch.no_grad():
        held = hold([shard._sharded_param_data for shard in shards])
    for shard, data in zip(shards, held, strict=True):
        part = shard.sharded_param._local_tensor
        shard._sharded_param_data = data
        shard.sharded_param._local_tensor = data.as_strided(part.shape, part.stride())


def _sum_dtype(module: nn.Module) -> torch.dtype:
    """At least float32: sums of many half-precision gradients lose digits."""
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.dtype.is_floating_point}
    return reduce(torch.promote_types, dtypes, torch.float32)


def _shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    return mesh["dp_shard"] if mesh["dp_replicate"].size() == 1 else mesh["dp_replicate", "dp_shard"]


def _composable(module: nn.Module) -> FSDPModule:
    assert isinstance(module, FSDPModule)
    return module
