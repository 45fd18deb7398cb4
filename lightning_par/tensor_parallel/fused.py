"""Projections that hold several in one weight: cut as they lie, each rank would get a mixture."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from lightning_par.tensor_parallel.owners import colwise_by_owner, is_attention, owner_of
from lightning_par.tensor_parallel.styles import STYLES

__all__ = ["check_fused"]

_QKV_NAME = re.compile(r"qkv|c_attn|query_key_value", re.IGNORECASE)
_KV_NAME = re.compile(r"(^|_)kv(_proj)?$|key_value$", re.IGNORECASE)
_GATE_UP_NAME = re.compile(r"gate_?up|up_?gate|(^|_)w1_?[23]$", re.IGNORECASE)
# Their fused weight is laid out head by head, so that a slice of it is whole heads.
_LAID_OUT_BY_HEAD = ("GPTNeoXAttention",)
_WAY_OUT = (
    "or keep it fused with style 'colwise_gather_output' here and 'rowwise_split_input' on the layer "
    "that follows (the weight is split, the computation between them is not)"
)


def check_fused(modules: Mapping[str, nn.Module], plan: Mapping[str, str]) -> list[str]:
    """Planned fused projections, one sentence each."""
    problems = []
    for owner_name, layers in colwise_by_owner(modules, plan).items():
        inputs = _rowwise_inputs(modules, plan, layers)
        for name, layer in layers.items():
            if _is_fused_qkv(name, layer, modules[owner_name]):
                problems.append(
                    f"{name} ({layer.in_features} -> {layer.out_features}) looks like query, key and "
                    "value in one weight, and 'colwise' would hand each rank a mixture of them: use "
                    f"separate q, k and v layers, {_WAY_OUT}"
                )
            elif _is_fused_gate(name, layer, inputs, is_attention(modules[owner_name])):
                problems.append(
                    f"{name} ({layer.in_features} -> {layer.out_features}) looks like gate and up in "
                    "one weight, and 'colwise' would give whole gates to some ranks and whole ups to "
                    f"others: use two layers, {_WAY_OUT}"
                )
    return problems


def _is_fused_qkv(name: str, layer: nn.Linear, owner: nn.Module) -> bool:
    """By name and by shape: wider than one projection of its input would be."""
    last = name.rpartition(".")[2]
    if type(owner).__name__ in _LAID_OUT_BY_HEAD:
        return False
    if _QKV_NAME.search(last):
        return layer.out_features > layer.in_features
    if _KV_NAME.search(last):
        return layer.out_features == 2 * layer.in_features or is_attention(owner)
    # Also the name of the first layer of an MLP or a state-space block.
    return "in_proj" in last and layer.out_features == 3 * layer.in_features


def _is_fused_gate(name: str, layer: nn.Linear, inputs: set[int], in_attention: bool) -> bool:
    """Twice as wide as what the layer after it takes, and nothing takes the whole width."""
    twice = any(layer.out_features == 2 * size for size in inputs)
    halves = twice and layer.out_features not in inputs
    return halves and (bool(_GATE_UP_NAME.search(name.rpartition(".")[2])) or not in_attention)


def _rowwise_inputs(
    modules: Mapping[str, nn.Module], plan: Mapping[str, str], layers: Mapping[str, nn.Linear]
) -> set[int]:
    """Input widths of the rowwise layers that the callers of `layers` call."""
    callers = {owner_of(modules, name) for name in layers}
    return {
        modules[name].in_features  # type: ignore[misc]
        for name, style in plan.items()
        if STYLES[style].shard_dim == 1 and isinstance(modules[name], nn.Linear) and owner_of(modules, name) in callers
    }
