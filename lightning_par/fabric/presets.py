"""Presets of :class:`~lightning_par.fabric.strategy.HybridStrategy`: the common layouts by name."""

from __future__ import annotations

from lightning_par.fabric.strategy import HybridStrategy
from lightning_par.strategies.presets import DataParallel, PipelineParallel, TensorParallel, ZeRO

__all__ = ["DPStrategy", "PPStrategy", "TPStrategy", "ZeROStrategy"]


class DPStrategy(DataParallel, HybridStrategy):
    __doc__ = DataParallel.__doc__


class TPStrategy(TensorParallel, HybridStrategy):
    __doc__ = TensorParallel.__doc__


class PPStrategy(PipelineParallel, HybridStrategy):
    __doc__ = PipelineParallel.__doc__


class ZeROStrategy(ZeRO, HybridStrategy):
    __doc__ = ZeRO.__doc__
