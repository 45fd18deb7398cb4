"""Ranks of a plain script: the first Trainer that needs them starts the script once more for each.

Lightning's own launcher does the same, but reruns a whole Hydra sweep in every child, leaves ``LOCAL_RANK`` and
``MASTER_PORT`` in the environment so that a second job starts nothing, and kills the main process before it can say
why. Here

- the processes belong to a *job* (the script, or one Hydra job of it): later Trainers of the same job find the same
  ranks, because those run the same script; the next job waits for their end and starts its own, on a fresh port;
- a later Trainer of the same job may use fewer devices: ranks it has no place for end there. It cannot use more, since
  a process started then would run the script from its beginning; that is refused at once;
- the environment is that of a rank only while a Trainer runs;
- a rank that fails ends the job in seconds, and its traceback is what is seen.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import MisconfigurationException, _TunerExitException
from typing_extensions import override

from lightning_par.process_group import retire_process_group
from lightning_par.trainer.script_children import (
    PARENT,
    Children,
    StuckWatch,
    end_process,
    end_soon,
    leave_with_parent,
)
from lightning_par.trainer.script_command import current_job

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["ScriptLauncher"]

JOB_END_SECONDS = 60.0
"""How long the ranks of a finished job may take to come to their end before the next job ends them."""
PEER_SECONDS = 10.0
"""How long after a lost connection its cause, a dead process, may take to show."""
ECHO_SECONDS = 1.0
"""How long ranks may take to fail of the same cause by themselves."""

_num_ports_given = 0
_children: Children | None = None
_child_size: tuple[int, int] | None = None


class ScriptLauncher(_SubprocessScriptLauncher):
    """Starts, finds again or replaces the ranks of this script for one Trainer.

    Args:
        cluster_environment: Says where rank 0 is, and whether something else has started the ranks.
        num_processes: Ranks on this machine.
        num_nodes: Machines; on each, the user starts the script once.
    """

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Run ``function`` on this rank, after making sure that the others are there.

        Raises:
            MisconfigurationException: If a later Trainer needs more ranks than the script has, or ranks that have
                ended.
            RankFailedError: If another rank of this machine failed; its traceback has been printed by it.
        """
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if PARENT in os.environ:
            return self._run_as_child(function, *args, **kwargs)
        if self.cluster_environment.creates_processes_externally:
            _set_num_threads_if_needed(num_processes=self.num_processes)
            return function(*args, **kwargs)
        return self._run_as_parent(function, *args, **kwargs)

    def _run_as_parent(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        children = self._children_of_this_job()
        self.procs = children.processes
        with _environment(children.variables):
            _set_num_threads_if_needed(num_processes=self.num_processes)
            watch = StuckWatch(children)
            watch.start()
            try:
                return function(*args, **kwargs)
            except _TunerExitException:
                raise
            except BaseException as error:
                watch.stop()
                _end_after(error, children)
                raise
            finally:
                watch.stop()

    def _children_of_this_job(self) -> Children:
        global _children
        job = current_job()
        if _children is not None and _children.job != job:
            failure = _children.finish(JOB_END_SECONDS)
            _children = None
            if failure is not None:
                print(f"After the end of the earlier job, {failure}", file=sys.stderr, flush=True)
        if _children is None:
            _children = Children(job, self.num_processes, self.num_nodes, self._variables())
            _children.start()
            return _children
        _check_size((_children.num_processes, _children.num_nodes), (self.num_processes, self.num_nodes))
        _children.num_processes = self.num_processes
        _check_all_there(_children)
        return _children

    def _variables(self) -> dict[str, str]:
        return {
            "MASTER_ADDR": self.cluster_environment.main_address,
            "MASTER_PORT": str(_next_port()),
            "NODE_RANK": str(self.cluster_environment.node_rank()),
            "LOCAL_RANK": "0",
            "WORLD_SIZE": str(self.num_processes * self.num_nodes),
        }

    def _run_as_child(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        global _child_size
        size = (self.num_processes, self.num_nodes)
        if _child_size is None:
            leave_with_parent()
        else:
            _check_size(_child_size, size)
        _child_size = size
        if self.cluster_environment.local_rank() >= self.num_processes:
            _leave()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return function(*args, **kwargs)
        except _TunerExitException:
            raise
        except Exception:
            end_soon()
            raise


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _next_port() -> int:
    """A free port. The user's ``MASTER_PORT`` counts on from job to job, as machines must agree without talking."""
    global _num_ports_given
    given = os.environ.get("MASTER_PORT")
    port = find_free_network_port() if given is None else int(given) + _num_ports_given
    _num_ports_given += 1
    return port


def _check_size(before: tuple[int, int], wanted: tuple[int, int]) -> None:
    if wanted[1] != before[1]:
        raise MisconfigurationException(
            f"This Trainer has num_nodes={wanted[1]}, an earlier one of this script had num_nodes={before[1]}. Keep it."
        )
    if wanted[0] > before[0]:
        raise MisconfigurationException(
            f"This Trainer needs {wanted[0]} processes on this machine, but an earlier one of this script ran on "
            f"{before[0]}, and a process started now would run the script from its beginning. Put the Trainer with the "
            "most devices first, or give each its own job: lightning_par.launch, or a Hydra multirun."
        )


def _check_all_there(children: Children) -> None:
    failure = children.failure()
    if failure is not None:
        raise failure
    missing = children.missing()
    if children.given_up or missing:
        raise MisconfigurationException(
            f"This Trainer needs the local ranks {list(range(children.num_processes))}, but the processes of "
            f"{missing} have ended. All ranks must run the same Trainers in the same order: look for a Trainer inside "
            "a condition on the rank, or after an exception that was caught."
        )


def _end_after(error: BaseException, children: Children) -> None:
    """End the other ranks after an error on this one; if that is the echo of a dead rank, say so instead."""
    failure = None
    if _lost_connection(error):
        children.wait(PEER_SECONDS)
        failure = children.failure()
    children.given_up = True
    # They may be about to tell the same error; a signal in the middle of that would only add noise.
    children.wait(ECHO_SECONDS, for_failure=False)
    children.end()
    if failure is not None:
        raise failure from None


def _lost_connection(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def _leave() -> None:
    """End a rank that this Trainer has no place for, with the exit code of success and outside of Lightning's hooks."""
    retire_process_group()
    atexit._run_exitfuncs()
    end_process(0)
