"""Who failed first, and who is still there: a parent's watch over the ranks it started.

A failure on one rank makes the others fail too, within milliseconds and with misleading messages ("connection closed
by peer"). So each rank leaves a record with the time of its exception, and the parent looks at exit states as they
happen, without collecting them (that is the elastic agent's business). A rank that has done its work leaves a mark as
well: its end is no reason to hurry the others, which may still close their loggers.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from typing_extensions import Self

__all__ = ["RankFailedError", "RankWatch", "ended_rank"]

POLL_SECONDS = 0.02
"""Short against the time in which a rank that lost its peer raises, unwinds and exits."""


class RankFailedError(RuntimeError):
    """A rank raised, was killed, or ended with an exit code; the others were ended.

    Attributes:
        rank: Global rank that failed first, as far as this machine can tell.
        traceback: Its traceback, empty if it was killed.
        signal_name: Name of the signal that killed it, such as ``"SIGKILL"``.
        exit_code: Its exit code, if it just ended.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int = -1,
        traceback: str = "",
        signal_name: str | None = None,
        exit_code: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback
        self.signal_name = signal_name
        self.exit_code = exit_code


@dataclass
class _Rank:
    """One started rank. ``ended`` says that its exit was noticed, ``exit_code`` is negative for a signal."""

    pid: int
    rank: int
    label: str
    folder: Path
    ended: bool = False
    exit_code: int | None = None
    order: int = -1

    def look(self) -> None:
        """See whether the process has ended, and how, and leave its state for its parent to collect."""
        try:
            state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except ChildProcessError:
            self.ended = True
            return
        if state is not None:
            self.ended = True
            self.exit_code = state.si_status if state.si_code == os.CLD_EXITED else -state.si_status

    def record(self) -> dict[str, Any] | None:
        """What it wrote about its exception, if it raised one."""
        return _read(self.folder / "failure.json")

    @property
    def failed(self) -> bool:
        """Whether it ended with an exit code, or before its work was done."""
        return self.ended and (bool(self.exit_code) or not (self.folder / "finished.json").exists())

    @property
    def died_silently(self) -> bool:
        return self.failed and self.exit_code is not None and self.record() is None


class RankWatch(threading.Thread):
    """Watches the ranks of one launch; a context manager that leaves no rank behind.

    Args:
        folder: Where the elastic agent makes a folder per attempt and local rank, and ranks leave their records.
        num_ranks: Ranks on this machine.
        grace_seconds: How long the other ranks may go on once one has failed.
    """

    def __init__(self, folder: Path, num_ranks: int, grace_seconds: float) -> None:
        super().__init__(name="rank-watch", daemon=True)
        self._folder = folder
        self._num_ranks = num_ranks
        self._grace_seconds = grace_seconds
        self._attempt = -1
        self._ranks: dict[Path, _Rank] = {}
        self._num_looks = 0
        self._deadline: float | None = None
        self._finished = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self._finished.set()
        self.join()
        self._look()
        self._kill_living()

    def run(self) -> None:
        """Look at the ranks until the launch is over."""
        while not self._finished.wait(POLL_SECONDS):
            self._look()
            if self._deadline is None and any(rank.failed for rank in self._ranks.values()):
                self._deadline = time.monotonic() + self._grace_seconds
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._kill_living()

    def first_failure(self, error: ChildFailedError) -> RankFailedError:
        """The failure that caused the others.

        Args:
            error: What the elastic agent saw, which is one rank and not always the first.
        """
        self._finished.set()
        self.join()
        self._look()
        for rank in self._ranks.values():
            # The agent may have collected the state of the rank it names before it was seen here.
            if rank.exit_code is None and rank.rank in error.failures:
                rank.exit_code = error.failures[rank.rank].exitcode
        return self._first_failure() or _agent_failure(error)

    def _look(self) -> None:
        self._num_looks += 1
        self._find_ranks()
        for rank in self._ranks.values():
            if not rank.ended:
                rank.look()
                rank.order = self._num_looks if rank.ended else -1

    def _find_ranks(self) -> None:
        if self._attempt >= 0 and len(self._ranks) == self._num_ranks and not self._all_ended():
            return
        attempts = {int(path.name.removeprefix("attempt_")): path for path in self._folder.glob("*/attempt_*")}
        if not attempts:
            return
        newest = max(attempts)
        if newest != self._attempt:
            if self._attempt >= 0:
                self._tell_restart(newest)
            self._attempt, self._ranks, self._deadline = newest, {}, None
        for path in attempts[newest].glob("*/started.json"):
            started = None if path in self._ranks else _read(path)
            if started is not None:
                self._ranks[path] = _Rank(**started, folder=path.parent)

    def _all_ended(self) -> bool:
        return all(rank.ended for rank in self._ranks.values())

    def _tell_restart(self, attempt: int) -> None:
        cause = self._first_failure() or "A rank ended without a word."
        print(f"{cause}\nRestart number {attempt}.", file=sys.stderr, flush=True)

    def _kill_living(self) -> None:
        for rank in self._ranks.values():
            if not rank.ended:
                with suppress(ProcessLookupError):
                    os.kill(rank.pid, signal.SIGKILL)

    def _first_failure(self) -> RankFailedError | None:
        """The rank that ended first if it left no word, else the one whose exception came first."""
        ended = [rank for rank in self._ranks.values() if rank.ended]
        first = min((rank.order for rank in ended), default=-1)
        together = [rank for rank in ended if rank.order == first]
        # SIGTERM is how the agent ends the others, so it is a cause only of an end that came alone.
        causes = [rank for rank in together if rank.exit_code != -signal.SIGTERM or len(together) == 1]
        silent = [rank for rank in causes if rank.died_silently]
        if silent:
            return ended_rank(silent[0].label, silent[0].rank, silent[0].pid, silent[0].exit_code or 0)
        records = [record for rank in self._ranks.values() if (record := rank.record()) is not None]
        return _raised_failure(min(records, key=lambda record: record["time"])) if records else None


def _signal_name(number: int) -> str:
    """``"SIGKILL"`` for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read(path: Path) -> dict[str, Any] | None:
    with suppress(FileNotFoundError):
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content
    return None


def _raised_failure(record: dict[str, Any]) -> RankFailedError:
    message = f"{record['label']} failed with {record['error']}\n\n{record['traceback'].rstrip()}"
    return RankFailedError(message, rank=record["rank"], traceback=record["traceback"])


def _agent_failure(error: ChildFailedError) -> RankFailedError:
    """A rank that was gone before it could make itself known."""
    rank, failure = error.get_first_failure()
    return ended_rank(f"rank {rank}", rank, failure.pid, failure.exitcode)


def ended_rank(label: str, rank: int, pid: int, exit_code: int) -> RankFailedError:
    """The failure of a rank of which no more is known than how its process ended.

    Args:
        label: The rank in words.
        rank: Global rank.
        pid: Process number.
        exit_code: As ``subprocess`` gives it: negative for a signal.
    """
    if exit_code < 0:
        name = _signal_name(-exit_code)
        hint = " The system does that when memory runs out." if name == "SIGKILL" else ""
        return RankFailedError(f"{label}, process {pid}, was killed by {name}.{hint}", rank=rank, signal_name=name)
    return RankFailedError(
        f"{label}, process {pid}, ended with exit code {exit_code}; what it had to say about it is above.",
        rank=rank,
        exit_code=exit_code,
    )
