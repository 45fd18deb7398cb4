"""The Fabric adapter: the strategies of :mod:`lightning_par`, by the same names, for ``Fabric(strategy=...)``.

Importing it registers the names ``par_dp``, ``par_ps``, ``par_tp``, ``par_pp``, ``par_zero1`` to ``par_zero3`` and
``par_zero1_offload`` to ``par_zero3_offload`` with Fabric. One loop runs under every layout::

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

from lightning_par.fabric.presets import DPStrategy, PPStrategy, TPStrategy, ZeROStrategy
from lightning_par.fabric.strategy import HybridStrategy

__all__ = ["DPStrategy", "HybridStrategy", "PPStrategy", "TPStrategy", "ZeROStrategy"]

for _strategy in (DPStrategy, PPStrategy, TPStrategy, ZeROStrategy):
    _strategy.register_strategies(STRATEGY_REGISTRY)
