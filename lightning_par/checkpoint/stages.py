"""State that lies on the stages of a pipeline, in and out of one file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_par.checkpoint.full_state import gather_full_state

__all__ = ["collect_from_stages", "localize_optimizer_state", "number_optimizer_state"]


def collect_from_stages(
    names: Iterable[str],
    states: Mapping[str, Any],
    owners: Mapping[str, int],
    group: dist.ProcessGroup,
    device: torch.device,
    keep: bool,
) -> dict[str, Any]:
    """Gather named states from the stages that own them, one at a time. A collective of the whole mesh.

    Args:
        names: All names in the order of one process; those without an owner are left out.
        states: This rank's tensors (or nested states) by name.
        owners: The pipeline rank that each name comes from.
        group: The ``pp`` axis.
        device: This rank's device.
        keep: Whether this is the first rank of its stage, which hands the stage's states on.

    Returns:
        Full states by name on the first rank of the first stage, an empty dictionary on others.
    """
    collected: dict[str, Any] = {}
    rank = group.rank()
    for name in names:
        owner = owners.get(name)
        if owner is None:
            continue
        # A list, because what is not kept comes back as an empty dictionary.
        full = gather_full_state([states[name]], keep) if rank == owner else None
        if not keep:
            continue
        if rank == owner and rank:
            dist.send_object_list([full], group=group, group_dst=0, device=device)
        if rank == 0:
            boxed = [full]
            if owner:
                dist.recv_object_list(boxed, group=group, group_src=owner, device=device)
            assert boxed[0] is not None
            collected[name] = boxed[0][0]
    return collected


def number_optimizer_state(
    named: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], names_by_group: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """An optimizer's ``state_dict()`` as one process numbers it.

    Args:
        named: State by parameter name.
        groups: Parameter groups, whose ``params`` are replaced.
        names_by_group: Parameter names of each group of the one process.
    """
    positions = _positions(names_by_group)
    return {
        "state": {position: named[name] for name, position in positions.items() if name in named},
        "param_groups": [
            {**group, "params": [positions[name] for name in names]}
            for group, names in zip(groups, names_by_group, strict=True)
        ],
    }


def localize_optimizer_state(
    full: Mapping[str, Any], names_by_group: Sequence[Sequence[str]], local_names_by_group: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """What one rank's optimizer takes of an optimizer state of one process.

    Args:
        full: State by position, and parameter groups.
        names_by_group: Parameter names of each group of the one process.
        local_names_by_group: Those of this rank's optimizer.
    """
    positions, local = _positions(names_by_group), _positions(local_names_by_group)
    return {
        "state": {
            position: full["state"][positions[name]]
            for name, position in local.items()
            if positions[name] in full["state"]
        },
        "param_groups": [
            {**group, "params": [local[name] for name in names]}
            for group, names in zip(full["param_groups"], local_names_by_group, strict=True)
        ],
    }


def _positions(names_by_group: Sequence[Sequence[str]]) -> dict[str, int]:
    return {name: position for position, name in enumerate(name for names in names_by_group for name in names)}
