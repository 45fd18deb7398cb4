"""Layers that share one weight: planned alike, and tied again after they were split."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_par.tensor_parallel.styles import STYLES
from lightning_par.ties import Tie, find_ties

__all__ = ["check_ties", "extend_to_ties", "tie_again"]

# How the partner of a planned layer is split to match: (its class, the weight's split dim) -> style.
_PARTNER_STYLES: dict[tuple[type[nn.Module], int], str] = {
    (nn.Embedding, 0): "embedding_rowwise",
    (nn.Embedding, 1): "embedding_colwise",
    (nn.Linear, 0): "colwise_gather_output",
    (nn.Linear, 1): "rowwise_split_input",
}


def split_dim(style: str | None, parameter_name: str) -> int | None:
    """The dim of a parameter that `style` splits over the axis, None if it stays whole."""
    dim = STYLES[style].shard_dim if style else None
    # A bias has output features only: split with them, or whole.
    return None if parameter_name == "bias" and dim == 1 else dim


def extend_to_ties(module: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Plan the unplanned partner of a planned embedding or head.

    Only where the partner is an embedding, or a linear layer tied to an embedding: those see whole
    activations. Any other tie of a planned to an unplanned layer is left for `check_ties`.
    """
    extended = dict(plan)
    names = {id(m): name for name, m in module.named_modules()}
    for tie in find_ties(module):
        dims = {split_dim(plan.get(names[id(m)]), parameter) for m, parameter in tie} - {None}
        has_embedding = any(isinstance(m, nn.Embedding) for m, _ in tie)
        if len(dims) != 1 or not has_embedding:
            continue
        (dim,) = dims
        for partner, _ in tie:
            for (kind, kind_dim), style in _PARTNER_STYLES.items():
                if isinstance(partner, kind) and kind_dim == dim:
                    extended.setdefault(names[id(partner)], style)
    return extended


def check_ties(module: nn.Module, plan: Mapping[str, str]) -> list[str]:
    """What is wrong with the plan of layers that share a parameter, one sentence each."""
    names = {id(m): name for name, m in module.named_modules()}
    problems = []
    for tie in find_ties(module):
        dims = {split_dim(plan.get(names[id(m)]), parameter) for m, parameter in tie}
        if len(dims) > 1:
            places = ", ".join(
                f"{_full_name(names[id(m)], parameter)} ({plan.get(names[id(m)], 'not in the plan')})"
                for m, parameter in tie
            )
            problems.append(
                f"one parameter is shared by {places}, which would split it differently; plan all of "
                "them so that its dim is the same (embedding_rowwise with colwise_gather_output), "
                "or leave all of them out"
            )
    return problems


def tie_again(ties: list[Tie], before: list[nn.Parameter | None]) -> None:
    """Register the parameter that was split in one place of each tie in its other places.

    Args:
        ties: the places that shared a parameter before anything was split.
        before: the parameter of each tie at that time.
    """
    for tie, whole in zip(ties, before, strict=True):
        current = [module._parameters[name] for module, name in tie]
        split = next((parameter for parameter in current if parameter is not whole), None)
        if split is not None:
            for module, name in tie:
                module._parameters[name] = split


def _full_name(module_name: str, parameter_name: str) -> str:
    return f"{module_name}.{parameter_name}" if module_name else parameter_name
