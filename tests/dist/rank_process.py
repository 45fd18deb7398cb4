"""What a rank of the pool in `ranks.py` does: serve one call after another, each from the same first state."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import numpy as np
import torch
import torch.distributed as dist

SECONDARY_SIGNS = ("connection closed", "connection reset", "broken pipe", "timed out", "diststore")
"""What a rank says when its peer has gone: a consequence, shown after the causes."""
READY, RELEASE = b"ready", b"release"
"""What a rank says when it can take a call, and what it waits for before it cleans up after one."""


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


def serve(connection: Connection, log_path: str, warm_modules: Sequence[str]) -> None:
    """Take calls from `connection` until the other end is closed."""
    _redirect_output(log_path)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    for name in warm_modules:
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
        if "torch.distributed.tensor" in sys.modules:  # a pool that is warmed with nothing may do without lightning_par
            importlib.import_module("lightning_par.mesh_caches").forget_meshes()
        os.environ.clear()
        os.environ.update(self._environment)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(1)
        for _ in range(2):  # what a tensor held in C++ is garbage only after the first
            gc.collect()
