"""Jobs of a Hydra sweep side by side, and a sweep that outlives its failing jobs.

:class:`SweepReport` is a Hydra callback. It writes a ``job.json`` into each job's directory, turns a failing job into a
recorded one so that the sweep goes on, and at the end compares all jobs in a table, in ``sweep.csv`` and on a page,
``sweep.html``. If any job failed, the sweep ends with exit code 1. ``python -m lightning_par.report SWEEP_DIR`` prints
the table and writes the page again.
"""

from __future__ import annotations

import json
import math
import sys
import traceback
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table

from lightning_par.rank_watch import RankFailedError
from lightning_par.reports.jobs import (
    COMPLETED,
    ERROR_FILE,
    FAILED,
    JOB_FILE,
    JobRecord,
    collect_jobs,
    filled_columns,
    own_overrides,
    shared_overrides,
    write_csv,
)
from lightning_par.reports.sweep_page import write_sweep_page

__all__ = ["JobRecord", "SweepReport", "collect_jobs", "sweep_table", "write_csv"]

CSV_FILE = "sweep.csv"
PAGE_FILE = "sweep.html"
_PLANNED_GROUPS = ("model", "data", "optimizer", "strategy", "trainer", "launch")
PLAIN_WIDTH = 200
"""Columns of a table that goes to a file or a pipe, where nothing is gained by squeezing it."""


def sweep_table(records: Sequence[JobRecord]) -> Table:
    """The jobs as a table. Overrides that all jobs share stand in its title, a column that is empty is left out."""
    common = shared_overrides(records)
    rows = [record.row() for record in records]
    columns = filled_columns(rows)
    table = Table(title=" ".join(["Sweep", *common]), title_justify="left")
    for column in columns:
        table.add_column(column.title, justify=column.justify, overflow="fold")
    for record, row in zip(records, rows, strict=True):
        row["overrides"] = own_overrides(record, common)
        style = "red" if record.status == FAILED else None
        table.add_row(*(column.cell(row.get(column.name)) for column in columns), style=style)
    return table


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
            "config": _planned_groups(config),
        }
        (directory / JOB_FILE).write_text(json.dumps(content, indent=2), encoding="utf-8")
        with suppress(FileNotFoundError):
            (directory / ERROR_FILE).unlink()
        if error is not None:
            _tell(content, error, directory)
            job_return.status, job_return.return_value = JobStatus.COMPLETED, math.nan

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        """Print the table, write ``sweep.csv`` and ``sweep.html`` and end with exit code 1 if a job failed.

        Raises:
            SystemExit: If a job failed.
        """
        directory = Path(str(OmegaConf.select(config, "hydra.sweep.dir")))
        records = collect_jobs(directory, self._sweep)
        write_csv(records, directory / CSV_FILE)
        _print_table(records)
        _write_page(records, directory)
        failed = [record for record in records if record.status == FAILED]
        if failed:
            names = ", ".join(f"#{record.number} ({record.directory / ERROR_FILE})" for record in failed)
            print(f"{len(failed)} of {len(records)} jobs failed: {names}", file=sys.stderr, flush=True)
            raise SystemExit(1)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of a finished sweep and write its page: ``python -m lightning_par.report SWEEP_DIR``.

    Args:
        arguments: Instead of the command line's.

    Returns:
        The exit code: 0, or 1 if a job failed, or 2 if there is nothing to show.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    if len(given) != 1 or given[0] in ("-h", "--help"):
        print("Usage: python -m lightning_par.report SWEEP_DIR", file=sys.stderr)
        return 2
    directory = Path(given[0])
    try:
        records = collect_jobs(directory)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    _print_table(records)
    _write_page(records, directory)
    return int(any(record.status == FAILED for record in records))


def _print_table(records: Sequence[JobRecord]) -> None:
    terminal = Console()
    console = terminal if terminal.is_terminal else Console(width=PLAIN_WIDTH)
    console.print(sweep_table(records))


def _write_page(records: Sequence[JobRecord], directory: Path) -> None:
    path = directory / PAGE_FILE
    try:
        write_sweep_page(records, path)
    except Exception as error:  # a picture of the sweep must not cost its exit code, which Hydra would drop then
        print(f"{path} could not be written: {_first_line(error)}", file=sys.stderr, flush=True)
    else:
        print(f"The same as a page: {path}", flush=True)


def _planned_groups(config: DictConfig) -> dict[str, Any]:
    """The configuration's groups that a prediction needs, resolved while all resolvers are there."""
    groups = {name: config[name] for name in _PLANNED_GROUPS if OmegaConf.is_dict(OmegaConf.select(config, name))}
    try:
        return {name: OmegaConf.to_container(node, resolve=True) for name, node in groups.items()}
    except OmegaConfBaseException:  # an application's own groups of these names
        return {}


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


if __name__ == "__main__":
    raise SystemExit(main())
