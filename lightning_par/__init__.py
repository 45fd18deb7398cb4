"""Train an ordinary LightningModule in parallel by changing one argument.

Importing the package registers the names ``par_dp``, ``par_ps``, ``par_tp``, ``par_pp``, ``par_zero1`` to
``par_zero3``, ``par_zero1_offload`` to ``par_zero3_offload`` and ``par_auto`` for ``Trainer(strategy=...)`` and
``Fabric(strategy=...)``. Those of Fabric are classes of their own, by the same names, in :mod:`lightning_par.fabric`.
"""

from lightning.pytorch.strategies import StrategyRegistry

import lightning_par.fabric  # noqa: F401  registers with Fabric
from lightning_par.layout import ParallelLayout
from lightning_par.offload import OffloadPolicy
from lightning_par.trainer import AutoStrategy, DPStrategy, HybridStrategy, PPStrategy, TPStrategy, ZeROStrategy

__all__ = [
    "AutoStrategy",
    "DPStrategy",
    "HybridStrategy",
    "OffloadPolicy",
    "PPStrategy",
    "ParallelLayout",
    "TPStrategy",
    "ZeROStrategy",
]

__version__ = "0.1.0"

for _strategy in (AutoStrategy, DPStrategy, PPStrategy, TPStrategy, ZeROStrategy):
    _strategy.register_strategies(StrategyRegistry)
