"""The fullest moment of a step: what is alive as activations go and gradients come, section by section."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_par.planner.choice import Candidate
from lightning_par.planner.profile import Section
from lightning_par.planner.sharding import Sharding, States
from lightning_par.planner.stages import Held, in_flight

__all__ = ["Moment", "fullest_moment", "hidden_bytes"]


@dataclass(frozen=True)
class Moment:
    """A moment of a step.

    Attributes:
        name: When, in words.
        activations: Bytes that wait for their backward, and what runs needs.
        gradients: Bytes of gradients.
        communication: Bytes of buffers that units are gathered and reduced in.
    """

    name: str
    activations: float
    gradients: int
    communication: int = 0

    @property
    def total(self) -> float:
        """Bytes of all."""
        return self.activations + self.gradients + self.communication


def fullest_moment(
    candidate: Candidate, held: Held, sharding: Sharding, states: States, buffers: tuple[int, int] = (0, 0)
) -> Moment:
    """The moment of most bytes of one rank's step.

    Args:
        candidate: How it is laid out.
        held: What the rank holds.
        sharding: How its states are spread.
        states: Their bytes.
        buffers: Bytes in which a block, and the root, are gathered and reduced.
    """
    return max(_Step(candidate, held, sharding, states, buffers).moments(), key=lambda moment: moment.total)


def hidden_bytes(held: Held, candidate: Candidate) -> float:
    """Bytes of one micro-batch's hidden state."""
    return max((kind.output.at(candidate.micro_batch_size) for kind, _ in held.kinds), default=0.0)


class _Step:
    """One rank's step."""

    def __init__(
        self, candidate: Candidate, held: Held, sharding: Sharding, states: States, buffers: tuple[int, int]
    ) -> None:
        self._block_buffers, self._root_buffers = buffers
        self._candidate, self._held, self._sharding, self._states = candidate, held, sharding, states
        self._samples = candidate.micro_batch_size
        self._sections = list(held.sections())
        self._kept = [self._waits(section) * count for section, count in self._sections]
        stages_received = held.trees - (held.before is not None)
        self._received = hidden_bytes(held, candidate) * stages_received
        self._whole = sum(sharding.gradient(shape) * count for shape, count in held.shapes() if shape.trains)

    def moments(self) -> Iterator[Moment]:
        """Those that may be the fullest."""
        several = self._candidate.num_microbatches > 1
        flying = in_flight(self._candidate, self._held.rank)
        # Lightning empties the last step's gradients after the first forward. A pipeline's schedule has then run all
        # of its backwards, so they are set aside for that long.
        earlier = self._states.gradients
        aside = earlier if self._candidate.layout.pp > 1 else 0
        buckets = self._whole if self._sharding.replicates_whole else 0
        yield self._end_of_forward(flying, max(buckets, self._whole + aside if several else earlier))
        yield from self._backward(flying, buckets or aside, grows=not buckets)
        if several:
            flying = min(flying, self._candidate.num_microbatches - 1)
            yield from self._backward(flying, self._whole + aside * (not buckets), grows=False)
        yield self._optimizer_step()

    def _end_of_forward(self, flying: float, gradients: int) -> Moment:
        if not self._sections:
            return Moment("end of forward", 0.0, gradients)
        section, _ = self._sections[-1]
        peak = section.forward_peak.at(self._samples) - section.kept.at(self._samples)
        if self._candidate.num_microbatches > 1 and self._candidate.layout.pp > 1:
            gradients = min(gradients, self._states.gradients)  # the first forwards come before any backward
        return Moment(f"end of forward ({section.name})", self._alive(flying) + max(0.0, peak), gradients)

    def _backward(self, flying: float, gradients: int, grows: bool) -> Iterator[Moment]:
        """Backward of one micro-batch while so many are in flight; gradients grow unless they are all there."""
        alive = self._alive(flying)
        for (section, count), own in zip(reversed(self._sections), reversed(self._kept), strict=True):
            again = section.kept.at(self._samples) - own / max(1, count) if section.blocks else 0.0
            peak = section.backward_peak.at(self._samples) + max(0.0, again)
            name = f"backward of {section.name}"
            buffers = self._block_buffers if section.blocks else 0
            yield Moment(name, alive + peak, gradients, buffers)
            new = sum(self._sharding.gradient(shape) for shape in section.shapes if shape.trains) if grows else 0
            if section.blocks and grows:
                # The last of a run of like blocks: the others' activations are gone, their gradients there.
                left = alive - own * (count - 1) / count
                yield Moment(name, left + peak, gradients + new * (count - 1), buffers)
            alive -= own
            gradients += new * count
        yield Moment("reduction of the root", alive, gradients, self._root_buffers)

    def _optimizer_step(self) -> Moment:
        trained = [shape for shape, _ in self._held.shapes() if shape.trains]
        work_space = max((shape.numel * shape.itemsize for shape in trained), default=0) // self._sharding.shards
        is_whole = self._sharding.replicates_whole or not self._sharding.wraps
        return Moment("optimizer step", float(work_space), self._whole if is_whole else self._states.gradients)

    def _alive(self, flying: float) -> float:
        return flying * (sum(self._kept) + self._received)

    def _waits(self, section: Section) -> float:
        """Bytes that a section keeps for its backward, of one micro-batch."""
        choice, kept = self._candidate.activation_checkpointing, section.kept.at(self._samples)
        if not section.blocks or not choice:
            return kept
        cheaper = section.output + section.costly if choice == "selective" else section.output
        return min(cheaper.at(self._samples), kept)
