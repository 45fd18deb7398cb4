"""Splitting a module over the tensor axis, in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_par.tensor_parallel.axis import TensorAxis
from lightning_par.tensor_parallel.callers import Caller
from lightning_par.tensor_parallel.heads import keep_local_heads, owner_of
from lightning_par.tensor_parallel.layers import LocalForward, split_parameters
from lightning_par.tensor_parallel.styles import STYLES, Style
from lightning_par.ties import find_ties, restore_ties

__all__ = ["apply_on_axis", "apply_plan"]


def apply_plan(
    module: nn.Module,
    plan: Mapping[str, str],
    mesh: DeviceMesh,
    members: Collection[str] | None = None,
) -> None:
    """Split the planned layers of `module` over a mesh axis, in place.

    Planned weights become DTensors on `mesh`; each rank keeps its slice of the whole parameter, which
    must be the same on all ranks (nothing is sent). All else stays as it is: other parameters are
    plain tensors, activations between modules are plain local tensors, ties and `requires_grad` are
    kept. Attention modules' head counts become those of this rank. The module then composes with
    `fully_shard` and `replicate` on other axes of the same mesh.

    Args:
        module: the whole module; what is applied may be on the meta device.
        plan: exact names to styles, from `resolve_plan`, accepted by `check_plan`.
        mesh: the one-axis device mesh of the tensor axis. With one rank nothing is done.
        members: names of the modules to apply the plan to now, for splitting a large model part by
            part; None applies it to all. The plan is the whole one each time.

    Raises:
        ValueError: if the mesh has several axes, or the plan was applied to a layer before.
    """
    axis = TensorAxis(mesh)
    if axis.size > 1:
        apply_on_axis(module, plan, axis, members)


def apply_on_axis(
    module: nn.Module, plan: Mapping[str, str], axis: TensorAxis, members: Collection[str] | None = None
) -> None:
    """As :func:`apply_plan`, on an axis that exists already, or on one that only counts what would be sent."""
    modules = dict(module.named_modules())
    now = set(modules if members is None else members)
    todo = {name: style for name, style in plan.items() if name in now}
    _check_untouched(modules, todo)
    keep_local_heads(modules, todo, axis)
    ties = find_ties(module)
    for name, style in todo.items():
        split_parameters(modules[name], STYLES[style], axis)
        _install(modules, name, STYLES[style], axis)
    # The place that was split gives the others its parameter.
    restore_ties([sorted(tie, key=_is_whole) for tie in ties])


def _install(modules: Mapping[str, nn.Module], name: str, style: Style, axis: TensorAxis) -> None:
    """Put the local forward in the place of the layer's own."""
    if style.kind is nn.Module and not style.sums_gradients:
        return  # "replicate": nothing differs from one rank
    module = modules[name]
    caller = Caller.of(modules[owner_of(modules, name)], axis)
    caller.holds_heads |= style.output_is_local or style.input_is_local
    module.__dict__["forward"] = LocalForward(module, module.forward, style, caller)


def _is_whole(place: tuple[nn.Module, str]) -> bool:
    module, name = place
    return not isinstance(module._parameters[name], DTensor)


def _check_untouched(modules: Mapping[str, nn.Module], plan: Mapping[str, str]) -> None:
    for name in plan:
        if isinstance(modules[name].__dict__.get("forward"), LocalForward):
            raise ValueError(
                f"a tensor-parallel plan was applied to {name!r} before: apply a plan once, or build the model anew"
            )
