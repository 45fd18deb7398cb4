"""A picture of a schedule: what each rank does, when, and where it waits."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_par.pipeline_parallel.grid import COMPUTATIONS
from lightning_par.pipeline_parallel.simulate import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_timeline"]

_COLOURS = {"F": "#4472b8", "B": "#4a9a63", "I": "#3a9fa3", "W": "#dd9a3c"}
_IDLE = "#edf0f3"
_INK = "#2b3440"
_DPI = 160
_WIDTH = 13.0
_ROW = 0.5
"""Inches of a rank's row."""
_DIGIT = 0.065
"""Inches of a digit."""
_PALEST = 0.6
"""How far the last stage of a rank is tinted towards white."""


def draw_timeline(timeline: Timeline, path: Path, title: str = "") -> Path:
    """Draw a row for each rank, a box for each computation, coloured by kind and tinted by the stage on its rank.

    Args:
        timeline: What was simulated.
        path: Where to write; ``.png`` and ``.svg`` say the format.
        title: Stands above, before the share of the bubble.

    Returns:
        The path.

    Raises:
        ValueError: If the path ends in neither, its directory does not exist, or matplotlib is not installed.
    """
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"picture={str(path)!r} must end in .png or .svg.")
    if not path.parent.is_dir():
        raise ValueError(f"picture={str(path)!r}: there is no directory {str(path.parent)!r}. Create it first.")
    if find_spec("matplotlib") is None:
        raise ValueError("A picture needs matplotlib. Install it with: pip install lightning-par[plot]")
    from matplotlib.figure import Figure  # heavy, and not needed unless a picture is drawn

    num_ranks = len(timeline.ranks)
    figure = Figure(figsize=(_WIDTH, 1.1 + _ROW * num_ranks), layout="constrained", dpi=_DPI)
    axes = figure.subplots()
    for rank in range(num_ranks):
        _draw_rank(axes, timeline, rank)
    several = timeline.grid.num_stages > num_ranks
    axes.set(xlim=(0, timeline.total_time), ylim=(num_ranks - 0.5, -0.5))
    axes.set_xlabel("time" + (" (paler: a rank's later stages)" if several else ""), color=_INK)
    axes.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    axes.tick_params(length=0, colors=_INK)
    axes.spines[:].set_visible(False)
    heading = f"{title}: " if title else ""
    figure.suptitle(f"{heading}bubble {timeline.bubble_share:.1%}", x=0.008, ha="left", fontsize=13, color=_INK)
    _add_legend(figure, timeline)
    figure.savefig(path)
    return path


def _draw_rank(axes: Axes, timeline: Timeline, rank: int) -> None:
    stages = timeline.grid.stages_of(rank)
    room = _DIGIT * (len(str(timeline.grid.num_microbatches - 1)) + 0.3)  # all numbers of a kind are shown, or none
    axes.barh(rank, timeline.total_time, height=0.86, color=_IDLE)
    for (stage, kind, microbatch), start, end in timeline.ranks[rank]:
        paleness = stages.index(stage) / max(1, len(stages) - 1)
        colour = _tint(_COLOURS[kind], paleness * _PALEST)
        axes.barh(rank, end - start, left=start, height=0.86, color=colour, edgecolor="white", linewidth=0.7)
        if (end - start) / timeline.total_time * (_WIDTH - 1) > room:
            ink = "white" if paleness < 0.5 else _INK
            axes.text((start + end) / 2, rank, str(microbatch), ha="center", va="center_baseline", size=7, color=ink)


def _add_legend(figure: Figure, timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    present = {span.action.kind for spans in timeline.ranks for span in spans}
    labels = {kind: text for kind, text in COMPUTATIONS.items() if kind in present}
    handles = [Patch(color=_COLOURS[kind], label=f"{kind} {text}") for kind, text in labels.items()]
    handles.append(Patch(color=_IDLE, label="bubble"))
    figure.legend(
        handles=handles, loc="upper right", ncols=len(handles), frameon=False, labelcolor=_INK, columnspacing=1.2
    )


def _tint(colour: str, towards_white: float) -> tuple[float, ...]:
    from matplotlib.colors import to_rgb

    return tuple(part + (1 - part) * towards_white for part in to_rgb(colour))
