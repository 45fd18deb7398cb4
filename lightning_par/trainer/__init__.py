"""The Lightning Trainer adapter: strategies over the engine, and nothing of a mechanism."""

from lightning_par.trainer.auto import AutoStrategy
from lightning_par.trainer.presets import DPStrategy, PPStrategy, TPStrategy, ZeROStrategy
from lightning_par.trainer.strategy import HybridStrategy

__all__ = ["AutoStrategy", "DPStrategy", "HybridStrategy", "PPStrategy", "TPStrategy", "ZeROStrategy"]
