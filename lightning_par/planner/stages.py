"""What each rank of a pipeline holds under a candidate: by the functions that the engine itself splits with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from lightning_par.pipeline_parallel.formulas import Case, published
from lightning_par.pipeline_parallel.grid import build_grid
from lightning_par.pipeline_parallel.schedules import SCHEDULES, stage_indices
from lightning_par.pipeline_parallel.simulate import peak_activations, simulate
from lightning_par.pipeline_parallel.split import split_evenly_by_cost
from lightning_par.planner.choice import Candidate
from lightning_par.planner.profile import Profile, Section, Shape, Unit

__all__ = ["Held", "bubble_units", "held_by", "in_flight", "ranges_of"]

_SMALL = 2048
"""Actions of a grid that is simulated where no formula holds; larger ones are taken to be alike for each round."""


@dataclass(frozen=True)
class Held:
    """What one rank of a pipeline computes and keeps.

    Attributes:
        rank: Its index on the pipeline axis.
        kinds: Kinds of block and how many of each, in the order of the model.
        before: What comes before the blocks, if the first stage is here.
        after: What comes after them, if the last one is.
        everywhere: Parameters that every stage holds.
        tied: Parameters that ``before`` and ``after`` share, if both are here; they count once.
        trees: Stages on the rank; each is a root of its own.
    """

    rank: int
    kinds: tuple[tuple[Section, int], ...]
    before: Section | None
    after: Section | None
    everywhere: tuple[Shape, ...] = ()
    tied: tuple[Shape, ...] = ()
    trees: int = 1

    @property
    def num_blocks(self) -> int:
        """Blocks of all kinds."""
        return sum(count for _, count in self.kinds)

    def sections(self) -> Iterator[tuple[Section, int]]:
        """Sections in the order of a forward, and how often each comes."""
        if self.before is not None:
            yield self.before, 1
        yield from self.kinds
        if self.after is not None:
            yield self.after, 1

    def units(self) -> Iterator[tuple[Unit, int, bool]]:
        """Units, how many there are, and whether they are (part of) the root."""
        for section, count in self.sections():
            for unit in section.units:
                yield unit, count, not unit.name
        if self.everywhere:
            yield Unit("", self.everywhere), self.trees, True

    def shapes(self) -> Iterator[tuple[Shape, int]]:
        """Parameters and how many of each; those that two sections share come once more with a count of -1."""
        for unit, count, _ in self.units():
            for shape in unit.shapes:
                yield shape, count
        for shape in self.tied:
            yield shape, -1


def ranges_of(profile: Profile, candidate: Candidate) -> list[range]:
    """The blocks of each stage, as the engine splits them.

    Raises:
        ValueError: If there are fewer blocks than stages.
    """
    if candidate.layout.pp == 1:
        return [range(profile.num_blocks)]
    return _split(
        profile.block_costs,
        profile.cost_before,
        profile.cost_after,
        candidate.layout.pp * candidate.num_virtual_stages,
    )


@lru_cache(maxsize=512)
def _split(costs: tuple[float, ...], before: float, after: float, stages: int) -> list[range]:
    return split_evenly_by_cost(costs, before, after, stages)


def held_by(profile: Profile, candidate: Candidate, rank: int) -> Held:
    """What a rank of the pipeline holds."""
    ranges = ranges_of(profile, candidate)
    if candidate.layout.pp == 1:
        local = [0]
    else:
        schedule = SCHEDULES[candidate.schedule]
        local = stage_indices(schedule, rank, candidate.layout.pp, candidate.num_virtual_stages)
    blocks = [block for stage in local for block in ranges[stage]]
    is_first, is_last = 0 in local, len(ranges) - 1 in local
    return Held(
        rank=rank,
        kinds=tuple(profile.kinds_in(blocks)),
        before=profile.before if is_first else None,
        after=profile.after if is_last else None,
        everywhere=profile.everywhere,
        tied=profile.tied if is_first and is_last else (),
        trees=len(local),
    )


def in_flight(candidate: Candidate, rank: int) -> float:
    """Most micro-batches that a rank keeps activations of, each with all of the rank's blocks.

    1F1B keeps ``min(m, p - rank)``; interleaved ``(v-1) p + 2(p-rank) - 1`` of a stage each, as its warm-up is longer
    by two for each rank towards the first (arXiv 2104.04473); the others as the schedule's grid has it.
    """
    p, m, v = candidate.layout.pp, candidate.num_microbatches, candidate.num_virtual_stages
    if p == 1:
        return 1.0
    if candidate.schedule == "1f1b":
        return float(min(m, p - rank))
    if candidate.schedule == "interleaved_1f1b" and m >= p:
        return min(m * v, (v - 1) * Case(p, m, v).per_round + 2 * (p - rank) - 1) / v
    return _peak(candidate.schedule, p, m, v) / v


@lru_cache(maxsize=4096)
def _peak(schedule: str, p: int, m: int, v: int) -> float:
    """Most stages times micro-batches that the first rank keeps."""
    case = Case(p, m, v)
    if (formulas := published(SCHEDULES[schedule], case)) is not None:
        return float(formulas.peak_activations(case))
    if p * m * v > _SMALL:
        return float(m * v)  # no schedule keeps more
    return float(peak_activations(build_grid(SCHEDULES[schedule], p, m, v))[0])


@lru_cache(maxsize=4096)
def bubble_units(schedule: str, p: int, m: int, v: int) -> float:
    """Time that a rank idles, in forwards of one stage of one micro-batch where a backward takes two.

    By the published formula where it holds for torch's schedule, else by simulating that.
    """
    if p == 1:
        return 0.0
    case = Case(p, m, v)
    if (formulas := published(SCHEDULES[schedule], case)) is not None:
        return float(formulas.bubble(case))
    if p * m * v > _SMALL:
        return float((p - 1) * 3)
    return max(simulate(build_grid(SCHEDULES[schedule], p, m, v)).bubble_time)
