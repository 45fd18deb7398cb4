"""The other ranks of a plain script: processes that run the same script, from their start to their end."""

from __future__ import annotations

import atexit
import math
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

from lightning_par.processes import GRACE_SECONDS, POLL_SECONDS, end_process
from lightning_par.rank_watch import RankFailedError, ended_rank
from lightning_par.strategies.script_command import child_command

__all__ = ["PARENT", "Children", "StuckWatch"]

PARENT = "LIGHTNING_PAR_PARENT_PROCESS"
"""Names the process that started this one as a rank of its script."""


@dataclass
class Children:
    """The ranks of one job on this machine, without this process itself.

    Attributes:
        job: Which job of the process they belong to.
        size: Ranks on each machine, and machines.
        variables: Environment of this process while it runs as local rank 0.
        given_up: Whether they were ended because of a failure.
    """

    job: tuple[str, ...]
    size: tuple[int, int]
    variables: dict[str, str]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    given_up: bool = False

    def start(self) -> None:
        """Start one process for each local rank but the first."""
        command, directory = child_command()
        atexit.register(self._end_at_exit)
        for local_rank in range(1, self.size[0]):
            own = {"LOCAL_RANK": str(local_rank), PARENT: str(os.getpid())}
            environment = {**os.environ, **self.variables, **own}
            self.processes.append(subprocess.Popen(command, env=environment, cwd=directory))

    def failure(self) -> RankFailedError | None:
        """How the first of them failed, if one did."""
        for index, process in enumerate(self.processes):
            code = process.poll()
            if code:
                rank = int(self.variables["NODE_RANK"]) * self.size[0] + index + 1
                return ended_rank(f"rank {rank}", rank, process.pid, code)
        return None

    def all_run(self) -> bool:
        """Whether none has ended."""
        return all(process.poll() is None for process in self.processes)

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

    def finish(self, seconds: float = math.inf) -> RankFailedError | None:
        """See a job's ranks to their end. Returns how one failed, unless that has been told already.

        Args:
            seconds: How long at most. Healthy ranks may have much to do after this one's last line, such as writing
                their predictions, and nobody else knows when they should be ready.
        """
        atexit.unregister(self._end_at_exit)
        try:
            if self.given_up:
                return None
            self.wait(seconds)
            return self.failure()
        finally:
            self.end()

    def finish_before_next_job(self) -> None:
        """See them to their end in a process that goes on; if one fails, say so now and in the exit code."""
        failure = self.finish()
        if failure is not None:
            print(f"After the end of the earlier job, {failure}", file=sys.stderr, flush=True)
            atexit.register(end_process, 1)

    def _end_at_exit(self) -> None:
        # After an exception here the others wait for this rank, or are about to fail, too.
        script_failed = getattr(sys, "last_value", None) is not None
        try:
            failure = self.finish(GRACE_SECONDS if script_failed else math.inf)
        except KeyboardInterrupt:
            end_process(128 + signal.SIGINT)
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
