"""What `launch` checks before any process starts, where it decides to run, and what it leaves behind in place."""

from __future__ import annotations

import functools
import os
import socket
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue

import lightning_par.launch as launch_module
from lightning_par.launch import LaunchSettings, launch, restart_count, trainer_resources, world_size
from lightning_par.process_group import ensure_process_group, rank_label, set_mesh_coordinates

LAUNCHER_VARIABLES = ("TORCHELASTIC", "SLURM_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "OMP_NUM_THREADS")


class Alone:
    """A cluster of this process."""

    def __init__(self) -> None:
        self.main_address, self.main_port = "127.0.0.1", free_port()

    def global_rank(self) -> int:
        return 0

    def world_size(self) -> int:
        return 1


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def echo(config: dict[str, Any]) -> dict[str, Any]:
    return config


def make_a_mess(config: dict[str, Any]) -> str:
    ensure_process_group(Alone(), "gloo")
    set_mesh_coordinates({"dp_shard": 0})
    os.environ["LAUNCH_TEST"] = "set by the worker"
    if config.get("fail"):
        raise ValueError("boom")
    return rank_label()


@pytest.fixture(autouse=True)
def _outside_of_any_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(LAUNCHER_VARIABLES)]:
        monkeypatch.delenv(name)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Instead of starting ranks, keep what they would have been started with."""
    calls: list[dict[str, Any]] = []

    def run_ranks(worker: Any, config: dict[str, Any], **how: Any) -> str:
        calls.append({"worker": worker, "config": config, **how})
        return "started"

    monkeypatch.setattr(launch_module, "run_ranks", run_ranks)
    return calls


@pytest.fixture
def under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for name, value in {**values, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"devices": 0}, r"launch.devices=0 must be a whole number of 1 or more"),
        ({"devices": -2}, r"launch.devices=-2 must be"),
        ({"devices": 2.0}, r"launch.devices=2.0 must be"),
        ({"devices": "2"}, r"launch.devices='2' must be"),
        ({"devices": True}, r"launch.devices=True must be"),
        ({"nnodes": 0}, r"launch.nnodes=0 must be"),
        ({"max_restarts": -1}, r"launch.max_restarts=-1 must be a whole number of 0 or more"),
        ({"accelerator": "tpu"}, r"launch.accelerator='tpu' is not one of auto, cpu, gpu, cuda"),
        ({"nnodes": 2}, r"launch.nnodes=2 needs launch.rdzv_endpoint=HOST:PORT"),
        ({"nnodes": 2, "rdzv_endpoint": "node0"}, r"'node0' must be HOST:PORT"),
        ({"in_place": True, "devices": 2}, r"launch.in_place=true runs one rank"),
        ({"device": 2}, r"launch.device is unknown. Did you mean launch.devices\?"),
    ],
)
def test_bad_settings_start_nothing(settings: dict[str, Any], message: str, started: list[Any]) -> None:
    with pytest.raises(ValueError, match=message):
        launch(echo, {}, settings)
    assert started == []


@pytest.mark.parametrize(
    ("num_gpus", "settings", "expected"),
    [
        (0, {}, 2),
        (0, {"devices": 3}, 3),
        (4, {}, 4),
        (4, {"devices": 2, "accelerator": "gpu"}, 2),
        (4, {"accelerator": "cpu"}, 2),
        (1, {"devices": 8, "accelerator": "cpu"}, 8),
    ],
)
def test_number_of_ranks(
    num_gpus: int, settings: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch, started: list[Any]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert launch(echo, {}, settings) == "started"
    assert started[0]["devices"] == expected


@pytest.mark.parametrize(
    ("num_gpus", "settings", "message"),
    [
        (2, {"devices": 4}, r"launch.devices=4, but PyTorch sees 2 GPUs here. Use launch.devices=2 or less"),
        (1, {"devices": 2, "accelerator": "cuda"}, r"PyTorch sees 1 GPU here"),
        (0, {"accelerator": "gpu"}, r"PyTorch sees no GPU here. Use launch.accelerator=cpu"),
    ],
)
def test_more_gpus_than_there_are(
    num_gpus: int, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, started: list[Any]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(ValueError, match=message):
        launch(echo, {}, settings)
    assert started == []


def test_workers_that_a_new_process_cannot_find(started: list[Any]) -> None:
    def nested(config: dict[str, Any]) -> None: ...

    bad: list[tuple[Any, str]] = [
        (lambda config: config, "lives inside another function"),
        (nested, "lives inside another function"),
        ("train", "must be a function"),
        (functools.partial(echo, lock=threading.Lock()), "cannot be sent to a new process"),
    ]
    for worker, message in bad:
        with pytest.raises(ValueError, match=message):
            launch(worker, {}, {"devices": 1})
    assert started == []
    launch(functools.partial(make_a_mess), {}, {"devices": 1})
    assert len(started) == 1


def test_configuration_reaches_the_ranks_resolved_and_plain(started: list[Any]) -> None:
    config = OmegaConf.create({"launch": {"devices": 3, "accelerator": "cpu"}, "width": 4, "double": "${width}"})
    launch(echo, config, config.launch)
    launch(echo, {"inner": OmegaConf.create({"a": [1]}), "pair": (OmegaConf.create([2]), 3)}, {"devices": 1})
    assert started[0]["config"] == {"launch": {"devices": 3, "accelerator": "cpu"}, "width": 4, "double": 4}
    assert started[0]["devices"] == 3
    assert type(started[0]["config"]["launch"]) is dict
    assert started[1]["config"] == {"inner": {"a": [1]}, "pair": ([2], 3)}
    assert type(started[1]["config"]["inner"]["a"]) is list


def test_configurations_that_cannot_travel(started: list[Any]) -> None:
    with pytest.raises(ValueError, match=r"config\['lock'\] cannot be sent to a new process"):
        launch(echo, {"lock": threading.Lock()}, {"devices": 1})
    with pytest.raises(MissingMandatoryValue, match="path"):
        launch(echo, OmegaConf.create({"path": "???"}), {"devices": 1})
    with pytest.raises(ValueError, match="must be a mapping"):
        launch(echo, [1], {"devices": 1})  # type: ignore[arg-type]
    assert started == []


def test_threads_share_the_cores_unless_the_user_has_chosen(
    monkeypatch: pytest.MonkeyPatch, started: list[Any]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    launch(echo, {}, {"devices": 3, "accelerator": "cpu"})
    launch(echo, {}, {"devices": 16, "accelerator": "cpu"})
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    launch(echo, {}, {"devices": 3, "accelerator": "cpu"})
    assert [call["num_threads"] for call in started] == [2, 1, 5]


def test_in_place_leaves_only_the_workers_variables_behind(monkeypatch: pytest.MonkeyPatch, started: list[Any]) -> None:
    monkeypatch.setenv("LAUNCH_TEST", "not yet")
    before = dict(os.environ)
    assert launch(make_a_mess, {}, LaunchSettings(in_place=True)) == "rank 0 of 1 (dp_shard=0)"
    assert dict(os.environ) == before | {"LAUNCH_TEST": "set by the worker"}
    assert not dist.is_initialized()
    assert rank_label() == "rank 0 of 1"
    assert started == []


def test_in_place_failure_is_the_original_one_and_leaves_no_group_behind(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAUNCH_TEST", "not yet")
    with pytest.raises(ValueError, match="boom"):
        launch(make_a_mess, {"fail": True}, {"in_place": True})
    assert not dist.is_initialized()
    assert "rank 0 of 1 (dp_shard=0) failed:" in capsys.readouterr().err


@pytest.mark.usefixtures("under_torchrun")
def test_under_torchrun_the_worker_runs_here(monkeypatch: pytest.MonkeyPatch, started: list[Any]) -> None:
    assert launch(echo, {"a": 1}, {}) == {"a": 1}
    assert launch(echo, {"a": 2}, {"devices": 1}) == {"a": 2}
    with pytest.raises(ValueError, match=r"launch.devices=2, but torchrun started 1 ranks"):
        launch(echo, {}, {"devices": 2})
    assert started == []
    assert trainer_resources() == {"devices": 1, "num_nodes": 1}
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert world_size(LaunchSettings()) == 8


def test_under_srun_the_worker_runs_in_each_task(monkeypatch: pytest.MonkeyPatch, started: list[Any]) -> None:
    monkeypatch.setattr(launch_module, "_slurm_address", lambda: ("127.0.0.1", free_port(), 0))
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}
    for name, value in {**step, "SLURM_JOB_NAME": "train"}.items():
        monkeypatch.setenv(name, value)
    assert launch(echo, {"a": 1}, {}) == {"a": 1}
    assert trainer_resources() == {"devices": 2, "num_nodes": 2}
    assert world_size(LaunchSettings(accelerator="cpu")) == 4
    assert started == []
    machines = LaunchSettings(devices=2, accelerator="cpu", nnodes=4, rdzv_endpoint="node0:29400")
    launch(echo, {}, machines)
    assert world_size(machines) == 8
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    launch(echo, {}, {"devices": 1})
    assert world_size(LaunchSettings(devices=3, accelerator="cpu")) == 3
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    launch(echo, {}, {"devices": 1})
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.delenv("SLURM_STEP_ID")  # the batch script itself
    launch(echo, {}, {"devices": 1})
    assert len(started) == 4
    assert started[0]["rdzv_endpoint"] == "node0:29400"


def test_restart_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert restart_count() == 0
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert restart_count() == 2
