"""Choosing how an optimizer updates parameters of which some are split over ranks and some are not."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_par.offload import update_reach

__all__ = ["check_steps_in_stages", "choose_update", "forget_update"]

_BATCHED = ("foreach", "fused")


def check_steps_in_stages(optimizer: Optimizer) -> None:
    """Check that an optimizer may step the parameters of each pipeline stage by themselves.

    Raises:
        MisconfigurationException: With the way out.
    """
    if optimizer.param_groups and update_reach(optimizer) == "model":
        raise MisconfigurationException(
            f"{type(optimizer).__name__} looks at several parameters together (or asks for a closure), and under a "
            "pipeline each rank has only those of its stages, so it would step otherwise than in one process. Use "
            "another optimizer, such as AdamW, or pipeline_parallel_size=1."
        )


def choose_update(optimizer: Optimizer) -> None:
    """Update each parameter group in one batch where that can be done.

    torch batches DTensors only when told to, though it serves them best: an update of many small ones is mostly the
    cost of dispatching (measured: 2.4 times faster). But its batched kernels refuse groups in which parameters are
    split over different axes, which tensor parallelism leaves (planned weights are split, norms are not).
    """
    for number, group in enumerate(optimizer.param_groups):
        wanted = [name for name in _BATCHED if group.get(name)]
        if len({_split_over(parameter) for parameter in group["params"]}) == 1:
            is_left_to_torch = all(group.get(name, False) is None for name in _BATCHED)
            if is_left_to_torch and isinstance(group["params"][0], DTensor):
                group["foreach"] = True
            continue
        group.update({name: False for name in _BATCHED if name in group})
        if wanted:
            rank_zero_warn(
                f"{type(optimizer).__name__}({wanted[0]}=True) cannot update parameter group {number}, whose "
                "parameters are split over different axes of the ranks. They are updated one by one."
            )


def forget_update(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's ``state_dict()`` with what :func:`choose_update` has set put back to what the user asked for."""
    asked = {name: optimizer.defaults[name] for name in _BATCHED if name in optimizer.defaults}
    return {**state, "param_groups": [{**group, **asked} for group in state["param_groups"]]}


def _split_over(parameter: Any) -> Any:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None
