"""One stream of random numbers for the ranks that share a batch."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

__all__ = ["share_random_state"]


def share_random_state(group: dist.ProcessGroup, device: torch.device) -> None:
    """Give all ranks of ``group`` the generator states of its first.

    Dropout masks of whole activations must agree, and so must augmentations drawn by torch, NumPy or ``random``.

    Args:
        group: The ranks that share a batch (the tensor axis).
        device: This rank's device; its generator is shared besides the host's.
    """
    if group.size() == 1:
        return
    states: list[Any] = [random.getstate(), np.random.get_state()]
    dist.broadcast_object_list(states, group_src=0, group=group, device=device)
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(_from_first(torch.get_rng_state(), group, device))
    if device.type == "cuda":
        torch.cuda.set_rng_state(_from_first(torch.cuda.get_rng_state(device), group, device), device)


def _from_first(state: torch.Tensor, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    shared = state.to(device)
    dist.broadcast(shared, group_src=0, group=group)
    return shared.cpu()
