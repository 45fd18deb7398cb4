"""The planner as a program: what it prints, writes and exits with; and the machine at hand as a cluster."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from lightning_par.config import resolve
from lightning_par.planner import Cluster, measure
from lightning_par.planner.app import cluster_of, flags_to_overrides, plan_for, run
from tests.unit.configuration import CONF, ROOT


def configured(*overrides: str) -> dict[str, Any]:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return resolve(compose("plan", overrides=list(overrides)))


def printed(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    run(configured(*overrides), overrides)
    return re.sub(r"\s+", " ", capsys.readouterr().out)


def test_it_prints_the_answer_the_reasons_and_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "model=gpt_7b", "cluster=8xa100_80gb", "data.batch_size=4")
    assert "gpt_7b: 6.74B parameters, 32 blocks, 2,048 tokens a sample, bf16-mixed, traced" in out
    assert "32 samples a step" in out
    assert "Take ZeRO" in out
    assert "DP" in out
    assert re.search(r"lacks [\d.]+ GB of a device at its best", out)
    assert "python examples/train.py model=gpt_7b strategy=zero" in out
    assert "launch.devices=8" in out
    # The batch is the plan's own.
    assert out.count("data.batch_size=") == 1


def test_json_holds_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    out = printed(capsys, "model=gpt_mini", "cluster=h200", f"json={file}")
    plan = json.loads(file.read_text())
    assert "Take plain" in out
    assert plan["recommended"]["candidate"]["kind"] == "plain"
    assert plan["command"].startswith("python examples/train.py model=gpt_mini strategy=dp")
    assert Cluster.from_mapping(plan["cluster"]).num_devices == 1
    assert sum(plan["recommended"]["time"]["shares"].values()) == pytest.approx(1)
    run(configured("model=gpt_mini", "cluster=h200", *flags_to_overrides(["--json"])), ["model=gpt_mini"])
    assert json.loads(capsys.readouterr().out)["recommended"] == plan["recommended"]


def test_nothing_fits_is_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    small = ("model=gpt_7b", "cluster=consumer_24gb", "cluster.host.memory=8e9", "cluster.host.disk=null")
    with pytest.raises(SystemExit) as caught:
        run(configured(*small), small)
    assert caught.value.code == 1
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "No layout fits. Nothing fits. The closest is" in out
    assert "To train with it" not in out


def test_the_other_optimizers_states_count() -> None:
    adam, sgd = (
        plan_for(configured("model=gpt2_small", "cluster=h200", f"optimizer={name}")) for name in ("adamw", "sgd")
    )
    assert adam.recommended is not None
    assert sgd.recommended is not None
    # Two moments, and one momentum.
    assert adam.recommended.memory.optimizer == pytest.approx(2 * sgd.recommended.memory.optimizer, rel=1e-3)


@pytest.mark.parametrize("program", [["examples/plan.py"], ["-m", "lightning_par.planner"]])
def test_the_programs_run(program: list[str], tmp_path: Path) -> None:
    arguments = ["model=gpt_nano", "cluster=2x4xcpu", "cluster.nodes=0"]
    found = subprocess.run(
        [sys.executable, *program, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert found.returncode == 1
    assert "cluster.nodes=0 must be a positive integer" in found.stderr
    assert "Traceback" not in found.stderr


# The machine at hand


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_this_machine_is_measured_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = configured("cluster=this", "cluster.accelerator=cpu", "cluster.devices_per_node=2")["cluster"]
    first = cluster_of(values)
    assert first.num_devices == 2
    assert not first.device.is_gpu
    assert first.device.peak("fp32") > 1e8
    assert 2 * first.device.memory == pytest.approx(first.host.memory)
    assert len(list(cache.rglob("*.json"))) == 1

    def again(*_: Any) -> Cluster:
        raise AssertionError("measured again")

    monkeypatch.setattr(measure, "_measure_cpu", again)
    assert cluster_of(values) == first
    assert cluster_of({**values, "nodes": 3}).num_devices == 6
    with pytest.raises(AssertionError, match="measured again"):
        cluster_of({**values, "refresh": True})


def test_a_damaged_measurement_is_made_anew(cache: Path) -> None:
    measure.measure_cluster(2, accelerator="cpu")
    (file,) = cache.rglob("*.json")
    file.write_text("{")
    assert measure.measure_cluster(2, accelerator="cpu").num_devices == 2
    assert json.loads(file.read_text())["devices_per_node"] == 2
