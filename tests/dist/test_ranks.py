"""The rank pool itself: it reuses processes, reports errors by rank, and never hangs."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.dist.ranks import RankError, RankPool, Ranks, RankTimeoutError


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """A pool of its own: what is killed here need not import again what the shared ranks hold."""
    with RankPool(warm_modules=()) as pool:
        pool.start(2)
        yield pool.run


def pid() -> int:
    return os.getpid()


def sum_of_ranks(offset: int, *, scale: float) -> tuple[torch.Tensor, str]:
    dist.init_process_group("gloo")
    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    return value * scale, os.environ["MASTER_PORT"]


def leave_traces() -> None:
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.rand(3)
    random.random()


def read_traces() -> tuple[bool, bool, torch.dtype, float, float]:
    draws = torch.rand(1).item(), random.random()
    return "LEFT_BEHIND" in os.environ, dist.is_initialized(), torch.get_default_dtype(), *draws


def shard_and_gather() -> list[float]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("axis",))
    return distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).full_tensor().tolist()


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def raise_on(rank: int) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == rank:
        print("about to fail")
        raise ValueError(f"rank {rank} cannot go on")
    dist.all_reduce(torch.ones(1))


def raise_everywhere() -> None:
    raise ValueError("the same on all")


def die_on(rank: int, with_signal: int) -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == rank:
        os.kill(os.getpid(), with_signal)
    dist.barrier()


def sleep_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        time.sleep(60)


def test_processes_are_reused_and_extended(ranks: Ranks) -> None:
    first, second, one = ranks(2, pid), ranks(2, pid), ranks(1, pid)
    assert first == second
    assert one == first[:1]
    assert len({*first, os.getpid()}) == 3


def test_each_call_has_its_own_group_and_port(ranks: Ranks) -> None:
    results = [ranks(2, sum_of_ranks, 1, scale=2.0) for _ in range(2)]
    for (tensor, _), _other in results:
        assert tensor.tolist() == [6.0]
    ports = {port for result in results for _, port in result}
    assert len(ports) == 2


def test_a_call_leaves_no_trace(ranks: Ranks) -> None:
    before = ranks(1, read_traces)
    ranks(1, leave_traces)
    assert ranks(1, read_traces) == before
    assert before[0][:3] == (False, False, torch.float32)


def test_groups_and_their_threads_go_with_the_call(ranks: Ranks) -> None:
    before = ranks(2, num_threads)
    assert ranks(2, shard_and_gather) == [[0.0, 1.0, 2.0, 3.0]] * 2
    assert ranks(2, num_threads) == before


def test_the_failing_rank_is_named_first_and_the_stuck_one_replaced(ranks: Ranks) -> None:
    before = ranks(2, pid)
    with pytest.raises(RankError, match="ValueError: rank 1 cannot go on") as caught:
        ranks(2, raise_on, 1)
    failures = caught.value.failures
    assert [failure.rank for failure in failures] == [1, 0]
    assert "about to fail" in str(caught.value)
    assert all("in raise_on" in failure.details for failure in failures)
    assert ranks(2, pid)[1] == before[1]
    assert ranks(2, sum_of_ranks, 0, scale=1.0)[0][0].tolist() == [1.0]


def test_one_error_on_all_ranks_is_shown_once_and_keeps_the_processes(ranks: Ranks) -> None:
    before = ranks(2, pid)
    with pytest.raises(RankError) as caught:
        ranks(2, raise_everywhere)
    assert str(caught.value).count("Traceback") == 1
    assert "rank 0, 1" in str(caught.value)
    assert ranks(2, pid) == before


def test_a_killed_rank_is_reported_and_replaced(ranks: Ranks) -> None:
    with pytest.raises(RankError, match="rank 1 died with exit code -9"):
        ranks(2, die_on, 1, signal.SIGKILL)
    assert len(set(ranks(2, pid))) == 2


def test_a_hang_ends_with_the_stack_of_the_hanging_rank(ranks: Ranks) -> None:
    start = time.monotonic()
    with pytest.raises(RankTimeoutError, match="in sleep_on") as caught:
        ranks(2, sleep_on, 1, timeout=2)
    assert time.monotonic() - start < 15
    assert [failure.rank for failure in caught.value.failures] == [1]
    assert len(set(ranks(2, pid))) == 2


def test_leaving_the_pool_ends_its_processes() -> None:
    with RankPool(warm_modules=()) as pool:
        (worker,) = pool.run(1, pid)
        os.kill(worker, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)
