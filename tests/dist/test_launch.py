"""Ranks through torch elastic: results, failures, signals, restarts, torchrun, several machines, sweeps."""

from __future__ import annotations

import atexit
import csv
import itertools
import os
import re
import signal
import socket
import sys
import time
import types
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from lightning_par import elastic
from lightning_par.launch import RankFailedError, launch, restart_count, trainer_resources
from lightning_par.process_group import ensure_process_group, set_mesh_coordinates
from tests.dist.processes import LEAVE_SECONDS, Program, run_program

pytestmark = pytest.mark.timeout(60)

PROGRAM_SECONDS = 50
"""For a whole program on a busy machine."""
LIGHT = """
from tests.dist.processes import spare_lightning

spare_lightning()
"""
"""How programs under test begin. Their ranks run the same lines, before all else."""


class Environment:
    """The cluster that the launcher's environment variables describe."""

    def __init__(self) -> None:
        self.main_address, self.main_port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    def global_rank(self) -> int:
        return int(os.environ["RANK"])

    def world_size(self) -> int:
        return int(os.environ["WORLD_SIZE"])


def work(config: dict[str, Any]) -> dict[str, Any]:
    """Join the group, leave a mark, fail as the configuration says, and add up the ranks."""
    ensure_process_group(Environment(), "gloo", timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    set_mesh_coordinates({"dp_shard": rank})
    if "marks" in config:
        Path(config["marks"], f"{config.get('name', 'job')}-rank{rank}-of-{dist.get_world_size()}").touch(
            exist_ok=False
        )
    dist.barrier()
    fail(config, rank)
    if rank == 0 and "linger" in config:
        atexit.register(time.sleep, config["linger"])
    total = torch.tensor(float(rank + 1))
    dist.all_reduce(total)
    return {
        "total": total.item(),
        "resources": trainer_resources(),
        "threads": torch.get_num_threads(),
        "restarts": restart_count(),
        "config": config,
    }


def fail(config: dict[str, Any], rank: int) -> None:
    """Fail on rank 1 as the configuration says; rank 0 waits for it in a collective, or is stuck and deaf."""
    how = config.get("fail")
    if how == "raise" and rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if rank == 1 and "failed_at" in config:
        Path(config["failed_at"]).write_text(str(time.time()))
    if rank == 1 and how == "raise":
        raise ValueError("boom on purpose")
    if rank == 1 and (how == "kill" or (how == "kill once" and restart_count() == 0)):
        os.kill(os.getpid(), signal.SIGKILL)


def interrupt(config: dict[str, Any]) -> None:
    """Send a signal to the parent, and wait for the end."""
    os.kill(os.getppid(), config["number"])
    time.sleep(600)


def sleep_deeply(config: dict[str, Any]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    print("rank is asleep", flush=True)
    time.sleep(600)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def living_children() -> set[int]:
    """Processes below this one, without multiprocessing's tracker, which lives as long as its parent."""
    living = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "resource_tracker" not in " ".join(child.cmdline()) and child.status() != psutil.STATUS_ZOMBIE:
                living.add(child.pid)
    return living


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Any:
    """No process, environment variable or signal handler of a launch may outlive it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    environment, children = dict(os.environ), living_children()
    yield
    assert {number: signal.getsignal(number) for number in handlers} == handlers
    own = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    assert own == {name: value for name, value in environment.items() if name != "PYTEST_CURRENT_TEST"}
    assert living_children() <= children


@pytest.fixture(autouse=True)
def _light_ranks(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new rank begins with the main module of its parent: let that be no more than what spares it Lightning."""
    main = types.ModuleType("__main__")
    main.__file__ = str(tmp_path_factory.mktemp("main") / "main.py")
    Path(main.__file__).write_text(LIGHT)
    monkeypatch.setitem(sys.modules, "__main__", main)


def test_result_of_rank_zero_which_takes_long_to_leave(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "GRACE_SECONDS", 1)
    result = launch(work, {"marks": str(tmp_path), "linger": 3}, {"devices": 2, "accelerator": "cpu"})
    assert result["total"] == 3.0
    assert result["resources"] == {"devices": 2, "num_nodes": 1}
    assert (result["threads"], result["restarts"]) == (1, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job-rank0-of-2", "job-rank1-of-2"]
    output = capfd.readouterr()
    assert (output.out, output.err) == ("", "")


def test_exception_of_a_rank_whose_peer_is_stuck(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "GRACE_SECONDS", 2)
    with pytest.raises(RankFailedError) as failure:
        launch(work, {"fail": "raise", "failed_at": str(tmp_path / "time")}, {"devices": 2, "accelerator": "cpu"})
    assert time.time() - float((tmp_path / "time").read_text()) < LEAVE_SECONDS
    message = str(failure.value)
    assert message.startswith("rank 1 of 2 (dp_shard=1) failed with ValueError: boom on purpose\n")
    assert 'raise ValueError("boom on purpose")' in failure.value.traceback
    assert failure.value.traceback.strip() in message
    assert failure.value.rank == 1
    assert "elastic" not in message + capfd.readouterr().err


def test_restart_after_a_rank_was_killed(capfd: pytest.CaptureFixture[str]) -> None:
    result = launch(work, {"fail": "kill once"}, {"devices": 2, "accelerator": "cpu", "max_restarts": 1})
    assert (result["total"], result["restarts"]) == (3.0, 1)
    told = capfd.readouterr().err
    assert re.search(r"rank 1 of 2, process \d+, was killed by SIGKILL", told)
    assert "Restart number 1." in told


def test_signal_to_the_parent_goes_to_its_earlier_handler() -> None:
    with pytest.raises(KeyboardInterrupt):
        launch(interrupt, {"number": signal.SIGINT}, {"devices": 1, "accelerator": "cpu"})
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        with pytest.raises(SystemExit) as leaving:
            launch(interrupt, {"number": signal.SIGTERM}, {"devices": 1, "accelerator": "cpu"})
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM]
    assert leaving.value.code == 128 + signal.SIGTERM


SLEEPING = """
from lightning_par.launch import launch
from tests.dist.test_launch import sleep_deeply

if __name__ == "__main__":
    launch(sleep_deeply, {}, {"devices": 1, "accelerator": "cpu"})
"""


def test_deaf_rank_leaves_with_its_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "sleeping.py"
    script.write_text(LIGHT + SLEEPING)
    program = Program.start([script], tmp_path)
    program.wait_for("rank is asleep")
    program.process.kill()
    program.assert_all_gone()
    program.finish(LEAVE_SECONDS)


JOINING = """
import os
import sys
import torch.distributed as dist
from lightning_par.launch import launch
from tests.dist.test_launch import work

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # in one piece, as the other rank speaks, too

if __name__ == "__main__":
    for job in ("first", "second"):
        config = {"stamp": os.getpid(), "marks": sys.argv[1], "name": job}
        result = launch(work, config, {"accelerator": "cpu"})
        assert result["total"] == 3.0
        assert not dist.is_initialized()
        say("stamp", result["config"]["stamp"])
    try:
        launch(work, {}, {"devices": 3, "accelerator": "cpu"})
    except ValueError as error:
        say("refused:", error)
"""


def test_under_torchrun_ranks_run_in_place_with_one_configuration(tmp_path: Path) -> None:
    script = tmp_path / "joining.py"
    script.write_text(LIGHT + JOINING)
    (marks := tmp_path / "marks").mkdir()
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    code, output, errors = run_program([*torchrun, script, marks], tmp_path, PROGRAM_SECONDS)
    assert code == 0, errors
    stamps = [line for line in output.splitlines() if line.startswith("stamp")]
    assert len(stamps) == 4
    assert len(set(stamps)) == 1  # every rank saw the process number of rank 0
    assert sorted(path.name for path in marks.iterdir()) == [
        f"{job}-rank{rank}-of-2" for job in ("first", "second") for rank in (0, 1)
    ]
    assert output.count("refused: launch.devices=3, but torchrun started 2 ranks") == 2


MACHINE = """
import sys
from lightning_par.launch import launch
from tests.dist.test_launch import work

if __name__ == "__main__":
    settings = {"devices": 1, "accelerator": "cpu", "nnodes": 2, "rdzv_endpoint": sys.argv[1]}
    result = launch(work, {}, settings)
    print("result", result and (result["total"], result["resources"]), flush=True)
"""


def test_two_machines_meet_at_an_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic, "_LAUNCH_NUMBERS", itertools.count())  # they count their launches
    script = tmp_path / "machine.py"
    script.write_text(LIGHT + MACHINE)
    endpoint = f"localhost:{free_port()}"
    other = Program.start([script, endpoint], tmp_path)
    result = launch(work, {}, {"devices": 1, "accelerator": "cpu", "nnodes": 2, "rdzv_endpoint": endpoint})
    output, errors = other.finish(PROGRAM_SECONDS)
    other.assert_all_gone()
    assert other.process.returncode == 0, errors
    (line,) = [line for line in output.splitlines() if line.startswith("result")]
    here = f"result {result and (result['total'], result['resources'])}"
    assert sorted([here, line]) == [f"result {(3.0, {'devices': 1, 'num_nodes': 2})}", "result None"]


SWEEP_APP = """
import json
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightning_par.launch import launch
from tests.dist.test_launch import work


@hydra.main(version_base="1.3", config_path=".", config_name="app")
def main(cfg: DictConfig) -> float:
    result = launch(work, cfg, cfg.launch)
    summary = {"strategy": "dp", "world_size": cfg.launch.devices}
    Path(HydraConfig.get().runtime.output_dir, "summary.json").write_text(json.dumps(summary))
    return result["total"]


if __name__ == "__main__":
    main()
"""

SWEEP_CONFIG = """
job: ???
failures: {a: none, b: kill, c: none}
sizes: {a: 1, b: 2, c: 1}
name: ${job}
fail: ${failures.${job}}
marks: ???
launch:
  devices: ${sizes.${job}}
  accelerator: cpu
hydra:
  callbacks:
    sweep_report: {_target_: lightning_par.report.SweepReport}
"""


def test_sweep_runs_each_job_once_and_goes_on_after_a_failure(tmp_path: Path) -> None:
    (app := tmp_path / "app").mkdir()
    (app / "app.py").write_text(LIGHT + SWEEP_APP)
    (app / "app.yaml").write_text(SWEEP_CONFIG)
    (marks := tmp_path / "marks").mkdir()
    command = ["app/app.py", "-m", "job=a,b,c", f"marks={marks}", "hydra.sweep.dir=sweep"]
    code, output, errors = run_program(command, tmp_path, PROGRAM_SECONDS)
    assert code == 1, errors
    assert "was killed by SIGKILL" in (tmp_path / "sweep" / "sweep.html").read_text()
    with (tmp_path / "sweep" / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["job"], row["status"], row["world_size"], row["objective"]) for row in rows] == [
        ("0", "completed", "1", "1.0"),
        ("1", "failed", "", ""),
        ("2", "completed", "1", "1.0"),
    ], errors
    expected = ["a-rank0-of-1", "b-rank0-of-2", "b-rank1-of-2", "c-rank0-of-1"]
    assert sorted(path.name for path in marks.iterdir()) == expected
    assert "was killed by SIGKILL" in (tmp_path / "sweep" / "1" / "error.txt").read_text()
    assert "1 of 3 jobs failed: #1" in errors
    assert "was killed by SIGKILL" in output  # in the table
