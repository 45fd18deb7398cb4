"""Activations and work by formulas, for modules whose step can't be traced.

They take the module for a transformer: of 16-bit activations 34sbh bytes wait in a block, or sbh(10 + 24/t) under a
tensor axis of t ranks (Korthikanti et al., arXiv 2205.05198, with fused attention). A forward takes 2 operations for
each parameter and token and a backward twice that (Kaplan et al., arXiv 2001.08361), attention 4sh more for each token.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from lightning_par.planner.profile import Line, Profile, Section, Work

__all__ = ["rough_activity"]

_OPERATORS = 40
"""Launched by the forward of a block, about (counted on GPTs)."""
_PASSES = 3
"""How often what is kept is read or written by elementwise operators, about."""
_COSTLY = 20 / 34
"""Share of a block's activations that products and attention make: q, k, v, the mix, o, down (a hidden state each), up
(four of them)."""


def rough_activity(profile: Profile, tokens: int, size: int, itemsize: int) -> Profile:
    """Fill a profile that knows parameters only.

    Args:
        profile: Sections with their parameters.
        tokens: Tokens of a sample.
        size: The tensor-parallel degree.
        itemsize: Bytes of an activation.
    """
    width = _width(profile)
    kinds = tuple(_block(kind, width, tokens, size, itemsize) for kind in profile.kinds)
    if not kinds:
        return replace(profile, before=_whole(profile.before, tokens, itemsize), source="formulas")
    hidden = Line(0.0, float(tokens * width * itemsize))
    before = replace(profile.before, kept=hidden, forward_peak=hidden, backward_peak=_own(profile.before))
    after = _head(profile.after, tokens, size, itemsize)
    return replace(profile, before=before, kinds=kinds, after=after, source="formulas")


def _width(profile: Profile) -> int:
    """Size of the hidden state: the most common input size of a block's matrices."""
    sizes: Counter[int] = Counter()
    for shape in (shape for kind in profile.kinds for shape in kind.shapes if len(shape.size) > 1):
        sizes[shape.size[-1]] += shape.count
    return sizes.most_common(1)[0][0] if sizes else 1


def _block(kind: Section, width: int, tokens: int, size: int, itemsize: int) -> Section:
    hidden = tokens * width * itemsize
    kept = hidden * (10 + 24 / size) / 2
    flops = 2.0 * kind.numel * tokens + 4.0 * tokens**2 * width / size
    weights = float(kind.numel * itemsize)
    summed = Line(0.0, 4.0 * hidden) if size > 1 else Line()
    forward = Work(
        flops=Line(0.0, flops),
        product_bytes=Line(weights, kept * _COSTLY),
        other_bytes=Line(0.0, kept * _PASSES),
        operators=_OPERATORS,
        tensor_bytes=summed,
        tensor_calls=2 if size > 1 else 0,
    )
    return replace(
        kind,
        kept=Line(0.0, kept),
        costly=Line(0.0, kept * _COSTLY),
        output=Line(0.0, float(hidden)),
        forward_peak=Line(0.0, kept * 1.1),
        backward_peak=Line(0.0, kept / 4) + _own(kind),
        forward=forward,
        backward=_backward(forward),
    )


def _head(after: Section, tokens: int, size: int, itemsize: int) -> Section:
    """The last norm, the head, and a loss in float32 over its outputs."""
    outputs = max((shape.size[0] for shape in after.shapes if len(shape.size) > 1), default=0) * size
    logits = float(tokens * outputs)
    forward = Work(
        flops=Line(0.0, 2.0 * after.numel * tokens),
        product_bytes=Line(after.numel * itemsize, logits * itemsize),
        other_bytes=Line(0.0, 5 * 4 * logits),
        operators=8,
    )
    return replace(
        after,
        kept=Line(0.0, logits * (itemsize + 4)),
        forward_peak=Line(0.0, logits * (itemsize + 8)),
        backward_peak=Line(0.0, logits * 8) + _own(after),
        forward=forward,
        backward=_backward(forward),
    )


def _whole(section: Section, tokens: int, itemsize: int) -> Section:
    """A module without blocks: each matrix is used once for each token and keeps its output."""
    outputs = sum(s.size[0] * s.count for s in section.shapes if len(s.size) > 1)
    kept = float(2 * tokens * outputs * itemsize)
    forward = Work(
        flops=Line(0.0, 2.0 * section.numel * tokens),
        product_bytes=Line(section.numel * itemsize, kept),
        other_bytes=Line(0.0, kept * _PASSES),
        operators=4 * sum(shape.count for shape in section.shapes),
    )
    peak = Line(0.0, kept / 4) + _own(section)
    return replace(
        section,
        kept=Line(0.0, kept),
        forward_peak=Line(0.0, kept),
        backward_peak=peak,
        forward=forward,
        backward=_backward(forward),
    )


def _own(section: Section) -> Line:
    """Gradients of a section's parameters."""
    return Line(float(sum(shape.numel * shape.itemsize for shape in section.shapes if shape.trains)))


def _backward(forward: Work) -> Work:
    """Twice the forward: gradients of inputs and of weights."""
    return Work(
        flops=forward.flops * 2,
        product_bytes=forward.product_bytes * 2,
        other_bytes=forward.other_bytes * 1.5,
        operators=forward.operators * 1.3,
        tensor_bytes=forward.tensor_bytes,
        tensor_calls=forward.tensor_calls,
    )
