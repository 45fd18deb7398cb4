"""The layout: inference, checks and coordinates."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_par.layout import AXES, ParallelLayout

SIZES = st.integers(1, 6)


@given(pp=SIZES, replicate=SIZES, shard=SIZES, tp=SIZES)
def test_coordinates_number_every_rank_once(pp: int, replicate: int, shard: int, tp: int) -> None:
    layout = ParallelLayout(pp, replicate, shard, tp)
    places = [tuple(layout.coordinates(rank).values()) for rank in range(layout.world_size)]
    assert places == sorted(set(places)), "each place once, the tensor axis fastest"
    for rank in range(layout.world_size):
        assert 0 <= layout.data_parallel_rank(rank) < layout.data_parallel_size


@pytest.mark.parametrize(
    ("world_size", "arguments", "expected"),
    [
        (8, {}, (1, 8, 1, 1)),
        (8, {"zero_stage": 3}, (1, 1, 8, 1)),
        (8, {"zero_stage": 2, "zero_shard_size": 4}, (1, 2, 4, 1)),
        (8, {"tensor_parallel_size": 2, "zero_stage": 1}, (1, 1, 4, 2)),
        (8, {"tensor_parallel_size": "auto", "data_parallel_size": 2}, (1, 2, 1, 4)),
        (
            16,
            {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "zero_stage": 3, "zero_shard_size": 2},
            (2, 2, 2, 2),
        ),
        (1, {"zero_stage": 3}, (1, 1, 1, 1)),
    ],
)
def test_from_degrees(world_size: int, arguments: dict[str, Any], expected: tuple[int, ...]) -> None:
    layout = ParallelLayout.from_degrees(world_size, **arguments)
    assert tuple(layout.as_dict().values()) == expected
    assert tuple(layout.as_dict()) == AXES
    assert layout.world_size == world_size


@pytest.mark.parametrize(
    ("world_size", "arguments", "words"),
    [
        (8, {"data_parallel_size": 3}, "= 3 ranks, but the job has 8"),
        (8, {"tensor_parallel_size": 3}, "3 does not divide 8"),
        (8, {"tensor_parallel_size": "auto"}, 'Only one degree may be "auto"'),
        (8, {"tensor_parallel_size": 0}, "tensor_parallel_size=0 must be a positive integer"),
        (8, {"tensor_parallel_size": 2.0}, "tensor_parallel_size=2.0 must be a positive integer"),
        (8, {"data_parallel_size": "all"}, "data_parallel_size='all' must be a positive integer"),
        (8, {"zero_stage": 4}, "zero_stage=4 is unknown"),
        (8, {"zero_stage": True}, "zero_stage=True is unknown"),
        (8, {"zero_shard_size": 2}, "zero_shard_size=2 needs zero_stage 1, 2 or 3"),
        (8, {"zero_stage": 3, "zero_shard_size": 3}, r"Choose a divisor of 8: \[1, 2, 4, 8\]"),
        (8, {"zero_stage": 3, "zero_shard_size": -1}, "zero_shard_size=-1 must be a positive integer"),
    ],
)
def test_impossible_degrees(world_size: int, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ParallelLayout.from_degrees(world_size, **arguments)


def test_rank_outside() -> None:
    with pytest.raises(ValueError, match="rank 4 is outside a layout of 4 ranks"):
        ParallelLayout(tp=4).coordinates(4)


def test_str() -> None:
    assert str(ParallelLayout(dp_shard=2, tp=4)) == "dp_shard 2 x tp 4"
    assert str(ParallelLayout()) == "1 rank"
