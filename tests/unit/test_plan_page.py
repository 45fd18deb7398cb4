"""The planner's page: everything the plan says is there, with its numbers, and a browser shows it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_par.planner import MemoryBreakdown, Plan, Rejection, StepTime, Workload, make_plan
from lightning_par.planner.app import run
from lightning_par.reports.gantt import gantt_of
from lightning_par.reports.plan_page import write_plan_page
from tests.pages import BROWSER, in_browser, read_page
from tests.planner_models import LLAMA_7B, cluster, planned

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A pipeline with runners-up and rejected layouts."""
    made = make_plan(planned(LLAMA_7B), cluster("4x8xa100_slow"), Workload(global_batch=256))
    more = tuple(Rejection(f"TP of {size}", f"{size} does not divide <32> heads & so on") for size in (3, 5, 7))
    return replace(made, rejected=(*made.rejected, *more))


@pytest.fixture(scope="module")
def path(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plan_page(plan, tmp_path_factory.mktemp("page") / "plan.html")


def test_every_candidate_is_there_with_the_numbers_of_the_plan(plan: Plan, path: Path) -> None:
    page = read_page(path)
    assert plan.recommended is not None
    shown = [plan.recommended, *plan.runners_up]
    closest = [one.closest for one in plan.rejected if one.closest]
    bars = page.bars["memory"]
    assert [bar.label for bar in bars] == [one.candidate.describe() for one in (*shown, *closest)]
    assert [bar.kind for bar in bars] == ["best"] + [""] * len(plan.runners_up) + ["bad"] * len(closest)
    for bar, one in zip(bars, (*shown, *closest), strict=True):
        memory = one.memory
        expected = {part: getattr(memory, part) for part in MemoryBreakdown.PARTS if getattr(memory, part)}
        assert bar.parts == expected | ({"margin": memory.margin} if memory.fits else {})
    for bar, one in zip(page.bars["time"], shown, strict=True):
        assert bar.total == pytest.approx(one.time.total)
        assert bar.parts == {part: getattr(one.time, part) for part in StepTime.PARTS if getattr(one.time, part)}
    for rejection in plan.rejected:
        assert f"{rejection.label} {rejection.reason}" in page.text  # and escaped: the parser reads it back
    assert plan.command in page.text
    assert page.documents["document"] == json.loads(json.dumps(plan.to_dict()))
    assert path.stat().st_size < 300_000


def test_the_figure_of_the_zero_paper(path: Path) -> None:
    bars = read_page(path).bars["zero"][:4]
    assert [(bar.label, bar.total / 1e9) for bar in bars] == [
        ("DP", pytest.approx(120)),
        ("ZeRO-1", pytest.approx(31.4, abs=0.05)),
        ("ZeRO-2", pytest.approx(16.6, abs=0.05)),
        ("ZeRO-3", pytest.approx(1.9, abs=0.05)),
    ]
    assert "DP 120 GB ZeRO-1 31.4 GB ZeRO-2 16.6 GB ZeRO-3 1.9 GB" in read_page(path).text


def test_the_schedule_is_the_simulators(plan: Plan) -> None:
    assert plan.recommended is not None
    candidate = plan.recommended.candidate
    gantt = gantt_of(plan.recommended)
    assert gantt is not None
    assert gantt.num_ranks == candidate.layout.pp
    assert len(gantt.boxes) == 2 * candidate.layout.pp * candidate.num_microbatches * candidate.num_virtual_stages
    busy = sum(box.width for box in gantt.boxes) / (gantt.width * gantt.num_ranks)
    assert busy == pytest.approx(1 - gantt.bubble_share)
    assert plan.recommended.time.bubble > 0
    many = replace(plan.recommended, candidate=replace(candidate, num_microbatches=2**12))
    shorter = gantt_of(many)
    assert shorter is not None
    assert len(shorter.boxes) <= 6000
    assert "of the step's 4096 micro-batches" in shorter.note


def test_nothing_fits(tmp_path: Path) -> None:
    machines = cluster("8xa100_80gb", "device.memory=8e9", "device.reserved=1e9", "host.memory=16e9", "host.disk=null")
    plan = make_plan(planned(LLAMA_7B), machines, Workload(global_batch=64))
    assert plan.recommended is None
    page = read_page(write_plan_page(plan, tmp_path / "plan.html"))
    assert "No layout fits." in page.text
    assert plan.fix in page.text
    assert {bar.kind for bar in page.bars["memory"]} == {"bad"}


def test_a_missing_folder_is_named_before_anything_is_planned(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no directory"):
        run({"html": str(tmp_path / "no" / "plan.html")})


def test_the_program_writes_it(tmp_path: Path) -> None:
    command = [sys.executable, "examples/plan.py", "model=gpt_nano", "cluster=2x4xcpu"]
    done = subprocess.run([*command, f"html={tmp_path / 'plan.html'}"], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert "gpt_nano on" in read_page(tmp_path / "plan.html").text


_LOOK = """
    const box = document.querySelector("input[data-search]");
    box.value = "tp of 5";
    box.dispatchEvent(new Event("input"));
    const left = [...document.querySelectorAll("#rejected-list details")].filter((item) => item.offsetHeight > 0);
    const chart = document.querySelector("#memory .fill");
    const button = document.querySelector(".command button");
    button.click();
    await new Promise((done) => setTimeout(done, 200));
    return {
        button: button.textContent,
        left: left.map((item) => item.querySelector("b").textContent),
        overflow: document.documentElement.scrollWidth - innerWidth,
        shares: [...chart.children].map((part) => part.getBoundingClientRect().width / chart.clientWidth),
        paper: getComputedStyle(document.body).backgroundColor,
    };
"""


@needs_browser
@pytest.mark.parametrize("width", [1200, 500])  # 500 is as narrow as Chromium goes
def test_in_a_browser(plan: Plan, path: Path, tmp_path: Path, width: int) -> None:
    assert plan.recommended is not None
    found = in_browser(path, tmp_path, _LOOK, width)
    assert found["left"] == ["TP of 5"]
    assert found["button"] == "Copied"
    assert found["overflow"] <= 0
    sizes = [size for part in MemoryBreakdown.PARTS if (size := getattr(plan.recommended.memory, part))]
    expected = [size / plan.recommended.memory.total for size in sizes]
    drawn = found["shares"][: len(sizes)]  # the rest is the margin
    assert [share / sum(drawn) for share in drawn] == pytest.approx(expected, abs=0.01)
