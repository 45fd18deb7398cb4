"""Sequence parallelism: between a block's matrix products, each rank holds a part of the sequence.

Switched on by a plan with style `sequence_parallel` on the norms (and dropouts) inside the blocks
(Korthikanti et al. 2022, arXiv 2205.05198). What else is needed follows from it:

- the first such block of a list takes its part of the sequence, the last one gathers the whole, so
  embeddings, head and loss see whole sequences;
- inside a block, the modules that call colwise layers (attention, MLP) gather their input, and
  rowwise layers give each rank its part of the summed output.

The all-reduces of plain tensor parallelism become all-gathers and reduce-scatters of the same
volume; the norms' and dropouts' activations take 1/degree of the memory. Blocks must be called in
their order, with the hidden states as first tensor, `[batch, sequence, hidden]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_par.tensor_parallel import axis as exchange
from lightning_par.tensor_parallel.axis import TensorAxis
from lightning_par.tensor_parallel.callers import Arguments, SharedInput, caller_forward
from lightning_par.tensor_parallel.layers import SEQUENCE_DIM
from lightning_par.tensor_parallel.owners import owner_of, parent_names
from lightning_par.tensor_parallel.styles import STYLES

__all__ = ["check_sequence", "scattering_layers", "split_sequences"]

_STYLE = "sequence_parallel"


def split_sequences(
    modules: Mapping[str, nn.Module], plan: Mapping[str, str], axis: TensorAxis, members: set[str]
) -> None:
    """Let those of the `members` that need it split, gather or scatter sequences."""
    for blocks in _regions(modules, plan):
        if blocks[0] in members:
            caller_forward(modules[blocks[0]], axis).prepare = partial(_split_input, axis)
        if blocks[-1] in members:
            caller_forward(modules[blocks[-1]], axis).finish = partial(_gather_output, axis)
        for name in _gathering_callers(modules, plan, blocks):
            if name in members:
                caller = caller_forward(modules[name], axis)
                caller.prepare = partial(_gather_input, axis, caller.shared)


def scattering_layers(modules: Mapping[str, nn.Module], plan: Mapping[str, str]) -> set[str]:
    """Names of the layers whose summed output is scattered along the sequence."""
    return {
        name
        for blocks in _regions(modules, plan)
        for name, style in plan.items()
        if STYLES[style].leave == "reduce" and _inside(name, blocks)
    }


def check_sequence(modules: Mapping[str, nn.Module], plan: Mapping[str, str]) -> list[str]:
    """What stands against splitting sequences, one sentence each."""
    loose = [name for name, style in plan.items() if style == _STYLE and not _block_of(modules, name)]
    problems = [
        f"{name} is outside the repeated blocks, where every rank works on whole sequences: leave it "
        f"out of the plan ({_STYLE} is for norms and dropouts inside the blocks)"
        for name in loose
    ]
    for blocks in _regions(modules, plan):
        problems += _check_blocks(modules, plan, blocks)
    return problems


def _check_blocks(modules: Mapping[str, nn.Module], plan: Mapping[str, str], blocks: list[str]) -> list[str]:
    callers = _gathering_callers(modules, plan, blocks)
    inline = [name for name in callers if name in blocks]
    if inline:
        return [
            f"{inline[0]} ({type(modules[inline[0]]).__name__}) calls norms and colwise layers in one "
            f"forward: for {_STYLE}, attention and MLP must be modules of their own, whose input can "
            "be gathered"
        ]
    problems = []
    for name, module in modules.items():
        if not _inside(name, blocks) or not module._parameters:
            continue
        style = plan.get(name, "replicate")
        in_caller = any(parent in callers for parent in (name, *parent_names(name)))
        if in_caller and style == _STYLE:
            problems.append(
                f"{name} is inside a module that calls colwise layers, where sequences are whole: give a norm "
                f"of heads style 'replicated_with_grad_allreduce'; a norm of the hidden states has to be called "
                f"by the block for {_STYLE}"
            )
        elif not in_caller and style == "replicate":
            problems.append(
                f"{name} ({type(module).__name__}) has parameters and would see a part of the sequence "
                f"only, so its gradient would lack the rest: give it style {_STYLE} too, or take "
                f"{_STYLE} out of the plan"
            )
    return problems


def _regions(modules: Mapping[str, nn.Module], plan: Mapping[str, str]) -> list[list[str]]:
    """For each list of blocks, the names from the first to the last that holds such a style."""
    found = [_block_of(modules, name) for name, style in plan.items() if style == _STYLE]
    held = {block for block in found if block}
    regions = []
    for list_name in dict.fromkeys(block.rpartition(".")[0] for block in found if block):
        prefix = f"{list_name}." if list_name else ""
        names = [f"{prefix}{child}" for child, _ in modules[list_name].named_children()]
        places = [index for index, name in enumerate(names) if name in held]
        regions.append(names[places[0] : places[-1] + 1])
    return regions


def _block_of(modules: Mapping[str, nn.Module], name: str) -> str:
    """Name of the member of the outermost list that `name` is in, "" if it is in none."""
    path = [name, *parent_names(name)]
    outermost = ""
    for child, parent in zip(path, path[1:], strict=False):
        if isinstance(modules[parent], (nn.ModuleList, nn.Sequential)):
            outermost = child
    return outermost


def _gathering_callers(modules: Mapping[str, nn.Module], plan: Mapping[str, str], blocks: list[str]) -> list[str]:
    """Names of the modules that call layers which need whole sequences; outer ones only."""
    callers = dict.fromkeys(
        owner_of(modules, name)
        for name, style in plan.items()
        if STYLES[style].enter in ("share", "split") and _inside(name, blocks)
    )
    return [name for name in callers if not any(parent in callers for parent in parent_names(name))]


def _inside(name: str, blocks: list[str]) -> bool:
    return any(name == block or name.startswith(f"{block}.") for block in blocks)


def _split_input(axis: TensorAxis, arguments: Arguments) -> Arguments:
    return _map_hidden(arguments, lambda hidden: _split_sequence(hidden, axis))


def _split_sequence(hidden: Tensor, axis: TensorAxis) -> Tensor:
    if hidden.dim() < 3 or hidden.shape[SEQUENCE_DIM] % axis.size:
        raise ValueError(
            f"{_STYLE} splits hidden states [batch, sequence, hidden] along the sequence, and got shape "
            f"{tuple(hidden.shape)} for a tensor-parallel degree of {axis.size}: pad the sequence to a "
            f"multiple of {axis.size}, or take {_STYLE} out of the plan"
        )
    return exchange.split(hidden, axis, SEQUENCE_DIM)


def _gather_input(axis: TensorAxis, shared: SharedInput, arguments: Arguments) -> Arguments:
    """Whole sequences for a module whose colwise layers give partial gradients back."""

    def whole(hidden: Tensor) -> Tensor:
        entered = exchange.gather_partial(hidden, axis, SEQUENCE_DIM)
        # Any other use of it computes the same on every rank, so its gradient is whole, not partial.
        seen = exchange.divide_gradient(entered, axis)
        shared.put(seen, entered)
        return seen

    return _map_hidden(arguments, whole)


def _gather_output(axis: TensorAxis, output: Any) -> Any:
    if isinstance(output, Tensor):
        return exchange.gather(output, axis, SEQUENCE_DIM)
    first, *rest = output
    return type(output)((exchange.gather(first, axis, SEQUENCE_DIM), *rest))


def _map_hidden(arguments: Arguments, change: Callable[[Tensor], Tensor]) -> Arguments:
    """Change the first floating-point tensor of the arguments, positional ones first."""
    args, kwargs = list(arguments[0]), dict(arguments[1])
    for index, value in enumerate(args):
        if isinstance(value, Tensor) and torch.is_floating_point(value):
            args[index] = change(value)
            return tuple(args), kwargs
    for name, value in kwargs.items():
        if isinstance(value, Tensor) and torch.is_floating_point(value):
            kwargs[name] = change(value)
            break
    return tuple(args), kwargs
