"""Simulated bubbles and activations against the published formulas and against schedules timed by hand."""

from __future__ import annotations

from functools import cache

import pytest

from lightning_par.pipeline_parallel import SCHEDULES, Costs, Grid, Timeline, build_grid, schedule_named, simulate
from lightning_par.pipeline_parallel.formulas import Case, published
from lightning_par.pipeline_parallel.simulate import peak_activations

pytestmark = pytest.mark.unit

EVEN = (1.0, 1.0, 1.0)
UNEVEN = [EVEN, (1.0, 2.0, 1.0), (1.5, 1.25, 0.5), (2.0, 1.0, 1.0)]


@cache
def grid_of(name: str, p: int, m: int, v: int) -> Grid:
    return build_grid(schedule_named(name), p, m, v)


def run(name: str, p: int, m: int, v: int = 1, times: tuple[float, ...] = EVEN, communication: float = 0.0) -> Timeline:
    """Times are those of a rank's whole share of the model, of which each stage takes 1/v."""
    forward, inputs, weights = (time / v for time in times)
    return simulate(grid_of(name, p, m, v), Costs(forward, inputs, weights, communication))


@pytest.mark.parametrize("times", [*UNEVEN, (0.5, 1.0, 2.0)])
@pytest.mark.parametrize(
    ("name", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("interleaved_1f1b", 3), ("looped_bfs", 2)]
)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (4, 10)])
def test_bubble_of_whole_backwards(name: str, v: int, p: int, m: int, times: tuple[float, ...]) -> None:
    timeline = run(name, p, m, v, times)
    assert timeline.bubble_time == pytest.approx([(p - 1) * sum(times) / v] * p)
    assert timeline.total_time == pytest.approx(m * sum(times) + (p - 1) * sum(times) / v)


@pytest.mark.parametrize(("p", "m"), [(4, 4), (4, 8), (4, 16), (8, 8)])
def test_bubble_shares_of_the_papers(p: int, m: int) -> None:
    """If F = I = W. The zero-bubble share is for v stages a rank; torch has none with one, the paper's ZB-H1."""
    assert run("gpipe", p, m).bubble_share == pytest.approx((p - 1) / (m + p - 1))
    assert run("1f1b", p, m).bubble_share == pytest.approx((p - 1) / (m + p - 1))
    assert run("interleaved_1f1b", p, m, 2).bubble_share == pytest.approx((p - 1) / (2 * m + p - 1))
    assert run("interleaved_zero_bubble", p, m, 2).bubble_share == pytest.approx((p - 1) / (2 * 3 * m + p - 1))


@pytest.mark.parametrize("times", UNEVEN)
@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (4, 10)])
def test_bubble_of_zero_bubble(p: int, m: int, v: int, times: tuple[float, ...]) -> None:
    forward, inputs, weights = times
    bubbles = run("interleaved_zero_bubble", p, m, v, times).bubble_time
    assert bubbles == pytest.approx([(p - 1) * (forward + inputs - weights) / v] * p)


@pytest.mark.parametrize("times", [(1.0, 1.0, 2.0), (1.0, 2.0, 1.5), (0.5, 1.5, 1.75), (2.0, 1.0, 1.5)])
def test_zero_bubble_is_never_faster_than_a_walk_through_all_ranks(times: tuple[float, ...]) -> None:
    """With long weight gradients the paper's formula would fall to nothing; torch's order does not."""
    forward, inputs, weights = times
    bubbles = run("interleaved_zero_bubble", 4, 8, 2, times).bubble_time
    assert bubbles == pytest.approx([3 * max(forward, inputs, forward + inputs - weights) / 2] * 4)
    assert published(SCHEDULES["interleaved_zero_bubble"], Case(4, 8, 2, *times)) is None


@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 7), (4, 16)])
def test_zbv_idles_only_at_its_ends(p: int, m: int) -> None:
    timeline = run("zbv", p, m, 2)
    assert timeline.inner_bubble_time == pytest.approx([0.0] * p)
    assert timeline.bubble_time == pytest.approx([(p - 1) / 2] * p)


def test_zbv_with_few_microbatches_idles_inside_too() -> None:
    assert max(run("zbv", 4, 6, 2).inner_bubble_time) > 0


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 11)])
def test_bubble_of_dualpipev(p: int, m: int) -> None:
    chunk = 1 / 2  # F = I = W of one of a rank's two stages, so that F&B = 3 chunks and B = 2 chunks
    assert run("dualpipev", p, m, 2).bubble_time == pytest.approx([(p - 1) * (3 + 2 - 3) * chunk] * p)


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "expected"),
    [
        ("gpipe", 4, 8, 1, [8, 8, 8, 8]),
        ("1f1b", 4, 8, 1, [4, 3, 2, 1]),
        ("1f1b", 4, 4, 1, [4, 3, 2, 1]),
        ("interleaved_1f1b", 4, 8, 2, [11, 9, 7, 5]),  # p (1 + (p-1)/(pv)) ranks' shares = 11 stages
        ("looped_bfs", 4, 8, 2, [16] * 4),
        ("interleaved_zero_bubble", 4, 8, 2, [8] * 4),  # p ranks' shares, as 1F1B
        ("zbv", 4, 8, 2, [8] * 4),
        ("dualpipev", 4, 8, 2, [9] * 4),
    ],
)
def test_peak_activations(name: str, p: int, m: int, v: int, expected: list[int]) -> None:
    assert peak_activations(grid_of(name, p, m, v)) == expected


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("times", [EVEN, (1.0, 2.0, 1.0), (1.0, 1.0, 2.0)])
def test_published_formulas_are_met_wherever_they_are_given(name: str, times: tuple[float, ...]) -> None:
    schedule, given = schedule_named(name), 0
    v = schedule.num_virtual_stages or 3
    for p, m in ((2, 3), (3, 2), (3, 6), (4, 8)):
        formulas, case = published(schedule, Case(p, m, v, *times)), Case(p, m, v, *times)
        if formulas is None or m < schedule.microbatches_per_rank * p:
            continue
        given += 1
        grid = grid_of(name, p, m, v)
        assert simulate(grid, Costs(*times)).bubble_time == pytest.approx([formulas.bubble(case)] * p)
        assert peak_activations(grid)[0] == formulas.peak_activations(case)
    assert given > 0 or times != EVEN


def test_times_by_stage_and_messages_by_hand() -> None:
    """Two ranks, two micro-batches; the second stage is slow, a message takes a half."""
    costs = Costs(forward=[1, 2], backward_input=[1, 2], backward_weight=[1, 1], communication=0.5)
    timeline = simulate(build_grid(schedule_named("gpipe"), 2, 2), costs)
    assert [[(str(action), start, end) for action, start, end in spans] for spans in timeline.ranks] == [
        [("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 9, 11), ("0B1", 12, 14)],
        [("1F0", 1.5, 3.5), ("1F1", 3.5, 5.5), ("1B0", 5.5, 8.5), ("1B1", 8.5, 11.5)],
    ]
    assert timeline.total_time == 14
    assert timeline.bubble_time == [8, 4]
    assert timeline.inner_bubble_time == [8, 0]
    assert timeline.bubble_share == pytest.approx(12 / 28)


def test_messages_delay_the_ends_of_gpipe_only() -> None:
    assert run("gpipe", 4, 8, communication=0.25).total_time == run("gpipe", 4, 8).total_time + 2 * 3 * 0.25


def test_overlapped_pairs_send_when_both_are_done() -> None:
    """torch posts the messages of a DualPipeV pair after its forward and its backward."""
    order = [str(action) for action in build_grid(schedule_named("dualpipev"), 2, 4).ranks[0]]
    pair = order.index("0F3")
    assert order[pair : pair + 4] == ["0F3", "3B1", "0SEND_F3", "3SEND_B1"]


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"forward": 0.0}, "forward=0.0 must be a finite time, above 0"),
        ({"backward_weight": -1.0}, "backward_weight=-1.0 must be a finite time, above 0"),
        ({"communication": -1.0}, "communication=-1.0 must be a finite time, not below 0"),
        ({"communication": float("nan")}, "communication=nan must be"),
        ({"backward_input": [1.0, float("inf")]}, "backward_input=.*must be"),
        ({"forward": [1.0, 1.0, 1.0]}, "forward has 3 times for 2 stages"),
    ],
)
def test_impossible_costs(costs: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(build_grid(schedule_named("gpipe"), 2, 2), Costs(**costs))
