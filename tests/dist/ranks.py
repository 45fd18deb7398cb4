"""A pool of warm rank processes for tests that need a process group.

Importing torch and lightning costs seconds per process, a tiny training run much less. So the
processes are started once per session, import everything once, and then serve one call after
another: each rank runs the same module-level function in an environment as torch elastic would
make it, and is put back to its first state afterwards.

A rank that raises, dies or hangs never hangs the session: the error of each rank comes back with
its rank, the cause before its consequences, and processes that no longer answer are replaced.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

START_TIMEOUT = 180.0
"""Seconds a new process may take to import torch and lightning on a busy machine."""
GRACE = 3.0
"""Seconds the other ranks get to report an error of their own once one rank has failed."""
WARM_MODULES = ("lightning.pytorch", "lightning_par")
SECONDARY_SIGNS = ("connection closed", "connection reset", "broken pipe", "timed out", "diststore")
"""What a rank says when its peer has gone: a consequence, shown after the causes."""
READY, RELEASE = b"ready", b"release"
Ranks = Callable[..., list[Any]]
"""Type of the `ranks` fixture: a :meth:`RankPool.run`."""


@dataclass(frozen=True)
class Failure:
    """What went wrong on one rank."""

    rank: int
    headline: str
    details: str
    time: float = field(default_factory=time.monotonic)

    @property
    def is_secondary(self) -> bool:
        """Whether this looks like the consequence of another rank's failure."""
        text = self.headline.lower()
        return any(sign in text for sign in SECONDARY_SIGNS)


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
    """

    def __init__(self) -> None:
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

    def run(
        self,
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = 60.0,
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
                self._workers[index] = _Worker(index, Path(self._folder.name))
        for index in range(len(self._workers), world_size):
            self._workers.append(_Worker(index, Path(self._folder.name)))
        workers = self._workers[:world_size]
        try:
            for worker in workers:
                worker.await_ready(START_TIMEOUT)
        except RankError as error:
            self._start_error = error
            raise
        return workers


class _Worker:
    """The parent's end of one rank process."""

    def __init__(self, rank: int, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.rank = rank
        self.ready = False
        self._holds = False
        self._log = folder / f"rank{rank}.log"
        self._log.touch()
        self._log_start = self._log.stat().st_size
        self.connection, child_end = context.Pipe()
        # Not a daemon process: those may not have children, and data loaders start workers.
        self.process = context.Process(target=_serve, args=(child_end, str(self._log)), name=f"rank{rank}")
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


# The rest runs inside a rank process.


def _serve(connection: Connection, log_path: str) -> None:
    _redirect_output(log_path)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    for name in WARM_MODULES:
        importlib.import_module(name)
    gc.freeze()  # the collection after each call need not walk through torch
    first_state = _State()
    while True:
        first_state.restore()
        connection.send_bytes(READY)
        try:
            environment, request = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        answer, succeeded = _execute(environment, request)
        connection.send_bytes(answer)
        if succeeded:
            # Others may still be talking over the group that is about to be destroyed.
            connection.recv_bytes()


def _execute(environment: dict[str, str], request: bytes) -> tuple[bytes, bool]:
    os.environ.update(environment)
    try:
        fn, args, kwargs = pickle.loads(request)
        # Plain pickle copies tensors; multiprocessing's own would pass shared-memory handles.
        return pickle.dumps(fn(*args, **kwargs)), True
    except BaseException as error:  # SystemExit and the like are answers, too
        headline = f"{type(error).__name__}: {error}"
        failure = Failure(int(environment["RANK"]), headline, traceback.format_exc())
        return pickle.dumps(failure), False


def _redirect_output(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
        stream.reconfigure(line_buffering=True)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class _State:
    """What a call may change in its process, remembered so that the next call starts alike."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()

    def restore(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        # Cached placements hold meshes whose groups are gone; an equal mesh would find them.
        _clear_sharding_prop_cache()
        os.environ.clear()
        os.environ.update(self._environment)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)
        gc.collect()
