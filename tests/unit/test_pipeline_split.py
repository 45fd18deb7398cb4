"""Cutting blocks into stages by cost and by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
import torch
from torch import nn

from lightning_par.pipeline_parallel.split import block_costs, split_by_hand, split_evenly_by_cost
from lightning_par.pipeline_parallel.trunk import find_trunk
from tests.dist.models import GPT, VOCABULARY, WIDTH
from tests.pipeline_models import llama

pytestmark = pytest.mark.unit


def counts(ranges: Sequence[range]) -> list[int]:
    assert [index for blocks in ranges for index in blocks] == list(range(ranges[-1].stop)), "contiguous and complete"
    return [len(blocks) for blocks in ranges]


def all_cuts(num_blocks: int, num_stages: int) -> list[list[range]]:
    stops = [(*inner, num_blocks) for inner in combinations(range(1, num_blocks), num_stages - 1)]
    return [[range(start, stop) for start, stop in zip((0, *cut), cut, strict=False)] for cut in stops]


def loads(ranges: Sequence[range], costs: Sequence[float], before: float, after: float) -> list[float]:
    inner = [sum(costs[index] for index in blocks) for blocks in ranges]
    return [inner[0] + before, *inner[1:-1], inner[-1] + after] if len(inner) > 1 else [inner[0] + before + after]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_no_cut_has_a_cheaper_dearest_stage_and_no_equal_one_is_more_even(num_stages: int, seed: int) -> None:
    *costs, before, after = torch.randint(0, 9, (9,), generator=torch.Generator().manual_seed(seed)).tolist()
    best = loads(split_evenly_by_cost(costs, before, after, num_stages), costs, before, after)
    others = [loads(cut, costs, before, after) for cut in all_cuts(len(costs), num_stages)]
    dearest = min(max(other) for other in others)
    assert max(best) == dearest
    assert sum(x * x for x in best) == min(sum(x * x for x in other) for other in others if max(other) == dearest)


def test_equals_go_to_fewer_blocks_on_early_stages() -> None:
    assert counts(split_evenly_by_cost([3e9 + 1] * 8, 0, 0, 4)) == [2, 2, 2, 2]
    assert counts(split_evenly_by_cost([0.1] * 9, 0, 0, 4)) == [2, 2, 2, 3]
    assert counts(split_evenly_by_cost([3e9 + 1] * 5, 0, 0, 2)) == [2, 3]
    assert counts(split_evenly_by_cost([0] * 3, 0, 0, 3)) == [1, 1, 1]


def test_a_dear_head_takes_blocks_off_the_last_stage() -> None:
    assert counts(split_evenly_by_cost([10] * 8, 0, 30, 2)) == [5, 3]
    assert counts(split_evenly_by_cost([10] * 8, 5, 30, 4)) == [2, 2, 3, 1]


@pytest.mark.parametrize("tied", [False, True])
def test_costs_are_products_not_lookups(tied: bool) -> None:
    network = GPT(3, tied=tied)
    module = nn.ModuleDict({"net": network})
    costs, before, after = block_costs(module, find_trunk(module))
    assert costs == [sum(parameter.numel() for parameter in network.blocks[0].parameters())] * 3
    assert before == 0, "two embeddings"
    assert after == VOCABULARY * WIDTH + 2 * WIDTH, "the head, tied or not, and the norm"


def test_costs_follow_the_places_of_modules_and_need_no_memory() -> None:
    with torch.device("meta"):
        module = llama(tied=True)
    trunk = find_trunk(module)
    _, before, after = block_costs(module, trunk)
    assert before == 0
    assert block_costs(module, trunk, first=["network.lm_head"])[1:] == (VOCABULARY * 16, after - VOCABULARY * 16)


def test_by_hand() -> None:
    assert split_by_hand([3, 5], 8, 2) == [range(3), range(3, 8)]


@pytest.mark.parametrize("wrong", [[4, 5], [8], [8, 0], [3, 3, 2]])
def test_by_hand_refuses_what_does_not_fit(wrong: list[int]) -> None:
    with pytest.raises(ValueError, match=r"must have 2 numbers .* the 8 blocks; .* For example \[4, 4\]"):
        split_by_hand(wrong, 8, 2)


def test_refuses_fewer_blocks_than_stages() -> None:
    for split in (lambda: split_evenly_by_cost([1, 1], 0, 0, 3), lambda: split_by_hand([1, 1, 0], 2, 3)):
        with pytest.raises(ValueError, match="2 blocks can't be cut into 3 stages"):
            split()
