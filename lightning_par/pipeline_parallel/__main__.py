"""Prints, checks and times a pipeline schedule without starting a process.

python -m lightning_par.pipeline_parallel --schedule interleaved_1f1b --stages 4 --microbatches 8 --virtual 2
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lightning_par.pipeline_parallel.formulas import Case, published
from lightning_par.pipeline_parallel.grid import COMPUTATIONS, build_grid
from lightning_par.pipeline_parallel.picture import draw_timeline
from lightning_par.pipeline_parallel.schedules import SCHEDULES, check_num_virtual_stages, schedule_named
from lightning_par.pipeline_parallel.simulate import Costs, Span, Timeline, peak_activations, simulate

_COLOURS = {"F": "blue", "B": "green", "I": "cyan", "W": "yellow"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = _make_parser()
    options = parser.parse_args(arguments)
    try:
        report, timeline = _examine(options)
        if options.picture:
            title = f"{options.schedule}, {options.stages} ranks, {report['num_microbatches']} micro-batches"
            draw_timeline(timeline, options.picture, title)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if options.json:
        print(json.dumps(report))
    else:
        _print(report, timeline)
    return 0


def _make_parser() -> argparse.ArgumentParser:
    names = "\n".join(f"  {name:<24} {schedule.summary}" for name, schedule in SCHEDULES.items())
    parser = _Parser(
        prog="python -m lightning_par.pipeline_parallel",
        description="Print what each rank of a pipeline does, check that it can run, and simulate how long ranks idle "
        "and how many activations they keep. No process is started.",
        epilog=f"schedules:\n{names}\n\nactions: " + ", ".join(f"{kind} {text}" for kind, text in COMPUTATIONS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--schedule", default="1f1b", metavar="NAME", help="one of those below (default: %(default)s)")
    add("--stages", type=int, default=4, metavar="P", help="pipeline ranks, pipeline_parallel_size (default: 4)")
    add("--microbatches", type=int, metavar="M", help="micro-batches in a step, num_microbatches (default: 4 P)")
    add("--virtual", type=int, metavar="V", help="stages on each rank, num_virtual_stages (default: the schedule's)")
    add(
        "--costs",
        type=_times,
        default=(1.0, 1.0, 1.0),
        metavar="F,I,W",
        help="times of a rank's forward, input gradient and weight gradient for one micro-batch, of which each of its "
        "stages takes 1/V; a whole backward takes I + W (default: 1,1,1)",
    )
    add("--communication", type=float, default=0.0, metavar="T", help="time of a message (default: 0)")
    add("--picture", type=Path, metavar="FILE", help="draw it, as .png or .svg")
    add("--json", action="store_true", help="print all figures and every action, messages included, as JSON")
    return parser


def _times(text: str) -> tuple[float, ...]:
    try:
        forward, inputs, weights = map(float, text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be three numbers, such as 1,1,1") from None
    return forward, inputs, weights


def _examine(options: argparse.Namespace) -> tuple[dict[str, Any], Timeline]:
    schedule = schedule_named(options.schedule)
    p, v = options.stages, check_num_virtual_stages(schedule, options.virtual)
    m = 4 * p if options.microbatches is None else options.microbatches
    grid = build_grid(schedule, p, m, v)
    f, i, w = (time / v for time in options.costs)
    timeline = simulate(grid, Costs(f, i, w, options.communication))
    case = Case(p, m, v, f, i, w)
    formulas = published(schedule, case)
    return {
        "schedule": schedule.name,
        "pipeline_parallel_size": p,
        "num_microbatches": m,
        "num_virtual_stages": v,
        "total_time": timeline.total_time,
        "bubble_time": timeline.bubble_time,
        "bubble_share": timeline.bubble_share,
        "published_bubble_time": formulas.bubble(case) if formulas else None,
        "peak_activations": peak_activations(grid),
        "published_peak_activations": formulas.peak_activations(case) if formulas else None,
        "paper": formulas.paper if formulas else None,
        "ranks": [[str(action) for action in actions] for actions in grid.ranks],
    }, timeline


def _print(report: dict[str, Any], timeline: Timeline) -> None:
    console = Console(highlight=False)
    numbers = ("pipeline_parallel_size", "num_microbatches", "num_virtual_stages")
    console.print(f"[bold]{report['schedule']}[/]: " + ", ".join(f"{name}={report[name]}" for name in numbers))
    console.print(_grid_table(timeline))
    messages = sum(action.kind.startswith("SEND") for actions in timeline.grid.ranks for action in actions)
    console.print(f"checked: each action once and after what it needs, {messages} messages received as sent")
    paper = f"arXiv {report['paper']}" if report["paper"] else "no published formula fits these numbers"
    summary = Table("", "found", paper, box=None, pad_edge=False, header_style="dim")
    summary.add_row("total time", f"{report['total_time']:g}", "")
    bubble = f"{_briefly(report['bubble_time'])}, {report['bubble_share']:.1%} of the time"
    summary.add_row("bubble of a rank", bubble, _briefly([report["published_bubble_time"]]))
    peaks = _briefly(report["peak_activations"])
    summary.add_row("peak activations", peaks, _briefly([report["published_peak_activations"]]))
    console.print(summary)


def _grid_table(timeline: Timeline) -> Table:
    """A column for each rank and a row for each time at which an action starts."""
    headings = (f"rank {rank}" for rank in range(len(timeline.ranks)))
    table = Table("time", *headings, box=SIMPLE_HEAD, pad_edge=False)
    tick = timeline.total_time * 1e-9  # times closer than that are one
    starts = [{round(span.start / tick): span for span in spans} for spans in timeline.ranks]
    running: list[Span | None] = [None] * len(starts)
    for time in sorted(set().union(*starts)):
        cells = []
        for rank, spans in enumerate(starts):
            begins = time in spans
            running[rank] = latest = spans[time] if begins else running[rank]
            goes_on = latest is not None and round(latest.end / tick) > time
            cells.append(_cell(latest, begins) if latest and goes_on else "[dim].[/]")
        table.add_row(f"{time * tick:g}", *cells)
    return table


def _cell(span: Span, begins: bool) -> str:
    colour = _COLOURS[span.action.kind]
    return f"[{colour}]{span.action if begins else '|'}[/]"


def _briefly(figures: list[Any]) -> str:
    """One figure if all ranks have the same, else one for each, from rank 0 on."""
    texts = ["" if figure is None else f"{figure:g}" for figure in figures]
    return texts[0] if len(set(texts)) == 1 else " ".join(texts)


if __name__ == "__main__":
    sys.exit(main())
