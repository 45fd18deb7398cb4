"""The action grids: what torch's schedules do, and that no broken grid passes the check."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from lightning_par.pipeline_parallel import (
    SCHEDULES,
    Action,
    Grid,
    build_grid,
    check_grid,
    schedule_named,
    stage_indices,
)
from lightning_par.pipeline_parallel.check import dependencies, execution_order

pytestmark = pytest.mark.unit

NAMES = list(SCHEDULES)
Ranks = list[list[str]]


def written(grid: Grid) -> Ranks:
    return [[str(action) for action in actions] for actions in grid.ranks]


def read(ranks: Ranks, num_stages: int, num_microbatches: int) -> Grid:
    def action(text: str) -> Action:
        kind = text.strip("0123456789")
        stage, microbatch = text.split(kind)
        return Action(int(stage), kind, int(microbatch))

    return Grid(tuple(tuple(map(action, texts)) for texts in ranks), num_stages, num_microbatches)


def test_gpipe_by_hand() -> None:
    grid = build_grid(schedule_named("gpipe"), 2, 2)
    assert [" ".join(texts) for texts in written(grid)] == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    ]


def test_1f1b_by_hand() -> None:
    grid = build_grid(schedule_named("1f1b"), 3, 4)
    assert [" ".join(text for text in texts if "_" not in text) for texts in written(grid)] == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


@pytest.mark.parametrize("name", [name for name in NAMES if SCHEDULES[name].is_multi_stage])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (3, 6), (4, 10)])
def test_multi_stage_grids_are_those_that_torch_publishes(name: str, p: int, m: int) -> None:
    schedule = schedule_named(name)
    stages = [
        SimpleNamespace(stage_index=stage, num_stages=2 * p, group_size=p, group_rank=0, submod=None)
        for stage in stage_indices(schedule, 0, p)
    ]
    published = schedule.torch_class(stages, m).pipeline_order_with_comms
    flat = {rank: [part for a in actions for part in a.sub_actions or (a,)] for rank, actions in published.items()}
    sharding = ("UNSHARD", "RESHARD", "REDUCE_GRAD")
    expected = [[str(a) for a in flat[rank] if a.computation_type.value not in sharding] for rank in range(p)]
    assert written(build_grid(schedule, p, m)) == expected


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_every_grid_passes_the_check(name: str, p: int) -> None:
    schedule = schedule_named(name)
    for m in (2 * p, 2 * p + 2, 4 * p):
        grid = build_grid(schedule, p, m)
        check_grid(grid)
        kinds = {action.kind for actions in grid.ranks for action in actions}
        assert ("W" in kinds) == schedule.splits_backward
        assert [grid.stages_of(rank) for rank in range(p)] == [stage_indices(schedule, rank, p) for rank in range(p)]


@pytest.mark.parametrize("name", NAMES)
def test_execution_order_has_every_action_after_its_needs(name: str) -> None:
    grid = build_grid(schedule_named(name), 3, 6)
    needs, done = dependencies(grid), set()
    for _, action in execution_order(grid):
        assert done.issuperset(needs[action])
        done.add(action)
    assert len(done) == sum(map(len, grid.ranks))


@pytest.mark.parametrize("name", NAMES)
def test_no_action_can_be_left_out_or_done_twice(name: str) -> None:
    grid = build_grid(schedule_named(name), 2, 4)
    for rank, actions in enumerate(grid.ranks):
        for place, action in enumerate(actions):
            for copies in (0, 2):
                broken = [*actions[:place], *[action] * copies, *actions[place + 1 :]]
                ranks = [broken if other == rank else kept for other, kept in enumerate(grid.ranks)]
                with pytest.raises(ValueError, match=str(action) if copies or len(action.kind) == 1 else r"\d[A-Z]"):
                    check_grid(Grid(tuple(map(tuple, ranks)), grid.num_stages, grid.num_microbatches))


@pytest.mark.parametrize("name", NAMES)
def test_no_action_can_come_before_what_it_needs(name: str) -> None:
    grid = build_grid(schedule_named(name), 2, 4)
    needs = dependencies(grid)
    for rank, actions in enumerate(grid.ranks):
        for action in actions:
            for need in set(needs[action]) & set(actions):
                places = {action: need, need: action}
                broken = tuple(places.get(other, other) for other in actions)
                ranks = tuple(broken if other == rank else kept for other, kept in enumerate(grid.ranks))
                with pytest.raises(ValueError, match=r"pipeline stops.*needs|messages between two ranks"):
                    check_grid(Grid(ranks, grid.num_stages, grid.num_microbatches))


def swap(rank: int, first: str, second: str) -> Callable[[Ranks], None]:
    def change(ranks: Ranks) -> None:
        i, j = ranks[rank].index(first), ranks[rank].index(second)
        ranks[rank][i], ranks[rank][j] = second, first

    return change


def replace(rank: int, old: str, new: str) -> Callable[[Ranks], None]:
    return lambda ranks: ranks[rank].__setitem__(ranks[rank].index(old), new)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (swap(1, "1F0", "1B0"), "rank 1 can't do 1B0, which needs 1F0 before it"),
        (swap(0, "0F1", "0SEND_F1"), "rank 0 can't do 0SEND_F1, which needs 0F1 before it"),
        (swap(1, "1RECV_F1", "1F1"), "rank 1 can't do 1F1, which needs 1RECV_F1 before it"),
        (swap(0, "0SEND_F0", "0SEND_F1"), "rank 0 has 0SEND_F1 where rank 1 has 1RECV_F0"),
        (swap(1, "1RECV_F0", "1RECV_F1"), "rank 0 has 0SEND_F0 where rank 1 has 1RECV_F1"),
        (lambda ranks: ranks[0].remove("0SEND_F1"), "rank 0 has no send where rank 1 has 1RECV_F1"),
        (lambda ranks: ranks[0].remove("0RECV_B1"), "rank 1 has 1SEND_B1 where rank 0 has no receive"),
        (lambda ranks: ranks[0].append("0F1"), "0F1 is done 2 times on rank 0"),
        (lambda ranks: ranks[1].remove("1B1"), "1B1 is missing"),
        (lambda ranks: ranks[1].append("1W1"), "1B1 and 1W1 compute the same gradient"),
        (replace(1, "1B1", "1I1"), "1W1 is missing"),
        (replace(1, "1B1", "1B7"), "rank 1 does 1B7, which is no action of 2 stages and 2 micro-batches"),
        (replace(1, "1B1", "1X1"), "rank 1 does 1X1, which is no action"),
        (replace(0, "0B1", "1B1"), "stage 1 lies on rank"),
        (lambda ranks: ranks[0].append("0SEND_B1"), "rank 0 does 0SEND_B1, but there is no other rank"),
        (lambda ranks: ranks.append([]), "rank 2 does nothing"),
    ],
)
def test_a_broken_grid_is_told_which_action_is_wrong(change: Callable[[Ranks], None], message: str) -> None:
    ranks = written(build_grid(schedule_named("gpipe"), 2, 2))
    check_grid(read(ranks, 2, 2))
    change(ranks)
    with pytest.raises(ValueError, match=message):
        check_grid(read(ranks, 2, 2))


def test_gradients_of_weights_come_after_those_of_inputs() -> None:
    ranks = written(build_grid(schedule_named("interleaved_zero_bubble"), 2, 2))
    swap(1, "3I0", "3W0")(ranks)
    with pytest.raises(ValueError, match="rank 1 can't do 3W0, which needs 3I0 before it"):
        check_grid(read(ranks, 4, 2))


def test_ranks_that_wait_for_each_other() -> None:
    """Every rank's own order is sound and all messages meet, but each rank waits for the other to begin."""
    ranks = written(build_grid(schedule_named("looped_bfs"), 2, 2))
    for rank, late, early in ((0, ("0F1", "0SEND_F1"), "2F0"), (1, ("1SEND_F0",), "1F1")):
        for text in late:
            ranks[rank].remove(text)
        place = ranks[rank].index(early) + 1
        ranks[rank][place:place] = late
    with pytest.raises(ValueError, match="rank 0 can't do 2F0.*from rank 1; rank 1 can't do 1F1.*from rank 0"):
        check_grid(read(ranks, 4, 2))
