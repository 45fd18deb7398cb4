"""What optimizers need to know about parameters of which some are split and some are not."""

from __future__ import annotations

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

__all__ = ["step_one_by_one_if_mixed"]

_BATCHED = ("foreach", "fused")


def step_one_by_one_if_mixed(optimizer: Optimizer) -> None:
    """Turn off batched updates for groups that mix DTensors and plain tensors.

    Tensor parallelism alone leaves such groups (planned weights are DTensors, norms are not), and torch's batched
    kernels refuse them; on a GPU they are the default. Groups of one kind are left alone.
    """
    for number, group in enumerate(optimizer.param_groups):
        kinds = {isinstance(parameter, DTensor) for parameter in group["params"]}
        wanted = [name for name in _BATCHED if group.get(name)]
        if len(kinds) < 2:
            continue
        group.update({name: False for name in _BATCHED if name in group})
        if wanted:
            rank_zero_warn(
                f"{type(optimizer).__name__}({wanted[0]}=True) cannot update parameter group {number}, where some "
                "parameters are split over the tensor axis and some are not. They are updated one by one."
            )
