"""The jobs of a sweep as they were recorded: what each was, did and measured."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "COMPLETED",
    "ERROR_FILE",
    "FAILED",
    "JOB_FILE",
    "Column",
    "JobRecord",
    "collect_jobs",
    "filled_columns",
    "own_overrides",
    "shared_overrides",
    "write_csv",
]

JOB_FILE = "job.json"
SUMMARY_FILE = "summary.json"
ERROR_FILE = "error.txt"
COMPLETED, FAILED = "completed", "failed"


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
        config: What it was configured with, resolved: the groups that a prediction needs, where there are any.
        directory: Where it ran.
        summary: Its ``summary.json``; empty for a failed job, whose file may be that of an earlier run.
    """

    number: int
    overrides: tuple[str, ...]
    status: str = COMPLETED
    error: str = ""
    objective: float | None = None
    sweep: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    directory: Path = Path()
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def error_text(self) -> str:
        """The whole of its error, as it was written down."""
        path = self.directory / ERROR_FILE
        return path.read_text(encoding="utf-8") if path.exists() else self.error

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


def write_csv(records: Sequence[JobRecord], path: Path) -> None:
    """Write one line per job; every column of every job is there, numbers in plain units."""
    rows = [record.row() for record in records]
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def shared_overrides(records: Sequence[JobRecord]) -> list[str]:
    """Overrides that all of several jobs have."""
    shared = set(records[0].overrides).intersection(*(record.overrides for record in records[1:]))
    return [text for text in records[0].overrides if text in shared] if len(records) > 1 else []


def own_overrides(record: JobRecord, shared: Sequence[str]) -> str:
    """What sets a job apart."""
    return " ".join(text for text in record.overrides if text not in shared) or "(defaults)"


def filled_columns(rows: Sequence[dict[str, Any]]) -> list[Column]:
    """The columns of the table in which any row has an entry."""
    return [column for column in COLUMNS if any(row.get(column.name) not in (None, "") for row in rows)]


@dataclass(frozen=True)
class Column:
    """A column of the table: a row's entry, its title, and the unit it is shown in."""

    name: str
    title: str
    scale: float | None = None
    digits: int = 0
    justify: Any = "right"

    def cell(self, value: Any) -> str:
        """A value in words; empty for a missing one."""
        if value is None:
            return ""
        return str(value) if self.scale is None else f"{value / self.scale:,.{self.digits}f}"


_MIB = 2.0**20
COLUMNS = (
    Column("job", "job"),
    Column("overrides", "overrides", justify="left"),
    Column("world_size", "ranks"),
    Column("step_time_ms", "step ms", 1.0, 1),
    Column("tokens_per_second", "tokens/s", 1.0),
    Column("peak_memory_bytes", "peak MiB/rank", _MIB),
    Column("model_state_bytes", "state MiB/rank", _MIB, 1),
    Column("communication_bytes_per_step", "MiB/step sent", _MIB, 1),
    Column("train_loss", "train loss", 1.0, 4),
    Column("val_loss", "val loss", 1.0, 4),
    Column("objective", "objective", 1.0, 4),
    Column("error", "error", justify="left"),
)


def _read_job(path: Path) -> JobRecord:
    content = json.loads(path.read_text(encoding="utf-8"))
    summary_path = path.with_name(SUMMARY_FILE)
    has_summary = content["status"] == COMPLETED and summary_path.exists()
    summary = json.loads(summary_path.read_text(encoding="utf-8")) if has_summary else {}
    return JobRecord(**content | {"overrides": tuple(content["overrides"])}, directory=path.parent, summary=summary)


def _largest(per_rank: Any) -> float | None:
    """The largest entry of a list over ranks; an entry may itself be a dict of parts."""
    if not per_rank:
        return None
    entries = per_rank if isinstance(per_rank, list) else [per_rank]
    return max(sum(entry.values()) if isinstance(entry, dict) else entry for entry in entries)
