"""The processes of a script's other ranks, played by small ones."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator

import pytest

from lightning_par.strategies import script_children
from lightning_par.strategies.script_children import Children, StuckWatch

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
        return Children((), (len(codes) + 1, 1), {"NODE_RANK": str(node_rank)}, processes)

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
    failure = ranks.finish()
    assert time.monotonic() - start < 40
    assert failure is not None
    assert re.match(message, str(failure))
    assert all(process.poll() is not None for process in ranks.processes)


def test_healthy_children_may_take_as_long_as_they_like(children: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = types.SimpleNamespace(monotonic=itertools.count(step=3600).__next__, sleep=time.sleep)
    monkeypatch.setattr(script_children, "time", clock)  # each look at it is an hour later
    ranks = children(FINE, "import time; time.sleep(1)")
    assert ranks.finish() is None
    assert [process.poll() for process in ranks.processes] == [0, 0]


def test_children_of_a_failed_script_may_take_so_long(children: Make) -> None:
    ranks = children(SLEEP)
    assert ranks.finish(seconds=0.3) is None
    assert ranks.processes[0].poll() == -15


def test_interrupt_while_waiting_ends_the_children(children: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(script_children, "time", types.SimpleNamespace(monotonic=time.monotonic, sleep=interrupt))
    ranks = children(SLEEP)
    with pytest.raises(KeyboardInterrupt):
        ranks.finish()
    assert ranks.processes[0].poll() == -15


def test_children_that_were_given_up_are_ended_without_another_word(children: Make) -> None:
    ranks = children(BAD, SLEEP)
    ranks.given_up = True
    start = time.monotonic()
    assert ranks.finish() is None
    assert time.monotonic() - start < 40
    assert ranks.processes[1].poll() == -15


def test_deaf_children_are_killed(children: Make) -> None:
    ranks = children(DEAF)
    ranks.end(grace_seconds=0.3)
    assert ranks.processes[0].poll() == -9


def test_all_run_until_one_has_ended(children: Make) -> None:
    assert children(SLEEP, SLEEP).all_run()
    ranks = children(SLEEP, FINE)
    ranks.processes[1].wait(20)
    assert not ranks.all_run()


def test_watch_leaves_a_main_thread_alone_that_goes_on_by_itself(children: Make) -> None:
    watch = StuckWatch(children(BAD))
    watch.start()
    time.sleep(1.0)  # it has seen the failure and gives the main thread its time
    watch.stop()
    assert not watch.is_alive()
