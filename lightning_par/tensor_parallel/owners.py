"""Who calls the planned layers: the module whose forward they are part of, and its head counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import gcd

from torch import nn

from lightning_par.tensor_parallel.styles import STYLES

__all__ = [
    "QUERY_HEADS",
    "colwise_by_owner",
    "head_counts",
    "head_owner",
    "is_attention",
    "nearest_degrees",
    "owner_of",
    "parent_names",
]

QUERY_HEADS = (
    "num_heads",
    "n_heads",
    "n_head",
    "nhead",
    "nheads",
    "heads",
    "num_attention_heads",
    "num_query_heads",
    "num_q_heads",
    "n_q_heads",
)
KEY_VALUE_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "n_kv_head",
    "num_heads_kv",
    "n_heads_kv",
    "n_head_kv",
    "kv_heads",
)
# Containers have no forward of their own; a Sequential has one but no attributes of a person's.
_NO_FORWARD = (nn.ModuleList, nn.ModuleDict)
_NO_ATTRIBUTES = (*_NO_FORWARD, nn.Sequential)


def parent_names(name: str) -> Iterator[str]:
    """The dotted names above `name`, nearest first, down to the root's empty one."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _nearest(modules: Mapping[str, nn.Module], name: str, skipped: tuple[type, ...]) -> str:
    return next((n for n in parent_names(name) if not isinstance(modules[n], skipped)), "")


def owner_of(modules: Mapping[str, nn.Module], name: str) -> str:
    """Name of the module whose forward calls the module `name`."""
    return _nearest(modules, name, _NO_FORWARD)


def head_owner(modules: Mapping[str, nn.Module], name: str) -> str:
    """Name of the module that would hold the head counts for the projection `name`."""
    return _nearest(modules, name, _NO_ATTRIBUTES)


def colwise_by_owner(modules: Mapping[str, nn.Module], plan: Mapping[str, str]) -> dict[str, dict[str, nn.Linear]]:
    """Owner name to its linear layers that leave each rank with a slice of their output."""
    owners: dict[str, dict[str, nn.Linear]] = {}
    for name, style in plan.items():
        module = modules[name]
        if STYLES[style].output_is_local and isinstance(module, nn.Linear):
            owners.setdefault(head_owner(modules, name), {})[name] = module
    return owners


def head_counts(module: nn.Module, with_config: bool = False) -> dict[str, int]:
    """Head counts that `module` holds as attributes: query heads first, then key-value heads.

    Args:
        module: an attention module, or any other.
        with_config: look in the module's `config` too, where Hugging Face's attention keeps them.
    """
    places = [module, getattr(module, "config", None)] if with_config else [module]
    found: dict[str, int] = {}
    for name in (*QUERY_HEADS, *KEY_VALUE_HEADS):
        values = [getattr(place, name, None) for place in places]
        count = next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)
        if count:
            found[name] = count
    return found


def is_attention(module: nn.Module) -> bool:
    """Whether `module` looks like an attention module: by its class's name or its head counts."""
    name = type(module).__name__.lower()
    return "attention" in name or "attn" in name or bool(head_counts(module))


def nearest_degrees(sizes: list[int], degree: int) -> str:
    """The degrees around `degree` that divide all of `sizes`, in words."""
    whole = gcd(*sizes)
    fitting = [d for d in range(1, whole + 1) if whole % d == 0]
    near = [max(d for d in fitting if d < degree), *(d for d in fitting if d > degree)][:2]
    return f"nearest that fit: {' and '.join(map(str, near))}"
