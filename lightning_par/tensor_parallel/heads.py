"""Attention modules keep their head counts as attributes; on a rank they mean its own heads."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_par.tensor_parallel.axis import TensorAxis
from lightning_par.tensor_parallel.callers import caller_forward
from lightning_par.tensor_parallel.head_guard import HeadGuard
from lightning_par.tensor_parallel.owners import QUERY_HEADS, colwise_by_owner, head_counts, is_attention

__all__ = ["keep_local_heads"]

_DIVIDED = "_head_counts_divided_by"


def keep_local_heads(modules: Mapping[str, nn.Module], plan: Mapping[str, str], axis: TensorAxis) -> None:
    """Divide the head counts of the modules that own split projections by the degree, once.

    So `q.view(batch, length, self.num_heads, self.head_size)` fits the heads of this rank. Only
    attributes of the module itself change: a configuration object may be shared by the whole model.
    Attributes that cannot be set (a property) stay. The module's first forward is watched for
    counts that do not fit, among them those that it takes from a configuration.
    """
    for owner_name, layers in colwise_by_owner(modules, plan).items():
        owner = modules[owner_name]
        counts = head_counts(owner, with_config=is_attention(owner))
        if not counts or _DIVIDED in owner.__dict__:
            continue
        for name, count in head_counts(owner).items():
            if not isinstance(getattr(type(owner), name, None), property):
                setattr(owner, name, count // axis.size)
        owner.__dict__[_DIVIDED] = axis.size
        num_heads = next((counts[name] for name in QUERY_HEADS if name in counts), 0)
        head_size = _head_size(owner, num_heads, layers)
        if head_size:
            caller_forward(owner, axis).guard = HeadGuard(
                num_heads // axis.size, head_size, axis.size, type(owner).__name__
            )


def _head_size(owner: nn.Module, num_heads: int, layers: Mapping[str, nn.Linear]) -> int:
    """Size of a query head: the module's own word for it, or the query projection's share."""
    stated = owner.__dict__.get("head_dim", owner.__dict__.get("head_size"))
    if isinstance(stated, int) or not num_heads:
        return stated or 0
    queries = [layer for name, layer in layers.items() if "q" in name.rpartition(".")[2].lower()]
    return max(layer.out_features for layer in queries or layers.values()) // num_heads
