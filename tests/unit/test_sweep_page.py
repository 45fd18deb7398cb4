"""The page of a sweep: what was measured and predicted is there with its numbers, and a browser draws it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lightning_par.planner import Device, Host, Link
from lightning_par.planner.cluster import Cluster
from lightning_par.report import main
from lightning_par.reports.jobs import JobRecord, collect_jobs
from lightning_par.reports.predictions import Predictor, candidate_of
from lightning_par.reports.sweep_page import write_sweep_page
from tests.pages import BROWSER, in_browser, read_page
from tests.unit.configuration import compose_train

RANK = Device("a core", 8e9, {"fp32": 5e10}, 1e10, is_gpu=False)
MACHINE = Cluster("two ranks", RANK, 2, 1, Link(1e9, 1e-4), Link(1e9, 1e-4), Host(16e9, 2e10, 2e10))
GROUPS = ("model", "data", "optimizer", "strategy", "trainer", "launch")
SHARED = ("launch.devices=2", "data.batch_size=8")


def summary(layout: dict[str, int], **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "strategy": "zero2",
        "layout": {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1} | layout,
        "world_size": 2,
        "tokens_per_second": 8000.0,
        "step_time_ms": {"median": 200.0, "p90": 250.0},
        "peak_memory_bytes": [3_000_000, 7_000_000],
        "model_state_bytes": [4_000, 2_000],
        "model_state_by_place": [
            {"device": {"parameters": 1000, "gradients": 1000}, "host": {"optimizer": 2000}},
            {"device": {"parameters": 1000, "gradients": 1000, "optimizer": 0}},
        ],
        "communication_bytes_per_step": {"dp_shard": 6_000_000, "tp": 1_000_000},
        "train_loss": {"first": 5.5, "last": 2.25},
        "val_loss": 2.5,
    }
    return values | changes


def write_job(folder: Path, number: int, strategy: str, found: dict[str, Any] | None, error: str = "") -> None:
    directory = folder / str(number)
    (directory / "csv").mkdir(parents=True)
    overrides = (f"strategy={strategy}", *SHARED)
    config = OmegaConf.to_container(
        OmegaConf.masked_copy(compose_train(directory, *overrides), list(GROUPS)), resolve=True
    )
    content = {"number": number, "overrides": list(overrides), "status": "failed" if error else "completed"}
    content |= {"error": error.partition("\n")[0], "objective": None, "sweep": "s", "config": config}
    (directory / "job.json").write_text(json.dumps(content))
    if error:
        (directory / "error.txt").write_text(error)
    if found is not None:
        (directory / "summary.json").write_text(json.dumps(found))
        rows = "".join(f"0,{step},{5.0 - step / 10 - number},\n0,{step},,{4.5 - number}\n" for step in range(0, 30, 10))
        (directory / "csv" / "metrics.csv").write_text("epoch,step,train_loss,val_loss\n" + rows)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    write_job(folder, 0, "zero2", summary({"dp_shard": 2}))
    write_job(
        folder, 1, "dp_parameter_server", summary({"dp_replicate": 2}, step_time_ms={"median": 100.0, "p90": 110.0})
    )
    write_job(folder, 2, "hybrid", None, "ValueError: 4 does <not> divide 2\n  in the second line")
    return folder


@pytest.fixture(scope="module")
def page_path(sweep: Path) -> Path:
    predictor = Predictor(clusters={(2, 1, "auto"): MACHINE})
    return write_sweep_page(collect_jobs(sweep), sweep / "page.html", predictor)


def test_measurements_are_there_with_their_numbers(page_path: Path) -> None:
    page = read_page(page_path)
    first, second = "#0 strategy=zero2", "#1 strategy=dp_parameter_server"
    time = {bar.label: bar.total for bar in page.bars["time"]}
    assert time[first] == 0.2
    assert time[second] == 0.1
    memory = {bar.label: bar.total for bar in page.bars["memory"]}
    assert memory[f"{first}, rank 1"] == 7e6
    assert len(memory) == 5  # two ranks of two jobs, and the prediction of the one
    assert page.bars["state"][0].parts == {"parameters": 1000, "gradients": 1000, "optimizer, host": 2000}
    assert page.bars["traffic"][0].parts == {"dp_shard": 6e6, "tp": 1e6}
    assert f"100 ms shortest step: {second}" in page.text
    assert f"with {' '.join(SHARED)}" in page.text
    assert "ValueError: 4 does <not> divide 2 in the second line" in page.text
    assert page.text.count("strategy=hybrid") == 2  # among the failed and among all, and in no chart


def test_predictions_stand_beside_them(sweep: Path, page_path: Path) -> None:
    page = read_page(page_path)
    record = collect_jobs(sweep)[0]
    prediction = Predictor(clusters={(2, 1, "auto"): MACHINE}).predict(record)
    assert prediction.time is not None
    memory = {bar.label: bar.total for bar in page.bars["memory"]}
    assert memory["#0 strategy=zero2, predicted"] == prediction.memory_bytes > prediction.state_bytes
    time = {bar.label: bar.total for bar in page.bars["time"]}
    assert time["#0 strategy=zero2, predicted"] == pytest.approx(prediction.time.total)
    # float32 weights, gradients and two moments of every parameter, over two ranks, and a step count for each tensor
    assert 16 * 820_352 / 2 <= prediction.state_bytes < 16 * 820_352 / 2 + 1000
    assert f"{prediction.state_bytes:,}" in page.text
    assert prediction.time.traffic["dp_shard"] == page.bars["traffic"][1].parts["dp_shard"]
    assert "#1 strategy=dp_parameter_server is not predicted: a parameter server is not among" in page.text


def test_a_pipeline_as_a_candidate_and_a_job_without_a_configuration(tmp_path: Path) -> None:
    config = OmegaConf.to_container(compose_train(tmp_path, "strategy=pp", "data.batch_size=16"), resolve=False)
    assert isinstance(config, dict)
    layout = {"pp": 2, "dp_replicate": 1, "dp_shard": 1, "tp": 1}
    candidate = candidate_of(config, layout)
    assert (candidate.schedule, candidate.num_microbatches, candidate.micro_batch_size) == ("1f1b", 8, 2)
    with pytest.raises(ValueError, match="does not accumulate"):
        candidate_of(config | {"trainer": {"accumulate_grad_batches": 2}}, layout)
    foreign = Predictor().predict(JobRecord(0, (), summary=summary(layout)))
    assert foreign.time is None
    assert "no model, data" in foreign.reason


def test_the_command_writes_it_again(sweep: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("lightning_par.reports.predictions.measure_cluster", lambda *_: MACHINE)
    assert main([str(sweep)]) == 1  # a job failed
    assert str(sweep / "sweep.html") in capsys.readouterr().out
    assert read_page(sweep / "sweep.html").bars["time"]


_LOOK = """
    const plots = [...document.querySelectorAll(".curves")];
    const painted = (canvas) => {
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return data.some((value) => value > 0);
    };
    return {
        names: plots.map((plot) => [...plot.querySelectorAll(".u-legend .u-label")].map((one) => one.textContent)),
        painted: plots.map((plot) => painted(plot.querySelector("canvas"))),
        overflow: document.documentElement.scrollWidth - innerWidth,
    };
"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [1200, 500])
def test_in_a_browser(page_path: Path, tmp_path: Path, width: int) -> None:
    found = in_browser(page_path, tmp_path, _LOOK, width)
    names = ["step", "#0 strategy=zero2", "#1 strategy=dp_parameter_server"]
    assert found["names"] == [names, names]
    assert found["painted"] == [True, True]
    assert found["overflow"] <= 0
