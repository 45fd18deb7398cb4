"""A pool of warm rank processes for tests that need a process group.

Importing torch and lightning costs seconds, a tiny training run much less. So one process per
session imports everything once, and ranks are forked from it: eight start in the time of one.
They then serve one call after another: each rank runs the same module-level function in an
environment as torch elastic would make it, and is put back to its first state afterwards.

A rank that raises, dies or hangs never hangs the session: the error of each rank comes back with
its rank, the cause before its consequences, and processes that no longer answer are replaced.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.dist.rank_process import READY, RELEASE, Failure, serve

START_TIMEOUT = 180.0
"""Seconds a new process may take to import torch and lightning on a busy machine."""
GRACE = 3.0
"""Seconds the other ranks get to report an error of their own once one rank has failed."""
CALL_TIMEOUT = 45.0
"""Seconds a call may take unless it says otherwise; less than a test may, so that a hang is shown by rank."""
WARM_MODULES = ("lightning.pytorch", "lightning_par")
"""What the process that ranks are forked from imports. None of it starts a thread, which a fork would lose."""
Ranks = Callable[..., list[Any]]
"""Type of the `ranks` fixture: a :meth:`RankPool.run`."""
OneProcess = Callable[..., Any]
"""Type of the `one_process` fixture, which runs the reference that ranks are compared with."""


class RankError(RuntimeError):
    """One or more ranks raised or died; `failures` has them, the likely cause first."""

    def __init__(self, failures: list[Failure], outputs: dict[int, str] | None = None) -> None:
        order = sorted(failures, key=lambda failure: (failure.is_secondary, failure.time))
        self.failures = order
        ranks_by_details: dict[str, list[int]] = {}
        for failure in order:
            ranks_by_details.setdefault(failure.details, []).append(failure.rank)
        parts = [
            f"----- rank {', '.join(map(str, sorted(ranks)))} -----\n{details}"
            for details, ranks in ranks_by_details.items()
        ]
        parts += [f"----- output of rank {rank} -----\n{text}" for rank, text in (outputs or {}).items() if text]
        super().__init__("\n".join([order[0].headline, *parts]))


class RankTimeoutError(RankError):
    """No rank failed, but some did not finish in time; the details show where each stood."""


class RankPool:
    """Rank processes that are started when first needed and then reused.

    Use as a context manager; leaving it ends every process it started.

    Args:
        warm_modules: What a new process imports before its first call.
    """

    def __init__(self, warm_modules: Sequence[str] = WARM_MODULES) -> None:
        self._warm_modules = tuple(warm_modules)
        self._workers: list[_Worker] = []
        self._start_error: RankError | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.kill()
        self._folder.cleanup()

    def start(self, world_size: int) -> None:
        """Start the processes that a call on `world_size` ranks would, now.

        Raises:
            RankError: One of them died or did not become ready.
        """
        self._start(world_size)

    def run(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = CALL_TIMEOUT,
        **kwargs: Any,
    ) -> list[Any]:
        """Call `fn(*args, **kwargs)` on `world_size` ranks at once.

        Args:
            world_size: Number of ranks; 1 is one process with the same environment.
            fn: A function at the top level of a module, so that it pickles by name.
            timeout: Seconds the slowest rank may take.

        Returns:
            The return value of each rank, in rank order.

        Raises:
            RankError: A rank raised or died.
            RankTimeoutError: A rank did not finish within `timeout`.
        """
        request = pickle.dumps((fn, args, kwargs))
        with self._lend(world_size) as workers:
            port = _free_port()
            for rank, worker in enumerate(workers):
                worker.send(_elastic_environment(rank, world_size, port), request)
            return _collect(workers, timeout)

    @contextmanager
    def _lend(self, world_size: int) -> Iterator[list[_Worker]]:
        workers = self._start(world_size)
        try:
            yield workers
        finally:
            # Also when the test was interrupted: who is still busy would answer a later call.
            for worker in workers:
                worker.release()
            for worker in workers:
                worker.await_ready_or_kill(2 * GRACE)

    def _start(self, world_size: int) -> list[_Worker]:
        if self._start_error is not None:
            raise self._start_error  # an import that fails would fail again, seconds later
        for index, worker in enumerate(self._workers):
            if not worker.alive:
                self._workers[index] = self._new_worker(index)
        for index in range(len(self._workers), world_size):
            self._workers.append(self._new_worker(index))
        workers = self._workers[:world_size]
        try:
            for worker in workers:
                worker.await_ready(START_TIMEOUT)
        except RankError as error:
            self._start_error = error
            raise
        return workers

    def _new_worker(self, rank: int) -> _Worker:
        return _Worker(rank, Path(self._folder.name), self._warm_modules)


class _Worker:
    """The parent's end of one rank process."""

    def __init__(self, rank: int, folder: Path, warm_modules: Sequence[str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(WARM_MODULES))  # whichever pool is the first to start one
        self.rank = rank
        self.ready = False
        self._holds = False
        self._log = folder / f"rank{rank}.log"
        self._log.touch()
        self._log_start = self._log.stat().st_size
        self.connection, child_end = context.Pipe()
        # Not a daemon process: those may not have children, and data loaders start workers.
        arguments = (child_end, str(self._log), warm_modules)
        self.process = context.Process(target=serve, args=arguments, name=f"rank{rank}")
        with _one_thread_each():
            self.process.start()
        child_end.close()

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def send(self, environment: dict[str, str], request: bytes) -> None:
        self._log_start = self._log.stat().st_size
        self.ready = False
        self.connection.send_bytes(pickle.dumps((environment, request)))

    def receive(self) -> Any:
        """The result or Failure that waits in the pipe, or a Failure when the process is gone."""
        try:
            answer = pickle.loads(self.connection.recv_bytes())
            self._holds = not isinstance(answer, Failure)
            return answer
        except (EOFError, ConnectionResetError):
            self.process.join(GRACE)
            headline = f"rank {self.rank} died with exit code {self.process.exitcode}"
            return Failure(self.rank, headline, headline + "\n" + self.output())

    def release(self) -> None:
        """Let a rank that has returned put itself back to its first state."""
        if self._holds:
            self._holds = False
            self.connection.send_bytes(RELEASE)

    def await_ready(self, timeout: float) -> None:
        """Wait until the process can take a call.

        Raises:
            RankError: It died, or did not get there in `timeout` seconds.
        """
        if self.ready:
            return
        try:
            if self.connection.poll(timeout) and self.connection.recv_bytes() == READY:
                self.ready = True
                return
        except (EOFError, ConnectionResetError):
            pass
        headline = f"rank {self.rank} did not become ready"
        self.process.join(GRACE)
        details = self.stack() if self.alive else self.output()
        self.kill()
        raise RankError([Failure(self.rank, headline, f"{headline}\n{details}")])

    def await_ready_or_kill(self, timeout: float) -> None:
        if not self.connection.closed:
            with suppress(RankError):  # which has killed it
                self.await_ready(timeout)

    def output(self, limit: int = 4000) -> str:
        """The end of what the rank has printed during the current call."""
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")[-limit:]

    def stack(self) -> str:
        """Where the process stands now, by its own faulthandler."""
        start = self._log.stat().st_size
        if self.process.pid is not None and self.alive:
            os.kill(self.process.pid, signal.SIGUSR1)
            time.sleep(0.5)
        return self._log.read_bytes()[start:].decode(errors="replace")

    def kill(self) -> None:
        self.ready = False
        self.process.kill()
        self.process.join()
        self.connection.close()


def _collect(workers: list[_Worker], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[Failure] = []
    by_handle = {worker.connection: worker for worker in workers}
    deadline = time.monotonic() + timeout
    while by_handle and (left := deadline - time.monotonic()) > 0:
        for handle in wait(list(by_handle), timeout=left):
            assert isinstance(handle, Connection)
            worker = by_handle.pop(handle)
            results[worker.rank] = worker.receive()
            if isinstance(results[worker.rank], Failure):
                failures.append(results[worker.rank])
                deadline = min(deadline, time.monotonic() + GRACE)
    if not failures and not by_handle:
        return [results[worker.rank] for worker in workers]
    kind = RankError if failures else RankTimeoutError
    outputs = {worker.rank: worker.output() for worker in workers}
    failures += _stop_waiting(list(by_handle.values()), timeout, bool(failures))
    raise kind(failures, outputs)


def _stop_waiting(workers: list[_Worker], timeout: float, others_failed: bool) -> list[Failure]:
    """Kill the ranks that have not answered, and say where each stood."""
    reason = "another rank failed" if others_failed else f"{timeout:g} s had passed"
    failures = []
    for worker in workers:
        # "timed out" makes it secondary to any error that a rank raised itself.
        headline = f"rank {worker.rank} timed out: still running when {reason}"
        failures.append(Failure(worker.rank, headline, f"{headline}\n{worker.stack()}"))
    for worker in workers:
        worker.kill()
    return failures


def _elastic_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The variables torch elastic gives a worker, for one node."""
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": world_size,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": f"ranks-{port}",
    }
    return {name: str(value) for name, value in values.items()}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Limit the math libraries of a process started inside; they read this when they load."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
