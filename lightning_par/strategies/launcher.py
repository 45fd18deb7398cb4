"""Ranks of a plain script: the first Trainer that needs them starts the script once more for each.

Lightning's own launcher does the same, but reruns a whole Hydra sweep in every child, leaves ``LOCAL_RANK`` and
``MASTER_PORT`` in the environment so that a second job starts nothing, and kills the main process before it can say
why. Here

- the processes belong to a *job* (the script, or one Hydra job of it): later Trainers of the same job find the same
  ranks, because those run the same script; the next job waits for their end and starts its own, on a fresh port;
- all Trainers of a job have the same number of devices, in whatever layout: a process started later would run the
  script from its beginning. Another number is refused at once;
- the environment is that of a rank only while a Trainer runs;
- a rank that fails ends the job in seconds, and its traceback is what is seen.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import MisconfigurationException, _TunerExitException
from typing_extensions import override

from lightning_par.processes import end_soon, environment, leave_with_parent
from lightning_par.strategies.script_children import PARENT, Children, StuckWatch
from lightning_par.strategies.script_command import current_job

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

__all__ = ["ScriptLauncher"]

PEER_SECONDS = 10.0
"""How long after a lost connection its cause, a dead process, may take to show."""
ECHO_SECONDS = 1.0
"""How long ranks may take to fail of the same cause by themselves."""

_num_ports_given = 0
_children: Children | None = None
_child_size: tuple[int, int] | None = None


class ScriptLauncher(_SubprocessScriptLauncher):
    """Starts, finds again or replaces the ranks of this script for one Trainer or Fabric.

    Args:
        cluster_environment: Says where rank 0 is, and whether something else has started the ranks.
        num_processes: Ranks on this machine.
        num_nodes: Machines; on each, the user starts the script once.
    """

    children: Children | None = None
    """The ranks that this process has started."""

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Run ``function`` on this rank, after making sure that the others are there.

        Raises:
            MisconfigurationException: If a later Trainer needs another number of ranks, or ranks that have ended.
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
        children = self.children = self._children_of_this_job()
        self.procs = children.processes
        # Lightning sets the number of threads in the environment, where the next job would take it for the user's.
        with environment({**children.variables, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}):
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
        job, size = current_job(), (self.num_processes, self.num_nodes)
        if _children is not None and _children.job == job:
            _check_size(_children.size, size)
            _check_all_there(_children)
            return _children
        if _children is not None:
            _children.finish_before_next_job()
        _children = Children(job, size, self._variables())
        _children.start()
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
            leave_with_parent(int(os.environ[PARENT]))
            _child_size = size
        _check_size(_child_size, size)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return function(*args, **kwargs)
        except _TunerExitException:
            raise
        except Exception:
            end_soon()
            raise


def _next_port() -> int:
    """A free port. The user's ``MASTER_PORT`` counts on from job to job, as machines must agree without talking."""
    global _num_ports_given
    given = os.environ.get("MASTER_PORT")
    port = find_free_network_port() if given is None else int(given) + _num_ports_given
    _num_ports_given += 1
    return port


def _check_size(before: tuple[int, int], wanted: tuple[int, int]) -> None:
    if wanted != before:
        raise MisconfigurationException(
            f"This Trainer or Fabric has devices={wanted[0]} and num_nodes={wanted[1]}, but the first one of this "
            f"script had devices={before[0]} and num_nodes={before[1]}, and all run on the ranks that were started for "
            "it. Keep both, in whatever layout, or give each number a job of its own: lightning_par.launch, or a Hydra "
            "multirun."
        )


def _check_all_there(children: Children) -> None:
    if children.all_run():
        return
    if not children.given_up and (failure := children.failure()) is not None:
        raise failure
    raise MisconfigurationException(
        "This Trainer or Fabric needs the ranks that the first one of this script had, but some have ended. All ranks "
        "must run the same Trainers in the same order: look for a Trainer inside a condition on the rank, or after an "
        "exception that was caught."
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
