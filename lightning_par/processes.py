"""What all launchers do to a process of theirs: lend it environment variables, and see that it ends."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

__all__ = ["GRACE_SECONDS", "POLL_SECONDS", "end_process", "end_soon", "environment", "leave_with_parent"]

POLL_SECONDS = 0.2
GRACE_SECONDS = 8.0
"""How long a process may take to end once it should."""


@contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables for a while, and put back these and no others.

    Args:
        variables: Name -> value, ``None`` to have it unset.
    """
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def leave_with_parent(parent: int) -> None:
    """End this process soon after its parent has died without a chance to say so.

    Args:
        parent: Process number of the parent.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        time.sleep(GRACE_SECONDS)
        end_process(1)

    threading.Thread(target=watch, name="leave-with-parent", daemon=True).start()


def end_process(code: int) -> NoReturn:
    """End this process at once, from any thread, with what it has printed and logged so far written out."""
    try:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:  # whoever read the output may be gone
        os._exit(code)


def end_soon() -> None:
    """End this process although a thread or a library may keep it: its parent waits for its end."""
    timer = threading.Timer(GRACE_SECONDS, os._exit, args=(1,))
    timer.daemon = True
    timer.start()
