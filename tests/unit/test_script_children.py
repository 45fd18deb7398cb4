"""The processes of a script's other ranks, played by small ones."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from lightning_par.trainer.script_children import Children, StuckWatch

SLEEP = "import time; print(flush=True); time.sleep(60)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"
FINE, BAD, KILLED = "", "raise SystemExit(3)", "import os; os.kill(os.getpid(), 9)"

Make = Callable[..., Children]


@pytest.fixture
def children() -> Iterator[Make]:
    """Children of the first node that run the given codes; sleeping ones are known to sleep."""
    made: list[subprocess.Popen[bytes]] = []

    def make(*codes: str, node_rank: int = 0) -> Children:
        processes = [
            subprocess.Popen([sys.executable, "-S", "-E", "-c", code], stdout=subprocess.PIPE) for code in codes
        ]
        made.extend(processes)
        for process, code in zip(processes, codes, strict=True):
            if SLEEP in code and process.stdout is not None:
                process.stdout.readline()
        return Children((), len(codes) + 1, 1, {"NODE_RANK": str(node_rank)}, processes)

    yield make
    for process in made:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("bad", "node_rank", "message"),
    [
        (BAD, 0, r"rank 2, process \d+, ended with exit code 3"),
        (KILLED, 1, r"rank 5, process \d+, was killed by SIGKILL"),
    ],
)
def test_waiting_comes_back_with_the_first_failure(bad: str, node_rank: int, message: str, children: Make) -> None:
    ranks = children(SLEEP, bad, node_rank=node_rank)
    start = time.monotonic()
    failure = ranks.finish(seconds=50)
    assert time.monotonic() - start < 40
    assert failure is not None
    assert re.match(message, str(failure))
    assert all(process.poll() is not None for process in ranks.processes)


def test_healthy_children_are_waited_for_and_late_ones_ended(children: Make) -> None:
    assert children(FINE, "import time; time.sleep(0.5)").finish(seconds=50) is None
    late = children(SLEEP)
    assert late.finish(seconds=0.3) is None
    assert late.processes[0].poll() == -15


def test_children_that_were_given_up_are_ended_without_another_word(children: Make) -> None:
    ranks = children(BAD, SLEEP)
    ranks.given_up = True
    start = time.monotonic()
    assert ranks.finish(seconds=50) is None
    assert time.monotonic() - start < 40
    assert ranks.processes[1].poll() == -15


def test_deaf_children_are_killed(children: Make) -> None:
    ranks = children(DEAF)
    ranks.end(grace_seconds=0.3)
    assert ranks.processes[0].poll() == -9


def test_missing_are_only_those_the_latest_trainer_needs(children: Make) -> None:
    ranks = children(SLEEP, FINE, SLEEP, FINE)
    ranks.wait(0.5)
    for process in (ranks.processes[1], ranks.processes[3]):
        process.wait(20)
    assert ranks.missing() == [2, 4]
    ranks.num_processes = 2
    assert ranks.missing() == []


def test_watch_leaves_a_main_thread_alone_that_goes_on_by_itself(children: Make) -> None:
    watch = StuckWatch(children(BAD))
    watch.start()
    time.sleep(1.0)  # it has seen the failure and gives the main thread its time
    watch.stop()
    assert not watch.is_alive()
