"""The comparison of a sweep's jobs, and a sweep that outlives failing jobs. No rank is started."""

from __future__ import annotations

import csv
import json
import math
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from lightning_par.rank_watch import RankFailedError
from lightning_par.report import SweepReport, collect_jobs, main, sweep_table, write_csv

MIB = 2**20


def summary(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "strategy": "zero2",
        "layout": {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "tp": 1},
        "world_size": 2,
        "parameters": 1000,
        "steps": 5,
        "tokens_per_second": 12345.6,
        "step_time_ms": {"median": 10.5, "p90": 12.0},
        "peak_memory_bytes": [3 * MIB, 7 * MIB],
        "model_state_bytes": [2 * MIB, MIB],
        "communication_bytes_per_step": {"dp_shard": 4 * MIB, "tp": MIB},
        "train_loss": {"first": 5.5, "last": 2.25},
        "val_loss": 2.5,
    }
    return values | changes


def hydra_config(sweep_dir: Path, number: int, mode: RunMode = RunMode.MULTIRUN) -> DictConfig:
    directory = sweep_dir / str(number)
    directory.mkdir(parents=True, exist_ok=True)
    return OmegaConf.create(
        {
            "hydra": {
                "mode": mode,
                "runtime": {"output_dir": str(directory)},
                "job": {"num": number},
                "sweep": {"dir": str(sweep_dir)},
            }
        }
    )


def job_return(result: Any, *overrides: str) -> JobReturn:
    status = JobStatus.FAILED if isinstance(result, BaseException) else JobStatus.COMPLETED
    returned = JobReturn(overrides=list(overrides), status=status)
    returned.return_value = result
    return returned


def run_sweep(report: SweepReport, sweep_dir: Path, results: list[Any]) -> list[JobReturn]:
    """What Hydra does with a callback during a sweep; job i sets strategy=s<i> and returns or raises `results[i]`."""
    report.on_multirun_start(hydra_config(sweep_dir, 0))
    returns = []
    for number, result in enumerate(results):
        config = hydra_config(sweep_dir, number)
        if not isinstance(result, BaseException):
            (sweep_dir / str(number) / "summary.json").write_text(json.dumps(summary(val_loss=result)))
        returned = job_return(result, f"strategy=s{number}", "trainer.max_steps=5")
        report.on_job_end(config, job_return=returned)
        returns.append(returned)
    return returns


def rendered(directory: Path, width: int = 200) -> str:
    console = Console(file=StringIO(), width=width)
    console.print(sweep_table(collect_jobs(directory)))
    text: str = console.file.getvalue()
    return text


def test_completed_sweep_prints_a_table_and_writes_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = SweepReport()
    returns = run_sweep(report, tmp_path, [2.5, 2.0])
    report.on_multirun_end(hydra_config(tmp_path, 0))
    assert [returned.return_value for returned in returns] == [2.5, 2.0]
    printed = capsys.readouterr().out
    assert "strategy=s1" in printed
    assert "12,346" in printed
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["job"] for row in rows] == ["0", "1"]
    assert rows[1]["overrides"] == "strategy=s1 trainer.max_steps=5"
    assert float(rows[1]["objective"]) == 2.0
    assert float(rows[0]["step_time_ms"]) == 10.5
    assert int(rows[0]["peak_memory_bytes"]) == 7 * MIB  # the rank that needs most decides whether a job fits
    assert int(rows[0]["communication_bytes_per_step"]) == 5 * MIB
    assert int(rows[0]["communication_bytes_per_step.tp"]) == MIB
    assert float(rows[0]["train_loss"]) == 2.25


def test_failed_job_is_recorded_and_ends_the_sweep_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = SweepReport()
    returns = run_sweep(report, tmp_path, [2.5, ValueError("heads\ndo not divide"), 2.0])
    assert math.isnan(returns[1].return_value)  # reading it does not raise, which would end the sweep
    assert returns[2].return_value == 2.0
    with pytest.raises(SystemExit) as end:
        report.on_multirun_end(hydra_config(tmp_path, 0))
    assert end.value.code == 1
    output = capsys.readouterr()
    assert "1 of 3 jobs failed: #1" in output.err
    assert "Job #1 (strategy=s1 trainer.max_steps=5) failed" in output.err
    assert "ValueError: heads\ndo not divide" in (tmp_path / "1" / "error.txt").read_text()
    assert [record.status for record in collect_jobs(tmp_path)] == ["completed", "failed", "completed"]
    assert "ValueError: heads" in output.out
    assert json.loads((tmp_path / "1" / "job.json").read_text())["objective"] is None


def test_a_page_that_cannot_be_written_costs_no_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sweep.html").mkdir()
    run_sweep(report := SweepReport(), tmp_path, [2.5, ValueError("boom")])
    with pytest.raises(SystemExit):
        report.on_multirun_end(hydra_config(tmp_path, 0))
    assert "sweep.html could not be written: IsADirectoryError" in capsys.readouterr().err


def test_rank_failure_shows_the_ranks_traceback_and_not_the_parents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = "rank 1 of 2 (tp=1) failed with KeyError: 'x'\n\nTraceback (most recent call last):\n  in worker"
    run_sweep(SweepReport(), tmp_path, [RankFailedError(message, rank=1)])
    assert (tmp_path / "0" / "error.txt").read_text() == message
    assert message in capsys.readouterr().err
    assert collect_jobs(tmp_path)[0].error == "rank 1 of 2 (tp=1) failed with KeyError: 'x'"


def test_jobs_of_an_earlier_sweep_in_the_same_directory_do_not_count(tmp_path: Path) -> None:
    first, second = SweepReport(), SweepReport()
    run_sweep(first, tmp_path, [1.0, 1.0, ValueError("old")])
    run_sweep(second, tmp_path, [2.0, ValueError("new")])
    with pytest.raises(SystemExit):
        second.on_multirun_end(hydra_config(tmp_path, 0))
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["objective"] for row in rows] == ["2.0", ""]
    assert rows[1]["val_loss"] == ""  # summary.json there is the first sweep's
    run_sweep(third := SweepReport(), tmp_path, [3.0, 3.0])
    third.on_multirun_end(hydra_config(tmp_path, 0))  # the failed job of the first sweep does not end this one with 1
    assert not (tmp_path / "1" / "error.txt").exists()


def test_single_run_is_left_alone(tmp_path: Path) -> None:
    returned = job_return(ValueError("boom"))
    SweepReport().on_job_end(hydra_config(tmp_path, 0, RunMode.RUN), job_return=returned)
    assert returned.status == JobStatus.FAILED
    assert list((tmp_path / "0").iterdir()) == []


def test_table_moves_shared_overrides_to_the_title_and_drops_empty_columns(tmp_path: Path) -> None:
    run_sweep(SweepReport(), tmp_path, [2.5, 2.0])
    text = rendered(tmp_path)
    assert text.splitlines()[0].strip() == "Sweep trainer.max_steps=5"
    assert text.count("trainer.max_steps=5") == 1
    assert "error" not in text
    (tmp_path / "0" / "summary.json").unlink()
    (tmp_path / "1" / "summary.json").unlink()
    assert "tokens/s" not in rendered(tmp_path)


def test_per_rank_parts_and_values_that_are_no_numbers(tmp_path: Path) -> None:
    run_sweep(SweepReport(), tmp_path, [1.0, None, float("nan")])
    parts = [{"parameters": 8, "gradients": 8}, {"parameters": 4, "gradients": 4}]
    (tmp_path / "0" / "summary.json").write_text(json.dumps(summary(model_state_bytes=parts, val_loss=None)))
    records = collect_jobs(tmp_path)
    assert records[0].row()["model_state_bytes"] == 16
    assert records[1].objective is None
    assert math.isnan(records[2].objective or 0.0)
    write_csv(records, tmp_path / "all.csv")
    assert "nan" in (tmp_path / "all.csv").read_text()


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert f"below {tmp_path}" in capsys.readouterr().err
    run_sweep(SweepReport(), tmp_path, [2.5])
    assert main([str(tmp_path)]) == 0
    assert "strategy=s0" in capsys.readouterr().out
    run_sweep(SweepReport(), tmp_path, [ValueError("boom")])
    assert main([str(tmp_path)]) == 1
    assert main([]) == 2
