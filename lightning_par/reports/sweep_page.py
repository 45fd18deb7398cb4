"""``sweep.html``: what the jobs of a sweep measured, side by side, and what the planner would have said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_par.picture import read_metrics
from lightning_par.planner.words import gigabytes, seconds
from lightning_par.reports.jobs import FAILED, JobRecord, filled_columns, own_overrides, shared_overrides
from lightning_par.reports.page import write_page
from lightning_par.reports.pieces import Bar, BarChart, Cell, Curve, CurveChart, Fact, Segment, Table
from lightning_par.reports.predictions import Prediction, Predictor

__all__ = ["write_sweep_page"]

_CURVES = {"train_loss": "Training loss", "val_loss": "Validation loss"}
_KINDS = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class _Job:
    """A job with what the page says of it."""

    label: str
    record: JobRecord
    row: dict[str, Any]
    prediction: Prediction


def write_sweep_page(records: Sequence[JobRecord], path: Path, predictor: Predictor | None = None) -> Path:
    """Write the page.

    Args:
        records: The jobs, by number.
        path: The file; its directory must exist.
        predictor: Predicts what completed jobs measured; one is made by default.

    Raises:
        ValueError: If the directory does not exist.
    """
    predictor, shared = predictor or Predictor(), shared_overrides(records)
    jobs = [
        _Job(
            f"#{record.number} {own_overrides(record, shared)}",
            record,
            record.row(),
            predictor.predict(record) if record.summary else Prediction(),
        )
        for record in records
    ]
    return write_page(path, "sweep.html.j2", **_context(jobs, shared))


def _context(jobs: Sequence[_Job], shared: Sequence[str]) -> dict[str, Any]:
    done = [job for job in jobs if job.record.summary]
    failed = [job for job in jobs if job.record.status == FAILED]
    curves = [_curves(done, name) for name in _CURVES]
    return {
        "title": f"Sweep of {len(jobs)} job{'s' * (len(jobs) != 1)}",
        "shared": " ".join(shared),
        "key_facts": _key_facts(done, len(failed)),
        "time": _time_chart(done),
        "memory": _memory_chart(done),
        "state": _state_chart(done),
        "traffic": _traffic_chart(done),
        "curves": [chart for chart in curves if chart.curves],
        "table": _table(jobs, shared),
        "predictions": _predictions(done),
        "unpredicted": [job for job in done if job.prediction.reason],
        "failed": failed,
    }


def _key_facts(done: Sequence[_Job], num_failed: int) -> list[Fact]:
    facts = []
    for column, name, say, best in (
        ("step_time_ms", "shortest step", lambda value: seconds(value / 1000), min),
        ("tokens_per_second", "most tokens/s", lambda value: f"{value:,.0f}", max),
        ("peak_memory_bytes", "least memory a rank", gigabytes, min),
        ("val_loss", "lowest validation loss", lambda value: f"{value:.4f}", min),
    ):
        known = [job for job in done if job.row[column] is not None]
        if known:
            job = best(known, key=lambda one: one.row[column])  # type: ignore[operator]
            facts.append(Fact(f"{name}: {job.label}", say(job.row[column])))
    return [*facts, *([Fact("failed", str(num_failed))] if num_failed else [])]


# Charts


def _time_chart(done: Sequence[_Job]) -> BarChart:
    bars = []
    for job in (job for job in done if job.row["step_time_ms"] is not None):
        median, p90, rate = (job.row[name] for name in ("step_time_ms", "step_time_ms_p90", "tokens_per_second"))
        measured, text = median / 1000, seconds(median / 1000)
        words = [text, f"p90 {seconds(p90 / 1000)}", *([f"{rate:,.0f} tokens/s"] if rate else [])]
        below: tuple[Bar, ...] = ()
        if job.prediction.time is not None:
            predicted = job.prediction.time.total
            words.append(f"predicted {seconds(predicted)}")
            segment = Segment("predicted", predicted, seconds(predicted))
            below = (Bar(f"{job.label}, predicted", (segment,), seconds(predicted)),)
        bars.append(Bar(job.label, (Segment("measured", measured, text),), ", ".join(words), below=below))
    return BarChart(tuple(bars), caption="Median of the optimizer steps, loading of data included.")


def _memory_chart(done: Sequence[_Job]) -> BarChart:
    bars = []
    for job in done:
        ranks = [
            (Segment("peak", size, gigabytes(size)),) for size in job.record.summary.get("peak_memory_bytes") or []
        ]
        if ranks:
            bars.append(_by_rank(job, ranks, job.prediction.memory_bytes))
    caption = "The most that each rank took: allocated on its GPU, or resident on the host with all of Python."
    return BarChart(tuple(bars), caption=caption, alike=True)


def _state_chart(done: Sequence[_Job]) -> BarChart:
    found = ((job, job.record.summary.get("model_state_by_place")) for job in done)
    bars = [_by_rank(job, [_state_segments(places) for places in ranks]) for job, ranks in found if ranks]
    return BarChart(tuple(bars), caption="Read off the tensors of each rank after a step.", alike=True)


def _state_segments(places: dict[str, dict[str, int]]) -> tuple[Segment, ...]:
    return tuple(
        Segment(kind, size, gigabytes(size), place)
        for place, kinds in places.items()
        for kind in _KINDS
        if (size := kinds.get(kind, 0))
    )


def _by_rank(job: _Job, ranks: Sequence[tuple[Segment, ...]], predicted: int = 0) -> Bar:
    bars = [
        Bar(f"{job.label}, rank {rank}", parts, gigabytes(sum(part.value for part in parts)))
        for rank, parts in enumerate(ranks)
    ]
    largest = max(bars, key=lambda bar: bar.total)
    text = largest.text if len(bars) == 1 else f"{len(bars)} ranks, at most {largest.text}"
    if predicted:
        words = gigabytes(predicted)
        text += f", predicted {words}"
        bars.append(Bar(f"{job.label}, predicted", (Segment("predicted", predicted, words),), words))
    first, *others = bars
    return Bar(job.label, first.segments, text, below=tuple(others))


def _traffic_chart(done: Sequence[_Job]) -> BarChart:
    bars = []
    for job in done:
        moved = job.record.summary.get("communication_bytes_per_step") or {}
        text, below = gigabytes(sum(moved.values())), ()
        if job.prediction.time is not None:
            predicted = job.prediction.time.traffic
            words = gigabytes(sum(predicted.values()))
            below = (Bar(f"{job.label}, predicted", _axes(predicted.items()), words),)  # type: ignore[assignment]
            text += f", predicted {words}"
        bars.append(Bar(job.label, _axes(moved.items()), text, below=below))
    drawn = any(bar.total for bar in bars)
    caption = "Sent by one rank in a step, by mesh axis; the thin bar is the planner's prediction."
    return BarChart(tuple(bars) if drawn else (), caption=caption)


def _axes(moved: Iterable[tuple[str, float]]) -> tuple[Segment, ...]:
    return tuple(Segment(axis, size, gigabytes(size)) for axis, size in moved)


def _curves(done: Sequence[_Job], metric: str) -> CurveChart:
    curves = []
    for job in done:
        files = sorted(job.record.directory.rglob("metrics.csv"))
        points = read_metrics(files[0]).get(metric, []) if files else []
        if points:
            curves.append(Curve(job.label, points))
    return CurveChart(curves, _CURVES[metric])


# Tables


def _table(jobs: Sequence[_Job], shared: Sequence[str]) -> Table:
    columns = [column for column in filled_columns([job.row for job in jobs]) if column.name not in ("job", "error")]
    # What a job is comes first, since it is the heading of its card on a narrow screen.
    columns.sort(key=lambda column: column.name != "overrides")
    rows = []
    for job in jobs:
        row = job.row | {"overrides": f"#{job.record.number} {own_overrides(job.record, shared)}"}
        cells = [
            Cell(column.cell(row.get(column.name)), "" if column.name == "overrides" else "number")
            for column in columns
        ]
        rows.append(cells)
    kinds = ["bad" if job.record.status == FAILED else "" for job in jobs]
    return Table([column.title for column in columns], rows, kinds)


def _predictions(done: Sequence[_Job]) -> Table:
    names = ("job", "state bytes", "predicted", "moved a step", "predicted", "step", "predicted", "ratio")
    rows = []
    for job in done:
        if job.prediction.time is None:
            continue
        step, predicted = job.row["step_time_ms"], job.prediction.time.total
        figures = [
            f"{job.row['model_state_bytes'] or 0:,.0f}",
            f"{job.prediction.state_bytes:,.0f}",
            gigabytes(job.row["communication_bytes_per_step"] or 0),
            gigabytes(sum(job.prediction.time.traffic.values())),
            seconds(step / 1000) if step else "",
            seconds(predicted),
            f"{1000 * predicted / step:.2f}" if step else "",
        ]
        rows.append([Cell(job.label), *(Cell(text, "number") for text in figures)])
    return Table(names, rows)
