"""Ranks as child processes of this one, through torch's elastic agent.

The agent starts the ranks, restarts them and brings their results home. What is added here: the failure that came
first is found and told in one exception, whoever is stuck after a failure is ended in seconds, nothing outlives the
parent, and what is changed in the parent for the while, some variables and the signal handlers, is put back.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lightning_par.process_group import destroy_process_group, rank_label
from lightning_par.processes import GRACE_SECONDS, end_soon, environment, leave_with_parent
from lightning_par.rank_watch import RankFailedError, RankWatch

__all__ = ["RankFailedError", "run_ranks"]

MONITOR_SECONDS = 0.1
"""How often the agent looks at its ranks."""
QUIET_LOGGERS = ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing")
_HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_LAUNCH_NUMBERS = count()


def run_ranks(
    worker: Callable[[dict[str, Any]], Any],
    config: dict[str, Any],
    *,
    devices: int,
    nnodes: int = 1,
    rdzv_endpoint: str | None = None,
    max_restarts: int = 0,
    num_threads: int = 1,
) -> Any:
    """Run ``worker(config)`` on every rank and wait for all of them.

    Args:
        worker: Module-level function; runs in fresh processes with torch elastic's environment variables.
        config: Plain containers.
        devices: Ranks on this machine.
        nnodes: Machines, each of which calls this function.
        rdzv_endpoint: ``host:port`` where the machines meet; needed if there are several.
        max_restarts: How often all ranks are started again after a failure.
        num_threads: CPU threads of each rank.

    Returns:
        What the worker returned on rank 0; ``None`` on machines that do not run rank 0.

    Raises:
        RankFailedError: If a rank raised, was killed or ended with an exit code, and no restart was left.
        SystemExit: If this process received SIGTERM, SIGHUP or SIGQUIT and its earlier handler returned.
        KeyboardInterrupt: If it received SIGINT.
    """
    try:
        with (
            tempfile.TemporaryDirectory(prefix="lightning_par_", ignore_cleanup_errors=True) as folder,
            environment(_variables(num_threads)),
            _handlers_restored(),
            _quiet_loggers(),
            RankWatch(Path(folder), devices, GRACE_SECONDS) as watch,
        ):
            launch_config = _launch_config(folder, devices, nnodes, rdzv_endpoint, max_restarts)
            try:
                return elastic_launch(launch_config, _run_rank)(worker, config, num_threads, os.getpid()).get(0)
            except ChildFailedError as error:
                raise watch.first_failure(error) from None
    except SignalException as error:
        received = error.sigval
    # The agent turned the signal into an exception. Hand it to whoever handled it before; by default that is the end.
    signal.raise_signal(received)
    raise SystemExit(128 + received)


def _launch_config(
    folder: str, devices: int, nnodes: int, rdzv_endpoint: str | None, max_restarts: int
) -> LaunchConfig:
    number = next(_LAUNCH_NUMBERS)
    alone = nnodes == 1
    return LaunchConfig(
        min_nodes=nnodes,
        max_nodes=nnodes,
        nproc_per_node=devices,
        # Machines meet under the same name, so it is counted and not random: they run the same jobs in the same order.
        run_id=uuid.uuid4().hex if alone else f"lightning_par_{number}",
        rdzv_backend="c10d",
        rdzv_endpoint=rdzv_endpoint or "localhost:0",
        # The machine's own name may not resolve on a laptop or in a container.
        local_addr="localhost" if alone else None,
        max_restarts=max_restarts,
        monitor_interval=MONITOR_SECONDS,
        start_method="spawn",
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        shutdown_timeout=int(GRACE_SECONDS),
    )


def _variables(num_threads: int) -> dict[str, str | None]:
    """Environment of the ranks; the user's own choice stands."""
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(num_threads)),
        # C++ warnings come from every rank and cannot be filtered in them any more.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        # Set by torch's launcher in this process.
        "TORCHELASTIC_SIGNALS_TO_HANDLE": os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE"),
    }


@contextmanager
def _handlers_restored() -> Iterator[None]:
    """Put the signal handlers back that the agent replaces."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _HANDLED_SIGNALS} if in_main_thread else {}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            # None stands for a handler that was not installed from Python and cannot be installed from there.
            if handler is not None:
                signal.signal(number, handler)


@contextmanager
def _quiet_loggers() -> Iterator[None]:
    """Keep the agent's own messages off the terminal, unless ``LOGLEVEL`` asks for them as torchrun's users do."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith(QUIET_LOGGERS)]
    loggers = [logging.getLogger(name) for name in names] if "LOGLEVEL" not in os.environ else []
    disabled = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, before in zip(loggers, disabled, strict=True):
            logger.disabled = before


def _run_rank(worker: Callable[[dict[str, Any]], Any], config: dict[str, Any], num_threads: int, parent: int) -> Any:
    """The whole life of one rank: make itself known, work, and leave word of how it ended."""
    folder = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent
    rank = int(os.environ["RANK"])
    _publish(folder / "started.json", {"pid": os.getpid(), "rank": rank, "label": rank_label()})
    leave_with_parent(parent)
    torch.set_num_threads(num_threads)
    result = None
    try:
        result = worker(config)
        if rank == 0:
            _check_can_travel(result)
    except KeyboardInterrupt:
        # From the parent, or else a failure: the agent would wait for ever for the result of a rank that ends with 0.
        raise SystemExit(128 + signal.SIGINT) from None
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):  # a plain sys.exit() is an early return
            _publish(folder / "failure.json", _failure_record(rank, error))
            end_soon()
            raise
    destroy_process_group()
    _publish(folder / "finished.json", {})
    return result if rank == 0 else None


def _check_can_travel(result: Any) -> None:
    try:
        ForkingPickler.dumps(result)
    except Exception as error:
        raise TypeError(
            f"The worker returned a {type(result).__name__} on rank 0 that cannot be sent to the parent process "
            f"({error}). Return numbers, strings or plain containers of them."
        ) from None


def _failure_record(rank: int, error: BaseException) -> dict[str, Any]:
    own_frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    return {
        "time": time.time(),
        "rank": rank,
        "label": rank_label(),
        "error": "".join(traceback.format_exception_only(error)).strip(),
        "traceback": "".join(traceback.format_exception(type(error), error, own_frames)),
    }


def _publish(path: Path, content: dict[str, Any]) -> None:
    """Write a file that a reader sees whole or not at all."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(content), encoding="utf-8")
    draft.replace(path)
