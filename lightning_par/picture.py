"""A picture of a run: its loss, what its ranks hold and what they move."""

from __future__ import annotations

import csv
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["draw_run", "read_metrics"]

_DPI = 120
_HATCHES = {"device": None, "host": "//", "disk": "xx"}
_SERIES = {"train_loss": "training", "val_loss": "validation"}


def draw_run(output_dir: Path) -> Path | None:
    """Draw ``run.png`` from the ``summary.json`` and ``metrics.csv`` below a run's directory.

    Args:
        output_dir: The run's directory.

    Returns:
        The picture's path; ``None`` if matplotlib is not installed or the run logged no metrics.
    """
    summary = output_dir / "summary.json"
    metrics = next(iter(sorted(output_dir.rglob("metrics.csv"))), None)
    if find_spec("matplotlib") is None or metrics is None or not summary.exists():
        return None
    path = output_dir / "run.png"
    _draw(read_metrics(metrics), json.loads(summary.read_text()), path)
    return path


def read_metrics(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Points ``(step, value)`` of each metric in a file of Lightning's CSV logger."""
    series: dict[str, list[tuple[int, float]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and name not in ("step", "epoch"):
                    series.setdefault(name, []).append((int(row["step"]), float(value)))
    return series


def _draw(metrics: dict[str, list[tuple[int, float]]], summary: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure  # heavy, and not needed unless a picture is drawn

    figure = Figure(figsize=(11, 3.6), layout="constrained", dpi=_DPI)
    loss, state, traffic = figure.subplots(1, 3, width_ratios=(3, 1, 1))
    for name, label in _SERIES.items():
        if points := metrics.get(name):
            loss.plot(*zip(*points, strict=True), label=label, marker="o" if name == "val_loss" else None)
    loss.set(xlabel="optimizer step", ylabel="loss (nats per token)", title=_title(summary))
    if loss.lines:
        loss.legend(frameon=False)
    _draw_state(state, summary["model_state_by_place"])
    moved = {axis: number / 1e6 for axis, number in summary["communication_bytes_per_step"].items()}
    traffic.bar(list(moved), list(moved.values()))
    traffic.set(xlabel="mesh axis", title="moved a step (MB)")
    for axes in (loss, state, traffic):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _draw_state(axes: Any, by_rank: list[dict[str, dict[str, int]]]) -> None:
    """Who holds what: a bar a rank, a colour a kind of state, a hatching a place."""
    ranks = range(len(by_rank))
    base = [0.0 for _ in ranks]
    for place in dict.fromkeys(place for places in by_rank for place in places):
        for number, kind in enumerate(("parameters", "gradients", "optimizer")):
            sizes = [places.get(place, {}).get(kind, 0) / 1e6 for places in by_rank]
            if any(sizes):
                label = f"{kind}" if place == "device" else f"{kind}, {place}"
                axes.bar(ranks, sizes, bottom=base, color=f"C{number}", hatch=_HATCHES[place], ec="white", label=label)
            base = [below + size for below, size in zip(base, sizes, strict=True)]
    axes.set(xlabel="rank", title="model state (MB)", xticks=ranks, ylim=(0, 1.5 * max(base, default=1.0) or 1.0))
    axes.legend(frameon=False, fontsize=7, loc="upper center")


def _title(summary: dict[str, Any]) -> str:
    degrees = " x ".join(f"{axis} {size}" for axis, size in summary["layout"].items() if size > 1)
    rate = summary["tokens_per_second"]
    speed = f", {rate:,.0f} tokens/s" if rate else ""
    return f"{summary['strategy']} on {degrees or 'one rank'}{speed}"
