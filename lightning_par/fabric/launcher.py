"""Ranks of a plain script under Fabric: the script goes on after ``fabric.launch()``, on all of them."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from typing_extensions import override

from lightning_par.processes import end_soon
from lightning_par.strategies.launcher import ScriptLauncher
from lightning_par.strategies.script_children import PARENT, Children, StuckWatch

__all__ = ["FabricLauncher"]

_watched: Children | None = None
_ends_after_errors = False


class FabricLauncher(ScriptLauncher):
    """Starts or finds the ranks of this script, and looks after them for the rest of it."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``function`` on this rank, after making sure that the others are there; see :class:`ScriptLauncher`."""
        if PARENT in os.environ:
            _end_after_errors()
        result = super().launch(function, *args, **kwargs)
        if self.children is not None:
            _watch_from_now_on(self.children)
        return result


def _watch_from_now_on(children: Children) -> None:
    global _watched
    if children is _watched:
        return
    _watched = children
    watch = StuckWatch(children)
    watch.start()
    atexit.register(watch.stop)  # before the wait for their end, which has its own eyes


def _end_after_errors() -> None:
    """A rank that fails ends although a thread or a library may keep it."""
    global _ends_after_errors
    if _ends_after_errors:
        return
    _ends_after_errors = True
    show = sys.excepthook

    def show_and_end(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        show(kind, error, traceback)
        end_soon()

    sys.excepthook = show_and_end
