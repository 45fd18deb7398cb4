"""The Fabric adapter: the strategies of :mod:`lightning_par`, by the same names, for ``Fabric(strategy=...)``.

Importing it registers the names ``par_dp``, ``par_ps``, ``par_tp``, ``par_pp``, ``par_zero1`` to ``par_zero3``,
``par_zero1_offload`` to ``par_zero3_offload`` and ``par_auto`` with Fabric. One loop runs under every layout::

    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    for batch in loader:
        loss = fabric.strategy.step(model, batch, step_fn)  # step_fn(module, batch) -> loss, a function of yours
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
"""

from lightning.fabric.strategies import STRATEGY_REGISTRY

from lightning_par.fabric.auto import AutoStrategy
from lightning_par.fabric.presets import DPStrategy, PPStrategy, TPStrategy, ZeROStrategy
from lightning_par.fabric.strategy import HybridStrategy

__all__ = ["AutoStrategy", "DPStrategy", "HybridStrategy", "PPStrategy", "TPStrategy", "ZeROStrategy"]

for _strategy in (AutoStrategy, DPStrategy, PPStrategy, TPStrategy, ZeROStrategy):
    _strategy.register_strategies(STRATEGY_REGISTRY)
