"""Cutting a batch into micro-batches, and putting together what a step returned for each.

A batch is any nesting of lists, tuples, named tuples, mappings (also such as Hugging Face's ``BatchEncoding``),
dataclasses and whatever else is registered with ``torch.utils._pytree``; each keeps its type.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["Container", "batch_size_of", "merge", "num_parts", "open_container", "split"]

_ARRAYS = (Tensor, np.ndarray)


class Container(NamedTuple):
    """One level of a nesting.

    Attributes:
        kind: Equal for containers of the same type, length and keys.
        children: What it holds.
        rebuild: Makes a like container of other children.
    """

    kind: Any
    children: list[Any]
    rebuild: Callable[[list[Any]], Any]


def batch_size_of(batch: Any) -> int:
    """The number of samples in a batch.

    Args:
        batch: Any batch.

    Returns:
        The length of the first tensor's first dim; without a tensor, of the first list or tuple; 1 without either.
    """
    array = next((node for node in _nodes(batch) if isinstance(node, _ARRAYS) and node.ndim), None)
    if array is not None:
        return int(array.shape[0])
    return next((len(node) for node in _nodes(batch) if isinstance(node, list | tuple) and node), 1)


def num_parts(batch_size: int, wanted: int) -> int:
    """The largest number of equal micro-batches that is not above ``wanted``.

    Args:
        batch_size: Number of samples.
        wanted: Number of micro-batches asked for.

    Raises:
        ValueError: If ``wanted`` is below 1.
    """
    if wanted < 1:
        raise ValueError(f"A batch can't be cut into {wanted} micro-batches. Ask for at least 1.")
    return next((count for count in range(min(wanted, batch_size), 1, -1) if batch_size % count == 0), 1)


def split(batch: Any, num_parts: int) -> list[Any]:
    """Cut a batch into equal micro-batches.

    Tensors and arrays whose first dim has the batch's size are cut, as views. So are lists and tuples of that length
    that hold one thing per sample: strings, numbers, tensors of other lengths, or mappings. Everything else goes whole
    to each part.

    Args:
        batch: Any batch.
        num_parts: Number of micro-batches; a single one is the batch itself.

    Raises:
        ValueError: If the batch does not divide.
    """
    if num_parts == 1:
        return [batch]
    size = batch_size_of(batch)
    if num_parts < 1 or size % num_parts:
        raise ValueError(f"A batch of {size} samples can't be cut into {num_parts} equal micro-batches.")
    return _split(batch, size, num_parts)


def merge(outputs: Sequence[Any]) -> Any:
    """What a step would have returned for the whole batch.

    Args:
        outputs: What it returned for each micro-batch, in order; ``None`` is left out.

    Returns:
        Scalar tensors and numbers become their mean, other tensors and arrays are joined along their first dim. A list
        is taken for one thing per sample, and joined too. Other containers keep their structure; of anything else, such
        as a string, the first is taken.

    Raises:
        ValueError: If micro-batches returned different structures, or tensors that can't be joined.
    """
    present = [output for output in outputs if output is not None]
    if len(present) < 2:
        return present[0] if present else None
    first = present[0]
    _check_alike(present)
    if isinstance(first, _ARRAYS):
        return _merge_arrays(present)
    if _is_number(first):
        return first if all(output == first for output in present) else sum(present) / len(present)
    if isinstance(first, list):
        return [sample for output in present for sample in output]
    container = open_container(first)
    if container is None:
        return first
    columns = zip(*(_children(output) for output in present), strict=True)
    return container.rebuild([merge(column) for column in columns])


def open_container(node: Any) -> Container | None:
    """Take one level of a nesting apart; ``None`` for a leaf."""
    children, spec = tree_flatten(node, is_leaf=lambda inner: inner is not node)
    if not spec.is_leaf():
        return Container(spec, children, lambda values: tree_unflatten(values, spec))
    if isinstance(node, Mapping):
        return _open_mapping(node)
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return _open_dataclass(node)
    if isinstance(node, list):
        return Container((type(node), len(node)), list(node), lambda values: _refilled(node, values))
    return None


def _open_mapping(node: Mapping[Any, Any]) -> Container:
    # What hangs on a mapping may be per sample as well, such as the encodings behind a BatchEncoding.
    hung = {name: value for name, value in vars(node).items() if name != "data"} if isinstance(node, UserDict) else {}

    def rebuild(values: list[Any]) -> Any:
        made: Any = copy.copy(node)
        for key, value in zip(node, values, strict=False):
            made[key] = value
        if hung:
            vars(made).update(zip(hung, values[len(node) :], strict=True))
        return made

    return Container((type(node), tuple(node), tuple(hung)), [*node.values(), *hung.values()], rebuild)


def _open_dataclass(node: Any) -> Container:
    names = [field.name for field in dataclasses.fields(node)]

    def rebuild(values: list[Any]) -> Any:
        made = copy.copy(node)  # not by its constructor, which may do more than store
        for name, value in zip(names, values, strict=True):
            object.__setattr__(made, name, value)
        return made

    return Container(type(node), [getattr(node, name) for name in names], rebuild)


def _refilled(node: list[Any], values: list[Any]) -> list[Any]:
    made = copy.copy(node)
    made[:] = values
    return made


def _children(node: Any) -> list[Any]:
    container = open_container(node)
    return [] if container is None else container.children


def _nodes(node: Any) -> Iterator[Any]:
    """The node and all below it, in order."""
    yield node
    for child in _children(node):
        yield from _nodes(child)


def _split(node: Any, size: int, num_parts: int) -> list[Any]:
    if _is_per_sample(node, size):
        length = size // num_parts
        return [_cut(node, start, start + length) for start in range(0, size, length)]
    container = open_container(node)
    if container is None:
        return [node] * num_parts
    columns = [_split(child, size, num_parts) for child in container.children]
    return [container.rebuild([column[part] for column in columns]) for part in range(num_parts)]


def _cut(node: Any, start: int, stop: int) -> Any:
    part = node[start:stop]
    return _refilled(node, part) if isinstance(node, list) and type(node) is not list else part


def _is_per_sample(node: Any, size: int) -> bool:
    if isinstance(node, _ARRAYS):
        return _leads_with(node, size)
    is_sequence = isinstance(node, list) or type(node) is tuple
    if not is_sequence or len(node) != size:
        return False
    # A pair of inputs and targets has a length, too: that of its tensors tells whether it is a batch of two.
    leads = [_leads_with(inner, size) for inner in _nodes(node) if isinstance(inner, _ARRAYS)]
    if all(isinstance(item, Mapping) for item in node):  # detections, some of which may be as many as the samples
        return not leads or not all(leads)
    return not any(leads)


def _leads_with(array: Any, size: int) -> bool:
    return bool(array.ndim and array.shape[0] == size)


def _check_alike(outputs: Sequence[Any]) -> None:
    first = _kind(outputs[0])
    if any(_kind(output) != first for output in outputs):
        names = ", ".join(sorted({type(output).__name__ for output in outputs}))
        raise ValueError(
            f"A step returned different structures for the micro-batches of one batch (of type {names}), which "
            "can't be put together. Return the same structure each time, or set num_microbatches=1."
        )


def _kind(output: Any) -> Any:
    if isinstance(output, list):
        return list
    if isinstance(output, _ARRAYS):
        return type(output)
    if _is_number(output):
        return Number
    container = open_container(output)
    return None if container is None else container.kind


def _is_number(value: Any) -> bool:
    return isinstance(value, Number) and not isinstance(value, bool)


def _merge_arrays(arrays: Sequence[Any]) -> Any:
    is_tensor = isinstance(arrays[0], Tensor)
    try:
        if arrays[0].ndim:
            return torch.cat(list(arrays)) if is_tensor else np.concatenate(arrays)
        if not is_tensor:
            return np.mean(arrays)
        stacked = torch.stack(list(arrays))
        return stacked.to(torch.promote_types(stacked.dtype, torch.float32)).mean()
    except (RuntimeError, ValueError) as error:
        shapes = ", ".join(str(tuple(array.shape)) for array in arrays)
        raise ValueError(
            f"A step returned tensors of shapes {shapes} for the micro-batches of one batch, which can't be joined "
            "along their first dim. Pad them to one shape, return a list with one tensor per sample, or set "
            "num_microbatches=1."
        ) from error
