"""Attention's heads: which module counts them, and its counts on one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_par.tensor_parallel.axis import TensorAxis
from lightning_par.tensor_parallel.callers import Caller
from lightning_par.tensor_parallel.styles import STYLES

__all__ = ["colwise_by_owner", "head_counts", "is_attention", "keep_local_heads", "owner_of"]

_QUERY_HEADS = (
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
_KEY_VALUE_HEADS = (
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
_DIVIDED = "_head_counts_divided_by"
_QUERY_FIRST = (
    F.scaled_dot_product_attention,
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
)


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
        num_heads = next((counts[name] for name in _QUERY_HEADS if name in counts), 0)
        head_size = _head_size(owner, num_heads, layers)
        if head_size:
            guard = _HeadGuard(num_heads // axis.size, head_size, axis.size, type(owner).__name__)
            Caller.of(owner, axis).guard = guard


def _head_size(owner: nn.Module, num_heads: int, layers: Mapping[str, nn.Linear]) -> int:
    """Size of a query head: the module's own word for it, or the query projection's share."""
    stated = owner.__dict__.get("head_dim", owner.__dict__.get("head_size"))
    if isinstance(stated, int) or not num_heads:
        return stated or 0
    queries = [layer for name, layer in layers.items() if "q" in name.rpartition(".")[2].lower()]
    return max(layer.out_features for layer in queries or layers.values()) // num_heads


def _parent_names(name: str) -> Iterator[str]:
    """The dotted names above `name`, nearest first, down to the root's empty one."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _nearest(modules: Mapping[str, nn.Module], name: str, skipped: tuple[type, ...]) -> str:
    return next((n for n in _parent_names(name) if not isinstance(modules[n], skipped)), "")


def owner_of(modules: Mapping[str, nn.Module], name: str) -> str:
    """Name of the module whose forward calls the module `name`."""
    return _nearest(modules, name, _NO_FORWARD)


def _head_owner(modules: Mapping[str, nn.Module], name: str) -> str:
    """Name of the module that would hold the head counts for the projection `name`."""
    return _nearest(modules, name, _NO_ATTRIBUTES)


def colwise_by_owner(modules: Mapping[str, nn.Module], plan: Mapping[str, str]) -> dict[str, dict[str, nn.Linear]]:
    """Owner name to its linear layers that leave each rank with a slice of their output."""
    owners: dict[str, dict[str, nn.Linear]] = {}
    for name, style in plan.items():
        module = modules[name]
        if STYLES[style].output_is_local and isinstance(module, nn.Linear):
            owners.setdefault(_head_owner(modules, name), {})[name] = module
    return owners


def head_counts(module: nn.Module, with_config: bool = False) -> dict[str, int]:
    """Head counts that `module` holds as attributes: query heads first, then key-value heads.

    Args:
        module: an attention module, or any other.
        with_config: look in the module's `config` too, where Hugging Face's attention keeps them.
    """
    places = [module, getattr(module, "config", None)] if with_config else [module]
    found: dict[str, int] = {}
    for name in (*_QUERY_HEADS, *_KEY_VALUE_HEADS):
        values = [getattr(place, name, None) for place in places]
        count = next((v for v in values if isinstance(v, int) and not isinstance(v, bool)), None)
        if count:
            found[name] = count
    return found


def is_attention(module: nn.Module) -> bool:
    """Whether `module` looks like an attention module: by its class's name or its head counts."""
    name = type(module).__name__.lower()
    return "attention" in name or "attn" in name or bool(head_counts(module))


class _HeadGuard(TorchFunctionMode):
    """Watches the first operand of attention's products, `[batch, heads, sequence, head size]`.

    A reshape such as `view(batch, length, num_heads, -1)` with the full number of heads fits this
    rank's slice too: it gives full-count heads of a fraction of their size, no error and wrong
    numbers. The opposite, `view(batch, length, -1, hidden // num_heads)` with the local number,
    gives too few heads that are too large. Both are recognised here by their shape.

    Args:
        num_heads: query heads on this rank.
        head_size: size of one head.
        degree: the tensor-parallel degree.
        module_name: for the message.
    """

    def __init__(self, num_heads: int, head_size: int, degree: int, module_name: str) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = head_size
        self.degree = degree
        self.module_name = module_name

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Check `func`'s first operand if it is one of attention's products, and run it."""
        if func in _QUERY_FIRST and args and args[0].dim() == 4:
            self._check(args[0].shape[1], args[0].shape[3])
        return func(*args, **(kwargs or {}))

    def _check(self, num_heads: int, head_size: int) -> None:
        too_many = (self.num_heads * self.degree, self.head_size // self.degree)
        too_few = (self.num_heads // self.degree, self.head_size * self.degree)
        if (num_heads, head_size) in (too_many, too_few):
            raise ValueError(
                f"{self.module_name} computes attention on {num_heads} heads of size {head_size}, but "
                f"under tensor parallelism of degree {self.degree} this rank holds {self.num_heads} "
                f"heads of size {self.head_size}. Keep the head size in an attribute set in __init__ "
                "and use -1 for the head dimension: q.view(batch, length, -1, self.head_size)"
            )
