"""Figures in words."""

from __future__ import annotations

__all__ = ["count", "gigabytes", "seconds"]


def gigabytes(number: float) -> str:
    """Bytes in decimal units, as the ZeRO paper and device makers count them."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.3g} {unit}" if abs(number) < 1000 * size else f"{number / size:,.0f} {unit}"
    return f"{number:.0f} bytes"


def seconds(number: float) -> str:
    """A time, in the unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if number >= size:
            return f"{number / size:.3g} {unit}" if number < 1000 * size else f"{number / size:,.0f} {unit}"
    return f"{number * 1e6:.3g} us"


def count(number: float) -> str:
    """A large number."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"
