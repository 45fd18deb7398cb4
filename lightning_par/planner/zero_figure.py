"""The figure of the ZeRO paper: model states of each stage, in the paper's own convention."""

from __future__ import annotations

__all__ = ["zero_figure"]

_WEIGHT, _GRADIENT, _OPTIMIZER = 2, 2, 12
"""Bytes by parameter: half-precision weights and gradients; float32 weights, momentum and variance."""


def zero_figure(num_parameters: float, num_ranks: int) -> dict[str, dict[str, float]]:
    """Bytes of model states on each of some ranks: arXiv 1910.02054, figure 1, with K = 12.

    This is mixed-precision training with Adam as the paper has it: 16 bytes a parameter. The strategies here keep
    float32 weights and gradients instead of a half-precision copy of each: 16 bytes as well, divided differently.

    Args:
        num_parameters: Of the model; the paper's figure has 7.5e9.
        num_ranks: Of the data axis; the paper's figure has 64.

    Returns:
        Stage -> parameters, gradients, optimizer -> bytes.

    Raises:
        ValueError: If a number is not positive.
    """
    if num_parameters <= 0 or num_ranks < 1:
        raise ValueError(f"{num_parameters} parameters on {num_ranks} ranks: both must be positive.")
    whole = {
        "parameters": _WEIGHT * num_parameters,
        "gradients": _GRADIENT * num_parameters,
        "optimizer": _OPTIMIZER * num_parameters,
    }
    # Each stage shards one part more, from the last on.
    sharded = {"DP": (), "ZeRO-1": ("optimizer",), "ZeRO-2": ("gradients", "optimizer"), "ZeRO-3": tuple(whole)}
    return {
        stage: {part: size / (num_ranks if part in parts else 1) for part, size in whole.items()}
        for stage, parts in sharded.items()
    }
