"""Which rank failed first, told from processes that stand in for ranks."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lightning_par import elastic
from lightning_par.elastic import _check_can_travel, _run_rank
from lightning_par.rank_watch import RankFailedError, RankWatch

Start = Callable[..., subprocess.Popen[bytes]]

SLEEP = "import time; time.sleep(60)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); " + SLEEP


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a process as a local rank of an attempt, in the folder where the elastic agent would have it."""
    processes = []

    def start_rank(rank: int, code: str, attempt: int = 0) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-S", "-E", "-c", code], stdout=subprocess.PIPE)
        processes.append(process)
        folder = tmp_path / "run" / f"attempt_{attempt}" / str(rank)
        folder.mkdir(parents=True)
        started = {"pid": process.pid, "rank": rank, "label": f"rank {rank} of 2"}
        (folder / "draft").write_text(json.dumps(started))
        (folder / "draft").rename(folder / "started.json")
        return process

    yield start_rank
    for process in processes:
        process.kill()
        process.communicate()


def leave_record(tmp_path: Path, rank: int, error: str, when: float, attempt: int = 0) -> None:
    record = {"time": when, "rank": rank, "label": f"rank {rank} of 2", "error": error, "traceback": f"at {error}\n"}
    (tmp_path / "run" / f"attempt_{attempt}" / str(rank) / "failure.json").write_text(json.dumps(record))


def leave_mark(tmp_path: Path, rank: int) -> None:
    (tmp_path / "run" / "attempt_0" / str(rank) / "finished.json").write_text("{}")


def agent_error(rank: int, exit_code: int = 1) -> ChildFailedError:
    failure = ProcessFailure(local_rank=rank, pid=7, exitcode=exit_code, error_file="none")
    return ChildFailedError("work", {rank: failure})


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Without collecting its exit state, which is the agent's to do."""
    state = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    return state is not None


@pytest.mark.parametrize(
    ("code", "message", "signal_name", "exit_code"),
    [
        ("import os; os.kill(os.getpid(), 9)", "was killed by SIGKILL. The system does that", "SIGKILL", None),
        ("import os; os.kill(os.getpid(), 11)", "was killed by SIGSEGV.", "SIGSEGV", None),
        ("raise SystemExit(3)", "ended with exit code 3;", None, 3),
    ],
)
def test_rank_that_left_no_word(
    code: str, message: str, signal_name: str | None, exit_code: int | None, tmp_path: Path, start: Start
) -> None:
    with RankWatch(tmp_path, num_ranks=2, grace_seconds=60) as watch:
        survivor = start(0, SLEEP)
        process = start(1, f"import time; time.sleep(0.2); {code}")
        wait_until(lambda: has_ended(process))
        time.sleep(0.1)  # the other rank notices a little later
        leave_record(tmp_path, 0, "RuntimeError: connection closed by peer", time.time())
        survivor.terminate()
        wait_until(lambda: has_ended(survivor))
        failure = watch.first_failure(agent_error(rank=0))
    assert str(failure).startswith(f"rank 1 of 2, process {process.pid}, {message}")
    assert (failure.rank, failure.signal_name, failure.exit_code) == (1, signal_name, exit_code)


def test_first_exception_wins_whoever_ended_first(tmp_path: Path, start: Start) -> None:
    with RankWatch(tmp_path, num_ranks=2, grace_seconds=60) as watch:
        ranks = [start(rank, "raise SystemExit(1)") for rank in (0, 1)]
        leave_record(tmp_path, 0, "RuntimeError: connection closed by peer", 20.0)
        leave_record(tmp_path, 1, "ValueError: boom", 10.0)
        wait_until(lambda: all(has_ended(rank) for rank in ranks))
        failure = watch.first_failure(agent_error(rank=0))
    assert str(failure) == "rank 1 of 2 failed with ValueError: boom\n\nat ValueError: boom"
    assert (failure.rank, failure.traceback) == (1, "at ValueError: boom\n")


def test_killed_rank_whose_state_the_agent_collected_unseen(tmp_path: Path, start: Start) -> None:
    watch = RankWatch(tmp_path, num_ranks=2, grace_seconds=60)
    ranks = [start(rank, "import os; os.kill(os.getpid(), 9)") for rank in (0, 1)]
    leave_record(tmp_path, 0, "RuntimeError: connection closed by peer", 10.0)
    for rank in ranks:
        rank.wait()
    watch.start()
    assert watch.first_failure(agent_error(rank=1, exit_code=-9)).signal_name == "SIGKILL"


def test_rank_ended_by_the_agent_is_not_the_cause(tmp_path: Path, start: Start) -> None:
    watch = RankWatch(tmp_path, num_ranks=2, grace_seconds=60)
    ranks = [start(0, "import os; os.kill(os.getpid(), 15)"), start(1, "raise SystemExit(1)")]
    leave_record(tmp_path, 1, "ValueError: boom", 10.0)
    wait_until(lambda: all(has_ended(rank) for rank in ranks))
    watch.start()  # sees both at once
    assert watch.first_failure(agent_error(rank=1)).rank == 1


def test_rank_that_ended_before_it_was_known(tmp_path: Path) -> None:
    with RankWatch(tmp_path, num_ranks=2, grace_seconds=60) as watch:
        failure = watch.first_failure(agent_error(rank=1))
    assert str(failure).startswith("rank 1, process 7, ended with exit code 1; what it had to say about it is above")


@pytest.mark.parametrize(("exit_code", "finished"), [(1, False), (1, True), (0, False)])
def test_rank_that_does_not_end_is_killed_some_time_after_a_failure(
    exit_code: int, finished: bool, tmp_path: Path, start: Start
) -> None:
    with RankWatch(tmp_path, num_ranks=2, grace_seconds=0.3) as watch:
        stuck = start(0, DEAF)
        assert stuck.stdout is not None
        stuck.stdout.readline()  # it is deaf from now on
        start(1, f"import time; time.sleep(0.2); raise SystemExit({exit_code})")
        if finished:
            leave_mark(tmp_path, 1)
        stuck.terminate()
        wait_until(lambda: has_ended(stuck))
        failure = watch.first_failure(agent_error(rank=0, exit_code=-signal.SIGKILL))
    assert stuck.wait() == -signal.SIGKILL
    assert (failure.rank, failure.exit_code) == (1, exit_code)


def test_ranks_take_their_time_after_another_has_finished(tmp_path: Path, start: Start) -> None:
    with RankWatch(tmp_path, num_ranks=2, grace_seconds=0.1):
        busy = start(0, "import time; time.sleep(1)")
        finished = start(1, "import time; time.sleep(0.2)")
        leave_mark(tmp_path, 1)
        wait_until(lambda: has_ended(busy))
    assert (finished.wait(), busy.wait()) == (0, 0)


def test_no_rank_outlives_the_watch(tmp_path: Path, start: Start) -> None:
    with RankWatch(tmp_path, num_ranks=1, grace_seconds=60):
        rank = start(0, SLEEP)
    assert rank.wait(timeout=20) == -signal.SIGKILL


def test_restart_is_told_with_its_cause(tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    with RankWatch(tmp_path, num_ranks=1, grace_seconds=60) as watch:
        first = start(0, "raise SystemExit(1)")
        wait_until(lambda: has_ended(first))
        leave_record(tmp_path, 0, "ValueError: boom", 1.0)
        time.sleep(0.1)  # a look or two at the ended rank
        second = start(0, "raise SystemExit(4)", attempt=1)
        wait_until(lambda: has_ended(second))
        failure = watch.first_failure(agent_error(rank=0))
    assert "rank 0 of 2 failed with ValueError: boom" in capsys.readouterr().err
    assert failure.exit_code == 4


@pytest.fixture
def as_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process as the agent would start it."""
    for name, value in {
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"),
        "RANK": "0",
        "WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("leave_with_parent", "end_soon"):
        monkeypatch.setattr(elastic, name, lambda *args: None)


@pytest.mark.usefixtures("as_rank")
@pytest.mark.parametrize(
    ("end", "leaves", "marks"),
    [
        (None, None, {"finished"}),
        (SystemExit(), None, {"finished"}),
        (SystemExit(3), SystemExit, {"failure"}),
        (ValueError("boom"), ValueError, {"failure"}),
        (KeyboardInterrupt(), SystemExit, set()),
    ],
)
def test_word_that_a_rank_leaves(
    end: BaseException | None, leaves: type[BaseException] | None, marks: set[str], tmp_path: Path
) -> None:
    def work(config: dict[str, Any]) -> str:
        if end is not None:
            raise end
        return "done"

    with nullcontext() if leaves is None else pytest.raises(leaves) as raised:
        assert _run_rank(work, {}, 1, os.getppid()) == (None if end else "done")
    if isinstance(end, KeyboardInterrupt):
        assert raised.value.code == 130
    assert {path.stem for path in tmp_path.glob("*.json")} == {"started", *marks}


def test_result_that_cannot_be_sent() -> None:
    _check_can_travel({"loss": [1.5, float("nan")]})
    with pytest.raises(TypeError, match="returned a lock on rank 0 that cannot be sent to the parent process"):
        _check_can_travel(threading.Lock())


def test_error_keeps_its_message_when_it_is_pickled() -> None:
    error = pickle.loads(pickle.dumps(RankFailedError("rank 1 failed", rank=1, signal_name="SIGKILL")))
    assert (str(error), error.rank, error.signal_name) == ("rank 1 failed", 1, "SIGKILL")
