"""Jobs of a Hydra sweep side by side, and a sweep that outlives its failing jobs.

:class:`SweepReport` is a Hydra callback. It writes a ``job.json`` into each job's directory, turns a failing job into a
recorded one so that the sweep goes on, and at the end compares all jobs in a table and in ``sweep.csv``. If any job
failed, the sweep ends with exit code 1. ``python -m lightning_par.report SWEEP_DIR`` prints the table again.
"""

from __future__ import annotations

import csv
import json
import math
import sys
import traceback
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from lightning_par.rank_watch import RankFailedError

__all__ = ["JobRecord", "SweepReport", "collect_jobs", "sweep_table", "write_csv"]

JOB_FILE = "job.json"
SUMMARY_FILE = "summary.json"
ERROR_FILE = "error.txt"
CSV_FILE = "sweep.csv"
COMPLETED, FAILED = "completed", "failed"
PLAIN_WIDTH = 200
"""Columns of a table that goes to a file or a pipe, where nothing is gained by squeezing it."""


@dataclass(frozen=True)
class JobRecord:
    """One job of a sweep.

    Attributes:
        number: Its place in the sweep.
        overrides: What was set for it on the command line.
        status: ``"completed"`` or ``"failed"``.
        error: First line of its error, empty if there was none.
        objective: What it returned to the sweeper, ``None`` if that is no number.
        sweep: Which sweep wrote the record.
        directory: Where it ran.
        summary: Its ``summary.json``; empty for a failed job, whose file may be that of an earlier run.
    """

    number: int
    overrides: tuple[str, ...]
    status: str = COMPLETED
    error: str = ""
    objective: float | None = None
    sweep: str = ""
    directory: Path = Path()
    summary: dict[str, Any] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """Column -> value; seconds, tokens and bytes are plain numbers, missing ones ``None``."""
        summary = self.summary
        step, loss = summary.get("step_time_ms") or {}, summary.get("train_loss") or {}
        traffic = summary.get("communication_bytes_per_step") or {}
        row = {
            "job": self.number,
            "overrides": " ".join(self.overrides),
            "status": self.status,
            "strategy": summary.get("strategy"),
            "world_size": summary.get("world_size"),
            "step_time_ms": step.get("median"),
            "step_time_ms_p90": step.get("p90"),
            "tokens_per_second": summary.get("tokens_per_second"),
            "peak_memory_bytes": _largest(summary.get("peak_memory_bytes")),
            "model_state_bytes": _largest(summary.get("model_state_bytes")),
            "communication_bytes_per_step": sum(traffic.values()) if summary else None,
        }
        row |= {f"communication_bytes_per_step.{axis}": size for axis, size in traffic.items()}
        return row | {
            "train_loss": loss.get("last"),
            "val_loss": summary.get("val_loss"),
            "objective": self.objective,
            "error": self.error,
        }


def collect_jobs(directory: Path, sweep: str | None = None) -> list[JobRecord]:
    """The jobs below a sweep's directory, by number.

    Args:
        directory: The sweep's directory.
        sweep: Only jobs of this sweep; ``None`` takes all, since a directory may have been used twice.

    Raises:
        ValueError: If there is none.
    """
    records = [_read_job(path) for path in directory.rglob(JOB_FILE)]
    chosen = [record for record in records if sweep is None or record.sweep == sweep]
    if not chosen:
        raise ValueError(f"No {JOB_FILE} below {directory}: it is not the directory of a sweep with the SweepReport.")
    return sorted(chosen, key=lambda record: record.number)


def sweep_table(records: Sequence[JobRecord]) -> Table:
    """The jobs as a table. Overrides that all jobs share stand in its title, a column that is empty is left out."""
    shared = set(records[0].overrides).intersection(*(record.overrides for record in records[1:]))
    common = [text for text in records[0].overrides if text in shared] if len(records) > 1 else []
    rows = [record.row() for record in records]
    columns = [column for column in _COLUMNS if any(row.get(column.name) not in (None, "") for row in rows)]
    table = Table(title=" ".join(["Sweep", *common]), title_justify="left")
    for column in columns:
        table.add_column(column.title, justify=column.justify, overflow="fold")
    for record, row in zip(records, rows, strict=True):
        row["overrides"] = " ".join(text for text in record.overrides if text not in common) or "(defaults)"
        style = "red" if record.status == FAILED else None
        table.add_row(*(column.cell(row.get(column.name)) for column in columns), style=style)
    return table


def write_csv(records: Sequence[JobRecord], path: Path) -> None:
    """Write one line per job; every column of every job is there, numbers in plain units."""
    rows = [record.row() for record in records]
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


class SweepReport(Callback):
    """Keeps a multirun going over failing jobs, and compares its jobs at the end.

    Put it last among ``hydra.callbacks``: the end of a sweep with failed jobs raises ``SystemExit(1)``, and Hydra
    notifies callbacks from the last to the first. A failed job returns NaN to the sweeper, which no sweeper takes for a
    good value. Does nothing in a single run.
    """

    def __init__(self) -> None:
        self._sweep = ""

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Name the sweep, to tell its jobs from those of an earlier one in the same directory."""
        self._sweep = uuid.uuid4().hex

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Record the job, and let the sweep go on if it failed."""
        if config.hydra.mode != RunMode.MULTIRUN:
            return
        directory = Path(config.hydra.runtime.output_dir)
        failed = job_return.status == JobStatus.FAILED
        error = job_return._return_value if failed else None
        content = {
            "number": int(config.hydra.job.num),
            "overrides": list(job_return.overrides or []),
            "status": FAILED if failed else COMPLETED,
            "error": _first_line(error) if error is not None else "",
            "objective": None if failed else _number(job_return.return_value),
            "sweep": self._sweep,
        }
        (directory / JOB_FILE).write_text(json.dumps(content, indent=2), encoding="utf-8")
        with suppress(FileNotFoundError):
            (directory / ERROR_FILE).unlink()
        if error is not None:
            _tell(content, error, directory)
            job_return.status, job_return.return_value = JobStatus.COMPLETED, math.nan

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the table, write ``sweep.csv`` and end with exit code 1 if a job failed.

        Raises:
            SystemExit: If a job failed.
        """
        directory = Path(str(OmegaConf.select(config, "hydra.sweep.dir")))
        records = collect_jobs(directory, self._sweep)
        write_csv(records, directory / CSV_FILE)
        _print_table(records)
        failed = [record for record in records if record.status == FAILED]
        if failed:
            names = ", ".join(f"#{record.number} ({record.directory / ERROR_FILE})" for record in failed)
            print(f"{len(failed)} of {len(records)} jobs failed: {names}", file=sys.stderr, flush=True)
            raise SystemExit(1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of a finished sweep: ``python -m lightning_par.report SWEEP_DIR``.

    Args:
        arguments: Instead of the command line's.

    Returns:
        The exit code: 0, or 1 if a job failed, or 2 if there is nothing to show.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if len(given) != 1 or given[0] in ("-h", "--help"):
        print("Usage: python -m lightning_par.report SWEEP_DIR", file=sys.stderr)
        return 2
    try:
        records = collect_jobs(Path(given[0]))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    _print_table(records)
    return int(any(record.status == FAILED for record in records))


@dataclass(frozen=True)
class _Column:
    """A column of the table: a row's entry, its title, and the unit it is shown in."""

    name: str
    title: str
    scale: float | None = None
    digits: int = 0
    justify: Any = "right"

    def cell(self, value: Any) -> str:
        if value is None:
            return ""
        return str(value) if self.scale is None else f"{value / self.scale:,.{self.digits}f}"


_MIB = 2.0**20
_COLUMNS = (
    _Column("job", "job"),
    _Column("overrides", "overrides", justify="left"),
    _Column("world_size", "ranks"),
    _Column("step_time_ms", "step ms", 1.0, 1),
    _Column("tokens_per_second", "tokens/s", 1.0),
    _Column("peak_memory_bytes", "peak MiB/rank", _MIB),
    _Column("model_state_bytes", "state MiB/rank", _MIB, 1),
    _Column("communication_bytes_per_step", "MiB/step sent", _MIB, 1),
    _Column("train_loss", "train loss", 1.0, 4),
    _Column("val_loss", "val loss", 1.0, 4),
    _Column("objective", "objective", 1.0, 4),
    _Column("error", "error", justify="left"),
)


def _print_table(records: Sequence[JobRecord]) -> None:
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=PLAIN_WIDTH)
    console.print(sweep_table(records))


def _read_job(path: Path) -> JobRecord:
    content = json.loads(path.read_text(encoding="utf-8"))
    summary_path = path.with_name(SUMMARY_FILE)
    has_summary = content["status"] == COMPLETED and summary_path.exists()
    summary = json.loads(summary_path.read_text(encoding="utf-8")) if has_summary else {}
    return JobRecord(**content | {"overrides": tuple(content["overrides"])}, directory=path.parent, summary=summary)


def _tell(content: dict[str, Any], error: BaseException, directory: Path) -> None:
    """Write the error to the job's directory and to stderr. A rank's error brings the traceback that matters."""
    is_rank_error = isinstance(error, RankFailedError)
    text = str(error) if is_rank_error else "".join(traceback.format_exception(type(error), error, error.__traceback__))
    (directory / ERROR_FILE).write_text(text, encoding="utf-8")
    what = f"Job #{content['number']} ({' '.join(content['overrides'])}) failed, the sweep goes on:"
    print(f"{what}\n{text}", file=sys.stderr, flush=True)


def _first_line(error: BaseException) -> str:
    if isinstance(error, RankFailedError):
        return str(error).partition("\n")[0]
    return traceback.format_exception_only(error)[-1].strip().partition("\n")[0]


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number else None


def _largest(per_rank: Any) -> float | None:
    """The largest entry of a list over ranks; an entry may itself be a dict of parts."""
    if not per_rank:
        return None
    entries = per_rank if isinstance(per_rank, list) else [per_rank]
    return max(sum(entry.values()) if isinstance(entry, dict) else entry for entry in entries)


if __name__ == "__main__":
    raise SystemExit(main())
