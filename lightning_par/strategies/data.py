"""Keeping the ranks of the data axis in step while they read different batches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.fabric.utilities.seed import pl_worker_init_function

__all__ = ["LockstepLoader", "check_equal_lengths", "extra_steps", "lockstep", "seed_workers"]


class LockstepLoader:
    """A loader that ends on all ranks of the data axis when it ends on one.

    For iterable datasets, whose length nobody knows: without it, the ranks that still have a batch would wait for
    gradients of one that has none. Everything but iteration is the loader's own.

    Args:
        loader: The loader.
        group: The ranks that see different batches.
        device: Where the ranks' votes are counted.
    """

    def __init__(self, loader: Any, group: dist.ProcessGroup, device: torch.device) -> None:
        self._loader = loader
        self._group = group
        self._device = device

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":  # not ours to forward while a copy or pickle is being made
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        num_batches = 0
        iterator = iter(self._loader)
        nothing = object()
        while True:
            batch = next(iterator, nothing)
            ended = self._ranks_at_the_end(batch is nothing)
            if ended:
                if len(ended) < self._group.size():
                    rank_zero_warn(
                        f"The data of data-parallel rank(s) {ended} ended after {num_batches} batches, that of the "
                        "others did not. All ranks stop here, so that none waits for another. Give every rank the same "
                        "number of batches to use them all."
                    )
                return
            num_batches += 1
            yield batch

    def _ranks_at_the_end(self, ended: bool) -> list[int]:
        votes = torch.zeros(self._group.size(), dtype=torch.int32, device=self._device)
        votes[self._group.rank()] = int(ended)
        dist.all_reduce(votes, group=self._group)
        return torch.nonzero(votes).flatten().tolist()


def lockstep(loader: Any, group: dist.ProcessGroup, device: torch.device) -> Any:
    """Wrap ``loader`` if its dataset is iterable and there is more than one rank; others come back as they are."""
    return LockstepLoader(loader, group, device) if group.size() > 1 and has_iterable_dataset(loader) else loader


def check_equal_lengths(loader: Any, group: dist.ProcessGroup) -> None:
    """Check that every rank of the data axis has the same number of batches.

    Raises:
        MisconfigurationException: On all ranks, if they differ.
    """
    if group.size() == 1 or has_iterable_dataset(loader):
        return
    lengths: list[int | None] = [None] * group.size()
    dist.all_gather_object(lengths, sized_len(loader), group=group)
    if len(set(lengths)) > 1:
        raise MisconfigurationException(
            f"The data-parallel ranks have different numbers of batches, {lengths}, so that some would wait for ever "
            "for the others. Let Lightning split the data (use_distributed_sampler=True, the default), or make your "
            "own sampler give each rank the same number."
        )


def seed_workers(loader: Any, data_parallel_rank: int) -> None:
    """Seed loader workers by data-parallel rank, so that ranks that share a batch draw the same augmentations.

    Lightning's Trainer would seed them by global rank, but leaves an existing function alone; Fabric has done so.
    """
    function = getattr(loader, "worker_init_fn", False)
    is_lightnings = isinstance(function, partial) and function.func is pl_worker_init_function
    if int(os.environ.get("PL_SEED_WORKERS", 0)) and (function is None or is_lightnings):
        loader.worker_init_fn = partial(pl_worker_init_function, rank=data_parallel_rank)


def extra_steps(num_batches: list[int | float], group: dist.ProcessGroup, device: torch.device) -> list[int]:
    """How many steps this rank lacks, per loader, to have made as many as the busiest rank of the data axis."""
    finite = [int(number) if number != float("inf") else 0 for number in num_batches]
    most = torch.tensor(finite, device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return [busiest - own for busiest, own in zip(most.tolist(), finite, strict=True)]
