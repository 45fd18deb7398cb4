"""Ranks from a resolved configuration: one call that starts them, or joins those that a launcher has started.

``launch(train, config, {"devices": 4})`` runs ``train(config)`` on four ranks and returns what rank 0 returned.

- **Alone** (an ordinary ``python script.py``): torch's elastic agent starts the ranks in fresh processes, also for one
  device, so that every job of a sweep begins clean (no process group, no GPU context, its own peak memory) and
  ``max_restarts`` means the same for every number of ranks. ``in_place=True`` runs a single rank in this very process
  instead, for a debugger.
- **Under torchrun, or as one of several tasks of srun**: the ranks exist, so the worker runs in place on each, with the
  configuration of rank 0. Machines given by ``nnodes`` and ``rdzv_endpoint`` start their own ranks under srun, too.
"""

from __future__ import annotations

import difflib
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from lightning_par.elastic import RankFailedError, run_ranks
from lightning_par.process_group import destroy_process_group, rank_label, shared_store

__all__ = ["LaunchSettings", "RankFailedError", "launch", "restart_count", "trainer_resources", "world_size"]

DEFAULT_CPU_RANKS = 2
ACCELERATORS = ("auto", "cpu", "gpu", "cuda")
_INTERACTIVE_SLURM_JOBS = ("bash", "interactive")

Worker = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class LaunchSettings:
    """How many ranks, and where.

    Attributes:
        devices: Ranks on this machine; ``None`` is one for each GPU, or 2 where there is none.
        accelerator: ``"auto"`` (GPUs if there are any), ``"cpu"``, ``"gpu"`` or ``"cuda"``.
        nnodes: Machines; each runs the same command.
        rdzv_endpoint: ``host:port`` of one of them, where they meet.
        max_restarts: How often all ranks are started again after a failure; see :func:`restart_count`.
        in_place: Run the only rank in this process.

    Raises:
        ValueError: If a value makes no sense, with the value, the rule and the fix.
    """

    devices: int | None = None
    accelerator: str = "auto"
    nnodes: int = 1
    rdzv_endpoint: str | None = None
    max_restarts: int = 0
    in_place: bool = False

    def __post_init__(self) -> None:
        for name, least in (("devices", 1), ("nnodes", 1), ("max_restarts", 0)):
            value = getattr(self, name)
            if not (name == "devices" and value is None):
                _check_count(name, value, least)
        if self.accelerator not in ACCELERATORS:
            raise ValueError(f"launch.accelerator={self.accelerator!r} is not one of {', '.join(ACCELERATORS)}.")
        if self.nnodes > 1 and self.rdzv_endpoint is None:
            raise ValueError(
                f"launch.nnodes={self.nnodes} needs launch.rdzv_endpoint=HOST:PORT, the same on every machine: the "
                "name of one of them and a free port there."
            )
        if self.rdzv_endpoint is not None:
            _check_endpoint(self.rdzv_endpoint)
        if self.in_place and (self.devices not in (None, 1) or self.nnodes > 1):
            raise ValueError(
                f"launch.in_place=true runs one rank in this process, but launch.devices={self.devices} and "
                f"launch.nnodes={self.nnodes} ask for more. Set launch.devices=1, or launch.in_place=false."
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> LaunchSettings:
        """Settings from a configuration's ``launch`` node.

        Args:
            values: Name -> value; what is left out keeps its default. Names with an underscore in front, such as
                Hydra's ``_target_``, are left alone.

        Raises:
            ValueError: If a name is unknown; the nearest known one is in the message.
        """
        known = [field.name for field in fields(cls)]
        given = {name: value for name, value in values.items() if not str(name).startswith("_")}
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)[0]
                raise ValueError(f"launch.{name} is unknown. Did you mean launch.{near}? Known: {', '.join(known)}.")
        return cls(**given)

    def num_local_ranks(self) -> int:
        """Ranks on this machine.

        Raises:
            ValueError: If more GPUs are asked for than PyTorch sees.
        """
        if self.in_place:
            return 1
        num_gpus = torch.cuda.device_count() if self.accelerator != "cpu" else 0
        if self.accelerator in ("gpu", "cuda") and num_gpus == 0:
            raise ValueError(
                f"launch.accelerator={self.accelerator}, but PyTorch sees no GPU here. Use launch.accelerator=cpu."
            )
        if self.devices is None:
            return num_gpus or DEFAULT_CPU_RANKS
        if num_gpus and self.devices > num_gpus:
            raise ValueError(
                f"launch.devices={self.devices}, but PyTorch sees {num_gpus} GPU{'s' * (num_gpus > 1)} here. Use "
                f"launch.devices={num_gpus} or less, or launch.accelerator=cpu."
            )
        return self.devices


def launch(worker: Worker, config: Mapping[str, Any], launch_config: LaunchSettings | Mapping[str, Any]) -> Any:
    """Run ``worker(config)`` on every rank.

    Args:
        worker: Module-level function of the plain configuration.
        config: The configuration. OmegaConf nodes are resolved here, once, so that all ranks see the same values.
        launch_config: :class:`LaunchSettings`, or a mapping with its names.

    Returns:
        What the worker returned on rank 0. In place, what it returned on this rank.

    Raises:
        ValueError: If the settings, the worker or the configuration cannot be launched; before any process starts.
        RankFailedError: If a rank failed in a process started here. The message has its rank and traceback.
    """
    settings = (
        launch_config
        if isinstance(launch_config, LaunchSettings)
        else LaunchSettings.from_mapping(_plain(launch_config, "launch"))
    )
    _check_worker(worker)
    plain = _plain(config, "config")
    _check_picklable(plain)
    num_local_ranks = world_size(settings) // settings.nnodes
    if _under_torchrun():
        return _run_in_place(worker, _config_of_rank_zero(plain, *_torchrun_address()))
    if _under_srun(settings.nnodes):
        return _run_in_place(worker, _config_of_rank_zero(plain, *_slurm_address()))
    if settings.in_place:
        return _run_in_place(worker, plain)
    return run_ranks(
        worker,
        plain,
        devices=num_local_ranks,
        nnodes=settings.nnodes,
        rdzv_endpoint=settings.rdzv_endpoint,
        max_restarts=settings.max_restarts,
        num_threads=_threads_per_rank(num_local_ranks),
    )


def world_size(settings: LaunchSettings) -> int:
    """Ranks of all machines on which :func:`launch` runs: those that a launcher has started, or that it will start.

    Args:
        settings: How many ranks are asked for.

    Raises:
        ValueError: If more GPUs are asked for than PyTorch sees, or other ranks than torchrun has started.
    """
    if _under_torchrun():
        _check_torchrun_ranks(settings)
        return int(os.environ["WORLD_SIZE"])
    if _under_srun(settings.nnodes):
        return _slurm_tasks()
    return settings.num_local_ranks() * settings.nnodes


def trainer_resources() -> dict[str, int]:
    """``devices`` and ``num_nodes`` for the Trainer inside a worker, from the environment that started it."""
    if _under_torchrun():
        return {
            "devices": int(os.environ["LOCAL_WORLD_SIZE"]),
            "num_nodes": int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        }
    if _under_srun():
        num_nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", os.environ.get("SLURM_NNODES", "1")))
        return {"devices": _slurm_tasks() // num_nodes, "num_nodes": num_nodes}
    return {"devices": 1, "num_nodes": 1}


def restart_count() -> int:
    """How often the ranks of this job have been started again: above zero, continue from the last checkpoint."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


# -- where are we ------------------------------------------------------------------------------------------------------


def _under_torchrun() -> bool:
    return all(name in os.environ for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK"))


def _under_srun(nnodes: int = 1) -> bool:
    """Whether this is one of several tasks of a job step, which are the ranks unless they are to start their own.

    A batch script or an interactive shell is none.
    """
    is_step = nnodes == 1 and "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ
    return is_step and _slurm_tasks() > 1 and os.environ.get("SLURM_JOB_NAME") not in _INTERACTIVE_SLURM_JOBS


def _slurm_tasks() -> int:
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", os.environ.get("SLURM_NTASKS", "1")))


def _torchrun_address() -> tuple[str, int, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])


def _slurm_address() -> tuple[str, int, int]:
    from lightning.fabric.plugins.environments import SLURMEnvironment

    environment = SLURMEnvironment()
    return environment.main_address, environment.main_port, environment.global_rank()


def _check_torchrun_ranks(settings: LaunchSettings) -> None:
    started = int(os.environ["LOCAL_WORLD_SIZE"])
    if settings.devices not in (None, started):
        raise ValueError(
            f"launch.devices={settings.devices}, but torchrun started {started} ranks on this machine. Leave "
            f"launch.devices unset under torchrun, or start it with --nproc-per-node={settings.devices}."
        )


# -- in place ----------------------------------------------------------------------------------------------------------


def _run_in_place(worker: Worker, config: dict[str, Any]) -> Any:
    """Run the worker in this process, and destroy the group that it made, unless it failed with others in it."""
    existed, succeeded = dist.is_initialized(), False
    try:
        result = worker(config)
        succeeded = True
        return result
    except Exception:
        print(f"{rank_label()} failed:", file=sys.stderr, flush=True)
        raise
    finally:
        # Destroying it while others still use it may hang.
        if dist.is_initialized() and not existed and (succeeded or dist.get_world_size() == 1):
            destroy_process_group()


def _config_of_rank_zero(config: dict[str, Any], address: str, port: int, rank: int) -> dict[str, Any]:
    """Rank 0's configuration on every rank: each composed its own, with its own time stamps and random values."""
    store = shared_store(address, port, rank=rank)
    if rank == 0:
        store.set("config", pickle.dumps(config))  # type: ignore[arg-type]  # bytes are fine, torch's stub is narrow
        return config
    shared: dict[str, Any] = pickle.loads(store.get("config"))
    return shared


# -- checks ------------------------------------------------------------------------------------------------------------


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"launch.{name}={value!r} must be a whole number of {least} or more.")


def _check_endpoint(endpoint: str) -> None:
    host, _, port = endpoint.rpartition(":")
    if not (host and port.isdigit()):
        raise ValueError(f"launch.rdzv_endpoint={endpoint!r} must be HOST:PORT, such as node0:29400.")


def _check_worker(worker: Any) -> None:
    name = getattr(worker, "__qualname__", type(worker).__name__)
    if not callable(worker):
        raise ValueError(f"The worker must be a function of the configuration, not {worker!r}.")
    if "<lambda>" in name or "<locals>" in name:
        raise ValueError(
            f"The worker {name} lives inside another function, where a new process cannot find it. Define it at the "
            "top level of a module."
        )
    try:
        pickle.dumps(worker)
    except Exception as error:
        raise ValueError(
            f"The worker {name} cannot be sent to a new process ({error}). Use a function at the top level of a module."
        ) from error


def _check_picklable(config: dict[str, Any]) -> None:
    for name, value in config.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            raise ValueError(
                f"config[{name!r}] cannot be sent to a new process ({error}). Keep numbers, strings and plain "
                "containers in the configuration, and build objects in the worker."
            ) from error


def _plain(values: Any, what: str) -> dict[str, Any]:
    """A dict without OmegaConf nodes, all interpolations resolved."""
    plain = _without_nodes(values)
    if not isinstance(plain, Mapping):
        raise ValueError(f"The {what} must be a mapping of names to values, not {type(values).__name__}.")
    return dict(plain)


def _without_nodes(value: Any) -> Any:
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    if type(value) is dict:
        return {name: _without_nodes(entry) for name, entry in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_nodes(entry) for entry in value)
    return value


def _threads_per_rank(num_local_ranks: int) -> int:
    """The user's ``OMP_NUM_THREADS``, or an equal share of the cores this process may use."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    num_cores = len(os.sched_getaffinity(0))
    return int(given) if given.isdigit() else max(1, num_cores // num_local_ranks)
