"""How many blocks each stage holds: by cost, or by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from torch import nn

from lightning_par.pipeline_parallel.placement import survey
from lightning_par.pipeline_parallel.trunk import Trunk

__all__ = ["block_costs", "split_by_hand", "split_evenly_by_cost"]

_ROUNDING = 1e-9


def block_costs(
    root: nn.Module, trunk: Trunk, first: Sequence[str] = (), last: Sequence[str] = ()
) -> tuple[list[float], float, float]:
    """What each block costs, and what is before and after the blocks.

    The unit is one parameter used on each token: a forward pass takes 2 floating-point operations for each parameter
    and token, a backward twice as many (Kaplan et al. 2020, arXiv:2001.08361, section 2.1). An embedding looks rows up
    and multiplies nothing, so its parameters cost nothing; a head that is tied to it still costs its product. Attention
    scores are left out: they cost the same in every block.

    Args:
        root: The user's module, whole; it may be on the meta device.
        trunk: Its blocks.
        first: Modules on the first stage; see :func:`lightning_par.pipeline_parallel.placement.survey`.
        last: The same for the last stage.

    Returns:
        Cost of each block, of what the first stage does beside its blocks, and of what the last stage does.
    """
    slots, _ = survey(root, trunk, first, last)
    blocks = [_cost(slot.module) for slot in slots if slot.block is not None]
    beside = [slot for slot in slots if slot.block is None]
    before = sum(_cost(slot.module) for slot in beside if slot.at_start)
    after = sum(_cost(slot.module) for slot in beside if slot.at_end)
    return blocks, before, after


def split_evenly_by_cost(costs: Sequence[float], before: float, after: float, num_stages: int) -> list[range]:
    """Cut blocks into stages so that the dearest stage, which sets the pace, is as cheap as can be.

    Of such cuts it takes the one with the smallest sum of squares, which spreads the rest evenly, and of those the one
    with the fewest blocks on early stages, which keep activations of more micro-batches. Exact, by dynamic programming.

    Args:
        costs: Of each block.
        before: What the first stage does beside its blocks.
        after: What the last stage does beside its blocks.
        num_stages: Stages, each with at least one block.

    Returns:
        The blocks of each stage.

    Raises:
        ValueError: If there are fewer blocks than stages.
    """
    _check_enough(len(costs), num_stages)
    sums = [0.0, *accumulate(costs)]

    def cost(stage: int, start: int, stop: int) -> float:
        own = sums[stop] - sums[start]
        return own + before * (stage == 0) + after * (stage == num_stages - 1)

    largest, _ = _best_cut(len(costs), num_stages, cost, max)
    largest = largest or 1.0

    def square(stage: int, start: int, stop: int) -> float:
        share = cost(stage, start, stop) / largest
        # Whole numbers, so that equals stay equal whatever the order of the sum.
        return round(share**2 / _ROUNDING) if share <= 1 + _ROUNDING else math.inf

    _, counts = _best_cut(len(costs), num_stages, square, lambda one, rest: one + rest)
    return _ranges(counts)


def split_by_hand(counts: Sequence[int], num_blocks: int, num_stages: int) -> list[range]:
    """Blocks of each stage from their numbers, as in ``pipeline_split=[3, 5]``.

    Raises:
        ValueError: If they are not one positive number for each stage, or don't add up to the blocks there are.
    """
    _check_enough(num_blocks, num_stages)
    if len(counts) != num_stages or min(counts) < 1 or sum(counts) != num_blocks:
        raise ValueError(
            f"pipeline_split={list(counts)} must have {num_stages} numbers of 1 or more, one for each stage, which add "
            f"up to the {num_blocks} blocks; these {len(counts)} add up to {sum(counts)}. For example "
            f"{[len(blocks) for blocks in split_evenly_by_cost([1.0] * num_blocks, 0.0, 0.0, num_stages)]}."
        )
    return _ranges(counts)


def _check_enough(num_blocks: int, num_stages: int) -> None:
    if num_blocks < num_stages:
        raise ValueError(
            f"{num_blocks} blocks can't be cut into {num_stages} stages, each of which needs one. Use fewer stages "
            "(pipeline_parallel_size x num_virtual_stages), or a model with more blocks."
        )


def _best_cut(
    num_blocks: int, num_stages: int, cost: Callable[[int, int, int], float], join: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """The cut of least joined cost and, among equals, of the first counts in dictionary order."""
    # best[start]: of the blocks from start on, over the stages from the current one on.
    last = num_stages - 1
    best: dict[int, tuple[float, tuple[int, ...]]]
    best = {start: (cost(last, start, num_blocks), (num_blocks - start,)) for start in range(num_blocks)}
    for stage in reversed(range(last)):
        after = best
        best = {
            start: min(
                (join(cost(stage, start, stop), after[stop][0]), (stop - start, *after[stop][1]))
                for stop in range(start + 1, num_blocks)
                if stop in after
            )
            for start in range(num_blocks - (num_stages - 1 - stage))
        }
    return best[0]


def _ranges(counts: Sequence[int]) -> list[range]:
    stops = list(accumulate(counts))
    return [range(stop - count, stop) for stop, count in zip(stops, counts, strict=True)]


def _cost(module: nn.Module) -> float:
    """Parameters used in products, counted in each place where they are registered."""
    return float(
        sum(
            parameter.numel()
            for part in module.modules()
            if not isinstance(part, (nn.Embedding, nn.EmbeddingBag))
            for parameter in part.parameters(recurse=False)
        )
    )
