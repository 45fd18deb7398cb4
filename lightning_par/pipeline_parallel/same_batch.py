"""A check that all ranks of a replica got the same batch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.pipeline_parallel.microbatches import open_container

__all__ = ["batch_fingerprint", "check_same_batch"]


def batch_fingerprint(batch: Any) -> int:
    """A checksum over all that a batch holds.

    Args:
        batch: Any batch. Its tensors may be on any device; only their values, shapes and types count.

    Returns:
        A number from 0 to 2^63 - 1, the same in every process for the same batch.
    """
    digest = hashlib.blake2b(digest_size=8)
    _add(digest, batch)
    return int.from_bytes(digest.digest(), "big") >> 1


def check_same_batch(batch: Any, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
    """Check that the ranks which work on one replica of the model work on one batch. A collective of the groups.

    Args:
        batch: This rank's batch.
        groups: The axes of the replica that this rank is on, each in the same order on every rank.
        device: This rank's device.

    Raises:
        ValueError: On every rank of the replica, if batches differ.
    """
    own = batch_fingerprint(batch)
    extremes = torch.tensor([own, ~own], device=device)  # the largest ~x is ~ of the smallest x
    for group in groups:
        if group.size() > 1:
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, inverted_smallest = extremes.tolist()
    if largest != ~inverted_smallest:
        raise ValueError(
            "The batch differs between the ranks of one replica (its pipeline stages and tensor-parallel ranks), which "
            "must all load the same samples. Likely causes: random augmentation that is not seeded alike, an iterable "
            "dataset that is not seeded or that splits itself by global rank, a sampler made with the global rank. "
            "Call seed_everything(seed, workers=True), and split data by data-parallel rank, as the sampler does that "
            "the Trainer or fabric.setup_dataloaders adds."
        )


def _add(digest: Any, node: Any) -> None:
    if isinstance(node, Tensor):
        _add_array(digest, _on_host(node), str(node.dtype), node.shape)
    elif isinstance(node, np.ndarray) and node.dtype != object:
        _add_array(digest, np.ascontiguousarray(node), str(node.dtype), node.shape)
    elif node is None or isinstance(node, str | bytes | bool | Number):
        digest.update(repr(node).encode())
    else:
        _add_container(digest, node)


def _add_array(digest: Any, array: np.ndarray, dtype: str, shape: Sequence[int]) -> None:
    digest.update(f"{dtype}{tuple(shape)}".encode())
    digest.update(array.reshape(-1).view(np.uint8).data)


def _add_container(digest: Any, node: Any) -> None:
    container = open_container(node)
    # Of other objects only the type counts: what they print may tell their address.
    keys = [key for key in node if isinstance(key, str | int)] if isinstance(node, Mapping) else []
    digest.update(f"{type(node).__qualname__}{keys}".encode())
    for child in () if container is None else container.children:
        _add(digest, child)
        digest.update(b",")


def _on_host(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
