"""The schedules by name: where their stages lie and which numbers they take."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import pipelining

from lightning_par.pipeline_parallel import (
    SCHEDULES,
    build_grid,
    check_num_microbatches,
    check_num_virtual_stages,
    default_num_microbatches,
    schedule_named,
    stage_indices,
    suitable_num_microbatches,
)

pytestmark = pytest.mark.unit

NAMES = ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"]


def test_names_and_torch_classes() -> None:
    assert list(SCHEDULES) == NAMES
    # torch's own names leave out the underscores, and call zbv by its full name.
    for name, schedule in SCHEDULES.items():
        own = {"zbv": "ZBVZeroBubble"}.get(name, name.replace("_", ""))
        assert schedule.torch_class is pipelining.schedules.get_schedule_class(own)


@pytest.mark.parametrize(
    ("name", "near"),
    [("1F1B", "1f1b"), ("interleaved", "interleaved_1f1b"), ("dualpipe", "dualpipev"), ("zb-v", "zbv")],
)
def test_unknown_name_is_told_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"schedule='{name}' is unknown. Did you mean '{near}'?"):
        schedule_named(name)


@pytest.mark.parametrize(
    ("name", "v", "expected"),
    [
        ("gpipe", None, [[0], [1], [2]]),
        ("interleaved_1f1b", None, [[0, 3], [1, 4], [2, 5]]),
        ("looped_bfs", 3, [[0, 3, 6], [1, 4, 7], [2, 5, 8]]),
        ("zbv", None, [[0, 5], [1, 4], [2, 3]]),
        ("dualpipev", 2, [[0, 5], [1, 4], [2, 3]]),
    ],
)
def test_stages_of_each_rank(name: str, v: int | None, expected: list[list[int]]) -> None:
    assert [stage_indices(schedule_named(name), rank, 3, v) for rank in range(3)] == expected


@pytest.mark.parametrize(
    ("name", "v", "message"),
    [
        ("1f1b", 2, "num_virtual_stages=2 does not fit schedule='1f1b', which puts 1 on each rank.*'interleaved_1f1b'"),
        ("zbv", 3, "num_virtual_stages=3 does not fit schedule='zbv', which puts 2 on each rank"),
        ("looped_bfs", 1, "num_virtual_stages=1 is too few.*at least 2.*'gpipe' or '1f1b'"),
    ],
)
def test_wrong_number_of_virtual_stages(name: str, v: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_num_virtual_stages(schedule_named(name), v)


def test_rank_outside_the_pipeline() -> None:
    with pytest.raises(ValueError, match="rank 4 is outside a pipeline of 4 ranks"):
        stage_indices(schedule_named("1f1b"), 4, 4)


@pytest.mark.parametrize(
    ("name", "m", "p", "message"),
    [
        ("1f1b", 3, 4, "num_microbatches=3 does not fit schedule='1f1b', which needs at least 4 on 4 ranks. Use 4,"),
        ("dualpipev", 7, 4, "which needs at least 8 on 4 ranks. Use 8, or schedule='gpipe'"),
        ("interleaved_1f1b", 9, 4, r"runs them in 2 rounds \(9 // 4\) of equal length. Use 8 or 10,"),
        ("interleaved_zero_bubble", 17, 4, r"in 4 rounds \(17 // 4\) of equal length. Use 16 or 20,"),
        ("gpipe", 0, 4, "num_microbatches=0 on pipeline_parallel_size=4: both must be at least 1"),
    ],
)
def test_wrong_number_of_microbatches(name: str, m: int, p: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_num_microbatches(schedule_named(name), m, p)


def accepts(function: Callable[..., object], *arguments: object) -> bool:
    try:
        function(*arguments)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", NAMES)
def test_rules_are_those_of_torch(name: str) -> None:
    """torch itself refuses exactly what the check refuses."""
    schedule = schedule_named(name)
    for p in (1, 2, 3):
        for m in range(1, 4 * p + 2):
            if accepts(check_num_microbatches, schedule, m, p):
                build_grid(schedule, p, m)
            else:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr("lightning_par.pipeline_parallel.grid.check_num_microbatches", lambda *numbers: None)
                    assert not accepts(build_grid, schedule, p, m)


@pytest.mark.parametrize(
    ("name", "batch_size", "p", "expected"),
    [
        ("1f1b", 64, 4, 16),  # 4p
        ("1f1b", 24, 4, 24),  # the smallest divisor from 4p on
        ("1f1b", 12, 4, 12),  # none from 4p on: the largest
        ("gpipe", 2, 4, 2),
        ("interleaved_1f1b", 60, 3, 12),
        ("interleaved_1f1b", 17, 4, 1),  # 17 micro-batches make unequal rounds
        ("dualpipev", 8, 4, 8),
        ("zbv", 128, 8, 32),
    ],
)
def test_default_number_of_microbatches(name: str, batch_size: int, p: int, expected: int) -> None:
    assert default_num_microbatches(schedule_named(name), batch_size, p) == expected


@given(name=st.sampled_from(NAMES), batch_size=st.integers(1, 96), p=st.integers(1, 8))
def test_default_divides_the_batch_and_suits_the_schedule(name: str, batch_size: int, p: int) -> None:
    schedule = schedule_named(name)
    suitable = suitable_num_microbatches(schedule, batch_size, p)
    for m in suitable:
        check_num_microbatches(schedule, m, p)
    if suitable:
        m = default_num_microbatches(schedule, batch_size, p)
        assert batch_size % m == 0
        assert m == max(suitable) or (m >= 4 * p and not any(4 * p <= other < m for other in suitable))
    else:
        with pytest.raises(ValueError, match=f"A batch of {batch_size} can't be cut.*schedule='{name}' on {p} ranks"):
            default_num_microbatches(schedule, batch_size, p)
