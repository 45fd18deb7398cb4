"""Optimizers that were made before their module was laid out: the same objects, pointed at this rank's parameters."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from lightning_par.engine import ParallelEngine
from lightning_par.strategies.staged_checkpoint import names_of_parameters

__all__ = ["Repointing", "owner_of"]


class Repointing:
    """What an optimizer had of a module, to be found again once the module is laid out.

    Args:
        optimizer: The user's. Its groups are changed in place, so that schedulers and whoever holds them go on.
        module: The whole module.
        engines: Engines of modules that were set up earlier, whose parameters the optimizer may hold, too.

    Raises:
        ValueError: If the optimizer has a parameter of none of them.

    Attributes:
        names: Names of the module's parameters in each group.
        earlier: The state that the optimizer had, of whole parameters.
    """

    def __init__(self, optimizer: Optimizer, module: nn.Module, engines: Sequence[ParallelEngine]) -> None:
        self.optimizer = optimizer
        known = {parameter: name for name, parameter in module.named_parameters()}
        others = {parameter for engine in engines for parameter in engine.parameters()}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter not in known and parameter not in others:
                    raise ValueError(
                        f"{type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} in group "
                        f"{number} that is not one of {type(module).__name__}'s, so nothing would keep it equal on all "
                        "ranks. Register it in the module, and make the optimizer from the module that is set up."
                    )
        self.names = [[known[p] for p in group["params"] if p in known] for group in optimizer.param_groups]
        self._places = [[known.get(p, p) for p in group["params"]] for group in optimizer.param_groups]
        self.earlier = optimizer.state_dict()

    def apply(self, engine: ParallelEngine) -> None:
        """Point the optimizer at the parameters of the module that this rank has now."""
        present = {name: parameter for parameter, name in names_of_parameters(engine).items()}
        for group, places in zip(self.optimizer.param_groups, self._places, strict=True):
            found = [present.get(place) if isinstance(place, str) else place for place in places]
            group["params"][:] = [parameter for parameter in found if parameter is not None]
        self.optimizer.state.clear()


def owner_of(optimizer: Optimizer, engines: Sequence[ParallelEngine]) -> list[ParallelEngine]:
    """The engines whose parameters an optimizer has.

    Raises:
        RuntimeError: If it has one of none, as one made before the module was set up has.
    """
    held = [(engine, set(engine.parameters())) for engine in engines]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(not any(parameter in own for _, own in held) for parameter in parameters):
        raise RuntimeError(
            f"{type(optimizer).__name__} has parameters of a module that is not set up, or as they were before. Set up "
            "both together by model, optimizer = fabric.setup(model, optimizer), or make the optimizer from the "
            "parameters of what fabric.setup_module returned."
        )
    return [engine for engine, own in held if any(parameter in own for parameter in parameters)]
