"""Whether a grid of actions can run: each action once, after what it needs, and messages that meet."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from itertools import chain, product, zip_longest

from lightning_par.pipeline_parallel.grid import COMPUTATIONS, Action, Grid

__all__ = ["check_grid", "dependencies", "execution_order"]

_OTHER_END = {"SEND_F": (1, "RECV_F"), "RECV_F": (-1, "SEND_F"), "SEND_B": (-1, "RECV_B"), "RECV_B": (1, "SEND_B")}
"""How many stages away the other end of a message is, and what it does."""


def check_grid(grid: Grid) -> None:
    """Prove that the ranks can run their actions as written and that nothing is left out.

    A send is taken to end without its receive, as torch posts it and goes on; and messages from one rank to another to
    arrive in the order they were sent, as they carry no label.

    Raises:
        ValueError: If an action is unknown, missing, done twice or runs before what it needs, or if a send and its
            receive do not meet. The message names the action.
    """
    _check_places(grid)
    _check_complete(grid)
    _check_messages(grid)
    for _ in execution_order(grid):
        pass


def execution_order(grid: Grid) -> Iterator[tuple[int, Action]]:
    """Pairs ``(rank, action)`` in an order in which everything an action needs comes before it.

    Raises:
        ValueError: If there is no such order, because the ranks wait for each other or for what never comes.
    """
    needs = dependencies(grid)
    done: set[Action] = set()
    waiting = [deque(actions) for actions in grid.ranks]
    while any(waiting):
        num_done = len(done)
        for rank, queue in enumerate(waiting):
            while queue and done.issuperset(needs[queue[0]]):
                done.add(queue[0])
                yield rank, queue.popleft()
        if len(done) == num_done:
            raise ValueError(_why_stuck(waiting, needs, done))


def dependencies(grid: Grid) -> dict[Action, tuple[Action, ...]]:
    """What must be done, on any rank, before each action of the grid can start."""
    rank_of = grid.rank_of_stage
    split = {(action.stage, action.microbatch) for action in chain(*grid.ranks) if action.kind == "I"}

    def computation(kind: str, stage: int, microbatch: int) -> Action:
        return Action(stage, "I" if kind == "B" and (stage, microbatch) in split else kind, microbatch)

    def handed_over(kind: str, source: int, stage: int, microbatch: int) -> tuple[Action, ...]:
        if not 0 <= source < grid.num_stages:
            return ()
        if rank_of.get(source) == rank_of[stage]:
            return (computation(kind, source, microbatch),)
        return Action(stage, f"RECV_{kind}", microbatch), Action(source, f"SEND_{kind}", microbatch)

    def needed_by(action: Action) -> tuple[Action, ...]:
        stage, kind, microbatch = action
        if kind == "F":
            return handed_over("F", stage - 1, stage, microbatch)
        if kind in ("B", "I"):
            return (computation("F", stage, microbatch), *handed_over("B", stage + 1, stage, microbatch))
        if kind == "W":
            return (Action(stage, "I", microbatch),)
        return (computation(kind[-1], stage, microbatch),) if kind.startswith("SEND") else ()

    return {action: needed_by(action) for action in chain(*grid.ranks)}


def _check_places(grid: Grid) -> None:
    """Each action is one of the model's, and on the rank of its stage."""
    for rank, actions in enumerate(grid.ranks):
        if not actions:
            raise ValueError(f"rank {rank} does nothing.")
        for action in actions:
            known = action.kind in COMPUTATIONS or action.kind in _OTHER_END
            inside = 0 <= action.stage < grid.num_stages and 0 <= action.microbatch < grid.num_microbatches
            if not (known and inside):
                model = f"{grid.num_stages} stages and {grid.num_microbatches} micro-batches"
                raise ValueError(f"rank {rank} does {action}, which is no action of {model}.")
            if rank != grid.rank_of_stage[action.stage]:
                holder = grid.rank_of_stage[action.stage]
                raise ValueError(f"rank {rank} does {action}, but stage {action.stage} lies on rank {holder}.")


def _check_complete(grid: Grid) -> None:
    """Each micro-batch goes through each stage once, forward and backward."""
    times = Counter(chain(*grid.ranks))
    for action, number in times.items():
        if number > 1:
            raise ValueError(f"{action} is done {number} times on rank {grid.rank_of_stage[action.stage]}.")
    for stage, microbatch in product(range(grid.num_stages), range(grid.num_microbatches)):
        forward, whole, inputs, weights = (Action(stage, kind, microbatch) for kind in COMPUTATIONS)
        is_split = times[inputs] or times[weights]
        if times[whole] and is_split:
            raise ValueError(f"{whole} and {inputs if times[inputs] else weights} compute the same gradient.")
        for action in (forward, inputs, weights) if is_split else (forward, whole):
            if not times[action]:
                raise ValueError(f"{action} is missing.")


def _check_messages(grid: Grid) -> None:
    """From each rank to each other, receives are posted in the order of the sends."""
    sends: dict[tuple[int, int], list[Action]] = defaultdict(list)
    receives: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank, action in ((rank, action) for rank, actions in enumerate(grid.ranks) for action in actions):
        if action.kind in COMPUTATIONS:
            continue
        peer = grid.rank_of_stage.get(_other_end(action).stage, rank)
        if peer == rank:
            raise ValueError(f"rank {rank} does {action}, but there is no other rank at the other end.")
        if action.kind.startswith("SEND"):
            sends[rank, peer].append(action)
        else:
            receives[peer, rank].append(action)
    for source, target in {**sends, **receives}:
        for sent, received in zip_longest(sends[source, target], receives[source, target]):
            if sent is None or received is None or _other_end(sent) != received:
                raise ValueError(
                    f"rank {source} has {sent or 'no send'} where rank {target} has {received or 'no receive'}: "
                    "messages between two ranks arrive in the order they are sent."
                )


def _other_end(message: Action) -> Action:
    step, kind = _OTHER_END[message.kind]
    return Action(message.stage + step, kind, message.microbatch)


def _why_stuck(waiting: list[deque[Action]], needs: dict[Action, tuple[Action, ...]], done: set[Action]) -> str:
    """What each rank that can't go on waits for, first where no other rank could help."""
    reasons = []
    for rank, queue in enumerate(waiting):
        if queue:
            missing = next(action for action in needs[queue[0]] if action not in done)
            helpers = [other for other, actions in enumerate(waiting) if missing in actions and other != rank]
            where = f"from rank {helpers[0]}" if helpers else "before it"
            reasons.append((bool(helpers), f"rank {rank} can't do {queue[0]}, which needs {missing} {where}"))
    return "The pipeline stops: " + "; ".join(reason for _, reason in sorted(reasons)) + "."
