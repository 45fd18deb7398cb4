"""The other ranks of a plain script: processes that run the same script, from their start to their end."""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

from lightning_par.rank_watch import RankFailedError, ended_rank
from lightning_par.trainer.script_command import child_command

__all__ = ["PARENT", "Children", "StuckWatch", "end_process", "end_soon", "leave_with_parent"]

PARENT = "LIGHTNING_PAR_PARENT_PROCESS"
"""Names the process that started this one as a rank of its script."""
POLL_SECONDS = 0.2
GRACE_SECONDS = 8.0
"""How long a process may take to end once it should."""
FAREWELL_SECONDS = 15.0
"""How long healthy children may outlive their parent's last line."""


@dataclass
class Children:
    """The ranks of one job on this machine, without this process itself.

    Attributes:
        job: Which job of the process they belong to.
        num_processes: Ranks on this machine that the latest Trainer used.
        num_nodes: Machines.
        variables: Environment of this process while it runs as local rank 0.
        given_up: Whether they were ended because of a failure.
    """

    job: tuple[str, ...]
    num_processes: int
    num_nodes: int
    variables: dict[str, str]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    given_up: bool = False

    def start(self) -> None:
        """Start one process for each local rank but the first."""
        command, directory = child_command()
        atexit.register(self._end_at_exit)
        for local_rank in range(1, self.num_processes):
            own = {"LOCAL_RANK": str(local_rank), PARENT: str(os.getpid())}
            environment = {**os.environ, **self.variables, **own}
            self.processes.append(subprocess.Popen(command, env=environment, cwd=directory))

    def failure(self) -> RankFailedError | None:
        """How the first of them failed, if one did."""
        for index, process in enumerate(self.processes):
            code = process.poll()
            if code:
                rank = int(self.variables["NODE_RANK"]) * (len(self.processes) + 1) + index + 1
                return ended_rank(f"rank {rank}", rank, process.pid, code)
        return None

    def missing(self) -> list[int]:
        """Local ranks that the latest Trainer needs and whose processes have ended."""
        needed = self.processes[: self.num_processes - 1]
        return [index + 1 for index, process in enumerate(needed) if process.poll() is not None]

    def wait(self, seconds: float, *, for_failure: bool = True) -> None:
        """Wait until they have ended by themselves, or the time is over.

        Args:
            seconds: How long at most.
            for_failure: Come back as soon as one has failed.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(process.poll() is None for process in self.processes):
            if for_failure and self.failure() is not None:
                return
            time.sleep(POLL_SECONDS)

    def end(self, grace_seconds: float = GRACE_SECONDS) -> None:
        """End those that still run: ask first, force after the grace time."""
        living = [process for process in self.processes if process.poll() is None]
        for process in living:
            process.terminate()
        deadline = time.monotonic() + grace_seconds
        for process in living:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def finish(self, seconds: float) -> RankFailedError | None:
        """See a job's ranks to their end. Returns how one failed, unless that has been told already."""
        atexit.unregister(self._end_at_exit)
        if not self.given_up:
            self.wait(seconds)
        failure = None if self.given_up else self.failure()
        self.end()
        return failure

    def _end_at_exit(self) -> None:
        failure = self.finish(FAREWELL_SECONDS)
        if failure is not None:
            print(failure, file=sys.stderr)
            end_process(1)


class StuckWatch(threading.Thread):
    """Ends this process when a child has failed and the main thread waits for it in vain."""

    def __init__(self, children: Children) -> None:
        super().__init__(name="stuck-watch", daemon=True)
        self._children = children
        self._finished = threading.Event()

    def run(self) -> None:
        """Look at the children until the run is over or one has failed."""
        failure = None
        while failure is None:
            if self._finished.wait(POLL_SECONDS):
                return
            failure = self._children.failure()
        # A lost connection makes most runs raise by themselves; what then happens is the launcher's business.
        if self._finished.wait(GRACE_SECONDS):
            return
        print(f"{failure}\nThis rank still waited for it and ends, too.", file=sys.stderr)
        self._children.end(grace_seconds=0)
        end_process(1)

    def stop(self) -> None:
        """The run is over."""
        self._finished.set()
        self.join()


def leave_with_parent() -> None:
    """End this process, a child, soon after its parent has died without a chance to say so."""
    parent = int(os.environ[PARENT])

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        time.sleep(GRACE_SECONDS)
        end_process(1)

    threading.Thread(target=watch, name="leave-with-parent", daemon=True).start()


def end_process(code: int) -> None:
    """End this process at once, from any thread, with what it has printed and logged so far written out."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_soon() -> None:
    """End this process although a thread or a library may keep it: its parent waits for its end."""
    timer = threading.Timer(GRACE_SECONDS, os._exit, args=(1,))
    timer.daemon = True
    timer.start()
