"""Batches to trace with: the sizes of a real one, in any number of samples, without its values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_par.pipeline_parallel.microbatches import batch_size_of, open_container

__all__ = ["bytes_per_sample", "count_samples", "count_tokens", "fake_batch"]


def fake_batch(batch: Any, samples: int, device: str) -> Any:
    """A batch like ``batch``, of ``samples`` samples; enter a ``FakeTensorMode`` around the call.

    Tensors whose first dim is the batch's are made of that many samples, lists of that length are cut or repeated;
    all else stays.
    """
    return _resized(batch, batch_size_of(batch), samples, device)


def _resized(node: Any, size: int, samples: int, device: str) -> Any:
    if isinstance(node, np.ndarray) and node.dtype != object:
        node = torch.from_numpy(node)
    if isinstance(node, Tensor):
        leads = node.ndim > 0 and node.shape[0] == size
        shape = (samples, *node.shape[1:]) if leads else tuple(node.shape)
        return torch.zeros(shape, dtype=node.dtype, device=device)
    if isinstance(node, list) and len(node) == size and not any(isinstance(item, Tensor | list) for item in node):
        return [node[index % size] for index in range(samples)] if size else node
    container = open_container(node)
    if container is None:
        return node
    return container.rebuild([_resized(child, size, samples, device) for child in container.children])


def _tensors(node: Any) -> list[Tensor]:
    if isinstance(node, Tensor):
        return [node]
    container = None if isinstance(node, str) else open_container(node)
    return [] if container is None else [tensor for child in container.children for tensor in _tensors(child)]


def count_tokens(batch: Any) -> int:
    """Tokens of a sample: the length of its first row of whole numbers, 1 where it has none."""
    size = batch_size_of(batch)
    for tensor in _tensors(batch):
        is_ids = not tensor.is_floating_point() and tensor.dtype is not torch.bool
        if is_ids and tensor.ndim == 2 and tensor.shape[0] == size:
            return max(1, int(tensor.shape[1]))
    return 1


def count_samples(batch: Any) -> int:
    """Samples in a batch."""
    return batch_size_of(batch)


def bytes_per_sample(batch: Any) -> int:
    """Bytes of a batch by sample."""
    return sum(tensor.nbytes for tensor in _tensors(batch)) // max(1, batch_size_of(batch))
