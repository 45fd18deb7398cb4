"""How the ranks of the data axis keep one model: the words of the strategy's arguments."""

from __future__ import annotations

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.optim import LBFGS, Optimizer

from lightning_par.data_parallel import ServerOptions

__all__ = ["ALL_REDUCE", "PARAMETER_SERVER", "check_dedicated", "check_steps_on_server", "check_sync"]

ALL_REDUCE = "all_reduce"
PARAMETER_SERVER = "parameter_server"


def check_sync(sync: str, server_rank: int, dedicated: bool, zero_stage: int) -> ServerOptions | None:
    """The server of the data axis, ``None`` for an all-reduce.

    Raises:
        ValueError: If the word is unknown, or an argument does not go with it.
    """
    if sync == PARAMETER_SERVER:
        if zero_stage:
            raise ValueError(
                f"sync={PARAMETER_SERVER!r} keeps whole parameters on every rank, but zero_stage={zero_stage} shards "
                "them. Leave one of the two out."
            )
        return ServerOptions(server_rank, dedicated)
    if sync != ALL_REDUCE:
        raise ValueError(f"sync={sync!r} is unknown. Choose {ALL_REDUCE!r} or {PARAMETER_SERVER!r}.")
    if server_rank != 0 or dedicated:
        raise ValueError(
            f"server_rank={server_rank!r} and dedicated={dedicated!r} describe a server, and sync={ALL_REDUCE!r} has "
            f"none. Set sync={PARAMETER_SERVER!r}, or leave them out."
        )
    return None


def check_dedicated(module: nn.Module, pipeline_parallel_size: int) -> None:
    """Check what a server can't do that runs no step itself.

    Raises:
        MisconfigurationException: With the way out.
    """
    if not getattr(module, "automatic_optimization", True):
        raise MisconfigurationException(
            f"{type(module).__name__} optimizes by hand (automatic_optimization=False), inside of the step, which a "
            "dedicated parameter server does not run. Use dedicated=False, or automatic optimization."
        )
    if pipeline_parallel_size > 1:
        raise MisconfigurationException(
            f"dedicated=True does not go with pipeline_parallel_size={pipeline_parallel_size}. Use dedicated=False."
        )


def check_steps_on_server(optimizer: Optimizer) -> None:
    """Check that an optimizer steps once for each gradient.

    Raises:
        MisconfigurationException: With the way out.
    """
    if isinstance(optimizer, LBFGS):
        raise MisconfigurationException(
            "LBFGS asks for the loss several times a step, as often as its gradients tell, and workers of a parameter "
            'server have none. Use another optimizer, or sync="all_reduce".'
        )
