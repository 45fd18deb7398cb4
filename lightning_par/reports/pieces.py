"""What pages are made of, as plain data: figures are worked out here, and only shown by the templates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Bar", "BarChart", "Cell", "Curve", "CurveChart", "Fact", "Line", "Segment", "Table"]

_MOST_BEYOND = 2.5
"""How many times as long as the furthest line a bar is drawn at most; what goes beyond is cut off, and says so."""


@dataclass(frozen=True)
class Segment:
    """A part of a bar.

    Attributes:
        name: What it is; one name has one colour on a page.
        value: In the chart's unit.
        text: The value for people.
        place: ``"device"``, or another place, which is hatched.
    """

    name: str
    value: float
    text: str
    place: str = "device"

    @property
    def title(self) -> str:
        """What the legend calls it."""
        return self.name if self.place == "device" else f"{self.name}, {self.place}"


@dataclass(frozen=True)
class Bar:
    """Segments one after the other.

    Attributes:
        label: Whose bar it is.
        segments: Its parts; those of no size are not drawn.
        text: The sum for people.
        kind: ``"best"``, ``"bad"`` or empty.
        below: Thinner bars below the same label, such as those of other ranks or a prediction.
    """

    label: str
    segments: tuple[Segment, ...]
    text: str
    kind: str = ""
    below: tuple[Bar, ...] = ()

    @property
    def total(self) -> float:
        """Sum of the parts."""
        return sum(segment.value for segment in self.segments)

    @property
    def with_below(self) -> tuple[Bar, ...]:
        """Itself and the thinner ones."""
        return (self, *self.below)


@dataclass(frozen=True)
class Line:
    """A line across all bars, such as a device's memory: where, what (left out on narrow screens), and how much."""

    value: float
    name: str
    text: str


@dataclass(frozen=True)
class BarChart:
    """Bars on one scale.

    Attributes:
        bars: From top to bottom.
        lines: Across them.
        caption: A sentence below.
        title: A heading of its own, empty where the section's serves.
        alike: Whether bars below others are of their kind, such as other ranks, and as thick.
    """

    bars: tuple[Bar, ...]
    lines: tuple[Line, ...] = ()
    caption: str = ""
    title: str = ""
    alike: bool = False

    @property
    def scale(self) -> float:
        """The value at the right end."""
        longest = max((one.total for bar in self.bars for one in bar.with_below), default=0.0)
        if not self.lines:
            return longest or 1.0
        furthest = max(line.value for line in self.lines)
        return max(1.04 * furthest, min(longest, _MOST_BEYOND * furthest))

    def percent(self, value: float) -> float:
        """Where a value lies, from 0 on the left to 100."""
        return 100 * value / self.scale

    def is_cut(self, bar: Bar) -> bool:
        """Whether a bar goes on beyond the right end."""
        return bar.total > 1.001 * self.scale

    @property
    def legend(self) -> list[Segment]:
        """A segment of each name and place that is drawn, in the order of the parts."""
        segments = [segment for bar in self.bars for one in bar.with_below for segment in one.segments]
        order = dict.fromkeys(segment.title for segment in segments)
        drawn = {segment.title: segment for segment in segments if segment.value > 0}
        return [drawn[title] for title in order if title in drawn]


@dataclass(frozen=True)
class Fact:
    """A name and a figure in words."""

    name: str
    value: str


@dataclass(frozen=True)
class Cell:
    """An entry of a table; ``style`` is ``"number"``, ``"wide"`` (sentences) or empty."""

    text: str
    style: str = ""


@dataclass(frozen=True)
class Table:
    """Rows below named columns.

    Attributes:
        columns: Their names.
        rows: Cells by row.
        kinds: A row's ``"best"`` or ``"bad"`` or nothing, where any is set.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    kinds: Sequence[str] = ()

    def kind_of(self, index: int) -> str:
        """How a row stands out."""
        return self.kinds[index] if index < len(self.kinds) else ""


@dataclass(frozen=True)
class Curve:
    """Points ``(step, value)`` of one metric of one job."""

    name: str
    points: Sequence[tuple[int, float]]


@dataclass(frozen=True)
class CurveChart:
    """Curves over one axis.

    Attributes:
        curves: To be drawn over each other.
        title: What the values are.
    """

    curves: Sequence[Curve] = field(default_factory=tuple)
    title: str = ""

    def aligned(self) -> list[list[float | None]]:
        """The x values of all curves, then each curve's values there: how uPlot takes them."""
        steps = sorted({step for curve in self.curves for step, _ in curve.points})
        by_step = [dict(curve.points) for curve in self.curves]
        return [list(map(float, steps)), *([points.get(step) for step in steps] for points in by_step)]

    @property
    def names(self) -> list[str]:
        """Of the curves, in order."""
        return [curve.name for curve in self.curves]
